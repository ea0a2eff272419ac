"""vLLM production-stack's prefixaware routing."""

from __future__ import annotations

from dataclasses import dataclass

from kappa_benchmarks.baselines.routing.history import ByHistory
from kappa_router.decision import Choice, Estimates


@dataclass(eq=False)
class ProductionStack(ByHistory):
    """The worker that was sent the longest prefix. Reimplemented.

    A trie of what was routed where; from the root on only endpoints that were sent every piece
    stay; a random one of those that stay longest (of all, if none was sent the first piece). No
    eviction, no load. The original's pieces are 128 characters, ours token blocks.
    """

    name = "production_stack"
    source = (
        "vllm-project/production-stack: src/vllm_router/routers/routing_logic.py and "
        "prefix/hashtrie.py (commit 008a23b)"
    )

    def choose(self, estimates: Estimates) -> Choice:
        path = self._history.match(estimates)
        roster = self._history.roster
        staying = roster.mask
        for run, _ in path:
            sent = run.mask & staying
            if not sent:
                break
            staying = sent
        if staying == roster.mask:
            return Choice(self.rng.randrange(len(estimates)), "any")
        return Choice(self.rng.choice(roster.rows(staying)), "prefix_match")
