"""So much at a time of what somebody else does for us, and the rest in a queue fair to tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from router.api.fair_queue import FairQueue
from router.api.tenants import Tenant

T = TypeVar("T")


class TokenizingTurns:
    """Lets `most` pieces of work run at a time, on one event loop."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()

    async def run(self, tenant: Tenant, cost: int, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, or what it raises, once it is its turn; cancelled while it waits,
        it leaves the queue."""
        if self._free:
            self._free -= 1
        else:
            await self._turn(tenant, cost)
        try:
            return await work()
        finally:
            self._next()

    async def _turn(self, tenant: Tenant, cost: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put(turn, tenant.name, tenant.weight, max(cost, 1))
        try:
            await turn
        except asyncio.CancelledError:
            self._queue.drop(turn, tenant.name)
            if turn.done() and not turn.cancelled():
                self._next()
            raise

    def _next(self) -> None:
        while (turn := self._queue.take()) is not None and turn.done():
            pass
        if turn is None:
            self._free += 1
        else:
            turn.set_result(None)
