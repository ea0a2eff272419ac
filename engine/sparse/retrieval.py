"""Which tokens a head chooses: the k of a context in host memory with the highest scores.

`Oracle` scores the keys themselves: with all of them brought over the link, so it is for tests, for
the CPU, and to judge others by. `Hashed` compares codes that are on the device: the signs of random
projections, packed 64 to a word. Two vectors' codes agree in a share of bits that falls with the
angle between them, so the keys with the most bits in common are those with the highest scores,
nearly (as HATA of paper 004 does with projections that it trains; these are random, from a seed).
One code per token and KV head, under the host block that holds the key. Both work on pairs of a
slot and a KV head, whose scores are summed over the queries of the head's group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.sparse.codes import agreement
from engine.sparse.gather import Gather, pairs
from engine.sparse.slots import Slots
from engine.sparse.view import View


@dataclass(slots=True)
class HeadQueries:
    """Heads whose choice is to be made: pair i is slot `batch[i]` of the view, head `heads[i]` of
    the layer's offloaded ones, with queries (pairs, queries, head_dim)."""

    layer: int
    batch: Tensor
    heads: Tensor
    queries: Tensor


class Retriever(Protocol):
    """Scores tokens for heads."""

    def scores(self, slots: Slots, view: View, queried: HeadQueries) -> Tensor:
        """(pairs, host tokens), higher is better; of tokens that are no candidates anything."""
        ...


class Oracle:
    """The share of attention that each token would get among all candidates, summed over queries.

    With one query per head that orders tokens as their scores do: plain top-k.
    """

    def scores(self, slots: Slots, view: View, queried: HeadQueries) -> Tensor:
        """Softmax of the scaled products with every key."""
        keys = self._keys(slots, view, queried)
        wide = torch.promote_types(keys.dtype, torch.float32)
        scale = slots.config.head_dim**-0.5
        products = torch.matmul(queried.queries.to(wide), keys.to(wide).transpose(1, 2)) * scale
        outside = ~view.candidates[queried.batch][:, None]
        # Finite, for slots that have no candidate at all.
        products = products.masked_fill(outside, torch.finfo(wide).min)
        return products.softmax(dim=-1).sum(dim=1)

    def _keys(self, slots: Slots, view: View, queried: HeadQueries) -> Tensor:
        """(pairs, host tokens, head_dim), brought from host memory."""
        block = slots.arena.block_tokens
        tokens = view.candidates.shape[1]
        positions = torch.arange(tokens, device=view.index.device)
        blocks = view.table[queried.batch][:, positions // block]
        heads = slots.offloaded[queried.layer][queried.heads]
        rows = slots.key_rows(blocks, positions, heads[:, None])[None]
        source = slots.rows(queried.layer)
        target = source.new_empty((*rows.shape, source.shape[1]), device=rows.device)
        wanted = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
        gather = pairs([Gather(target, source, rows, wanted)])
        slots.mover.wait(slots.mover.h2d(gather, slots.mover.mark()))
        return target[0]


class Hashed:
    """Bits in common of the codes of queries and keys."""

    def scores(self, slots: Slots, view: View, queried: HeadQueries) -> Tensor:
        """Counted on the device."""
        assert slots.hasher is not None
        # (pairs, blocks, block_tokens, words)
        codes = slots.codes[queried.layer][view.table[queried.batch], queried.heads[:, None]]
        return agreement(slots.hasher.encode(queried.queries), codes.flatten(1, 2), slots.hasher)


RETRIEVERS: dict[str, type[Oracle] | type[Hashed]] = {"oracle": Oracle, "hash": Hashed}


def choose(retriever: Retriever, slots: Slots, view: View, queried: HeadQueries) -> Tensor:
    """Positions (pairs, chosen) of the best candidates of each pair, the best first.

    A slot with fewer candidates than the longest choice gets any tokens behind its own.
    """
    scores = retriever.scores(slots, view, queried)
    outside = ~view.candidates[queried.batch]
    best = scores.masked_fill(outside, -torch.inf).topk(view.chosen, dim=-1)
    return best.indices
