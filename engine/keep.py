"""What is kept of computed blocks: findable on the device, and stored in host memory.

As KV, as activations, or as both, as the settings say. Activations are captured while they are
computed, into blocks of their own: worth storing only if all tokens of the block are there, so
capture begins where a block begins. A block that could not be captured (no room; found on the
device) has its KV stored in any case, or what lies behind it would never be found.
"""

from __future__ import annotations

from engine.blocks import BlockPool, BlockType
from engine.memory import EngineMemory
from engine.sequence import Sequence
from engine.settings import EngineSettings
from engine.store import HostStore


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
        self, memory: EngineMemory, store: HostStore, act_pool: BlockPool, settings: EngineSettings
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
