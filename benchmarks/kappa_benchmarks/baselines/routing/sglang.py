"""SGLang gateway's cache_aware policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kappa_benchmarks.baselines.routing.history import ByHistory
from kappa_router.decision import Choice, Estimates

_SLACK = 1.1


@dataclass(eq=False)
class SglangCacheAware(ByHistory):
    """Longest prefix in a tree of the request history, unless the load is lopsided. Reimplemented.

    Imbalanced if max − min load > balance_abs and max > balance_rel · min: the shortest queue. Else
    the longest prefix that anybody was sent: if it is more than cache_threshold of the prompt, the
    worker that was sent its last piece first; otherwise the shortest queue. Level queues: the first
    worker (this is why the original sends a lone stream to one worker). A matched worker that is
    not on offer: the first worker.

    The original's tree is of characters, this one of token blocks. A worker's leaves are evicted,
    least recent first, above max_tree_tokens (original: 2^26 characters every 60 s; here 2^24
    tokens, as soon as a tenth above).
    """

    name = "sglang_cache_aware"
    source = (
        "sgl-model-gateway/src/policies/cache_aware.rs and tree.rs; defaults: router_args.py "
        "(sglang-router 0.3.2)"
    )

    cache_threshold: float = 0.3
    balance_abs: float = 64.0
    balance_rel: float = 1.5
    max_tree_tokens: float = 2.0**24
    least: ClassVar = {"max_tree_tokens": 1.0}

    def choose(self, estimates: Estimates) -> Choice:
        """Balance, then affinity, then the shortest queue."""
        load = estimates.in_flight
        least, most = float(load.min()), float(load.max())
        if most - least > self.balance_abs and most > self.balance_rel * least:
            return Choice(int(load.argmin()), "imbalanced")
        path = self._history.match(estimates)
        if path:
            run, blocks = path[-1]
            if blocks * estimates.block_tokens > self.cache_threshold * estimates.prompt_tokens:
                first = run.first if run.first in run.marks else next(iter(run.marks))
                row = self._history.roster.row(first)
                return Choice(row or 0, "prefix_match" if row is not None else "match_not_on_offer")
        return Choice(int(load.argmin()), "shortest_queue")

    def routed(self, estimates: Estimates, index: int, request_id: str = "") -> None:
        super().routed(estimates, index, request_id)
        bit = self._history.roster.bits[index]
        most = self.max_tree_tokens / estimates.block_tokens
        if self._history.tree.size(bit) > _SLACK * most:
            self._history.trim(bit, most)
