"""Makes a load test's sessions and the prompts of their first requests ahead of their time.

A thread of its own makes them, so that a long prompt does not keep the others from being sent; how
far ahead is bounded. Later turns are made when the turn before has ended, in their pause.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from kappa_loadtest.client import Prepared
from kappa_workload.replay import Prompt, ReplaySession, Request

# Of the longest prompts, some 100 MB.
_SESSIONS_AHEAD = 128
# How often to look where the next one is not made yet.
_LOOK_S = 0.002
# A shorter pause is not worth the way through the thread.
_WORTH_A_THREAD_S = 0.05


@dataclass(frozen=True, slots=True)
class NotMade:
    """A prompt that could not be made, and why."""

    why: str


@dataclass(frozen=True, slots=True)
class Fed:
    """A session to send from turn `first` on, with that turn's request."""

    session: ReplaySession
    first: int
    made: Prepared | NotMade


class Feeder:
    """Sessions in order, made ahead; use as a context manager, from one event loop.

    `done`: turns of each session that were answered in an earlier part of the run; sessions with
    all turns answered are left out.
    """

    def __init__(
        self,
        sessions: Iterator[ReplaySession],
        prepare: Callable[[Prompt, int, str], Prepared],
        done: Mapping[str, int] | None = None,
    ) -> None:
        self._sessions, self._prepare, self._done = sessions, prepare, done or {}
        self._ready: queue.Queue[Fed] = queue.Queue(_SESSIONS_AHEAD)
        self._error: Exception | None = None
        self._is_closed = False
        self._later = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._thread = threading.Thread(target=self._fill, name="sessions", daemon=True)

    def __enter__(self) -> Feeder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        while self._thread.is_alive():  # it may wait for room
            with suppress(queue.Empty):
                self._ready.get_nowait()
            self._thread.join(_LOOK_S)
        self._later.shutdown(cancel_futures=True)

    async def prime(self) -> None:
        """Wait for the first session, before the clock of the run starts."""
        while self._ready.empty() and self._thread.is_alive():
            await asyncio.sleep(_LOOK_S)

    async def next(self) -> Fed | None:
        """The next session, None after the last one.

        Raises what the iterator of sessions raised, after the sessions before it.
        """
        while True:
            is_over = not self._thread.is_alive()  # looked at first: it may end in between
            with suppress(queue.Empty):
                return self._ready.get_nowait()
            if is_over:
                break
            await asyncio.sleep(_LOOK_S)
        if self._error is not None:
            raise self._error
        return None

    async def make(self, request: Request) -> Prepared | NotMade:
        if request.after_s < _WORTH_A_THREAD_S:
            return self._make(request)
        return await asyncio.get_running_loop().run_in_executor(self._later, self._make, request)

    def _fill(self) -> None:
        try:
            for session in self._sessions:
                first = self._done.get(session.id, 0)
                if first < len(session.requests):
                    self._ready.put(Fed(session, first, self._make(session.requests[first])))
                if self._is_closed:
                    return
        except Exception as error:
            self._error = error

    def _make(self, request: Request) -> Prepared | NotMade:
        try:
            return self._prepare(request.make_prompt(), request.output_tokens, request.tenant)
        except Exception as error:
            return NotMade(f"{type(error).__name__}: {error}"[:300])
