"""Who holds which prefix, in which tier: fed by typed KV events, looked up once per request.

Counting: an engine may hold one hash in several device blocks and reports each, so device
presence is reference-counted. A host tier keeps its chunks by hash and holds a key at most once,
so host presence is a set: a repeated announcement needs no second removal. (With host chunks of
several blocks, a block that two chunks share is forgotten with the first of them.)

Lookup: one compiled loop goes along a prompt's rows and finds where their holders change; the sets
of holders are looked at only there, and nothing where nobody is left. So holes need no care: they
are where a worker is missing from a set. A binary search would need every worker's contiguous run
to be maintained block by block on each change, and 13 look-ups a worker and tier; one walk answers
for all at once.

Bound: `max_blocks` distinct blocks, as many names, and a share of that in distinct sets of
holders. Beyond it the oldest blocks go; if none can, the new block is refused. Either way the
index knows less, and claims nothing untrue.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kappa.compiled import compiled
from router.index.hash_table import Int64s, UInt64s
from router.index.holdings import Holdings
from router.index.kv_events import (
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    Tier,
    TierCleared,
    WorkerGone,
    WorkerReset,
)
from router.index.prefix_hash import PrefixHasher

# Blocks that are walked before it is checked whether anybody still holds them.
_BATCH = 512
# What Python takes for a worker's objects besides their arrays.
_WORKER_BYTES = 2100


class Match(NamedTuple):
    """Leading blocks a worker holds: on the device, then how many further ones in host."""

    device_blocks: int
    host_blocks: int


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
        self._held = Holdings(hasher, max_blocks, host_extends)
        # Compiled now rather than while the first request waits.
        _spread(_bytes_of(0), 0, 0, np.empty((2, 0), dtype=np.int64))

    # ---- lookups

    def match(self, prefix_hashes: UInt64s, worker: str) -> Match:
        """Longest prefix `worker` holds; `prefix_hashes` as from `PrefixHasher.prefix_hashes`.

        An unknown worker holds nothing. Marks what it found as recently used.
        """
        return self.match_all(prefix_hashes).get(worker, Match(0, 0))

    def match_all(self, prefix_hashes: UInt64s) -> dict[str, Match]:
        """`match` for every worker that holds anything of this prompt."""
        device, host = self.match_columns(prefix_hashes).tolist()
        found = ((w, Match(device[r.bit], host[r.bit])) for w, r in self._held.workers.items())
        return {worker: match for worker, match in found if any(match)}

    def match_columns(self, prefix_hashes: UInt64s) -> Int64s:
        """Blocks on device and in host by workers' `column`, shape (2, columns)."""
        blocks = np.zeros((2, len(self._held.by_bit)), dtype=np.int64)
        for workers, found in self._matches(prefix_hashes):
            _spread(_bytes_of(workers), *found, blocks)
        return blocks

    def column(self, worker: str) -> int:
        """Where `match_columns` answers for a worker, from now until it is gone."""
        return self._held.worker(worker).bit

    def workers(self) -> tuple[str, ...]:
        """Workers mentioned and not gone, oldest first."""
        return tuple(self._held.workers)

    def size_blocks(self) -> int:
        """Distinct blocks kept, at most max_blocks."""
        return len(self._held.table)

    def index_bytes(self) -> int:
        """Memory of all tables, at their present size, in bytes."""
        workers = sum(w.names.nbytes() + 100 * len(w.copies) for w in self._held.workers.values())
        return self._held.table.nbytes() + workers + _WORKER_BYTES * len(self._held.workers)

    def stats(self) -> dict[str, int]:
        """Counts now, and totals since the start.

        Now: `blocks` (kept), `unheld` (kept only for their names), `names` (engine hashes known),
        `holder_sets`, `workers`. Totals, in blocks: `orphans` (stored under an unknown parent),
        `unjoined` (in host, salt unknown), `refused` and `evicted` (by the bound), `ambiguous`
        (second engine hash for one of ours, ignored, and what follows it), `unknown_removals`.
        """
        table = self._held.table
        now = {
            "blocks": len(table),
            "unheld": table.unheld,
            "names": self._held.named,
            "holder_sets": len(table.sets),
            "workers": len(self._held.workers),
        }
        return now | self._held.counts | {"evicted": table.evicted}

    # ---- feeding

    def hold(self, worker: str, tier: Tier, prefix_hashes: UInt64s) -> None:
        """Blocks are present in a tier now, in prefix order; for callers that know our hashes.

        Presence only: blocks held twice need one `drop`. Do not mix with events of one worker.
        """
        self._held.table.next_tick()
        self._held.hold(worker, tier, prefix_hashes)
        self._held.trim()

    def drop(self, worker: str, tier: Tier, prefix_hashes: UInt64s) -> None:
        """Blocks are no longer present in a tier; those that were not do not matter."""
        self._held.drop(worker, tier, prefix_hashes)
        self._held.trim()

    def handle(self, event: KVEvent) -> None:
        """Apply one event. Blocks that cannot be placed are counted, never guessed.

        Raises:
            ValueError: stored blocks of another size than the hasher's, or a token count that
                is not blocks times block size; nothing is changed then.
        """
        self._held.table.next_tick()
        match event:
            case BlocksStored():
                self._held.check(event)
                self._held.stored(event)
            case BlocksRemoved():
                self._held.removed(event)
            case TierCleared(worker, tier):
                if worker in self._held.workers:
                    self._held.clear(self._held.workers[worker], tier)
            case WorkerReset(worker):
                self._held.clear(self._held.worker(worker), None)
            case WorkerGone(worker):
                self._held.gone(worker)
        self._held.trim()

    # ---- inside

    def _matches(self, prefix_hashes: UInt64s) -> list[tuple[int, Match]]:
        """What workers hold, in groups that hold the same; a group is a set of device bits."""
        table = self._held.table
        table.next_tick()
        bits = table.sets.bits
        answer: list[tuple[int, Match]] = []
        # Workers whose device run goes on, and those whose host run does, by where it began.
        device, hosts = self._held.device_bits, list[tuple[int, int]]()
        at, total, batch, more = 0, len(prefix_hashes), _BATCH, True
        while more and at < total and (device or hosts):
            changes, passed, more = table.walk(prefix_hashes[at : at + batch])
            for start, number in changes:
                held, here = bits[number], at + start
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
            at, batch = at + passed, 2 * batch
        if at and device:
            answer.append((device, Match(at, 0)))
        answer += ((group, Match(begin, at - begin)) for group, begin in hosts)
        return answer

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


def _bytes_of(workers: int) -> NDArray[np.uint8]:
    """Bits of workers as bytes, the lowest first."""
    size = workers.bit_length() // 8 + 1
    return np.frombuffer(bytearray(workers.to_bytes(size, "little")), np.uint8)


@compiled
def _spread(bits: NDArray[np.uint8], device: int, host: int, blocks: Int64s) -> None:
    """Fill in what those have whose device bit is set: rows device and host, a column each."""
    for worker in range(blocks.shape[1]):
        place = 2 * worker
        if place >> 3 >= len(bits):
            return
        if bits[place >> 3] >> (place & 7) & 1:
            blocks[0, worker], blocks[1, worker] = device, host
