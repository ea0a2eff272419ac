"""Open addressing in buckets of eight, searched for a whole batch of keys in one compiled loop.

A bucket has eight lanes. Each lane's tag, seven bits of the key's hash and a set top bit, is one
byte, so most lanes are told apart without looking at their keys. A key that finds its bucket full
goes to the next one; a lane emptied in a full bucket keeps its tag, so that searches still go past
it.

A Python dictionary costs 100 bytes an entry and a loop; this costs 5 bytes a lane besides the
keys, and a batch of 300 keys a few dictionary look-ups.
"""

from __future__ import annotations

import numpy as np

from router.index.loops import (
    GOLDEN,
    LANES,
    Int32s,
    Int64s,
    UInt8s,
    UInt32s,
    UInt64s,
    clear,
    find,
    find_rows,
    insert,
    locate,
    walk,
)

_GRAVE_SHARE = 0.07
_MASK = (1 << 64) - 1
_LARGE = 1 << 15


class TagTable:
    """Maps uint64 keys to positive int32 values; a subclass says where a lane's key is kept.

    Args:
        entries: how many entries it must hold without growing.
    """

    __slots__ = (
        "_buckets", "_bytes", "_graves", "_live", "_tags", "_values_view", "values",
    )  # fmt: skip
    max_load = 0.4

    def __init__(self, entries: int) -> None:
        self._allocate(entries)
        # Compiled now rather than while the first request waits.
        nothing = np.empty(0, dtype=np.uint64)
        self._add(nothing, self.values_of(nothing))
        self.clear_lanes(self.lanes_of(nothing))

    def __len__(self) -> int:
        return self._live

    @property
    def room(self) -> int:
        """Entries it holds at most before it must grow."""
        return int(self._buckets * LANES * self.max_load)

    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return len(self._tags) + self.values.nbytes

    # ---- where a lane's key is

    def _column(self) -> tuple[UInt64s, bool]:
        """The keys, and whether by value (else by lane)."""
        raise NotImplementedError

    def _key_at(self, lane: int) -> int:
        raise NotImplementedError

    def _write_one(self, lane: int, key: int, value: int) -> None:
        self._values_view[lane] = value

    # ---- one key

    def get(self, key: int) -> int:
        """The value of a key; 0 if it is absent."""
        mixed = key * GOLDEN & _MASK
        bucket = (mixed >> 32) * self._buckets >> 32
        tag = mixed & 0x7F | 0x80
        find = self._tags.find
        while True:
            first = bucket * LANES
            end = first + LANES
            lane = find(tag, first, end)
            while lane >= 0:
                if self._key_at(lane) == key:
                    return self._values_view[lane]
                lane = find(tag, lane + 1, end)
            if find(0, first, end) >= 0:
                return 0
            bucket = (bucket + 1) % self._buckets

    def put(self, key: int, value: int) -> None:
        """Add a key that is absent."""
        self._make_room(1)
        self._put(key, value)

    def _put(self, key: int, value: int) -> None:
        mixed = key * GOLDEN & _MASK
        bucket = (mixed >> 32) * self._buckets >> 32
        tags = self._tags
        while True:
            first = bucket * LANES
            for lane in range(first, first + LANES):
                if not tags[lane]:
                    tags[lane] = mixed & 0x7F | 0x80
                    self._write_one(lane, key, value)
                    self._live += 1
                    return
            bucket = (bucket + 1) % self._buckets

    # ---- many keys

    def values_of(self, keys: UInt64s) -> Int32s:
        """The value of each key; 0 where it is absent."""
        found = np.empty(len(keys), dtype=np.int32)
        find(self._bytes, self.values, *self._column(), self._buckets, _plain(keys), found)
        return found

    def lanes_of(self, keys: UInt64s) -> Int64s:
        """The lane of each key; -1 where it is absent."""
        lanes = np.empty(len(keys), dtype=np.int64)
        locate(self._bytes, self.values, *self._column(), self._buckets, _plain(keys), lanes)
        return lanes

    def add(self, keys: UInt64s, values: Int32s) -> Int32s:
        """Add keys that are absent, each with a value of its own; returns what each has now.

        Where a key comes more than once, its first value counts for all.
        """
        self._make_room(len(keys))
        return self._add(keys, values)

    def clear_lanes(self, lanes: Int64s) -> None:
        """Empty these lanes."""
        self._graves += clear(self._bytes, self.values, lanes)
        self._live -= len(lanes)

    def filled(self) -> Int64s:
        """Lanes in use."""
        return np.flatnonzero(self.values)

    # ---- inside

    def _allocate(self, entries: int) -> None:
        self._buckets = max(1, -int(-entries // (LANES * self.max_load)))
        self._tags = bytearray(self._buckets * LANES)
        self._bytes: UInt8s = np.frombuffer(self._tags, dtype=np.uint8)
        self.values: Int32s = np.zeros(len(self._tags), dtype=np.int32)
        self._values_view = self.values.data
        self._live = self._graves = 0

    def _add(self, keys: UInt64s, values: Int32s) -> Int32s:
        now = np.empty(len(keys), dtype=np.int32)
        self._live += insert(
            self._bytes, self.values, *self._column(), self._buckets, _plain(keys), values, now
        )
        return now

    def _make_room(self, more: int) -> None:
        """Lay the table out anew where it cannot take so many more."""
        limit = len(self._tags) * (self.max_load + _GRAVE_SHARE)
        if self._live + more <= self.room and self._live + self._graves + more <= limit:
            return
        entries = self._live + more
        if entries > self.room:
            # Small steps, since memory left over counts against the index's bound.
            entries = max(64, entries + (entries >> (4 if entries < _LARGE else 3)))
        else:
            entries = self.room
        lanes = self.filled()
        column, by_value = self._column()
        values = self.values[lanes]
        keys = column[values] if by_value else column[lanes]
        self._allocate(entries)
        self._add(keys, values)


class NameTable(TagTable):
    """A table that keeps its keys itself: 13 bytes a lane."""

    __slots__ = ("_names", "_names_view")
    max_load = 0.68

    def _allocate(self, entries: int) -> None:
        super()._allocate(entries)
        self._names: UInt64s = np.zeros(len(self._tags), dtype=np.uint64)
        self._names_view = self._names.data

    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return super().nbytes() + self._names.nbytes

    def clear_lanes(self, lanes: Int64s) -> None:
        """Empty these lanes."""
        super().clear_lanes(lanes)
        self._names[lanes] = 0

    def _column(self) -> tuple[UInt64s, bool]:
        return self._names, False

    def _key_at(self, lane: int) -> int:
        return self._names_view[lane]

    def _write_one(self, lane: int, key: int, value: int) -> None:
        self._values_view[lane] = value
        self._names_view[lane] = key


class RowTable(TagTable):
    """A table of row numbers, whose keys are a column of those rows: 5 bytes a lane.

    Args:
        keys: the column; it is replaced through `keys` when it grows. Row 0 must be no row.
    """

    __slots__ = ("_keys", "_keys_view")

    def __init__(self, entries: int, keys: UInt64s) -> None:
        self.keys = keys
        super().__init__(entries)

    @property
    def keys(self) -> UInt64s:
        """The column of keys."""
        return self._keys

    @keys.setter
    def keys(self, column: UInt64s) -> None:
        self._keys = column
        self._keys_view = column.data

    def look_up(self, keys: UInt64s) -> tuple[Int32s, int]:
        """The row of each key, 0 where it is absent, and how many are."""
        rows = np.empty(len(keys), dtype=np.int32)
        absent = find_rows(self._bytes, self.values, self._keys, self._buckets, _plain(keys), rows)
        return rows, absent

    def walk(
        self, keys: UInt64s, holders: Int32s, used: UInt32s, tick: int, starts: Int64s,
        numbers: Int32s,
    ) -> tuple[int, int]:  # fmt: skip
        """As `loops.walk`, whose other arguments are columns of the rows."""
        return walk(
            self._bytes, self.values, self._keys, self._buckets, _plain(keys), holders, used, tick,
            starts, numbers,
        )  # fmt: skip

    def _column(self) -> tuple[UInt64s, bool]:
        return self._keys, True

    def _key_at(self, lane: int) -> int:
        return self._keys_view[self._values_view[lane]]


def _plain(keys: UInt64s) -> UInt64s:
    """The keys as the loops are compiled for: in one piece, and no view that may not be written."""
    if keys.dtype == np.uint64 and keys.flags.carray:
        return keys
    return np.require(keys, np.uint64, ("C", "A", "W"))
