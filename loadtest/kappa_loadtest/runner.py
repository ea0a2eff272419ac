"""Sends each request of a load test when it is due, regardless of the outcome of earlier ones.

Open loop: sessions begin at their arrivals. Closed loop: a number of sessions at a time. In both, a
later turn is due a pause after its predecessor has ended. Latency counts from when a request was
due, so a client that is late hides nothing (coordinated omission). All streams live in one event
loop; a bound on them holds requests back and says how often.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np

from kappa_loadtest.client import Endpoint, Prepared
from kappa_loadtest.cluster import Decisions
from kappa_loadtest.feeder import Fed, Feeder, NotMade
from kappa_loadtest.run_folder import RequestRecord
from kappa_workload.replay import Request

T = TypeVar("T")

DEFAULT_IN_FLIGHT = 16_384
_LONGEST_RETRY_S = 60.0
_FIRST_RETRY_S = 0.5
# Timers of an event loop have a resolution of a millisecond: a shorter one would spin.
_TICK_S = 0.001
# Errors worth another attempt.
_MAY_PASS = ("connect", "timeout", "cut", "429", "503")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Options of a run: concurrency, retries and bounds."""

    closed: int | None = None  # sessions at a time; None: an open loop
    retries: int = 0  # further attempts after a failure that may pass
    in_flight: int = DEFAULT_IN_FLIGHT  # most streams at once
    duration_s: float | None = None  # nothing is due after it; None: no bound
    grace_s: float = 10.0  # for streams to end after a stop
    seed: int = 0  # of pauses before retries


@dataclass(slots=True)
class Counts:
    """The progress of a run."""

    sessions: int = 0
    sent: int = 0
    ended: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    held_back: int = 0  # requests that waited because of the bound on streams
    retried: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def to_dict(self) -> dict[str, Any]:
        """The counts to keep after the run."""
        kept = asdict(self) | {"errors": dict(sorted(self.errors.items()))}
        del kept["in_flight"]
        return kept


