"""CLO's cache at work: look up, choose anew what missed, and have it gathered into its slots.

One look-up per layer and step: heads whose query is still like the one their choice was made for
keep it; for the others label and choice are replaced, and their keys and values are gathered from
host memory straight into the slots that attention reads. The gather is begun here and waited for by
`arrived`, so that a layer computes in between. Nothing asks the device for an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sparse.gather import Gather, pairs
from engine.sparse.lanes import Lanes
from engine.sparse.retriever import RETRIEVERS, Asked, Retriever, choose
from engine.sparse.view import View
from engine.transfer import Event
from kappa.plans.clo import LEAST_SIMILARITY, HeadProfile, thresholds


def cosines(queries: Tensor, labels: Tensor) -> Tensor:
    """Cosine of each query (..., d) with its label (..., d), in float32 at least; 0 for none."""
    wide = torch.promote_types(queries.dtype, torch.float32)
    q, c = queries.to(wide), labels.to(wide)
    norms = q.norm(dim=-1) * c.norm(dim=-1)
    return (q * c).sum(dim=-1) / norms.clamp_min(torch.finfo(wide).tiny)


def aggregate(similarity: Tensor, importance: Tensor) -> Tensor:
    """Eq. 10 over the last axis, the query heads of a group; all of importance 0: the mean.

    As `kappa.plans.clo.aggregate`, on the device.
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


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Look-ups of heads so far, those that hit, and bytes gathered. injected: the hit rate that was
    imposed, or None where queries decided."""

    lookups: int
    hits: int
    gathered_bytes: int
    injected: float | None

    @property
    def hit_ratio(self) -> float | None:
        """Hits over look-ups."""
        return self.hits / self.lookups if self.lookups else None


@dataclass(slots=True)
class Pending:
    """A gather under way, and what must live until it has ended."""

    event: Event
    kept: list[Gather]


class SimilarityCache:
    """The choices of all lanes.

    Args:
        lanes: of the engine.
        heads: their importance, which sets the thresholds.
        tau: thresholds (layers, kv_heads) instead; above 1 every look-up misses.
        injected_hits: a hit rate to impose; as the settings say, if not given.
    """

    def __init__(
        self,
        lanes: Lanes,
        heads: HeadProfile,
        tau: Tensor | None = None,
        injected_hits: float | None = None,
    ) -> None:
        config, settings = lanes.config, lanes.settings
        self.lanes = lanes
        self.retriever: Retriever = RETRIEVERS[settings.retriever]()
        self.injected = None
        rate = settings.injected_hits if injected_hits is None else injected_hits
        if rate is not None:
            self.injected = InjectedHits(rate, settings.seed)
        device = lanes.arena.device
        if tau is None:
            most = heads.kv_importance(config.kv_heads)
            tau = torch.from_numpy(thresholds(most, settings.clo.eta, settings.clo.power))
        scores = torch.from_numpy(heads.importance).view(config.layers, config.kv_heads, -1)
        self._tau = [tau[i].to(device)[mine] for i, mine in enumerate(lanes.offloaded)]
        self._importance = [scores[i].to(device)[mine] for i, mine in enumerate(lanes.offloaded)]
        self._lookups = 0
        self._hits = torch.zeros((), dtype=torch.int64, device=device)
        self._moved_bytes = 0
        self._moved_rows = None
        if device.type == "cuda":
            self._moved_rows = torch.zeros(1, dtype=torch.int64, device=device)

    def counts(self) -> CacheCounts:
        """So far; waits for the device."""
        moved = self._moved_bytes
        if self._moved_rows is not None:
            width = self.lanes.config.head_dim * self.lanes.arena.dtype.itemsize
            moved += int(self._moved_rows) * width
        rate = None if self.injected is None else self.injected.rate
        return CacheCounts(self._lookups, int(self._hits), moved, rate)

    def look_up(self, layer: int, queries: Tensor, view: View) -> Pending | None:
        """Begin to bring what a layer's heads need for these queries (batch·new, heads, d).

        None: nothing is chosen yet, or nothing is missing as far as the host knows.
        """
        lanes, offloaded = self.lanes, self.lanes.offloaded[layer]
        if not len(offloaded) or not view.chosen:
            return None
        shape = (len(view.lanes), view.new, lanes.config.kv_heads, lanes.layout.group, -1)
        mine = queries.view(shape)[:, :, offloaded]
        wanted = ~self._hits_of(layer, mine[:, -1], view)
        self._lookups += wanted.numel()
        self._hits += (~wanted).sum()
        self._note(layer, mine[:, -1], wanted, view)
        if wanted.device.type == "cpu":
            # Here the answer costs nothing, and nothing need be chosen for those that hit.
            batch, heads = wanted.nonzero(as_tuple=True)
            if not len(batch):
                return None
        else:
            every = torch.arange(wanted.numel(), device=wanted.device)
            batch, heads = every // len(offloaded), every % len(offloaded)
        asked = Asked(layer, batch, heads, mine[batch, :, heads].flatten(1, 2))
        positions = choose(self.retriever, lanes, view, asked)
        return self._gather(asked, positions, wanted, view)

    def arrived(self, pending: Pending | None) -> None:
        """What is computed next comes after the gather.

        Raises:
            TransferFailed: it failed; the lanes of the view are to be closed.
        """
        if pending is not None:
            self.lanes.mover.wait(pending.event)

    # -- inside -------------------------------------------------------------------------------

    def _hits_of(self, layer: int, last: Tensor, view: View) -> Tensor:
        """(batch, heads) bool, of queries (batch, heads, group, d)."""
        lanes = self.lanes
        if view.new > 1:
            # A chunk's queries are not one that could be like another.
            return torch.zeros(last.shape[:2], dtype=torch.bool, device=last.device)
        if self.injected is not None:
            hits = self.injected.draw(last.shape[0], last.shape[1], last.device)
        else:
            labels = lanes.lane_slice(lanes.labels[layer], view)
            hits = is_hit(cosines(last, labels), self._importance[layer], self._tau[layer])
        if lanes.settings.max_age:
            hits &= lanes.lane_slice(lanes.ages[layer], view) < lanes.settings.max_age
        if view.forced is not None:
            hits &= ~view.forced[:, None]
        return hits

    def _note(self, layer: int, last: Tensor, wanted: Tensor, view: View) -> None:
        """Labels of what missed are those of now; choices are a step older."""
        lanes = self.lanes
        labels = lanes.lane_slice(lanes.labels[layer], view)
        lanes.labels[layer][view.index] = torch.where(wanted[..., None, None], last, labels)
        if lanes.settings.max_age:
            ages = lanes.lane_slice(lanes.ages[layer], view) + 1
            lanes.ages[layer][view.index] = torch.where(wanted, torch.ones_like(ages), ages)

    def _gather(self, asked: Asked, positions: Tensor, wanted: Tensor, view: View) -> Pending:
        """Positions (pairs, chosen) of the heads that are wanted, into their slots."""
        lanes, layer = self.lanes, asked.layer
        heads = lanes.offloaded[layer]
        block = lanes.arena.block_tokens
        blocks = view.table[asked.batch[:, None], positions // block]
        keys = lanes.key_rows(blocks, positions, heads[asked.heads][:, None])
        first, last = min(view.lanes), max(view.lanes)
        # All lanes between: a gather has one target, and leaves alone what is not wanted.
        shape = (last - first + 1, 2, len(heads))
        rows = keys.new_zeros((*shape, view.chosen))
        needed = torch.zeros(shape, dtype=torch.bool, device=rows.device)
        at = view.index - first
        rows[at[asked.batch], 0, asked.heads] = keys
        rows[at[asked.batch], 1, asked.heads] = keys + lanes.value_step
        needed[at] = wanted[:, None]
        start = lanes.layout.choice_start
        target = lanes.store[layer][first : last + 1, :, :, start : start + view.chosen]
        gather = Gather(
            target.flatten(1, 2), lanes.rows(layer), rows.flatten(1, 2), needed.flatten(1, 2),
            self._moved_rows,
        )  # fmt: skip
        self._held(asked, positions, wanted, view)
        self._moved_bytes += gather.nbytes
        # Behind the last attention to these slots.
        event = lanes.mover.h2d(pairs([gather]), lanes.mover.mark())
        return Pending(event, [gather])

    def _held(self, asked: Asked, positions: Tensor, wanted: Tensor, view: View) -> None:
        """Remember which tokens are in the slots."""
        held = self.lanes.held[asked.layer]
        lane = view.index[asked.batch]
        before = held[lane, asked.heads, : view.chosen]
        mine = wanted[asked.batch, asked.heads][:, None]
        held[lane, asked.heads, : view.chosen] = torch.where(mine, positions, before)
