"""Which tokens a head chooses: the k of a context in host memory with the highest scores.

`Oracle` scores the keys themselves: with all of them brought over the link, so it is for tests, for
the CPU, and to judge others by. `Hashed` compares codes that are on the device. Both work on pairs
of a lane and a KV head, whose scores are summed over the queries of the head's group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.sparse.codes import agreement
from engine.sparse.gather import Gather, pairs
from engine.sparse.lanes import Lanes
from engine.sparse.view import View


@dataclass(slots=True)
class Asked:
    """Heads whose choice is to be made: pair i is lane `batch[i]` of the view, head `heads[i]` of
    the layer's offloaded ones, with queries (pairs, queries, head_dim)."""

    layer: int
    batch: Tensor
    heads: Tensor
    queries: Tensor


class Retriever(Protocol):
    """Scores tokens for heads."""

    def scores(self, lanes: Lanes, view: View, asked: Asked) -> Tensor:
        """(pairs, host tokens), higher is better; of tokens that are no candidates anything."""
        ...


class Oracle:
    """The share of attention that each token would get among all candidates, summed over queries.

    With one query per head that orders tokens as their scores do: plain top-k.
    """

    def scores(self, lanes: Lanes, view: View, asked: Asked) -> Tensor:
        """Softmax of the scaled products with every key."""
        keys = self._keys(lanes, view, asked)
        wide = torch.promote_types(keys.dtype, torch.float32)
        scale = lanes.config.head_dim**-0.5
        products = torch.matmul(asked.queries.to(wide), keys.to(wide).transpose(1, 2)) * scale
        outside = ~view.candidates[asked.batch][:, None]
        # Finite, for lanes that have no candidate at all.
        products = products.masked_fill(outside, torch.finfo(wide).min)
        return products.softmax(dim=-1).sum(dim=1)

    def _keys(self, lanes: Lanes, view: View, asked: Asked) -> Tensor:
        """(pairs, host tokens, head_dim), brought from host memory."""
        block = lanes.arena.block_tokens
        tokens = view.candidates.shape[1]
        positions = torch.arange(tokens, device=view.index.device)
        blocks = view.table[asked.batch][:, positions // block]
        heads = lanes.offloaded[asked.layer][asked.heads]
        rows = lanes.key_rows(blocks, positions, heads[:, None])[None]
        source = lanes.rows(asked.layer)
        target = source.new_empty((*rows.shape, source.shape[1]), device=rows.device)
        wanted = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
        gather = pairs([Gather(target, source, rows, wanted)])
        lanes.mover.wait(lanes.mover.h2d(gather, lanes.mover.mark()))
        return target[0]


class Hashed:
    """Bits in common of the codes of queries and keys."""

    def scores(self, lanes: Lanes, view: View, asked: Asked) -> Tensor:
        """Counted on the device."""
        assert lanes.hasher is not None
        # (pairs, blocks, block_tokens, words)
        codes = lanes.codes[asked.layer][view.table[asked.batch], asked.heads[:, None]]
        return agreement(lanes.hasher.encode(asked.queries), codes.flatten(1, 2), lanes.hasher)


RETRIEVERS: dict[str, type[Oracle] | type[Hashed]] = {"oracle": Oracle, "hash": Hashed}


def choose(retriever: Retriever, lanes: Lanes, view: View, asked: Asked) -> Tensor:
    """Positions (pairs, chosen) of the best candidates of each pair, the best first.

    A lane with fewer candidates than the longest choice gets any tokens behind its own.
    """
    scores = retriever.scores(lanes, view, asked)
    outside = ~view.candidates[asked.batch]
    best = scores.masked_fill(outside, -torch.inf).topk(view.chosen, dim=-1)
    return best.indices
