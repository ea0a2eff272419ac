"""The report of a load test as one HTML page: no script, no network, light and dark.

`page.html` lays out the summary, what was run and the pictures. Everything that came from outside
(names, errors, commands) is escaped by jinja2; numbers become text for people here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2

from loadtest.slow import seconds

_PARTS = {
    "late": "sent late", "queue": "queue", "load": "load", "compute": "compute",
    "way": "between client and router", "unknown": "not split",
}  # fmt: skip
_RUN_KEYS = (
    "command", "workload", "url", "model", "machine", "start", "end", "seed", "max_streams",
)  # fmt: skip


def page(
    run: Mapping[str, Any], summary: Mapping[str, Any], pictures: Mapping[str, str], note: str
) -> str:
    """The whole page. pictures: SVG by name; note: what is special about this run, or nothing."""
    headline, kind = _headline(summary)
    return _template().render(
        run={"workload": run.get("workload"), "url": run.get("url")},
        summary=summary,
        pictures={name: pictures.get(name) for name in _PICTURES},
        note=note,
        headline=headline,
        kind=kind,
        cards=_cards(summary),
        facts=list(_facts(run, summary)),
        findings=list(_findings(summary)),
        parts=_PARTS,
    )


_PICTURES = ("cdf", "time", "rates", "nodes", "tenants", "ratio")


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    texts: dict[str, Callable[..., str]] = {
        "seconds": _seconds, "percent": percent, "number": _number, "count": _count,
        "split": _split,
    }  # fmt: skip
    environment.filters.update(texts)
    return environment.get_template("page.html")


def _headline(summary: Mapping[str, Any]) -> tuple[str, str]:
    """What came of it, and whether that is good or bad (or nothing)."""
    slo, requests = summary["slo"], summary["requests"]
    if not requests:
        return "No request was made", "bad"
    if slo["met"] is None:
        return f"{requests:,} requests, no objective", ""
    if slo["passed"] is None:
        return f"{requests:,} requests; {own_objective(slo)}", ""
    word, kind = ("met", "good") if slo["passed"] else ("missed", "bad")
    of = f"{percent(slo['met'])} of {requests:,} requests within it"
    return f"SLO {word}: {of}, {percent(slo['share'])} asked", kind


def _cards(summary: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return (
        ("requests", _count(summary["requests"])),
        ("failed", _count(summary["failed"])),
        ("offered", _rate(summary["rate_rps"])),
        ("goodput", _rate(summary["goodput_rps"])),
        ("TTFT p50 / p99", _pair(summary["ttft_s"])),
        ("inter-token p50 / p99", _pair(summary["itl_s"])),
        ("end-to-end p50 / p99", _pair(summary["e2e_s"])),
        ("output tokens/s", _number(summary["output_tokens_per_s"])),
    )


def _facts(run: Mapping[str, Any], summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What was run, by name."""
    for key in _RUN_KEYS:
        value = run.get(key)
        if value is not None:
            text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            yield key.replace("_", " "), text
    if summary["paced_requests"]:
        paced = [str(row.get("node")) for row in run.get("nodes") or () if row.get("paced")]
        names = ", ".join(paced) or "nodes"
        yield "paced", f"emulated: {names} spend time as the hardware they are paced as"


def _findings(summary: Mapping[str, Any]) -> Iterator[str]:
    """Reuse, prediction and fairness, a sentence each."""
    cached, prediction = summary["cached_tokens"], summary["prediction"]
    expected = cached["expected_where_told"]
    if cached["told_requests"] and expected:
        yield (
            f"Cached tokens: {expected:,} expected with an unlimited cache, {cached['actual']:,} "
            f"found ({percent(cached['actual'] / expected)}): {cached['device']:,} on the device, "
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
            router = f"; by {percent(prediction['router_error']['p50'])} of what the router saw"
        yield (
            f"Predicted TTFT: off by {percent(error['p50'])} (median), {percent(error['p90'])} "
            f"(p90) of what the client saw, over {prediction['requests']:,} requests{router}."
        )
    if summary["jain"] is not None:
        yield f"Jain's index: {summary['jain']:.3f} ({summary['jain_of']})."


# -- text for people; a dash stands for what is not known -----------------------------------------


def own_objective(slo: Mapping[str, Any]) -> str:
    """How far an objective was met that nobody requested: the endpoint's own."""
    return f"{slo['basis']} objective: {percent(slo['met'])} met"


def percent(value: float | None) -> str:
    """A share."""
    return "–" if value is None else f"{100 * value:.1f} %"


def _seconds(value: float | None) -> str:
    return "–" if value is None else seconds(value)


def _pair(spread: Mapping[str, float | None]) -> str:
    """Median and 99th percentile, in seconds."""
    return f"{_seconds(spread['p50']).removesuffix(' s')} / {_seconds(spread['p99'])}"


def _split(row: Mapping[str, Any]) -> str:
    return " / ".join(_seconds(row[name]) for name in ("queue_s", "load_s", "compute_s"))


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{_number(value)} req/s"


def _number(value: float | None) -> str:
    """Three digits that mean something."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
