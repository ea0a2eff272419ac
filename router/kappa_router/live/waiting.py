"""Waits for what a worker computes before a request is decided; they end when it is lost."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class WorkerLostError(Exception):
    """The worker that had the request is gone; the message is how that was noticed."""


class Wait:
    """One request's wait for its worker."""

    def __init__(self) -> None:
        self._why = ""
        self._scope: asyncio.Timeout | None = None

    async def of(self, answer: Coroutine[Any, Any, T]) -> T:
        """The result of `answer`, which is cancelled, and WorkerLostError raised, if the worker is
        lost before."""
        if self._why:
            answer.close()
            raise WorkerLostError(self._why)
        try:
            async with asyncio.timeout(None) as self._scope:
                return await answer
        except TimeoutError:
            if self._why:
                raise WorkerLostError(self._why) from None
            raise
        finally:
            self._scope = None

    async def lost(self) -> str:
        """Wait until the worker is lost; how that was noticed."""
        try:
            if not self._why:
                async with asyncio.timeout(None) as self._scope:
                    await asyncio.get_running_loop().create_future()
        except TimeoutError:
            pass
        finally:
            self._scope = None
        return self._why

    @property
    def waiting(self) -> bool:
        return self._scope is not None

    def lose(self, why: str) -> None:
        """The worker is lost: the wait ends now."""
        if not self._why:
            self._why = why
            if self._scope is not None and not self._scope.expired():
                self._scope.reschedule(asyncio.get_running_loop().time())


class Waits:
    """The requests that wait for each worker."""

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
        """Whether anybody waits for `worker` now."""
        return any(wait.waiting for wait in self._by_worker.get(worker, ()))

    def lose(self, worker: str, why: str) -> int:
        """Fail those that wait for `worker`. How many."""
        lost = list(self._by_worker.get(worker, ()))
        for wait in lost:
            wait.lose(why)
        return len(lost)
