"""From a replay's folder to its report: `summary.json`, `records.parquet` and `report.html`.

Reads what a run writes as it goes, so a run that was stopped or killed has a report too, and so has
one without a single request. The page has no script and needs no network: `page.html` lays out the
summary, what was run and the pictures; jinja2 escapes what came from outside (names, errors,
commands). Called by `kappa replay` at its end, and by `kappa replay --report FOLDER`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2

from loadtest.explain import seconds
from loadtest.figures import figures
from loadtest.journal import (
    OPTIONS,
    RUN,
    JournalError,
    file_errors,
    read_records,
    read_run,
    was_cut,
    write_whole,
)
from loadtest.results import PARTS, Results, objective_of, results_of

SUMMARY, PARQUET, REPORT = "summary.json", "records.parquet", "report.html"

Facts = Mapping[str, Any]

_LATE_S = 0.1
"""A client that sends a hundredth of its requests later than this did not offer the load."""
_PARTS = {
    "late": "sent late", "queue": "queue", "load": "load", "compute": "compute",
    "way": "between client and router", "unknown": "not split",
}  # fmt: skip
_RUN_KEYS = (
    "command", "workload", "url", "model", "machine", "start", "end", "seed", "max_streams",
)  # fmt: skip


def write_report(folder: Path) -> dict[str, Any]:
    """Write the three files into `folder`; returns the summary.

    Raises:
        JournalError: a file that cannot be read or written; names it, and the line.
    """
    run = read_run(folder)
    try:
        objective = objective_of(run)
    except (ValueError, TypeError) as error:
        raise JournalError(f"{folder / RUN}: {error}") from None
    is_cut, options = was_cut(folder), run.get(OPTIONS) or {}
    # Sessions that came when others had ended have no rate of their own.
    is_closed = options.get("closed") is not None
    is_closed = is_closed or str(options.get("arrivals")).startswith("closed")
    found = results_of(read_records(folder), objective, is_closed=is_closed)
    summary = figures(found)
    summary |= {"note": " ".join(_notes(run, summary, is_cut)), "run": run}
    with file_errors(folder, "the report cannot be written: "):
        part = folder / f".{PARQUET}.part"
        found.table.write_parquet(part)
        part.replace(folder / PARQUET)
        text = json.dumps(summary, indent=1, allow_nan=False)
        write_whole(folder / SUMMARY, f"{text}\n".encode())
        write_whole(folder / REPORT, _page(summary, drawn(found, summary)).encode())
    return summary


def drawn(found: Results, summary: Facts) -> dict[str, str]:
    """The pictures of the report as SVG, by name."""
    if not summary["requests"]:
        return {}
    # Costs a second to load: only for those who draw.
    from loadtest.plots import pictures

    return pictures(found.table, summary)


def _notes(run: Facts, summary: Facts, is_cut: bool) -> Iterator[str]:
    """What a reader must know before any figure."""
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


# -- the page -------------------------------------------------------------------------------------


def _page(summary: Facts, svg: Mapping[str, str]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    texts: dict[str, Callable[..., str]] = {
        "seconds": _seconds, "percent": _percent, "number": _number, "count": _count,
        "split": lambda row: " / ".join(_seconds(row[name]) for name in PARTS),
    }  # fmt: skip
    environment.filters.update(texts)
    headline, kind = _headline(summary)
    names = ("cdf", "time", "rates", "nodes", "tenants", "ratio")
    return environment.get_template("page.html").render(
        run={"workload": summary["run"].get("workload"), "url": summary["run"].get("url")},
        summary=summary,
        pictures={name: svg.get(name) for name in names},
        note=summary["note"],
        headline=headline,
        kind=kind,
        cards=_cards(summary),
        facts=list(_facts(summary)),
        findings=list(_findings(summary)),
        parts=_PARTS,
    )


def _headline(summary: Facts) -> tuple[str, str]:
    """What came of it, and whether that is good or bad (or nothing)."""
    slo, requests = summary["slo"], summary["requests"]
    if not requests:
        return "No request was made", "bad"
    if slo["met"] is None:
        return f"{requests:,} requests, no objective", ""
    if slo["passed"] is None:
        return f"{requests:,} requests; {own_objective(slo)}", ""
    word, kind = ("met", "good") if slo["passed"] else ("missed", "bad")
    of = f"{_percent(slo['met'])} of {requests:,} requests within it"
    return f"SLO {word}: {of}, {_percent(slo['share'])} required", kind


def own_objective(slo: Facts) -> str:
    """How far an objective was met that nobody requested: the endpoint's own."""
    return f"{slo['basis']} objective: {_percent(slo['met'])} met"


def _cards(summary: Facts) -> tuple[tuple[str, str], ...]:
    def median_and_p99(key: str) -> str:
        p50, p99 = (_seconds(summary[key][q]) for q in ("p50", "p99"))
        return f"{p50.removesuffix(' s')} / {p99}"

    def rate(key: str) -> str:
        return "–" if summary[key] is None else f"{_number(summary[key])} req/s"

    return (
        ("requests", _count(summary["requests"])),
        ("failed", _count(summary["failed"])),
        ("offered", rate("rate_rps")),
        ("goodput", rate("goodput_rps")),
        ("TTFT p50 / p99", median_and_p99("ttft_s")),
        ("inter-token p50 / p99", median_and_p99("itl_s")),
        ("end-to-end p50 / p99", median_and_p99("e2e_s")),
        ("output tokens/s", _number(summary["output_tokens_per_s"])),
    )


def _facts(summary: Facts) -> Iterator[tuple[str, str]]:
    """What was run, by name."""
    run = summary["run"]
    for key in _RUN_KEYS:
        value = run.get(key)
        if value is not None:
            text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            yield key.replace("_", " "), text
    if summary["paced_requests"]:
        paced = [str(row.get("node")) for row in run.get("nodes") or () if row.get("paced")]
        names = ", ".join(paced) or "nodes"
        yield "paced", f"emulated: {names} spend time as the hardware they are paced as"


def _findings(summary: Facts) -> Iterator[str]:
    """Reuse, prediction and fairness, a sentence each."""
    cached, prediction = summary["cached_tokens"], summary["prediction"]
    expected = cached["expected_where_told"]
    if cached["told_requests"] and expected:
        yield (
            f"Cached tokens: {expected:,} expected with an unlimited cache, {cached['actual']:,} "
            f"found ({_percent(cached['actual'] / expected)}): {cached['device']:,} on the device, "
            f"{cached['host']:,} loaded; reported of {cached['told_requests']:,} requests."
        )
    elif cached["expected"]:
        yield (
            f"Cached tokens: {cached['expected']:,} expected with an unlimited cache; the endpoint "
            "does not report what was found."
        )
    if prediction["requests"]:
        error = prediction["client_error"]
        router = ""
        if prediction["router_requests"]:
            router = f"; by {_percent(prediction['router_error']['p50'])} of what the router saw"
        yield (
            f"Predicted TTFT: off by {_percent(error['p50'])} (median), {_percent(error['p90'])} "
            f"(p90) of what the client saw, over {prediction['requests']:,} requests{router}."
        )
    if summary["jain"] is not None:
        yield f"Jain's index: {summary['jain']:.3f} ({summary['jain_of']})."


# Text for people; a dash stands for what is not known.


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _seconds(value: float | None) -> str:
    return "–" if value is None else seconds(value)


def _number(value: float | None) -> str:
    """Three digits that mean something."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
