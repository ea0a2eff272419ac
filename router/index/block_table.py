"""The prefix index's store: one row per distinct prefix, shared by all workers that hold it.

Rows are elements of flat arrays. Blocks that come together get neighbouring rows, so the row after
a block's is mostly the next block's, and is tried before the tag table is searched.

Bound: when rows run out the oldest few per cent go at once, by when a block was last stored or
asked for: those that nobody holds first, and of blocks used together the deepest first. That may
leave holes, never a claim that is not true.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from router.index.holders import NOBODY, HolderSets
from router.index.loops import Int32s, UInt64s
from router.index.tag_table import RowTable

NO_ROW = 0
_STEP = 64
_SAMPLE = 4096
_PREPARED = 1 << 20
_FREE = (1 << 32) - 1
_LAST_TICK = _FREE - 1
_CHANGES = 256


class BlockTable:
    """Rows by prefix hash: who holds each, how deep it is, its salt, and when it was last used.

    Row 0 is no row. Attributes are columns, for reading.

    Args:
        max_rows: the bound.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.sets = HolderSets()
        self.evicted = 0
        self.tick = 1
        self._next = 1
        self._free: Int32s = np.empty(0, dtype=np.int32)
        rows = min(max_rows, _PREPARED) + 1
        self.keys: UInt64s = np.zeros(rows, dtype=np.uint64)
        self.holders: Int32s = np.zeros(rows, dtype=np.int32)
        self._depth: NDArray[np.uint32] = np.zeros(rows, dtype=np.uint32)
        self._used: NDArray[np.uint32] = np.zeros(rows, dtype=np.uint32)
        self._salt: NDArray[np.uint32] = np.zeros(rows, dtype=np.uint32)
        self._salts: list[int] = [0]
        self._salt_number: dict[int, int] = {0: 0}
        self._rows = RowTable(rows, self.keys)
        self._starts = np.empty(_CHANGES, dtype=np.int64)
        self._numbers = np.empty(_CHANGES, dtype=np.int32)
        # Compiled now rather than while the first request waits.
        self.look_up(self.keys[:0])
        self.walk(self.keys[:0])

    def __len__(self) -> int:
        return self._next - 1 - len(self._free)

    @property
    def unheld(self) -> int:
        """Rows that nobody holds."""
        return self.sets.blocks[NOBODY]

    def nbytes(self) -> int:
        """Bytes of everything here."""
        columns = (self.keys, self.holders, self._depth, self._used, self._salt, self._free)
        salts = 200 * len(self._salts)
        tables = self._rows.nbytes() + self.sets.nbytes()
        return sum(column.nbytes for column in columns) + salts + tables

    # ---- reading

    def row_of(self, key: int) -> int:
        """The row of a prefix hash, or NO_ROW."""
        return self._rows.get(key)

    def look_up(self, keys: UInt64s) -> tuple[Int32s, int]:
        """The row of each prefix hash, NO_ROW where there is none, and how many have none."""
        return self._rows.look_up(keys)

    def rows_of(self, keys: UInt64s) -> Int32s:
        """The row of each prefix hash; NO_ROW where there is none."""
        return self.look_up(keys)[0]

    def walk(self, keys: UInt64s) -> tuple[list[tuple[int, int]], int, bool]:
        """Who holds leading keys that have rows, which count as used now.

        Returns (place, set of holders from there on) of every change, how many keys that tells of,
        and whether the next one may have a row.
        """
        passed, changes = self._rows.walk(
            keys, self.holders, self._used, self.tick, self._starts, self._numbers
        )
        told = zip(self._starts[:changes].tolist(), self._numbers[:changes].tolist(), strict=True)
        return list(told), passed, passed == len(keys) or changes == _CHANGES

    def depth(self, row: int) -> int:
        """How many blocks a prefix has."""
        return int(self._depth[row])

    def salt(self, row: int) -> int:
        """Salt of the sequence a row is in."""
        return self._salts[int(self._salt[row])]

    # ---- change

    def touch(self, rows: Int32s | slice | int) -> None:
        """Count rows as used now."""
        self._used[rows] = self.tick

    def next_tick(self) -> None:
        """Time moves on: what is touched from here on is younger."""
        if self.tick == _LAST_TICK:
            self._used[self._used != _FREE] >>= np.uint32(1)
            self.tick >>= 1
        self.tick += 1

    def room_after_eviction(self, more: int) -> tuple[int, Int32s]:
        """How many of `more` rows there is room for, and the rows to `remove` for that.

        Rows touched in this tick stay.
        """
        short = len(self) + more - self.max_rows
        if short <= 0:
            return more, np.empty(0, dtype=np.int32)
        gone = self.oldest(max(short, self.max_rows // _STEP))
        return more - max(0, short - len(gone)), gone

    def oldest(self, count: int) -> Int32s:
        """At most `count` rows, those that should go first; none of this tick's."""
        used, holders = self._used[1 : self._next], self.holders[1 : self._next]
        rows = self._candidates(used, holders, count)
        age = used[rows].astype(np.uint64)
        age[holders[rows] == NOBODY] = 0
        age <<= np.uint64(32)
        rows += 1
        age |= np.uint64(_LAST_TICK) - self._depth[rows]
        if count < len(rows):
            rows = rows[np.argpartition(age, count)[:count]]
        return rows.astype(np.int32)

    def _candidates(
        self, used: NDArray[np.uint32], holders: Int32s, count: int
    ) -> NDArray[np.intp]:
        """Places in these columns among which the `count` oldest rows are."""
        may_go = (used != _FREE) & (used != self.tick)
        if len(used) > 4 * _SAMPLE:
            # The age that a sample gives spares ordering everything.
            sample = np.sort(used[:: len(used) // _SAMPLE])
            age = sample[min(len(sample) - 1, _SAMPLE // 32 + 2 * _SAMPLE * count // len(used))]
            rows = np.flatnonzero(((used <= age) | (holders == NOBODY)) & may_go)
            if len(rows) >= count:
                return rows
        return np.flatnonzero(may_go)

    def unheld_rows(self) -> Int32s:
        """Rows that nobody holds."""
        empty = (self.keys[: self._next] != 0) & (self.holders[: self._next] == NOBODY)
        return np.flatnonzero(empty).astype(np.int32)

    def add(
        self,
        keys: UInt64s,
        depths: NDArray[np.uint32],
        salt: int,
        bits: int,
    ) -> Int32s:
        """Rows for prefix hashes that have none, held by a set of bits; there must be room."""
        rows = self._allocate(len(keys))
        first, last = int(rows[0]), int(rows[-1]) + 1
        # Neighbours in one piece: slices are written ten times faster than scattered rows.
        place: slice | Int32s = slice(first, last) if last - first == len(rows) else rows
        self.keys[place] = keys
        found = self._rows.add(keys, rows)
        self.holders[place] = self.sets.move(NOBODY, bits, len(rows)) if bits else NOBODY
        self.sets.blocks[NOBODY] += len(rows)
        self._depth[place] = depths
        self._salt[place] = self._salt_of(salt) if salt else 0
        self._used[place] = self.tick
        extra = rows[found != rows]
        if extra.size:
            self.sets.leave(int(self.holders[extra[0]]), len(extra))
            self._give_back(extra)
        return found

    def add_one(self, key: int, depth: int, salt: int, bits: int) -> int:
        """`add` for one."""
        if self._next < len(self.keys):
            row = self._next
            self._next += 1
        else:
            row = int(self._allocate(1)[0])
        self.keys[row] = key
        self._depth[row] = depth
        self._salt[row] = self._salt_of(salt) if salt else 0
        self._used[row] = self.tick
        self._rows.put(key, row)
        self.holders[row] = self.sets.move(NOBODY, bits, 1) if bits else NOBODY
        self.sets.blocks[NOBODY] += 1
        return row

    def remove(self, rows: Int32s) -> None:
        """Forget rows, whoever holds them."""
        if not len(rows):
            return
        numbers, counts = np.unique(self.holders[rows], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self.sets.leave(number, count)
        self._rows.clear_lanes(self._rows.lanes_of(self.keys[rows]))
        self._give_back(rows)
        if len(self._salts) > 1024 + len(self.keys) // 64:
            self._forget_salts()

    # ---- inside

    def _allocate(self, count: int) -> Int32s:
        fresh = min(count, self.max_rows + 1 - self._next)
        if self._next + fresh > len(self.keys):
            self._grow(self._next + fresh)
        rows = np.arange(self._next, self._next + fresh, dtype=np.int32)
        self._next += fresh
        if fresh == count:
            return rows
        taken, self._free = self._free[: count - fresh], self._free[count - fresh :]
        return np.concatenate([rows, taken])

    def _give_back(self, rows: Int32s) -> None:
        self.keys[rows] = 0
        self.holders[rows] = NOBODY
        self._used[rows] = _FREE
        # In order, so that blocks that come together get neighbouring rows again.
        self._free = np.sort(np.concatenate([self._free, rows]))

    def _grow(self, needed: int) -> None:
        rows = min(self.max_rows + 1, needed + needed // 8)
        more = rows - len(self.keys)
        self.keys = np.concatenate([self.keys, np.zeros(more, dtype=np.uint64)])
        self.holders = np.concatenate([self.holders, np.zeros(more, dtype=np.int32)])
        blank = np.zeros(more, dtype=np.uint32)
        self._depth = np.concatenate([self._depth, blank])
        self._used = np.concatenate([self._used, blank])
        self._salt = np.concatenate([self._salt, blank])
        self._rows.keys = self.keys

    def _salt_of(self, salt: int) -> int:
        number = self._salt_number.get(salt)
        if number is None:
            number = self._salt_number[salt] = len(self._salts)
            self._salts.append(salt)
        return number

    def _forget_salts(self) -> None:
        live = np.unique(self._salt[self.keys != 0])
        self._salts = [0] + [self._salts[i] for i in live.tolist() if i]
        self._salt_number = {salt: i for i, salt in enumerate(self._salts)}
        new = np.zeros(int(live.max(initial=0)) + 1, dtype=np.uint32)
        new[live[live > 0]] = np.arange(1, len(self._salts), dtype=np.uint32)
        self._salt[self.keys != 0] = new[self._salt[self.keys != 0]]
