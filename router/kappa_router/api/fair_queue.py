"""Turns for work of which only so much may run at a time: the rest waits in a queue that serves
tenants by weight. Prompts wait in it to be tokenized."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from kappa_router.api.tenants import Tenant

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Serves tenants by weight: start-time fair queueing, in the order of arrival within a tenant.

    Each tenant has a virtual time, which its work advances by cost / weight; who is least advanced
    is next. One that had nothing waiting begins at the time of the work begun last, so none saves
    up. P. Goyal, H. Vin, H. Cheng, "Start-time Fair Queuing", SIGCOMM 1996.
    """

    def __init__(self) -> None:
        # Of each tenant's items: order of arrival, advance, item.
        self._waiting: dict[str, deque[tuple[int, float, T]]] = {}
        self._reached: dict[str, float] = {}
        self._now = 0.0
        self._count = 0

    def put(self, item: T, tenant: str, weight: float, cost: float) -> None:
        """Add an item; `cost` in any unit that is the same for all, `weight` above zero."""
        if tenant not in self._waiting:
            self._reached[tenant] = max(self._reached.get(tenant, 0.0), self._now)
        self._waiting.setdefault(tenant, deque()).append((self._count, cost / weight, item))
        self._count += 1

    def take(self) -> T | None:
        """The next one, charged to its tenant. None: nothing waits, and all are even again."""
        if not self._waiting:
            self._reached.clear()
            self._now = 0.0
            return None
        tenant = min(self._waiting, key=lambda t: (self._reached[t], self._waiting[t][0][0]))
        _, advance, item = self._waiting[tenant].popleft()
        self._now = self._reached[tenant]
        self._reached[tenant] += advance
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        return item

    def drop(self, item: T, tenant: str) -> None:
        """Take an item out without a charge; harmless for one that does not wait."""
        left = deque(one for one in self._waiting.pop(tenant, ()) if one[2] is not item)
        if left:
            self._waiting[tenant] = left


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
