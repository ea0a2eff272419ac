"""Open addressing in buckets of eight, searched for a whole batch of keys in a few operations.

A bucket has eight lanes. Each lane's tag, seven bits of the key's hash and a set top bit, sits in
one byte of the bucket's 64-bit word, so one word operation compares a key with all eight lanes.
A key that finds its bucket full goes to the next one; a lane emptied in a full bucket keeps a
grave mark, so that searches still go past it.

A Python dictionary costs 100 bytes an entry and a loop; this costs 5 bytes a lane besides the
keys, and a batch of 300 keys about as long as 30 dictionary look-ups.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt64s = NDArray[np.uint64]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

MAX_LOAD = 0.65
_GRAVE_LOAD = 0.72
_LANES = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_GRAVE = 1

_MULTIPLIER = np.uint64(_GOLDEN)
_HALF = np.uint64(32)
_TAG_SHIFT, _TAG_BITS, _TAG_TOP = np.uint64(25), np.uint64(0x7F), np.uint64(0x80)
_ONE, _THREE = np.uint64(1), np.uint8(3)
_EACH = np.uint64(0x0101010101010101)
_TOPS = np.uint64(0x8080808080808080)
_FEW = 12
_CHUNK = 1 << 15


class TagTable:
    """Maps uint64 keys to positive int32 values; a subclass says where a lane's key is kept.

    Args:
        entries: how many entries it must hold without growing.
    """

    def __init__(self, entries: int) -> None:
        self._allocate(entries)

    def __len__(self) -> int:
        return self._live

    @property
    def room(self) -> int:
        """Entries it holds at most before it must grow."""
        return int(self._buckets * _LANES * MAX_LOAD)

    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return len(self._tags) + self.values.nbytes

    # ---- where a lane's key is

    def _keys_at(self, lanes: Int64s) -> UInt64s:
        raise NotImplementedError

    def _key_at(self, lane: int) -> int:
        raise NotImplementedError

    def _write(self, lanes: Int64s, keys: UInt64s, values: Int32s) -> None:
        self.values[lanes] = values

    def _write_one(self, lane: int, key: int, value: int) -> None:
        self._values_view[lane] = value

    # ---- one key

    def get(self, key: int) -> int:
        """The value of a key; 0 if it is absent."""
        mixed = key * _GOLDEN & _MASK
        bucket = (mixed >> 32) * self._buckets >> 32
        tag = mixed >> 25 & 0x7F | 0x80
        find = self._tags.find
        while True:
            first = bucket * _LANES
            end = first + _LANES
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
        mixed = key * _GOLDEN & _MASK
        bucket = (mixed >> 32) * self._buckets >> 32
        tags = self._tags
        while True:
            first = bucket * _LANES
            for lane in range(first, first + _LANES):
                if tags[lane] <= _GRAVE:
                    self._graves -= tags[lane]
                    tags[lane] = mixed >> 25 & 0x7F | 0x80
                    self._write_one(lane, key, value)
                    self._live += 1
                    return
            bucket = (bucket + 1) % self._buckets

    # ---- many keys

    def values_of(self, keys: UInt64s) -> Int32s:
        """The value of each key; 0 where it is absent."""
        lanes = self.lanes_of(keys)
        found = self.values[lanes]
        if lanes.size and lanes.min() < 0:
            found[lanes < 0] = 0
        return found

    def lanes_of(self, keys: UInt64s) -> Int64s:
        """The lane of each key; -1 where it is absent."""
        bucket, tag = self._homes(keys)
        word = self._words[bucket]
        hits = _matches(word, tag)
        lanes = _first_lanes(bucket, hits)
        wrong = self._keys_at(lanes) != keys
        if not wrong.any():
            return lanes
        at = np.flatnonzero(wrong)
        lanes[at] = -1
        hits, word, bucket = hits[at], word[at], bucket[at]
        while True:
            # Elsewhere in its bucket, or in the next if this one is full, or nowhere.
            hits &= hits - _ONE
            again = np.flatnonzero((hits != 0) | ~_has_empty(word))
            at, hits, word, bucket = at[again], hits[again], word[again], bucket[again]
            if at.size <= _FEW:
                break
            onward = hits == 0
            bucket = (bucket + onward) % self._buckets
            word = self._words[bucket]
            hits = np.where(onward, _matches(word, tag[at]), hits)
            guess = _first_lanes(bucket, hits)
            right = self._keys_at(guess) == keys[at]
            lanes[at[right]] = guess[right]
            on = np.flatnonzero(~right)
            at, hits, word, bucket = at[on], hits[on], word[on], bucket[on]
        for i in at.tolist():
            lanes[i] = self._lane_of(int(keys[i]))
        return lanes

    def add(self, keys: UInt64s, values: Int32s) -> Int32s:
        """Add keys that are absent, each with a value of its own; returns what each has now.

        Where a key comes more than once, one of its values counts for all.
        """
        self._make_room(len(keys))
        if len(keys) <= _CHUNK:
            return self._add(keys, values)
        parts = [slice(i, i + _CHUNK) for i in range(0, len(keys), _CHUNK)]
        return np.concatenate([self._add(keys[part], values[part]) for part in parts])

    def clear_lanes(self, lanes: Int64s) -> None:
        """Empty these lanes."""
        word = self._words[lanes >> 3]
        full = (word - _EACH) & ~word & _TOPS == 0
        self._bytes[lanes] = full
        self._graves += int(np.count_nonzero(full))
        self.values[lanes] = 0
        self._live -= len(lanes)

    def filled(self) -> Int64s:
        """Lanes in use."""
        return np.flatnonzero(self.values)

    # ---- inside

    def _allocate(self, entries: int) -> None:
        self._buckets = max(1, -int(-entries // (_LANES * MAX_LOAD)))
        self._bucket_count = np.uint64(self._buckets)
        self._tags = bytearray(self._buckets * _LANES)
        self._words: UInt64s = np.frombuffer(self._tags, dtype="<u8")
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._tags, dtype=np.uint8)
        self.values: Int32s = np.zeros(len(self._tags), dtype=np.int32)
        self._values_view = memoryview(self.values)
        self._live = self._graves = 0

    def _homes(self, keys: UInt64s) -> tuple[Int64s, UInt64s]:
        mixed = keys * _MULTIPLIER
        bucket = mixed >> _HALF
        bucket *= self._bucket_count
        bucket >>= _HALF
        mixed >>= _TAG_SHIFT
        mixed &= _TAG_BITS
        mixed |= _TAG_TOP
        return bucket.view(np.int64), mixed

    def _lane_of(self, key: int) -> int:
        mixed = key * _GOLDEN & _MASK
        bucket = (mixed >> 32) * self._buckets >> 32
        tag = mixed >> 25 & 0x7F | 0x80
        while True:
            first = bucket * _LANES
            lane = self._tags.find(tag, first, first + _LANES)
            while lane >= 0:
                if self._key_at(lane) == key:
                    return lane
                lane = self._tags.find(tag, lane + 1, first + _LANES)
            if self._tags.find(0, first, first + _LANES) >= 0:
                return -1
            bucket = (bucket + 1) % self._buckets

    def _add(self, keys: UInt64s, values: Int32s) -> Int32s:
        bucket, tag = self._homes(keys)
        at = np.arange(len(keys))
        result = values.copy()
        while at.size:
            free = ~self._words[bucket] & _TOPS
            if not free.all():
                self._step_over_full(bucket, free)
            lanes = _first_lanes(bucket, free)
            if self._graves:
                self._graves -= int(np.count_nonzero(self._bytes[np.unique(lanes)]))
            self._bytes[lanes] = tag
            self._write(lanes, keys, values)
            # Several keys may have taken one lane: the last of them has it.
            now = self.values[lanes]
            self._live += int(np.count_nonzero(now == values))
            lost = self._keys_at(lanes) != keys
            if not lost.any():
                result[at] = now
                break
            result[at] = now
            again = np.flatnonzero(lost)
            at, bucket, tag = at[again], bucket[again], tag[again]
            keys, values = keys[again], values[again]
        return result

    def _step_over_full(self, bucket: Int64s, free: UInt64s) -> None:
        at = np.flatnonzero(free == 0)
        while at.size:
            bucket[at] = (bucket[at] + 1) % self._buckets
            free[at] = ~self._words[bucket[at]] & _TOPS
            at = at[free[at] == 0]

    def _make_room(self, more: int) -> None:
        if self._live + self._graves + more <= len(self._tags) * _GRAVE_LOAD and (
            self._live + more <= self.room
        ):
            return
        entries = self._live + more
        if entries > self.room:
            # Small steps, since memory left over counts against the index's bound.
            entries = max(64, entries + (entries >> (3 if entries > 4096 else 1)))
        else:
            entries = self.room
        keys, values = self._entries()
        self._allocate(entries)
        for i in range(0, len(keys), _CHUNK):
            self._add(keys[i : i + _CHUNK], values[i : i + _CHUNK])

    def _entries(self) -> tuple[UInt64s, Int32s]:
        lanes = self.filled()
        return self._keys_at(lanes), self.values[lanes]


class NameTable(TagTable):
    """A table that keeps its keys itself: 13 bytes a lane."""

    def _allocate(self, entries: int) -> None:
        super()._allocate(entries)
        self._names: UInt64s = np.zeros(len(self._tags), dtype=np.uint64)
        self._names_view = memoryview(self._names)

    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return super().nbytes() + self._names.nbytes

    def _keys_at(self, lanes: Int64s) -> UInt64s:
        return self._names[lanes]

    def _key_at(self, lane: int) -> int:
        return self._names_view[lane]

    def _write(self, lanes: Int64s, keys: UInt64s, values: Int32s) -> None:
        self.values[lanes] = values
        self._names[lanes] = keys

    def _write_one(self, lane: int, key: int, value: int) -> None:
        self._values_view[lane] = value
        self._names_view[lane] = key


class RowTable(TagTable):
    """A table of row numbers, whose keys are a column of those rows: 5 bytes a lane.

    Args:
        keys: the column; it is replaced through `keys` when it grows. Row 0 must be no row.
    """

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
        self._keys_view = memoryview(column)

    def _keys_at(self, lanes: Int64s) -> UInt64s:
        return self._keys[self.values[lanes]]

    def _key_at(self, lane: int) -> int:
        return self._keys_view[self._values_view[lane]]


def _matches(word: UInt64s, tag: UInt64s) -> UInt64s:
    """A top bit for each lane whose tag may equal `tag`; the lowest one always does."""
    difference = word ^ (tag * _EACH)
    return (difference - _EACH) & ~difference & _TOPS


def _has_empty(word: UInt64s) -> NDArray[np.bool_]:
    return ((word - _EACH) & ~word & _TOPS) != 0


def _first_lanes(bucket: Int64s, tops: UInt64s) -> Int64s:
    """The lane of each lowest top bit; the bucket's last lane where there is none."""
    lanes = bucket * _LANES
    lanes += np.bitwise_count(tops ^ (tops - _ONE)) >> _THREE
    lanes -= 1
    return lanes
