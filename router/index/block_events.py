"""What stored and removed blocks mean: finds or makes the row of each engine hash, never by guess.

A row is found by the engine's name for it, or by our own hash of its tokens below a parent that is
known. What cannot be placed is counted: `orphans`, `unjoined`, `refused`, `ambiguous`,
`unknown_removals` (explained at `router.index.prefix_index.PrefixIndex.stats`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import cast

import numpy as np

from router.index.block_table import NO_ROW
from router.index.holdings import Holdings, Worker, bit_of, distinct_rows
from router.index.kv_events import BlocksRemoved, BlocksStored, EngineHash, Tier
from router.index.loops import Int32s, Int64s, rising
from router.index.prefix_hash import ROOT, PrefixHasher, Running, UInt64s

# So few blocks are faster one by one.
FEW = 3
_MASK = (1 << 64) - 1
# Engines may number blocks from 0, and an empty lane of a table has name 0.
_NAME_MARK = 0x9E3779B97F4A7C15


class BlockEvents:
    """Applies stored and removed blocks to holdings. Arguments as `PrefixIndex` explains them."""

    def __init__(self, held: Holdings, hasher: PrefixHasher | None, host_extends: bool) -> None:
        self._held = held
        self._hasher = hasher
        self._host_extends = host_extends
        self.counts = dict.fromkeys(
            ("orphans", "unjoined", "refused", "ambiguous", "unknown_removals"), 0
        )

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
        """Blocks are in a tier now."""
        worker = self._held.worker(event.worker)
        if len(event.engine_hashes) == 1 and self._stored_one(worker, event):
            return
        names = _names_of(event.engine_hashes)
        rows = worker.names.values_of(names)
        self._held.table.touch(rows)
        unknown = np.flatnonzero(rows == NO_ROW)
        known = rows[rows != NO_ROW] if unknown.size else rows
        if unknown.size:
            found = self._place(worker, event, names, rows, unknown)
            known = np.concatenate([known, found])
        self._gain(worker, known, event.tier)

    def _stored_one(self, worker: Worker, event: BlocksStored) -> bool:
        """The plain cases of one block, which decoding announces all the time; False for others."""
        table, name = self._held.table, _name_of(event.engine_hashes[0])
        row = worker.names.get(name)
        if not row:
            barred = event.tier == "host" and not self._host_extends
            if barred or not len(event.token_ids) or len(table) >= table.max_rows:
                return False
            anchor, salt = self._anchor(worker, event)
            if anchor is None or self._hasher is None:
                return False
            own = self._hasher.extend(anchor, event.token_ids, salt)[0].item()
            row = table.row_of(own)
            if not row:
                row = table.add_one(own, anchor.blocks + 1, salt, 0)
            elif table.sets.bits[table.holders[row]] & 3 << 2 * worker.bit:
                return False
            worker.names.put(name, row)
            self._held.named += 1
        table.touch(row)
        gained = self._held.change_one(row, bit_of(worker, event.tier), present=True)
        if not gained and event.tier == "device":
            worker.copies[row] = worker.copies.get(row, 0) + 1
        return True

    def _place(
        self, worker: Worker, event: BlocksStored, names: UInt64s, rows: Int32s, unknown: Int64s
    ) -> Int32s:
        """Names the unknown blocks of a run: rows that are there, returned, and new ones, held."""
        blind = event.tier == "host" and event.salt is None
        unplaced = "unjoined" if blind else "orphans"
        anchor, salt = self._anchor(worker, event)
        first = 0
        if anchor is None:
            # A run may start at unknown blocks and go on in known ones.
            known = np.flatnonzero(rows)
            first = int(known[0]) + 1 if known.size else len(rows)
            before = int(np.count_nonzero(unknown < first))
            self.counts[unplaced] += before
            unknown = unknown[before:]
            if not unknown.size:
                return rows[:0]
            row = int(rows[first - 1])
            anchor, salt = self._running(row), self._held.table.salt(row)
        if not len(event.token_ids) or (blind and not self._host_extends):
            self.counts[unplaced] += len(unknown)
            return rows[:0]
        assert self._hasher is not None
        tokens = event.token_ids[first * self._hasher.block_tokens :]
        hashes = self._hasher.extend(anchor, tokens, salt)[0]
        own = hashes[unknown - first]
        found = self._held.table.rows_of(own)
        unknown, own, found = self._without_ambiguous(worker, rows, unknown, own, found)
        there: Int32s = found[found != NO_ROW]
        absent = np.flatnonzero(found == NO_ROW)
        self._held.table.touch(there)
        if absent.size:
            depths = (unknown[absent] - first + 1 + anchor.blocks).astype(np.uint32)
            added = self._held.add(there, own[absent], depths, salt, bit_of(worker, event.tier))
            found[absent[: len(added)]] = added
            if len(added) < len(absent):
                # What follows a refused block cannot be placed either.
                cut = int(absent[len(added)])
                self.counts["refused"] += len(unknown) - cut
                unknown, found = unknown[:cut], found[:cut]
                there = there[: cut - len(added)]
        self._held.named -= len(worker.names)
        worker.names.add(names[unknown], found)
        self._held.named += len(worker.names)
        return there

    def _anchor(self, worker: Worker, event: BlocksStored) -> tuple[Running | None, int]:
        """What a run hangs below (None: unknown), and its salt."""
        if event.parent_engine_hash is None:
            return (None, 0) if event.salt is None else (ROOT, event.salt)
        row = worker.names.get(_name_of(event.parent_engine_hash))
        if not row:
            return None, 0
        self._held.table.touch(row)
        # A parent's name already fixes its salt, so a child can have no other.
        return self._running(row), self._held.table.salt(row)

    def _running(self, row: int) -> Running:
        assert self._hasher is not None
        table = self._held.table
        return self._hasher.running(int(table.keys[row]), table.depth(row), table.salt(row))

    def _without_ambiguous(
        self, worker: Worker, rows: Int32s, unknown: Int64s, own: UInt64s, found: Int32s
    ) -> tuple[Int64s, UInt64s, Int32s]:
        """Leaves out blocks that the worker holds under another name, and what follows them."""
        bits, mine = self._held.table.sets.bits, 3 << 2 * worker.bit
        numbers = self._held.table.holders[found]
        taken = [number for number in set(numbers.tolist()) if bits[number] & mine]
        if not taken:
            return unknown, own, found
        doubled = dict(zip(unknown.tolist(), np.isin(numbers, taken).tolist(), strict=True))
        keep, broken = [], False
        for position in range(int(unknown[0]), len(rows)):
            broken = position in doubled and (broken or doubled[position])
            if position in doubled:
                keep.append(not broken)
        self.counts["ambiguous"] += keep.count(False)
        kept = np.array(keep)
        return unknown[kept], own[kept], found[kept]

    def _gain(self, worker: Worker, rows: Int32s, tier: Tier) -> None:
        """Rows of one stored event are held; a device copy more where they already were."""
        if not rows.size:
            return
        bit = bit_of(worker, tier)
        if tier == "device":
            present = self._held.present(rows, bit)
            if present.any() or not rising(rows):
                for row in rows.tolist():
                    if self._held.change_one(row, bit, present=True) == 0:
                        worker.copies[row] = worker.copies.get(row, 0) + 1
                return
        self._held.change(distinct_rows(rows), bit, present=True)

    def removed(self, event: BlocksRemoved) -> None:
        """Blocks are in a tier no more."""
        worker = self._held.workers.get(event.worker)
        if worker is None:
            self.counts["unknown_removals"] += len(event.engine_hashes)
            return
        bit = bit_of(worker, event.tier)
        if len(event.engine_hashes) <= FEW:
            each = [worker.names.get(_name_of(name)) for name in event.engine_hashes]
        else:
            rows = worker.names.values_of(_names_of(event.engine_hashes))
            if not (event.tier == "device" and worker.copies) and rising(rows):
                changed = self._held.change(rows[rows != NO_ROW], bit, present=False)
                self.counts["unknown_removals"] += len(rows) - changed
                return
            each = rows.tolist()
        for row in each:
            spare = worker.copies.get(row, 0) if event.tier == "device" else 0
            if spare > 1:
                worker.copies[row] = spare - 1
            elif spare:
                del worker.copies[row]
            elif not row or self._held.change_one(row, bit, present=False) == 0:
                self.counts["unknown_removals"] += 1


def _name_of(engine_hash: EngineHash) -> int:
    """A 64-bit name for an engine's hash."""
    if isinstance(engine_hash, int) and 0 <= engine_hash <= _MASK:
        return engine_hash ^ _NAME_MARK
    return hash(engine_hash) & _MASK ^ _NAME_MARK


def _names_of(engine_hashes: Sequence[EngineHash]) -> UInt64s:
    try:
        numbers = array("Q", cast("Sequence[int]", engine_hashes))
    except (TypeError, OverflowError):
        return np.array([_name_of(engine_hash) for engine_hash in engine_hashes], dtype=np.uint64)
    return np.frombuffer(numbers, dtype=np.uint64) ^ np.uint64(_NAME_MARK)
