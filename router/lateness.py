"""How much later than predicted each worker answers of late: what admission adds to a prediction.

A prediction prices what is known to be queued. Past saturation more happens to a request than that:
slots run out, prompts that come after it slow its tokens. So the router compares each outcome with
what it had predicted for it, and each request that should have begun by now with the clock. Pure;
seconds are real ones, and every figure fades when nothing new is heard.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from router.pricing import MOST_USE

_KEPT = 16
_LATE_QUANTILE = 0.8
_SHORT_S, _LONG_S = 3.0, 12.0
# News of a worker that is this old (in its dilated seconds) counts for a third.
_FADE_S = 0.5
_LEAST_PACE, _MOST_PACE = 0.6, 2.0


@dataclass(slots=True)
class _Flight:
    worker: str
    sent_s: float
    ttft_s: float
    alone_s: float
    first_s: float = math.nan


@dataclass(slots=True)
class _Worker:
    dilation: float = 1.0
    late_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    late_at_s: float = -math.inf
    pace: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    short: float = 0.0
    long: float = 0.0
    sent_at_s: float = -math.inf
    # By request, in the order in which they were sent: the first one has waited longest.
    waiting: dict[str, None] = field(default_factory=dict)


class Lateness:
    """Outcomes against predictions, by worker."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._flights: dict[str, _Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def sent(
        self,
        request_id: str,
        worker: str,
        now_s: float,
        ttft_s: float,
        delay_s: float,
        alone_s: float = 0.0,
        dilation: float = 1.0,
    ) -> None:
        """A request goes to `worker`; its TTFT is predicted, and by how much it delays others.

        alone_s: predicted seconds per token if no prompts come in between; 0: nothing is.
        """
        self.ended(request_id)
        state = self._workers.setdefault(worker, _Worker())
        state.dilation = dilation
        state.waiting[request_id] = None
        state.short = self.share(worker, now_s) + delay_s / (_SHORT_S * dilation)
        state.long = self.share(worker, now_s, long=True) + delay_s / (_LONG_S * dilation)
        state.sent_at_s = now_s
        self._flights[request_id] = _Flight(worker, now_s, ttft_s, alone_s)

    def first_token(self, request_id: str, now_s: float) -> None:
        """Its first token came."""
        flight = self._flights.get(request_id)
        state = self._workers.get(flight.worker) if flight else None
        if flight is None or state is None or not math.isnan(flight.first_s):
            return
        flight.first_s = now_s
        state.waiting.pop(request_id, None)
        state.late_s.append(now_s - flight.sent_s - flight.ttft_s)
        state.late_at_s = now_s

    def ended(self, request_id: str, now_s: float = 0.0, tokens: int = 0) -> None:
        """It is over, whole with so many tokens; 0 tells nothing of their pace."""
        flight = self._flights.pop(request_id, None)
        state = self._workers.get(flight.worker) if flight else None
        if flight is None or state is None:
            return
        state.waiting.pop(request_id, None)
        if tokens > 1 and flight.alone_s > 0 and not math.isnan(flight.first_s):
            # By the prompts that came meanwhile, not by those before it: else a rise of their share
            # would count twice, until outcomes of it are in.
            expected_s = _stretched_s(flight.alone_s, self.share(flight.worker, now_s))
            state.pace.append((now_s - flight.first_s) / (tokens - 1) / expected_s)

    def left(self, worker: str) -> None:
        """A worker is gone, and what was in flight there."""
        self._workers.pop(worker, None)
        for request_id in [r for r, flight in self._flights.items() if flight.worker == worker]:
            del self._flights[request_id]

    def late_s(self, worker: str, now_s: float) -> float:
        """Seconds by which a first token there comes after its prediction, at least 0.

        Four of five came no later of late; and no request has waited longer than this for nothing.
        """
        state = self._workers.get(worker)
        if state is None:
            return 0.0
        learnt_s = _typical(state.late_s, 0.0, _LATE_QUANTILE) * _fresh(
            state.late_at_s, now_s, state.dilation
        )
        oldest = next(iter(state.waiting), None)
        overdue_s = 0.0
        if oldest is not None:
            flight = self._flights[oldest]
            overdue_s = now_s - flight.sent_s - flight.ttft_s
        return max(learnt_s, overdue_s, 0.0)

    def pace(self, worker: str) -> float:
        """How many times longer tokens took there than expected, of late; 1 without news."""
        state = self._workers.get(worker)
        if state is None:
            return 1.0
        return min(max(_typical(state.pace, 1.0), _LEAST_PACE), _MOST_PACE)

    def token_s(self, worker: str, now_s: float, alone_s: float, *, long: bool = False) -> float:
        """Seconds per token to expect there, where it is `alone_s` without prompts in between."""
        share = self.share(worker, now_s, long=long)
        return _stretched_s(self.pace(worker) * alone_s, share)

    def share(self, worker: str, now_s: float, *, long: bool = False) -> float:
        """Delay by the prompts sent there, in seconds per second: of the last 3, or of the last 12.

        The short view is news; in the long one a prompt of a second is not yet a flood.
        """
        state = self._workers.get(worker)
        if state is None:
            return 0.0
        share, window_s = (state.long, _LONG_S) if long else (state.short, _SHORT_S)
        return share * math.exp(-max(now_s - state.sent_at_s, 0.0) / (window_s * state.dilation))


def _stretched_s(alone_s: float, share: float) -> float:
    """Seconds per token where prompts take this share of the time."""
    return alone_s / (1 - min(share, MOST_USE))


def _typical(samples: deque[float], without: float, quantile: float = 0.5) -> float:
    """A quantile of the samples, the middle by default; `without` any there is that instead."""
    if not samples:
        return without
    ordered = sorted(samples)
    return ordered[int(quantile * len(ordered))]


def _fresh(at_s: float, now_s: float, dilation: float) -> float:
    return math.exp(-max(now_s - at_s, 0.0) / (_FADE_S * dilation))
