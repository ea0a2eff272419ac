"""Explains why a request was slow, in a sentence about the largest part of its time.

Requests are rows of the table of `kappa_loadtest.results` that were answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NO_SPLIT = "no split: the endpoint does not report one"
PARTS = {
    "late": ("late_s", "sent late"),
    "queue": ("actual_queue_s", "queue"),
    "load": ("actual_load_s", "load"),
    "compute": ("actual_compute_s", "compute"),
    "way": ("way_s", "between client and router"),
    "unknown": ("unknown_s", "not split"),
}
"""The parts of a TTFT: column, and label in the report."""
_MOST = 0.5

Row = Mapping[str, Any]


def why_slow(row: Row) -> str:
    """The cause of a late first token, the router's prediction, and tokens missing from caches."""
    parts = {name: row[column] or 0.0 for name, (column, _) in PARTS.items()}
    cause = max(parts, key=parts.__getitem__)
    part, whole = seconds(parts[cause]), seconds(row["ttft_s"])
    took = part if part == whole else f"{part.removesuffix(' s')} of {whole}"
    expected_s = row.get(f"predicted_{cause}_s")
    expected = "" if expected_s is None else f"; predicted {seconds(expected_s)}"
    if not expected and row["predicted_ttft_s"] is not None and cause != "late":
        expected = f"; predicted TTFT {seconds(row['predicted_ttft_s'])}"
    return _sentence(row, cause, part, took) + expected + _missed(row)


def _sentence(row: Row, cause: str, part: str, took: str) -> str:
    node, loaded, computed = _node(row), row["actual_cached_tokens"], row["actual_new_tokens"]
    match cause:
        case "late" if row["attempt"]:
            times = "once" if row["attempt"] == 1 else f"{row['attempt']} times"
            return (
                f"it was refused {times} before: {took} went by until the attempt that was answered"
            )
        case "late":
            return f"sent {part} late: the client was at its stream limit, or busy"
        case "queue":
            return f"waited {took} in the queue of {node}"
        case "load":
            load = "load" if loaded is None else f"load of {loaded:,} tokens"
            return f"{load} over the link of {node} took {took}"
        case "compute":
            tokens = "" if computed is None else f" {computed:,} new tokens"
            return f"computing{tokens} on {node} took {took}"
        case "way":
            return f"{took} passed between client and router (network, HTTP, tokenization)"
    if row["actual_ttft_s"] is not None:
        return f"{took} in the engine of {node}, which does not say on what"
    return f"{took} at the endpoint; {NO_SPLIT}"


def _missed(row: Row) -> str:
    """The part of the expected prefix that was in no cache, as a clause."""
    device, host = row["actual_device_tokens"], row["actual_cached_tokens"]
    if device is None or host is None:
        return ""
    expected = row["cached_tokens"]
    missing = expected - device - host
    if missing <= 0.1 * expected:
        return ""
    return f"; {missing:,} of {expected:,} reusable tokens were in no cache there"


def why_slow_tokens(row: Row) -> str:
    """The cause of slow later tokens: one long pause, or all of them."""
    gaps_s = row["gaps_s"]
    if not gaps_s:
        return "it has no second token"
    chunks, total_s, longest_s = len(gaps_s) + 1, sum(gaps_s), max(gaps_s)
    where = f" on {_node(row)}" if row["node"] else ""
    if longest_s >= _MOST * total_s and chunks > 3:
        return (
            f"one pause of {seconds(longest_s)}{where}, before chunk {gaps_s.index(longest_s) + 2} "
            f"of {chunks}, made most of its {seconds(total_s)} of decoding"
        )
    return (
        f"{chunks} chunks in {seconds(total_s)}{where}, evenly: the longest pause was "
        f"{seconds(longest_s)}"
    )


def seconds(value: float) -> str:
    """Seconds as text, with three significant digits."""
    if abs(value) < 0.0995:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.2f} s" if abs(value) < 0.995 else f"{value:.1f} s"


def _node(row: Row) -> str:
    if not row["node"]:
        return "the endpoint"
    return f"node {row['node']}" + (" (paced)" if row["paced"] else "")
