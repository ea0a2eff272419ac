"""CLO's cache at work: look up, choose anew what missed, and have it gathered into its places.

One look-up per layer and step: heads whose query is still like the one their choice was made for
keep it; for the others label and choice are replaced, and their keys and values are gathered from
host memory straight into the places that attention reads. The gather is begun here and waited for
by `arrived`, so that a layer computes in between. Nothing asks the device for an answer.

A choice are the k tokens of a context in host memory with the highest scores: by the keys
themselves (`oracle_scores`), all of which are brought over the link, so that is for tests, for the
CPU, and to judge others by; or by codes that are on the device (`code_scores`). Both work on pairs
of a slot and a KV head, whose scores are summed over the queries of the head's group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sparse.gather import Gather, pairs
from engine.sparse.slots import Slots, View
from engine.transfer import Event
from kappa.plans.clo import LEAST_SIMILARITY, HeadProfile, thresholds


def cosines(queries: Tensor, labels: Tensor) -> Tensor:
    """Cosine of each query (..., d) with its label (..., d), in float32 at least; 0 for none."""
    wide = torch.promote_types(queries.dtype, torch.float32)
    q, c = queries.to(wide), labels.to(wide)
    norms = q.norm(dim=-1) * c.norm(dim=-1)
    return (q * c).sum(dim=-1) / norms.clamp_min(torch.finfo(wide).tiny)


def aggregate(similarity: Tensor, importance: Tensor) -> Tensor:
    """Eq. 10 over the last axis, the query heads of a group; all of importance 0: the mean."""
    shares = (importance / similarity.clamp_min(LEAST_SIMILARITY)).sum(dim=-1)
    total = importance.sum(dim=-1)
    weighted = total / torch.where(shares > 0, shares, torch.ones_like(shares))
    return torch.where(total > 0, weighted, similarity.mean(dim=-1))


@dataclass(slots=True)
class HeadQueries:
    """Heads whose choice is to be made: pair i is slot `batch[i]` of the view, head `heads[i]` of
    the layer's offloaded ones, with queries (pairs, queries, head_dim)."""

    layer: int
    batch: Tensor
    heads: Tensor
    queries: Tensor


