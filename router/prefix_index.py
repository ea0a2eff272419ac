"""Who holds which prefix, in which tier: fed by typed KV events, asked once per request.

Counting: an engine may hold one hash in several device blocks and reports each, so device
presence is reference-counted. A host tier keys its chunks by hash and holds a key at most once,
so host presence is a set: a repeated announcement needs no second removal. (With host chunks of
several blocks, a block that two chunks share is forgotten with the first of them.)

Bound: an entry is one block of one worker. At `max_blocks` the least recently stored or matched
leaves go first, those no tier holds any more before others; if none can go, the new block is
refused. Either way the index knows less, and claims nothing untrue.
"""

from typing import NamedTuple

from router.block_forest import DEVICE_RUN, NO_BLOCK, UNION_RUN, BlockForest, WorkerBlocks
from router.kv_events import (
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    TierCleared,
    WorkerGone,
    WorkerReset,
)
from router.prefix_hash import PrefixHasher, UInt64s


class Match(NamedTuple):
    """Leading blocks a worker holds: on the device, then how many further ones in host."""

    device_blocks: int
    host_blocks: int


class PrefixIndex:
    """Longest held prefix per worker and tier, within bounded memory.

    Args:
        hasher: must be the one that hashes requests.
        max_blocks: most entries (worker times block) to keep, at least 1.
        host_extends: accept a host block never seen on the device when its parent is known (it
            inherits the parent's salt). Set False for multimodal pools: host events do not say
            which blocks hold images, so token ids alone would not identify them.

    Raises:
        ValueError: max_blocks below 1.
    """

    def __init__(self, hasher: PrefixHasher, max_blocks: int, host_extends: bool = True) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, got {max_blocks}")
        self._hasher = hasher
        self._host_extends = host_extends
        self._forest = BlockForest(max_blocks)
        self._workers: dict[str, WorkerBlocks] = {}
        self._counts = dict.fromkeys(
            ("orphans", "unjoined", "refused", "ambiguous", "unknown_removals"), 0
        )

    def match(self, prefix_hashes: UInt64s, worker: str) -> Match:
        """Longest prefix `worker` holds; `prefix_hashes` as from `PrefixHasher.prefix_hashes`.

        An unknown worker holds nothing. Marks what it found as recently used.
        """
        record = self._workers.get(worker)
        if record is None:
            return Match(0, 0)
        self._forest.tick += 1
        return self._match(record, prefix_hashes)

    def match_all(self, prefix_hashes: UInt64s) -> dict[str, Match]:
        """`match` for every known worker, those that hold nothing included."""
        self._forest.tick += 1
        return {name: self._match(w, prefix_hashes) for name, w in self._workers.items()}

    def workers(self) -> tuple[str, ...]:
        """Workers heard from and not gone, oldest first."""
        return tuple(self._workers)

    def size_blocks(self) -> int:
        """Entries kept (worker times block), at most max_blocks."""
        return self._forest.size

    def stats(self) -> dict[str, int]:
        """Entry counts now, and totals since the start.

        Now: `blocks` (kept), `unheld` (leaves kept only for their names), `workers`. Totals, in
        blocks: `orphans` (stored under an unknown parent), `unjoined` (in host, salt unknown),
        `refused` and `evicted` (by the bound), `ambiguous` (second engine hash for one of ours,
        ignored, and what follows it), `unknown_removals`.
        """
        forest = self._forest
        now = {"blocks": forest.size, "unheld": forest.unheld, "workers": len(self._workers)}
        return now | self._counts | {"evicted": forest.evicted}

    def handle(self, event: KVEvent) -> None:
        """Apply one event. Blocks that cannot be placed are counted, never guessed.

        Raises:
            ValueError: stored blocks of another size than the hasher's, or a token count that
                is not blocks times block size; nothing is changed then.
        """
        self._forest.tick += 1
        match event:
            case BlocksStored():
                self._check(event)
                self._stored(event)
            case BlocksRemoved():
                self._removed(event)
            case TierCleared():
                self._cleared(event)
            case WorkerReset(worker):
                self._forest.forget(self._worker(worker))
            case WorkerGone(worker):
                self._forest.forget(self._workers.pop(worker, WorkerBlocks()))
        self._forest.trim()

    def _worker(self, name: str) -> WorkerBlocks:
        record = self._workers.get(name)
        if record is None:
            record = self._workers[name] = WorkerBlocks()
        return record

    def _match(self, worker: WorkerBlocks, prefix_hashes: UInt64s) -> Match:
        forest, total, item = self._forest, len(prefix_hashes), prefix_hashes.item
        device = forest.run(worker, item, 0, total, DEVICE_RUN)
        union = forest.run(worker, item, device, total, UNION_RUN)
        if union:
            forest.touch(worker.by_hash[item(union - 1)])
        return Match(device, union - device)

    def _check(self, event: BlocksStored) -> None:
        size, tokens = self._hasher.block_tokens, len(event.token_ids)
        if not tokens:
            return
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
        worker, forest = self._worker(event.worker), self._forest
        blind = event.tier == "host" and event.salt is None
        may_add = len(event.token_ids) > 0 and (self._host_extends or not blind)
        above, salt = self._anchor(worker, event)
        why = unplaced = "unjoined" if blind else "orphans"
        ahead: tuple[list[int], list[int]] | None = None
        ahead_from = 0
        for i, engine in enumerate(event.engine_hashes):
            slot = worker.by_engine.get(engine)
            if slot is None and above is not None and may_add:
                if ahead is None:
                    ahead, ahead_from = self._ahead(event, i, above, salt), i
                own, raw_sum = ahead[0][i - ahead_from], ahead[1][i - ahead_from]
                if own in worker.by_hash:
                    why = "ambiguous"
                else:
                    slot = forest.insert(worker, engine, own, raw_sum, salt, above)
                    why = "refused"
            if slot is None:
                self._counts[why] += 1
                above = None
                continue
            if above is None:
                # A run may start at unknown blocks and go on in known ones.
                salt = forest.salt(slot)
            forest.hold(slot, event.tier)
            above, why = slot, unplaced

    def _anchor(self, worker: WorkerBlocks, event: BlocksStored) -> tuple[int | None, int]:
        """What a run hangs below (None: unknown, NO_BLOCK: the start), and its salt."""
        if event.parent_engine_hash is None:
            return (None, 0) if event.salt is None else (NO_BLOCK, event.salt)
        slot = worker.by_engine.get(event.parent_engine_hash)
        # A parent's name already fixes its salt, so a child can have no other.
        return (None, 0) if slot is None else (slot, self._forest.salt(slot))

    def _ahead(
        self, event: BlocksStored, first: int, above: int, salt: int
    ) -> tuple[list[int], list[int]]:
        """Hashes and raw sums of the event's blocks from `first` on, below `above`."""
        tokens = event.token_ids[first * self._hasher.block_tokens :]
        hashes, sums = self._hasher.extend(self._forest.running(above), tokens, salt)
        return hashes.tolist(), sums.tolist()

    def _removed(self, event: BlocksRemoved) -> None:
        worker = self._workers.get(event.worker)
        known = worker.by_engine if worker is not None else {}
        for engine in event.engine_hashes:
            slot = known.get(engine)
            if slot is None or not self._forest.unhold(slot, event.tier):
                self._counts["unknown_removals"] += 1

    def _cleared(self, event: TierCleared) -> None:
        worker = self._workers.get(event.worker)
        if worker is None:
            return
        if event.tier is None:
            self._forest.forget(worker)
        else:
            self._forest.clear(worker, event.tier)
