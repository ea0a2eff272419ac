"""AIBrix's prefix-cache routing."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kappa_benchmarks.baselines.routing.base import random_least
from kappa_benchmarks.baselines.routing.history import ByHistory
from kappa_benchmarks.baselines.routing.run_tree import Run, longest_of_each
from kappa_router.decision import Choice, Estimates, Floats


@dataclass(eq=False)
class Aibrix(ByHistory):
    """Longest prefix among pods that are not too busy. Reimplemented.

    Gate: if max > imbalance_factor · (mean + 1) requests and max − min ≥ imbalance_gap, only the
    pods with the fewest requests may match. Then by whole percents of the prompt matched, most
    first; equal ones by requests, then at random: the first with requests ≤ mean + sigmas · σ (of
    the sample). Without any: a random one of those with the fewest requests.

    The original hashes blocks of 4 characters and keeps 200,000 of them for 20 minutes, least
    recently used first; here they are blocks of tokens, kept as long as they fit (max_blocks), the
    end of a prefix going before its start.
    """

    name = "aibrix"
    source = (
        "vllm-project/aibrix: pkg/plugins/gateway/algorithms/prefix_cache.go and "
        "pkg/utils/prefixcacheindexer/hash.go (commit 01de8a5)"
    )

    sigmas: float = 1.0
    imbalance_factor: float = 2.0
    imbalance_gap: float = 8.0
    max_blocks: float = 200_000.0
    least: ClassVar = {"max_blocks": 1.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._recent: OrderedDict[Run, None] = OrderedDict()

    def choose(self, estimates: Estimates) -> Choice:
        """The longest match with few enough requests, else the fewest requests."""
        requests = estimates.in_flight
        mean = float(requests.mean())
        index = self._matched(estimates, mean)
        if index is not None:
            return Choice(index, "prefix_match")
        return Choice(random_least(self.rng, requests), "fewest_requests")

    def routed(self, estimates: Estimates, index: int, request_id: str = "") -> None:
        # Deepest first, so that a prefix is always more recent than what follows it.
        for run in reversed(self._history.routed(estimates, index)):
            self._recent[run] = None
            self._recent.move_to_end(run)
        tree = self._history.tree
        while tree.blocks > self.max_blocks:
            run, _ = self._recent.popitem(last=False)
            for bit in list(run.marks):
                tree.unmark(run, bit)

    def left(self, worker: str) -> None:
        super().left(worker)
        self._recent = OrderedDict((run, None) for run in self._recent if run.marks)

    def _matched(self, estimates: Estimates, mean: float) -> int | None:
        requests = estimates.in_flight
        path = self._history.match(estimates)
        total = len(estimates.prefix_hashes)
        by_percent: dict[int, list[int]] = {}
        roster = self._history.roster
        for workers, blocks in longest_of_each(path, self._allowed(requests, mean)):
            by_percent.setdefault(blocks * 100 // total, []).extend(roster.rows(workers))
        if not by_percent:
            return None
        sigma = float(np.std(requests, ddof=1)) if len(requests) > 1 else 0.0
        limit = mean + self.sigmas * sigma
        for percent in sorted(by_percent, reverse=True):
            rows = by_percent[percent]
            fewest = min(float(requests[row]) for row in rows)
            if fewest <= limit:
                best = [row for row in rows if requests[row] == fewest]
                return best[0] if len(best) == 1 else self.rng.choice(best)
        return None

    def _allowed(self, requests: Floats, mean: float) -> int:
        """The pods that may match: all, or behind the gate those with the fewest requests."""
        roster = self._history.roster
        most, least = float(requests.max()), float(requests.min())
        if most <= self.imbalance_factor * (mean + 1.0) or most - least < self.imbalance_gap:
            return roster.mask
        fewest = np.flatnonzero(requests == least).tolist()
        return sum(1 << roster.bits[row] for row in fewest)
