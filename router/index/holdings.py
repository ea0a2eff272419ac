"""Which blocks each worker holds: rows of a table, sets of holders, and engines' names for rows.

What `router.index.prefix_index` keeps and `router.index.block_events` changes. Device presence is
counted, in `Worker.copies`; all else is sets of bits, two per worker (device, host). Bounds are
kept by `trim`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from router.index.block_table import NO_ROW, BlockTable
from router.index.kv_events import Tier
from router.index.loops import Int32s, Int64s, UInt64s, renumber, rising, tally
from router.index.tag_table import NameTable

# Blocks no tier holds stay known for a while: a host store is often announced just after the
# device block went, and only the memory of that block says what the engine's hash stands for.
_UNHELD_SHARE = 8
_SETS_SHARE = 32
_FEWEST_SETS = 1024
# Blocks of one prompt are in few sets.
_FEW_SETS = 32


class Worker:
    """A worker's place in sets of holders, its engine's names, and its spare device copies."""

    __slots__ = ("bit", "copies", "names")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.names = NameTable(0)
        self.copies: dict[int, int] = {}


class Holdings:
    """Rows of blocks with their holders, within `max_blocks` rows and as many names."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.table = BlockTable(max_blocks)
        self.workers: dict[str, Worker] = {}
        self.by_bit: list[str] = []
        self.free_bits: list[int] = []
        self.device_bits = 0
        self.named = 0
        # Compiled now rather than while the first request waits.
        nothing = np.empty(0, dtype=np.int32)
        self._sets_of(nothing)
        renumber(nothing, nothing, nothing, nothing)
        rising(nothing)

    def worker(self, name: str) -> Worker:
        """A worker's record, made at its first mention."""
        record = self.workers.get(name)
        if record is None:
            bit = self.free_bits.pop() if self.free_bits else len(self.by_bit)
            if bit == len(self.by_bit):
                self.by_bit.append(name)
            self.by_bit[bit] = name
            self.device_bits |= 1 << 2 * bit
            record = self.workers[name] = Worker(bit)
        return record

    def add(
        self,
        keep: Int32s,
        keys: UInt64s,
        depths: NDArray[np.uint32],
        salt: int,
        bit: int,
    ) -> Int32s:
        """Rows for absent blocks, held with a bit, for as many as there is room beside `keep`."""
        table = self.table
        if len(table) + len(keys) <= table.max_rows:
            table.touch(keep)
            return table.add(keys, depths, salt, bit)
        table.touch(keep)
        room, gone = table.room_after_eviction(len(keys))
        table.evicted += len(gone)
        self._forget(gone)
        if not room:
            return keep[:0]
        return table.add(keys[:room], depths[:room], salt, bit)

    def present(self, rows: Int32s, bit: int) -> NDArray[np.bool_]:
        """Which rows are held with this bit."""
        numbers, bits = self.table.holders[rows], self.table.sets.bits
        having = [number for number in set(numbers.tolist()) if bits[number] & bit]
        return np.isin(numbers, having) if having else np.zeros(len(rows), dtype=bool)

    def change(self, rows: Int32s, bit: int, *, present: bool) -> int:
        """Add a bit to the sets of distinct rows, or take it; returns how many rows changed."""
        if not rows.size:
            return 0
        holders, sets = self.table.holders, self.table.sets
        numbers, counts = self._sets_of(rows)
        if len(numbers) == 1:
            (old,) = numbers.tolist()
            new = self._moved(old, bit, len(rows), present)
            if new == old:
                return 0
            holders[rows] = new
            return len(rows)
        moved, changed = [], 0
        # A set that loses its last block is gone, and its number may come again at once; so the
        # old sets are kept until all rows have moved.
        old_sets, each = numbers.tolist(), counts.tolist()
        for number in old_sets:
            sets.blocks[number] += 1
        for number, count in zip(old_sets, each, strict=True):
            moved.append(self._moved(number, bit, count, present))
            changed += count if moved[-1] != number else 0
        for number in old_sets:
            sets.leave(number, 1)
        if changed:
            renumber(holders, rows, numbers, np.array(moved, dtype=np.int32))
        return changed

    def _sets_of(self, rows: Int32s) -> tuple[Int32s, Int64s]:
        """The sets that hold some rows, and how many of them each."""
        numbers, counts = np.empty(_FEW_SETS, dtype=np.int32), np.empty(_FEW_SETS, dtype=np.int64)
        distinct = tally(self.table.holders, rows, numbers, counts)
        if distinct < 0:
            numbers, counts = np.unique(self.table.holders[rows], return_counts=True)
            return numbers, counts
        return numbers[:distinct], counts[:distinct]

    def change_one(self, row: int, bit: int, *, present: bool) -> int:
        """`change` for one row."""
        holders = self.table.holders
        old = int(holders[row])
        new = self._moved(old, bit, 1, present)
        if new == old:
            return 0
        holders[row] = new
        return 1

    def _moved(self, number: int, bit: int, blocks: int, present: bool) -> int:
        """The set with a bit more or less, to which some blocks of a set go."""
        bits = self.table.sets.bits[number]
        changed = bits | bit if present else bits & ~bit
        return number if changed == bits else self.table.sets.move(number, changed, blocks)

    def clear(self, worker: Worker, tier: Tier | None) -> None:
        """A tier of a worker is empty; both, and its names are void."""
        mask = bit_of(worker, tier) if tier else 3 << 2 * worker.bit
        table = self.table
        new = np.arange(len(table.sets.bits), dtype=np.int32)
        for number in table.sets.numbers():
            bits = table.sets.bits[number]
            if bits & mask:
                new[number] = table.sets.move(number, bits & ~mask, table.sets.blocks[number])
        table.holders = new[table.holders]
        if tier != "host":
            worker.copies.clear()
        if tier is None:
            self.named -= len(worker.names)
            worker.names = NameTable(0)
            self._forget(self._nameless())

    def gone(self, name: str) -> None:
        """A worker is gone, with all that it held."""
        worker = self.workers.pop(name, None)
        if worker is not None:
            self.clear(worker, None)
            self.device_bits &= ~(1 << 2 * worker.bit)
            self.free_bits.append(worker.bit)

    def trim(self) -> None:
        """Keep what nobody holds, the names and the sets within their shares of the bound."""
        table = self.table
        if table.unheld > self.max_blocks // _UNHELD_SHARE:
            self._forget(self._nameless())
            excess = table.unheld - self.max_blocks // _UNHELD_SHARE
            if excess > 0:
                excess = min(table.unheld, excess + self.max_blocks // (2 * _UNHELD_SHARE))
                table.next_tick()
                self._forget(table.oldest(excess))
        most_sets = max(_FEWEST_SETS, self.max_blocks // _SETS_SHARE)
        if self.named > self.max_blocks:
            self._forget_idle_names()
        while len(table.sets) > most_sets or self.named > self.max_blocks:
            table.next_tick()
            gone = table.oldest(max(1, len(table) // 64))
            table.evicted += len(gone)
            self._forget(gone)

    def _nameless(self) -> Int32s:
        """Rows that nobody holds and no engine has named."""
        rows = self.table.unheld_rows()
        if not rows.size:
            return rows
        named = np.zeros(len(self.table.keys), dtype=bool)
        for worker in self.workers.values():
            if len(worker.names):
                named[worker.names.values] = True
        nameless: Int32s = rows[~named[rows]]
        return nameless

    def _forget_idle_names(self) -> None:
        """Forget names of blocks that their worker holds no more but others do."""
        bits, holders = self.table.sets.bits, self.table.holders
        for worker in self.workers.values():
            lanes = worker.names.filled()
            if lanes.size:
                mine = 3 << 2 * worker.bit
                keeps = np.array(
                    [not number or held & mine != 0 for number, held in enumerate(bits)]
                )
                idle = lanes[~keeps[holders[worker.names.values[lanes]]]]
                worker.names.clear_lanes(idle)
                self.named -= len(idle)

    def _forget(self, rows: Int32s) -> None:
        """Remove rows and all that refers to them."""
        if not rows.size:
            return
        gone = np.zeros(len(self.table.keys), dtype=bool)
        gone[rows] = True
        for worker in self.workers.values():
            if len(worker.names):
                lanes = np.flatnonzero(gone[worker.names.values])
                worker.names.clear_lanes(lanes)
                self.named -= len(lanes)
            for row in [row for row in worker.copies if gone[row]]:
                del worker.copies[row]
        self.table.remove(rows)


def bit_of(worker: Worker, tier: Tier) -> int:
    """A worker's bit in the sets of holders."""
    return 1 << 2 * worker.bit if tier == "device" else 2 << 2 * worker.bit


def distinct_rows(rows: Int32s) -> Int32s:
    """Each row once, without NO_ROW."""
    if rising(rows):
        return rows
    distinct: Int32s = np.unique(rows[rows != NO_ROW])
    return distinct
