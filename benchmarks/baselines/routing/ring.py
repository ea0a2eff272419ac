"""Consistent hashing on the session id, with bounded loads if asked."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

from benchmarks.baselines.routing.base import Baseline
from router.decision import Choice, Estimates


def hash_of(key: str) -> int:
    """64 well-mixed bits, the same in every process."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest())


class HashRing:
    """Workers on a ring, each at `virtual_nodes` points; those not on offer are skipped."""

    def __init__(self, virtual_nodes: int) -> None:
        self._virtual_nodes = virtual_nodes
        self._known: set[str] = set()
        self._ring: list[tuple[int, str]] = []
        self._points: list[int] = []
        self._names: list[str] = []
        self._rows: dict[str, int] = {}

    def read(self, workers: list[str]) -> None:
        """The workers on offer; unknown ones get their points."""
        if workers == self._names:
            return
        self._names = list(workers)
        self._rows = {worker: row for row, worker in enumerate(workers)}
        new = [worker for worker in workers if worker not in self._known]
        if new:
            self._known.update(new)
            for worker in new:
                self._ring += [
                    (hash_of(f"{worker}:{i}"), worker) for i in range(self._virtual_nodes)
                ]
            self._sort()

    def clockwise(self, point: int) -> Iterator[int]:
        """Rows on offer in ring order from `point` on, each once."""
        start, size = bisect_right(self._points, point), len(self._ring)
        seen: set[int] = set()
        for i in range(size):
            row = self._rows.get(self._ring[(start + i) % size][1])
            if row is not None and row not in seen:
                seen.add(row)
                yield row
                if len(seen) == len(self._rows):
                    return

    def left(self, worker: str) -> None:
        if worker in self._known:
            self._known.remove(worker)
            self._ring = [entry for entry in self._ring if entry[1] != worker]
            self._names = []
            self._sort()

    def _sort(self) -> None:
        self._ring.sort()
        self._points = [point for point, _ in self._ring]


@dataclass(eq=False)
class ConsistentHash(Baseline):
    """The session's place on a hash ring decides; a request without a session goes anywhere.

    Reimplemented from Ray (100 virtual nodes a replica). Its fallback replicas serve only requests
    that the owner rejects, which does not happen here. Ray's hash is MurmurHash3; any will do.
    With `c` finite, bounded loads (Mirrokni, Thorup, Zadimoghaddam, arXiv 1608.01350): clockwise to
    the first worker with fewer than ceil(c · (requests in flight + 1) / workers) in flight.
    """

    name = "consistent_hash"
    source = "ray/serve/experimental/consistent_hash_router.py (Ray 2.60.0); c: arXiv 1608.01350"

    c: float = math.inf
    virtual_nodes: int = 100
    least: ClassVar = {"c": 1.0, "virtual_nodes": 1.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ring = HashRing(self.virtual_nodes)

    def choose(self, estimates: Estimates) -> Choice:
        """The owner of the session, or the next on the ring with room."""
        self._ring.read(estimates.workers)
        session = estimates.session
        point = hash_of(session) if session else self.rng.getrandbits(64)
        rows = self._ring.clockwise(point)
        owner = next(rows)
        if math.isinf(self.c):
            return Choice(owner, "session_owner" if session else "no_session")
        queue = estimates.in_flight
        most = math.ceil(self.c * (float(queue.sum()) + 1.0) / len(estimates))
        if queue[owner] < most:
            return Choice(owner, "session_owner" if session else "no_session")
        return Choice(next(row for row in rows if queue[row] < most), "owner_full")

    def left(self, worker: str) -> None:
        self._ring.left(worker)
