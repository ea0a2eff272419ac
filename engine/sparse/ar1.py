"""Queries that drift: a driver for look-ups where random weights would say nothing of a hit ratio.

Real queries of neighbouring steps are alike (paper 004, Fig. 5); those of random weights on random
tokens are not. Here each head's query is an autoregressive process of first order whose cosine from
step to step is set, over keys that some directions have in common. A hit ratio found so is one of
this process, labelled AR(1), and no model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sparse.similarity import cosines, is_hit
from kappa.plan.heads import Scores, thresholds


@dataclass(frozen=True, slots=True)
class Drift:
    """One layer's heads that drift. similarity: mean cosine of a head's queries of neighbouring
    steps, in [0, 1), by query head (kv_heads, group)."""

    similarity: Scores
    head_dim: int
    seed: int

    def __post_init__(self) -> None:
        if not ((self.similarity >= 0) & (self.similarity < 1)).all():
            raise ValueError("Drift.similarity: give cosines in [0, 1)")

    def queries(self, steps: int) -> Iterator[Tensor]:
        """(kv_heads, group, head_dim) of each step, float64.

        q' = r·q + √(1 - r²)·e with e of the same spread: the expected cosine of q and q' is r.
        """
        rng = np.random.default_rng(self.seed)
        shape = (*self.similarity.shape, self.head_dim)
        keep = self.similarity[..., None]
        query = rng.standard_normal(shape)
        for _ in range(steps):
            yield torch.from_numpy(query.copy())
            query = keep * query + np.sqrt(1.0 - keep**2) * rng.standard_normal(shape)


@dataclass(frozen=True, slots=True)
class DriftResult:
    """hit_ratio of the look-ups; overlap: share of the tokens that a fresh choice would have taken
    which the kept one has, over hits alone; of heads (kv_heads,)."""

    hit_ratio: Scores
    overlap: Scores


def drive(
    drift: Drift,
    keys: Tensor,
    chosen: int,
    importance: Scores,
    eta: float,
    power: float,
    steps: int,
) -> DriftResult:
    """Look up, and choose anew what missed, for so many steps.

    Args:
        keys: (kv_heads, tokens, head_dim) float64.
        chosen: tokens of a choice.
        importance: of query heads (kv_heads, group).
        eta, power: of Eq. 7-9.
    """
    tau = torch.from_numpy(thresholds(importance.max(axis=1), eta, power))
    weights = torch.from_numpy(importance)
    hits = torch.zeros(len(keys), dtype=torch.float64)
    shared = torch.zeros(len(keys), dtype=torch.float64)
    labels, held = None, None
    for query in drift.queries(steps):
        products = torch.einsum("hgd,htd->hgt", query, keys) / drift.head_dim**0.5
        best = products.softmax(-1).sum(1).topk(chosen, dim=-1).indices
        fresh = torch.zeros(keys.shape[:2], dtype=torch.bool).scatter_(1, best, True)
        if labels is None or held is None:
            labels, held = query, fresh
            continue
        hit = is_hit(cosines(query, labels)[None], weights, tau)[0]
        hits += hit
        shared += torch.where(hit, (held & fresh).sum(-1) / chosen, torch.zeros(()))
        labels = torch.where(hit[:, None, None], labels, query)
        held = torch.where(hit[:, None], held, fresh)
    overlap = shared / hits.clamp_min(1)
    return DriftResult((hits / (steps - 1)).numpy(), overlap.numpy())
