"""Why one request was slow: its seconds split into parts, and a plain sentence about the largest.

What passed before the request was sent is the client's; what the router saw until the first token
is split into queue, load and compute; the rest is the way between the two. The split is the
endpoint's own where it tells one. Where it tells only token counts, load and compute are its
predictions, scaled to the tokens that really were loaded and computed, and the queue is what is
left: that is marked `derived`. An endpoint that tells nothing leaves one part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from loadtest.journal import Record

NO_SPLIT = "no split: the endpoint does not tell"
_PARTS = ("queue_s", "load_s", "compute_s")
_MOST = 0.5

Source = Literal["told", "derived", "none"]


@dataclass(frozen=True, slots=True)
class Split:
    """Seconds of a request until its first token, from when it was due.

    late_s: until it was sent. queue_s, load_s, compute_s: of what the router saw; None if unknown.
    way_s: between client and router (network, HTTP, tokenization); None if the router told nothing.
    unknown_s: what nobody splits. ttft_s: their sum.
    """

    ttft_s: float
    late_s: float
    queue_s: float | None = None
    load_s: float | None = None
    compute_s: float | None = None
    way_s: float | None = None
    unknown_s: float = 0.0
    source: Source = "none"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return asdict(self)


def split(record: Record) -> Split | None:
    """Where the seconds until the first token went; None if none came."""
    if record.ttft_s is None or record.first_token_s is None:
        return None
    late_s = max(record.sent_s - record.scheduled_s, 0.0)
    since_sent_s = max(record.first_token_s - record.sent_s, 0.0)
    actual = record.actual or {}
    seen_s = actual.get("ttft_s")
    if seen_s is None:
        return Split(record.ttft_s, late_s, unknown_s=since_sent_s)
    seen_s = min(float(seen_s), since_sent_s)
    way_s = since_sent_s - seen_s
    if all(actual.get(part) is not None for part in _PARTS):
        queue_s, load_s, compute_s = (float(actual[part]) for part in _PARTS)
        unknown_s = max(seen_s - queue_s - load_s - compute_s, 0.0)
        return Split(record.ttft_s, late_s, queue_s, load_s, compute_s, way_s, unknown_s, "told")
    priced = _priced(record.predicted or {}, actual)
    if priced is None:
        return Split(record.ttft_s, late_s, way_s=way_s, unknown_s=seen_s)
    load_s, compute_s = priced
    # What was foreseen for these tokens cannot have taken longer than all of it together.
    excess = max((load_s + compute_s) / seen_s, 1.0) if seen_s else 1.0
    load_s, compute_s = load_s / excess, compute_s / excess
    queue_s = max(seen_s - load_s - compute_s, 0.0)
    return Split(record.ttft_s, late_s, queue_s, load_s, compute_s, way_s, 0.0, "derived")


def _priced(predicted: Mapping[str, Any], actual: Mapping[str, Any]) -> tuple[float, float] | None:
    """(load, compute) seconds of the tokens that the engine really took from each source."""
    found = []
    for part, tokens in (("load_s", "cached_tokens"), ("compute_s", "new_tokens")):
        seconds, foreseen, real = predicted.get(part), predicted.get(tokens), actual.get(tokens)
        if seconds is None or foreseen is None or real is None or (real and not foreseen):
            return None
        found.append(float(seconds) * float(real) / float(foreseen) if foreseen else 0.0)
    return found[0], found[1]


def why_slow(record: Record) -> str:
    """One plain sentence: what made its first token late, or why there was none."""
    if record.error:
        return _why_failed(record)
    found = split(record)
    if found is None:
        return "it ended without a token"
    parts = {
        "late": found.late_s,
        "queue": found.queue_s or 0.0,
        "load": found.load_s or 0.0,
        "compute": found.compute_s or 0.0,
        "way": found.way_s or 0.0,
        "unknown": found.unknown_s,
    }
    largest = max(parts, key=lambda name: parts[name])
    sentence = _SENTENCES[largest](record, found)
    return sentence + _foreseen(record, largest) + _missed(record)


def _why_failed(record: Record) -> str:
    after_s = max(record.ended_s - record.scheduled_s, 0.0)
    tries = f" at attempt {record.attempt + 1}" if record.attempt else ""
    detail = f": {record.error_detail}" if record.error_detail else ""
    return f"failed ({record.error}) {seconds(after_s)} after it was due{tries}{detail}"


def _late(record: Record, found: Split) -> str:
    if record.attempt:
        tries = "once" if record.attempt == 1 else f"{record.attempt} times"
        return (
            f"it was refused {tries} before: {of(found.late_s, found)} went by until the attempt "
            "that was answered"
        )
    return f"sent {seconds(found.late_s)} late: the client was at its stream limit, or busy"


def _queue(record: Record, found: Split) -> str:
    return f"waited {of(found.queue_s or 0.0, found)} in the queue of {_node(record)}"


def _load(record: Record, found: Split) -> str:
    tokens = (record.actual or {}).get("cached_tokens")
    what = f"load of {tokens:,} tokens" if isinstance(tokens, int) else "load"
    return f"{what} over the link of {_node(record)} took {of(found.load_s or 0.0, found)}"


def _compute(record: Record, found: Split) -> str:
    tokens = (record.actual or {}).get("new_tokens")
    what = f"computing {tokens:,} new tokens" if isinstance(tokens, int) else "computing"
    return f"{what} on {_node(record)} took {of(found.compute_s or 0.0, found)}"


def _way(record: Record, found: Split) -> str:
    return (
        f"{of(found.way_s or 0.0, found)} passed between client and router (network, HTTP, "
        "tokenization)"
    )


def _unknown(record: Record, found: Split) -> str:
    if record.actual and record.actual.get("ttft_s") is not None:
        return (
            f"{of(found.unknown_s, found)} in the engine of {_node(record)}, which does not "
            "say on what"
        )
    return f"{of(found.unknown_s, found)} at the endpoint; {NO_SPLIT}"


_SENTENCES = {
    "late": _late,
    "queue": _queue,
    "load": _load,
    "compute": _compute,
    "way": _way,
    "unknown": _unknown,
}


def _foreseen(record: Record, part: str) -> str:
    """What the router had expected of that part, or of the whole."""
    predicted = record.predicted or {}
    expected_s = predicted.get(f"{part}_s")
    if expected_s is not None:
        return f"; predicted {seconds(float(expected_s))}"
    if record.predicted_ttft_s is not None and part != "late":
        return f"; predicted TTFT {seconds(record.predicted_ttft_s)}"
    return ""


def _missed(record: Record) -> str:
    """What of the expected prefix was in no cache."""
    actual = record.actual or {}
    device, cached = actual.get("device_tokens"), actual.get("cached_tokens")
    if device is None or cached is None:
        return ""
    missing = record.cached_tokens - device - cached
    if missing <= max(0.1 * record.cached_tokens, 0):
        return ""
    return f"; {missing:,} of {record.cached_tokens:,} reusable tokens were in no cache there"


def why_slow_tokens(record: Record) -> str:
    """One plain sentence about a request whose later tokens came slowly."""
    if not record.gaps_s:
        return "it has no second token"
    total_s, longest_s = sum(record.gaps_s), max(record.gaps_s)
    place = record.gaps_s.index(longest_s) + 2
    where = f" on {_node(record)}" if record.node else ""
    if longest_s >= _MOST * total_s and len(record.gaps_s) > 2:
        return (
            f"one pause of {seconds(longest_s)}{where}, before chunk {place} of "
            f"{len(record.gaps_s) + 1}, made most of its {seconds(total_s)} of decoding"
        )
    return (
        f"{len(record.gaps_s) + 1} chunks in {seconds(total_s)}{where}, evenly: the longest pause "
        f"was {seconds(longest_s)}"
    )


def of(part_s: float, found: Split) -> str:
    """A part, beside the whole if they differ."""
    whole = seconds(found.ttft_s)
    part = seconds(part_s)
    return part if part == whole else f"{part.removesuffix(' s')} of {whole}"


def seconds(value: float) -> str:
    """Seconds for people: three digits that mean something."""
    if abs(value) < 0.0995:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.2f} s" if abs(value) < 0.995 else f"{value:.1f} s"


def _node(record: Record) -> str:
    if not record.node:
        return "the endpoint"
    return f"node {record.node}" + (" (paced)" if record.paced else "")
