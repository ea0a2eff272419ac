"""The index of held prefixes by worker and tier: fed by KV events, looked up once per request.

Placing: a block is found by the engine's name for it, or by our own hash of its tokens below a
parent that is known, never by guess; what cannot be placed is counted.

Counting: an engine may hold one hash in several device blocks and reports each, so device
presence is reference-counted. A host or disk tier keeps its chunks by hash and holds a key at most
once, so presence there is a set: a repeated announcement needs no second removal. (With chunks of
several blocks, a block that two chunks share is forgotten with the first of them.)

Looking up a prompt: `router/kappa_router/index/lookup.py`.

Each data-parallel rank of a worker is a cache of its own; the best one counts, since the worker's
balancing among them is not ours. A hybrid model's hits end where all its cache groups have what
they need (`router/kappa_router/index/holders.py`).

Bound: `max_blocks` distinct blocks, as many names, and a share of that in distinct sets of
holders. Beyond it the oldest blocks go; if none can, the new block is refused. Either way the
index knows less, and claims nothing untrue.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import cast

import numpy as np

from kappa_router.index import lookup
from kappa_router.index.block_table import (
    NO_ROW,
    NO_ROWS,
    BlockTable,
    Int64s,
    distinct,
    is_sorted,
    present,
)
from kappa_router.index.hash_table import Int32s, UInt64s
from kappa_router.index.holders import Holder, Holders
from kappa_router.index.kv_event_types import (
    BlocksRemoved,
    BlocksStored,
    EngineHash,
    KVEvent,
    Tier,
    TierCleared,
    WorkerGone,
    WorkerReset,
)
from kappa_router.index.prefix_hash import ROOT, HashState, PrefixHasher

# Blocks no tier holds stay known for a while: a host store is often announced just after the
# device block went, and only the memory of that block says what the engine's hash stands for.
_UNHELD_SHARE = 8
_SETS_SHARE = 32
_FEWEST_SETS = 1024
_MASK = (1 << 64) - 1


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
        self._holders = Holders()
        self._counts: Counter[str] = Counter()
        # Compiled now rather than while the first request waits.
        lookup.compile_loops()
        is_sorted(NO_ROWS)
        Holder(0)

    # ---- lookups

    def match_columns(self, prefix_hashes: UInt64s, most: int | None = None) -> Int64s:
        """Leading blocks on the device, further ones behind it, and those of them on disk alone.

        prefix_hashes: as from `PrefixHasher.prefix_hashes`. most: where a hit of a hybrid model
        ends at the latest, in blocks. By workers' `column`, shape (3, columns). Marks what it found
        as recently used.
        """
        self._table.next_tick()
        blocks = np.zeros((3, self._holders.columns), dtype=np.int64)
        lookup.match(self._table, self._holders, prefix_hashes, blocks)
        if self._holders.hybrids:
            lookup.end_in_all_groups(self._table, self._holders, prefix_hashes[:most], blocks)
        for rank, worker in self._holders.ranks:
            reach, best = blocks[:2, rank].sum(), blocks[:2, worker].sum()
            if (reach, blocks[0, rank]) > (best, blocks[0, worker]):
                blocks[:, worker] = blocks[:, rank]
        return blocks

    def column(self, worker: str) -> int:
        """The column of a worker in `match_columns`, from now until it is gone."""
        return self._holders.made(worker, 0).bit

    def workers(self) -> tuple[str, ...]:
        """Workers mentioned and not gone, oldest first."""
        return tuple(dict.fromkeys(worker for worker, _ in self._holders.by_place))

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
            "names": self._holders.named,
            "holder_sets": len(self._table.sets),
            "workers": len(self.workers()),
            **{name: self._counts[name] for name in totals},
            "evicted": self._table.evicted,
        }

    def held_blocks(self) -> dict[str, dict[str, int]]:
        """Blocks that each worker holds on the device, in host memory and on disk, as far as they
        are kept here; one that several tiers or ranks hold counts in each, of a hybrid model those
        of the group that needs the whole prefix."""
        counts = lookup.held_blocks(self._table, self._holders.columns)
        held: dict[str, dict[str, int]] = {}
        for (worker, _), holder in self._holders.by_place.items():
            tiers = held.setdefault(worker, dict.fromkeys(("device", "host", "disk"), 0))
            for tier, blocks in zip(tiers, counts[holder.bit].tolist(), strict=True):
                tiers[tier] += blocks
        return held

    # ---- feeding

    def hold(self, worker: str, tier: Tier, prefix_hashes: UInt64s) -> None:
        """Blocks are present in a tier now, in prefix order; for callers that know our hashes.

        Presence only: blocks held twice need one `drop`. Do not mix with events of one worker.
        """
        self._table.next_tick()
        bit = self._holders.bit(self._holders.made(worker, 0), tier)
        rows, absent = self._table.find(prefix_hashes)
        held = present(rows, absent)
        if held.size:
            self._table.touch(held)
        if absent:
            depths = np.arange(1, len(prefix_hashes) + 1)
            self._add_absent(rows, prefix_hashes, depths, 0, bit)
        self._table.change(distinct(held), bit, present=True)
        self._trim()

    def drop(self, worker: str, tier: Tier, prefix_hashes: UInt64s) -> None:
        """Blocks are no longer present in a tier; those that were not do not matter."""
        holder = self._holders.by_place.get((worker, 0))
        if holder is not None:
            held = distinct(present(*self._table.find(prefix_hashes)))
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
                if (worker, rank) in self._holders.by_place:
                    self._clear(self._holders.by_place[worker, rank], tier)
            case WorkerReset(worker, rank):
                here = self._holders.made(worker, rank or 0)
                for cache in self._holders.of_worker(worker) if rank is None else [here]:
                    self._clear(cache, None)
            case WorkerGone(worker):
                for cache in self._holders.of_worker(worker):
                    self._clear(cache, None)
                self._holders.remove(worker)
        self._trim()

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
        holder = self._holders.made(event.worker, event.rank)
        if event.group:
            holder = self._holders.group(holder, event.group)
            holder.need(event.last_tokens, event.block_tokens, self._hasher.block_tokens)
        else:
            holder.heard = True
        names = _keys_of(event.engine_hashes)
        rows, absent = holder.names.find(names)
        known = present(rows, absent)
        self._table.touch(known)
        if absent:
            before = self._insert_run(holder, event, names, rows)
            known = np.concatenate([known, before]) if known.size else before
        if event.tier != "device":
            bit = self._holders.bit(holder, event.tier)
            self._table.change(distinct(known), bit, present=True)
        elif known.size:
            self._add_device_copies(holder, known)

    def _removed(self, event: BlocksRemoved) -> None:
        holder = self._holders.by_place.get((event.worker, event.rank))
        if holder is not None and event.group:
            holder = holder.groups.get(event.group)
        if holder is None:
            self._counts["unknown_removals"] += 0 if event.group else len(event.engine_hashes)
            return
        rows = present(*holder.names.find(_keys_of(event.engine_hashes)))
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
        changed = self._table.change(distinct(rows), holder.bits(event.tier), present=False)
        if not event.group:
            self._counts["unknown_removals"] += unknown + len(rows) - changed

    def _clear(self, holder: Holder, tier: Tier | None) -> None:
        """A tier of a cache is empty; of no tier: all are, and its names are invalid."""
        self._table.clear_bits(holder.all_bits(tier))
        if tier in ("device", None):
            for one in holder.with_groups():
                one.copies.clear()
        if tier is None:
            self._holders.reset(holder)
            self._delete_rows(self._unreferenced_rows())

    # ---- placing stored blocks

    def _insert_run(
        self, holder: Holder, event: BlocksStored, names: UInt64s, rows: Int32s
    ) -> Int32s:
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
        if not self._add_absent(found, hashes, depths, salt, self._holders.bit(holder, event.tier)):
            # What follows a refused block cannot be placed either.
            placed = int((found == NO_ROW).nonzero()[0][0])
            self._counts["refused"] += len(found) - placed
        self._holders.add_names(holder, names[unknown[:placed]], found[:placed])
        before = before[:placed]
        return before[before != NO_ROW]

    def _anchor(
        self, holder: Holder, event: BlocksStored, rows: Int32s
    ) -> tuple[int, HashState, int] | None:
        """The place of a run's unknown blocks: the first of them, the state before it and the salt;
        None: that is unknown, too."""
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
        """The unknown blocks that may be named: not those that the worker holds under another name,
        nor those that follow one without a known block between."""
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

    def _add_device_copies(self, holder: Holder, rows: Int32s) -> None:
        """Blocks came to the device: a copy more of those that were there already."""
        times: Int64s | None = None
        if not is_sorted(rows):
            rows, times = np.unique(rows, return_counts=True)
        bit = holder.bits("device")
        already = self._table.held_with(rows, bit)
        if times is not None or already.any():
            spare = already.astype(np.int64) + (0 if times is None else times - 1)
            for place in np.flatnonzero(spare).tolist():
                row = int(rows[place])
                holder.copies[row] = holder.copies.get(row, 0) + int(spare[place])
        self._table.change(rows[~already], bit, present=True)

    def _add_absent(
        self, rows: Int32s, hashes: UInt64s, depths: Int64s, salt: int, bit: int
    ) -> bool:
        """Fill in rows for absent blocks, held with a bit; False: there was no room for the last.
        Rows touched in this tick are not evicted for them."""
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
        """Keep unheld rows, names and sets within their shares of the bound."""
        table, most = self._table, self._max_blocks
        most_unheld = most // _UNHELD_SHARE
        if table.unheld > most_unheld:
            self._delete_rows(self._unreferenced_rows())
            if table.unheld > most_unheld:
                excess = table.unheld - most_unheld + most // (2 * _UNHELD_SHARE)
                table.next_tick()
                self._delete_rows(table.oldest(min(table.unheld, excess)))
        if self._holders.named > most:
            # Names of blocks that their worker holds no more but others do.
            bits = table.sets.bits
            for holder in self._holders:
                mine = holder.all_bits(None)
                idle = np.array([n > 0 and not held & mine for n, held in enumerate(bits)])
                self._holders.forget_names(holder, idle[table.holders[holder.names.values]])
        most_sets = max(_FEWEST_SETS, most // _SETS_SHARE)
        while len(table.sets) > most_sets or self._holders.named > most:
            table.next_tick()
            self._evict(table.oldest(max(1, len(table) // 64)))

    def _evict(self, rows: Int32s) -> None:
        self._table.evicted += len(rows)
        self._delete_rows(rows)

    def _delete_rows(self, rows: Int32s) -> None:
        """Remove rows and all that refers to them."""
        if not rows.size:
            return
        gone = np.zeros(len(self._table.keys), dtype=bool)
        gone[rows] = True
        self._holders.forget_rows(gone)
        self._table.remove(rows)

    def _unreferenced_rows(self) -> Int32s:
        """Rows without a holder and without an engine's name."""
        rows = self._table.unheld_rows()
        named = np.zeros(len(self._table.keys), dtype=bool)
        for holder in self._holders if rows.size else ():
            named[holder.names.values] = True
        nameless: Int32s = rows[~named[rows]]
        return nameless


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
