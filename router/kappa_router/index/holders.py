"""Holders of blocks: the cache of each worker's data-parallel rank, and the further cache groups of
a hybrid model in it.

A hit of such a model ends where all its groups have what they need: the first one the whole prefix,
one of sliding windows the blocks of a window, one of Mamba's layers the state of the last block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import lcm

import numpy as np
from numpy.typing import NDArray

from kappa_router.index.hash_table import HashTable, Int32s, UInt64s
from kappa_router.index.kv_event_types import Tier

TIER_BITS = 3
_NAMES_LOAD = 0.68
_MASKS: dict[Tier | None, int] = {"device": 1, "host": 2, "disk": 4, None: 7}
_ALL_BLOCKS = 1 << 62


class Holder:
    """A place in sets of holders, the engine's names, and spare device copies.

    groups: the further cache groups of a cache, by number, which share its names.
    heard: whether events told of the group that a hit needs from its beginning.
    needed: of a further group, at how many places before its end a hit needs blocks, `stride`
    blocks apart: an engine may cut such groups into larger blocks, then only every so manieth of
    ours has a name.
    """

    __slots__ = ("bit", "copies", "groups", "heard", "names", "needed", "stride")

    def __init__(self, bit: int, names: HashTable | None = None) -> None:
        self.bit = bit
        self.names = HashTable(0, _NAMES_LOAD) if names is None else names
        self.copies: dict[int, int] = {}
        self.groups: dict[int, Holder] = {}
        self.heard = False
        self.needed, self.stride = _ALL_BLOCKS, 1

    def bits(self, tier: Tier | None) -> int:
        """Bit mask for `tier` in sets of holders, or for all tiers if None."""
        return _MASKS[tier] << TIER_BITS * self.bit

    def all_bits(self, tier: Tier | None) -> int:
        """The bits of the cache and of its further groups."""
        return sum(group.bits(tier) for group in self.groups.values()) + self.bits(tier)

    def with_groups(self) -> tuple[Holder, ...]:
        """The cache and its further groups."""
        return self, *self.groups.values()

    def forget_names(self) -> None:
        self.names = HashTable(0, _NAMES_LOAD)

    def need(self, last_tokens: int | None, group_block: int, block: int) -> None:
        """Of a further group: the blocks that a hit needs, by the tokens of its and our blocks."""
        if last_tokens is None:
            self.needed, self.stride = _ALL_BLOCKS, 1
        elif last_tokens == 1:
            # One state, wherever there is one.
            self.needed, self.stride = 1, 1
        elif group_block:
            unit = lcm(group_block, block)
            needed = min(-(-last_tokens // unit), _ALL_BLOCKS)
            self.needed, self.stride = needed, unit // block


class Holders:
    """The caches of all workers' ranks, and their places in sets of holders.

    by_place: by worker and data-parallel rank, oldest first. ranks: places of ranks above 0, each
    with that of its worker's first. hybrids: caches with further groups. columns: places that were
    ever taken. device_bits: of all caches; disk_users: of those that ever held a block on disk,
    which is mostly none. named: names of all caches together.
    """

    def __init__(self) -> None:
        self.by_place: dict[tuple[str, int], Holder] = {}
        self.ranks: list[tuple[int, int]] = []
        self.hybrids: list[Holder] = []
        self.columns, self.device_bits, self.disk_users, self.named = 0, 0, 0, 0
        self._free_columns: list[int] = []

    def __iter__(self) -> Iterator[Holder]:
        return iter(self.by_place.values())

    def __len__(self) -> int:
        return len(self.by_place)

    def made(self, worker: str, rank: int) -> Holder:
        """The record of a worker's cache, made at its first mention."""
        holder = self.by_place.get((worker, rank))
        if holder is None:
            holder = self.by_place[worker, rank] = Holder(self._column())
            self.device_bits |= holder.bits("device")
            if rank:
                self.ranks.append((holder.bit, self.made(worker, 0).bit))
        return holder

    def group(self, cache: Holder, number: int) -> Holder:
        """The record of a further cache group, made at the first block stored in it."""
        found = cache.groups.get(number)
        if found is None:
            if not cache.groups:
                self.hybrids.append(cache)
            found = cache.groups[number] = Holder(self._column(), cache.names)
        return found

    def of_worker(self, worker: str) -> list[Holder]:
        """The caches of all its ranks."""
        return [cache for (name, _), cache in self.by_place.items() if name == worker]

    def remove(self, worker: str) -> None:
        """A worker is gone; its caches hold nothing any more."""
        for place in [place for place in self.by_place if place[0] == worker]:
            cache = self.by_place.pop(place)
            self.device_bits &= ~cache.bits("device")
            self.ranks = [pair for pair in self.ranks if pair[0] != cache.bit]
            self._free(cache)

    def bit(self, holder: Holder, tier: Tier) -> int:
        """The bit of a holder for a tier in which it is about to hold blocks."""
        if tier == "disk":
            self.disk_users |= holder.bits("device")
        return holder.bits(tier)

    def add_names(self, holder: Holder, names: UInt64s, rows: Int32s) -> None:
        """An engine's names for blocks, one a row."""
        self.named -= len(holder.names)
        holder.names.add(names, rows)
        self.named += len(holder.names)

    def forget_names(self, holder: Holder, chosen: NDArray[np.bool_]) -> None:
        """Forget the names in the chosen slots of a cache's table."""
        self.named -= len(holder.names)
        holder.names.remove(holder.names.keys_where(chosen))
        self.named += len(holder.names)

    def reset(self, cache: Holder) -> None:
        """Forget a cache's names and groups; it holds nothing any more."""
        self.named -= len(cache.names)
        cache.forget_names()
        if cache.groups:
            self.hybrids.remove(cache)
        for group in cache.groups.values():
            self._free(group)
        cache.groups.clear()
        cache.heard = False

    def forget_rows(self, gone: NDArray[np.bool_]) -> None:
        """Forget what refers to the rows of the index that are gone, shape (rows,)."""
        for cache in self:
            self.forget_names(cache, gone[cache.names.values])
            for one in cache.with_groups():
                for row in [row for row in one.copies if gone[row]]:
                    del one.copies[row]

    def _column(self) -> int:
        if not self._free_columns:
            self._free_columns.append(self.columns)
            self.columns += 1
        return self._free_columns.pop()

    def _free(self, holder: Holder) -> None:
        """Give back the place of a holder that has nothing any more."""
        self.disk_users &= ~holder.bits("device")
        self._free_columns.append(holder.bit)


def longest_end(limit: int, groups: Iterable[tuple[NDArray[np.bool_], int, int]]) -> int:
    """The longest hit, in blocks up to a limit, that ends where no group lacks a block.

    groups: of each, which blocks it has, how many it needs and how far apart (`Holder`). Where a
    hit begins within what it needs, all blocks before its end do.
    """
    fits = np.ones(limit, dtype=np.bool_)
    for has, needed, stride in groups:
        here = has[stride - 1 : limit : stride]
        places = np.arange(len(here))
        hole = np.maximum.accumulate(np.where(here, -1, places)) if len(here) else places
        ends = np.zeros(limit, dtype=np.bool_)
        ends[stride - 1 :: stride] = here & ((places - hole >= needed) | (hole < 0))
        fits &= ends
    last = fits.nonzero()[0]
    return int(last[-1]) + 1 if last.size else 0
