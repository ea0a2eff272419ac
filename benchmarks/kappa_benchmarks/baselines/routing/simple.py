"""Policies without a model of the caches: in turn, of two, always the holder, by session."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

from kappa_benchmarks.baselines.routing.base import Baseline, power_of_two, random_least
from kappa_router.decision import Choice, Estimates


@dataclass(eq=False)
class RoundRobin(Baseline):
    """One worker after the other: counter modulo the number of workers on offer. Reimplemented."""

    name = "round_robin"
    source = "sgl-model-gateway/src/policies/round_robin.rs (sglang-router 0.3.2)"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._count = 0

    def choose(self, estimates: Estimates) -> Choice:
        index = self._count % len(estimates)
        self._count += 1
        return Choice(index, "next_in_turn")


class PowerOfTwo(Baseline):
    """Ray Serve's default: of two random replicas the one with the lower queue length.

    Reimplemented: queue length is requests in flight, known exactly (Ray probes or caches it);
    level queues go to the replica drawn first.
    """

    name = "power_of_two"
    source = "ray/serve/_private/request_router/pow_2_router.py (Ray 2.60.0)"

    def choose(self, estimates: Estimates) -> Choice:
        return Choice(power_of_two(self.rng, estimates.in_flight), "shorter_of_two_queues")


class Sticky(Baseline):
    """The worker that holds the longest prefix, whatever its load; else a least loaded one.

    No router's default: what affinity alone would do, with perfect knowledge of the caches.
    """

    name = "sticky"
    source = "affinity alone, on the prefix index: a reference point, no router's default"

    def choose(self, estimates: Estimates) -> Choice:
        held = estimates.device_tokens + estimates.cached_tokens
        longest = held.max()
        if longest <= 0:
            return Choice(random_least(self.rng, estimates.in_flight), "nobody_holds_it")
        cost = estimates.in_flight.copy()
        cost[held < longest] = float("inf")
        return Choice(random_least(self.rng, cost), "prefix_holder")


@dataclass(eq=False)
class ConsistentHash(Baseline):
    """The session's place on a hash ring decides; a request without a session goes anywhere.

    Reimplemented from Ray (100 virtual nodes a replica). Its fallback replicas serve only requests
    that the owner rejects, which does not happen here. Ray's hash is MurmurHash3; any will do.
    """

    name = "consistent_hash"
    source = "ray/serve/experimental/consistent_hash_router.py (Ray 2.60.0)"

    virtual_nodes: int = 100
    least: ClassVar = {"virtual_nodes": 1.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ring: list[tuple[int, str]] = []
        self._known: set[str] = set()

    def choose(self, estimates: Estimates) -> Choice:
        """The owner of the session: clockwise the first worker on offer."""
        new = [worker for worker in estimates.workers if worker not in self._known]
        if new:
            self._known.update(new)
            nodes = range(self.virtual_nodes)
            self._ring += [(_hash_of(f"{worker}:{i}"), worker) for worker in new for i in nodes]
            self._ring.sort()
        session = estimates.session
        point = _hash_of(session) if session else self.rng.getrandbits(64)
        start = bisect_right(self._ring, (point, "\uffff"))
        clockwise = (
            self._ring[i % len(self._ring)][1] for i in range(start, start + len(self._ring))
        )
        owner = next(worker for worker in clockwise if worker in estimates.workers)
        reason = "session_owner" if session else "no_session"
        return Choice(estimates.workers.index(owner), reason)

    def left(self, worker: str) -> None:
        self._known.discard(worker)
        self._ring = [entry for entry in self._ring if entry[1] != worker]


def _hash_of(key: str) -> int:
    """64 well-mixed bits, the same in every process."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest())
