"""Waits for a worker's stream that end when the worker is lost, whatever Ray still hopes for. A
worker that seems gone fails the requests that have had no token yet, so that they can be tried
elsewhere; one that is gone for good fails all. On the ingress' event loop only."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Any


class WorkerLostError(Exception):
    """The worker that had the request is gone; the message is how that was noticed."""


class Wait:
    """One request's waits for its worker; waiting: for an item now, and not for a slow client."""

    def __init__(self) -> None:
        self.begun = False
        self._why = ""
        self._scope: asyncio.Timeout | None = None

    async def next(self, stream: AsyncGenerator[Any, None], timeout_s: float | None = None) -> Any:
        """The stream's next item. StopAsyncIteration: there is none. WorkerLostError: the worker
        was lost. TimeoutError: nothing came within `timeout_s`."""
        if self._why:
            raise WorkerLostError(self._why)
        try:
            async with asyncio.timeout(timeout_s) as self._scope:
                item = await anext(stream)
        except TimeoutError:
            if self._why:
                raise WorkerLostError(self._why) from None
            raise
        finally:
            self._scope = None
        self.begun = True
        return item

    @property
    def waiting(self) -> bool:
        return self._scope is not None

    def lose(self, why: str) -> None:
        """The worker is lost: the wait in progress ends now, and each later one at once."""
        if not self._why:
            self._why = why
            if self._scope is not None and not self._scope.expired():
                self._scope.reschedule(asyncio.get_running_loop().time())


class Waits:
    """Who waits for which worker."""

    def __init__(self) -> None:
        self._by_worker: defaultdict[str, set[Wait]] = defaultdict(set)

    def __len__(self) -> int:
        return sum(map(len, self._by_worker.values()))

    def begin(self, worker: str) -> Wait:
        """A request waits for `worker` from now on; pair with `end`."""
        wait = Wait()
        self._by_worker[worker].add(wait)
        return wait

    def end(self, worker: str, wait: Wait) -> None:
        """It waits no more; it may be ended twice."""
        waits = self._by_worker.get(worker, set())
        waits.discard(wait)
        if not waits:
            self._by_worker.pop(worker, None)

    def on(self, worker: str) -> bool:
        """Whether anybody waits for an item of `worker` now."""
        return any(wait.waiting for wait in self._by_worker.get(worker, ()))

    def lose(self, worker: str, why: str, *, begun: bool) -> int:
        """Fail those that wait for `worker`; `begun`: also those that have had tokens. How many."""
        lost = [w for w in self._by_worker.get(worker, ()) if begun or not w.begun]
        for wait in lost:
            wait.lose(why)
        return len(lost)
