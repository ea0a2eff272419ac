"""Policies without a model of the caches: in turn, of two, and always the holder."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.baselines.routing.base import Baseline, power_of_two, random_least
from router.decision import Choice, Estimates


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
    source = "affinity alone, on the prefix index: a reference point, nobody's default"

    def choose(self, estimates: Estimates) -> Choice:
        held = estimates.device_tokens + estimates.cached_tokens
        longest = held.max()
        if longest <= 0:
            return Choice(random_least(self.rng, estimates.in_flight), "nobody_holds_it")
        cost = estimates.in_flight.copy()
        cost[held < longest] = float("inf")
        return Choice(random_least(self.rng, cost), "prefix_holder")
