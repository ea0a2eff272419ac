"""What was asked of late, and how much of it was let in: who goes first when not all can. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from router.offers import Floats

_KEPT = 128
_NONE_REFUSED = 1e-6


@dataclass(frozen=True, slots=True)
class Asked:
    """One that asked. work_s: gpu seconds that it takes; slack_s: how long it could have waited."""

    at_s: float
    work_s: float
    slack_s: float
    let_in: bool


class Demand:
    """The last requests that admission judged: what each would have cost, and whether it got in."""

    def __init__(self) -> None:
        self._last: deque[Asked] = deque(maxlen=_KEPT)
        self._lent_s = 0.0
        self._lent_at_s = 0.0

    def judged(self, asked: Asked) -> None:
        """One asked, and got in or did not."""
        self._last.append(asked)

    def dearness(self, work_s: float) -> float:
        """The share of them that were cheaper than this; those that cost the same count half."""
        cheaper = sum(other.work_s < work_s for other in self._last)
        alike = sum(other.work_s == work_s for other in self._last)
        return (cheaper + 0.5 * alike) / max(len(self._last), 1)

    def room(self, work_s: float, least: float) -> float:
        """What a request of this cost may use of the slack between idle and its limit, 0 to 1.

        While nobody is refused, all of it. The fewer get in, the sooner it falls with dearness,
        down to `least` for the dearest: so the cheapest get in, as many as there is room for. (A
        threshold at the share that gets in would hold itself down; a power does not.)
        """
        refused = sum(not other.let_in for other in self._last) / max(len(self._last), 1)
        power = 1.0 / max(refused, _NONE_REFUSED)
        return 1.0 - (1.0 - least) * self.dearness(work_s) ** power

    def displaced(self, now_s: float, block_s: Floats) -> Floats:
        """Requests that would be late for one that computes for `block_s` before them.

        block_s: shape (workers,), as long as each would be busy. They come as of late, evenly to
        the workers; who comes sooner than its slack before the end waits no longer than it may.
        """
        slack_s = np.sort([other.slack_s for other in self._last])
        total_s = np.concatenate(([0.0], np.cumsum(slack_s)))
        fewer = np.searchsorted(slack_s, block_s)
        over_s = fewer * block_s - total_s[fewer]
        # What came in less time than that tells of a burst, not of what comes while it computes.
        since_s = now_s - self._last[0].at_s if self._last else 0.0
        window_s = np.maximum(block_s, since_s)
        counts: Floats = np.divide(
            over_s, window_s, out=np.zeros_like(over_s), where=window_s > 0
        ) / len(block_s)
        return counts

    def lend(self, work_s: float) -> None:
        """One got in that displaces others; `repaid_in_s` was asked before, at the same time."""
        self._lent_s += work_s

    def repaid_in_s(self, now_s: float, per_s: float) -> float:
        """Seconds until what was lent is repaid, at `per_s` seconds of work each second."""
        passed_s = max(now_s - self._lent_at_s, 0.0)
        self._lent_s = max(self._lent_s - per_s * passed_s, 0.0)
        self._lent_at_s = now_s
        return self._lent_s / per_s
