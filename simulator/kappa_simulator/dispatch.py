"""Who decides where a request goes: the live router's core, or a plan made beforehand.

The simulator hands a dispatcher what a router receives in a live cluster, and gets decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from kappa.protocol import Admission, Announcement, WorkerReport
from kappa_router.decision import NoWorkerError, RouteRequest
from kappa_router.index.kv_event_types import StreamCursor, Tier, WorkerReset
from kappa_router.index.prefix_index import PrefixIndex
from kappa_router.router import Router
from kappa_simulator.cache import Ids, TierCache
from kappa_simulator.faults import TransientFault
from kappa_simulator.job import SimulatedJob
from kappa_simulator.node import Node
from kappa_workload.shapes import TurnShape


class SimulatedRoute(NamedTuple):
    """The node chosen, and leading tokens to fetch first from another node, if any."""

    node: int
    fetch_from: int = -1
    fetch_tokens: int = 0


class Dispatcher:
    """Decides, and receives what a router receives in a live cluster, if it `listens`.

    decision_s: real seconds of each decision, where they are measured. predicted: of a request, the
    TTFT that the router expected and what it is mostly made of. retry_after_s: when the
    latest refusal asks its client to come back. share_s: seconds from one `share` to the next; 0:
    there is none.
    """

    listens = False
    share_s = 0.0

    def __init__(self) -> None:
        self.decision_s: list[float] = []
        self.predicted: dict[int, tuple[float, str]] = {}
        self.retry_after_s = 0.0

    def choose(
        self, key: int, turn: TurnShape, session: str, now_s: float, lost_on: int = -1
    ) -> SimulatedRoute | None:
        """Where request `key` goes; None: it is rejected. `lost_on`: the node that lost it."""
        raise NotImplementedError

    def hold(self, node: int, tier: Tier, ids: Ids) -> None:
        """A node holds these blocks now."""

    def drop(self, node: int, tier: Tier, ids: list[Ids]) -> None:
        """A node holds these blocks no more."""

    def admitted(self, node: int, job: SimulatedJob) -> None:
        """An engine admitted a request."""

    def first_token(self, job: SimulatedJob, now_s: float) -> None:
        """A request's first token came."""

    def finished(self, job: SimulatedJob, now_s: float) -> None:
        """A request ended."""

    def left(self, job: SimulatedJob, now_s: float) -> None:
        """The client of a request that had not begun is gone."""

    def lost(self, node: int) -> None:
        """A node is gone, and with it what it had."""

    def back(self, node: int, now_s: float) -> None:
        """It is back, empty."""

    def report(self, node: Node, now_s: float) -> None:
        """A node reports what it measured."""

    def share(self, now_s: float) -> None:
        """Several routers tell each other what they have in flight."""

    def transient_fault(self, fault: TransientFault, begins: bool, node: Node) -> None:
        """A fault of a clock or of a node's cache events begins or ends."""


class PlanDispatch(Dispatcher):
    """Sends request k to `assignment[k]`, whatever happens."""

    def __init__(self, assignment: Sequence[int]) -> None:
        super().__init__()
        self._nodes = [int(node) for node in assignment]

    def choose(
        self, key: int, turn: TurnShape, session: str, now_s: float, lost_on: int = -1
    ) -> SimulatedRoute | None:
        return SimulatedRoute(self._nodes[key])


