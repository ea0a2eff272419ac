"""The look-up of CLO's cache: whether a head's query is still like the one its choice was made for.

Cosines of each query head with its label, one figure per KV head (Eq. 10, harmonic, weighted by
importance), against that head's threshold (Eq. 7-9). On the device and without a branch, so that
the host need not wait for the answer. For measurements a hit rate can be injected instead.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kappa.plan.heads import LEAST_SIMILARITY


def cosines(queries: Tensor, labels: Tensor) -> Tensor:
    """Cosine of each query (..., d) with its label (..., d), in float32 at least; 0 for none."""
    wide = torch.promote_types(queries.dtype, torch.float32)
    q, c = queries.to(wide), labels.to(wide)
    norms = q.norm(dim=-1) * c.norm(dim=-1)
    return (q * c).sum(dim=-1) / norms.clamp_min(torch.finfo(wide).tiny)


def aggregate(similarity: Tensor, importance: Tensor) -> Tensor:
    """Eq. 10 over the last axis, the query heads of a group; all of importance 0: the mean.

    As `kappa.plan.heads.aggregate`, on the device.
    """
    shares = (importance / similarity.clamp_min(LEAST_SIMILARITY)).sum(dim=-1)
    total = importance.sum(dim=-1)
    weighted = total / torch.where(shares > 0, shares, torch.ones_like(shares))
    return torch.where(total > 0, weighted, similarity.mean(dim=-1))


def is_hit(similarity: Tensor, importance: Tensor, tau: Tensor) -> Tensor:
    """(batch, kv_heads) bool: the choice may stay.

    Args:
        similarity: cosines (batch, kv_heads, heads of a group).
        importance: (kv_heads, heads of a group).
        tau: thresholds (kv_heads,); one above 1 never hits.
    """
    return aggregate(similarity, importance.to(similarity.dtype)) >= tau.to(similarity.dtype)


class InjectedHits:
    """Hits drawn at a given rate from a seed: for measuring seconds, not a model.

    Args:
        rate: share of hits.
        seed: of the draws, which are the same on every run.
    """

    def __init__(self, rate: float, seed: int) -> None:
        self.rate = rate
        self._rng = np.random.default_rng(seed)

    def draw(self, batch: int, heads: int, device: torch.device) -> Tensor:
        """(batch, heads) bool: exactly `rate` of them on average over a few draws.

        The count is the rounded expectation and a draw for the rest, so that the rate of a short
        run is the one that was asked for.
        """
        many = self.rate * batch * heads
        count = int(many) + int(self._rng.random() < many - int(many))
        hits = np.zeros(batch * heads, bool)
        hits[self._rng.permutation(batch * heads)[:count]] = True
        return torch.from_numpy(hits.reshape(batch, heads)).to(device, non_blocking=True)
