"""Ray Serve LLM's PrefixCacheAffinityRouter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from benchmarks.baselines.routing.base import Baseline, first_least, power_of_two
from benchmarks.baselines.routing.history import RouteHistory
from router.decision import Choice, Estimates

_EVICTION_TARGET = 0.9


@dataclass(eq=False)
class RayPrefix(Baseline):
    """Longest prefix in a tree of what was routed where. Reimplemented.

    If max − min queue length > imbalanced_threshold (default infinite): power of two. Else the
    longest prefix that any replica was sent; if it is under match_rate_threshold of the prompt, the
    replicas with the smallest tree, otherwise those that were sent it; of several the one with the
    lowest queue length, the first if level.

    The original's tree is of characters, this one of token blocks. Eviction is off by default, as
    there; eviction_tokens is a replica's bound (original: 400,000 characters, about 100,000 tokens,
    down to 90% of it), checked at each insertion instead of every 10 s.
    """

    name = "ray_prefix"
    source = (
        "ray/llm/_internal/serve/routing_policies/prefix_aware/prefix_aware_router.py and "
        "prefix_tree.py (Ray 2.60.0)"
    )

    imbalanced_threshold: float = math.inf
    match_rate_threshold: float = 0.1
    eviction_tokens: float = math.inf
    least: ClassVar = {"eviction_tokens": 1.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._history = RouteHistory()

    def choose(self, estimates: Estimates) -> Choice:
        """Balance, then affinity, then the smallest tree."""
        queue = estimates.in_flight
        if queue.max() - queue.min() > self.imbalanced_threshold:
            return Choice(power_of_two(self.rng, queue), "imbalanced")
        path = self._history.match(estimates)
        roster = self._history.roster
        holders, blocks = roster.mask, 0
        for run, matched in path:
            sent = run.mask & roster.mask
            if not sent:
                break
            holders, blocks = sent, matched
        if blocks * estimates.block_tokens >= self.match_rate_threshold * estimates.prompt_tokens:
            return Choice(first_least(roster.rows(holders), queue), "prefix_match")
        sizes = [self._history.size(bit) for bit in roster.bits]
        smallest = min(sizes)
        rows = [row for row, size in enumerate(sizes) if size == smallest]
        return Choice(first_least(rows, queue), "smallest_tree")

    def routed(self, estimates: Estimates, index: int) -> None:
        self._history.routed(estimates, index)
        bit = self._history.bit(estimates, index)
        most = self.eviction_tokens / estimates.block_tokens
        if self._history.size(bit) > most:
            self._history.trim(bit, _EVICTION_TARGET * most)

    def left(self, worker: str) -> None:
        self._history.left(worker)
