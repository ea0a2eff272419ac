"""Full blocks copied to host memory beside the computation, and findable there when they are.

Called when a request's blocks are complete. A store holds its device and host blocks until its
copy has ended; only then are they published. Where the host pool has nothing to evict, or too many
stores are on their way, a block is not stored, and counted, nor are those behind it, which nobody
could find: a later request computes them again. `Keeper` decides what is stored how: as KV, as
activations, or as both. Activations are captured while they are computed, into blocks of their own:
worth storing only if all tokens of the block are there, so capture begins where a block begins. A
block that could not be captured (no room; found on the device) has its KV stored in any case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Run
from dataclasses import dataclass

from engine.arena import Arena, copies
from engine.blocks import BlockPool, BlockType
from engine.memory import TieredMemory
from engine.prefix import BlockKey, PrefixPool
from engine.sequence import Sequence
from engine.settings import EngineOptions
from engine.transfer import Event, LinkMover


@dataclass(slots=True)
class StoreCounters:
    """Blocks stored, and not: no host block to be had; the link too far behind; the block before
    is not there; the copy failed."""

    stored: int = 0
    dropped_full: int = 0
    dropped_late: int = 0
    dropped_orphan: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Store:
    type: BlockType
    before: Run[BlockKey]
    keys: list[BlockKey]
    device: list[int]
    host: list[int]
    event: Event
    over: Callable[[list[int]], None]


class HostStore:
    """Stores of one engine.

    Args:
        arena: the tensors.
        mover: copies.
        caches: the host tier, per type.
        max_pending: blocks on their way at most; more are dropped.

    `copied`, if set, is told of KV blocks that are being copied: keys, device and host blocks.
    """

    def __init__(
        self,
        arena: Arena,
        mover: LinkMover,
        caches: dict[BlockType, PrefixPool],
        max_pending: int = 4096,
    ) -> None:
        self.counters = StoreCounters()
        self.copied: Callable[[list[BlockKey], list[int], list[int]], None] | None = None
        self._arena = arena
        self._mover = mover
        self._caches = caches
        self._max_pending = max_pending
        self._stores: deque[_Store] = deque()
        self._on_their_way: dict[BlockType, set[bytes]] = {type: set() for type in caches}

    def __len__(self) -> int:
        """Blocks on their way."""
        return sum(len(digests) for digests in self._on_their_way.values())

    def holds(self, key: BlockKey) -> bool:
        """Whether the block is in host memory, or on its way there, in any form."""
        return any(not self.wants(type, key) for type in self._caches)

    def wants(self, type: BlockType, key: BlockKey) -> bool:
        """Whether the block is not in host memory yet, nor on its way there."""
        return self._caches[type].find(key) is None and key.digest not in self._on_their_way[type]

    def store(
        self,
        type: BlockType,
        keys: Run[BlockKey],
        device: Run[int],
        over: Callable[[list[int]], None],
        *,
        before: Run[BlockKey] = (),
        beside: Collection[bytes] = (),
    ) -> None:
        """Start to store full blocks, in the order of their sequence.

        Args:
            type: of the blocks.
            keys: their names; those that are there or on their way are left out.
            device: where they lie; the caller is a user of each.
            over: takes back that use, of all of them at once or in parts, when it is needed no
                more, now or later.
            before: the sequence's blocks before the first of these, which are not evicted for it:
                without them nobody would find it.
            beside: digests of blocks that are stored in another form at the same time.
        """
        if not keys:
            return
        if not self._caches[type].pool.count:
            # No such tier: nothing was dropped, either.
            over(list(device))
            return
        pairs = [(k, d) for k, d in zip(keys, device, strict=True) if self.wants(type, k)]
        cache = self._caches[type]
        crowded = len(pairs) > cache.pool.unused
        front = cache.hold([k for k in before if k.digest in cache]) if crowded else []
        kept = pairs[: self._fitting(type, [key for key, _ in pairs], beside)]
        host = cache.take(len(kept))
        cache.release(front)
        unwanted = set(device) - {block for _, block in kept}
        if unwanted:
            over(sorted(unwanted))
        if not kept:
            return
        blocks = [block for _, block in kept]
        event = self._mover.d2h(copies(self._arena, type, "host", host, blocks))
        keys = [key for key, _ in kept]
        if self.copied is not None and type == "kv":
            self.copied(keys, blocks, host)
        self._stores.append(_Store(type, before, keys, blocks, host, event, over))
        self._on_their_way[type].update(key.digest for key in keys)

    def _fitting(self, type: BlockType, keys: list[BlockKey], beside: Collection[bytes]) -> int:
        """How many of the first of these can be stored; counts why not the others."""
        counters, wanted = self.counters, len(keys)
        digests: set[bytes | None] = {None, *beside}
        for index, key in enumerate(keys):
            if key.parent not in digests and not self._there(key.parent):
                counters.dropped_orphan += wanted - index
                wanted = index
                break
            digests.add(key.digest)
        late = max(wanted - (self._max_pending - len(self)), 0)
        full = max(wanted - late - self._caches[type].available(), 0)
        counters.dropped_late += late
        counters.dropped_full += full
        return wanted - late - full

    def _there(self, digest: bytes | None) -> bool:
        return any(digest in digests for digests in self._on_their_way.values()) or any(
            digest in cache for cache in self._caches.values()
        )

    def poll(self) -> int:
        """Publish what has arrived, in order; how many blocks."""
        published = 0
        while self._stores and self._stores[0].event.done():
            store = self._stores.popleft()
            cache = self._caches[store.type]
            self._on_their_way[store.type].difference_update(k.digest for k in store.keys)
            if store.event.error() is None:
                published += cache.publish(store.keys, store.host)
                self.counters.stored += len(store.keys)
            else:
                self.counters.failed += len(store.keys)
            cache.release(store.host)
            # Blocks come one after the other, but a front without its end is of more use.
            cache.touch(store.before)
            store.over(store.device)
        return published

    def rest(self, timeout_s: float) -> bool:
        """Wait at most so long for the oldest to end; False if there is none."""
        if self._stores:
            self._stores[0].event.ended(timeout_s)
        return bool(self._stores)

    def drain(self, timeout_s: float) -> None:
        """Wait for all, and publish them.

        Raises:
            TransferFailed: not in time.
        """
        self._mover.drain(timeout_s)
        self.poll()


class Keeper:
    """Publishes and stores what becomes full.

    Args:
        memory: of the engine.
        store: to host memory.
        act_pool: device blocks for captured activations.
        settings: which blocks are stored how.

    `skipped` counts blocks that were not captured for want of room.
    """

    def __init__(
        self, memory: TieredMemory, store: HostStore, act_pool: BlockPool, settings: EngineOptions
    ) -> None:
        self.skipped = 0
        self._memory = memory
        self._store = store
        self._pool = act_pool
        self._settings = settings
        # Being captured, by sequence and block index.
        self._captured: dict[Sequence, dict[int, int]] = {}

    def capture(self, sequence: Sequence, start: int, stop: int) -> dict[int, int]:
        """Blocks, by index, that take the activations of tokens [start, stop) of a sequence."""
        if not self._settings.act_share:
            return {}
        size = self._pool.block_tokens
        blocks = self._captured.setdefault(sequence, {})
        for index in range(-(-start // size), -(-stop // size)):
            if index in blocks or not self._wants(sequence, "act", index):
                continue
            if self._pool.unused:
                blocks[index] = self._pool.allocate(1)[0]
            else:
                self.skipped += 1
        return dict(blocks)

    def computed(self, sequence: Sequence, tokens: int) -> None:
        """KV of its first `tokens` tokens is in its blocks: publish and store what is full."""
        memory, pool = self._memory, self._memory.device.pool
        memory.computed(sequence, tokens)
        keys, stop = sequence.keys, sequence.published
        captured = self._captured.get(sequence, {})
        done = sorted(i for i in captured if (i + 1) * self._pool.block_tokens <= tokens)
        fresh = [
            index
            for index in range(sequence.stored, stop)
            if self._wants(sequence, "kv", index)
            or (index not in captured and not self._store.holds(keys[index]))
        ]
        sequence.stored = max(sequence.stored, stop)
        blocks: list[int] = sequence.table.device[fresh].tolist() if fresh else []
        pool.share(blocks)
        acts = [captured.pop(index) for index in done]
        as_kv, as_act = [keys[i] for i in fresh], [keys[i] for i in done]
        both = {key.digest for key in (*as_kv, *as_act)}
        front = keys[: min([*fresh, *done], default=0)]
        over = memory.device.release
        self._store.store("kv", as_kv, blocks, over, before=front, beside=both)
        self._store.store("act", as_act, acts, self._pool.free, before=front, beside=both)

    def drop(self, sequence: Sequence) -> None:
        """It computes no more, or from the start again."""
        self._pool.free(self._captured.pop(sequence, {}).values())

    def _wants(self, sequence: Sequence, type: BlockType, index: int) -> bool:
        """Whether that block of it should be stored so."""
        if not self._settings.stores(type, index):
            return False
        return index >= len(sequence.keys) or self._store.wants(type, sequence.keys[index])
