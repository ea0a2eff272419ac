"""The report of a load test as one HTML page: no script, no network, light and dark.

Takes the summary, what was run and the pictures, and lays them out. Everything that came from
outside (names, errors, commands) is escaped here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from loadtest.page_parts import (
    CSS,
    count,
    figures,
    number,
    pair,
    percent,
    rate,
    section,
    some_seconds,
    table,
    unasked,
)
from loadtest.slow import seconds

_PARTS = ("late", "queue", "load", "compute", "way", "unknown")
_PART_NAMES = {
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
    body = "".join(
        (
            _headline(run, summary, note),
            _what_was_run(run, summary),
            _latencies(summary, pictures),
            section("Over time", figures(pictures, "time", "rates")),
            _owners(summary, pictures),
            _reuse(summary, pictures),
            _errors(summary),
            _slowest(summary),
            _slowest_tokens(summary),
            _reading(summary),
        )
    )
    title = f"Load test: {run.get('workload') or run.get('url') or 'unnamed'}"
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body>{body}</body></html>\n"
    )


def _headline(run: Mapping[str, Any], summary: Mapping[str, Any], note: str) -> str:
    slo, requests = summary["slo"], summary["requests"]
    if not requests:
        verdict, kind = "No request was made", "bad"
    elif slo["met"] is None:
        verdict, kind = f"{requests:,} requests, no objective", ""
    elif slo["passed"] is None:
        verdict, kind = f"{requests:,} requests; {unasked(slo)}", ""
    else:
        verdict = (
            f"SLO {'met' if slo['passed'] else 'missed'}: {percent(slo['met'])} of "
            f"{requests:,} requests within it, {percent(slo['share'])} asked"
        )
        kind = "good" if slo["passed"] else "bad"
    badge = '<span class=badge title="emulated speeds">paced</span>' if _paced(summary) else ""
    cards = (
        ("requests", f"{requests:,}"),
        ("failed", f"{summary['failed']:,}"),
        ("offered", rate(summary["rate_rps"])),
        ("goodput", rate(summary["goodput_rps"])),
        ("TTFT p50 / p99", pair(summary["ttft_s"])),
        ("inter-token p50 / p99", pair(summary["itl_s"])),
        ("end-to-end p50 / p99", pair(summary["e2e_s"])),
        ("output tokens/s", number(summary["output_tokens_per_s"])),
    )
    tiles = "".join(f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in cards)
    told = f"<p class=note>{escape(slo['meaning'])}.</p>" if requests else ""
    special = f"<p class=bad>{escape(note)}</p>" if note else ""
    heading = f"<h1 class='{kind}'>{escape(verdict)}{badge}</h1>"
    return f"{heading}{special}{told}<div class=cards>{tiles}</div>"


def _paced(summary: Mapping[str, Any]) -> bool:
    return bool(summary["paced_requests"])


def _what_was_run(run: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    rows = [(key.replace("_", " "), run[key]) for key in _RUN_KEYS if run.get(key) is not None]
    if _paced(summary):
        told = [str(row.get("node")) for row in run.get("nodes") or () if row.get("paced")]
        text = (
            f"emulated: {', '.join(told) or 'nodes'} spend time as the hardware they are paced as"
        )
        rows.append(("paced", text))
    cells = "".join(
        f"<tr><th class=l>{escape(key)}</th><td class=l><code>{escape(_plain(value))}</code></td>"
        for key, value in rows
    )
    return section("What was run", f"<table>{cells}</table>") if cells else ""


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _latencies(summary: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    rows = [
        ("TTFT, from when it was due", summary["ttft_s"]),
        ("TTFT, from sending", summary["ttft_sent_s"]),
        ("inter-token (between chunks)", summary["itl_s"]),
        ("TPOT (by tokens)", summary["tpot_s"]),
        ("end-to-end, from when it was due", summary["e2e_s"]),
        ("arrival error (sent after due)", summary["late_s"]),
    ]
    rows_table = table(
        ("", "mean", "p50", "p90", "p99", "max"),
        [(name, *(some_seconds(spread[q]) for q in ("mean", "p50", "p90", "p99", "max")))
         for name, spread in rows],
    )  # fmt: skip
    return section("Latency", rows_table + figures(pictures, "cdf"))


def _owners(summary: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    parts = []
    for key, what in (("nodes", "node"), ("tenants", "tenant"), ("classes", "class")):
        rows = summary[key]
        if not rows:
            continue
        head = (
            what, "requests", "failed", "TTFT p50", "p99", "TPOT p50", "e2e p50", "objective met",
            "κ p50", "device", "loaded", "computed",
        )  # fmt: skip
        rows_table = table(head, [_owner(row, summary["slo"]["met"] is not None) for row in rows])
        parts.append(rows_table)
    if not parts:
        return ""
    pair_of = f"<div class=two>{figures(pictures, 'nodes', 'tenants')}</div>"
    return section("By node, tenant and class", "".join(parts) + pair_of)


def _owner(row: Mapping[str, Any], judged: bool) -> tuple[str, ...]:
    return (
        str(row["name"]),
        f"{row['requests']:,}",
        f"{row['failed']:,}",
        some_seconds(row["ttft_s"]["p50"]),
        some_seconds(row["ttft_s"]["p99"]),
        some_seconds(row["tpot_s"]["p50"]),
        some_seconds(row["e2e_s"]["p50"]),
        percent(row["met"]) if judged else "–",
        number(row["kappa_p50"]),
        *(count(row[name]) for name in ("device_tokens", "cached_tokens", "new_tokens")),
    )


def _reuse(summary: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    cached, prediction = summary["cached_tokens"], summary["prediction"]
    said = []
    if cached["told_requests"] and cached["expected_where_told"]:
        share = cached["actual"] / cached["expected_where_told"]
        said.append(
            f"Cached tokens: {cached['expected_where_told']:,} expected with an unlimited cache, "
            f"{cached['actual']:,} found ({percent(share)}): {cached['device']:,} on the device, "
            f"{cached['host']:,} loaded; told by {cached['told_requests']:,} requests."
        )
    elif cached["expected"]:
        said.append(
            f"Cached tokens: {cached['expected']:,} expected with an unlimited cache; what was "
            "found, the endpoint does not tell."
        )
    if prediction["requests"]:
        error = prediction["client_error"]
        text = (
            f"Predicted TTFT: off by {percent(error['p50'])} (median), {percent(error['p90'])} "
            f"(p90) of what the client saw, over {prediction['requests']:,} requests"
        )
        if prediction["router_requests"]:
            text += f"; by {percent(prediction['router_error']['p50'])} of what the router saw"
        said.append(f"{text}.")
    if summary["jain"] is not None:
        said.append(f"Jain's index: {summary['jain']:.3f} ({summary['jain_of']}).")
    text = "".join(f"<p>{escape(line)}</p>" for line in said)
    return section("Reuse, prediction, fairness", text + figures(pictures, "ratio"))


def _errors(summary: Mapping[str, Any]) -> str:
    rows = [
        (kind, f"{error['count']:,}", error["meaning"], " | ".join(error["examples"]))
        for kind, error in summary["errors"].items()
    ]
    if not rows:
        return ""
    return section(
        "Errors", table(("kind", "count", "meaning", "for example"), rows, left=(0, 2, 3))
    )


def _slowest(summary: Mapping[str, Any]) -> str:
    rows = summary["slowest"]
    if not rows:
        return ""
    head = "".join(
        f"<th{' class=l' if name in _LEFT else ''}>{escape(name)}</th>" for name in _SLOW_HEAD
    )
    key = "".join(
        f"<i style='background:var(--{part})'></i>{escape(_PART_NAMES[part])}" for part in _PARTS
    )
    body = "".join(_slow_row(row) for row in rows)
    listing = f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>"
    note = (
        "Seconds from when a request was due to its first token. Under “queue / load / compute”: "
        "actual, then predicted. A ~ marks a split that was derived: load and compute as "
        "predicted, scaled to the tokens that the engine really loaded and computed, and queue "
        "what is left."
    )
    return section(
        "The slowest requests, and why",
        f"<p class=note>{escape(note)}</p><p class='note key'>{key}</p>{listing}",
    )


_SLOW_HEAD = (
    "TTFT", "session, turn", "node", "reason", "κ / κ_crit", "queue / load / compute", "why",
)  # fmt: skip
_LEFT = ("session, turn", "node", "reason", "why")


def _slow_row(row: Mapping[str, Any]) -> str:
    actual, predicted = row["actual"], row["predicted"]
    ratio = "–"
    if row["ratio"] is not None and row["kappa_crit"] is not None:
        ratio = f"{row['ratio']:.1f} / {row['kappa_crit']:.1f}"
    names = ("queue_s", "load_s", "compute_s")
    mark = "~" if actual["source"] == "derived" else ""
    cells = [f"{mark}{' / '.join(some_seconds(actual[name]) for name in names)}"]
    if predicted["queue_s"] is not None:
        cells.append(f"pred. {' / '.join(some_seconds(predicted[name]) for name in names)}")
    name = f"{row['session']}, {row['turn']}" + (f" ({row['tenant']})" if row["tenant"] else "")
    return (
        f"<tr><td>{escape(seconds(row['ttft_s']))}{_bar(actual)}</td>"
        f"<td class=l>{escape(name)}<br>at {row['scheduled_s']:.1f} s</td>"
        f"<td class=l>{escape(row['node'] or '–')}</td><td class=l>{escape(row['reason'] or '–')}"
        f"</td><td>{ratio}</td><td>{'<br>'.join(map(escape, cells))}</td>"
        f"<td class=why>{escape(row['why'])}</td></tr>"
    )


def _bar(actual: Mapping[str, Any]) -> str:
    """A request's seconds as a bar, each part in its colour."""
    total_s = actual["ttft_s"] or 1.0
    parts = "".join(
        f"<span style='width:{100 * (actual[f'{part}_s'] or 0) / total_s:.1f}%;"
        f"background:var(--{part})'></span>"
        for part in _PARTS
        if actual[f"{part}_s"]
    )
    return f"<div class=bar>{parts}</div>"


def _slowest_tokens(summary: Mapping[str, Any]) -> str:
    rows = [
        (
            some_seconds(row["tpot_s"]), f"{row['session']}, {row['turn']}", row["node"] or "–",
            f"{row['generated_tokens']:,}", some_seconds(row["longest_gap_s"]), row["why"],
        )
        for row in summary["slowest_tokens"]
    ]  # fmt: skip
    if not rows:
        return ""
    head = ("TPOT", "session, turn", "node", "tokens", "longest pause", "what happened")
    return section("The slowest later tokens", table(head, rows, left=(1, 2, 5)))


def _reading(summary: Mapping[str, Any]) -> str:
    return section(
        "How to read this",
        "<p class=note>Latencies count from when a request was due, whether or not the client "
        "could send it then: a slow endpoint cannot hide behind a client that waits for it. "
        "“From sending” is beside it; the difference is the arrival error. "
        f"Requests never sent count as failed. Sent: {summary['sent']:,}; retried: "
        f"{summary['retried']:,}.</p>",
    )
