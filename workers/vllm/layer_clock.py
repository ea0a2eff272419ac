"""A paced step in layers: how long each lasts beside a load that brings the layers one by one.

An engine that loads a prefix in the prompt's own step computes a layer while the next is on its
way. On a paced node both last as long as on the named node, so each layer is held to its share of
the step, from the moment that its keys and values were there. Kept by `workers.vllm.host_tier`.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class LayerClock:
    """One step's layers, as many as `layers`; `clock` and `sleep` are real unless tested."""

    def __init__(
        self,
        layers: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._layers, self._clock, self._sleep = max(layers, 1), clock, sleep
        self._layer_s = 0.0
        self._ends_s: float | None = None

    def begin(self, pace_s: float) -> None:
        """A step begins that is to last so long, if nothing is waited for."""
        self._layer_s, self._ends_s = pace_s / self._layers, None

    def reach(self) -> None:
        """The next layer is about to attend: the one before lasts its share."""
        self._sleep_until(self._ends_s)

    def enter(self) -> None:
        """Its keys and values are there: its share begins."""
        self._ends_s = self._clock() + self._layer_s

    def owed_s(self) -> float | None:
        """Seconds that the last layer has left; None if no layer was waited for in this step."""
        return None if self._ends_s is None else max(self._ends_s - self._clock(), 0.0)

    def _sleep_until(self, moment_s: float | None) -> None:
        if moment_s is not None:
            remaining_s = moment_s - self._clock()
            if remaining_s > 0:
                self._sleep(remaining_s)
