"""Errors of TTFT predictions by class, and the baselines' beside them. Pure.

An outcome is one request of `GET /v1/decisions`. Its class is that of its *prediction*, known
before the fact; its error is |predicted - actual| / actual. Two baselines predict the running
median of the TTFTs seen so far on the same node, one in the same bucket of cached to new tokens,
one in that of the prompt's length; they never stop learning.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kappa_benchmarks.harness import quantile

CLASSES = ("device", "load", "compute", "queue")
PARTS = ("queue", "load", "compute")
CLASS_DEFINITION = (
    "a request is queue if its predicted queue seconds exceed both its load and its compute "
    "seconds; else load if part of its prompt is to be loaded from the host tier; else device if "
    "part is in the device cache; else compute"
)


@dataclass(frozen=True, slots=True)
class Goal:
    """Bounds of a class' relative errors."""

    median: float = 0.20
    p90: float = math.inf
    # Of the median in the class `load`.
    load_median: float = 0.20
    # Of the median over that of the better baseline.
    of_baseline: float = 0.7
    # Requests of a class, below which it is not judged.
    least: int = 1


PACED_GOAL = Goal()
REAL_GOAL = Goal(0.15, 0.40, 0.20, 1.0, 50)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request, predicted and actual; seconds are real ones, counts are tokens."""

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
    actual_queue_s: float | None = None
    actual_load_s: float | None = None
    actual_compute_s: float | None = None

    @property
    def kind(self) -> str:
        """Its class, by `CLASS_DEFINITION`."""
        if self.queue_s > max(self.load_s, self.compute_s):
            return "queue"
        if self.cached_tokens:
            return "load"
        return "device" if self.device_tokens else "compute"

    @property
    def ratio(self) -> float:
        return self.cached_tokens / max(self.new_tokens, 1)

    @property
    def prompt_tokens(self) -> int:
        return self.device_tokens + self.cached_tokens + self.new_tokens

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
        *(actual.get(f"{part}_s") for part in PARTS),
    )  # fmt: skip


def ratio_bucket(ratio: float) -> int:
    """Bucket of a ratio on a log2 scale: 0 below one cached token per 16 new ones, then by two."""
    return max(0, math.floor(math.log2(ratio)) + 5) if ratio > 0 else 0


def length_bucket(outcome: Outcome) -> int:
    """Bucket of a prompt's length, by two."""
    return outcome.prompt_tokens.bit_length()


def baseline_errors(
    warm_up: Iterable[Outcome],
    measured: Sequence[Outcome],
    bucket: Callable[[Outcome], int] = lambda outcome: ratio_bucket(outcome.ratio),
) -> dict[str, float]:
    """A baseline's error by request id; at each decision it knows all earlier first tokens.

    Its prediction is the median by node and bucket, else by node, else of all; a request before any
    first token has none.
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
        keys = ((outcome.node, bucket(outcome)), outcome.node, "")
        if not is_decision:
            for key in keys:
                seen[key].append(outcome.actual_s)
        elif outcome.request_id in wanted and seen:
            known = next(seen[key] for key in keys if key in seen)
            off_s = abs(statistics.median(known) - outcome.actual_s)
            errors[outcome.request_id] = off_s / outcome.actual_s
    return errors


def class_rows(
    warm_up: Sequence[Outcome], measured: Sequence[Outcome], goal: Goal = PACED_GOAL
) -> list[dict[str, Any]]:
    """One row per class: errors of the prediction, of both baselines, and whether goals are met."""
    by_ratio = baseline_errors(warm_up, measured)
    by_length = baseline_errors(warm_up, measured, length_bucket)
    rows = []
    for kind in CLASSES:
        group = [o for o in measured if o.kind == kind]
        errors = [o.error for o in group]
        mine, p90 = quantile(errors, 0.5), quantile(errors, 0.9)
        ratio, length = (
            quantile([known[o.request_id] for o in group if o.request_id in known], 0.5)
            for known in (by_ratio, by_length)
        )
        is_met = None
        if len(group) >= goal.least and mine is not None and p90 is not None and ratio is not None:
            assert length is not None  # whatever knew a ratio knew a length
            most = min(
                goal.load_median if kind == "load" else goal.median,
                goal.of_baseline * min(ratio, length),
            )
            is_met = bool(mine <= most and p90 <= goal.p90)
        rows.append({
            "class": kind, "n": len(group), "median_abs_err": mine, "p90_abs_err": p90,
            "baseline_median_abs_err": ratio, "length_baseline_median_abs_err": length,
            "median_bias": quantile([o.predicted_s / o.actual_s - 1 for o in group], 0.5),
            "median_ttft_s": quantile([o.actual_s for o in group], 0.5),
            "excess_s": {part: _excess_s(group, part) for part in PARTS},
            "load_bound": sum(o.load_s > o.compute_s for o in group),
            "miscounted": sum(o.miscounted for o in group), "goal_met": is_met,
        })  # fmt: skip
    return rows


def _excess_s(group: Sequence[Outcome], part: str) -> float | None:
    """Predicted less actual seconds of one part of the TTFT, the median of those that report it."""
    pairs = ((getattr(o, f"{part}_s"), getattr(o, f"actual_{part}_s")) for o in group)
    return quantile([predicted - took for predicted, took in pairs if took is not None], 0.5)
