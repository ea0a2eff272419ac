"""The workers of the cluster: they join, drain, leave, fall silent, stall, fail, come back.

One that seems gone, by its connection or its reports, is not chosen (its breaker is open), what
waited for it is tried elsewhere, what it reported is invalid. One that Ray took off the registry
with its connection standing drains: it stays until its requests have ended. On the decider's event
loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

import structlog

from kappa.protocol import Announcement, WorkerReport
from kappa_router.decision import MismatchError
from kappa_router.live.circuit_breaker import Blocked, BreakerRule, Breakers
from kappa_router.live.kv_subscriber import KVSubscriber, StreamListener
from kappa_router.live.replica_registry import Announcements, ReplicaRegistry
from kappa_router.live.supervised import supervised
from kappa_router.live.waiting import Waits
from kappa_router.router import Router

log = structlog.get_logger(__name__)

DISCONNECTED, SILENT, STALLED = "disconnected", "silent", "stalled"
ENGINE_DIED, DIED = "engine_died", "died"
_CHECK_EVERY_S, _LOOK_S = 0.25, 0.05
# An event loop that turns no sooner stands still, and reads no report meanwhile.
_LONGEST_TURN_S = 2 * _CHECK_EVERY_S
_UNREADABLE_S = 60.0
# The multiple of the expected seconds that a request or a step may take before its engine stalls.
_PATIENCE = 4.0

Progress = tuple[float, ...]
progress_of: Callable[[WorkerReport], Progress] = attrgetter(
    "steps_total", "iterations_total", "load_tokens_total", "step_tokens_total"
)
"""What rises while the engine of a worker works."""


class Follower(Protocol):
    """Follows one worker, and calls a `StreamListener`."""

    # Its state is known.
    synced: bool
    # It answers.
    connected: bool
    # Blocks stored, by tier, and events left out, by why.
    events: Counter[str]

    @property
    def alive(self) -> bool:
        """Whether it is still followed."""

    async def close(self) -> None: ...


Follow = Callable[[Announcement, StreamListener], Follower]


@dataclass(frozen=True, slots=True)
class MembershipRule:
    """The times for which a worker may give no sign."""

    stall_after_s: float = 5.0
    """A worker without a report, or an engine with work and without progress, for so long counts as
    stalled; later where more was to be expected."""
    lost_after_s: float = 10.0
    """One that stalled for so long is to end its streams; a draining one without a sign leaves."""
    drain_s: float = 60.0
    """How long one that Ray takes away may go on."""
    breaker: BreakerRule = field(default_factory=BreakerRule)
    follow: Follow = KVSubscriber
    """Makes what follows a worker."""


class AwakeClock:
    """Seconds in which this process could have read what workers sent: those of a clock, less those
    that its own event loop stood still. To be looked at with every turn of the loop's watch."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._stood_s = clock, 0.0
        self._looked_s = clock()

    def __call__(self) -> float:
        now_s = self._clock()
        self._stood_s += max(now_s - self._looked_s - _LONGEST_TURN_S, 0.0)
        self._looked_s = now_s
        return now_s - self._stood_s


class MembershipListener(Protocol):
    """Hears of a change after the router does, on the event loop. worker_left: with the ids of its
    requests in flight. worker_died: while they are still in flight. node_renamed: its worker
    has the name of another now."""

    def worker_joined(self) -> None: ...
    def worker_left(self, worker: str, lost: list[str]) -> None: ...
    def worker_died(self, worker: str) -> None: ...
    def node_renamed(self, worker: str) -> None: ...
    def reported(self, report: WorkerReport) -> None: ...
    def breaker_opened(self, worker: str, why: str) -> None: ...
    def stream_gap(self, worker: str) -> None: ...
    def stream_flood(self, worker: str) -> None: ...
    def task_restarted(self, task: str) -> None: ...


@dataclass(slots=True)
class Member:
    """One worker, as membership follows it."""

    deployment: str
    announced: Mapping[str, Any]
    subscriber: Follower
    # Its last report, by the `AwakeClock`; None before the first.
    reported_s: float | None = None
    # The latest end of its draining; None: it does not drain.
    leaves_by_s: float | None = None
    # Its engine's last known progress, and when that moved, by the `AwakeClock`.
    progress: Progress | None = None
    moved_s: float = 0.0
    # The progress at which it stalled; None: it moves.
    stalled_at: Progress | None = None

    @property
    def draining(self) -> bool:
        """Whether it only finishes what it has."""
        return self.leaves_by_s is not None

    @property
    def node(self) -> str:
        return str(self.announced["node"]["name"])

    def stalled_s(self, progress: Progress, *, busy: bool, now_s: float) -> float:
        """Seconds for which its engine had work and made no progress; an idle one never stalls."""
        if not busy or progress != self.progress:
            self.progress, self.moved_s = progress, now_s
        return now_s - self.moved_s


