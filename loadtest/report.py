"""From a replay's folder to its report: `summary.json`, `records.parquet` and `report.html`.

Reads `run.json` and `records.jsonl`, which a run writes as it goes, so a run that was stopped or
killed has a report too, and so has one without a single request. Called by `kappa replay` at its
end, and by `kappa replay --report FOLDER`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from loadtest.figures import figures
from loadtest.journal import OPTIONS, RUN, JournalError, Records, file_errors, read_run, write_whole
from loadtest.page import page
from loadtest.slo import objective_of
from loadtest.table import Results, results_of

SUMMARY, PARQUET, REPORT = "summary.json", "records.parquet", "report.html"


def write_report(folder: Path) -> Path:
    """Write the three files into `folder`; returns the path of the page.

    Raises:
        JournalError: a file that cannot be read or written; names it, and the line.
    """
    folder = Path(folder)
    run = read_run(folder)
    try:
        objective = objective_of(run)
    except (ValueError, TypeError) as error:
        raise JournalError(f"{folder / RUN}: {error}") from None
    records = Records(folder)
    found = results_of(records, objective, is_closed=_is_closed(run))
    summary = figures(found)
    note = _note(run, summary, records.was_cut)
    result = {**summary, "note": note, "run": dict(run)}
    target = folder / REPORT
    with file_errors(folder, "the report cannot be written: "):
        part = folder / f".{PARQUET}.part"
        found.table.write_parquet(part)
        part.replace(folder / PARQUET)
        text = json.dumps(result, indent=1, allow_nan=False)
        write_whole(folder / SUMMARY, f"{text}\n".encode())
        write_whole(target, page(run, summary, pictures(found, summary), note).encode())
    return target


def _is_closed(run: Mapping[str, Any]) -> bool:
    """Whether sessions came when others had ended, so that arrivals have no rate of their own."""
    options = run.get(OPTIONS) or {}
    return options.get("closed") is not None or str(options.get("arrivals")).startswith("closed")


def pictures(found: Results, summary: Mapping[str, Any]) -> dict[str, str]:
    """Every picture of the report as SVG, by name; empty where there is nothing to show."""
    if not summary["requests"]:
        return {}
    # Costs a second to load: only for those who draw.
    from loadtest import plots

    return {
        "cdf": plots.latency_cdfs(found.table),
        "time": plots.ttft_over_time(found.table, summary["slo"]["ttft_limit_s_p50"]),
        "rates": plots.rates_over_time(found.table),
        "nodes": plots.ttft_by_owner(summary["nodes"], "node"),
        "tenants": plots.ttft_by_owner(summary["tenants"], "tenant"),
        "ratio": plots.ratio_by_node(found.table),
    }


def _note(run: Mapping[str, Any], summary: Mapping[str, Any], was_cut: bool) -> str:
    """What a reader must know before any figure."""
    notes: list[str] = []
    if not summary["requests"]:
        notes.append("No request has ended yet: the journal is empty.")
    elif run.get("interrupted"):
        notes.append("Partial: the run was stopped before its end.")
    elif "interrupted" in run and run.get("end") is None:
        notes.append("Partial: the run has not come to its end.")
    if was_cut:
        notes.append("The journal's last line was cut off and is left out.")
    held_back = (run.get("client") or {}).get("held_back")
    if held_back:
        notes.append(
            f"{held_back:,} requests were held back: the client had {run.get('max_streams')} "
            "streams open, its limit."
        )
    if summary["slo"]["met"] is not None and summary["slo"]["not_judged"]:
        notes.append(
            f"{summary['slo']['not_judged']:,} requests have no objective: the endpoint told too "
            "little of them."
        )
    late_s = summary["late_s"]["p99"]
    if late_s is not None and late_s > 0.1:
        notes.append(
            f"The client sent late: 1 % of the requests by {late_s:.2g} s or more. What the "
            "endpoint was offered is not quite what was asked for."
        )
    return " ".join(notes)


def slowest_lines(summary: Mapping[str, Any], most: int = 5) -> Iterable[str]:
    """The slowest requests as plain lines, for a terminal."""
    for row in summary["slowest"][:most]:
        yield f"{row['ttft_s']:.2f} s  {row['session']}, turn {row['turn']}: {row['why']}"
