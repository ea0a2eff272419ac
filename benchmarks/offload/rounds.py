"""Measures several ways of doing the same thing in turns: one round each, order reversed each time.

What drifts (clocks, other work on the machine) hits all of them, and what one leaves in caches hits
each as often from either side. The first round is a warm-up and dropped. Ratios are taken within a
round, where both ways met the same machine.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

LEAST_REPEATS = 5
LINK = "link-alone"
"""The arm that copies what the baseline loads, with nothing else to do."""
GATHER, COPY = "gather-alone", "copy-alone"
"""Of sparse decoding: a layer's choice, gathered; and as many bytes in one piece."""


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

    note: what the planner said. chosen: the planner would take this one. key: arms of equal keys
    would do the very same; only the first of them is run, and the others share its samples.
    """

    name: str
    run: Callable[[], Sample]
    predicted_s: float | None = None
    note: str = ""
    chosen: bool = False
    key: Hashable = None


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and interquartile range."""

    median: float
    iqr: float


def alternate(arms: Sequence[Arm], repeats: int) -> dict[str, list[Sample]]:
    """Samples of each arm by round; all arms of different keys run in every round.

    Raises:
        ValueError: fewer than `LEAST_REPEATS` rounds.
    """
    if repeats < LEAST_REPEATS:
        raise ValueError(f"{repeats} repeats say too little: give {LEAST_REPEATS} or more")
    leads = leaders(arms)
    run = [arm for arm in arms if leads[arm.name] == arm.name]
    samples: dict[str, list[Sample]] = {arm.name: [] for arm in run}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(repeats + 1):
            for arm in run if number % 2 else reversed(run):
                sample = arm.run()
                if number:
                    samples[arm.name].append(sample)
            # Between the rounds, so that no run pays for another's garbage.
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return {arm.name: samples[leads[arm.name]] for arm in arms}


def leaders(arms: Sequence[Arm]) -> dict[str, str]:
    """Of each arm, the first one with its key: that is the one which is run."""
    first: dict[Hashable, str] = {}
    return {
        arm.name: arm.name if arm.key is None else first.setdefault(arm.key, arm.name)
        for arm in arms
    }


def spread(values: Sequence[float]) -> Spread:
    """Of two values or more."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(statistics.median(values), high - low)


def ratios(samples: Mapping[str, list[Sample]], over: str, under: str) -> Spread:
    """Latency of `over` to that of `under`, round by round."""
    pairs = zip(samples[over], samples[under], strict=True)
    return spread([one.latency_s / other.latency_s for one, other in pairs])
