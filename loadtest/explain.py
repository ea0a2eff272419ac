"""Why one request was slow: its seconds split into parts, and a plain sentence about the largest.

What passed before the request was sent is the client's; what the router saw until the first token
is split into queue, load and compute; the rest is the way between the two. The split is the
endpoint's own where it reports one. If it reports only token counts, load and compute are its
predictions, scaled to the tokens that really were loaded and computed, and the queue is what is
left: that is marked `derived`. An endpoint that reports nothing leaves one part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from loadtest.journal import RequestRecord

NO_SPLIT = "no split: the endpoint does not report one"
_PARTS = ("queue_s", "load_s", "compute_s")
_CAUSES = ("late", "queue", "load", "compute", "way", "unknown")
_MOST = 0.5


@dataclass(frozen=True, slots=True)
class TtftSplit:
    """Seconds of a request until its first token, from when it was due; `ttft_s` is their sum.

    late_s: until it was sent. queue_s, load_s, compute_s: of what the router saw; None if unknown.
    way_s: between client and router (network, HTTP, tokenization); None if that is not reported.
    unknown_s: what nobody splits.
    """

    ttft_s: float
    late_s: float
    queue_s: float | None = None
    load_s: float | None = None
    compute_s: float | None = None
    way_s: float | None = None
    unknown_s: float = 0.0
    source: Literal["told", "derived", "none"] = "none"


def split(record: RequestRecord) -> TtftSplit | None:
    """Where the seconds until the first token went; None if none came."""
    if record.ttft_s is None or record.first_token_s is None:
        return None
    late_s = max(record.sent_s - record.scheduled_s, 0.0)
    since_sent_s = max(record.first_token_s - record.sent_s, 0.0)
    actual = record.actual or {}
    seen_s = actual.get("ttft_s")
    if seen_s is None:
        return TtftSplit(record.ttft_s, late_s, unknown_s=since_sent_s)
    seen_s = min(float(seen_s), since_sent_s)
    way_s = since_sent_s - seen_s
    if all(actual.get(part) is not None for part in _PARTS):
        queue_s, load_s, compute_s = (float(actual[part]) for part in _PARTS)
        rest_s = max(seen_s - queue_s - load_s - compute_s, 0.0)
        return TtftSplit(record.ttft_s, late_s, queue_s, load_s, compute_s, way_s, rest_s, "told")
    priced = _priced(record.predicted or {}, actual)
    if priced is None:
        return TtftSplit(record.ttft_s, late_s, way_s=way_s, unknown_s=seen_s)
    load_s, compute_s = priced
    # What was predicted for these tokens cannot have taken longer than all of it together.
    excess = max((load_s + compute_s) / seen_s, 1.0) if seen_s else 1.0
    load_s, compute_s = load_s / excess, compute_s / excess
    queue_s = max(seen_s - load_s - compute_s, 0.0)
    return TtftSplit(record.ttft_s, late_s, queue_s, load_s, compute_s, way_s, source="derived")


def _priced(predicted: Mapping[str, Any], actual: Mapping[str, Any]) -> tuple[float, float] | None:
    """(load, compute) seconds of the tokens that the engine really took from each source."""
    found = []
    for part, tokens in (("load_s", "cached_tokens"), ("compute_s", "new_tokens")):
        seconds, expected, real = predicted.get(part), predicted.get(tokens), actual.get(tokens)
        if seconds is None or expected is None or real is None or (real and not expected):
            return None
        found.append(float(seconds) * float(real) / float(expected) if expected else 0.0)
    return found[0], found[1]


def why_slow(record: RequestRecord) -> str:
    """One plain sentence: what made its first token late, or why there was none."""
    if record.error:
        after_s = max(record.ended_s - record.scheduled_s, 0.0)
        tries = f" at attempt {record.attempt + 1}" if record.attempt else ""
        detail = f": {record.error_detail}" if record.error_detail else ""
        return f"failed ({record.error}) {seconds(after_s)} after it was due{tries}{detail}"
    found = split(record)
    if found is None:
        return "it ended without a token"
    parts = {name: getattr(found, f"{name}_s") or 0.0 for name in _CAUSES}
    cause = max(parts, key=lambda name: parts[name])
    took = _part_of(parts[cause], found.ttft_s)
    return _sentence(record, found, cause, took) + _predicted(record, cause) + _missed(record)


def _sentence(record: RequestRecord, found: TtftSplit, cause: str, took: str) -> str:
    node, actual = _node(record), record.actual or {}
    if cause == "late" and record.attempt:
        tries = "once" if record.attempt == 1 else f"{record.attempt} times"
        return f"it was refused {tries} before: {took} went by until the attempt that was answered"
    if cause == "late":
        return f"sent {seconds(found.late_s)} late: the client was at its stream limit, or busy"
    if cause == "queue":
        return f"waited {took} in the queue of {node}"
    if cause == "load":
        tokens = actual.get("cached_tokens")
        load = "load" if tokens is None else f"load of {tokens:,} tokens"
        return f"{load} over the link of {node} took {took}"
    if cause == "compute":
        tokens = actual.get("new_tokens")
        computing = "computing" if tokens is None else f"computing {tokens:,} new tokens"
        return f"{computing} on {node} took {took}"
    if cause == "way":
        return f"{took} passed between client and router (network, HTTP, tokenization)"
    if actual.get("ttft_s") is not None:
        return f"{took} in the engine of {node}, which does not say on what"
    return f"{took} at the endpoint; {NO_SPLIT}"


def _predicted(record: RequestRecord, part: str) -> str:
    """What the router had expected of that part, or of the whole."""
    expected_s = (record.predicted or {}).get(f"{part}_s")
    if expected_s is not None:
        return f"; predicted {seconds(float(expected_s))}"
    if record.predicted_ttft_s is not None and part != "late":
        return f"; predicted TTFT {seconds(record.predicted_ttft_s)}"
    return ""


def _missed(record: RequestRecord) -> str:
    """What of the expected prefix was in no cache."""
    actual = record.actual or {}
    device, cached = actual.get("device_tokens"), actual.get("cached_tokens")
    if device is None or cached is None:
        return ""
    missing = record.cached_tokens - device - cached
    if missing <= 0.1 * record.cached_tokens:
        return ""
    return f"; {missing:,} of {record.cached_tokens:,} reusable tokens were in no cache there"


def why_slow_tokens(record: RequestRecord) -> str:
    """One plain sentence about a request whose later tokens came slowly."""
    gaps_s = record.gaps_s
    if not gaps_s:
        return "it has no second token"
    chunks, total_s, longest_s = len(gaps_s) + 1, sum(gaps_s), max(gaps_s)
    where = f" on {_node(record)}" if record.node else ""
    if longest_s >= _MOST * total_s and chunks > 3:
        return (
            f"one pause of {seconds(longest_s)}{where}, before chunk {gaps_s.index(longest_s) + 2} "
            f"of {chunks}, made most of its {seconds(total_s)} of decoding"
        )
    return (
        f"{chunks} chunks in {seconds(total_s)}{where}, evenly: the longest pause was "
        f"{seconds(longest_s)}"
    )


def _part_of(part_s: float, whole_s: float) -> str:
    """A part, beside the whole if they differ."""
    part, whole = seconds(part_s), seconds(whole_s)
    return part if part == whole else f"{part.removesuffix(' s')} of {whole}"


def seconds(value: float) -> str:
    """Seconds for people: three digits that mean something."""
    if abs(value) < 0.0995:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.2f} s" if abs(value) < 0.995 else f"{value:.1f} s"


def _node(record: RequestRecord) -> str:
    if not record.node:
        return "the endpoint"
    return f"node {record.node}" + (" (paced)" if record.paced else "")
