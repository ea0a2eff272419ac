"""A link that waits and fails when a test says so."""

from __future__ import annotations

import threading
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
