"""KV that a request fetches from a peer's tiers into its node's host tier before it is submitted.

Each network card sends or receives one transfer at a time, first come, first served; a transfer
occupies the cards of both ends and runs at the slower one's rate. What it moves is decided when it
starts, not when it was queued: the request may be gone, the source may have evicted the prefix, the
target may hold it by now; then it takes no time. The source's host blocks are pinned meanwhile, its
device blocks stay the engine's, so only what is left of them at the end arrives. What a request
fetched, or others fetched before it to where it goes, stays pinned until `used`: copies are evicted
first, and it counts on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kappa_simulator.cache import Ids, PrefixRun
from kappa_simulator.job import SimulatedJob
from kappa_simulator.loop import Loop
from kappa_simulator.memory import NodeMemory
from kappa_simulator.node import Node


@dataclass(slots=True, eq=False)
class _Fetch:
    """The first `stop` blocks of a job, those that the target holds included.

    memory: the source's as the transfer started (a node that died has a new one); path: its pin.
    """

    job: SimulatedJob
    stop: int
    source: Node
    target: Node
    memory: NodeMemory | None = None
    path: PrefixRun | None = None


class PeerFetches:
    """All fetches between `nodes`; busy_s: of each one's network card."""

    def __init__(self, loop: Loop, nodes: Sequence[Node], fixed_s: float = 1e-3) -> None:
        self._loop, self._nodes, self._fixed_s = loop, nodes, fixed_s
        self._in_use = [False] * len(nodes)
        self._queue: list[_Fetch] = []
        self._waiting: list[dict[SimulatedJob, None]] = [{} for _ in nodes]
        self._pinned: dict[SimulatedJob, tuple[NodeMemory, PrefixRun | None]] = {}
        self.busy_s = [0.0] * len(nodes)

    def submit(self, job: SimulatedJob, node: int) -> None:
        """Submit a job that fetches nothing; a copy that it finds there stays until `used`."""
        target = self._nodes[node]
        usable = (job.prompt_tokens - 1) // target.model.block_tokens
        path = target.memory.pin_copy(job.ids, usable)
        if path is not None:
            self._pinned[job] = target.memory, path
        target.submit(job)

    def fetch(self, job: SimulatedJob, source: int, target: int, tokens: int) -> None:
        """Bring a job's leading tokens to its node, then submit it there."""
        size = self._nodes[target].model.block_tokens
        stop = min(tokens, job.prompt_tokens - 1) // size
        self._waiting[target][job] = None
        self._queue.append(_Fetch(job, stop, self._nodes[source], self._nodes[target]))
        self._start_next()

    def used(self, job: SimulatedJob) -> None:
        """A job has its first token, or is over: nothing is kept for it any more."""
        pinned = self._pinned.pop(job, None)
        if pinned is not None:
            memory, path = pinned
            memory.host.unpin(path)

    def lost(self, node: int) -> list[SimulatedJob]:
        """Forget a dead node and its pins; returns the jobs whose KV was on its way there."""
        lost = list(self._waiting[node])
        self._waiting[node].clear()
        gone = self._nodes[node].memory
        self._pinned = {job: pin for job, pin in self._pinned.items() if pin[0] is not gone}
        return lost

    def _start_next(self) -> None:
        """Start the transfers that wait for no card in use and no transfer ahead of them."""
        taken = self._in_use.copy()
        queue, self._queue = self._queue, []
        needless: list[_Fetch] = []
        for fetch in queue:
            ends = fetch.source.index, fetch.target.index
            if any(taken[card] for card in ends):
                self._queue.append(fetch)
            else:
                blocks = self._missing(fetch)
                if not blocks:
                    needless.append(fetch)
                    continue
                self._start(fetch, blocks)
            for card in ends:
                taken[card] = True
        for fetch in needless:
            self._arrive(fetch)

    def _missing(self, fetch: _Fetch) -> int:
        """Blocks that the source has and the target lacks now; they are pinned at the source."""
        source, target, ids = fetch.source, fetch.target, fetch.job.ids
        if source is target or not (source.alive and target.alive) or self._given_up(fetch):
            return 0
        fetch.stop = _held(source.memory, ids, fetch.stop)
        # On the device alone they do not help the host tier: it holds whole prefixes.
        missing = fetch.stop - target.memory.host.match(ids, fetch.stop)[1]
        if missing <= 0 or target.memory.device.match(ids, fetch.stop)[1] == fetch.stop:
            return 0
        fetch.memory = source.memory
        fetch.path = source.memory.host.pin(*source.memory.host.match(ids, fetch.stop))
        return missing

    def _start(self, fetch: _Fetch, blocks: int) -> None:
        ends = fetch.source, fetch.target
        rate = min(node.model.network_bytes_per_s for node in ends)
        seconds = self._fixed_s + blocks * fetch.target.model.block_bytes / rate
        for node in ends:
            self._in_use[node.index] = True
            self.busy_s[node.index] += seconds
        self._loop.at(self._loop.now_s + seconds, self._end, fetch)

    def _end(self, fetch: _Fetch) -> None:
        self._in_use[fetch.source.index] = self._in_use[fetch.target.index] = False
        self._arrive(fetch)
        self._start_next()

    def _arrive(self, fetch: _Fetch) -> None:
        job, target, arrived = fetch.job, fetch.target, 0
        if fetch.memory is not None and fetch.memory is fetch.source.memory:
            arrived = _held(fetch.memory, job.ids, fetch.stop)
            fetch.memory.host.unpin(fetch.path)
        if self._given_up(fetch):
            return
        del self._waiting[target.index][job]
        if arrived:
            self._pinned[job] = target.memory, target.memory.hold_copy(job.ids, arrived)
            target.submit(job)
        else:
            self.submit(job, target.index)

    def _given_up(self, fetch: _Fetch) -> bool:
        return fetch.job not in self._waiting[fetch.target.index]


def _held(memory: NodeMemory, ids: Ids, stop: int) -> int:
    """Leading blocks in either tier."""
    return max(memory.host.match(ids, stop)[1], memory.device.match(ids, stop)[1])
