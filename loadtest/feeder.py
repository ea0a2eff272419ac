"""Makes a load test's sessions and the prompts of their first requests ahead of their time.

One thread of its own makes them, so that a long prompt does not keep the others from being sent; as
much is made ahead as a bound on sessions and bytes allows. Later turns are made when the turn
before has ended, in their pause.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from loadtest.client import Prepared
from workload.replay import Prompt, ReplaySession, Request

_SESSIONS_AHEAD = 512
_BYTES_AHEAD = 64 << 20
# One visit of the thread; later turns wait for its end.
_VISIT_S = 0.02
# A shorter pause is not worth the way through the thread.
_WORTH_A_THREAD_S = 0.05


@dataclass(frozen=True, slots=True)
class NotMade:
    """A prompt that could not be made, and why."""

    why: str
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Fed:
    """A session to send from `first` on, whose request is already made."""

    session: ReplaySession
    first: int
    made: Prepared | NotMade


class Feeder:
    """Sessions in order, made ahead; use as a context manager, from one event loop.

    `done`: how many turns of a session were answered in an earlier part of the run; sessions all
    of whose turns were are left out.
    """

    def __init__(
        self,
        sessions: Iterator[ReplaySession],
        prepare: Callable[[Prompt, int, str], Prepared],
        done: Mapping[str, int] | None = None,
    ) -> None:
        self._sessions, self._prepare, self._done = sessions, prepare, done or {}
        self._ready: deque[Fed] = deque()
        self._ready_bytes = 0
        self._is_over = False
        self._error: Exception | None = None
        self._visit: asyncio.Future[list[Fed]] | None = None
        self._one_reader = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")

    def __enter__(self) -> Feeder:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def prime(self) -> None:
        """Make the first sessions, before the clock of the run starts."""
        async with self._one_reader:
            await self._visited()

    async def next(self) -> Fed | None:
        """The next session, None after the last one.

        Raises what the iterator of sessions raised, after the sessions before it.
        """
        async with self._one_reader:
            while not self._ready and not (self._is_over and self._visit is None):
                await self._visited()
            if not self._ready:
                if self._error is not None:
                    raise self._error
                return None
            fed = self._ready.popleft()
            self._ready_bytes -= len(fed.made.body)
            if self._visit is not None and self._visit.done():
                await self._visited()
            is_low = len(self._ready) < _SESSIONS_AHEAD // 2 and self._ready_bytes < _BYTES_AHEAD
            if self._visit is None and is_low and not self._is_over:
                self._visit = self._start()
            return fed

    async def make(self, request: Request) -> Prepared | NotMade:
        if request.after_s < _WORTH_A_THREAD_S:
            return self._make(request)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._make, request)

    def _start(self) -> asyncio.Future[list[Fed]]:
        return asyncio.get_running_loop().run_in_executor(self._thread, self._fill)

    async def _visited(self) -> None:
        """Wait for the end of a visit, and take what it made."""
        self._visit = self._visit or self._start()
        await asyncio.wait([self._visit])  # which a cancellation leaves as it is
        made = self._visit.result()
        self._visit = None
        self._ready.extend(made)
        self._ready_bytes += sum(len(fed.made.body) for fed in made)

    def _fill(self) -> list[Fed]:
        """One visit of the thread: at least one session, unless they are over."""
        made: list[Fed] = []
        made_bytes, until_s = 0, time.monotonic() + _VISIT_S
        while not self._is_over and len(made) < _SESSIONS_AHEAD and made_bytes < _BYTES_AHEAD:
            try:
                session = next(self._sessions, None)
            except Exception as error:
                self._error, session = error, None
            if session is None:
                self._is_over = True
                break
            first = self._done.get(session.id, 0)
            if first < len(session.requests):
                made.append(Fed(session, first, self._make(session.requests[first])))
                made_bytes += len(made[-1].made.body)
            if made and time.monotonic() > until_s:
                break
        return made

    def _make(self, request: Request) -> Prepared | NotMade:
        try:
            return self._prepare(request.make_prompt(), request.output_tokens, request.tenant)
        except Exception as error:
            return NotMade(f"{type(error).__name__}: {error}"[:300])
