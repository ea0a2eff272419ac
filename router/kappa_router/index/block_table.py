"""The prefix index's store: a row per distinct prefix, shared by all workers that hold it.

A row stores the number of the set of its holders: blocks of one prompt mostly have the same. Rows
are allocated in order, so blocks that come together get neighbouring ones. Rows are found by a
hash table of keys (`router/kappa_router/index/hash_table.py`).

Bound: when rows run out the oldest few per cent go at once, by when a block was last stored or
looked up: unheld ones first, and of blocks used together the deepest first. That may
leave holes, never a claim that is not true.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kappa.compiled import compiled
from kappa_router.index.hash_table import HashTable, Int32s, UInt64s, plain, search

Int64s = NDArray[np.int64]

NO_ROW = 0
UNHELD = 0
NO_ROWS: Int32s = np.empty(0, dtype=np.int32)

_ROW = np.dtype([("key", "u8"), ("salt", "u8"), ("holders", "i4"), ("depth", "u4"), ("used", "u4")])
_MAX_LOAD = 0.4
_PREPARED = 1 << 20
_EVICTED_SHARE = 64
_SAMPLE = 4096
_FREE = (1 << 32) - 1
_LAST_TICK = _FREE - 1
_CHANGES = 256
# Blocks of one prompt are in few sets.
_FEW_SETS = 32

# -- who holds a block ----------------------------------------------------------------------------


class HolderSets:
    """Sets of workers by number, with the count of blocks that refer to each; set 0 is empty.

    A set is one integer with three bits a worker (3i on the device, 3i+1 in host, 3i+2 on disk):
    intersecting two of a thousand workers takes 50 ns.
    """

    def __init__(self) -> None:
        self.bits: list[int] = [0]
        self.blocks: list[int] = [0]
        self._number: dict[int, int] = {0: UNHELD}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._number)

    def move(self, old: int, bits: int, blocks: int) -> int:
        """`blocks` blocks go from set `old` to the set of these bits; returns its number."""
        number = self._number.get(bits)
        if number is None:
            if not self._free:
                self._free.append(len(self.bits))
                self.bits.append(0)
                self.blocks.append(0)
            number = self._number[bits] = self._free.pop()
            self.bits[number] = bits
        self.blocks[number] += blocks
        self.leave(old, blocks)
        return number

    def leave(self, number: int, blocks: int) -> None:
        """`blocks` blocks refer to a set no more."""
        self.blocks[number] -= blocks
        if number and not self.blocks[number]:
            del self._number[self.bits[number]]
            self.bits[number] = 0
            self._free.append(number)

    def changed(self, number: int, bit: int, blocks: int, present: bool) -> int:
        """The set with a bit more or less, to which some blocks of a set go."""
        bits = self.bits[number]
        wanted = bits | bit if present else bits & ~bit
        return number if wanted == bits else self.move(number, wanted, blocks)

    def numbers(self) -> list[int]:
        """The sets in use."""
        return list(self._number.values())


class BlockTable:
    """Rows by prefix hash: who holds each, how deep it is, its salt, and when it was last used.

    Row 0 is no row. Columns are views of the rows, and invalid after rows were added.

    Args:
        max_rows: the bound.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.sets = HolderSets()
        self.evicted = 0
        self.tick = 1
        self._next = 1
        self._free: Int32s = NO_ROWS
        rows = np.zeros(min(max_rows, _PREPARED) + 1, dtype=_ROW)
        self._by_key = HashTable(len(rows), _MAX_LOAD, rows["key"])
        self._use(rows)
        self._starts = np.empty(_CHANGES, dtype=np.int64)
        self._numbers = np.empty(_CHANGES, dtype=np.int32)
        # Compiled now rather than while the first request waits.
        self.walk(self.keys[:0])
        self._sets_of(NO_ROWS)
        _renumber(self.holders, NO_ROWS, NO_ROWS, NO_ROWS)

    def __len__(self) -> int:
        return self._next - 1 - len(self._free)

    @property
    def unheld(self) -> int:
        """Rows without a holder."""
        return self.sets.blocks[UNHELD]

    # ---- reading

    def find(self, keys: UInt64s) -> tuple[Int32s, int]:
        """The row of each prefix hash, NO_ROW where there is none, and how many have none."""
        return self._by_key.find(keys)

    def walk(self, keys: UInt64s) -> tuple[list[tuple[int, int]], int, bool]:
        """The holders of leading keys that have rows, which count as used now.

        Returns (place, set of holders from there on) of every change, how many keys that covers,
        and whether the next one may have a row.
        """
        passed, changes = _walk(
            self._by_key.values,
            self._rows,
            plain(keys),
            self.tick,
            self._starts,
            self._numbers,
        )
        found = zip(self._starts[:changes].tolist(), self._numbers[:changes].tolist(), strict=True)
        return list(found), passed, passed == len(keys) or changes == _CHANGES

    def held_with(self, rows: Int32s, bits: int) -> NDArray[np.bool_]:
        """Which rows are held with any of these bits."""
        numbers = self.holders[rows]
        having = [n for n in set(numbers.tolist()) if self.sets.bits[n] & bits]
        return np.isin(numbers, having) if having else np.zeros(len(rows), dtype=bool)

    def unheld_rows(self) -> Int32s:
        """Rows without a holder, shape (rows,)."""
        empty = (self.keys[: self._next] != 0) & (self.holders[: self._next] == UNHELD)
        return np.flatnonzero(empty).astype(np.int32)

    # ---- change

    def touch(self, rows: Int32s | int) -> None:
        """Count rows as used now."""
        self._used[rows] = self.tick

    def next_tick(self) -> None:
        """Time moves on: rows touched from here on are younger."""
        if self.tick == _LAST_TICK:
            self._used[self._used != _FREE] >>= np.uint32(1)
            self.tick >>= 1
        self.tick += 1

    def add(self, keys: UInt64s, depths: Int64s, salt: int, bits: int) -> Int32s:
        """Rows for prefix hashes that have none, held by a set of bits; there must be room."""
        rows = self._allocate(len(keys))
        first, last = int(rows[0]), int(rows[-1]) + 1
        # Neighbours in one piece: slices are written ten times faster than scattered rows.
        place: slice | Int32s = slice(first, last) if last - first == len(rows) else rows
        self.keys[place] = keys
        self.depth[place] = depths
        self.salt[place] = salt
        self._used[place] = self.tick
        self.holders[place] = self.sets.move(UNHELD, bits, len(rows))
        self.sets.blocks[UNHELD] += len(rows)
        now = self._by_key.add(keys, rows)
        spare = rows[now != rows]
        if spare.size:
            self.sets.leave(int(self.holders[spare[0]]), len(spare))
            self._release(spare)
        return now

    def change(self, rows: Int32s, bit: int, *, present: bool) -> int:
        """Add a bit to the holders of distinct rows, or take it; returns how many rows changed."""
        if not rows.size:
            return 0
        sets = self.sets
        numbers, counts = self._sets_of(rows)
        if len(numbers) == 1:
            only = int(numbers[0])
            moved = sets.changed(only, bit, len(rows), present)
            if moved != only:
                self.holders[rows] = moved
            return len(rows) if moved != only else 0
        old, each = numbers.tolist(), counts.tolist()
        # A set that loses its last block is gone, and its number may come again at once; so the
        # old sets are kept until all rows have moved.
        for number in old:
            sets.blocks[number] += 1
        new = [sets.changed(n, bit, count, present) for n, count in zip(old, each, strict=True)]
        for number in old:
            sets.leave(number, 1)
        changed = sum(count for o, n, count in zip(old, new, each, strict=True) if o != n)
        if changed:
            _renumber(self.holders, rows, numbers, np.array(new, dtype=np.int32))
        return changed

    def clear_bits(self, bits: int) -> None:
        """Take these bits from the holders of all rows."""
        sets = self.sets
        new = np.arange(len(sets.bits), dtype=np.int32)
        for number in sets.numbers():
            held = sets.bits[number]
            if held & bits:
                new[number] = sets.move(number, held & ~bits, sets.blocks[number])
        self.holders[: self._next] = new[self.holders[: self._next]]

    def remove(self, rows: Int32s) -> None:
        """Forget rows, with or without holders."""
        numbers, counts = np.unique(self.holders[rows], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self.sets.leave(number, count)
        self._by_key.remove(self.keys[rows])
        self._release(rows)

    # ---- eviction

    def room_after_eviction(self, more: int) -> tuple[int, Int32s]:
        """The number of `more` rows that there is room for, and the rows to `remove` for that.

        Rows touched in this tick stay.
        """
        short = len(self) + more - self.max_rows
        if short <= 0:
            return more, NO_ROWS
        gone = self.oldest(max(short, self.max_rows // _EVICTED_SHARE))
        return more - max(0, short - len(gone)), gone

    def oldest(self, count: int) -> Int32s:
        """At most `count` rows, those that should go first; none of this tick's."""
        used, holders = self._used[1 : self._next], self.holders[1 : self._next]
        may_go = (used != _FREE) & (used != self.tick)
        places = np.flatnonzero(may_go)
        if len(used) > 4 * _SAMPLE:
            # The age that a sample gives spares ordering everything.
            sample = np.sort(used[:: len(used) // _SAMPLE])
            last = _SAMPLE // 32 + 2 * _SAMPLE * count // len(used)
            old = used <= sample[min(len(sample) - 1, last)]
            few = np.flatnonzero((old | (holders == UNHELD)) & may_go)
            places = few if len(few) >= count else places
        age = used[places].astype(np.uint64)
        age[holders[places] == UNHELD] = 0
        age <<= np.uint64(32)
        rows = places + 1
        age |= np.uint64(_LAST_TICK) - self.depth[rows]
        if count < len(rows):
            rows = rows[np.argpartition(age, count)[:count]]
        return rows.astype(np.int32)

    # ---- inside

    def _sets_of(self, rows: Int32s) -> tuple[Int32s, Int64s]:
        """The sets that hold some rows, and how many of them each."""
        numbers, counts = np.empty(_FEW_SETS, dtype=np.int32), np.empty(_FEW_SETS, dtype=np.int64)
        distinct = _tally(self.holders, rows, numbers, counts)
        if distinct < 0:
            numbers, counts = np.unique(self.holders[rows], return_counts=True)
            return numbers, counts
        return numbers[:distinct], counts[:distinct]

    def _allocate(self, count: int) -> Int32s:
        fresh = min(count, self.max_rows + 1 - self._next)
        needed = self._next + fresh
        if needed > len(self._rows):
            grown = np.zeros(min(self.max_rows + 1, needed + needed // 8), dtype=_ROW)
            grown[: len(self._rows)] = self._rows
            self._use(grown)
        rows = np.arange(self._next, needed, dtype=np.int32)
        self._next = needed
        if fresh == count:
            return rows
        again, self._free = self._free[: count - fresh], self._free[count - fresh :]
        return np.concatenate([rows, again])

    def _use(self, rows: NDArray[np.void]) -> None:
        self._rows = rows
        self.keys: UInt64s = rows["key"]
        self.holders: Int32s = rows["holders"]
        self.depth: NDArray[np.uint32] = rows["depth"]
        self.salt: UInt64s = rows["salt"]
        self._used: NDArray[np.uint32] = rows["used"]
        self._by_key.keys = self.keys

    def _release(self, rows: Int32s) -> None:
        self.keys[rows] = 0
        self.holders[rows] = UNHELD
        self._used[rows] = _FREE
        # In order, so that blocks that come together get neighbouring rows again.
        self._free = np.sort(np.concatenate([self._free, rows]))


@compiled
def _walk(
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
            slot, present = search(values, keys, True, prompt[i])
            if not present:
                return i, changes
            row = values[slot]
        if holders[row] != last:
            if changes == len(starts):
                return i, changes
            last = holders[row]
            starts[changes], sets[changes] = i, last
            changes += 1
        used[row] = tick
    return len(prompt), changes


@compiled
def _tally(holders: Int32s, rows: Int32s, numbers: Int32s, counts: Int64s) -> int:
    """Count the sets that hold these rows: fills in as many sets as there are, if they fit.

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
def _renumber(holders: Int32s, rows: Int32s, numbers: Int32s, moved: Int32s) -> None:
    """Give each row the set that its own has moved to; `numbers` has the sets of all rows."""
    at = 0
    for row in rows:
        number = holders[row]
        if numbers[at] != number:
            at = 0
            while numbers[at] != number:
                at += 1
        holders[row] = moved[at]


def present(rows: Int32s, absent: int) -> Int32s:
    """The rows that are there, as many as `absent` being NO_ROW."""
    return rows[rows != NO_ROW] if absent else rows


def distinct(rows: Int32s) -> Int32s:
    """Each row once."""
    distinct: Int32s = rows if is_sorted(rows) else np.unique(rows)
    return distinct


@compiled
def is_sorted(rows: Int32s) -> bool:
    """Whether the rows rise strictly."""
    last = 0
    for row in rows:
        if row <= last:
            return False
        last = row
    return True
