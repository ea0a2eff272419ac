"""The event loop: what happens next, and when; and how much durations vary, as measured ones do.

Events at one time happen in the order in which they were scheduled, so a seeded run is exact. A
scheduled event is never removed: whoever scheduled it checks on arrival that it still holds.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import numpy as np

_DRAWS = 1024


class Loop:
    """Simulated time and the events ahead; `now_s` is the time of the event being handled."""

    __slots__ = ("_heap", "_order", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = 0

    def at(self, time_s: float, handler: Callable[[Any], None], argument: Any = None) -> None:
        """Call `handler(argument)` at `time_s`, which must not lie in the past."""
        self._order += 1
        heappush(self._heap, (time_s, self._order, handler, argument))

    def run(self) -> None:
        """Handle events until none is left."""
        heap = self._heap
        while heap:
            self.now_s, _, handler, argument = heappop(heap)
            handler(argument)

    @property
    def pending(self) -> int:
        """Events not yet handled, those that no longer hold included."""
        return len(self._heap)


class Noise:
    """Lognormal factors of median 1; `sigma` is the standard deviation of their logarithm."""

    __slots__ = ("_factors", "_rng", "_sigma")

    def __init__(self, rng: np.random.Generator, sigma: float) -> None:
        self._rng = rng
        self._sigma = sigma
        self._factors: list[float] = []

    def factor(self) -> float:
        """The next factor."""
        if not self._sigma:
            return 1.0
        if not self._factors:
            self._factors = np.exp(self._rng.normal(0.0, self._sigma, _DRAWS)).tolist()
        return self._factors.pop()
