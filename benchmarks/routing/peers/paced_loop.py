"""The simulator's event loop on the wall clock, for nodes that are emulated behind real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from heapq import heappop
from typing import Any

from simulator.loop import Loop

_LATE_KEPT = 200_000


class PacedLoop(Loop):
    """The simulator's loop, whose events happen when the wall clock reaches them.

    An event is handled at its own simulated time, however late the process wakes up, so the
    physics stays exact; only the news of it are late. `dilation`: wall seconds per simulated one.
    late_s: by how many wall seconds, for the latest events.
    """

    def __init__(self, dilation: float) -> None:
        super().__init__()
        self.dilation = dilation
        self.late_s: deque[float] = deque(maxlen=_LATE_KEPT)
        self._origin_s = time.monotonic()
        self._sooner = asyncio.Event()
        self._broken: Exception | None = None

    def at(self, time_s: float, handler: Callable[[Any], None], argument: Any = None) -> None:
        """Schedule; a time just passed is taken as now."""
        super().at(max(time_s, self.now_s), handler, argument)
        self._sooner.set()

    def catch_up(self) -> None:
        """Handle all that is due and make it now: to be called before anything comes in.

        Raises:
            RuntimeError: an event's handler failed before; nothing can be trusted after that.
        """
        if self._broken is not None:
            raise RuntimeError("an emulated node broke") from self._broken
        wall_s = (time.monotonic() - self._origin_s) / self.dilation
        while self._heap and self._heap[0][0] <= wall_s:
            self.now_s, _, handler, argument = heappop(self._heap)
            self.late_s.append(time.monotonic() - self._origin_s - self.now_s * self.dilation)
            try:
                handler(argument)
            except Exception as error:
                self._broken = error
                self._sooner.set()
                raise
        self.now_s = max(self.now_s, wall_s)

    async def drive(self) -> None:
        """Handle events as they come due, until cancelled."""
        while True:
            self.catch_up()
            self._sooner.clear()
            wait_s = None
            if self._heap:
                wait_s = max((self._heap[0][0] - self.now_s) * self.dilation, 0.0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._sooner.wait(), wait_s)
