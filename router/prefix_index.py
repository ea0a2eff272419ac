"""Who holds which prefix, in which tier: fed by typed KV events, asked once per request.

Counting: an engine may hold one hash in several device blocks and reports each, so device
presence is reference-counted. A host tier keeps its chunks by hash and holds a key at most once,
so host presence is a set: a repeated announcement needs no second removal. (With host chunks of
several blocks, a block that two chunks share is forgotten with the first of them.)

Asking: a prompt's blocks are compared with runs of rows, and their holders with the sets of the
runs; work is done only where the holders change, and ends where nobody is left. So holes need no
care: they are where a worker is missing from a set. A binary search would need every worker's
contiguous run to be maintained block by block on each change, and 13 look-ups a worker and tier;
one comparison of the whole prompt answers for all at once: 30 µs for 8,000 blocks and 8 workers,
70 µs if 1,000 hold its beginning, 2 µs if nobody does.

Bound: `max_blocks` distinct blocks, as many names, and a share of that in distinct sets of
holders. Beyond it the oldest blocks go; if none can, the new block is refused. Either way the
index knows less, and claims nothing untrue.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from router.block_table import NO_ROW, BlockTable
from router.kv_events import (
    BlocksRemoved,
    BlocksStored,
    EngineHash,
    KVEvent,
    Tier,
    TierCleared,
    WorkerGone,
    WorkerReset,
)
from router.prefix_hash import ROOT, PrefixHasher, Running, UInt64s
from router.tag_table import Homes, Int32s, Int64s, NameTable

# Blocks no tier holds stay known for a while: a host store is often announced just after the
# device block went, and only the memory of that block says what the engine's hash stands for.
_UNHELD_SHARE = 8
_SETS_SHARE = 32
_FEWEST_SETS = 1024
# So few blocks are faster one by one.
_FEW = 12
_BATCH = 128
# What Python takes for a worker's objects besides their arrays.
_WORKER_BYTES = 2100
_MASK = (1 << 64) - 1
# Engines may number blocks from 0, and an empty lane of a table has name 0.
_NAME_MARK = 0x9E3779B97F4A7C15


class Match(NamedTuple):
    """Leading blocks a worker holds: on the device, then how many further ones in host."""

    device_blocks: int
    host_blocks: int


class _Worker:
    """A worker's place in sets of holders, its engine's names, and its spare device copies."""

    __slots__ = ("bit", "copies", "names")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.names = NameTable(0)
        self.copies: dict[int, int] = {}


class PrefixIndex:
    """Longest held prefix per worker and tier, within bounded memory.

    Args:
        hasher: must be the one that hashes requests; None if only `hold` and `drop` feed it.
        max_blocks: most distinct blocks to keep, and most names (one per block and worker that
            an engine feeds), at least 1; under 64 bytes each, everything counted.
        host_extends: accept a host block never seen on the device when its parent is known (it
            inherits the parent's salt). Set False for multimodal pools: host events do not say
            which blocks hold images, so token ids alone would not identify them.

    Raises:
        ValueError: max_blocks below 1.
    """

    def __init__(
        self, hasher: PrefixHasher | None, max_blocks: int, host_extends: bool = True
    ) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, got {max_blocks}")
        self._hasher = hasher
        self._host_extends = host_extends
        self._max_blocks = max_blocks
        self._table = BlockTable(max_blocks)
        self._workers: dict[str, _Worker] = {}
        self._by_bit: list[str] = []
        self._free_bits: list[int] = []
        self._device_bits = 0
        self._named = 0
        self._counts = dict.fromkeys(
            ("orphans", "unjoined", "refused", "ambiguous", "unknown_removals"), 0
        )

    # ---- asking

    def match(self, prefix_hashes: UInt64s, worker: str) -> Match:
        """Longest prefix `worker` holds; `prefix_hashes` as from `PrefixHasher.prefix_hashes`.

        An unknown worker holds nothing. Marks what it found as recently used.
        """
        record = self._workers.get(worker)
        if record is None:
            return Match(0, 0)
        groups = self._matches(prefix_hashes, 1 << 2 * record.bit)
        return groups[0][1] if groups else Match(0, 0)

    def match_all(self, prefix_hashes: UInt64s) -> dict[str, Match]:
        """`match` for every worker that holds anything of this prompt."""
        answer: dict[str, Match] = {}
        for workers, found in self._matches(prefix_hashes, self._device_bits):
            if workers.bit_count() > _FEW:
                named = compress(self._by_bit, _unpacked(workers).tolist())
                answer.update(dict.fromkeys(named, found))
                continue
            while workers:
                lowest = workers & -workers
                answer[self._by_bit[lowest.bit_length() >> 1]] = found
                workers ^= lowest
        return answer

    def match_columns(self, prefix_hashes: UInt64s) -> tuple[Int64s, Int64s]:
        """`match_all` as two columns, blocks on the device and in host, by `column` of a worker."""
        blocks = np.zeros((2, len(self._by_bit)), dtype=np.int64)
        for workers, found in self._matches(prefix_hashes, self._device_bits):
            which = np.flatnonzero(_unpacked(workers))
            blocks[0, which], blocks[1, which] = found
        return blocks[0], blocks[1]

    def column(self, worker: str) -> int:
        """Where `match_columns` answers for a worker, from now until it is gone."""
        return self._worker(worker).bit

    def workers(self) -> tuple[str, ...]:
        """Workers heard from and not gone, oldest first."""
        return tuple(self._workers)

    def size_blocks(self) -> int:
        """Distinct blocks kept, at most max_blocks."""
        return len(self._table)

    def index_bytes(self) -> int:
        """Memory of all tables, at their present size, in bytes."""
        workers = sum(w.names.nbytes() + 100 * len(w.copies) for w in self._workers.values())
        return self._table.nbytes() + workers + _WORKER_BYTES * len(self._workers)

    def stats(self) -> dict[str, int]:
        """Counts now, and totals since the start.

        Now: `blocks` (kept), `unheld` (kept only for their names), `names` (engine hashes known),
        `holder_sets`, `workers`. Totals, in blocks: `orphans` (stored under an unknown parent),
        `unjoined` (in host, salt unknown), `refused` and `evicted` (by the bound), `ambiguous`
        (second engine hash for one of ours, ignored, and what follows it), `unknown_removals`.
        """
        table = self._table
        now = {
            "blocks": len(table),
            "unheld": table.unheld,
            "names": self._named,
            "holder_sets": len(table.sets),
            "workers": len(self._workers),
        }
        return now | self._counts | {"evicted": table.evicted}

    # ---- feeding

    def hold(self, worker: str, tier: Tier, prefix_hashes: UInt64s) -> None:
        """Blocks are present in a tier now, in prefix order; for callers that know our hashes.

        Presence only: blocks held twice need one `drop`. Do not mix with events of one worker.
        """
        table = self._table
        table.next_tick()
        bit = _bit(self._worker(worker), tier)
        if len(prefix_hashes) <= _FEW and len(table) + _FEW <= table.max_rows:
            for depth, key in enumerate(prefix_hashes.tolist(), 1):
                row = table.row_of(key)
                if row:
                    table.touch(row)
                    self._change_one(row, bit, present=True)
                else:
                    table.add_one(key, depth, 0, bit)
        elif len(prefix_hashes):
            self._hold_many(prefix_hashes, bit)
        self._trim()

    def _hold_many(self, prefix_hashes: UInt64s, bit: int) -> None:
        table = self._table
        homes = table.homes(prefix_hashes)
        rows = table.rows_of(prefix_hashes, homes)
        present = np.flatnonzero(rows)
        if present.size == len(rows):
            table.touch(rows)
            self._change(_distinct(rows), bit, present=True)
            return
        if not present.size:
            depths = np.arange(1, len(rows) + 1, dtype=np.uint32)
            self._add(rows, prefix_hashes, depths, 0, bit, homes)
            return
        absent = np.flatnonzero(rows == NO_ROW)
        self._add(rows, prefix_hashes[absent], (absent + 1).astype(np.uint32), 0, bit)
        self._change(_distinct(rows[present]), bit, present=True)

    def drop(self, worker: str, tier: Tier, prefix_hashes: UInt64s) -> None:
        """Blocks are no longer present in a tier; those that were not are passed over."""
        record = self._workers.get(worker)
        if record is None:
            return
        bit = _bit(record, tier)
        if len(prefix_hashes) <= _FEW:
            for key in prefix_hashes.tolist():
                row = self._table.row_of(key)
                if row:
                    self._change_one(row, bit, present=False)
        else:
            self._change(_distinct(self._table.rows_of(prefix_hashes)), bit, present=False)
        self._trim()

    def handle(self, event: KVEvent) -> None:
        """Apply one event. Blocks that cannot be placed are counted, never guessed.

        Raises:
            ValueError: stored blocks of another size than the hasher's, or a token count that
                is not blocks times block size; nothing is changed then.
        """
        self._table.next_tick()
        match event:
            case BlocksStored():
                self._check(event)
                self._stored(event)
            case BlocksRemoved():
                self._removed(event)
            case TierCleared(worker, tier):
                if worker in self._workers:
                    self._clear(self._workers[worker], tier)
            case WorkerReset(worker):
                self._clear(self._worker(worker), None)
            case WorkerGone(worker):
                self._gone(worker)
        self._trim()

    # ---- asking, inside

    def _matches(self, prefix_hashes: UInt64s, asked: int) -> list[tuple[int, Match]]:
        """What workers hold, in groups, of those whose device bit is in `asked`."""
        table = self._table
        table.next_tick()
        bits = table.sets.bits
        answer: list[tuple[int, Match]] = []
        # Workers whose device run goes on, and those whose host run does, by where it began.
        device, hosts = asked, list[tuple[int, int]]()
        at, total, batch = 0, len(prefix_hashes), _BATCH
        while at < total and (device or hosts):
            rows, batch = self._next_rows(prefix_hashes[at:], batch)
            if rows is None:
                break
            holders = table.holders[rows]
            table.touch(rows)
            starts = [0, *(np.flatnonzero(holders[1:] != holders[:-1]) + 1).tolist()]
            for start in starts:
                held = bits[holders[start]]
                here = at + start
                in_host = held >> 1
                if hosts:
                    hosts = self._follow(hosts, in_host, here, answer)
                ended = device & ~held
                if ended:
                    device &= held
                    begin = ended & in_host
                    if begin:
                        hosts.append((begin, here))
                    if here and ended != begin:
                        answer.append((ended ^ begin, Match(here, 0)))
                if not device and not hosts:
                    return answer
            at += len(holders)
        if at and device:
            answer.append((device, Match(at, 0)))
        answer += ((group, Match(begin, at - begin)) for group, begin in hosts)
        return answer

    def _next_rows(self, keys: UInt64s, batch: int) -> tuple[slice | Int32s | None, int]:
        """Rows of the first of these blocks, as many as come at once, and the next batch size.

        Neighbouring rows cost one comparison; where rows are scattered (blocks that came one by
        one), `batch` blocks are looked up together.
        """
        table = self._table
        row = table.row_of(int(keys[0]))
        if not row:
            return None, batch
        length = table.run(row, keys)
        if length >= min(len(keys), _FEW):
            return slice(row, row + length), batch
        rows = table.rows_of(keys[:batch])
        absent = rows == NO_ROW
        if absent.any():
            rows = rows[: int(absent.argmax())]
        return rows, 2 * batch

    @staticmethod
    def _follow(
        hosts: list[tuple[int, int]], in_host: int, here: int, answer: list[tuple[int, Match]]
    ) -> list[tuple[int, int]]:
        """The host runs that go on at block `here`; adds those that do not to the answer."""
        going = []
        for group, begin in hosts:
            still = group & in_host
            if still:
                going.append((still, begin))
            if still != group:
                answer.append((group ^ still, Match(begin, here - begin)))
        return going

    # ---- feeding, inside

    def _worker(self, name: str) -> _Worker:
        record = self._workers.get(name)
        if record is None:
            bit = self._free_bits.pop() if self._free_bits else len(self._by_bit)
            if bit == len(self._by_bit):
                self._by_bit.append(name)
            self._by_bit[bit] = name
            self._device_bits |= 1 << 2 * bit
            record = self._workers[name] = _Worker(bit)
        return record

    def _check(self, event: BlocksStored) -> None:
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

    def _stored(self, event: BlocksStored) -> None:
        worker = self._worker(event.worker)
        if len(event.engine_hashes) == 1 and self._stored_one(worker, event):
            return
        names = _names_of(event.engine_hashes)
        rows = worker.names.values_of(names)
        self._table.touch(rows)
        unknown = np.flatnonzero(rows == NO_ROW)
        known = rows[rows != NO_ROW] if unknown.size else rows
        if unknown.size:
            found = self._place(worker, event, names, rows, unknown)
            known = np.concatenate([known, found])
        self._gain(worker, known, event.tier)

    def _stored_one(self, worker: _Worker, event: BlocksStored) -> bool:
        """The plain cases of one block, which decoding announces all the time; False for others."""
        table, name = self._table, _name_of(event.engine_hashes[0])
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
            self._named += 1
        table.touch(row)
        gained = self._change_one(row, _bit(worker, event.tier), present=True)
        if not gained and event.tier == "device":
            worker.copies[row] = worker.copies.get(row, 0) + 1
        return True

    def _place(
        self, worker: _Worker, event: BlocksStored, names: UInt64s, rows: Int32s, unknown: Int64s
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
            self._counts[unplaced] += before
            unknown = unknown[before:]
            if not unknown.size:
                return rows[:0]
            row = int(rows[first - 1])
            anchor, salt = self._running(row), self._table.salt(row)
        if not len(event.token_ids) or (blind and not self._host_extends):
            self._counts[unplaced] += len(unknown)
            return rows[:0]
        assert self._hasher is not None
        tokens = event.token_ids[first * self._hasher.block_tokens :]
        hashes = self._hasher.extend(anchor, tokens, salt)[0]
        own = hashes[unknown - first]
        found = self._table.rows_of(own)
        unknown, own, found = self._without_ambiguous(worker, rows, unknown, own, found)
        there: Int32s = found[found != NO_ROW]
        absent = np.flatnonzero(found == NO_ROW)
        self._table.touch(there)
        if absent.size:
            depths = (unknown[absent] - first + 1 + anchor.blocks).astype(np.uint32)
            added = self._add(there, own[absent], depths, salt, _bit(worker, event.tier))
            found[absent[: len(added)]] = added
            if len(added) < len(absent):
                # What follows a refused block cannot be placed either.
                cut = int(absent[len(added)])
                self._counts["refused"] += len(unknown) - cut
                unknown, found = unknown[:cut], found[:cut]
                there = there[: cut - len(added)]
        self._named -= len(worker.names)
        worker.names.add(names[unknown], found)
        self._named += len(worker.names)
        return there

    def _anchor(self, worker: _Worker, event: BlocksStored) -> tuple[Running | None, int]:
        """What a run hangs below (None: unknown), and its salt."""
        if event.parent_engine_hash is None:
            return (None, 0) if event.salt is None else (ROOT, event.salt)
        row = worker.names.get(_name_of(event.parent_engine_hash))
        if not row:
            return None, 0
        self._table.touch(row)
        # A parent's name already fixes its salt, so a child can have no other.
        return self._running(row), self._table.salt(row)

    def _running(self, row: int) -> Running:
        assert self._hasher is not None
        table = self._table
        return self._hasher.running(int(table.keys[row]), table.depth(row), table.salt(row))

    def _without_ambiguous(
        self, worker: _Worker, rows: Int32s, unknown: Int64s, own: UInt64s, found: Int32s
    ) -> tuple[Int64s, UInt64s, Int32s]:
        """Leaves out blocks that the worker holds under another name, and what follows them."""
        bits, mine = self._table.sets.bits, 3 << 2 * worker.bit
        numbers = self._table.holders[found]
        taken = [number for number in set(numbers.tolist()) if bits[number] & mine]
        if not taken:
            return unknown, own, found
        doubled = dict(zip(unknown.tolist(), np.isin(numbers, taken).tolist(), strict=True))
        keep, broken = [], False
        for position in range(int(unknown[0]), len(rows)):
            broken = position in doubled and (broken or doubled[position])
            if position in doubled:
                keep.append(not broken)
        self._counts["ambiguous"] += keep.count(False)
        kept = np.array(keep)
        return unknown[kept], own[kept], found[kept]

    def _add(
        self,
        keep: Int32s,
        keys: UInt64s,
        depths: NDArray[np.uint32],
        salt: int,
        bit: int,
        homes: Homes | None = None,
    ) -> Int32s:
        """Rows for absent blocks, held with a bit, for as many as there is room beside `keep`."""
        table = self._table
        if len(table) + len(keys) <= table.max_rows:
            table.touch(keep)
            return table.add(keys, depths, salt, bit, homes)
        table.touch(keep)
        room, gone = table.room_after_eviction(len(keys))
        table.evicted += len(gone)
        self._forget(gone)
        if not room:
            return keep[:0]
        return table.add(keys[:room], depths[:room], salt, bit)

    def _gain(self, worker: _Worker, rows: Int32s, tier: Tier) -> None:
        """Rows of one stored event are held; a device copy more where they already were."""
        if not rows.size:
            return
        bit = _bit(worker, tier)
        if tier == "device":
            present = self._present(rows, bit)
            if present.any() or not _rising(rows):
                for row in rows.tolist():
                    if self._change_one(row, bit, present=True) == 0:
                        worker.copies[row] = worker.copies.get(row, 0) + 1
                return
        self._change(_distinct(rows), bit, present=True)

    def _removed(self, event: BlocksRemoved) -> None:
        worker = self._workers.get(event.worker)
        if worker is None:
            self._counts["unknown_removals"] += len(event.engine_hashes)
            return
        bit = _bit(worker, event.tier)
        if len(event.engine_hashes) <= _FEW:
            each = [worker.names.get(_name_of(name)) for name in event.engine_hashes]
        else:
            rows = worker.names.values_of(_names_of(event.engine_hashes))
            if not (event.tier == "device" and worker.copies) and _rising(rows):
                changed = self._change(rows[rows != NO_ROW], bit, present=False)
                self._counts["unknown_removals"] += len(rows) - changed
                return
            each = rows.tolist()
        for row in each:
            spare = worker.copies.get(row, 0) if event.tier == "device" else 0
            if spare > 1:
                worker.copies[row] = spare - 1
            elif spare:
                del worker.copies[row]
            elif not row or self._change_one(row, bit, present=False) == 0:
                self._counts["unknown_removals"] += 1

    def _present(self, rows: Int32s, bit: int) -> NDArray[np.bool_]:
        """Which rows are held with this bit."""
        numbers, bits = self._table.holders[rows], self._table.sets.bits
        having = [number for number in set(numbers.tolist()) if bits[number] & bit]
        return np.isin(numbers, having) if having else np.zeros(len(rows), dtype=bool)

    def _change(self, rows: Int32s, bit: int, *, present: bool) -> int:
        """Add a bit to the sets of distinct rows, or take it; returns how many rows changed."""
        if not rows.size:
            return 0
        holders, sets = self._table.holders, self._table.sets
        numbers = holders[rows]
        first = int(numbers[0])
        if (numbers == first).all():
            new = self._moved(first, bit, len(rows), present)
            if new == first:
                return 0
            holders[rows] = new
            return len(rows)
        distinct, inverse, counts = np.unique(numbers, return_inverse=True, return_counts=True)
        moved, changed = [], 0
        # A set that loses its last block is gone, and its number may come again at once; so the
        # old sets are kept until all rows have moved.
        old, each = distinct.tolist(), counts.tolist()
        for number in old:
            sets.blocks[number] += 1
        for number, count in zip(old, each, strict=True):
            moved.append(self._moved(number, bit, count, present))
            changed += count if moved[-1] != number else 0
        for number in old:
            sets.leave(number, 1)
        holders[rows] = np.array(moved, dtype=np.int32)[inverse]
        return changed

    def _change_one(self, row: int, bit: int, *, present: bool) -> int:
        """`_change` for one row."""
        holders = self._table.holders
        old = int(holders[row])
        new = self._moved(old, bit, 1, present)
        if new == old:
            return 0
        holders[row] = new
        return 1

    def _moved(self, number: int, bit: int, blocks: int, present: bool) -> int:
        """The set with a bit more or less, to which some blocks of a set go."""
        bits = self._table.sets.bits[number]
        changed = bits | bit if present else bits & ~bit
        return number if changed == bits else self._table.sets.move(number, changed, blocks)

    # ---- forgetting

    def _clear(self, worker: _Worker, tier: Tier | None) -> None:
        """A tier of a worker is empty; both, and its names are void."""
        mask = _bit(worker, tier) if tier else 3 << 2 * worker.bit
        table = self._table
        new = np.arange(len(table.sets.bits), dtype=np.int32)
        for number in table.sets.numbers():
            bits = table.sets.bits[number]
            if bits & mask:
                new[number] = table.sets.move(number, bits & ~mask, table.sets.blocks[number])
        table.holders = new[table.holders]
        if tier != "host":
            worker.copies.clear()
        if tier is None:
            self._named -= len(worker.names)
            worker.names = NameTable(0)
            self._forget(self._nameless())

    def _gone(self, name: str) -> None:
        worker = self._workers.pop(name, None)
        if worker is not None:
            self._clear(worker, None)
            self._device_bits &= ~(1 << 2 * worker.bit)
            self._free_bits.append(worker.bit)

    def _trim(self) -> None:
        """Keep what nobody holds, the names and the sets within their shares of the bound."""
        table = self._table
        if table.unheld > self._max_blocks // _UNHELD_SHARE:
            self._forget(self._nameless())
            excess = table.unheld - self._max_blocks // _UNHELD_SHARE
            if excess > 0:
                excess = min(table.unheld, excess + self._max_blocks // (2 * _UNHELD_SHARE))
                table.next_tick()
                self._forget(table.oldest(excess))
        most_sets = max(_FEWEST_SETS, self._max_blocks // _SETS_SHARE)
        if self._named > self._max_blocks:
            self._forget_idle_names()
        while len(table.sets) > most_sets or self._named > self._max_blocks:
            table.next_tick()
            gone = table.oldest(max(1, len(table) // 64))
            table.evicted += len(gone)
            self._forget(gone)

    def _nameless(self) -> Int32s:
        """Rows that nobody holds and no engine has named."""
        rows = self._table.unheld_rows()
        if not rows.size:
            return rows
        named = np.zeros(len(self._table.keys), dtype=bool)
        for worker in self._workers.values():
            if len(worker.names):
                named[worker.names.values] = True
        nameless: Int32s = rows[~named[rows]]
        return nameless

    def _forget_idle_names(self) -> None:
        """Forget names of blocks that their worker holds no more but others do."""
        bits, holders = self._table.sets.bits, self._table.holders
        for worker in self._workers.values():
            lanes = worker.names.filled()
            if lanes.size:
                mine = 3 << 2 * worker.bit
                keeps = np.array(
                    [not number or held & mine != 0 for number, held in enumerate(bits)]
                )
                idle = lanes[~keeps[holders[worker.names.values[lanes]]]]
                worker.names.clear_lanes(idle)
                self._named -= len(idle)

    def _forget(self, rows: Int32s) -> None:
        """Remove rows and all that refers to them."""
        if not rows.size:
            return
        gone = np.zeros(len(self._table.keys), dtype=bool)
        gone[rows] = True
        for worker in self._workers.values():
            if len(worker.names):
                lanes = np.flatnonzero(gone[worker.names.values])
                worker.names.clear_lanes(lanes)
                self._named -= len(lanes)
            for row in [row for row in worker.copies if gone[row]]:
                del worker.copies[row]
        self._table.remove(rows)


def _bit(worker: _Worker, tier: Tier) -> int:
    """A worker's bit in the sets of holders."""
    return 1 << 2 * worker.bit if tier == "device" else 2 << 2 * worker.bit


def _unpacked(workers: int) -> NDArray[np.uint8]:
    """Which device bits are set, by worker."""
    raw = np.frombuffer(workers.to_bytes(workers.bit_length() // 8 + 1, "little"), np.uint8)
    return np.unpackbits(raw, bitorder="little")[::2]


def _rising(rows: Int32s) -> bool:
    return bool((rows[1:] > rows[:-1]).all())


def _distinct(rows: Int32s) -> Int32s:
    """Each row once, without NO_ROW."""
    if rows.size and rows[0] != NO_ROW and _rising(rows):
        return rows
    distinct: Int32s = np.unique(rows[rows != NO_ROW])
    return distinct


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
