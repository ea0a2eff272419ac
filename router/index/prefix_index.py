"""Who holds which prefix, in which tier: fed by typed KV events, looked up once per request.

Placing: a block is found by the engine's name for it, or by our own hash of its tokens below a
parent that is known, never by guess; what cannot be placed is counted.

Counting: an engine may hold one hash in several device blocks and reports each, so device
presence is reference-counted. A host or disk tier keeps its chunks by hash and holds a key at most
once, so presence there is a set: a repeated announcement needs no second removal. (With chunks of
several blocks, a block that two chunks share is forgotten with the first of them.)

Lookup: one compiled loop goes along a prompt's rows and finds where their holders change; the sets
of holders are looked at only there, and nothing where nobody is left. So holes need no care: they
are where a worker is missing from a set. A binary search would need every worker's contiguous run
to be maintained block by block on each change, and 13 look-ups a worker and tier; one walk answers
for all at once.

Each data-parallel rank of a worker is a cache of its own; the best one counts, since the worker's
balancing among them is not ours. A hybrid model's hits end where all its cache groups have what
they need (`router/index/holders.py`).

Bound: `max_blocks` distinct blocks, as many names, and a share of that in distinct sets of
holders. Beyond it the oldest blocks go; if none can, the new block is refused. Either way the
index knows less, and claims nothing untrue.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from kappa.compiled import compiled
from router.index.block_table import NO_ROW, NO_ROWS, BlockTable, Int32s, Int64s, UInt64s
from router.index.holders import TIER_BITS, Holder, longest_end
from router.index.kv_events import (
    BlocksRemoved,
    BlocksStored,
    EngineHash,
    KVEvent,
    Tier,
    TierCleared,
    WorkerGone,
    WorkerReset,
)
from router.index.prefix_hash import ROOT, HashState, PrefixHasher

# Blocks that are walked before it is checked whether anybody still holds them.
_BATCH = 512
# What Python takes for a worker's objects besides their arrays.
_WORKER_BYTES = 2100
# Blocks no tier holds stay known for a while: a host store is often announced just after the
# device block went, and only the memory of that block says what the engine's hash stands for.
_UNHELD_SHARE = 8
_SETS_SHARE = 32
_FEWEST_SETS = 1024
_MASK = (1 << 64) - 1


class Match(NamedTuple):
    """Leading blocks a worker holds: on the device, then how many further ones in its tiers behind
    that, and how many of these on disk alone."""

    device_blocks: int
    host_blocks: int
    disk_blocks: int = 0


class PrefixIndex:
    """Longest held prefix per worker and tier, within bounded memory.

    Args:
        hasher: must be the one that hashes requests.
        max_blocks: most distinct blocks to keep, and most names (one per block and worker that
            an engine feeds), at least 1; under 64 bytes each, everything counted.

    Raises:
        ValueError: max_blocks below 1.
    """

    def __init__(self, hasher: PrefixHasher, max_blocks: int) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, got {max_blocks}")
        self._hasher, self._max_blocks = hasher, max_blocks
        self._table = BlockTable(max_blocks)
        # The caches, by worker and data-parallel rank.
        self._holders: dict[tuple[str, int], Holder] = {}
        # Places of ranks above 0, each with that of its worker; caches with further groups.
        self._ranks: list[tuple[int, int]] = []
        self._hybrids: list[Holder] = []
        # Places in the sets of holders: how many were ever taken, which are free again, and the
        # device bits of all that are taken.
        self._columns, self._free_columns, self._device_bits = 0, list[int](), 0
        # Device bits of the workers that ever held a block on disk: mostly nobody's.
        self._disk_users = 0
        self._named = 0
        self._counts: Counter[str] = Counter()
        # Compiled now rather than while the first request waits.
        _spread(_bytes_of(0), TIER_BITS, 0, 0, 0, np.empty((3, 0), dtype=np.int64))
        _rising(NO_ROWS)
        Holder(0)

    # ---- lookups

    def match_columns(self, prefix_hashes: UInt64s, most: int | None = None) -> Int64s:
        """Leading blocks on the device, further ones behind it, and those of them on disk alone.

        prefix_hashes: as from `PrefixHasher.prefix_hashes`. most: where a hit of a hybrid model
        ends at the latest, in blocks. By workers' `column`, shape (3, columns). Marks what it found
        as recently used.
        """
        blocks = np.zeros((3, self._columns), dtype=np.int64)
        for workers, found in self._matches(prefix_hashes):
            _spread(_bytes_of(workers), TIER_BITS, *found, blocks)
        if self._hybrids:
            self._end_in_all_groups(prefix_hashes[:most], blocks)
        for rank, worker in self._ranks:
            reach, best = blocks[:2, rank].sum(), blocks[:2, worker].sum()
            if (reach, blocks[0, rank]) > (best, blocks[0, worker]):
                blocks[:, worker] = blocks[:, rank]
        return blocks

    def _end_in_all_groups(self, prefix_hashes: UInt64s, blocks: Int64s) -> None:
        """Shorten hits of hybrid models to where all their cache groups have what they need."""
        found = [
            # Where no group needs the whole prefix, blocks of the others anywhere may do.
            blocks[:, cache.bit].tolist() if cache.heard else [len(prefix_hashes), 0, 0]
            for cache in self._hybrids
        ]
        longest = max(device + behind for device, behind, _ in found)
        if not longest:
            return
        rows, _ = self._table.find(prefix_hashes[:longest])
        numbers, at = np.unique(self._table.holders[rows], return_inverse=True)
        sets = [self._table.sets.bits[number] for number in numbers.tolist()]
        for cache, (device, behind, disk) in zip(self._hybrids, found, strict=True):

            def fitting(limit: int, tier: Tier | None, cache: Holder = cache) -> int:
                return longest_end(
                    min(limit, len(at)),
                    (
                        (np.array([bits & group.bits(tier) > 0 for bits in sets])[at],
                         group.needed, group.stride)
                        for group in cache.groups.values()
                    ),
                )  # fmt: skip

            here = fitting(device, "device") if device else 0
            reach = fitting(device + behind, None) if behind or not cache.heard else here
            # What ends on the device cannot be completed from behind it.
            behind = reach - here if reach > device or not cache.heard else 0
            blocks[:, cache.bit] = here, behind, min(disk, behind)

    def column(self, worker: str) -> int:
        """Where `match_columns` answers for a worker, from now until it is gone."""
        return self._holder(worker, 0).bit

    def workers(self) -> tuple[str, ...]:
        """Workers mentioned and not gone, oldest first."""
        return tuple(dict.fromkeys(worker for worker, _ in self._holders))

    def index_bytes(self) -> int:
        """Memory of all tables, at their present size, in bytes."""
        holders = sum(
            cache.names.nbytes() + 100 * sum(len(one.copies) for one in _with_groups(cache))
            for cache in self._holders.values()
        )
        return self._table.nbytes() + holders + _WORKER_BYTES * len(self._holders)

    def stats(self) -> dict[str, int]:
        """Counts now, and totals since the start.

        Now: `blocks` (kept), `unheld` (kept only for their names), `names` (engine hashes known),
        `holder_sets`, `workers`. Totals, in blocks: `orphans` (stored under an unknown parent),
        `unjoined` (in host, salt unknown), `refused` and `evicted` (by the bound), `ambiguous`
        (second engine hash for one of ours, ignored, and what follows it), `unknown_removals`.
        Further cache groups count in none: most of their blocks are no places where ours end.
        """
        totals = ("orphans", "unjoined", "refused", "ambiguous", "unknown_removals")
        return {
            "blocks": len(self._table),
            "unheld": self._table.unheld,
            "names": self._named,
            "holder_sets": len(self._table.sets),
            "workers": len(self.workers()),
            **{name: self._counts[name] for name in totals},
            "evicted": self._table.evicted,
        }

    def held_blocks(self) -> dict[str, dict[str, int]]:
        """Blocks that each worker holds on the device, in host memory and on disk, as far as they
        are kept here; one that several tiers or ranks hold counts in each, of a hybrid model those
        of the group that needs the whole prefix."""
        sets, counts = self._table.sets, np.zeros((self._columns, TIER_BITS), dtype=np.int64)
        numbers, size = sets.numbers(), -(-self._columns * TIER_BITS // 8)
        for at in range(0, len(numbers), _BATCH):
            some = numbers[at : at + _BATCH]
            packed = b"".join(sets.bits[n].to_bytes(size, "little") for n in some)
            lanes = np.frombuffer(packed, np.uint8).reshape(len(some), size)
            bits = np.unpackbits(lanes, axis=1, count=counts.size, bitorder="little")
            each = np.array([sets.blocks[n] for n in some], dtype=np.int64)
            counts += (each @ bits).reshape(counts.shape)
        held: dict[str, dict[str, int]] = {}
        for (worker, _), holder in self._holders.items():
            tiers = held.setdefault(worker, dict.fromkeys(("device", "host", "disk"), 0))
            for tier, blocks in zip(tiers, counts[holder.bit].tolist(), strict=True):
                tiers[tier] += blocks
        return held

    def _matches(self, prefix_hashes: UInt64s) -> list[tuple[int, Match]]:
        """What workers hold, in groups that hold the same; a group is a set of device bits."""
        table = self._table
        table.next_tick()
        bits = table.sets.bits
        answer: list[tuple[int, Match]] = []
        # Workers whose device run goes on, and those whose run behind it does, by where it began
        # and how much of it they have on disk alone; those who have the last blocks so.
        device, hosts = self._device_bits, list[tuple[int, int, int]]()
        disk_only, since = 0, 0
        at, total, batch, more = 0, len(prefix_hashes), _BATCH, True
        while more and at < total and (device or hosts):
            changes, passed, more = table.walk(prefix_hashes[at : at + batch])
            for start, number in changes:
                held, here = bits[number], at + start
                in_host = held >> 1
                if self._disk_users:
                    hosts = _counted(hosts, disk_only, here - since)
                    disk_only = held >> 2 & ~in_host & self._disk_users
                    in_host, since = in_host | disk_only, here
                if hosts:
                    for group, begin, disk in hosts:
                        if group & ~in_host:
                            answer.append((group & ~in_host, Match(begin, here - begin, disk)))
                    hosts = [(g & in_host, begin, disk) for g, begin, disk in hosts if g & in_host]
                ended = device & ~held
                if ended:
                    device &= held
                    begin = ended & in_host
                    if begin:
                        hosts.append((begin, here, 0))
                    if here and ended != begin:
                        answer.append((ended ^ begin, Match(here, 0)))
                if not device and not hosts:
                    return answer
            at, batch = at + passed, 2 * batch
        if at and device:
            answer.append((device, Match(at, 0)))
        hosts = _counted(hosts, disk_only, at - since)
        answer += ((group, Match(begin, at - begin, disk)) for group, begin, disk in hosts)
        return answer

    # ---- feeding

    def hold(self, worker: str, tier: Tier, prefix_hashes: UInt64s) -> None:
        """Blocks are present in a tier now, in prefix order; for callers that know our hashes.

        Presence only: blocks held twice need one `drop`. Do not mix with events of one worker.
        """
        self._table.next_tick()
        bit = self._bit(self._holder(worker, 0), tier)
        rows, absent = self._table.find(prefix_hashes)
        held = _present(rows, absent)
        if held.size:
            self._table.touch(held)
        if absent:
            depths = np.arange(1, len(prefix_hashes) + 1)
            self._add_absent(rows, prefix_hashes, depths, 0, bit)
        self._table.change(_distinct(held), bit, present=True)
        self._trim()

    def drop(self, worker: str, tier: Tier, prefix_hashes: UInt64s) -> None:
        """Blocks are no longer present in a tier; those that were not do not matter."""
        holder = self._holders.get((worker, 0))
        if holder is not None:
            held = _distinct(_present(*self._table.find(prefix_hashes)))
            self._table.change(held, holder.bits(tier), present=False)
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
            case TierCleared(worker, tier, rank):
                if (worker, rank) in self._holders:
                    self._clear(self._holders[worker, rank], tier)
            case WorkerReset(worker, rank):
                self._holder(worker, rank or 0)
                for place, cache in self._holders.items():
                    if place == (worker, rank) or (rank is None and place[0] == worker):
                        self._clear(cache, None)
            case WorkerGone(worker):
                for place in [place for place in self._holders if place[0] == worker]:
                    cache = self._holders.pop(place)
                    self._clear(cache, None)
                    self._device_bits &= ~cache.bits("device")
                    self._ranks = [pair for pair in self._ranks if pair[0] != cache.bit]
                    self._free(cache)
        self._trim()

    def _holder(self, worker: str, rank: int) -> Holder:
        """The record of a worker's cache, made at its first mention."""
        holder = self._holders.get((worker, rank))
        if holder is None:
            holder = self._holders[worker, rank] = Holder(self._column())
            self._device_bits |= holder.bits("device")
            if rank:
                self._ranks.append((holder.bit, self.column(worker)))
        return holder

    def _group(self, cache: Holder, event: BlocksStored) -> Holder:
        """The record of a further cache group, made at the first block stored in it."""
        group = cache.groups.get(event.group)
        if group is None:
            if not cache.groups:
                self._hybrids.append(cache)
            group = cache.groups[event.group] = Holder(self._column(), cache.names)
        group.need(event.last_tokens, event.block_tokens, self._hasher.block_tokens)
        return group

    def _column(self) -> int:
        if not self._free_columns:
            self._free_columns.append(self._columns)
            self._columns += 1
        return self._free_columns.pop()

    def _free(self, holder: Holder) -> None:
        """Give back the place of a holder that has nothing any more."""
        self._disk_users &= ~holder.bits("device")
        self._free_columns.append(holder.bit)

    def _bit(self, holder: Holder, tier: Tier) -> int:
        """Its bit of a tier in which it is about to hold blocks."""
        if tier == "disk":
            self._disk_users |= holder.bits("device")
        return holder.bits(tier)

    def _check(self, event: BlocksStored) -> None:
        tokens = len(event.token_ids)
        if not tokens or event.group:
            return
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
        holder = self._holder(event.worker, event.rank)
        if event.group:
            holder = self._group(holder, event)
        else:
            holder.heard = True
        names = _keys_of(event.engine_hashes)
        rows, absent = holder.names.find(names)
        known = _present(rows, absent)
        self._table.touch(known)
        if absent:
            before = self._place(holder, event, names, rows)
            known = np.concatenate([known, before]) if known.size else before
        if event.tier != "device":
            bit = self._bit(holder, event.tier)
            self._table.change(_distinct(known), bit, present=True)
        elif known.size:
            self._gain_on_device(holder, known)

    def _removed(self, event: BlocksRemoved) -> None:
        holder = self._holders.get((event.worker, event.rank))
        if holder is not None and event.group:
            holder = holder.groups.get(event.group)
        if holder is None:
            self._counts["unknown_removals"] += 0 if event.group else len(event.engine_hashes)
            return
        rows = _present(*holder.names.find(_keys_of(event.engine_hashes)))
        unknown = len(event.engine_hashes) - len(rows)
        if event.tier == "device" and holder.copies:
            kept = []
            for row in rows.tolist():
                # A spare device copy goes first.
                spare = holder.copies.pop(row, 0)
                if spare > 1:
                    holder.copies[row] = spare - 1
                elif not spare:
                    kept.append(row)
            rows = np.array(kept, dtype=np.int32)
        changed = self._table.change(_distinct(rows), holder.bits(event.tier), present=False)
        if not event.group:
            self._counts["unknown_removals"] += unknown + len(rows) - changed

    def _clear(self, holder: Holder, tier: Tier | None) -> None:
        """A tier of a cache is empty; of no tier: all are, and its names are invalid."""
        self._table.clear_bits(holder.all_bits(tier))
        if tier in ("device", None):
            for one in _with_groups(holder):
                one.copies.clear()
        if tier is None:
            self._named -= len(holder.names)
            holder.forget_names()
            if holder.groups:
                self._hybrids.remove(holder)
            for group in holder.groups.values():
                self._free(group)
            holder.groups.clear()
            holder.heard = False
            self._forget(self._nameless())

    # ---- placing stored blocks

    def _place(self, holder: Holder, event: BlocksStored, names: UInt64s, rows: Int32s) -> Int32s:
        """Names the unknown blocks of a run; returns the rows among them that were there before.

        New rows are held at once.
        """
        unsalted = event.tier != "device" and event.salt is None
        described = len(event.token_ids) > 0
        if event.group:
            # Its blocks may have another size; most are named by the first group.
            described = len(event.token_ids) == len(rows) * self._hasher.block_tokens
        anchor = self._anchor(holder, event, rows) if described else None
        first, running, salt = anchor or (len(rows), ROOT, 0)
        unknown = (rows == NO_ROW).nonzero()[0]
        if first and event.group:
            unknown = unknown[unknown >= first]
        elif first:
            unplaced = int(np.count_nonzero(unknown < first))
            self._counts["unjoined" if unsalted else "orphans"] += unplaced
            unknown = unknown[unplaced:]
        if not unknown.size:
            return NO_ROWS
        tokens = event.token_ids[first * self._hasher.block_tokens :]
        places = unknown - first
        hashes = self._hasher.extend(running, tokens, salt)[places]
        found, absent = self._table.find(hashes)
        before = NO_ROWS
        if absent < len(found):
            clear = self._unambiguous(holder, unknown, found)
            unknown, places, hashes, found = (x[clear] for x in (unknown, places, hashes, found))
            before = found.copy()
            self._table.touch(before[before != NO_ROW])
        depths = places + (1 + running.blocks)
        placed = len(found)
        if not self._add_absent(found, hashes, depths, salt, self._bit(holder, event.tier)):
            # What follows a refused block cannot be placed either.
            placed = int((found == NO_ROW).nonzero()[0][0])
            self._counts["refused"] += len(found) - placed
        self._named -= len(holder.names)
        holder.names.add(names[unknown[:placed]], found[:placed])
        self._named += len(holder.names)
        before = before[:placed]
        return before[before != NO_ROW]

    def _anchor(
        self, holder: Holder, event: BlocksStored, rows: Int32s
    ) -> tuple[int, HashState, int] | None:
        """What the unknown blocks of a run hang below: the first of them, the state before it and
        the salt; None: that is unknown, too."""
        first, parent = 0, NO_ROW
        if event.parent_engine_hash is not None:
            parent = int(holder.names.find(_keys_of((event.parent_engine_hash,)))[0][0])
        elif event.salt is not None:
            return 0, ROOT, event.salt
        if parent == NO_ROW:
            # A run may start at unknown blocks and go on in known ones.
            known = np.flatnonzero(rows)
            if not known.size:
                return None
            first, parent = int(known[0]) + 1, int(rows[known[0]])
        table = self._table
        table.touch(parent)
        # A parent already fixes the salt, so a child can have no other.
        salt = int(table.salt[parent])
        running = self._hasher.running(int(table.keys[parent]), int(table.depth[parent]), salt)
        return first, running, salt

    def _unambiguous(self, holder: Holder, unknown: Int64s, found: Int32s) -> Int64s:
        """Which unknown blocks may be named: not those that the worker holds under another name.

        Nor those that follow one without a known block between.
        """
        doubled = self._table.held_with(found, holder.bits(None))
        if not doubled.any():
            return np.arange(len(found))
        kept, last_broken = [], -1
        for i, (position, twice) in enumerate(zip(unknown.tolist(), doubled.tolist(), strict=True)):
            if twice or last_broken == position - 1 >= 0:
                last_broken = position
            else:
                kept.append(i)
        self._counts["ambiguous"] += len(found) - len(kept)
        return np.array(kept, dtype=np.int64)

    def _gain_on_device(self, holder: Holder, rows: Int32s) -> None:
        """Blocks came to the device: a copy more of those that were there already."""
        times: Int64s | None = None
        if not _rising(rows):
            rows, times = np.unique(rows, return_counts=True)
        bit = holder.bits("device")
        present = self._table.held_with(rows, bit)
        if times is not None or present.any():
            spare = present.astype(np.int64) + (0 if times is None else times - 1)
            for place in np.flatnonzero(spare).tolist():
                row = int(rows[place])
                holder.copies[row] = holder.copies.get(row, 0) + int(spare[place])
        self._table.change(rows[~present], bit, present=True)

    def _add_absent(
        self, rows: Int32s, hashes: UInt64s, depths: Int64s, salt: int, bit: int
    ) -> bool:
        """Fill in rows for absent blocks, held with a bit; False: there was no room for the last.

        Rows touched in this tick are not evicted for them.
        """
        absent = (rows == NO_ROW).nonzero()[0]
        if not absent.size:
            return True
        room, gone = self._table.room_after_eviction(len(absent))
        if gone.size:
            self._evict(gone)
        added = absent[:room]
        if room:
            rows[added] = self._table.add(hashes[added], depths[added], salt, bit)
        return room == len(absent)

    # ---- bounds

    def _trim(self) -> None:
        """Keep what nobody holds, the names and the sets within their shares of the bound."""
        table, most = self._table, self._max_blocks
        most_unheld = most // _UNHELD_SHARE
        if table.unheld > most_unheld:
            self._forget(self._nameless())
            if table.unheld > most_unheld:
                excess = table.unheld - most_unheld + most // (2 * _UNHELD_SHARE)
                table.next_tick()
                self._forget(table.oldest(min(table.unheld, excess)))
        if self._named > most:
            # Names of blocks that their worker holds no more but others do.
            bits = table.sets.bits
            for holder in self._holders.values():
                mine = holder.all_bits(None)
                idle = np.array([n > 0 and not held & mine for n, held in enumerate(bits)])
                self._forget_names(holder, idle[table.holders[holder.names.values]])
        while len(table.sets) > max(_FEWEST_SETS, most // _SETS_SHARE) or self._named > most:
            table.next_tick()
            self._evict(table.oldest(max(1, len(table) // 64)))

    def _evict(self, rows: Int32s) -> None:
        self._table.evicted += len(rows)
        self._forget(rows)

    def _forget(self, rows: Int32s) -> None:
        """Remove rows and all that refers to them."""
        if not rows.size:
            return
        gone = np.zeros(len(self._table.keys), dtype=bool)
        gone[rows] = True
        for holder in self._holders.values():
            self._forget_names(holder, gone[holder.names.values])
            for one in _with_groups(holder):
                for row in [row for row in one.copies if gone[row]]:
                    del one.copies[row]
        self._table.remove(rows)

    def _forget_names(self, holder: Holder, lanes: NDArray[np.bool_]) -> None:
        """Forget the names in those lanes of a worker's table that are chosen."""
        self._named -= len(holder.names)
        holder.names.remove(holder.names.keys_where(lanes))
        self._named += len(holder.names)

    def _nameless(self) -> Int32s:
        """Rows that nobody holds and no engine has named."""
        rows = self._table.unheld_rows()
        named = np.zeros(len(self._table.keys), dtype=bool)
        for holder in self._holders.values() if rows.size else ():
            named[holder.names.values] = True
        nameless: Int32s = rows[~named[rows]]
        return nameless


def _with_groups(cache: Holder) -> tuple[Holder, ...]:
    """A cache and its further groups."""
    return cache, *cache.groups.values()


def _keys_of(engine_hashes: Sequence[EngineHash]) -> UInt64s:
    """64-bit keys for an engine's hashes."""
    try:
        return np.frombuffer(array("Q", cast("Sequence[int]", engine_hashes)), dtype=np.uint64)
    except (TypeError, OverflowError):
        # Bytes, or integers of other sizes.
        keys = [
            h if isinstance(h, int) and 0 <= h <= _MASK else hash(h) & _MASK for h in engine_hashes
        ]
        return np.array(keys, dtype=np.uint64)


def _present(rows: Int32s, absent: int) -> Int32s:
    """The rows that are there, as many as `absent` being NO_ROW."""
    return rows[rows != NO_ROW] if absent else rows


def _distinct(rows: Int32s) -> Int32s:
    """Each row once."""
    distinct: Int32s = rows if _rising(rows) else np.unique(rows)
    return distinct


def _counted(
    runs: list[tuple[int, int, int]], disk_only: int, blocks: int
) -> list[tuple[int, int, int]]:
    """Groups of workers by run, once those among them in `disk_only` have so many blocks more on
    disk alone."""
    if not disk_only:
        return runs
    parts = [(g & disk_only, begin, disk + blocks) for g, begin, disk in runs]
    parts += [(g & ~disk_only, begin, disk) for g, begin, disk in runs]
    return [part for part in parts if part[0]]


def _bytes_of(workers: int) -> NDArray[np.uint8]:
    """Bits of workers as bytes, the lowest first."""
    size = workers.bit_length() // 8 + 1
    return np.frombuffer(bytearray(workers.to_bytes(size, "little")), np.uint8)


@compiled
def _rising(rows: Int32s) -> bool:
    """Whether each row is above the one before."""
    last = 0
    for row in rows:
        if row <= last:
            return False
        last = row
    return True


@compiled
def _spread(
    bits: NDArray[np.uint8], width: int, device: int, host: int, disk: int, blocks: Int64s
) -> None:
    """Fill in what those have whose device bit is set: rows as of a `Match`, a column each.
    width: bits of a worker."""
    for worker in range(blocks.shape[1]):
        place = width * worker
        if place >> 3 >= len(bits):
            return
        if bits[place >> 3] >> (place & 7) & 1:
            blocks[0, worker], blocks[1, worker], blocks[2, worker] = device, host, disk
