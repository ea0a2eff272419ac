"""Makes a load test's sessions and the prompts of their first requests ahead of their time.

It works in one thread of its own, so that a long prompt does not keep the others from being sent;
as much is made ahead as a bound on sessions and bytes allows. Later turns are made when the turn
before has ended, in their pause. Called by the runner.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice

from loadtest.client import Prepared
from workload.replay import Prompt, ReplaySession, Request

_SESSIONS_AHEAD = 512
_BYTES_AHEAD = 64 << 20
# One visit of the thread; later turns wait for its end.
_VISIT_S = 0.02
# A shorter pause is not worth the way through the thread.
_WORTH_A_THREAD_S = 0.05

Prepare = Callable[[Prompt, int], Prepared]


@dataclass(frozen=True, slots=True)
class NotMade:
    """A prompt that could not be made, and why."""

    why: str


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
        prepare: Prepare,
        done: Mapping[str, int] | None = None,
    ) -> None:
        self._sessions, self._prepare, self._done = sessions, prepare, done or {}
        self._ready: deque[Fed] = deque()
        # Each counted by one thread only: made by ours, taken by the event loop's.
        self._made_bytes = self._taken_bytes = 0
        self._is_over = False
        self._visit: asyncio.Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")

    def __enter__(self) -> Feeder:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def prime(self) -> None:
        """Make the first sessions, before the clock of the run starts."""
        if self._visit is None and not self._ready and not self._is_over:
            self._visit = self._start()
            await asyncio.wait([self._visit])

    async def next(self) -> Fed | None:
        """The next session, None after the last one.

        Raises what the iterator of sessions raised, after the sessions before it.
        """
        while not self._ready:
            if self._visit is None:
                if self._is_over:
                    return None
                self._visit = self._start()
            # Many may wait for one visit, and the first to wake forgets it, or begins another.
            visit = self._visit
            await asyncio.wait([visit])
            if not self._ready:
                visit.result()
            self._settle()
        fed = self._ready.popleft()
        self._taken_bytes += _size(fed.made)
        self._settle()
        if self._visit is None and not self._is_over and len(self._ready) < _SESSIONS_AHEAD // 2:
            self._visit = self._start()
        return fed

    async def make(self, request: Request) -> Prepared | NotMade:
        if request.after_s < _WORTH_A_THREAD_S:
            return self._make(request)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._make, request)

    def _start(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().run_in_executor(self._thread, self._fill)

    def _settle(self) -> None:
        """Forget a visit that is over; one that failed stays, to be raised when nothing is left."""
        visit = self._visit
        if visit is not None and visit.done() and visit.exception() is None:
            self._visit = None

    def _fill(self) -> None:
        until_s = time.monotonic() + _VISIT_S
        while (
            len(self._ready) < _SESSIONS_AHEAD
            and (not self._ready or self._made_bytes - self._taken_bytes < _BYTES_AHEAD)
            and not self._is_over
        ):
            session = next(self._sessions, None)
            if session is None:
                self._is_over = True
                return
            first = self._done.get(session.id, 0)
            if first < len(session.requests):
                made = self._make(session.requests[first])
                self._made_bytes += _size(made)
                self._ready.append(Fed(session, first, made))
            if time.monotonic() > until_s and self._ready:
                return

    def _make(self, request: Request) -> Prepared | NotMade:
        try:
            return self._prepare(request.make_prompt(), request.output_tokens)
        except Exception as error:
            return NotMade(f"{type(error).__name__}: {error}"[:300])


def _size(made: Prepared | NotMade) -> int:
    return len(made.body) if isinstance(made, Prepared) else 0


def bounded(
    sessions: Iterator[ReplaySession], most_sessions: int | None, most_requests: int | None
) -> Iterator[ReplaySession]:
    """The first sessions, with so many requests in all; the last session may be cut short."""
    left = most_requests
    for session in islice(sessions, most_sessions):
        if left is None:
            yield session
            continue
        requests = session.requests[:left]
        left -= len(requests)
        yield replace(session, requests=requests)
        if not left:
            return
