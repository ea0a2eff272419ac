"""A compiled hash table from 64-bit keys to rows, searched for a whole batch of keys at once.

Open addressing: a Python dictionary costs 100 bytes an entry and a loop in Python, this 4 bytes a
slot besides the keys.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kappa.compiled import compiled

UInt64s = NDArray[np.uint64]
Int32s = NDArray[np.int32]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_LARGE = 1 << 15


@compiled
def _home(key: np.uint64, slots: int) -> int:
    """The slot where the search for a key begins."""
    return int(np.int64((key * _GOLDEN >> _HALF) * np.uint64(slots) >> _HALF))


@compiled
def search(values: Int32s, keys: UInt64s, by_value: bool, key: np.uint64) -> tuple[int, bool]:
    """The slot of a key and True, or the first slot free for it and False.

    keys: by value (a column of the rows that the values number), else by slot.
    """
    slot = _home(key, len(values))
    while values[slot]:
        if keys[values[slot] if by_value else slot] == key:
            return slot, True
        slot += 1
        if slot == len(values):
            slot = 0
    return slot, False


@compiled
def _find(values: Int32s, keys: UInt64s, by_value: bool, wanted: UInt64s, found: Int32s) -> int:
    """Fill in the value of each wanted key, 0 where it is absent; returns how many are absent.

    Blocks that came together have neighbouring rows, so with keys by value the one after the last
    one is tried first.
    """
    value, absent = 0, 0
    for i in range(len(wanted)):
        if by_value and value and value + 1 < len(keys) and keys[value + 1] == wanted[i]:
            value += 1
        else:
            slot, present = search(values, keys, by_value, wanted[i])
            value = values[slot] if present else 0
            absent += not present
        found[i] = value
    return absent


@compiled
def _insert(
    values: Int32s, keys: UInt64s, by_value: bool, new: UInt64s, given: Int32s, now: Int32s
) -> int:
    """Add keys with the values given, fill in what each has now; returns how many were absent."""
    added = 0
    for i in range(len(new)):
        slot, present = search(values, keys, by_value, new[i])
        if not present:
            values[slot] = given[i]
            if not by_value:
                keys[slot] = new[i]
            added += 1
        now[i] = values[slot]
    return added


@compiled
def _replace(values: Int32s, keys: UInt64s, new: UInt64s, given: int, before: Int32s) -> int:
    """Give all keys of a table by slot one value, add those that are absent, and fill in what each
    had before, 0 for nothing; returns how many were absent."""
    added = 0
    for i in range(len(new)):
        slot, present = search(values, keys, False, new[i])
        before[i] = values[slot]
        values[slot] = given
        if not present:
            keys[slot] = new[i]
            added += 1
    return added


@compiled
def _erase(values: Int32s, keys: UInt64s, by_value: bool, old: UInt64s) -> int:
    """Remove keys, moving back those that were pushed on by them; returns how many there were."""
    erased, slots = 0, len(values)
    for i in range(len(old)):
        hole, present = search(values, keys, by_value, old[i])
        if not present:
            continue
        erased += 1
        slot = hole
        while True:
            slot = slot + 1 if slot + 1 < slots else 0
            if not values[slot]:
                break
            home = _home(keys[values[slot] if by_value else slot], slots)
            # A key may move back as far as its home.
            if (slot - home) % slots >= (slot - hole) % slots:
                values[hole] = values[slot]
                if not by_value:
                    keys[hole] = keys[slot]
                hole = slot
        values[hole] = 0
    return erased


class HashTable:
    """Maps 64-bit keys to positive values; grows in small steps, since spare memory counts, too.

    Deletion moves later keys back, so there are no tombstones, and a search ends at the first empty
    slot.

    Args:
        entries: how many it must hold without growing.
        max_load: entries per slot at most.
        keys: the keys by value, zero where there is none; the caller keeps them, and no key is
            zero. None: the table keeps them itself, by slot.
    """

    __slots__ = ("_by_value", "_count", "_max_load", "keys", "values")

    def __init__(self, entries: int, max_load: float, keys: UInt64s | None = None) -> None:
        self._max_load, self._by_value = max_load, keys is not None
        self.keys = np.empty(0, dtype=np.uint64) if keys is None else keys
        self._allocate(entries)
        # Compiled now rather than while the first request waits.
        nothing = np.empty(0, dtype=np.uint64)
        self.add(nothing, self.find(nothing)[0])
        if not self._by_value:
            self.replace(nothing, 1)
        self.remove(nothing)

    def __len__(self) -> int:
        return self._count

    def find(self, keys: UInt64s) -> tuple[Int32s, int]:
        """The value of each key, 0 where it is absent, and how many are absent."""
        found = np.empty(len(keys), dtype=np.int32)
        return found, _find(self.values, self.keys, self._by_value, plain(keys), found)

    def add(self, keys: UInt64s, values: Int32s) -> Int32s:
        """Add keys that are absent, each with its value; returns what each has now.

        Where a key comes more than once, its first value counts for all.
        """
        self._make_room(len(keys))
        now = np.empty(len(keys), dtype=np.int32)
        self._count += _insert(self.values, self.keys, self._by_value, plain(keys), values, now)
        return now

    def replace(self, keys: UInt64s, value: int) -> Int32s:
        """Give all keys one value, those that are absent, too; returns what each had before, 0 for
        nothing. Only for a table that keeps its keys."""
        self._make_room(len(keys))
        before = np.empty(len(keys), dtype=np.int32)
        self._count += _replace(self.values, self.keys, plain(keys), value, before)
        return before

    def remove(self, keys: UInt64s) -> None:
        """Remove keys; those that are absent do not matter."""
        self._count -= _erase(self.values, self.keys, self._by_value, plain(keys))

    def keys_where(self, chosen: NDArray[np.bool_]) -> UInt64s:
        """Keys of the filled slots that are chosen, of a table that keeps them; a copy."""
        kept: UInt64s = self.keys[chosen & (self.values != 0)]
        return kept

    def _make_room(self, more: int) -> None:
        entries = self._count + more
        if entries > int(len(self.values) * self._max_load):
            filled = self.values != 0
            old = self.values[filled]
            old_keys = self.keys[old] if self._by_value else self.keys[filled]
            self._allocate(max(64, entries + (entries >> (4 if entries < _LARGE else 3))))
            self.add(old_keys, old)

    def _allocate(self, entries: int) -> None:
        # One slot stays empty at least, where searches end.
        slots = max(8, int(np.ceil(entries / self._max_load)) + 1)
        self.values: Int32s = np.zeros(slots, dtype=np.int32)
        self._count = 0
        if not self._by_value:
            self.keys = np.zeros(slots, dtype=np.uint64)


def plain(keys: UInt64s) -> UInt64s:
    """The keys as the loops are compiled for: in one piece, and no view that may not be written."""
    if keys.dtype == np.uint64 and keys.flags.carray:
        return keys
    return np.require(keys, np.uint64, ("C", "A", "W"))
