"""Requests in flight through Envoy: from the decider's answer to the end that Envoy logs.

Each ends exactly once: by its entry in the log, because its client left as it was decided, or
because Envoy said nothing about it for too long. On the way a server may fail it, and Envoy asks
whether the next may be tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic

import structlog

from kappa import metrics as m
from kappa.protocol import TO_ID_HEADER
from kappa_router.api import errors
from kappa_router.api.errors import ApiError
from kappa_router.api.tenants import Lease, Tenant
from kappa_router.decision import NoWorkerError, RouteRequest
from kappa_router.gateway.authz import Go, Verdict, refusal
from kappa_router.gateway.events import StreamEnd
from kappa_router.gateway.scene import DeciderRule, F, Scene, Used
from kappa_router.live.live_router import LiveRouter
from kappa_router.live.membership import DIED, SILENT, STALLED

log = structlog.get_logger(__name__)

# Answers by which a server says that it has no room, and that it was too late.
FULL, LATE = 429, 504
# By which a worker of ours says that its engine died, or that it takes no more.
_NOT_SERVED = 503
# Of a stream of which neither count nor usage came: bytes of an event with one token.
_EVENT_BYTES = 200
# Envoy logs a failed attempt some milliseconds after it asks about the next.
_FAILURE_S = 0.5
# A worker reports within milliseconds unless it is busy, and may do so after the log.
_REPORT_S = 2.0
_SWEEP_S = 10.0
_CUT_S = 1.0
# Why a worker that is not dead is given up; and its client's own patience.
_UNWELL, _OVERDUE = (SILENT, STALLED), "deadline"


@dataclass(slots=True, eq=False)
class Aloft(Generic[F]):
    """A request that went on to a server."""

    request_id: str
    tenant: Tenant
    lease: Lease
    flight: F
    request: RouteRequest
    """Without its tokens."""
    servers: list[str]
    """In the order in which they are tried."""
    heard_s: float
    """When it came, by the monotonic clock."""
    digest: str = ""
    """Names its content."""
    anthropic: bool = False
    counts: bool = True
    """Its failures are its server's."""
    repeatable: bool = True
    """It may be done twice."""
    streamed: bool = False
    has_deadline: bool = False
    """Being late may be its client's own wish."""
    sent_s: float = 0.0
    """When its present server was chosen."""
    held: bool = False
    """Being late may be its client's own wish where Envoy ends an attempt, too."""
    begun: bool = False
    """Its first token came."""
    used: Used | None = None
    end: StreamEnd | None = None
    ended_as: str = ""
    untold: asyncio.TimerHandle | None = None
    """Ends it if no count of its tokens comes."""
    failures: list[StreamEnd] = field(default_factory=list)
    _failed: asyncio.Event = field(default_factory=asyncio.Event)

    def failed(self, failure: StreamEnd) -> None:
        """An attempt failed, and Envoy may make another."""
        self.failures.append(failure)
        self._failed.set()

    async def failure(self, attempt: int, within_s: float | None) -> StreamEnd | None:
        """The failure of that attempt, the first being 1; None: Envoy does not tell it in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while len(self.failures) < attempt:
                    self._failed.clear()
                    await self._failed.wait()
        # After a loop that stood still it may have come in the turn in which the time ended.
        return self.failures[attempt - 1] if len(self.failures) >= attempt else None

    def outcome(self, end: StreamEnd | None) -> str:
        """The outcome of it, or of an attempt at it, as `LiveRouter.release` names it.

        A request that never reached a server, or failed at the present balancer, is not its fault.
        Failures of paths that are only passed say nothing of a server: a tenant chooses them.
        """
        if self.ended_as:
            return self.ended_as
        if end is None:
            return "timeout"
        if end.client_gone:
            return "client_gone"
        if end.unreached or not end.upstream:
            return "unsent"
        failed = end.broken or end.late or not end.status or end.status >= 500
        if self.flight.via and (failed or end.status == FULL):
            return "unsent"
        if self.has_deadline and (end.status == LATE or (end.late and self.held)):
            return "deadline"
        if failed:
            how = "worker_died" if end.broken else "error"
            return how if self.counts else "unjudged"
        if end.status == FULL:
            return "worker_full"
        if self.used is not None and self.used.failed:
            return "error"
        return "refused" if end.status >= 400 else "done"

    def generated(self, end: StreamEnd | None) -> int:
        """Tokens that its client was sent, as far as that can be told."""
        if self.used is not None:
            return self.used.generated_tokens
        if end is None:
            return 0
        if end.tail is not None or not self.streamed:
            return end.events
        return end.sent_bytes // _EVENT_BYTES


class Flights(Generic[F]):
    """All that are in flight, by the decider's id: the `Echo` of their decisions.

    left: called with the id of each that has ended.
    """

    def __init__(self, scene: Scene[F], left: Callable[[str], None], rule: DeciderRule) -> None:
        self._scene, self._live, self._left, self._rule = scene, scene.live, left, rule
        self._aloft: dict[str, Aloft[F]] = {}
        self._asking: set[asyncio.Future[Any]] = set()
        if not rule.foreign:
            self._live.finished = self._reported

    def __len__(self) -> int:
        return len(self._aloft)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._aloft

    def add(self, aloft: Aloft[F]) -> None:
        """It goes on; its end follows."""
        self._aloft[aloft.request_id] = aloft

    # -- attempts -----------------------------------------------------------------------------

    def failed(self, failure: StreamEnd) -> None:
        """An attempt failed."""
        aloft = self._aloft.get(failure.request_id)
        if aloft is not None:
            aloft.failed(failure)

    async def again(self, request_id: str, attempt: int) -> Verdict:
        """Whether a request that a server has failed may go to the next of its list.

        A request that may have killed an engine by itself goes to no other; nor does one that must
        not be done twice, once it reached a server. A late one stays until its server is lost.
        """
        aloft = self._aloft.get(request_id)
        if aloft is None or attempt < 2:
            return Go()  # Another decider's, which is no more: nothing is known against it.
        failure, why = await self._fate(aloft, attempt - 1)
        try:
            if why in _UNWELL:
                end = "timeout"
            elif why == _OVERDUE:
                end = "deadline"
            else:
                await self._check(aloft, failure)
                end = "worker_died" if failure is None else aloft.outcome(failure)
            self._next(aloft, end, why or end, attempt)
        except ApiError as error:
            log.warning("request_not_passed_on", request_id=request_id, code=error.code)
            return refusal(error, anthropic=aloft.anthropic)
        return Go(self._scene.headers(aloft.flight))

    async def _fate(self, aloft: Aloft[F], attempt: int) -> tuple[StreamEnd | None, str]:
        """The fate of an attempt that was asked about: its failure, or why it is not waited for any
        more, in one word. Envoy cancels this where it answers after all."""
        live, worker = self._live, aloft.flight.decision.worker
        left_s = self._scene.patience_s(aloft.flight)
        late_s = math.inf if self._rule.foreign else min(self._rule.late_s, left_s)
        late = time.monotonic() - aloft.sent_s >= late_s
        failure = await aloft.failure(attempt, _FAILURE_S)
        if failure is not None or not late:
            return failure, ""
        if live.members.get(worker) is None:
            return None, DIED
        wait = live.members.waits.begin(worker)
        failing = asyncio.create_task(aloft.failure(attempt, None))
        either: tuple[asyncio.Future[Any], ...] = failing, wait
        try:
            bound_s = left_s if left_s < math.inf else None
            await asyncio.wait(either, timeout=bound_s, return_when="FIRST_COMPLETED")
            if failing.done():
                return failing.result(), ""
            return None, wait.result() if wait.done() else _OVERDUE
        finally:
            failing.cancel()
            live.members.waits.end(worker, wait)

    async def _check(self, aloft: Aloft[F], failure: StreamEnd | None) -> None:
        """Find out what became of the server that failed; ApiError if no other may be tried."""
        if failure is not None and (failure.unreached or failure.status == FULL):
            return
        worker, live = aloft.flight.decision.worker, self._live
        if aloft.counts and not await self._scene.lives(worker):
            aloft.ended_as = "worker_died"
            check_blame(live, worker, aloft.digest, aloft.request_id)
        if not aloft.repeatable:
            why = "the one that had the request failed"
            raise errors.NO_WORKER(why=why, retry_after_s=live.retry_after_s())

    def _next(self, aloft: Aloft[F], end: str, why: str, attempt: int) -> None:
        """It ended so at one server, and is tried at another; raises ApiError 503 if that is gone,
        too."""
        live, servers = self._live, aloft.servers
        live.retried(aloft.request_id, why)
        self._scene.ended(aloft.flight, end)
        aloft.ended_as = "unsent"  # unless it is taken there
        others = frozenset(live.router.workers) - {servers[min(attempt, len(servers)) - 1]}
        again = replace(aloft.request, exclude=others, retry=True)
        try:
            aloft.flight = self._scene.decide(again)
        except NoWorkerError as error:
            raise errors.NO_WORKER(why=error, retry_after_s=live.retry_after_s()) from None
        aloft.ended_as, aloft.sent_s = "", time.monotonic()

    # -- answers ------------------------------------------------------------------------------

    def goes_on(self, request_id: str) -> None:
        """Envoy has it in flight."""
        aloft = self._aloft.get(request_id)
        if aloft is not None:
            aloft.heard_s = time.monotonic()

    def first(self, request_id: str, told: str) -> None:
        """Its first token came, from the server that is `told`."""
        aloft = self._aloft.get(request_id)
        if aloft is not None and not aloft.begun:
            aloft.begun = True
            self._told(aloft, told)
            self._live.first_token(request_id)

    def served(self, request_id: str, at: str) -> None:
        """The server with that address answers; whether one that was to do so lives is found out
        where a gateway goes down the list without asking."""
        aloft = self._aloft.get(request_id)
        if aloft is not None:
            chosen = aloft.flight.decision.worker
            self._scene.arrived(aloft.flight, aloft.request, at)
            if aloft.flight.decision.worker != chosen:
                self._asking.add(asked := asyncio.ensure_future(self._scene.lives(chosen)))
                asked.add_done_callback(self._asking.discard)

    def _told(self, aloft: Aloft[F], told: str) -> None:
        if aloft.flight.via:
            self._scene.arrived(aloft.flight, aloft.request, told)

    # -- ends ---------------------------------------------------------------------------------

    def unread(self, answer: Go) -> None:
        """Its client left as it was decided."""
        self._end(answer.upstream.get(TO_ID_HEADER, ""), "client_gone")

    def ended(self, end: StreamEnd) -> None:
        """It is over, and is done with unless its worker has still to report."""
        aloft = self._aloft.get(end.request_id)
        if aloft is None or aloft.end is not None:
            return
        aloft.end = end
        if end.status == _NOT_SERVED and end.upstream and not self._rule.foreign:
            self._asking.add(asked := asyncio.create_task(self._after_death(aloft)))
            asked.add_done_callback(self._asking.discard)
            return
        if end.tail is not None and not aloft.begun:
            self._told(aloft, end.told)
        told = end.broken or end.late or self._rule.foreign
        if told or self._used(aloft) is not None or end.status >= 400 or not end.upstream:
            self._end(end.request_id)
        else:
            self._left(end.request_id)  # Only its account stays open.
            loop = asyncio.get_running_loop()
            aloft.untold = loop.call_later(_REPORT_S, self._end, end.request_id)

    def _used(self, aloft: Aloft[F]) -> Used | None:
        """What it took, as far as it has been told."""
        tail = aloft.end.tail if aloft.end is not None else None
        if self._rule.foreign and tail is None:
            return None
        return self._scene.used(aloft.flight, tail or b"")

    def _reported(self, request_id: str) -> None:
        """Its worker reported its tokens: exact, where the log was sooner."""
        aloft = self._aloft.get(request_id)
        if aloft is not None and aloft.end is not None and not aloft.end.status >= 400:
            self._end(request_id)

    async def _after_death(self, aloft: Aloft[F]) -> None:
        """A worker of ours did not serve it, and it was tried at no other: it ends once it is known
        whether it killed the engine."""
        try:
            if not await self._scene.lives(aloft.flight.decision.worker):
                aloft.ended_as = "worker_died"
        finally:
            self._end(aloft.request_id)

    async def sweep(self) -> None:
        """End requests that Envoy says nothing about any more, until cancelled."""
        while True:
            await asyncio.sleep(min(_SWEEP_S, self._rule.unheard_s / 2))
            self._unheard_since(time.monotonic() - self._rule.unheard_s)

    def cut(self) -> None:
        """Envoy was killed: what it had in flight has no end that could be heard. Of what its other
        threads sent before, the last may still be read."""
        cut_s = time.monotonic()
        asyncio.get_running_loop().call_later(_CUT_S, self._unheard_since, cut_s)

    def _unheard_since(self, before_s: float) -> None:
        for name in [name for name, one in self._aloft.items() if one.heard_s < before_s]:
            log.error("request_end_lost", request_id=name)
            self._live.metrics.inc(m.ENDS_LOST)
            self._end(name)

    def _end(self, request_id: str, ended_as: str = "") -> None:
        """Give back all that it holds; harmless for one that has ended."""
        aloft = self._aloft.pop(request_id, None)
        if aloft is None:
            return
        if aloft.untold is not None:
            aloft.untold.cancel()  # Another may have its id by then, and each timer is a waking.
        live, end, lease = self._live, aloft.end, aloft.lease
        status = end.status if end is not None else 0
        try:
            at = end.upstream if end is not None and not aloft.flight.via else ""
            if at and not aloft.ended_as:
                self._scene.arrived(aloft.flight, aloft.request, at)
            aloft.used = self._used(aloft)
            aloft.ended_as = ended_as or aloft.ended_as
            outcome, generated = aloft.outcome(end), aloft.generated(end)
            live.tokens(request_id, generated)
            if outcome in ("done", "refused"):
                live.suspects.served(aloft.digest)
            self._scene.ended(aloft.flight, outcome)
            self._scene.over(aloft.flight, outcome, status)
            if outcome == "worker_died":
                live.suspects.blame(aloft.flight.decision.worker, aloft.digest, live.now_s())
            if aloft.used is not None and aloft.used.prompt_tokens:
                lease.counted(aloft.used.prompt_tokens)
            lease.generated(generated)
            # A client that does not wait for it has had an engine work, too.
            waits = outcome != "client_gone" and not (aloft.has_deadline and status == LATE)
            lease.worked = not waits and end is not None and bool(end.upstream)
        finally:
            self._left(request_id)
            lease.close(time.monotonic(), served=0 < status < 400)
        if end is not None and status:
            live.metrics.observe(m.REQUEST_SECONDS, value=end.duration_s)
            live.answered(aloft.tenant.name, status)


def check_blame(live: LiveRouter, worker: str, digest: str, request_id: str) -> None:
    """Raises ApiError unless another worker may have a request of that content that was lost with
    one before its first token: 503, it was alone in an engine that died; 422, it was in two."""
    blame = live.suspects.blame(worker, digest, live.now_s())
    if blame == "killer":
        raise errors.KILLED_AN_ENGINE()
    if blame == "alone":
        raise errors.ALONE_IN_DEAD_ENGINE(request_id=request_id)
