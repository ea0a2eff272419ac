"""LMetric: a product of two indicators, without a weight between them."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kappa_benchmarks.baselines.routing.base import Baseline
from kappa_router.decision import Choice, Estimates, Floats
from kappa_router.policy import least


@dataclass(eq=False)
class LMetric(Baseline):
    """Least (tokens to prefill) · (requests there, this one among them). Reimplemented.

    Of the prompt, host blocks count as held by host_credit (the paper has one tier). Level ones:
    the first. Its detector of hot spots: of the last `window` requests a share x began with the
    same class_blocks blocks, which M workers hold on the device and the others do not: with
    x / (1 - x) > M / others, from the 2 M-th such request in a row that would go to a holder the
    holders are left out.
    """

    name = "lmetric"
    source = (
        "Zhang et al., arXiv 2603.15202; lib/router-plugins/builtin/src/lmetric.rs "
        "(ai-dynamo/dynamo, commit 6dcfceb)"
    )

    host_credit: float = 1.0
    class_blocks: int = 4
    window: int = 1000
    least: ClassVar = {"class_blocks": 1.0, "window": 1.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._recent: deque[int] = deque()
        self._arrivals = Counter[int]()
        self._streaks = Counter[int]()

    def choose(self, estimates: Estimates) -> Choice:
        score = self.score(estimates)
        best = least(score)
        if len(estimates.prefix_hashes) < self.class_blocks:
            return Choice(best, "least_product")
        kind = int(estimates.prefix_hashes[self.class_blocks - 1])
        share = self._record(kind)
        holds = estimates.device_tokens >= self.class_blocks * estimates.block_tokens
        holders = int(holds.sum())
        others = len(estimates) - holders
        hot = share * others > (1 - share) * holders
        if not (holders and others and hot and holds[best]):
            self._streaks[kind] = 0
            return Choice(best, "least_product")
        self._streaks[kind] += 1
        if self._streaks[kind] < 2 * holders:
            return Choice(best, "least_product")
        return Choice(least(np.where(holds, np.inf, score)), "hot_spot")

    def score(self, estimates: Estimates) -> Floats:
        held = estimates.device_tokens + self.host_credit * estimates.cached_tokens
        new_tokens = np.maximum(estimates.prompt_tokens - held, 1.0)
        score: Floats = new_tokens * (estimates.in_flight + 1.0)
        return score

    def _record(self, kind: int) -> float:
        """Note a request's class; its share of the recent ones."""
        if len(self._recent) == self.window:
            old = self._recent.popleft()
            self._arrivals[old] -= 1
            if not self._arrivals[old]:
                del self._arrivals[old], self._streaks[old]
        self._recent.append(kind)
        self._arrivals[kind] += 1
        return self._arrivals[kind] / len(self._recent)
