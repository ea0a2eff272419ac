"""Writes a replay's report: `summary.json`, `records.parquet` and `report.html`.

Reads what a run writes as it goes, so a run that was stopped or killed has a report too, and so has
one without a single request. The page has no script and needs no network: `page.html` lays out the
summary, what was run and the pictures; jinja2 escapes what came from outside (names, errors,
commands). Called by `kappa replay` at its end, and by `kappa replay --report FOLDER`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import polars as pl

from kappa_loadtest import explain, run_folder
from kappa_loadtest.figures import figures
from kappa_loadtest.results import PARTS, objective_of, table_of

SUMMARY, PARQUET, REPORT = "summary.json", "records.parquet", "report.html"

Facts = Mapping[str, Any]

_LATE_S = 0.1
"""A client that sends 1 % of its requests later than this did not offer the load."""
_PICTURES = ("cdf", "time", "rates", "ratio")


def write_report(folder: Path) -> dict[str, Any]:
    """Write the three files into `folder`; returns the summary.

    Raises:
        run_folder.RunFolderError: a file that cannot be read or written; names it, and the line.
    """
    run = run_folder.read_run(folder)
    try:
        objective = objective_of(run)
    except (ValueError, TypeError) as error:
        raise run_folder.RunFolderError(f"{folder / run_folder.RUN}: {error}") from None
    is_cut, options = run_folder.was_cut(folder), run.get(run_folder.OPTIONS) or {}
    # Sessions that came when others had ended have no rate of their own.
    is_closed = options.get("closed") is not None
    is_closed = is_closed or str(options.get("arrivals")).startswith("closed")
    table = table_of(run_folder.read_records(folder), objective)
    summary = figures(table, objective, is_closed)
    summary |= {"note": " ".join(_notes(run, summary, is_cut)), "run": run}
    with run_folder.file_errors(folder, "the report cannot be written: "):
        part = folder / f".{PARQUET}.part"
        table.write_parquet(part)
        part.replace(folder / PARQUET)
        text = json.dumps(summary, indent=1, allow_nan=False)
        run_folder.write_whole(folder / SUMMARY, f"{text}\n".encode())
        run_folder.write_whole(folder / REPORT, _page(summary, drawn(table, summary)).encode())
    return summary


def drawn(table: pl.DataFrame, summary: Facts) -> dict[str, str]:
    """The pictures of the report as SVG, by name."""
    if not summary["requests"]:
        return {}
    # Costs a second to load: only for those who draw.
    from kappa_loadtest.plots import pictures

    return pictures(table, summary)


def _notes(run: Facts, summary: Facts, is_cut: bool) -> Iterator[str]:
    """Caveats about the run, for the head of the report."""
    if not summary["requests"]:
        yield "No request has ended yet: the journal is empty."
    elif run.get("interrupted"):
        yield "Partial: the run was stopped before its end."
    elif "interrupted" in run and run.get("end") is None:
        yield "Partial: the run has not come to its end."
    if is_cut:
        yield "The journal's last line was cut off and is left out."
    held_back = (run.get("client") or {}).get("held_back")
    if held_back:
        limit = f"{run.get('max_streams')} streams open, its limit"
        yield f"{held_back:,} requests were held back: the client had {limit}."
    slo = summary["slo"]
    if slo["met"] is not None and slo["not_judged"]:
        why = "the endpoint reported too little of them"
        yield f"{slo['not_judged']:,} requests have no objective: {why}."
    late_s = summary["late_s"]["p99"]
    if late_s is not None and late_s > _LATE_S:
        yield (
            f"The client sent late: 1 % of the requests by {late_s:.2g} s or more. What the "
            "endpoint was offered is not quite what was requested."
        )


def slowest_lines(summary: Facts, most: int = 5) -> Iterator[str]:
    """The slowest requests as plain lines, for a terminal."""
    for row in summary["slowest"][:most]:
        yield f"{row['ttft_s']:.2f} s  {row['session']}, turn {row['turn']}: {row['why']}"


def _page(summary: Facts, svg: Mapping[str, str]) -> str:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    strict: Any = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(loader=loader, autoescape=True, **strict)
    shown: dict[str, Callable[..., str]] = {
        "seconds": explain.seconds,
        "percent": lambda share: f"{100 * share:.1f} %",
        "number": _number,
        "count": lambda count: f"{count:,}",
    }
    for name, text in shown.items():
        environment.filters[name] = partial(_or_dash, text)
    environment.filters["split"] = lambda row: " / ".join(
        _or_dash(explain.seconds, row[name]) for name in PARTS
    )
    return environment.get_template("page.html").render(
        run=summary["run"],
        summary=summary,
        pictures={name: svg.get(name) for name in _PICTURES},
        parts={name: label for name, (_, label) in explain.PARTS.items()},
    )


def _or_dash(text: Callable[..., str], value: float | None, *unit: str) -> str:
    """A figure as text; a dash stands for None."""
    return "–" if value is None else text(value, *unit)


def _number(value: float, unit: str = "") -> str:
    """A number with three significant digits."""
    return (f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}") + unit
