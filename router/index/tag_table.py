"""Open addressing in buckets of eight, searched for a whole batch of keys in a few operations.

A bucket has eight lanes. Each lane's tag, seven bits of the key's hash and a set top bit, sits in
one byte of the bucket's 64-bit word, so one word operation compares a key with all eight lanes.
A key that finds its bucket full goes to the next one; a lane emptied in a full bucket keeps its
tag, so that searches still go past it.

A Python dictionary costs 100 bytes an entry and a loop; this costs 5 bytes a lane besides the
keys, and a batch of 300 keys about as long as 30 dictionary look-ups.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt64s = NDArray[np.uint64]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Homes = tuple[Int64s, UInt64s]

_GRAVE_SHARE = 0.07
_LANES = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

_MULTIPLIER = np.uint64(_GOLDEN)
_HALF = np.uint64(32)
_TAG_BITS = np.uint64(0x7F)
_ONE, _THREE = np.uint64(1), np.uint8(3)
_EACH = np.uint64(0x0101010101010101)
_TOPS = np.uint64(0x8080808080808080)
_FEW = 24
_CHUNK = 1 << 15


class TagTable:
    """Maps uint64 keys to positive int32 values; a subclass says where a lane's key is kept.

    Args:
        entries: how many entries it must hold without growing.
    """

    __slots__ = (
        "_bucket_count", "_buckets", "_bytes", "_graves", "_live", "_tags", "_values_view",
        "_words", "values",
    )  # fmt: skip
    max_load = 0.4

    def __init__(self, entries: int) -> None:
        self._allocate(entries)

    def __len__(self) -> int:
        return self._live

    @property
    def room(self) -> int:
        """Entries it holds at most before it must grow."""
        return int(self._buckets * _LANES * self.max_load)

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
        tag = mixed & 0x7F | 0x80
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
        self._put(key, value)

    def _put(self, key: int, value: int) -> None:
        mixed = key * _GOLDEN & _MASK
        bucket = (mixed >> 32) * self._buckets >> 32
        tags = self._tags
        while True:
            first = bucket * _LANES
            for lane in range(first, first + _LANES):
                if not tags[lane]:
                    tags[lane] = mixed & 0x7F | 0x80
                    self._write_one(lane, key, value)
                    self._live += 1
                    return
            bucket = (bucket + 1) % self._buckets

    # ---- many keys

    def values_of(self, keys: UInt64s, homes: Homes | None = None) -> Int32s:
        """The value of each key; 0 where it is absent."""
        bucket, tag = homes or self.homes(keys)
        word = self._words[bucket]
        # Most absent keys meet no tag like theirs and an empty lane.
        maybe = np.flatnonzero(_matches(word, tag) | (_free(word) == 0))
        found: Int32s = np.zeros(len(keys), dtype=np.int32)
        if maybe.size <= _FEW:
            for i in maybe.tolist():
                found[i] = self.get(int(keys[i]))
            return found
        lanes = self.lanes_of(keys[maybe])
        found[maybe] = np.where(lanes < 0, 0, self.values[lanes])
        return found

    def lanes_of(self, keys: UInt64s) -> Int64s:
        """The lane of each key; -1 where it is absent."""
        bucket, tag = self.homes(keys)
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
            again = np.flatnonzero(hits | (_free(word) == 0))
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

    def add(self, keys: UInt64s, values: Int32s, homes: Homes | None = None) -> Int32s:
        """Add keys that are absent, each with a value of its own; returns what each has now.

        Where a key comes more than once, one of its values counts for all. `homes` may be what
        `homes` said of these keys before.
        """
        if self._make_room(len(keys)):
            homes = None
        if len(keys) <= _CHUNK:
            return self._add(keys, values, homes)
        parts = [slice(i, i + _CHUNK) for i in range(0, len(keys), _CHUNK)]
        return np.concatenate([self._add(keys[part], values[part]) for part in parts])

    def clear_lanes(self, lanes: Int64s) -> None:
        """Empty these lanes."""
        free = _free(self._words[lanes >> 3]) != 0
        self._bytes[lanes[free]] = 0
        self._graves += len(lanes) - int(np.count_nonzero(free))
        self.values[lanes] = 0
        self._live -= len(lanes)

    def filled(self) -> Int64s:
        """Lanes in use."""
        return np.flatnonzero(self.values)

    # ---- inside

    def _allocate(self, entries: int) -> None:
        self._buckets = max(1, -int(-entries // (_LANES * self.max_load)))
        self._bucket_count = np.uint64(self._buckets)
        self._tags = bytearray(self._buckets * _LANES)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._tags, dtype=np.uint8)
        self._words: UInt64s = self._bytes.view("<u8")
        self.values: Int32s = np.zeros(len(self._tags), dtype=np.int32)
        self._values_view = self.values.data
        self._live = self._graves = 0

    def homes(self, keys: UInt64s) -> Homes:
        """First bucket and tag of each key; the tag eight times, once a lane."""
        mixed = keys * _MULTIPLIER
        bucket = mixed >> _HALF
        bucket *= self._bucket_count
        bucket >>= _HALF
        mixed &= _TAG_BITS
        mixed *= _EACH
        mixed |= _TOPS
        return bucket.view(np.int64), mixed

    def _lane_of(self, key: int) -> int:
        mixed = key * _GOLDEN & _MASK
        bucket = (mixed >> 32) * self._buckets >> 32
        tag = mixed & 0x7F | 0x80
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

    def _add(self, keys: UInt64s, values: Int32s, homes: Homes | None = None) -> Int32s:
        bucket, tag = homes or self.homes(keys)
        free = _free(self._words[bucket])
        if not free.all():
            self._step_over_full(bucket, free)
        lanes = _first_lanes(bucket, free)
        self._bytes[lanes] = tag
        self._write(lanes, keys, values)
        # Several keys may have taken one lane: the last of them has it.
        now = self.values[lanes]
        kept = now == values
        placed = int(np.count_nonzero(kept))
        self._live += placed
        if placed < len(keys):
            lost = np.flatnonzero(~kept)
            unlike = self._keys_at(lanes[lost]) != keys[lost]
            self._add_again(keys, values, now, lost[unlike])
        return now

    def _add_again(self, keys: UInt64s, values: Int32s, now: Int32s, lost: Int64s) -> None:
        """Those that lost their lane to another key; fills in `now`."""
        if lost.size > _FEW:
            now[lost] = self._add(keys[lost], values[lost])
            return
        for i in lost.tolist():
            # A key that comes again may have been placed by now.
            key = int(keys[i])
            there = self.get(key)
            if not there:
                there = int(values[i])
                self._put(key, there)
            now[i] = there

    def _step_over_full(self, bucket: Int64s, free: UInt64s) -> None:
        at = np.flatnonzero(free == 0)
        while at.size:
            bucket[at] = (bucket[at] + 1) % self._buckets
            free[at] = _free(self._words[bucket[at]])
            at = at[free[at] == 0]

    def _make_room(self, more: int) -> bool:
        """Whether the table had to be laid out anew to take so many more."""
        limit = len(self._tags) * (self.max_load + _GRAVE_SHARE)
        if self._live + more <= self.room and self._live + self._graves + more <= limit:
            return False
        entries = self._live + more
        if entries > self.room:
            # Small steps, since memory left over counts against the index's bound.
            entries = max(64, entries + (entries >> (4 if entries < _CHUNK else 3)))
        else:
            entries = self.room
        keys, values = self._entries()
        self._allocate(entries)
        for i in range(0, len(keys), _CHUNK):
            self._add(keys[i : i + _CHUNK], values[i : i + _CHUNK])
        return True

    def _entries(self) -> tuple[UInt64s, Int32s]:
        lanes = self.filled()
        return self._keys_at(lanes), self.values[lanes]


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

    def _keys_at(self, lanes: Int64s) -> UInt64s:
        return self._keys[self.values[lanes]]

    def _key_at(self, lane: int) -> int:
        return self._keys_view[self._values_view[lane]]


def _matches(word: UInt64s, tag: UInt64s) -> UInt64s:
    """A top bit for each lane whose tag may equal `tag`; the lowest one always does."""
    unlike = word ^ tag
    hits = unlike - _EACH
    np.invert(unlike, out=unlike)
    hits &= unlike
    hits &= _TOPS
    return hits


def _free(word: UInt64s) -> UInt64s:
    """A top bit for each lane without a tag."""
    free = ~word
    free &= _TOPS
    return free


def _first_lanes(bucket: Int64s, tops: UInt64s) -> Int64s:
    """The lane of each lowest top bit; the bucket's last lane where there is none."""
    below = tops - _ONE
    below ^= tops
    lanes = bucket << 3
    lanes += np.bitwise_count(below) >> _THREE
    lanes -= 1
    return lanes
