"""Just-in-time loads: when the next one may start.

A load that waits for the link holds blocks and gains nothing. So a load starts only while the link
is about to run empty: when its queue would be done before the engine could start another load. The
engine can do so once per iteration, and learns of a landed load an iteration late; hence it looks
two iterations ahead, and always allows one load.
"""

from __future__ import annotations

from kappa_scheduler.config import LinkRates
from kappa_scheduler.work import Work

# Weight of the newest iteration or load; bounds of the correction of the link's announced rate.
_NEWEST = 0.1
_LEAST_SCALE, _MOST_SCALE = 0.25, 8.0
_AHEAD_ITERATIONS = 2.0
# Roughly the interval at which an idle engine asks its connector.
_LEAST_AHEAD_S = 0.02
# Loads in flight where the link's rate is not known.
_BLIND = 2


class JustInTime:
    """A scheduler's estimate of its engine's link; `rates` is None where they are not known."""

    def __init__(self, rates: LinkRates | None) -> None:
        self._rates = rates
        self._scale = 1.0
        self._iteration_s = self._free_s = self._last_landed_s = 0.0
        # When each started to queue, and the seconds of link it was expected to take.
        self._loads: dict[Work, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def backlog_s(self, now_s: float) -> float:
        """Estimated seconds until the link runs empty."""
        return max(self._free_s - now_s, 0.0) if self._loads else 0.0

    def horizon_s(self) -> float:
        """Backlog below which another load may start."""
        return max(_AHEAD_ITERATIONS * self._iteration_s, _LEAST_AHEAD_S)

    def open(self, now_s: float) -> bool:
        """Whether another load may start."""
        if not self._loads or self._rates is None:
            return len(self._loads) < _BLIND
        return self.backlog_s(now_s) < self.horizon_s()

    def load_s(self, tokens: int) -> float:
        """Estimated link seconds of a load of `tokens` tokens."""
        return self._rates.load_s(tokens) * self._scale if self._rates else 0.0

    def start(self, work: Work, tokens: int, now_s: float) -> None:
        """A load starts, or queues."""
        seconds = self.load_s(tokens)
        self._free_s = max(self._free_s, now_s) + seconds if self._loads else now_s + seconds
        self._loads[work] = (now_s, seconds)

    def landed(self, work: Work, now_s: float) -> float:
        """A load landed; returns its link seconds and corrects the rate by them.

        A load that lands far too soon had less to load than expected, and does not correct it.
        """
        started_s, expected_s = self._loads.pop(work, (now_s, 0.0))
        took_s = max(now_s - max(started_s, self._last_landed_s), 0.0)
        self._last_landed_s = now_s
        empty = now_s - started_s < _LEAST_SCALE * expected_s
        if expected_s > 0 and took_s > 0 and not empty:
            # Reported up to two iterations late, so a load is believed slow only beyond that.
            seen = max(took_s - _AHEAD_ITERATIONS * self._iteration_s, min(took_s, expected_s))
            scale = self._scale * (1.0 + _NEWEST * (min(seen / expected_s, _MOST_SCALE) - 1.0))
            self._scale = min(max(scale, _LEAST_SCALE), _MOST_SCALE)
        self._free_s = now_s + self._queued_s()
        return expected_s if self._rates and not empty else took_s

    def forget(self, work: Work, now_s: float) -> float:
        """A load was given up; returns its expected link seconds."""
        _, expected_s = self._loads.pop(work, (now_s, 0.0))
        self._free_s = min(self._free_s, now_s + self._queued_s())
        return expected_s

    def _queued_s(self) -> float:
        return sum(seconds for _, seconds in self._loads.values())

    def ran(self, iteration_s: float) -> None:
        """Note an iteration's seconds."""
        self._iteration_s += _NEWEST * (iteration_s - self._iteration_s)
