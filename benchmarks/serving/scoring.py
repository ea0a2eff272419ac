"""How good TTFT predictions are: classes, errors, and the baseline beside them. Pure.

An outcome is one request of `GET /v1/decisions`. Its class is that of its *prediction*,
known before the fact; its error is |predicted - actual| / actual. The baseline predicts the running
median of the TTFTs seen so far on the same node in the same ratio bucket; it never stops learning.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import quantile

CLASSES = ("device", "load", "compute", "queue")

CLASS_DEFINITION = (
    "a request is queue if its predicted queue seconds exceed both its load and its compute "
    "seconds; else load if load exceeds compute; else device if part of its prompt is in the "
    "device cache and none is to be loaded; else compute"
)

MAX_OVERRUN_SHARE = 0.05
MIN_LOAD = 0.6
MIN_PER_CLASS = 50
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
        if self.cached_tokens == 0 and self.device_tokens > 0:
            return "device"
        return "compute"

    @property
    def ratio(self) -> float:
        return self.cached_tokens / max(self.new_tokens, 1)

    @property
    def error(self) -> float:
        """Absolute error of the prediction, relative to what came."""
        return abs(self.predicted_s - self.actual_s) / self.actual_s

    @property
    def miscounted(self) -> bool:
        """Whether the engine took other tokens from its caches than the router thought."""
        return self.actual_device_tokens is not None and (
            (self.actual_device_tokens, self.actual_cached_tokens)
            != (self.device_tokens, self.cached_tokens)
        )


def outcome_from(record: Mapping[str, Any]) -> Outcome | None:
    """An entry of `GET /v1/decisions`; None if it has no first token (yet), or failed."""
    predicted, actual = record["predicted"], record["actual"]
    if not actual["ttft_s"] or record["end"] not in ("", "done"):
        return None
    return Outcome(
        request_id=record["request_id"],
        node=record["node"],
        decided_s=record["time_s"],
        queue_s=predicted["queue_s"],
        load_s=predicted["load_s"],
        compute_s=predicted["compute_s"],
        predicted_s=predicted["ttft_s"],
        device_tokens=predicted["device_tokens"],
        cached_tokens=predicted["cached_tokens"],
        new_tokens=predicted["new_tokens"],
        actual_s=actual["ttft_s"],
        actual_device_tokens=actual["device_tokens"],
        actual_cached_tokens=actual["cached_tokens"],
    )


def ratio_bucket(ratio: float) -> int:
    """Bucket of a ratio on a log2 scale: 0 below one cached token per 16 new ones, then by two."""
    return max(0, math.floor(math.log2(ratio)) + 5) if ratio > 0 else 0


@dataclass(slots=True)
class RunningMedian:
    """The baseline: the median TTFT so far by node and ratio bucket, else by node, else of all."""

    _seen: dict[tuple[str, int] | str, list[float]] = field(default_factory=dict)

    def learn(self, outcome: Outcome) -> None:
        for key in self._keys(outcome):
            self._seen.setdefault(key, []).append(outcome.actual_s)

    def predict(self, outcome: Outcome) -> float | None:
        """What it would have predicted for this request; None if it has seen nothing."""
        for key in self._keys(outcome):
            if key in self._seen:
                return statistics.median(self._seen[key])
        return None

    @staticmethod
    def _keys(outcome: Outcome) -> tuple[tuple[str, int] | str, ...]:
        return (outcome.node, ratio_bucket(outcome.ratio)), outcome.node, ""


def baseline_errors(warm_up: Iterable[Outcome], measured: Sequence[Outcome]) -> dict[str, float]:
    """The baseline's error per request id; at each decision it knows all earlier first tokens."""
    baseline = RunningMedian()
    every = [*warm_up, *measured]
    wanted = {outcome.request_id for outcome in measured}
    # Outcomes come before decisions of the same instant.
    events = [(o.decided_s + o.actual_s, 0, i) for i, o in enumerate(every)]
    events += [(o.decided_s, 1, i) for i, o in enumerate(every)]
    errors: dict[str, float] = {}
    for _, is_decision, i in sorted(events):
        outcome = every[i]
        if not is_decision:
            baseline.learn(outcome)
        elif outcome.request_id in wanted:
            predicted_s = baseline.predict(outcome)
            if predicted_s is not None:
                errors[outcome.request_id] = abs(predicted_s - outcome.actual_s) / outcome.actual_s
    return errors


def class_rows(measured: Sequence[Outcome], baseline: Mapping[str, float]) -> list[dict[str, Any]]:
    """One row per class: errors of the prediction, of the baseline, and whether goals are met."""
    rows = []
    for kind in CLASSES:
        group = [o for o in measured if o.kind == kind]
        errors = [o.error for o in group]
        beside = [baseline[o.request_id] for o in group if o.request_id in baseline]
        mine, theirs = quantile(errors, 0.5), quantile(beside, 0.5)
        is_met = None
        if mine is not None and theirs is not None:
            is_met = mine <= GOAL_MEDIAN and mine <= GOAL_OF_BASELINE * theirs
        rows.append(
            {
                "class": kind,
                "n": len(group),
                "median_abs_err": mine,
                "p90_abs_err": quantile(errors, 0.9),
                "baseline_median_abs_err": theirs,
                "median_bias": quantile([o.predicted_s / o.actual_s - 1 for o in group], 0.5),
                "median_ttft_s": quantile([o.actual_s for o in group], 0.5),
                "miscounted": sum(o.miscounted for o in group),
                "goal_met": is_met,
            }
        )
    return rows


@dataclass(frozen=True, slots=True)
class Usage:
    """What the nodes did over a window: means over nodes of busy shares, and overruns."""

    load: float
    link_load: float
    store_load: float
    overrun_share: float
    steps: int
    load_by_node: Mapping[str, float]


def usage(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Usage:
    """Busy shares between two answers of `GET /v1/nodes`; each worker's own report times it.

    Raises:
        ValueError: a worker is missing, did not report, or reported only once.
    """
    earlier = {row["worker"]: row["totals"] for row in before}
    gpu: dict[str, float] = {}
    link, store = [], []
    steps = overruns = 0
    for row in after:
        old, new = earlier.get(row["worker"]), row["totals"]
        elapsed_s = new["time_s"] - old["time_s"] if old and new else 0.0
        if elapsed_s <= 0 or not old:
            raise ValueError(f"node {row['node']} has no two reports to compare")
        gpu[row["node"]] = (new["step_seconds_total"] - old["step_seconds_total"]) / elapsed_s
        link.append((new["load_seconds_total"] - old["load_seconds_total"]) / elapsed_s)
        store.append((new["store_seconds_total"] - old["store_seconds_total"]) / elapsed_s)
        steps += new["steps_total"] - old["steps_total"]
        overruns += new["overruns_total"] - old["overruns_total"]
    if not gpu:
        raise ValueError("no nodes")
    return Usage(
        load=statistics.fmean(gpu.values()),
        link_load=statistics.fmean(link),
        store_load=statistics.fmean(store),
        overrun_share=overruns / steps if steps else 0.0,
        steps=steps,
        load_by_node=gpu,
    )
