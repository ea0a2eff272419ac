"""llm-d's endpoint picker: a weighted sum of scores in [0, 1], highest wins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kappa_benchmarks.baselines.routing.base import Baseline, random_least
from kappa_benchmarks.baselines.routing.learner import sticky
from kappa_router.decision import Choice, Estimates, Floats


@dataclass(eq=False)
class LlmD(Baseline):
    """Precise prefix cache, KV cache utilization and queue. Reimplemented.

        prefix = (device blocks + host_weight · host blocks) / blocks of the prompt, at most 1
        kv     = 1 − share of the KV cache in use by requests
        queue  = (max − waiting) / (max − min), 1 if all are level
        score  = prefix_weight · prefix + kv_weight · kv + queue_weight · queue

    Weights 2 : 1 : 1 as in the router's sample configuration for precise prefix caching; the host
    tier's 0.8 is the default of its KV block scorer. Equal scores take turns. The original scrapes
    utilization and waiting requests from the engines; here they are the router's own, always
    fresh: tokens of all in flight over capacity, and requests without a first token.
    """

    name = "llm_d"
    source = (
        "llm-d/llm-d-router: deploy/config/epp-precise-prefix-cache-config.yaml, "
        "pkg/kvcache/{backend,kvblock_scorer}.go, pkg/epp/framework/plugins/scheduling/"
        "{scorer/{prefix,kvcacheutilization,queuedepth},picker}"
    )

    prefix_weight: float = 2.0
    kv_weight: float = 1.0
    queue_weight: float = 1.0
    host_weight: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._turn = 0

    def choose(self, estimates: Estimates) -> Choice:
        """The highest score; equal ones in turn."""
        score = self.score(estimates)
        rows = np.flatnonzero(score == score.max())
        if len(rows) == 1:
            return Choice(int(rows[0]), "highest_score")
        index = int(rows[self._turn % len(rows)])
        self._turn = (self._turn + 1) % len(rows)
        return Choice(index, "equal_scores_in_turn")

    def score(self, estimates: Estimates) -> Floats:
        tokens = max(len(estimates.prefix_hashes) * estimates.block_tokens, 1)
        held = estimates.device_tokens + self.host_weight * estimates.cached_tokens
        prefix = np.minimum(held / tokens, 1.0)
        kv = 1.0 - np.minimum(
            estimates.resident_tokens / np.maximum(estimates.capacity_tokens, 1.0), 1.0
        )
        waiting = estimates.waiting
        most, least = waiting.max(), waiting.min()
        score: Floats = self.prefix_weight * prefix + self.kv_weight * kv
        queue = (most - waiting) / (most - least) if most > least else np.ones(len(estimates))
        score += self.queue_weight * queue
        return score


@dataclass(eq=False)
class LlmDAffinity(Baseline):
    """llm-d's affinity until saturated: a threshold, then the least token load. Reimplemented.

    Pods that hold `threshold` of the prompt are the only candidates, unless the best of them has
    max_penalty_s more of uncached tokens in flight (over prefill_tokens_per_s, one constant for the
    pool) than the best of the others. Of these the least such tokens, this prompt's included; level
    ones at random. Host blocks count as held.
    """

    name = "llm_d_affinity"
    source = (
        "llm-d/llm-d-router: pkg/epp/framework/plugins/scheduling/"
        "{filter/prefixcacheaffinity,scorer/tokenload} (commit ebab687)"
    )

    threshold: float = 0.8
    max_penalty_s: float = 18.0
    prefill_tokens_per_s: float = 15928.0
    least: ClassVar = {"prefill_tokens_per_s": 1.0}

    def choose(self, estimates: Estimates) -> Choice:
        tokens = max(len(estimates.prefix_hashes) * estimates.block_tokens, 1)
        holds = estimates.device_tokens + estimates.cached_tokens >= self.threshold * tokens
        load_s = estimates.queued_tokens / self.prefill_tokens_per_s
        rows = sticky(np.arange(len(estimates)), holds, load_s, self.max_penalty_s)
        load = np.full(len(estimates), np.inf)
        load[rows] = (estimates.queued_tokens + estimates.new_tokens)[rows]
        return Choice(random_least(self.rng, load), "least_token_load")
