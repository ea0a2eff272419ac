"""Requests that keep their context in host memory while they run (papers 000 and 003).

Their blocks leave the device as soon as host memory has them, and cross the link again at every
step, layer by layer. On the device they take the blocks of the chunk at hand, and of an answer the
one that fills. Room in host memory for all of the prompt is set aside at the admission; a block
that finds none later stays on the device, and if that is full, the scheduling rule's victim waits.
Some activations may stay on the device instead (paper 003, #ACT_GPU), the last ones of a prompt:
other requests do not find them, but they find the prefix before them in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Run

import numpy as np

from kappa.plans.load_plan import LoadPlan
from kappa_engine.block_pool import BlockPool, BlockType
from kappa_engine.prefix_cache import BlockKey, PrefixPool
from kappa_engine.sequence import HostResident, Sequence
from kappa_engine.settings import EngineOptions
from kappa_scheduler.work import Quote

# More than any context has.
_ALL_TOKENS = 1 << 40


class HostResidents:
    """The running requests of one engine that keep their context in its host tier."""

    def __init__(
        self, device: PrefixPool, acts: BlockPool, host: Mapping[BlockType, PrefixPool],
        settings: EngineOptions,
    ) -> None:  # fmt: skip
        self._device, self._acts, self._host, self._settings = device, acts, host, settings
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
        if self._lacks_room(keys[:stop], total, self._may_stay(stop, total)):
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
        most_stay, stays_from = self._may_stay(there, total), total
        while self._settings.stored("act", stays_from, total) < most_stay:
            stays_from -= 1
        sequence.kept = self._live[sequence] = HostResident(
            kv, act, plan, grows=True, promised=total,
            cpu_tokens=_ALL_TOKENS if sequence.resides == "host-cpu" else 0,
            split=sequence.resides in ("host-kvpr", "host-hybrid"), here=np.full_like(kv, -1),
            stays_from=stays_from, most_stay=most_stay,
        )  # fmt: skip
        sequence.blocks = np.array([*[-1] * stop, *held, *private], np.int64)
        sequence.published, sequence.stored = there, stop
        return quote

    def keep(self, sequence: Sequence, index: int, block: int) -> bool:
        """Let the activations of a request's block `index` stay in device block `block` until it is
        over; False: they are to be stored."""
        kept = self._live.get(sequence)
        if kept is None or index < kept.stays_from:
            return False
        if index >= kept.promised:
            if not self._may_stay(index, index + 1):
                return False
            kept.most_stay += 1
        kept.stays[index] = block
        return True

    def leave(self, sequence: Sequence, stop: int) -> None:
        """Free the device's KV of a request's first `stop` blocks: host memory has them, or their
        activations stay."""
        kept = self._live[sequence]
        start = len(kept.kv)
        keys, here = sequence.keys[start:stop], sequence.blocks[start:stop]
        stay = np.array([kept.stays.get(index, -1) for index in range(start, stop)], np.int64)
        kept.here = np.append(kept.here, stay)
        kv, act = (self._held(type, keys) for type in ("kv", "act"))
        kept.kv, kept.act = np.append(kept.kv, kv), np.append(kept.act, act)
        self._device.release(here[here >= 0].tolist())
        here[:] = -1

    def release(self, sequence: Sequence) -> None:
        """Forget a finished or preempted request, and free its activations on the device; the block
        manager releases its other blocks."""
        if (kept := self._live.pop(sequence, None)) is not None:
            self._acts.free(kept.stays.values())

    def _held(self, type: BlockType, keys: Run[BlockKey]) -> np.ndarray:
        return np.array(self._host[type].hold_found(keys), np.int64)

    def _may_stay(self, start: int, stop: int) -> int:
        """How many of a request's blocks [start, stop) may stay on the device as activations."""
        others = sum(kept.most_stay for kept in self._live.values())
        free = self._settings.act_device_blocks - others
        return min(free, self._settings.stored("act", start, stop))

    def _lacks_room(self, found: Run[BlockKey], total: int, stay: int) -> bool:
        """Whether host memory lacks room for a prompt of `total` blocks but the `stay` that stay on
        the device, beside the blocks promised to others that they have not stored yet."""
        for type, cache in self._host.items():
            wanted = cache.idle_of(found) + self._settings.stored(type, len(found), total)
            wanted -= stay if type == "act" else 0
            for kept in self._live.values():
                stop = kept.stays_from if type == "act" else kept.promised
                wanted += self._settings.stored(type, min(len(kept.kv), stop), stop)
            if wanted > cache.available():
                return True
        return False
