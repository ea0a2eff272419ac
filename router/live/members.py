"""Who is in the cluster: workers that join, leave, finish and go, fall silent, break and come back.

Ray's posts say which replicas there are; each has a feed; the feed's line and reports say whether
it lives. One that seems gone is not chosen (its breaker is open), what waited for it is tried
elsewhere, what it told is void. One that Ray took off the board with its line standing finishes:
nothing new goes there, and it stays until its requests have ended. On the ingress' event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog

from kappa.protocol import Announcement, WorkerReport
from router.decision import MismatchError
from router.live.board import Announcements, Board
from router.live.breaker import Blocked, BreakerRule, Breakers
from router.live.feed import WorkerFeed
from router.live.stalls import Marks, StallWatch, marks
from router.live.supervised import supervised
from router.live.waiting import Waits
from router.router import Router

log = structlog.get_logger(__name__)

DISCONNECTED, SILENT, STALLED = "disconnected", "silent", "stalled"
ENGINE_DIED, DIED = "engine_died", "died"
_LOOK_EVERY_S = 0.25
_UNREADABLE_S = 60.0
# Ray knows of a death soon, too, and still has what the worker had sent: streams are left to it.
_GRACE_S = 5.0
# A request or a step may take so many times as long as was expected before its engine stands still.
_PATIENCE = 4.0


@dataclass(frozen=True, slots=True)
class MemberRule:
    """stall_after_s: a worker without a report, or an engine with work and without progress, for so
    long counts as stalled (later where more was to be expected); lost_after_s: streams of one
    that gave no sign, or stood still, for so long are ended; drain_s: how long one that Ray takes
    away may go on."""

    stall_after_s: float = 5.0
    lost_after_s: float = 10.0
    drain_s: float = 60.0
    breaker: BreakerRule = field(default_factory=BreakerRule)


@dataclass(slots=True)
class Member:
    """One worker, beside what the router knows of it."""

    deployment: str
    said: Mapping[str, Any]
    feed: WorkerFeed
    heard_s: float | None = None
    leaves_by_s: float | None = None
    lost: bool = False
    stood_at: Marks | None = None

    @property
    def draining(self) -> bool:
        """Whether it only finishes what it has."""
        return self.leaves_by_s is not None


class Members:
    """The workers of the cluster. `on_join` and `on_leave` are told after the router was."""

    def __init__(
        self,
        router: Router,
        board: Board,
        rule: MemberRule,
        clock: Callable[[], float],
        *,
        on_report: Callable[[WorkerReport], None],
        on_join: Callable[[Announcement], None],
        on_leave: Callable[[str, str, list[str]], None],
        on_open: Callable[[str, str], None],
        on_gap: Callable[[str], None],
        on_restart: Callable[[str], None],
        on_death: Callable[[str], None],
    ) -> None:
        """`clock`: seconds that never jump; the other calls go to the live router. `on_death`: a
        worker's engine or process died, told while its requests are still in flight."""
        self.rule = rule
        self.breakers = Breakers(rule.breaker)
        self.waits = Waits()
        self.refused: dict[str, str] = {}
        self._router, self._board, self._clock = router, board, clock
        self._on_report, self._on_gap = on_report, on_gap
        self._on_join, self._on_leave, self._on_open = on_join, on_leave, on_open
        self._on_restart, self._on_death = on_restart, on_death
        self.on_rename: Callable[[str], None] = lambda _: None
        """Called with the name that a worker's node had before."""
        self._members: dict[str, Member] = {}
        self._draining: frozenset[str] = frozenset()
        self._stalls = StallWatch()
        self._loop = asyncio.get_running_loop()
        self._closing: set[asyncio.Task[None]] = set()
        self._joined = asyncio.Event()
        self._watch = self._loop.create_task(supervised("watch", self._look_again, on_restart, ""))
        self._readable_s = clock()
        board.listen(self._heard)

    # -- what is asked ------------------------------------------------------------------------

    def get(self, worker: str) -> Member | None:
        """A worker that is here, finishing or not."""
        return self._members.get(worker)

    @property
    def settled(self) -> bool:
        """Whether everything that has to be closed is."""
        return not self._closing

    @property
    def synced(self) -> bool:
        """Whether there are workers, and of each that can be reached the state is known."""
        feeds = [m.feed for m in self._members.values()]
        return bool(feeds) and all(feed.synced for feed in feeds)

    def fault(self) -> str:
        """Why this ingress can follow the workers no more and should be replaced; empty: it can.

        A single worker that cannot be read is that worker's fault as likely as ours; if none of
        those that are connected can, it is ours.
        """
        if self._watch.done():
            return "nobody watches over the workers any more"
        for worker, member in self._members.items():
            if not member.feed.alive:
                return f"nobody follows worker {worker} any more"
        unreadable_s = self._clock() - self._readable_s
        if unreadable_s > _UNREADABLE_S:
            return f"no worker's state could be read for {unreadable_s:.0f} s"
        return ""

    def blocked(self) -> Blocked:
        """Who must not be chosen now: those that are finishing count as gone."""
        blocked = self.breakers.blocked(self._clock())
        if not self._draining:
            return blocked
        return Blocked(blocked.gone | self._draining, blocked.failing)

    async def first_joined(self, within_s: float) -> None:
        """Wait, at most so long, until a worker has joined since the start; then never again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._joined.wait()

    # -- what happens -------------------------------------------------------------------------

    async def close(self) -> None:
        """Follow nobody any more; returns when the sockets are closed."""
        self._board.unlisten(self._heard)
        self._watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watch
        members, self._members = list(self._members.values()), {}
        for member in members:
            await member.feed.close()
        if self._closing:
            await asyncio.wait(self._closing)

    def failed(self, worker: str, why: str) -> None:
        """A request's answer says what is wrong with its worker, in one word."""
        if why == DIED:
            self._death(worker)
        if why == ENGINE_DIED:
            self._engine_died(worker)

    def _engine_died(self, worker: str) -> None:
        """Its replica will end itself."""
        self._death(worker)
        self._trip(worker, ENGINE_DIED)
        self.waits.lose(worker, ENGINE_DIED, begun=False)

    def ended(self, worker: str) -> None:
        """A request that this ingress had on the worker ended: one that is finishing may go."""
        member = self._members.get(worker)
        if member is not None and member.draining and not self._router.in_flight_on(worker):
            self._leave(worker, "drained")

    def _heard(self, deployment: str, posted: Announcements, died: frozenset[str]) -> None:
        """Called on Ray's thread."""
        self._loop.call_soon_threadsafe(self._posted, deployment, posted, died)

    def _posted(self, deployment: str, posted: Announcements, died: frozenset[str]) -> None:
        for worker, data in posted.items():
            member = self._members.get(worker)
            if data and (member is None or member.said != data):
                self._join(worker, deployment, data)
            elif member is not None:
                self._stays(worker, member)
        for worker in [w for w in self._members if w not in posted]:
            if self._members[worker].deployment == deployment:
                if worker in died:
                    self._death(worker)
                    self._leave(worker, DIED)
                else:
                    self._drain(worker)
        for worker in [w for w in self.refused if w in died]:
            del self.refused[worker]

    def _join(self, worker: str, deployment: str, data: Mapping[str, Any]) -> None:
        try:
            announcement = Announcement.from_dict(data)
            self._router.join(announcement, self._clock())
        except (MismatchError, ValueError, TypeError) as error:
            if self.refused.get(worker) != str(error):
                self.refused[worker] = str(error)
                log.error("worker_refused", worker=worker, reason=str(error))
            if worker in self._members:
                # What it was is not what it says now: nothing of it may be used.
                self._leave(worker, "mismatch")
            return
        self.refused.pop(worker, None)
        member = self._members.get(worker)
        if member is not None:
            before = str(member.said["node"]["name"])
            member.said = data
            self._stays(worker, member)
            if before != announcement.node.name:
                # Its pool shrank, and it took over the name of one that has gone.
                self.on_rename(before)
        else:
            feed = WorkerFeed(
                announcement, self._router.blocks, self._reported, self._on_gap, self._line,
                self._on_restart,
            )  # fmt: skip
            self._members[worker] = Member(deployment, data, feed)
            log.info("worker_joined", worker=worker, node=announcement.node.name)
        if announcement.profile_error:
            log.warning("worker_unprofiled", worker=worker, reason=announcement.profile_error)
        self._joined.set()
        self._on_join(announcement)

    def _stays(self, worker: str, member: Member) -> None:
        member.leaves_by_s = None
        self._draining -= {worker}

    def _drain(self, worker: str) -> None:
        member = self._members[worker]
        if member.draining:
            return
        if not member.feed.connected or not self._router.in_flight_on(worker):
            self._leave(worker, "left")
            return
        member.leaves_by_s = self._clock() + self.rule.drain_s
        self._draining |= {worker}
        log.info("worker_draining", worker=worker, in_flight=self._router.in_flight_on(worker))

    def _leave(self, worker: str, why: str) -> None:
        member = self._members.pop(worker, None)
        if member is None:
            return
        self._draining -= {worker}
        task = self._loop.create_task(member.feed.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        lost = self._router.leave(worker)
        self.breakers.leave(worker)
        self._stalls.leave(worker)
        self.waits.lose(worker, why, begun=False)
        self._loop.call_later(_GRACE_S, partial(self.waits.lose, worker, why, begun=True))
        said = log.info if why in ("left", "drained") and not lost else log.warning
        said("worker_left", worker=worker, why=why, requests_lost=len(lost))
        self._on_leave(worker, str(member.said["node"]["name"]), lost)

    def _line(self, worker: str, up: bool) -> None:
        """The connection to a worker stands, or broke."""
        member = self._members.get(worker)
        if member is None:
            return
        if up:
            return  # a report is the sign of life, and follows at once
        self._death(worker)
        self.waits.lose(worker, DISCONNECTED, begun=False)
        if not member.draining:
            self._router.invalidate(worker, self._clock())
            self._trip(worker, DISCONNECTED)

    def _reported(self, report: WorkerReport) -> None:
        member = self._members.get(report.worker)
        if member is None:
            return
        now_s = self._clock()
        member.heard_s, member.lost = now_s, False
        why = self.breakers.state(report.worker, now_s).why
        if why in (DISCONNECTED, SILENT) and self.breakers.alive(report.worker, now_s):
            log.info("worker_heard_again", worker=report.worker)
        self._on_report(report)

    # -- who stands still ---------------------------------------------------------------------

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now_s = self._clock()
            feeds = [member.feed for member in self._members.values() if member.feed.connected]
            if not feeds or any(feed.synced for feed in feeds):
                self._readable_s = now_s
            for worker, member in list(self._members.items()):
                try:
                    self._look(worker, member, now_s)
                except Exception as error:
                    log.error("worker_not_watched", worker=worker, error=repr(error))

    def _look(self, worker: str, member: Member, now_s: float) -> None:
        # One that was never heard is new: the router's own rule for silence applies.
        silent_s = now_s - member.heard_s if member.heard_s is not None else 0.0
        if member.leaves_by_s is not None and now_s > member.leaves_by_s:
            self._leave(worker, "drain_timeout")
            return
        if silent_s > self.rule.stall_after_s:
            self._trip(worker, SILENT)
            self.waits.lose(worker, SILENT, begun=False)
        else:
            self._look_at_engine(worker, now_s)
        if silent_s > self.rule.lost_after_s and not member.lost:
            member.lost = True
            self.waits.lose(worker, SILENT, begun=True)
            if member.draining:
                self._leave(worker, SILENT)

    def _look_at_engine(self, worker: str, now_s: float) -> None:
        """What waits for an engine that stands still is lost: first what has not begun, then all.

        It may be chosen again once it has moved.
        """
        state, member = self._router.workers.get(worker), self._members[worker]
        if state is None or state.report is None or not state.report.steps_total:
            return
        now = marks(state.report)
        still_s = self._stalls.still_s(worker, now, busy=self.waits.on(worker), now_s=now_s)
        if member.stood_at not in (None, now):
            member.stood_at = None
            why = self.breakers.state(worker, now_s).why
            if why == STALLED and self.breakers.alive(worker, now_s):
                log.info("worker_moves_again", worker=worker)
        said = state.announcement
        step_s = said.step.real_s([(said.max_batch_tokens, said.max_context_tokens)])
        longest_s = max(step_s, self._router.longest_wait_s(worker))
        patience_s = max(self.rule.stall_after_s, _PATIENCE * longest_s)
        if still_s > patience_s:
            member.stood_at = now
            self._trip(worker, STALLED, needs_sign=False)
            begun = still_s > max(patience_s, self.rule.lost_after_s)
            self.waits.lose(worker, STALLED, begun=begun)

    def _death(self, worker: str) -> None:
        """The end of one that is finishing is nobody's fault."""
        member = self._members.get(worker)
        if member is not None and not member.draining:
            self._on_death(worker)

    def _trip(self, worker: str, why: str, *, needs_sign: bool = True) -> None:
        if worker not in self._members:
            return
        if self.breakers.trip(worker, why, self._clock(), needs_sign=needs_sign):
            log.warning("breaker_open", worker=worker, why=why)
            self._on_open(worker, why)