class RouterDispatch(Dispatcher):
    """The live router's core; of several routers, each request goes to one that is drawn. All hear
    what nodes hold and measure, each alone what becomes of its own requests.

    Args:
        routers: fresh.
        announcements: of each node, as the routers are to believe it.
        timer: seconds of real time, to measure decisions by; None: they are not measured.
        share_s: seconds between what several routers tell each other of their requests; 0: they do
            not.
        seed: of the draw.
    """

    listens = True

    def __init__(
        self,
        routers: Sequence[Router],
        announcements: Sequence[Announcement],
        timer: Callable[[], float] | None = None,
        *,
        share_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._routers = routers
        self._announcements = announcements
        self._timer = timer
        self.share_s = share_s
        self._rng = np.random.default_rng((seed, 6))
        # Of each request, the router that has it.
        self._owner: dict[int, Router] = {}
        self._index = {each.worker: i for i, each in enumerate(announcements)}
        self._admissions: list[list[tuple[Router, Admission]]] = [[] for _ in announcements]
        self._clock_s = 0.0
        self._worker_clock_s: dict[int, float] = {}
        self._streams: dict[int, FaultyStream] = {}
        for router in routers:
            for announcement in announcements:
                router.join(announcement, 0.0)

    @property
    def _prefixes(self) -> list[PrefixIndex]:
        indices = [router.index for router in self._routers]
        found = [index for index in indices if index is not None]
        assert found, "they are there from the first join on"
        return found

    def choose(
        self, key: int, turn: TurnShape, session: str, now_s: float, lost_on: int = -1
    ) -> SimulatedRoute | None:
        request = RouteRequest(
            str(key),
            exclude=frozenset((self._announcements[lost_on].worker,) if lost_on >= 0 else ()),
            retry=lost_on >= 0,
            prefix_hashes=turn.blocks,
            prompt_tokens=turn.input_tokens,
            session=session,
        )
        timer, now_s = self._timer, now_s + self._clock_s
        drawn = int(self._rng.integers(len(self._routers))) if len(self._routers) > 1 else 0
        router = self._owner[key] = self._routers[drawn]
        start_s = timer() if timer else 0.0
        try:
            decision = router.route(request, now_s)
            if timer:
                self.decision_s.append(timer() - start_s)
        except NoWorkerError as error:
            self.retry_after_s = getattr(error, "retry_after_s", 0.0)
            return None
        self.predicted[key] = decision.chosen.ttft_s, decision.kind
        node = self._index[decision.worker]
        fetch = decision.fetch
        if fetch is None:
            return SimulatedRoute(node)
        return SimulatedRoute(node, self._index[fetch.source_worker], fetch.tokens)

    def hold(self, node: int, tier: Tier, ids: Ids) -> None:
        if self._arrives(node):
            for index in self._prefixes:
                index.hold(self._announcements[node].worker, tier, ids)

    def drop(self, node: int, tier: Tier, ids: list[Ids]) -> None:
        if self._arrives(node):
            gone = ids[0] if len(ids) == 1 else np.concatenate(ids)
            for index in self._prefixes:
                index.drop(self._announcements[node].worker, tier, gone)

    def _arrives(self, node: int) -> bool:
        stream = self._streams.get(node) if self._streams else None
        return stream is None or stream.arrives()

    def admitted(self, node: int, job: SimulatedJob) -> None:
        # Goes with the next report.
        total, device, host = job.total_tokens, job.device_tokens, job.cached_tokens
        disk = min(job.disk_blocks * self._announcements[node].block_tokens, host)
        found = Admission(str(job.key), device, host, max(total - device - host, 1), disk)
        self._admissions[node].append((self._owner[job.key], found))

    def first_token(self, job: SimulatedJob, now_s: float) -> None:
        self._owner[job.key].first_token(str(job.key), now_s + self._clock_s)

    def finished(self, job: SimulatedJob, now_s: float) -> None:
        name, router = str(job.key), self._owner.pop(job.key)
        router.tokens(name, job.output_tokens)
        router.release(name, now_s + self._clock_s)

    def left(self, job: SimulatedJob, now_s: float) -> None:
        router = self._owner.pop(job.key)
        router.release(str(job.key), now_s + self._clock_s, complete=False)

    def lost(self, node: int) -> None:
        self._admissions[node].clear()
        for router in self._routers:
            router.leave(self._announcements[node].worker)

    def back(self, node: int, now_s: float) -> None:
        for router in self._routers:
            router.join(self._announcements[node], now_s + self._clock_s)

    def report(self, node: Node, now_s: float) -> None:
        totals, link, tokens = node.totals, node.link, node.model.block_tokens
        admissions = self._admissions[node.index]
        self._admissions[node.index] = []
        steps, loads = node.samples.take()
        report = WorkerReport(
            worker=self._announcements[node.index].worker,
            time_s=now_s + self._worker_clock_s.get(node.index, 0.0),
            steps_total=totals.steps,
            step_seconds_total=totals.step_s,
            step_tokens_total=totals.step_tokens,
            load_tokens_total=link.up.load_blocks * tokens,
            load_seconds_total=link.up.load_s,
            store_tokens_total=link.down.store_blocks * tokens,
            store_seconds_total=link.down.store_s,
            host_spare_blocks=node.memory.spare_host_blocks,
        )
        for router in self._routers:
            own = tuple(found for owner, found in admissions if owner is router)
            told = msgspec.structs.replace(report, admitted=own, steps=steps, loads=loads)
            router.report(told, now_s + self._clock_s)

    def share(self, now_s: float) -> None:
        told = [router.sent() for router in self._routers]
        for router in self._routers:
            others = [
                sent for one, sent in zip(self._routers, told, strict=True) if one is not router
            ]
            for worker in router.workers:
                here = tuple(found for sent in others for found in sent.get(worker, ()))
                router.others(WorkerReport(worker, now_s, in_flight=here), now_s + self._clock_s)

    def transient_fault(self, fault: TransientFault, begins: bool, node: Node) -> None:
        if fault.kind == "router_clock":
            self._clock_s += fault.size if begins else -fault.size
        elif fault.kind == "worker_clock":
            self._worker_clock_s[fault.node] = fault.size if begins else 0.0
        elif begins:
            self._streams[fault.node] = FaultyStream(fault.kind, lambda: self._resync(node))
        elif (stream := self._streams.pop(fault.node, None)) is not None:
            stream.healed()

    def _resync(self, node: Node) -> None:
        """As after a gap: forget the node's blocks, then receive all that it holds."""
        worker = self._announcements[node.index].worker
        if not node.alive:
            return
        memory = node.memory
        tiers: dict[Tier, TierCache] = {
            "device": memory.device, "host": memory.host, "disk": memory.disk
        }  # fmt: skip
        for index in self._prefixes:
            index.handle(WorkerReset(worker))
            for tier, cache in tiers.items():
                for ids in cache.held():
                    index.hold(worker, tier, ids)


class FaultyStream:
    """One node's stream of cache events, with batches that are lost, come twice, or come late.

    The live router's cursor judges what arrives; what it calls a gap leads to a resync with what
    the node holds, as live. Every second batch is hit, so that each fault is followed by its
    discovery.

    Args:
        kind: `events_lost`, `events_repeated` or `events_reordered`.
        resync: makes the router forget the node's blocks and receive all that it holds now.
    """

    def __init__(self, kind: str, resync: Callable[[], None]) -> None:
        self._kind, self._resync = kind, resync
        self._cursor = StreamCursor()
        self._number = 0
        self._late: int | None = None

    def arrives(self) -> bool:
        """The next batch is on its way: whether it is to be applied, and not lost, or known
        already by the resync that it led to."""
        number, self._number = self._number, self._number + 1
        hit = number % 2 == 1
        if hit and self._kind == "events_lost":
            return False
        if hit and self._kind == "events_reordered":
            self._late = number
            return False
        applied = self._receive(number)
        if hit and self._kind == "events_repeated":
            self._receive(number)
        if self._late is not None:
            self._receive(self._late)
            self._late = None
        return applied

    def healed(self) -> None:
        """End the fault: batches still missing are noticed with the next number."""
        if self._cursor.expected != self._number:
            self._resync()

    def _receive(self, number: int) -> bool:
        standing = self._cursor.advance(number)
        if standing == "gap":
            self._resync()
            self._cursor.resume(self._number)
        return standing == "ok"
