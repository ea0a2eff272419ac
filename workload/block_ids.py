"""Block ids: well-mixed 64-bit numbers that stand for prefixes.

A text that nobody else shares is a stream with a key of its own; its block at position p has the
id `stream_ids(key, …)[p]`. Recorded ids are mixed, one to one. Salting gives a whole workload
fresh ids in one vector operation.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from workload.shapes import BlockIds

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def key_of(*parts: str | int) -> np.uint64:
    """A stream's key from what names it; the same in every run."""
    text = "\x1f".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def stream_ids(key: np.uint64, first: int, stop: int) -> BlockIds:
    """Ids of the blocks at positions first, …, stop - 1 of the stream `key`."""
    positions = np.arange(first + 1, max(stop, first) + 1, dtype=np.uint64)
    return mixed(key + positions * _GOLDEN)


def recorded_ids(numbers: BlockIds) -> BlockIds:
    """Well-mixed ids for the prefix-chained block numbers of a recorded trace, one to one."""
    return mixed(numbers + _GOLDEN)


def mixed(numbers: BlockIds) -> BlockIds:
    """A one-to-one scramble of 64-bit numbers: the finaliser of SplitMix64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX_1
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX_2
    mixture: BlockIds = numbers ^ (numbers >> np.uint64(31))
    return mixture


@lru_cache(maxsize=64)
def salt_of(copy: int) -> np.uint64:
    """The number that is XORed into every id of a copy; 0 for copy 0, which stays as it is."""
    return np.uint64(mixed(np.array([copy], dtype=np.uint64))[0])