def oracle_scores(slots: Slots, view: View, queried: HeadQueries) -> Tensor:
    """(pairs, host tokens): the share of attention that each token would get among all candidates,
    summed over queries. With one query per head that orders tokens as their scores do."""
    positions = torch.arange(view.candidates.shape[1], device=view.index.device)
    blocks = view.table[queried.batch][:, positions // slots.arena.block_tokens]
    heads = slots.offloaded[queried.layer][queried.heads]
    rows = slots.key_rows(blocks, positions, heads[:, None])[None]
    gather = Gather.whole(slots.rows(queried.layer), rows)
    slots.mover.wait(slots.mover.h2d(pairs([gather]), slots.mover.mark()))
    keys = gather.target[0]
    wide = torch.promote_types(keys.dtype, torch.float32)
    products = torch.matmul(queried.queries.to(wide), keys.to(wide).transpose(1, 2))
    products *= slots.config.head_dim**-0.5
    # Finite, for slots that have no candidate at all.
    outside = ~view.candidates[queried.batch][:, None]
    return products.masked_fill(outside, torch.finfo(wide).min).softmax(dim=-1).sum(dim=1)


def code_scores(slots: Slots, view: View, queried: HeadQueries) -> Tensor:
    """(pairs, host tokens): bits in common of the codes of queries and keys."""
    assert slots.hasher is not None
    # (pairs, blocks, block_tokens, words)
    codes = slots.codes[queried.layer][view.table[queried.batch], queried.heads[:, None]]
    return slots.hasher.agreement(slots.hasher.encode(queried.queries), codes.flatten(1, 2))


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Look-ups of heads so far, those that hit, and bytes gathered."""

    lookups: int
    hits: int
    gathered_bytes: int


@dataclass(slots=True)
class PendingGather:
    """A gather under way, and what must live until it has ended."""

    event: Event
    kept: list[Gather]


class SimilarityCache:
    """The choices of all slots. heads: importance, which sets the thresholds; tau: thresholds
    (layers, kv_heads) instead; above 1 every look-up misses."""

    def __init__(self, slots: Slots, heads: HeadProfile, tau: Tensor | None = None) -> None:
        config, settings, device = slots.config, slots.settings, slots.arena.device
        self.slots = slots
        self._scores = oracle_scores if settings.retriever == "oracle" else code_scores
        if tau is None:
            most = heads.kv_importance(config.kv_heads)
            tau = torch.from_numpy(thresholds(most, settings.clo.eta, settings.clo.power))
        scores = torch.from_numpy(heads.importance).view(config.layers, config.kv_heads, -1)
        self._tau = [tau[i].to(device)[mine] for i, mine in enumerate(slots.offloaded)]
        self._importance = [scores[i].to(device)[mine] for i, mine in enumerate(slots.offloaded)]
        self._lookups = self._moved_bytes = 0
        self._hits = torch.zeros((), dtype=torch.int64, device=device)
        self._moved_rows = None
        if device.type == "cuda":
            self._moved_rows = torch.zeros(1, dtype=torch.int64, device=device)

    def counts(self) -> CacheCounts:
        """So far; waits for the device."""
        moved = self._moved_bytes
        if self._moved_rows is not None:
            width = self.slots.config.head_dim * self.slots.arena.dtype.itemsize
            moved += int(self._moved_rows) * width
        return CacheCounts(self._lookups, int(self._hits), moved)

    def look_up(self, layer: int, queries: Tensor, view: View) -> PendingGather | None:
        """Begin to bring what a layer's heads need for these queries (batch·new, heads, d).

        None: nothing is chosen yet, or nothing is missing as far as the host knows.
        """
        slots, offloaded = self.slots, self.slots.offloaded[layer]
        if not len(offloaded) or not view.chosen:
            return None
        shape = (len(view.slots), view.new, slots.config.kv_heads, slots.layout.group, -1)
        mine = queries.view(shape)[:, :, offloaded]
        last = mine[:, -1]
        wanted = ~self._hits_of(layer, last, view)
        self._lookups += wanted.numel()
        self._hits += (~wanted).sum()
        # Labels of what missed are those of now; choices are a step older.
        labels = view.of(slots.labels[layer])
        slots.labels[layer][view.index] = torch.where(wanted[..., None, None], last, labels)
        if slots.settings.max_age:
            ages = view.of(slots.ages[layer]) + 1
            slots.ages[layer][view.index] = torch.where(wanted, torch.ones_like(ages), ages)
        if wanted.device.type == "cpu":
            # Here the answer costs nothing, and nothing need be chosen for those that hit.
            batch, heads = wanted.nonzero(as_tuple=True)
            if not len(batch):
                return None
        else:
            every = torch.arange(wanted.numel(), device=wanted.device)
            batch, heads = every // len(offloaded), every % len(offloaded)
        queried = HeadQueries(layer, batch, heads, mine[batch, :, heads].flatten(1, 2))
        # A slot with fewer candidates than the longest choice gets any tokens behind its own.
        scores = self._scores(slots, view, queried)
        best = scores.masked_fill(~view.candidates[batch], -torch.inf).topk(view.chosen, dim=-1)
        return self._gather(queried, best.indices, wanted, view)

    def arrived(self, pending: PendingGather | None) -> None:
        """What is computed next comes after the gather.

        Raises:
            TransferFailed: it failed; the slots of the view are to be closed.
        """
        if pending is not None:
            self.slots.mover.wait(pending.event)

    def _hits_of(self, layer: int, last: Tensor, view: View) -> Tensor:
        """(batch, heads) bool, of queries (batch, heads, group, d)."""
        slots = self.slots
        if view.new > 1:
            # A chunk's queries are not one that could be like another.
            return torch.zeros(last.shape[:2], dtype=torch.bool, device=last.device)
        hits = self._similar(layer, last, view)
        if slots.settings.max_age:
            hits &= view.of(slots.ages[layer]) < slots.settings.max_age
        if view.forced is not None:
            hits &= ~view.forced[:, None]
        return hits

    def _similar(self, layer: int, last: Tensor, view: View) -> Tensor:
        """(batch, heads) bool: queries like those that the choices were made for."""
        similarity = cosines(last, view.of(self.slots.labels[layer]))
        likeness = aggregate(similarity, self._importance[layer].to(similarity.dtype))
        return likeness >= self._tau[layer].to(similarity.dtype)

    def _gather(
        self, queried: HeadQueries, positions: Tensor, wanted: Tensor, view: View
    ) -> PendingGather:
        """Positions (pairs, chosen) of the heads that are wanted, into their places."""
        slots, layer = self.slots, queried.layer
        heads = slots.offloaded[layer]
        blocks = view.table[queried.batch[:, None], positions // slots.arena.block_tokens]
        keys = slots.key_rows(blocks, positions, heads[queried.heads][:, None])
        first, last = min(view.slots), max(view.slots)
        # All slots between: a gather has one target, and leaves alone what is not wanted.
        shape = (last - first + 1, 2, len(heads))
        rows = keys.new_zeros((*shape, view.chosen))
        needed = torch.zeros(shape, dtype=torch.bool, device=rows.device)
        at = view.index - first
        rows[at[queried.batch], 0, queried.heads] = keys
        rows[at[queried.batch], 1, queried.heads] = keys + slots.value_step
        needed[at] = wanted[:, None]
        start = slots.layout.choice_start
        target = slots.store[layer][first : last + 1, :, :, start : start + view.chosen]
        gather = Gather(
            target.flatten(1, 2), slots.rows(layer), rows.flatten(1, 2), needed.flatten(1, 2),
            self._moved_rows,
        )  # fmt: skip
        self._moved_bytes += gather.nbytes
        # Behind the last attention to these places.
        event = slots.mover.h2d(pairs([gather]), slots.mover.mark())
        return PendingGather(event, [gather])
