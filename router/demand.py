"""What was asked of late, and how much of it was let in: who goes first when not all can. Pure."""

from __future__ import annotations

from collections import deque

_KEPT = 128
_NONE_REFUSED = 1e-6


class Demand:
    """The last requests that admission judged: what each would have cost, and whether it got in."""

    def __init__(self) -> None:
        self._last: deque[tuple[float, bool]] = deque(maxlen=_KEPT)

    def judged(self, work_s: float, let_in: bool) -> None:
        """One that takes so many gpu seconds asked, and got in or did not."""
        self._last.append((work_s, let_in))

    def dearness(self, work_s: float) -> float:
        """The share of them that were cheaper than this; those that cost the same count half."""
        cheaper = sum(other < work_s for other, _ in self._last)
        alike = sum(other == work_s for other, _ in self._last)
        return (cheaper + 0.5 * alike) / max(len(self._last), 1)

    def room(self, work_s: float, least: float) -> float:
        """What a request of this cost may use of the slack between idle and its limit, 0 to 1.

        While nobody is refused, all of it. The fewer get in, the sooner it falls with dearness,
        down to `least` for the dearest: so the cheapest get in, as many as there is room for. (A
        threshold at the share that gets in would hold itself down; a power does not.)
        """
        refused = sum(not let_in for _, let_in in self._last) / max(len(self._last), 1)
        power = 1.0 / max(refused, _NONE_REFUSED)
        return 1.0 - (1.0 - least) * self.dearness(work_s) ** power
