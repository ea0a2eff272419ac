"""KV on its way between nodes: fetched by requests that wait for it, or replicated for later ones.

Whether anything has to move is decided when a transfer starts, not when it was queued: the
request may be gone, the source may have evicted it, the target may hold it by now. The source's
host blocks are pinned meanwhile, and count as used; its device blocks stay the engine's, so only
what is left of them at the end arrives. What a request fetched, or others fetched before it to
where it goes, stays pinned until `used`: copies are evicted first, and it counts on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.cache import Ids, Run
from simulator.job import Job
from simulator.memory import NodeMemory
from simulator.network import Network, Transfer
from simulator.node import Node


@dataclass(slots=True, eq=False)
class _Way:
    """Leading blocks of `ids` under way; job: who waits for them, if anybody does.

    source: the memory they come from, as long as it is that node's; path: what is pinned there;
    stop: how many blocks lead, held blocks of the target included.
    """

    ids: Ids
    stop: int
    source_node: Node
    target_node: Node
    job: Job | None
    source: NodeMemory | None = None
    path: Run | None = None


class Fetching:
    """All transfers between the host tiers of `nodes`."""

    def __init__(self, nodes: Sequence[Node], network: Network, block_bytes: float) -> None:
        self._nodes = nodes
        self._network = network
        self._block_bytes = block_bytes
        self._waiting: list[dict[Job, None]] = [{} for _ in nodes]
        self._pinned: dict[Job, tuple[NodeMemory, Run | None]] = {}

    def submit(self, job: Job, node: int) -> None:
        """Submit a job that waits for nothing; a copy that it was sent to stays until `used`."""
        target = self._nodes[node]
        path = target.memory.hold_copy(
            job.ids, (job.prompt_tokens - 1) // target.model.block_tokens
        )
        if path is not None:
            self._pinned[job] = target.memory, path
        target.submit(job)

    def fetch(self, job: Job, source: int, target: int, tokens: int) -> None:
        """Bring a job's leading tokens to its node before it is submitted there."""
        size = self._nodes[target].model.block_tokens
        stop = min(tokens // size, (job.prompt_tokens - 1) // size)
        self._waiting[target][job] = None
        self._send(_Way(job.ids, stop, self._nodes[source], self._nodes[target], job))

    def replicate(self, ids: Ids, source: int, target: int) -> None:
        """Bring blocks into another node's host tier, as far as there is spare room."""
        self._send(_Way(ids, len(ids), self._nodes[source], self._nodes[target], None))

    def used(self, job: Job) -> None:
        """A job has its first token, or is over: nothing is kept for it any more."""
        pinned = self._pinned.pop(job, None)
        if pinned is not None:
            memory, path = pinned
            memory.let_go(path)

    def lost(self, node: int) -> list[Job]:
        """A node died, with all it had pinned; returns the jobs whose KV was on its way there."""
        lost = list(self._waiting[node])
        self._waiting[node].clear()
        gone = self._nodes[node].memory
        self._pinned = {job: held for job, held in self._pinned.items() if held[0] is not gone}
        return lost

    def _send(self, way: _Way) -> None:
        self._network.send(
            Transfer(
                way.source_node.index,
                way.target_node.index,
                lambda: self._begin(way),
                lambda: self._end(way),
            )
        )

    def _begin(self, way: _Way) -> float:
        source, target = way.source_node, way.target_node
        if source is target or not (source.alive and target.alive) or self._given_up(way):
            return 0.0
        memory = source.memory
        run, in_host = memory.host.match(way.ids, way.stop)
        way.stop = _held(memory, way.ids, way.stop)
        # On the device alone they do not help the host tier: it holds whole prefixes.
        held = target.memory.host.match(way.ids, way.stop)[1]
        missing = way.stop - held
        if target.memory.device.match(way.ids, way.stop)[1] == way.stop:
            missing = 0
        elif way.job is None:
            missing = min(missing, target.memory.spare_host_blocks)
            way.stop = held + missing
        if missing <= 0:
            return 0.0
        way.source, way.path = memory, memory.host.pin(run, in_host)
        return missing * self._block_bytes

    def _given_up(self, way: _Way) -> bool:
        return way.job is not None and way.job not in self._waiting[way.target_node.index]

    def _end(self, way: _Way) -> None:
        source, target, job = way.source, way.target_node, way.job
        arrived = 0
        # A source that died on the way has a new, empty memory, and what it sent is no prefix.
        if source is not None and source is way.source_node.memory:
            arrived = _held(source, way.ids, way.stop)
            source.host.unpin(way.path)
        if job is None:
            if arrived and target.alive:
                target.memory.hold_replica(way.ids, arrived)
            return
        if self._given_up(way):
            return
        del self._waiting[target.index][job]
        if arrived:
            self._pinned[job] = target.memory, target.memory.hold_fetched(way.ids, arrived)
            target.submit(job)
        else:
            self.submit(job, target.index)


def _held(memory: NodeMemory, ids: Ids, stop: int) -> int:
    """Leading blocks in either tier."""
    return max(memory.host.match(ids, stop)[1], memory.device.match(ids, stop)[1])
