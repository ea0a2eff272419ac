"""Hit rates that are imposed, for measuring seconds: no property of a model, and results say so."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.sparse.cache import SimilarityCache
from engine.sparse.slots import Slots, View
from kappa.plans.clo import HeadProfile


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


class InjectedCache(SimilarityCache):
    """Choices that stay as often as a rate says, whatever the queries are."""

    def __init__(self, slots: Slots, heads: HeadProfile, rate: float, seed: int = 0) -> None:
        super().__init__(slots, heads)
        self._injected = InjectedHits(rate, seed)

    def _similar(self, layer: int, last: Tensor, view: View) -> Tensor:
        return self._injected.draw(last.shape[0], last.shape[1], last.device)
