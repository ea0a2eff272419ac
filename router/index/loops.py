"""The index's loops over many blocks, compiled: the buckets of a tag table, the rows of blocks.

In one file, as a compiled loop must stand beside those that it uses (`kappa.compiled`). Tables of
`router.index.tag_table` are given as their arrays: `tags`, `values`, and `column`, the keys by
value (else by lane).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kappa.compiled import compiled

UInt8s = NDArray[np.uint8]
UInt32s = NDArray[np.uint32]
UInt64s = NDArray[np.uint64]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

LANES = 8
GOLDEN = 0x9E3779B97F4A7C15

_MULTIPLIER = np.uint64(GOLDEN)
_HALF = np.uint64(32)
_TAG_BITS, _TAG_TOP = np.uint64(0x7F), np.uint64(0x80)


@compiled
def home(key: np.uint64, buckets: int) -> tuple[np.int64, np.uint8]:
    """First bucket and tag of a key."""
    mixed = key * _MULTIPLIER
    bucket = (mixed >> _HALF) * np.uint64(buckets) >> _HALF
    return np.int64(bucket), np.uint8(mixed & _TAG_BITS | _TAG_TOP)


@compiled
def search(
    tags: UInt8s, values: Int32s, column: UInt64s, by_value: bool, buckets: int, key: np.uint64
) -> tuple[int, int, np.uint8]:
    """The lane of a key, or -1; the first lane free for it; its tag."""
    bucket, tag = home(key, buckets)
    while True:
        first = bucket * LANES
        free = -1
        for lane in range(first, first + LANES):
            if tags[lane] == tag:
                if column[values[lane] if by_value else lane] == key and values[lane]:
                    return lane, free, tag
            elif not tags[lane] and free < 0:
                free = lane
        if free >= 0:
            return -1, free, tag
        bucket = (bucket + 1) % buckets


@compiled
def find(
    tags: UInt8s, values: Int32s, column: UInt64s, by_value: bool, buckets: int, keys: UInt64s,
    found: Int32s,
) -> None:  # fmt: skip
    """Fill in the value of each key; 0 where it is absent."""
    for i in range(len(keys)):
        lane = search(tags, values, column, by_value, buckets, keys[i])[0]
        found[i] = values[lane] if lane >= 0 else 0


@compiled
def locate(
    tags: UInt8s, values: Int32s, column: UInt64s, by_value: bool, buckets: int, keys: UInt64s,
    lanes: Int64s,
) -> None:  # fmt: skip
    """Fill in the lane of each key; -1 where it is absent."""
    for i in range(len(keys)):
        lanes[i] = search(tags, values, column, by_value, buckets, keys[i])[0]


@compiled
def insert(
    tags: UInt8s, values: Int32s, column: UInt64s, by_value: bool, buckets: int, keys: UInt64s,
    given: Int32s, now: Int32s,
) -> int:  # fmt: skip
    """Add keys with the values given, fill in what each has now; returns how many were absent."""
    added = 0
    for i in range(len(keys)):
        lane, free, tag = search(tags, values, column, by_value, buckets, keys[i])
        if lane < 0:
            lane = free
            tags[lane], values[lane] = tag, given[i]
            if not by_value:
                column[lane] = keys[i]
            added += 1
        now[i] = values[lane]
    return added


@compiled
def clear(tags: UInt8s, values: Int32s, lanes: Int64s) -> int:
    """Empty lanes; returns how many keep their tag, as their bucket is full."""
    graves = 0
    for lane in lanes:
        first = lane // LANES * LANES
        full = True
        for other in range(first, first + LANES):
            full = full and tags[other] != 0
        if full:
            graves += 1
        else:
            tags[lane] = 0
        values[lane] = 0
    return graves


# ---- rows of blocks, which prompts mostly find one after the other


@compiled
def find_rows(
    tags: UInt8s, values: Int32s, column: UInt64s, buckets: int, keys: UInt64s, rows: Int32s
) -> int:
    """Fill in the row of each key; 0 where it is absent. Returns how many are absent."""
    row, absent = 0, 0
    for i in range(len(keys)):
        after = row + 1
        if row and after < len(column) and column[after] == keys[i]:
            row = after
        else:
            lane = search(tags, values, column, True, buckets, keys[i])[0]
            row = values[lane] if lane >= 0 else 0
            absent += row == 0
        rows[i] = row
    return absent


@compiled
def walk(
    tags: UInt8s, values: Int32s, column: UInt64s, buckets: int, keys: UInt64s,
    holders: Int32s, used: UInt32s, tick: int, starts: Int64s, numbers: Int32s,
) -> tuple[int, int]:  # fmt: skip
    """Go along the rows of leading keys, up to one that is absent, and count them as used.

    Fills in where the holders change and which set they are from there on; ends early where there
    is no more room for that. Returns how many keys were passed and how many changes.
    """
    row, last, changes = 0, -1, 0
    for i in range(len(keys)):
        after = row + 1
        if row and after < len(column) and column[after] == keys[i]:
            row = after
        else:
            lane = search(tags, values, column, True, buckets, keys[i])[0]
            if lane < 0:
                return i, changes
            row = values[lane]
        if holders[row] != last:
            if changes == len(starts):
                return i, changes
            last = holders[row]
            starts[changes], numbers[changes] = i, last
            changes += 1
        used[row] = tick
    return len(keys), changes


@compiled
def rising(rows: Int32s) -> bool:
    """Whether each row is above the one before, and the first is one."""
    last = 0
    for row in rows:
        if row <= last:
            return False
        last = row
    return True


@compiled
def tally(holders: Int32s, rows: Int32s, numbers: Int32s, counts: Int64s) -> int:
    """Which sets hold these rows, and how many each: fills in as many as there are, if they fit.

    Returns how many there are; -1: more than fit.
    """
    distinct, at = 0, 0
    for row in rows:
        number = holders[row]
        if not distinct or numbers[at] != number:
            at = 0
            while at < distinct and numbers[at] != number:
                at += 1
            if at == len(numbers):
                return -1
            if at == distinct:
                numbers[at], counts[at] = number, 0
                distinct += 1
        counts[at] += 1
    return distinct


@compiled
def renumber(holders: Int32s, rows: Int32s, numbers: Int32s, moved: Int32s) -> None:
    """Give each row the set that its own has moved to; `numbers` has the sets of all rows."""
    at = 0
    for row in rows:
        number = holders[row]
        if numbers[at] != number:
            at = 0
            while numbers[at] != number:
                at += 1
        holders[row] = moved[at]


@compiled
def spread(bits: UInt8s, device: int, host: int, blocks: Int64s) -> None:
    """Fill in what those have whose device bit is set: rows device and host, a column each."""
    for worker in range(blocks.shape[1]):
        place = 2 * worker
        if place >> 3 >= len(bits):
            return
        if bits[place >> 3] >> (place & 7) & 1:
            blocks[0, worker], blocks[1, worker] = device, host
