"""The forward pass of sequences that decode sparsely: each layer attends to its slots' tokens.

At the start of a layer the next one's queries are predicted from the hidden states as they are
(Eq. 5 of paper 004, with the norm, head norm and rotary embedding that it leaves out), and the
tokens that they miss are gathered while this layer computes. Persistent heads attend to all tokens
with their actual query. A pass computes one new token per slot, or a chunk of one slot's prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kappa.plans.clo import HeadProfile, Persistent, SparseSettings, equal_heads
from kappa_engine import layers
from kappa_engine.forward import Forward
from kappa_engine.sparse.cache import PendingGather, SimilarityCache
from kappa_engine.sparse.slots import Slots, View


class SparseForward:
    """A model over the slots of `cache`; its weights lie on the device."""

    def __init__(self, forward: Forward, cache: SimilarityCache) -> None:
        self._forward, self.weights, self.config = forward, forward.weights, forward.config
        self.cache, self.slots = cache, cache.slots
        self._ahead = self.slots.settings.prefetch

    @torch.no_grad()
    def run(
        self, slots: Sequence[int], tokens: Tensor, take_block: Callable[[], int | None]
    ) -> Tensor:
        """Compute `tokens` (batch, new) of the slots; logits (batch, vocabulary) of the last ones.

        take_block: allocates a host block, for a block of a slot that is no longer recent.

        Raises:
            TransferFailed: a gather, or the copy of a block, failed: the slots are to be closed.
        """
        view = self.slots.begin(slots, tokens.shape[1])
        flat = view.positions.flatten()
        hidden = layers.embed(self.weights, tokens.flatten(), flat)
        turn = self._forward.angles(flat)
        waiting: PendingGather | None = None
        for index, layer in enumerate(self.weights.layers):
            following: PendingGather | None = None
            if self._ahead and index + 1 < self.config.layers:
                # The next layer's queries, as the hidden states before this one predict them.
                coming = self.weights.layers[index + 1]
                a = layers.attention_input(hidden, coming, self.config)
                predicted = layers.project_q(a, coming, self.config, turn)
                following = self.cache.look_up(index + 1, predicted, view)
            a = layers.attention_input(hidden, layer, self.config)
            queries = layers.project_q(a, layer, self.config, turn)
            kv = a.new_empty((len(hidden), 2 * self.config.kv_width))
            layers.project_kv(a, layer, self.config, turn, kv)
            self.slots.write(index, view, kv)
            if not self._ahead or index == 0:
                # No layer comes before the first to predict its queries.
                waiting = self.cache.look_up(index, queries, view)
            self.cache.arrived(waiting)
            attended = attend(self.slots, index, queries, view)
            hidden = layers.project_out(hidden, attended, layer, self.config)
            hidden, waiting = layers.feed_forward(hidden, layer, self.config), following
        self.slots.end(view, take_block)
        last = hidden.view(len(view.slots), view.new, -1)[:, -1]
        return layers.logits(last, self.weights)


def sparse_forward(
    forward: Forward, settings: SparseSettings, *, persistent: Persistent | None = None,
    heads: HeadProfile | None = None, tau: Tensor | None = None,
) -> SparseForward:  # fmt: skip
    """Build a model with slots of its own, beside `forward`'s blocks.

    Args:
        persistent: KV heads of each layer that keep all KV on the device; by default all of the
            first layer.
        heads: their importance; by default all alike.
        tau: thresholds (layers, kv_heads) instead of those that follow from the importance.
    """
    config = forward.config
    if persistent is None:
        persistent = (tuple(range(config.kv_heads)), *[()] * (config.layers - 1))
    heads = heads or equal_heads(config.shape)
    slots = Slots(forward, settings, persistent, heads.codes)
    return SparseForward(forward, SimilarityCache(slots, heads, tau))


def attend(slots: Slots, index: int, queries: Tensor, view: View) -> Tensor:
    """Attend from a layer's queries (batch·new, heads, head_dim): (batch·new, heads·head_dim)."""
    config, group, batch = slots.config, slots.layout.group, len(view.slots)
    # Heads that share keys become queries of one head: (batch, kv_heads, new·group, d).
    q = queries.view(batch, view.new, config.kv_heads, group, -1).transpose(1, 2).flatten(2, 3)
    out = torch.empty_like(q)
    for heads, held, seen in (
        (slots.offloaded[index], slots.store[index], view.seen),
        (slots.persistent[index], slots.full[index], view.all_seen),
    ):
        if not heads.shape[0]:
            continue
        kv = view.of(held)[:, :, :, : seen.shape[-1]]
        whole = heads.shape[0] == config.kv_heads
        mine = q if whole else q[:, heads]
        scale = config.head_dim**-0.5
        got = F.scaled_dot_product_attention(mine, kv[:, 0], kv[:, 1], seen, scale=scale)
        if whole:
            out = got
        else:
            out[:, heads] = got
    apart = out.view(batch, config.kv_heads, view.new, group, -1)
    return apart.transpose(1, 2).reshape(batch * view.new, config.query_width)
