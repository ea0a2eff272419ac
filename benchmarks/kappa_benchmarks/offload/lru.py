"""An LRU cache of KV blocks in as much memory as CLO's choice: the rival of paper 004.

After the paper's account of RetroInfer and PQCache: at each step, each KV head chooses blocks by
the means of their keys, looks them up, and merges the missing ones from host memory into its cache.
As there is room for one choice, the blocks that leave are those that were not chosen again: whole
tensors stand for the lists, which here cost nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kappa.plans.clo import HeadProfile
from kappa_engine.sparse.cache import PendingGather, SimilarityCache
from kappa_engine.sparse.gather_kernel import Gather, pairs
from kappa_engine.sparse.slots import Slots, View


class LruCache(SimilarityCache):
    """The blocks of slots that are all of one length, as many whole ones as the choice has room
    for when a slot is opened; no block is chosen that holds a sink."""

    def __init__(self, slots: Slots, heads: HeadProfile) -> None:
        super().__init__(slots, heads)
        size, config, count = slots.arena.block_tokens, slots.config, len(slots.states)
        state = slots.states[0]
        self._size, self._room = size, state.chosen // size
        self._sinks = -(-slots.layout.sinks // size)
        blocks = slots.table.shape[1]
        self._held = [torch.full((count * len(h), self._room), -1) for h in slots.offloaded]
        self._means = [
            torch.zeros((count, len(h), blocks, config.head_dim), dtype=slots.arena.dtype)
            for h in slots.offloaded
        ]
        self._known = [0] * config.layers

    def look_up(self, layer: int, queries: Tensor, view: View) -> PendingGather | None:
        """As `SimilarityCache.look_up`, with the actual queries; counts blocks."""
        slots, offloaded = self.slots, self.slots.offloaded[layer]
        blocks = view.table.shape[1]
        if not len(offloaded) or not self._room or not self._average(layer, view):
            return None
        # Room of a choice beyond whole blocks stays empty.
        view.seen[..., slots.layout.choice_start + self._room * self._size :] = False
        group = (len(view.slots), slots.config.kv_heads, slots.layout.group, -1)
        q = queries.view(group)[:, offloaded]
        scores = torch.matmul(q, self._means[layer][:, :, :blocks].transpose(2, 3)).sum(dim=2)
        scores[..., : self._sinks] = -torch.inf
        best = scores.flatten(0, 1).topk(self._room, dim=-1).indices
        held = self._held[layer]
        wanted = torch.zeros((len(best), blocks), dtype=torch.bool).scatter_(1, best, True)
        have = torch.zeros_like(wanted)
        pair, place = (held >= 0).nonzero(as_tuple=True)
        have[pair, held[pair, place]] = True
        # As many places are free as blocks are missing, head by head.
        missing_pair, missing = (wanted & ~have).nonzero(as_tuple=True)
        keeps = (held >= 0) & wanted.gather(1, held.clamp_min(0))
        free = (~keeps).nonzero(as_tuple=True)
        held[free] = missing
        self._lookups += best.numel()
        self._hits += best.numel() - len(missing)
        if not len(missing):
            return None
        slot, head = missing_pair // len(offloaded), missing_pair % len(offloaded)
        inside = torch.arange(self._size)
        keys = slots.key_rows(view.table[slot, missing][:, None], inside, offloaded[head][:, None])
        gather = Gather.whole(slots.rows(layer), torch.stack((keys, keys + slots.value_step)))
        self._moved_bytes += gather.target.nbytes
        self.arrived(PendingGather(slots.mover.h2d(pairs([gather])), [gather]))
        places = slots.layout.choice_start + free[1][:, None] * self._size + inside
        store = slots.store[layer]
        for which in (0, 1):
            store[slot[:, None], which, head[:, None], places] = gather.target[which]
        return None

    def _average(self, layer: int, view: View) -> bool:
        """Means of blocks that have come to host memory since; whether there are any to choose."""
        known, blocks = self._known[layer], view.table.shape[1]
        if known < blocks:
            rows = self.slots.arena.kv_host[layer][view.table[:, known:], 0]
            means = rows.mean(dim=2)[:, :, self.slots.offloaded[layer]]
            self._means[layer][:, :, known:blocks] = means.transpose(1, 2)
            self._known[layer] = blocks
        return blocks - self._sinks >= self._room
