"""Which blocks each worker holds: applies KV events and keeps the bounds.

A block is found by the engine's name for it, or by our own hash of its tokens below a parent that
is known, never by guess. What cannot be placed is counted: `orphans`, `unjoined`, `refused`,
`ambiguous`, `unknown_removals` (explained at `router.index.prefix_index.PrefixIndex.stats`).
Device presence is counted, in `Worker.copies`; all else is sets of bits, two per worker.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from kappa.compiled import compiled
from router.index.hash_table import HashTable, Int32s, Int64s, UInt64s
from router.index.kv_events import BlocksRemoved, BlocksStored, EngineHash, Tier
from router.index.prefix_hash import ROOT, HashState, PrefixHasher
from router.index.row_table import NO_ROW, RowTable

# Blocks no tier holds stay known for a while: a host store is often announced just after the
# device block went, and only the memory of that block says what the engine's hash stands for.
_UNHELD_SHARE = 8
_SETS_SHARE = 32
_FEWEST_SETS = 1024
_NAMES_LOAD = 0.68
_MASK = (1 << 64) - 1
_MASKS: dict[Tier | None, int] = {"device": 1, "host": 2, None: 3}
_NO_ROWS: Int32s = np.empty(0, dtype=np.int32)


class Worker:
    """A worker's place in sets of holders, its engine's names, and its spare device copies."""

    __slots__ = ("bit", "copies", "names")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.names = HashTable(0, _NAMES_LOAD)
        self.copies: dict[int, int] = {}

    def bits(self, tier: Tier | None) -> int:
        """Its bit in the sets of holders; of no tier: both."""
        return _MASKS[tier] << 2 * self.bit


class _Anchor(NamedTuple):
    """Where the blocks of an event can be hashed from: block `first` follows `running`."""

    first: int
    running: HashState
    salt: int


class Holdings:
    """Blocks with their holders, within `max_blocks` rows and as many names.

    Arguments as `router.index.prefix_index.PrefixIndex` explains them.
    """

    def __init__(self, hasher: PrefixHasher | None, max_blocks: int, host_extends: bool) -> None:
        self._hasher, self._host_extends = hasher, host_extends
        self.max_blocks = max_blocks
        self.table = RowTable(max_blocks)
        self.workers: dict[str, Worker] = {}
        self.by_bit: list[str] = []
        self.device_bits = 0
        self.named = 0
        self.counts = dict.fromkeys(
            ("orphans", "unjoined", "refused", "ambiguous", "unknown_removals"), 0
        )
        self._free_bits: list[int] = []
        # Compiled now rather than while the first request waits.
        _rising(_NO_ROWS)
        Worker(0)

    def worker(self, name: str) -> Worker:
        """A worker's record, made at its first mention."""
        record = self.workers.get(name)
        if record is None:
            bit = self._free_bits.pop() if self._free_bits else len(self.by_bit)
            if bit == len(self.by_bit):
                self.by_bit.append(name)
            self.by_bit[bit] = name
            record = self.workers[name] = Worker(bit)
            self.device_bits |= record.bits("device")
        return record

    # ---- presence by our own hashes

    def hold(self, worker: str, tier: Tier, hashes: UInt64s) -> None:
        """Leading blocks of a prompt are present in a tier now."""
        bit = self.worker(worker).bits(tier)
        rows, absent = self.table.find(hashes)
        held = _present(rows, absent)
        if held.size:
            self.table.touch(held)
        if absent:
            self._add_absent(rows, hashes, np.arange(1, len(hashes) + 1), 0, bit)
        self.table.change(_distinct(held), bit, present=True)

    def drop(self, worker: str, tier: Tier, hashes: UInt64s) -> None:
        """Blocks are not present in a tier; those that were not do not matter."""
        record = self.workers.get(worker)
        if record is not None:
            held = _distinct(_present(*self.table.find(hashes)))
            self.table.change(held, record.bits(tier), present=False)

    # ---- events

    def check(self, event: BlocksStored) -> None:
        """Raises ValueError for blocks of another size, or tokens that do not fill them."""
        tokens = len(event.token_ids)
        if not tokens:
            return
        if self._hasher is None:
            raise ValueError(f"worker {event.worker} sent tokens, but the index has no hasher")
        size = self._hasher.block_tokens
        if event.block_tokens != size:
            raise ValueError(
                f"worker {event.worker} stores blocks of {event.block_tokens} tokens, "
                f"the index is for blocks of {size}: give the pool one block size"
            )
        if tokens != len(event.engine_hashes) * size:
            raise ValueError(
                f"worker {event.worker} stored {len(event.engine_hashes)} blocks of {size} "
                f"tokens but sent {tokens} tokens"
            )

    def stored(self, event: BlocksStored) -> None:
        """Blocks are in a tier now; `event` has been checked."""
        worker = self.worker(event.worker)
        names = _keys_of(event.engine_hashes)
        rows = worker.names.values_of(names)
        known = rows[rows != NO_ROW]
        self.table.touch(known)
        if len(known) < len(rows):
            before = self._place(worker, event, names, rows)
            known = np.concatenate([known, before]) if known.size else before
        if event.tier == "host":
            self.table.change(_distinct(known), worker.bits("host"), present=True)
        elif known.size:
            self._gain_on_device(worker, known)

    def removed(self, event: BlocksRemoved) -> None:
        """Blocks are in a tier no more."""
        worker = self.workers.get(event.worker)
        if worker is None:
            self.counts["unknown_removals"] += len(event.engine_hashes)
            return
        rows = worker.names.values_of(_keys_of(event.engine_hashes))
        rows = rows[rows != NO_ROW]
        spared = 0
        if event.tier == "device" and worker.copies:
            kept = [row for row in rows.tolist() if not _take_copy(worker, row)]
            spared = len(rows) - len(kept)
            rows = np.array(kept, dtype=np.int32)
        changed = self.table.change(_distinct(rows), worker.bits(event.tier), present=False)
        self.counts["unknown_removals"] += len(event.engine_hashes) - spared - changed

    def clear(self, worker: Worker, tier: Tier | None) -> None:
        """A tier of a worker is empty; of no tier: both, and its names are invalid."""
        self.table.clear_bits(worker.bits(tier))
        if tier != "host":
            worker.copies.clear()
        if tier is None:
            self.named -= len(worker.names)
            worker.names = HashTable(0, _NAMES_LOAD)
            self._forget(self._nameless())

    def gone(self, name: str) -> None:
        """A worker is gone, with all that it held."""
        worker = self.workers.pop(name, None)
        if worker is not None:
            self.clear(worker, None)
            self.device_bits &= ~worker.bits("device")
            self._free_bits.append(worker.bit)

    # ---- placing stored blocks

    def _place(self, worker: Worker, event: BlocksStored, names: UInt64s, rows: Int32s) -> Int32s:
        """Names the unknown blocks of a run; returns the rows among them that were there before.

        New rows are held at once.
        """
        unsalted = event.tier == "host" and event.salt is None
        anchor = None
        if len(event.token_ids) and (self._host_extends or not unsalted):
            anchor = self._anchor(worker, event, rows)
        first = len(rows) if anchor is None else anchor.first
        unknown = (rows == NO_ROW).nonzero()[0]
        if first:
            unplaced = int(np.count_nonzero(unknown < first))
            self.counts["unjoined" if unsalted else "orphans"] += unplaced
            unknown = unknown[unplaced:]
        if anchor is None or not unknown.size:
            return _NO_ROWS
        assert self._hasher is not None
        tokens = event.token_ids[first * self._hasher.block_tokens :]
        places = unknown - first
        hashes = self._hasher.extend(anchor.running, tokens, anchor.salt)[places]
        found, absent = self.table.find(hashes)
        before = _NO_ROWS
        if absent < len(found):
            clear = self._unambiguous(worker, unknown, found)
            unknown, places, hashes, found = (x[clear] for x in (unknown, places, hashes, found))
            before = found.copy()
            self.table.touch(before[before != NO_ROW])
        depths = places + (1 + anchor.running.blocks)
        placed = len(found)
        if not self._add_absent(found, hashes, depths, anchor.salt, worker.bits(event.tier)):
            # What follows a refused block cannot be placed either.
            placed = int((found == NO_ROW).nonzero()[0][0])
            self.counts["refused"] += len(found) - placed
        self.named -= len(worker.names)
        worker.names.add(names[unknown[:placed]], found[:placed])
        self.named += len(worker.names)
        before = before[:placed]
        return before[before != NO_ROW]

    def _anchor(self, worker: Worker, event: BlocksStored, rows: Int32s) -> _Anchor | None:
        """What the unknown blocks of a run hang below; None: that is unknown, too."""
        parent = NO_ROW
        if event.parent_engine_hash is not None:
            parent = int(worker.names.values_of(_keys_of((event.parent_engine_hash,)))[0])
        elif event.salt is not None:
            return _Anchor(0, ROOT, event.salt)
        first = 0
        if parent == NO_ROW:
            # A run may start at unknown blocks and go on in known ones.
            known = np.flatnonzero(rows)
            if not known.size:
                return None
            first, parent = int(known[0]) + 1, int(rows[known[0]])
        assert self._hasher is not None
        table = self.table
        table.touch(parent)
        # A parent already fixes the salt, so a child can have no other.
        salt = int(table.salt[parent])
        running = self._hasher.running(int(table.keys[parent]), int(table.depth[parent]), salt)
        return _Anchor(first, running, salt)

    def _unambiguous(self, worker: Worker, unknown: Int64s, found: Int32s) -> Int64s:
        """Which unknown blocks may be named: not those that the worker holds under another name.

        Nor those that follow one without a known block between.
        """
        doubled = self.table.held_with(found, worker.bits(None))
        if not doubled.any():
            return np.arange(len(found))
        kept, last_broken = [], -1
        for i, (position, twice) in enumerate(zip(unknown.tolist(), doubled.tolist(), strict=True)):
            if twice or last_broken == position - 1 >= 0:
                last_broken = position
            else:
                kept.append(i)
        self.counts["ambiguous"] += len(found) - len(kept)
        return np.array(kept, dtype=np.int64)

    def _gain_on_device(self, worker: Worker, rows: Int32s) -> None:
        """Blocks came to the device: a copy more of those that were there already."""
        times = None
        if not _rising(rows):
            rows, times = np.unique(rows, return_counts=True)
        bit = worker.bits("device")
        present = self.table.held_with(rows, bit)
        if times is not None or present.any():
            spare = present.astype(np.int64) + (0 if times is None else times - 1)
            for place in np.flatnonzero(spare).tolist():
                row = int(rows[place])
                worker.copies[row] = worker.copies.get(row, 0) + int(spare[place])
        self.table.change(rows[~present], bit, present=True)

    def _add_absent(
        self, rows: Int32s, hashes: UInt64s, depths: Int64s, salt: int, bit: int
    ) -> bool:
        """Fill in rows for absent blocks, held with a bit; False: there was no room for the last.

        Rows touched in this tick are not evicted for them.
        """
        absent = (rows == NO_ROW).nonzero()[0]
        if not absent.size:
            return True
        room, gone = self.table.room_after_eviction(len(absent))
        if gone.size:
            self._evict(gone)
        added = absent[:room]
        if room:
            rows[added] = self.table.add(hashes[added], depths[added], salt, bit)
        return room == len(absent)

    # ---- bounds

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
        if self.named > self.max_blocks:
            self._forget_idle_names()
        most_sets = max(_FEWEST_SETS, self.max_blocks // _SETS_SHARE)
        while len(table.sets) > most_sets or self.named > self.max_blocks:
            table.next_tick()
            self._evict(table.oldest(max(1, len(table) // 64)))

    def _evict(self, rows: Int32s) -> None:
        self.table.evicted += len(rows)
        self._forget(rows)

    def _forget(self, rows: Int32s) -> None:
        """Remove rows and all that refers to them."""
        if not rows.size:
            return
        gone = np.zeros(len(self.table.keys), dtype=bool)
        gone[rows] = True
        for worker in self.workers.values():
            self._forget_names(worker, gone[worker.names.values])
            for row in [row for row in worker.copies if gone[row]]:
                del worker.copies[row]
        self.table.remove(rows)

    def _forget_names(self, worker: Worker, lanes: NDArray[np.bool_]) -> None:
        """Forget the names in those lanes of a worker's table that are chosen."""
        self.named -= len(worker.names)
        worker.names.remove(worker.names.keys_where(lanes))
        self.named += len(worker.names)

    def _forget_idle_names(self) -> None:
        """Forget names of blocks that their worker holds no more but others do."""
        bits = self.table.sets.bits
        for worker in self.workers.values():
            mine = worker.bits(None)
            idle = np.array([number > 0 and not held & mine for number, held in enumerate(bits)])
            self._forget_names(worker, idle[self.table.holders[worker.names.values]])

    def _nameless(self) -> Int32s:
        """Rows that nobody holds and no engine has named."""
        rows = self.table.unheld_rows()
        if not rows.size:
            return rows
        named = np.zeros(len(self.table.keys), dtype=bool)
        for worker in self.workers.values():
            named[worker.names.values] = True
        nameless: Int32s = rows[~named[rows]]
        return nameless


def _take_copy(worker: Worker, row: int) -> bool:
    """Whether the worker had a spare device copy of a block, which goes."""
    spare = worker.copies.get(row, 0)
    if spare > 1:
        worker.copies[row] = spare - 1
    elif spare:
        del worker.copies[row]
    return spare > 0


def _keys_of(engine_hashes: Sequence[EngineHash]) -> UInt64s:
    """64-bit keys for an engine's hashes."""
    try:
        return np.frombuffer(array("Q", cast("Sequence[int]", engine_hashes)), dtype=np.uint64)
    except (TypeError, OverflowError):
        keys = [h if _is_key(h) else hash(h) & _MASK for h in engine_hashes]
        return np.array(keys, dtype=np.uint64)


def _is_key(engine_hash: EngineHash) -> bool:
    return isinstance(engine_hash, int) and 0 <= engine_hash <= _MASK


def _present(rows: Int32s, absent: int) -> Int32s:
    """The rows that are there, as many as `absent` being NO_ROW."""
    return rows[rows != NO_ROW] if absent else rows


def _distinct(rows: Int32s) -> Int32s:
    """Each row once."""
    if _rising(rows):
        return rows
    distinct: Int32s = np.unique(rows)
    return distinct


@compiled
def _rising(rows: Int32s) -> bool:
    """Whether each row is above the one before."""
    last = 0
    for row in rows:
        if row <= last:
            return False
        last = row
    return True
