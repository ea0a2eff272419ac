"""Full blocks copied to host memory beside the computation, and findable there when they are.

A store holds its device and host blocks until its copy has ended; only then are they published. A
block is dropped, and counted, where the host pool has nothing to evict or too many stores are on
their way; so are the blocks behind it, which no request could find. The settings say whether blocks
are stored as KV, as activations, or as both. Activations are captured in blocks of their own while
they are computed; they are of use only for all tokens of a block, so capture begins where a block
begins. If a block could not be captured (no room; found on the device), its KV is stored. What
`HostResidents.keep` takes of them is not stored: it stays where it was captured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Run
from dataclasses import dataclass

from kappa_engine.block_manager import BlockManager
from kappa_engine.block_pool import BlockType
from kappa_engine.kv_cache import Arena
from kappa_engine.prefix_cache import BlockKey
from kappa_engine.sequence import Sequence
from kappa_engine.settings import EngineOptions
from kappa_engine.transfer import WAIT_S, Event, LinkMover

# Blocks on their way at most; more are dropped.
MOST_PENDING_BLOCKS = 4096


@dataclass(slots=True)
class _Store:
    type: BlockType
    front: Run[BlockKey]
    keys: list[BlockKey]
    device: list[int]
    host: list[int]
    event: Event


class HostStore:
    """Publishes and stores the blocks of one engine that become full."""

    def __init__(
        self, arena: Arena, mover: LinkMover, memory: BlockManager, settings: EngineOptions
    ) -> None:
        # Blocks so far for which the host pool, or the link, had no room.
        self.dropped = 0
        # Called with KV blocks that are being copied: keys, device and host blocks.
        self.copied: Callable[[list[BlockKey], list[int], list[int]], None] | None = None
        self._arena, self._mover, self._memory, self._settings = arena, mover, memory, settings
        self._acts = arena.pools["act", "device"]
        self._stores: deque[_Store] = deque()
        self._on_their_way: dict[BlockType, set[bytes]] = {"kv": set(), "act": set()}
        # Blocks that capture activations, by sequence and index of the block.
        self._captured: dict[Sequence, dict[int, int]] = {}

    def __len__(self) -> int:
        """Blocks on their way."""
        return sum(len(digests) for digests in self._on_their_way.values())

    def wants(self, type: BlockType, key: BlockKey) -> bool:
        """Whether a block is neither in host memory nor on its way there."""
        return not self._there(type, key.digest)

    def capture(self, sequence: Sequence, start: int, stop: int) -> dict[int, int]:
        """Device blocks, by index, that take the activations of tokens [start, stop)."""
        if not self._settings.act_share:
            return {}
        size = self._arena.block_tokens
        blocks = self._captured.setdefault(sequence, {})
        for index in range(-(-start // size), -(-stop // size)):
            if index in blocks or not self._as(sequence, "act", index):
                continue
            if self._acts.unused:
                blocks[index] = self._acts.allocate(1)[0]
        return dict(blocks)

    def computed(self, sequence: Sequence, tokens: int) -> None:
        """Publish and store the full blocks of a sequence's first `tokens` tokens."""
        self._memory.computed(sequence, tokens)
        keys, stop = sequence.keys, sequence.published
        captured = self._captured.get(sequence, {})
        done = sorted(i for i in captured if (i + 1) * self._arena.block_tokens <= tokens)
        for index in done:
            if self._memory.residents.keep(sequence, index, captured[index]):
                del captured[index]
        done = [index for index in done if index in captured]
        stays = {} if sequence.kept is None else sequence.kept.stays
        fresh = [
            index
            for index in range(sequence.stored, stop)
            if index not in stays
            and (
                self._as(sequence, "kv", index)
                or (index not in captured and not any(self._in_host(keys[index].digest)))
            )
        ]
        sequence.stored = max(sequence.stored, stop)
        blocks: list[int] = sequence.blocks[fresh].tolist() if fresh else []
        self._memory.device.pool.share(blocks)
        acts = [captured.pop(index) for index in done]
        as_kv, as_act = [keys[i] for i in fresh], [keys[i] for i in done]
        both = {key.digest for key in (*as_kv, *as_act)}
        # These stay on the device, and no prefix with them is found in host memory.
        both |= {keys[i - 1].digest for i in (*fresh, *done) if i - 1 in stays}
        front = keys[: min([*fresh, *done], default=0)]
        self.store("kv", as_kv, blocks, front, both)
        self.store("act", as_act, acts, front, both)

    def drop(self, sequence: Sequence) -> None:
        """Give up the blocks that capture activations of a sequence that stops computing."""
        self._acts.free(self._captured.pop(sequence, {}).values())

    def store(
        self, type: BlockType, keys: Run[BlockKey], device: Run[int], front: Run[BlockKey] = (),
        beside: Collection[bytes] = (),
    ) -> None:  # fmt: skip
        """Start to store full blocks, in the order of their sequence, that host memory lacks.

        Args:
            device: the device blocks; the caller's use of each ends when its copy has ended.
            front: the sequence's blocks before these, which are not evicted for them: a prefix is
                found from its start.
            beside: digests of blocks that are stored in another form at the same time.
        """
        if not keys:
            return
        cache = self._memory.host[type]
        if not cache.pool.count:
            # No such tier: nothing was dropped, either.
            self._give_back(type, list(device))
            return
        pairs = [(k, d) for k, d in zip(keys, device, strict=True) if self.wants(type, k)]
        crowded = len(pairs) > cache.pool.unused
        held = cache.hold([k for k in front if k.digest in cache]) if crowded else []
        stored = pairs[: self._fitting(type, [key for key, _ in pairs], beside)]
        host = cache.take(len(stored))
        cache.release(held)
        blocks = [block for _, block in stored]
        self._give_back(type, sorted(set(device) - set(blocks)))
        if not stored:
            return
        event = self._mover.d2h(self._arena.copies(type, "host", host, blocks))
        named = [key for key, _ in stored]
        if self.copied is not None and type == "kv":
            self.copied(named, blocks, host)
        self._stores.append(_Store(type, front, named, blocks, host, event))
        self._on_their_way[type].update(key.digest for key in named)

    def poll(self) -> None:
        """Publish the blocks that have arrived, in order."""
        while self._stores and self._stores[0].event.done():
            store = self._stores.popleft()
            cache = self._memory.host[store.type]
            self._on_their_way[store.type].difference_update(k.digest for k in store.keys)
            if store.event.error() is None:
                cache.publish(store.keys, store.host)
            cache.release(store.host)
            # Blocks come one after the other, but a front without its end is of more use.
            cache.touch(store.front)
            self._give_back(store.type, store.device)
        for sequence in self._memory.residents:
            self._leave(sequence)

    def make_room(self, blocks: int = 0) -> bool:
        """Wait for stores until a device block is free, and `blocks` more activations can be
        captured; False if no device block was freed."""
        memory = self._memory
        before = memory.available()
        while self._stores and (memory.available() <= before or self._acts.unused < blocks):
            if not self._stores[0].event.ended(WAIT_S):
                break
            self.poll()
        return memory.available() > before

    @property
    def behind(self) -> bool:
        """Whether too many blocks are on their way to take another iteration's."""
        settings, size = self._settings, self._arena.block_tokens
        blocks = settings.max_running + -(-settings.budget_tokens // size)
        few = settings.act_share > 0 and self._acts.unused < blocks
        return bool(self._stores) and (few or len(self) + blocks > MOST_PENDING_BLOCKS)

    def rest(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the oldest store to end; False if there is none."""
        if self._stores:
            self._stores[0].event.ended(timeout_s)
        return bool(self._stores)

    def drain(self, timeout_s: float) -> None:
        """Wait for all stores, and publish them; `TransferFailed` if they do not end in time."""
        self._mover.drain(timeout_s)
        self.poll()

    def _leave(self, sequence: Sequence) -> None:
        """Free the device blocks of a sequence that host memory has by now, in order."""
        kept, keys = sequence.kept, sequence.keys
        assert kept is not None
        start = stop = len(kept.kv)
        while stop < sequence.stored:
            if stop in kept.stays:
                stop += 1
                continue
            digest, ways = keys[stop].digest, self._on_their_way.values()
            if any(digest in way for way in ways):
                break
            if not any(self._in_host(digest)):
                # There was no room for it. Its KV is stored when there is.
                if self._memory.host["kv"].available():
                    sequence.stored = stop
                break
            stop += 1
        if stop > start:
            self._memory.residents.leave(sequence, stop)

    def _give_back(self, type: BlockType, device: list[int]) -> None:
        if type == "act":
            self._acts.free(device)
        elif device:
            self._memory.device.release(device)

    def _as(self, sequence: Sequence, type: BlockType, index: int) -> bool:
        """Whether block `index` of a sequence is to be stored as `type`."""
        if not self._settings.stores(type, index):
            return False
        return index >= len(sequence.keys) or self.wants(type, sequence.keys[index])

    def _there(self, type: BlockType, digest: bytes | None) -> bool:
        return digest in self._memory.host[type] or digest in self._on_their_way[type]

    def _in_host(self, digest: bytes | None) -> tuple[bool, bool]:
        """Whether a block is in host memory, or on its way there, as KV and as activations."""
        return self._there("kv", digest), self._there("act", digest)

    def _fitting(self, type: BlockType, keys: list[BlockKey], beside: Collection[bytes]) -> int:
        """The number of leading blocks that can be stored; counts those without room as dropped."""
        wanted = len(keys)
        digests: set[bytes | None] = {None, *beside}
        for index, key in enumerate(keys):
            if key.parent not in digests and not any(self._in_host(key.parent)):
                wanted = index
                break
            digests.add(key.digest)
        late = max(wanted - (MOST_PENDING_BLOCKS - len(self)), 0)
        full = max(wanted - late - self._memory.host[type].available(), 0)
        self.dropped += late + full
        return wanted - late - full
