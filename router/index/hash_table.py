"""Open addressing with linear probing, compiled, searched for a whole batch of keys at once.

A table maps 64-bit keys to positive int32 values. Deletion moves later keys back, so there are no
tombstones, and a search ends at the first empty lane. A Python dictionary costs 100 bytes an entry
and a loop in Python; this costs 4 bytes a lane besides the keys.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kappa.compiled import compiled

UInt64s = NDArray[np.uint64]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_LARGE = 1 << 15


@compiled
def _home(key: np.uint64, lanes: int) -> int:
    """The lane where the search for a key begins."""
    return int(np.int64((key * _GOLDEN >> _HALF) * np.uint64(lanes) >> _HALF))


@compiled
def _search(values: Int32s, keys: UInt64s, by_value: bool, key: np.uint64) -> tuple[int, bool]:
    """The lane of a key and True, or the first lane free for it and False.

    keys: by value (a column of the rows that the values number), else by lane.
    """
    lane = _home(key, len(values))
    while values[lane]:
        if keys[values[lane] if by_value else lane] == key:
            return lane, True
        lane += 1
        if lane == len(values):
            lane = 0
    return lane, False


@compiled
def _find(values: Int32s, keys: UInt64s, by_value: bool, wanted: UInt64s, found: Int32s) -> None:
    """Fill in the value of each wanted key; 0 where it is absent."""
    for i in range(len(wanted)):
        lane, present = _search(values, keys, by_value, wanted[i])
        found[i] = values[lane] if present else 0


@compiled
def _insert(
    values: Int32s, keys: UInt64s, by_value: bool, new: UInt64s, given: Int32s, now: Int32s
) -> int:
    """Add keys with the values given, fill in what each has now; returns how many were absent."""
    added = 0
    for i in range(len(new)):
        lane, present = _search(values, keys, by_value, new[i])
        if not present:
            values[lane] = given[i]
            if not by_value:
                keys[lane] = new[i]
            added += 1
        now[i] = values[lane]
    return added


@compiled
def _erase(values: Int32s, keys: UInt64s, by_value: bool, old: UInt64s) -> int:
    """Remove keys, moving back those that were pushed on by them; returns how many there were."""
    erased, lanes = 0, len(values)
    for i in range(len(old)):
        hole, present = _search(values, keys, by_value, old[i])
        if not present:
            continue
        erased += 1
        lane = hole
        while True:
            lane = lane + 1 if lane + 1 < lanes else 0
            if not values[lane]:
                break
            home = _home(keys[values[lane] if by_value else lane], lanes)
            # A key may move back as far as its home.
            if (lane - home) % lanes >= (lane - hole) % lanes:
                values[hole] = values[lane]
                if not by_value:
                    keys[hole] = keys[lane]
                hole = lane
        values[hole] = 0
    return erased


@compiled
def find_rows(values: Int32s, rows: NDArray[np.void], wanted: UInt64s, found: Int32s) -> int:
    """Fill in the row of each wanted key, 0 where it is absent; returns how many are absent.

    Blocks that came together have neighbouring rows, so the row after the last one is tried first.
    """
    keys = rows["key"]
    row, absent = 0, 0
    for i in range(len(wanted)):
        if row and row + 1 < len(keys) and keys[row + 1] == wanted[i]:
            row += 1
        else:
            lane, present = _search(values, keys, True, wanted[i])
            row = values[lane] if present else 0
            absent += not present
        found[i] = row
    return absent


@compiled
def walk(
    values: Int32s, rows: NDArray[np.void], prompt: UInt64s, tick: int, starts: Int64s,
    sets: Int32s,
) -> tuple[int, int]:  # fmt: skip
    """Go along the rows of a prompt's leading keys up to one that is absent; marks them as used.

    Fills in where the set of holders changes and which it is from there on; ends early where there
    is no more room for that. Returns how many keys were passed and how many changes.
    """
    keys, holders, used = rows["key"], rows["holders"], rows["used"]
    row, last, changes = 0, -1, 0
    for i in range(len(prompt)):
        if row and row + 1 < len(keys) and keys[row + 1] == prompt[i]:
            row += 1
        else:
            lane, present = _search(values, keys, True, prompt[i])
            if not present:
                return i, changes
            row = values[lane]
        if holders[row] != last:
            if changes == len(starts):
                return i, changes
            last = holders[row]
            starts[changes], sets[changes] = i, last
            changes += 1
        used[row] = tick
    return len(prompt), changes


class HashTable:
    """Maps keys to positive values; grows in small steps, since spare memory counts, too.

    Args:
        entries: how many it must hold without growing.
        max_load: entries per lane at most.
        keys: the keys by value; None: the table keeps them itself, by lane.
    """

    __slots__ = ("_by_value", "_count", "_max_load", "keys", "values")

    def __init__(self, entries: int, max_load: float, keys: UInt64s | None = None) -> None:
        self._max_load, self._by_value = max_load, keys is not None
        self.keys = np.empty(0, dtype=np.uint64) if keys is None else keys
        self._allocate(entries)
        # Compiled now rather than while the first request waits.
        nothing = np.empty(0, dtype=np.uint64)
        self.add(nothing, self.values_of(nothing))
        self.remove(nothing)

    def __len__(self) -> int:
        return self._count

    @property
    def room(self) -> int:
        """Entries it holds at most before it must grow."""
        return int(len(self.values) * self._max_load)

    def nbytes(self) -> int:
        """Bytes of its own arrays."""
        return self.values.nbytes + (0 if self._by_value else self.keys.nbytes)

    def values_of(self, keys: UInt64s) -> Int32s:
        """The value of each key; 0 where it is absent."""
        found = np.empty(len(keys), dtype=np.int32)
        _find(self.values, self.keys, self._by_value, plain(keys), found)
        return found

    def add(self, keys: UInt64s, values: Int32s) -> Int32s:
        """Add keys that are absent, each with its value; returns what each has now.

        Where a key comes more than once, its first value counts for all.
        """
        if self._count + len(keys) > self.room:
            self._grow(self._count + len(keys))
        now = np.empty(len(keys), dtype=np.int32)
        self._count += _insert(self.values, self.keys, self._by_value, plain(keys), values, now)
        return now

    def remove(self, keys: UInt64s) -> None:
        """Remove keys; those that are absent do not matter."""
        self._count -= _erase(self.values, self.keys, self._by_value, plain(keys))

    def keys_where(self, chosen: NDArray[np.bool_]) -> UInt64s:
        """Keys of the filled lanes that are chosen, of a table that keeps them; a copy."""
        kept: UInt64s = self.keys[chosen & (self.values != 0)]
        return kept

    def _allocate(self, entries: int) -> None:
        # One lane stays empty at least, where searches end.
        lanes = max(8, int(np.ceil(entries / self._max_load)) + 1)
        self.values: Int32s = np.zeros(lanes, dtype=np.int32)
        self._count = 0
        if not self._by_value:
            self.keys = np.zeros(lanes, dtype=np.uint64)

    def _grow(self, entries: int) -> None:
        filled = self.values != 0
        values = self.values[filled]
        keys = self.keys[values] if self._by_value else self.keys[filled]
        self._allocate(max(64, entries + (entries >> (4 if entries < _LARGE else 3))))
        self.add(keys, values)


def plain(keys: UInt64s) -> UInt64s:
    """The keys as the loops are compiled for: in one piece, and no view that may not be written."""
    if keys.dtype == np.uint64 and keys.flags.carray:
        return keys
    return np.require(keys, np.uint64, ("C", "A", "W"))