class Runner:
    """One run, or the rest of one.

    endpoint: open; its clock is that of all records. write: called with every record as its request
    ends; if it raises, the run stops and raises the same. counts: updated during the run. begin_s:
    when this part of the run begins; sessions that came before are due then.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        settings: RunSettings,
        write: Callable[[RequestRecord], None],
        counts: Counts,
        decisions: Decisions | None = None,
        begin_s: float = 0.0,
    ) -> None:
        self._endpoint, self._settings, self._write = endpoint, settings, write
        self._now_s, self.counts, self._decisions = endpoint.now_s, counts, decisions
        self._begin_s = begin_s
        self._slots = asyncio.Semaphore(settings.in_flight)
        self._rng = np.random.default_rng(settings.seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self.is_stopped = False

    async def run(self, feeder: Feeder) -> None:
        """Send everything that `feeder` gives; returns when the last stream has ended.

        Raises what `write` raised, after streams had their grace, or the iterator of sessions,
        after the sessions that it gave.
        """
        try:
            if self._settings.closed is None:
                await self._open_loop(feeder)
            for _ in range(self._settings.closed or 0):
                self._spawn(self._closed_loop(feeder))
            while self._tasks and not self.is_stopped:
                self._changed.clear()
                await self._changed.wait()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=self._settings.grace_s)
        finally:
            self.is_stopped = True
            rest = list(self._tasks)
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop sending; streams may end within the grace. A second call ends them now.

        Call it on the event loop: in a signal handler added to the loop, or in a task.
        """
        for task in list(self._tasks if self.is_stopped else self._idle):
            task.cancel()
        self.is_stopped = True
        self._changed.set()

    # -- when ---------------------------------------------------------------------------------

    async def _open_loop(self, feeder: Feeder) -> None:
        while (fed := await self._next(feeder)) is not None:
            due_s = max(fed.session.arrival_s, self._begin_s)
            if self._is_over(due_s) or not await self._wait_until(due_s):
                return
            self._spawn(self._session(fed, due_s, feeder))

    async def _closed_loop(self, feeder: Feeder) -> None:
        while (fed := await self._next(feeder)) is not None:
            due_s = self._now_s()
            if self._is_over(due_s):
                return
            await self._session(fed, due_s, feeder)

    async def _next(self, feeder: Feeder) -> Fed | None:
        try:
            return None if self.is_stopped else await self._unless_stopped(feeder.next())
        except Exception as error:
            # Like the end of the workload; what was begun goes on.
            self._failure = self._failure or error
            return None

    async def _session(self, fed: Fed, due_s: float, feeder: Feeder) -> None:
        """Send a session's requests in order, also after one that failed: the offered load does
        not depend on answers."""
        if self.is_stopped:
            return
        self.counts.sessions += 1
        made = fed.made
        requests = fed.session.requests
        for turn in range(fed.first, len(requests)):
            if turn > fed.first:
                due_s = self._now_s() + requests[turn].after_s
                if self._is_over(due_s):
                    return
                made = await feeder.make(requests[turn])
                if not await self._wait_until(due_s):
                    return
            if not await self._request(requests[turn], due_s, made):
                return

    async def _wait_until(self, due_s: float) -> bool:
        """Sleep until it is time; False if the run was stopped."""
        while not self.is_stopped and (left_s := due_s - self._now_s()) > 0:
            await self._unless_stopped(asyncio.sleep(max(left_s, _TICK_S)))
        return not self.is_stopped

    def _is_over(self, due_s: float) -> bool:
        duration_s = self._settings.duration_s
        return self.is_stopped or (duration_s is not None and due_s > duration_s)

    async def _unless_stopped(self, waiting: Awaitable[T]) -> T | None:
        """Wait, with nothing on its way; None if the run was stopped meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        self._idle.add(task)
        try:
            return await waiting
        except asyncio.CancelledError:
            if not self.is_stopped:
                raise
            return None
        finally:
            self._idle.discard(task)

    # -- one request --------------------------------------------------------------------------

    async def _request(self, request: Request, due_s: float, made: Prepared | NotMade) -> bool:
        """Send a request until it succeeds or no retry is left; False if the run was stopped."""
        record = RequestRecord(
            request.session,
            request.turn,
            request.tenant,
            self._endpoint.settings.priority(request.tenant),
            scheduled_s=due_s,
            input_tokens=request.input_tokens,
            output_tokens=self._endpoint.settings.output_tokens(request.output_tokens),
            cached_tokens=request.cached_tokens,
            new_tokens=request.new_tokens,
        )
        if isinstance(made, NotMade):
            record.sent_s = record.ended_s = self._now_s()
            record.error, record.error_detail = "prompt", made.why
            self._ended(record)
            return True
        if not await self._slot():
            return False
        while True:
            retry_after_s = await self._attempt(made, record)
            may_pass = record.error in _MAY_PASS or record.error.startswith("http_5")
            if record.attempt >= self._settings.retries or not may_pass or self.is_stopped:
                break
            # The seconds of Retry-After, else twice as long each time, with jitter.
            jitter = 0.5 + self._rng.random() / 2
            pause_s = min(_FIRST_RETRY_S * 2.0**record.attempt, _LONGEST_RETRY_S) * jitter
            if retry_after_s is not None:
                pause_s = min(retry_after_s, _LONGEST_RETRY_S)
            # Stopped before another attempt: the record has the outcome of the last one.
            if not await self._wait_until(self._now_s() + pause_s) or not await self._slot():
                break
            record.retried.append(record.error)
            record.attempt += 1
            self.counts.retried += 1
        self._ended(record)
        return record.error != "cancelled"

    async def _slot(self) -> bool:
        """Take a slot among the streams; False if the run was stopped while waiting for one."""
        if not self._slots.locked():
            return await self._slots.acquire()
        self.counts.held_back += 1
        return bool(await self._unless_stopped(self._slots.acquire()))

    async def _attempt(self, made: Prepared, record: RequestRecord) -> float | None:
        counts = self.counts
        counts.sent += 1
        counts.in_flight += 1
        counts.most_in_flight = max(counts.most_in_flight, counts.in_flight)
        ticket = self._decisions.ticket() if self._decisions else 0
        try:
            return await self._endpoint.send(made, record)
        except asyncio.CancelledError:
            # Written like any other; the task then ends by itself, as nothing more is sent.
            return None
        finally:
            counts.in_flight -= 1
            self._slots.release()
            if self._decisions and record.node and record.request_id:
                self._decisions.want(record.request_id, ticket)

    def _ended(self, record: RequestRecord) -> None:
        self.counts.ended += 1
        if record.error:
            self.counts.errors[record.error] += 1
        try:
            self._write(record)
        except Exception as error:
            self._fail(error)

    # -- tasks --------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        if not self.is_stopped:
            self.stop()
