"""How good TTFT predictions are: classes, errors, and the baseline beside them. Pure.

An outcome is one request of `GET /v1/decisions`. Its class is that of its *prediction*, known
before the fact; its error is |predicted - actual| / actual. The baseline predicts the running
median of the TTFTs seen so far on the same node in the same ratio bucket; it never stops learning.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import quantile

CLASSES = ("device", "load", "compute", "queue")
CLASS_DEFINITION = (
    "a request is queue if its predicted queue seconds exceed both its load and its compute "
    "seconds; else load if load exceeds compute; else device if part of its prompt is in the "
    "device cache and none is to be loaded; else compute"
)
GOAL_MEDIAN = 0.20
GOAL_OF_BASELINE = 0.7


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request: what was predicted, what came; seconds are real ones, counts are tokens."""

    request_id: str
    node: str
    decided_s: float
    queue_s: float
    load_s: float
    compute_s: float
    predicted_s: float
    device_tokens: int
    cached_tokens: int
    new_tokens: int
    actual_s: float
    actual_device_tokens: int | None = None
    actual_cached_tokens: int | None = None

    @property
    def kind(self) -> str:
        """Its class, by `CLASS_DEFINITION`."""
        if self.queue_s > max(self.load_s, self.compute_s):
            return "queue"
        if self.load_s > self.compute_s:
            return "load"
        return "device" if self.cached_tokens == 0 and self.device_tokens > 0 else "compute"

    @property
    def ratio(self) -> float:
        return self.cached_tokens / max(self.new_tokens, 1)

    @property
    def error(self) -> float:
        """Absolute error of the prediction, relative to what came."""
        return abs(self.predicted_s - self.actual_s) / self.actual_s

    @property
    def miscounted(self) -> bool:
        """Whether the engine took other tokens from its caches than the router expected."""
        actual = (self.actual_device_tokens, self.actual_cached_tokens)
        return actual[0] is not None and actual != (self.device_tokens, self.cached_tokens)


def outcome_from(record: Mapping[str, Any]) -> Outcome | None:
    """An entry of `GET /v1/decisions`; None if it has no first token (yet), or failed."""
    predicted, actual = record["predicted"], record["actual"]
    if not actual["ttft_s"] or record["end"] not in ("", "done"):
        return None
    tokens = ("device_tokens", "cached_tokens", "new_tokens")
    return Outcome(
        record["request_id"], record["node"], record["time_s"],
        *(predicted[key] for key in ("queue_s", "load_s", "compute_s", "ttft_s", *tokens)),
        *(actual[key] for key in ("ttft_s", "device_tokens", "cached_tokens")),
    )  # fmt: skip


def ratio_bucket(ratio: float) -> int:
    """Bucket of a ratio on a log2 scale: 0 below one cached token per 16 new ones, then by two."""
    return max(0, math.floor(math.log2(ratio)) + 5) if ratio > 0 else 0


def baseline_errors(warm_up: Iterable[Outcome], measured: Sequence[Outcome]) -> dict[str, float]:
    """The baseline's error by request id; at each decision it knows all earlier first tokens.

    Its prediction is the median by node and ratio bucket, else by node, else of all; a request
    before any first token has none.
    """
    every = [*warm_up, *measured]
    wanted = {outcome.request_id for outcome in measured}
    # Outcomes come before decisions of the same instant.
    events = [(o.decided_s + o.actual_s, 0, i) for i, o in enumerate(every)]
    events += [(o.decided_s, 1, i) for i, o in enumerate(every)]
    seen: dict[Hashable, list[float]] = defaultdict(list)
    errors: dict[str, float] = {}
    for _, is_decision, i in sorted(events):
        outcome = every[i]
        keys = ((outcome.node, ratio_bucket(outcome.ratio)), outcome.node, "")
        if not is_decision:
            for key in keys:
                seen[key].append(outcome.actual_s)
        elif outcome.request_id in wanted and seen:
            known = next(seen[key] for key in keys if key in seen)
            off_s = abs(statistics.median(known) - outcome.actual_s)
            errors[outcome.request_id] = off_s / outcome.actual_s
    return errors


def class_rows(measured: Sequence[Outcome], baseline: Mapping[str, float]) -> list[dict[str, Any]]:
    """One row per class: errors of the prediction, of the baseline, and whether goals are met."""
    rows = []
    for kind in CLASSES:
        group = [o for o in measured if o.kind == kind]
        errors = [o.error for o in group]
        mine = quantile(errors, 0.5)
        theirs = quantile([baseline[o.request_id] for o in group if o.request_id in baseline], 0.5)
        is_met = None
        if mine is not None and theirs is not None:
            is_met = mine <= GOAL_MEDIAN and mine <= GOAL_OF_BASELINE * theirs
        rows.append({
            "class": kind, "n": len(group), "median_abs_err": mine,
            "p90_abs_err": quantile(errors, 0.9), "baseline_median_abs_err": theirs,
            "median_bias": quantile([o.predicted_s / o.actual_s - 1 for o in group], 0.5),
            "median_ttft_s": quantile([o.actual_s for o in group], 0.5),
            "miscounted": sum(o.miscounted for o in group), "goal_met": is_met,
        })  # fmt: skip
    return rows
