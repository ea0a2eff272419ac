"""Measures several ways of doing the same thing in turns: one round each, order reversed each time.

What drifts (clocks, other work on the machine) hits all of them, and what one leaves in caches hits
each as often from either side. The first round is a warm-up and dropped. Ratios are taken within a
round, where both ways met the same machine.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

LEAST_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one way. latency_s: of what is compared; before_s: of what came before it.

    h2d_bytes and link_s: copied to the device meanwhile, and seconds in which the link copied.
    stalled_s: seconds in which the computation waited for copies. tokens: what was generated.
    """

    latency_s: float
    before_s: float = 0.0
    h2d_bytes: int = 0
    link_s: float = 0.0
    stalled_s: float = 0.0
    tokens: tuple[int, ...] = ()


@dataclass(slots=True)
class Arm:
    """One way. run: does it once. predicted_s: of `latency_s`, or None where nothing predicts it.

    note: what the planner said. chosen: the planner would take this one. swept: one of a sweep.
    details: further figures for its row.
    """

    name: str
    run: Callable[[], Sample]
    predicted_s: float | None = None
    note: str = ""
    chosen: bool = False
    details: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and interquartile range."""

    median: float
    iqr: float


def alternate(arms: Sequence[Arm], repeats: int) -> dict[str, list[Sample]]:
    """Samples of each arm by round; all arms run in every round.

    Raises:
        ValueError: fewer than `LEAST_REPEATS` rounds.
    """
    if repeats < LEAST_REPEATS:
        raise ValueError(f"{repeats} repeats say too little: give {LEAST_REPEATS} or more")
    samples: dict[str, list[Sample]] = {arm.name: [] for arm in arms}
    for number in range(repeats + 1):
        for arm in arms if number % 2 else reversed(arms):
            gc.collect()
            sample = arm.run()
            if number:
                samples[arm.name].append(sample)
    return samples


def spread(values: Sequence[float]) -> Spread:
    """Of two values or more."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(statistics.median(values), high - low)


def ratios(samples: Mapping[str, list[Sample]], over: str, under: str) -> Spread:
    """Latency of `over` to that of `under`, round by round."""
    pairs = zip(samples[over], samples[under], strict=True)
    return spread([one.latency_s / other.latency_s for one, other in pairs])
