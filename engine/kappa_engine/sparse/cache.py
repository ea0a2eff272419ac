"""CLO's similarity cache: look up each head's choice, and gather what a missed head chooses.

There is one look-up per layer and step. A head keeps its choice while its query is like the one
that the choice was made for (the label); else both are replaced. Newly chosen tokens take
the places of tokens that are not chosen again, in one gather of all heads from host memory,
straight to where attention reads. A gather begins here and is waited for by `arrived`, so that a
layer computes in between. The host never waits for the device's answer.

A choice is the k tokens of a context in host memory with the highest scores: by the keys themselves
(`oracle_scores`), which all cross the link, so that is for tests, for the CPU, and for comparison;
or by codes on the device (`code_scores`). Both score pairs of a slot and a KV head, summed over the
queries of the head's group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kappa.plans.clo import LEAST_SIMILARITY, HeadProfile, thresholds
from kappa_engine.sparse.gather_kernel import Gather, pairs
from kappa_engine.sparse.slots import Slots, View
from kappa_engine.transfer import Event


def cosines(queries: Tensor, labels: Tensor) -> Tensor:
    """Cosine of each query (..., d) with its label (..., d), in float32 at least; 0 for none."""
    if queries.dtype in (torch.float16, torch.bfloat16):
        queries, labels = queries.float(), labels.float()
    return F.cosine_similarity(queries, labels, dim=-1, eps=torch.finfo(torch.float32).tiny)


def alike(similarity: Tensor, importance: Tensor, tau: Tensor) -> Tensor:
    """Whether the mean of Eq. 10 over the last axis, the query heads of a group, is at least tau:
    Σs / Σ(s / cosine) ≥ τ. It is where all importance is 0, as the τ of such heads is -1."""
    shares = (importance / similarity.clamp_min(LEAST_SIMILARITY)).sum(dim=-1)
    return importance.sum(dim=-1) >= tau * shares


@dataclass(slots=True)
class HeadQueries:
    """Pairs of a slot and an offloaded KV head that make a choice."""

    layer: int
    # Of each pair: the slot as an index of the view, and the head among the layer's offloaded ones.
    batch: Tensor
    heads: Tensor
    # (pairs, queries, head_dim).
    queries: Tensor


def oracle_scores(slots: Slots, view: View, queried: HeadQueries) -> Tensor:
    """(pairs, host tokens): the share of attention that each token would get among all candidates,
    summed over queries. With one query per head that orders tokens as their scores do."""
    positions = torch.arange(view.outside.shape[1], device=view.index.device)
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
    outside = view.outside[queried.batch][:, None]
    return products.masked_fill(outside, torch.finfo(wide).min).softmax(dim=-1).sum(dim=1)


def code_scores(slots: Slots, view: View, queried: HeadQueries) -> Tensor:
    """(pairs, host tokens): bits in common of the codes of queries and keys."""
    assert slots.hasher is not None
    # (pairs, blocks, block_tokens, words)
    codes = slots.codes[queried.layer][view.table[queried.batch], queried.heads[:, None]]
    heads = slots.offloaded[queried.layer][queried.heads]
    asked = slots.hasher.of_queries(queried.layer, heads, queried.queries)
    return slots.hasher.agreement(asked, codes.flatten(1, 2))


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Look-ups of heads so far, those that hit, and bytes gathered."""

    lookups: int
    hits: int
    gathered_bytes: int


@dataclass(slots=True)
class PendingGather:
    """A gather under way."""

    event: Event
    # Its tensors must live until it has ended.
    kept: list[Gather]


