"""Who holds blocks: the cache of each worker's data-parallel rank, and the further cache groups of
a hybrid model in it.

A hit of such a model ends where all its groups have what they need: the first one the whole prefix,
one of sliding windows the blocks of a window, one of Mamba's layers the state of the last block.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm

import numpy as np
from numpy.typing import NDArray

from router.index.block_table import HashTable
from router.index.kv_events import Tier

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
        """Its bit in the sets of holders; of no tier: all of them."""
        return _MASKS[tier] << TIER_BITS * self.bit

    def all_bits(self, tier: Tier | None) -> int:
        """The bits of the cache and of its further groups."""
        return sum(group.bits(tier) for group in self.groups.values()) + self.bits(tier)

    def forget_names(self) -> None:
        self.names = HashTable(0, _NAMES_LOAD)

    def need(self, last_tokens: int | None, group_block: int, block: int) -> None:
        """Of a further group: what a hit needs of it, by the tokens of its blocks and of ours."""
        if last_tokens is None:
            self.needed, self.stride = _ALL_BLOCKS, 1
        elif last_tokens == 1:
            # One state, wherever there is one.
            self.needed, self.stride = 1, 1
        elif group_block:
            unit = lcm(group_block, block)
            needed = min(-(-last_tokens // unit), _ALL_BLOCKS)
            self.needed, self.stride = needed, unit // block


def longest_end(limit: int, groups: Iterable[tuple[NDArray[np.bool_], int, int]]) -> int:
    """The most blocks, up to a limit, at whose end a hit finds what it needs of every group.

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
