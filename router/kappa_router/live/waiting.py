"""Waits for what a worker computes: they end when it is lost."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
Wait = asyncio.Future[str]
"""One request's wait for its worker; done once that is lost, with how that was noticed."""


class WorkerLostError(Exception):
    """The worker that had the request is gone; the message is how that was noticed."""


async def unless_lost(wait: Wait, answer: Coroutine[Any, Any, T]) -> T:
    """The result of `answer`, which is cancelled, and WorkerLostError raised, if the worker is lost
    before."""
    answering = asyncio.create_task(answer)
    either: tuple[asyncio.Future[Any], ...] = answering, wait
    try:
        await asyncio.wait(either, return_when="FIRST_COMPLETED")
        if answering.done():
            return answering.result()
        raise WorkerLostError(wait.result())
    finally:
        answering.cancel()


class Waits:
    """The requests that wait for each worker."""

    def __init__(self) -> None:
        self._by_worker: defaultdict[str, set[Wait]] = defaultdict(set)

    def __len__(self) -> int:
        return sum(map(len, self._by_worker.values()))

    def begin(self, worker: str) -> Wait:
        """A request waits for `worker` from now on; pair with `end`."""
        wait: Wait = asyncio.get_running_loop().create_future()
        self._by_worker[worker].add(wait)
        return wait

    def end(self, worker: str, wait: Wait) -> None:
        """It waits no more; it may be ended twice."""
        waits = self._by_worker.get(worker, set())
        waits.discard(wait)
        if not waits:
            self._by_worker.pop(worker, None)

    def on(self, worker: str) -> bool:
        """Whether anybody waits for `worker` now, who has not been told that it is lost."""
        return not all(wait.done() for wait in self._by_worker.get(worker, ()))

    def lose(self, worker: str, why: str) -> None:
        """The worker is lost: all waits for it end now."""
        for wait in self._by_worker.get(worker, ()):
            if not wait.done():
                wait.set_result(why)