class Membership:
    """The workers of the cluster. router: learns of every change first, the listener next. clock:
    seconds that never jump."""

    def __init__(
        self,
        router: Router,
        registry: ReplicaRegistry,
        rule: MembershipRule,
        clock: Callable[[], float],
        listener: MembershipListener,
    ) -> None:
        self.rule = rule
        self.breakers = Breakers(rule.breaker)
        self.waits = Waits()
        # Called at every check with each worker that has stalled for so long that the streams which
        # its engine began should end.
        self.on_hung: Callable[[str], None] = lambda worker: None
        self.refused: dict[str, str] = {}
        self._router, self._registry, self._clock = router, registry, clock
        self._listener = listener
        self.blocks = router.blocks
        self.stream_gap, self.task_restarted = listener.stream_gap, listener.task_restarted
        self.stream_flood = listener.stream_flood
        self._members: dict[str, Member] = {}
        self._loop = asyncio.get_running_loop()
        self._closing: set[asyncio.Task[None]] = set()
        self._joined = asyncio.Event()
        self._awake_s = AwakeClock(clock)
        self._readable_s = self._awake_s()
        watch = supervised("watch", self._check_all, listener.task_restarted, "")
        self._watch = self._loop.create_task(watch)
        registry.subscribe(self._on_registry)

    # -- state --------------------------------------------------------------------------------

    def get(self, worker: str) -> Member | None:
        """A worker that is here, draining or not."""
        return self._members.get(worker)

    @property
    def synced(self) -> bool:
        """Whether there are workers, and of each that can be reached the state is known."""
        return bool(self._members) and all(m.subscriber.synced for m in self._members.values())

    def fault(self) -> str:
        """The reason why this decider cannot follow workers and should be replaced; empty: none. A
        single worker that cannot be read is that worker's fault as likely as ours; if no connected
        one can, it is ours."""
        if self._watch.done():
            return "nobody watches over the workers any more"
        for worker, member in self._members.items():
            if not member.subscriber.alive:
                return f"nobody follows worker {worker} any more"
        unreadable_s = self._awake_s() - self._readable_s
        if unreadable_s > _UNREADABLE_S:
            return f"no worker's state could be read for {unreadable_s:.0f} s"
        return ""

    def blocked(self) -> Blocked:
        """The workers that must not be chosen now: those that drain count as gone."""
        blocked = self.breakers.blocked(self._clock())
        draining = [worker for worker, m in self._members.items() if m.leaves_by_s is not None]
        return Blocked(blocked.gone.union(draining), blocked.failing) if draining else blocked

    async def first_joined(self, within_s: float) -> None:
        """Wait, at most so long, until a worker has joined since the start; then never again."""
        if not self._joined.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._joined.wait()

    async def known(self, within_s: float) -> None:
        """Wait, at most so long, until there are workers, and what they hold is known."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self.synced:
                    await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        self._registry.unsubscribe(self._on_registry)
        self._watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watch
        members, self._members = list(self._members.values()), {}
        for member in members:
            await member.subscriber.close()
        if self._closing:
            await asyncio.wait(self._closing)

    # -- of requests --------------------------------------------------------------------------

    def failed(self, worker: str, why: str) -> None:
        """A request's answer names its worker's fault, in one word."""
        if why in (DIED, ENGINE_DIED):
            self._note_death(worker)
        if why == ENGINE_DIED:  # Its replica will end itself.
            self._trip(worker, ENGINE_DIED)
            self.waits.lose(worker, ENGINE_DIED)

    def ended(self, worker: str) -> None:
        """A request that this decider had on the worker ended: one that drains may go."""
        member = self._members.get(worker)
        if member is not None and member.draining and not self._router.in_flight_on(worker):
            self._leave(worker, "drained")

    # -- of the registry ----------------------------------------------------------------------

    def _on_registry(self, deployment: str, known: Announcements, died: frozenset[str]) -> None:
        """Called on Ray's thread."""
        self._loop.call_soon_threadsafe(self._update, deployment, known, died)

    def _update(self, deployment: str, known: Announcements, died: frozenset[str]) -> None:
        for worker, data in known.items():
            member = self._members.get(worker)
            if data and (member is None or member.announced != data):
                self._join(worker, deployment, data)
            elif member is not None:
                member.leaves_by_s = None
        for worker, member in list(self._members.items()):
            if worker not in known and member.deployment == deployment:
                if worker in died:
                    self._note_death(worker)
                    self._leave(worker, DIED)
                elif not member.draining:
                    self._drain(worker, member)
        for worker in died & self.refused.keys():
            del self.refused[worker]

    def _join(self, worker: str, deployment: str, data: Mapping[str, Any]) -> None:
        try:
            announcement = Announcement.from_dict(data)
            self._router.join(announcement, self._clock())
        except (MismatchError, ValueError, TypeError) as error:
            if self.refused.get(worker) != str(error):
                self.refused[worker] = str(error)
                log.error("worker_refused", worker=worker, reason=str(error))
            # It is no longer what it was: nothing that is known of it may be used.
            self._leave(worker, "mismatch")
            return
        self.refused.pop(worker, None)
        member, node = self._members.get(worker), announcement.node.name
        if member is None:
            self._members[worker] = Member(deployment, data, self.rule.follow(announcement, self))
            log.info("worker_joined", worker=worker, node=node)
        else:
            before, member.announced, member.leaves_by_s = member.node, data, None
            if before != node:
                # Its pool shrank, and it took over the name of one that has gone.
                self._listener.node_renamed(worker)
        if announcement.profile_error:
            log.warning("worker_unprofiled", worker=worker, reason=announcement.profile_error)
        self._joined.set()
        self._listener.worker_joined()

    def _drain(self, worker: str, member: Member) -> None:
        in_flight = self._router.in_flight_on(worker)
        if member.subscriber.connected and in_flight:
            member.leaves_by_s = self._clock() + self.rule.drain_s
            log.info("worker_draining", worker=worker, in_flight=in_flight)
        else:
            self._leave(worker, "left")

    def _leave(self, worker: str, why: str) -> None:
        member = self._members.pop(worker, None)
        if member is None:
            return
        task = self._loop.create_task(member.subscriber.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        lost = self._router.leave(worker)
        self.breakers.leave(worker)
        self.waits.lose(worker, why)
        write = log.info if why in ("left", "drained") and not lost else log.warning
        write("worker_left", worker=worker, why=why, requests_lost=len(lost))
        self._listener.worker_left(worker, lost)

    # -- of the subscribers -------------------------------------------------------------------

    def connection(self, worker: str, up: bool) -> None:
        """The connection to a worker stands, or broke."""
        member = self._members.get(worker)
        if member is None or up:
            return  # A report is the sign of life, and follows at once.
        self._note_death(worker)
        self.waits.lose(worker, DISCONNECTED)
        if not member.draining:
            self._router.invalidate(worker, self._clock())
            self._trip(worker, DISCONNECTED)

    def reported(self, report: WorkerReport) -> None:
        member = self._members.get(report.worker)
        if member is None:
            return
        now_s = self._clock()
        member.reported_s = self._awake_s()
        why = self.breakers.state(report.worker, now_s).why
        if why in (DISCONNECTED, SILENT) and self.breakers.alive(report.worker, now_s):
            log.info("worker_heard_again", worker=report.worker)
        self._listener.reported(report)

    # -- silence and stalls -------------------------------------------------------------------

    async def _check_all(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_EVERY_S)
            self.check()

    def check(self) -> None:
        """Look for workers that fell silent, and for engines that stall."""
        awake_s = self._awake_s()
        connected = [m.subscriber for m in self._members.values() if m.subscriber.connected]
        if not connected or any(subscriber.synced for subscriber in connected):
            self._readable_s = awake_s
        for worker, member in list(self._members.items()):
            try:
                self._check(worker, member, awake_s)
            except Exception as error:
                log.error("worker_not_watched", worker=worker, error=repr(error))

    def _check(self, worker: str, member: Member, awake_s: float) -> None:
        # One that never reported is new: the router's own rule for silence applies.
        silent_s = awake_s - member.reported_s if member.reported_s is not None else 0.0
        if member.leaves_by_s is not None and self._clock() > member.leaves_by_s:
            self._leave(worker, "drain_timeout")
            return
        if silent_s > self.rule.stall_after_s:
            self._trip(worker, SILENT)
            self.waits.lose(worker, SILENT)
        else:
            self._check_engine(worker, member, awake_s)
        if silent_s > self.rule.lost_after_s and member.draining:
            self._leave(worker, SILENT)

    def _check_engine(self, worker: str, member: Member, awake_s: float) -> None:
        """What waits for an engine that stalls is lost: first what has not begun, then all. It may
        be chosen again once it has moved."""
        state = self._router.workers.get(worker)
        if state is None or state.report is None or not state.report.steps_total:
            return
        progress, wait_s = progress_of(state.report), self._router.longest_wait_s(worker)
        # Behind Envoy no stream passes here: it is known who is without a first token, and how many
        # the engine said to be at work on.
        busy = wait_s > 0.0 or self.waits.on(worker) or state.report.running > 0
        stalled_s = member.stalled_s(progress, busy=busy, now_s=awake_s)
        if member.stalled_at not in (None, progress):
            member.stalled_at, now_s = None, self._clock()
            why = self.breakers.state(worker, now_s).why
            if why == STALLED and self.breakers.alive(worker, now_s):
                log.info("worker_moves_again", worker=worker)
        announced = state.announcement
        step_s = announced.step.real_s([(announced.max_batch_tokens, announced.max_context_tokens)])
        patience_s = max(self.rule.stall_after_s, _PATIENCE * max(step_s, wait_s))
        if stalled_s > patience_s:
            member.stalled_at = progress
            self._trip(worker, STALLED, needs_sign=False)
            self.waits.lose(worker, STALLED)
            if stalled_s > max(patience_s, self.rule.lost_after_s):
                self.on_hung(worker)

    def _note_death(self, worker: str) -> None:
        """A worker died; the end of one that drains is no fault."""
        member = self._members.get(worker)
        if member is not None and not member.draining:
            self._listener.worker_died(worker)

    def _trip(self, worker: str, why: str, *, needs_sign: bool = True) -> None:
        known = worker in self._members
        if known and self.breakers.trip(worker, why, self._clock(), needs_sign=needs_sign):
            log.warning("breaker_open", worker=worker, why=why)
            self._listener.breaker_opened(worker, why)
