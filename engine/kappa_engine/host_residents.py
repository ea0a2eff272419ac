"""Requests that keep their context in host memory while they run (papers 000 and 003).

Their blocks leave the device as soon as host memory has them, and cross the link again at every
step, layer by layer. On the device they take the blocks of the chunk at hand, and of an answer the
one that fills. Room in host memory for all of the prompt is set aside at the admission; a block
that finds none later stays on the device, and if that is full, the scheduling rule's victim waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Run

import numpy as np

from kappa.plans.load_plan import LoadPlan
from kappa_engine.block_pool import BlockType
from kappa_engine.prefix_cache import BlockKey, PrefixPool
from kappa_engine.sequence import HostResident, Sequence
from kappa_engine.settings import EngineOptions
from kappa_scheduler.work import Quote

# More than any context has.
_ALL_TOKENS = 1 << 40


class HostResidents:
    """The running requests of one engine that keep their context in its host tier."""

    def __init__(
        self, device: PrefixPool, host: Mapping[BlockType, PrefixPool], settings: EngineOptions
    ) -> None:
        self._device, self._host, self._settings = device, host, settings
        self.window_blocks = settings.window_blocks(device.pool.block_tokens)
        self._live: dict[Sequence, HostResident] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._live)

    def quote(self, sequence: Sequence, stop: int, usable: int) -> Quote:
        """The cost of admitting a request: device blocks for its first chunk; more than there are
        while host memory lacks room for its prompt.

        Args:
            stop: how many of its first `usable` blocks host memory has.
        """
        keys, size = sequence.keys, sequence.block_tokens
        there = max(stop, self._device.prefix(keys, usable)[0])
        idle = self._device.idle_of(keys[stop:there])
        total = -(-sequence.total_tokens // size)
        window = min(total - there, self.window_blocks)
        blocks = window + idle
        if self._lacks_room(keys[:stop], total):
            blocks = max(blocks, self._device.available() + 1)
        held = there - stop
        return Quote(
            blocks, there * size, 0, held - idle, sequence.first_key, total - window - held, False
        )

    def take(self, sequence: Sequence, quote: Quote, stop: int, plan: LoadPlan) -> Quote | None:
        """Reserve the blocks of a quote; None if they are gone by now."""
        if quote.blocks > self._device.available():
            return None
        keys, there = sequence.keys, quote.device_tokens // sequence.block_tokens
        total = -(-sequence.total_tokens // sequence.block_tokens)
        held = self._device.hold(keys[stop:there])
        private = self._device.take(min(total - there, self.window_blocks))
        kv, act = (self._held(type, keys[:stop]) for type in ("kv", "act"))
        sequence.kept = self._live[sequence] = HostResident(
            kv, act, plan, grows=True, promised=total,
            cpu_tokens=_ALL_TOKENS if sequence.resides == "host-cpu" else 0,
            split=sequence.resides in ("host-kvpr", "host-hybrid"),
        )  # fmt: skip
        sequence.blocks = np.array([*[-1] * stop, *held, *private], np.int64)
        sequence.published, sequence.stored = there, stop
        return quote

    def leave(self, sequence: Sequence, stop: int) -> None:
        """Free the device blocks of a request's first `stop` blocks: host memory has them."""
        kept = self._live[sequence]
        start = len(kept.kv)
        keys, here = sequence.keys[start:stop], sequence.blocks[start:stop]
        kept.kv = np.append(kept.kv, self._held("kv", keys))
        kept.act = np.append(kept.act, self._held("act", keys))
        self._device.release(here[here >= 0].tolist())
        here[:] = -1

    def release(self, sequence: Sequence) -> None:
        """Forget a finished or preempted request; the block manager releases its blocks."""
        self._live.pop(sequence, None)

    def _held(self, type: BlockType, keys: Run[BlockKey]) -> np.ndarray:
        return np.array(self._host[type].hold_found(keys), np.int64)

    def _lacks_room(self, found: Run[BlockKey], total: int) -> bool:
        """Whether host memory lacks room for a prompt of `total` blocks, beside the blocks promised
        to others that they have not stored yet."""
        for type, cache in self._host.items():
            wanted = cache.idle_of(found) + self._settings.stored(type, len(found), total)
            for kept in self._live.values():
                start = min(len(kept.kv), kept.promised)
                wanted += self._settings.stored(type, start, kept.promised)
            if wanted > cache.available():
                return True
        return False