class SimilarityCache:
    """The choices of all slots.

    Args:
        heads: importance, which sets the thresholds.
        tau: thresholds (layers, kv_heads) instead; above 1 every look-up misses.
    """

    def __init__(self, slots: Slots, heads: HeadProfile, tau: Tensor | None = None) -> None:
        config, settings, device = slots.config, slots.settings, slots.arena.device
        self.slots = slots
        self._scores = oracle_scores if settings.retriever == "oracle" else code_scores
        if tau is None:
            most = heads.kv_importance(config.kv_heads)
            tau = torch.from_numpy(thresholds(most, settings.clo.eta, settings.clo.power))
        scores = torch.from_numpy(heads.importance).view(config.layers, config.kv_heads, -1)
        self._tau, self._importance = (
            [of[layer].float().to(device)[mine] for layer, mine in enumerate(slots.offloaded)]
            for of in (tau, scores)
        )
        self._lookups = self._moved_bytes = 0
        self._hits: Tensor | int = 0
        self._moved_rows = None
        if device.type == "cuda":
            self._moved_rows = torch.zeros(1, dtype=torch.int64, device=device)

    def counts(self) -> CacheCounts:
        """Counts so far; waits for the device."""
        moved = self._moved_bytes
        if self._moved_rows is not None:
            width = self.slots.config.head_dim * self.slots.arena.dtype.itemsize
            moved += int(self._moved_rows) * width
        return CacheCounts(self._lookups, int(self._hits), moved)

    def look_up(self, layer: int, queries: Tensor, view: View) -> PendingGather | None:
        """Begin to gather what a layer's heads need for these queries (batch·new, heads, d).

        Returns None if nothing is chosen yet, or nothing is missing as far as the host knows.
        """
        slots, offloaded = self.slots, self.slots.offloaded[layer]
        count = offloaded.shape[0]
        if not count or not view.chosen:
            return None
        shape = (len(view.slots), view.new, slots.config.kv_heads, slots.layout.group, -1)
        mine = queries.view(shape)
        if count < slots.config.kv_heads:
            mine = mine[:, :, offloaded]
        last = mine[:, -1]
        hits = self._hits_of(layer, last, view)
        wanted = ~hits
        # Heads that missed take these queries as labels.
        labels = view.of(slots.labels[layer])
        view.put(slots.labels[layer], torch.where(wanted[..., None, None], last, labels))
        if slots.settings.max_age:
            ages = view.of(slots.ages[layer]) + 1
            view.put(slots.ages[layer], torch.where(wanted, torch.ones_like(ages), ages))
        self._lookups += hits.numel()
        if hits.device.type == "cpu":
            # Here the answer costs nothing, and heads that hit need no choice.
            batch, heads = wanted.nonzero(as_tuple=True)
            self._hits += hits.numel() - batch.shape[0]
            if not batch.shape[0]:
                return None
        else:
            self._hits = self._hits + hits.sum()
            every = torch.arange(hits.numel(), device=hits.device)
            batch, heads = every // count, every % count
        queried = HeadQueries(layer, batch, heads, mine[batch, :, heads].flatten(1, 2))
        scores = self._scores(slots, view, queried).masked_fill(view.outside[batch], -torch.inf)
        # A shorter choice than the longest one is followed by arbitrary tokens.
        chosen = scores.topk(view.chosen, dim=-1, sorted=view.inside is not None).indices
        best = chosen.new_empty((*hits.shape, view.chosen))
        # Heads that hit keep their choice.
        best.copy_(view.of(slots.held[layer])[..., : view.chosen])
        best[batch, heads] = chosen
        return self._gather(layer, best, wanted, view)

    def arrived(self, pending: PendingGather | None) -> None:
        """Let the next computation come after the gather.

        Raises:
            TransferFailed: it failed; the slots of the view are to be closed.
        """
        if pending is not None:
            self.slots.mover.wait(pending.event)

    def _hits_of(self, layer: int, last: Tensor, view: View) -> Tensor:
        """(batch, heads) bool, of queries (batch, heads, group, d)."""
        slots = self.slots
        if view.new > 1:
            # A chunk has many queries: no single one to compare with a label.
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
        return alike(similarity, self._importance[layer], self._tau[layer])

    def _gather(self, layer: int, best: Tensor, wanted: Tensor, view: View) -> PendingGather:
        """Gather the missing positions among `best` (batch, heads, chosen) of wanted heads (batch,
        heads), to the places of positions that are not chosen again."""
        slots = self.slots
        held = view.of(slots.held[layer])[..., : view.chosen]
        after, moved = replaced(held, best, wanted, view.inside, slots.settings.max_tokens)
        view.put(slots.held[layer][..., : view.chosen], after)
        # A place that holds nothing is not moved either.
        positions = after.clamp_max(view.outside.shape[1] - 1)
        blocks = (positions // slots.arena.block_tokens).flatten(1)
        blocks = view.table.gather(1, blocks).view(positions.shape)
        keys = slots.key_rows(blocks, positions, slots.offloaded[layer][:, None])
        rows = torch.stack((keys, keys + slots.value_step), dim=1).where(moved[:, None], -1)
        first, last = view.slots[0], view.slots[-1]
        if last - first >= len(view.slots):
            # A gather has one target: all slots from the first to the last. Places without a row
            # stay as they are.
            apart = rows.new_full((last - first + 1, *rows.shape[1:]), -1)
            rows = apart.index_copy(0, view.index - first, rows)
        start = slots.layout.choice_start
        target = slots.store[layer][first : last + 1, :, :, start : start + view.chosen]
        gather = Gather(
            target.flatten(1, 2), slots.rows(layer), rows.flatten(1, 2), self._moved_rows
        )
        self._moved_bytes += gather.nbytes
        # Behind the last attention to these places.
        event = slots.mover.h2d(pairs([gather]), slots.mover.mark())
        return PendingGather(event, [gather])


def replaced(
    held: Tensor, best: Tensor, wanted: Tensor, inside: Tensor | None, none: int
) -> tuple[Tensor, Tensor]:
    """Positions (batch, heads, places) with those of `best` in place, and which places changed.

    Args:
        wanted: heads (batch, heads) that change.
        inside: places (batch, places) that there are; None: all.
        none: the position of places that hold nothing, above every other.
    """
    unset = held.new_zeros((*wanted.shape, none + 1), dtype=torch.bool)
    if inside is not None:
        best = best.where(inside[:, None], none)
    chosen = unset.scatter(2, best, True)
    chosen[..., none] = False
    free = ~chosen.gather(2, held) & wanted[..., None]
    fresh = ~unset.scatter(2, held, True).gather(2, best)
    if inside is not None:
        free &= inside[:, None]
        fresh &= inside[:, None]
    # The n-th new position goes to the n-th free place: there are as many.
    queue = held.new_zeros((*wanted.shape, held.shape[2] + 1))
    queue.scatter_(2, fresh.cumsum(dim=2) * fresh, best)
    return torch.where(free, queue.gather(2, free.cumsum(dim=2)), held), free
