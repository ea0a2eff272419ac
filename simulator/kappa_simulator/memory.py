"""The blocks of a simulated node in all tiers: its engine's `kappa_scheduler.work.Memory`.

A request's blocks are reserved when it is admitted; until its tokens are computed or loaded they
are private, then others can find them: on the device at once, in the host tier when the store has
landed, and then on disk, which is written in no time. Blocks of a prefix that two requests brought
in are counted once.
"""

from __future__ import annotations

from typing import Literal, Protocol

from kappa_router.index.kv_event_types import Tier
from kappa_scheduler.work import Quote, Work
from kappa_simulator.cache import Ids, PrefixRun, TierCache
from kappa_simulator.clusters import NodeModel
from kappa_simulator.job import SimulatedJob


class CacheListener(Protocol):
    """Receives every change of what a node holds: blocks in prefix order, runs of those gone."""

    def hold(self, node: int, tier: Tier, ids: Ids) -> None: ...

    def drop(self, node: int, tier: Tier, ids: list[Ids]) -> None: ...


class NodeMemory:
    """Device, host and disk caches of one node.

    `private` counts device blocks that requests hold and nobody else can find; `waited_for` are the
    requests whose loads are on their way.
    """

    def __init__(self, node: int, model: NodeModel, listener: CacheListener | None) -> None:
        self.node, self._listener, self.block_tokens = node, listener, model.block_tokens
        self.capacity_blocks, self.host_blocks = model.device_blocks, model.host_blocks
        self.disk_blocks = model.disk_blocks
        self.device = TierCache()
        self.host = TierCache()
        self.disk = TierCache()
        self.private = 0
        self.version = 0
        self.waited_for: dict[SimulatedJob, tuple[int, int]] = {}

    @property
    def held(self) -> int:
        """Device blocks that running and loading requests hold."""
        return self.private + self.device.pinned

    # -- the scheduler's view -----------------------------------------------------------------

    def available(self) -> int:
        """Device blocks unused or evictable."""
        return self.capacity_blocks - self.private - self.device.pinned

    def quote(self, work: Work) -> Quote | None:
        """What admitting it takes; None while another request loads blocks that it needs.

        At least one token of a prompt is computed, so a full hit gives its last block back.
        """
        assert isinstance(work, SimulatedJob)
        size, ids, total = self.block_tokens, work.ids, work.total_tokens
        usable = (total - 1) // size
        run, found = self.device.match(ids, usable)
        blocks, shared = -(-total // size) - found, found
        if run is not None and not run.pins:
            idle = self.device.unpinned(run, found)
            blocks += idle
            shared -= idle
        key = ids.item(0) if len(ids) else 0
        _, in_host = self.host.match(ids, usable)
        if self.disk_blocks:
            in_host = max(in_host, self.disk.match(ids, usable)[1])
        if in_host <= found:
            return Quote(blocks, found * size, 0, shared, key)
        if self.waited_for:
            first = ids.item(found)
            for other, (start, stop) in self.waited_for.items():
                if start <= found < stop and other.ids.item(found) == first:
                    return None
        return Quote(blocks, found * size, (in_host - found) * size, shared, key)

    def take(self, work: Work, quote: Quote) -> Quote:
        """Reserve a request's blocks and pin what it found."""
        assert isinstance(work, SimulatedJob)
        size, ids = self.block_tokens, work.ids
        found = quote.device_tokens // size
        run, found = self.device.match(ids, found)
        work.path = self.device.pin(run, found)
        work.hashed = found
        work.private = -(-work.total_tokens // size) - found
        self._make_room(work.private)
        self.private += work.private
        stop = found + quote.host_tokens // size
        source, length = self.host.match(ids, stop)
        work.disk_blocks = 0
        if quote.host_tokens:
            work.host_path = self.host.pin(source, length)
            if length < stop:
                work.disk_path = self.disk.pin(*self.disk.match(ids, stop))
                work.disk_blocks = stop - max(length, found)
            self.waited_for[work] = (found, stop)
        else:
            self.host.touch(source, length)
        work.stored = length
        if work.device_tokens < 0:
            work.device_tokens = quote.device_tokens
            work.cached_tokens = quote.host_tokens
        return quote

    # -- what happens to a request ------------------------------------------------------------

    def arrived(self, job: SimulatedJob) -> None:
        """Note that a waiting job wants its prefix in the tiers: evict others first."""
        usable = (job.total_tokens - 1) // self.block_tokens
        for tier in (self.host, self.disk):
            tier.touch(*tier.match(job.ids, usable))

    def landed(self, job: SimulatedJob) -> None:
        """Note that a job's host blocks are on the device."""
        _, stop = self._load_ended(job)
        self.computed(job, stop)

    def _load_ended(self, job: SimulatedJob) -> tuple[int, int]:
        self.host.unpin(job.host_path)
        self.disk.unpin(job.disk_path)
        job.host_path = job.disk_path = None
        return self.waited_for.pop(job)

    def load_failed(self, job: SimulatedJob) -> None:
        """Note that a job's host blocks did not arrive: they are computed."""
        start, stop = self._load_ended(job)
        lost = (stop - start) * self.block_tokens
        job.computed_tokens -= lost
        job.cached_tokens = max(job.cached_tokens - lost, 0)

    def computed(self, job: SimulatedJob, stop: int) -> None:
        """Publish a job's first `stop` blocks, which are on the device."""
        device, ids, hashed = self.device, job.ids, job.hashed
        if stop <= hashed:
            return
        run, at = device.match(ids, stop, job.path, hashed)
        if at > hashed:
            job.path = device.pin(run, at, job.path)
        if at < stop:
            job.path = device.extend(job.path, ids, stop)
            if self._listener is not None:
                self._listener.hold(self.node, "device", ids[at:stop])
        job.hashed = stop
        job.private -= stop - hashed
        self.private -= stop - hashed
        self.version += 1

    def grow(self, job: SimulatedJob) -> bool:
        """Allocate one more block to a decoding job; False if there is none."""
        if self.available() < 1:
            return False
        self._make_room(1)
        job.private += 1
        self.private += 1
        return True

    def release(self, job: SimulatedJob) -> None:
        """Free the private blocks of a finished or preempted job; published ones stay cached."""
        self.private -= job.private
        job.private = 0
        self.device.unpin(job.path)
        job.path = None
        job.hashed = 0
        self.version += 1

    # -- the host tier ------------------------------------------------------------------------

    def put_in_host(self, ids: Ids, stop: int) -> None:
        """Hold the first `stop` blocks in the host tier, and on disk, as far as there is room.

        Runs being loaded are not evicted for it.
        """
        path, stop = self._into("host", ids, stop)
        self.host.unpin(path)
        if self.disk_blocks:
            self.disk.unpin(self._into("disk", ids, stop)[0])

    @property
    def spare_host_blocks(self) -> int:
        """Host blocks unused, or held only as copies of what a peer has: room for fetches."""
        return self.host_blocks - self.host.blocks + self.host.spare

    def hold_copy(self, ids: Ids, stop: int) -> PrefixRun | None:
        """Hold what was fetched from a peer; pinned until the handle is unpinned.

        It is evicted before what is only here.
        """
        return self._into("host", ids, stop, copy=True)[0]

    def pin_copy(self, ids: Ids, stop: int) -> PrefixRun | None:
        """Pin the copy, if it is one, that the host tier has of a prefix of `ids[:stop]`."""
        run, length = self.host.match(ids, stop)
        return self.host.pin(run, length) if run is not None and run.copy else None

    def _into(
        self, tier: Literal["host", "disk"], ids: Ids, stop: int, copy: bool = False
    ) -> tuple[PrefixRun | None, int]:
        """Pinned in a tier as far as there is room: the handle, and where it ends."""
        cache = self.host if tier == "host" else self.disk
        blocks = self.host_blocks if tier == "host" else self.disk_blocks
        run, length = cache.match(ids, stop)
        path = cache.pin(run, length)
        room = blocks - cache.blocks
        if room < stop - length:
            self._evict(tier, stop - length - room)
            stop = min(stop, length + blocks - cache.blocks)
        if stop > length:
            path = cache.extend(path, ids, stop, copy)
            if self._listener is not None:
                self._listener.hold(self.node, tier, ids[length:stop])
        return path, stop

    def _make_room(self, blocks: int) -> None:
        short = blocks - (self.capacity_blocks - self.private - self.device.blocks)
        if short > 0:
            self._evict("device", short)

    def _evict(self, tier: Tier, blocks: int) -> None:
        cache: TierCache = getattr(self, tier)
        dropped = cache.evict(blocks)
        if dropped and self._listener is not None:
            self._listener.drop(self.node, tier, dropped)
