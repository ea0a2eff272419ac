"""A link that waits and fails when a test says so."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from kappa_engine.transfer import Copies, CpuMover, Direction


class Link(CpuMover):
    """A link that can be held, or broken: `breaks` says of each copy whether it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.breaks: Callable[[Direction, Copies], bool] = lambda direction, copies: False

    def _copy(self, direction: Direction, copies: Copies) -> None:
        assert self.open.wait(20)
        if self.breaks(direction, copies):
            raise OSError("the link is down")
        super()._copy(direction, copies)


def lags(direction: Direction, copies: Copies) -> bool:
    """As `Link.breaks`: no copy fails, but each comes late. What computes with its target before
    it is there computes NaN."""
    for target, _ in copies if direction == "h2d" else ():
        target.fill_(math.nan)
    time.sleep(1e-3)
    return False
