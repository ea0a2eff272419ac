"""Ray Serve LLM's PrefixCacheAffinityRouter."""

from __future__ import annotations

from dataclasses import dataclass

from kappa_benchmarks.baselines.routing.base import first_least
from kappa_benchmarks.baselines.routing.history import ByHistory
from kappa_router.decision import Choice, Estimates


@dataclass(eq=False)
class RayPrefix(ByHistory):
    """Longest prefix in a tree of what was routed where. Reimplemented.

    The longest prefix that any replica was sent; if it is under match_rate_threshold of the prompt,
    the replicas with the smallest tree, otherwise those that were sent it; of several the one with
    the lowest queue length, the first if level. Its balancing by queue length and its eviction are
    off by default, and left out. The original's tree is of characters, this one of token blocks.
    """

    name = "ray_prefix"
    source = (
        "ray/llm/_internal/serve/routing_policies/prefix_aware/prefix_aware_router.py and "
        "prefix_tree.py (Ray 2.60.0)"
    )

    match_rate_threshold: float = 0.1

    def choose(self, estimates: Estimates) -> Choice:
        """Affinity, then the smallest tree."""
        queue, path, roster = (
            estimates.in_flight,
            self._history.match(estimates),
            self._history.roster,
        )
        holders, blocks = roster.mask, 0
        for run, matched in path:
            sent = run.mask & roster.mask
            if not sent:
                break
            holders, blocks = sent, matched
        if blocks * estimates.block_tokens >= self.match_rate_threshold * estimates.prompt_tokens:
            return Choice(first_least(roster.rows(holders), queue), "prefix_match")
        sizes = [self._history.tree.size(bit) for bit in roster.bits]
        rows = [row for row, size in enumerate(sizes) if size == min(sizes)]
        return Choice(first_least(rows, queue), "smallest_tree")
