"""Turns for work of which only so much may run at a time: the rest waits, fairly among tenants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from router.api.fair_queue import FairQueue
from router.api.tenants import Tenant


class FairTurns:
    """Lets `most` pieces of work run at a time, on one event loop."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()

    @contextlib.asynccontextmanager
    async def turn(self, tenant: Tenant, cost: int) -> AsyncIterator[None]:
        """A turn for the body of the `async with`."""
        await self.take(tenant, cost)
        try:
            yield
        finally:
            self.leave()

    async def take(self, tenant: Tenant, cost: int) -> None:
        """Wait for a turn, which lasts until `leave`; cancelled meanwhile, it leaves the queue."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put(turn, tenant.name, tenant.weight, max(cost, 1))
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            self._queue.drop(turn, tenant.name)
            if turn.done() and not turn.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """A turn is over: the next one begins."""
        self._free += 1
        self._next()

    def _next(self) -> None:
        while self._free and (turn := self._queue.take()) is not None:
            if not turn.cancelled():
                self._free -= 1
                turn.set_result(None)
