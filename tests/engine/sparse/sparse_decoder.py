"""Sparse decoding offline: prompts computed exactly, then greedy tokens, all sequences in step.

Prompts are computed in chunks into device blocks, move into slots, and leave those blocks; from
then on each step is one sparse pass over all slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kappa.plans.clo import HeadProfile, Persistent, SparseSettings, equal_heads
from kappa_engine.block_pool import Ids
from kappa_engine.forward import Forward
from kappa_engine.sparse.cache import SimilarityCache
from kappa_engine.sparse.forward import SparseForward, sparse_forward
from kappa_engine.sparse.serving import promote_from_device
from kappa_engine.sparse.slots import Slots, View
from kappa_engine.step import Pages, prompt_row

_CHUNK_TOKENS = 2048


class SparseDecoder:
    """Sequences in the slots 0, 1, ...

    Args:
        forward: the model, its blocks, its mover.
        settings: of the slots.
        injected: a hit rate to impose.
        persistent, heads, tau: as `sparse_forward` has them.

    `close` gives all blocks back.
    """

    def __init__(
        self,
        forward: Forward,
        settings: SparseSettings,
        *,
        persistent: Persistent | None = None,
        heads: HeadProfile | None = None,
        tau: Tensor | None = None,
        injected: float | None = None,
    ) -> None:
        self.forward = forward
        self.sparse = sparse_forward(forward, settings, persistent=persistent, heads=heads, tau=tau)
        if injected is not None:
            model = forward.config.shape
            cache = InjectedCache(self.sparse.slots, heads or equal_heads(model), injected)
            self.sparse = SparseForward(forward, cache)
        self.cache, self.slots = self.sparse.cache, self.sparse.slots
        self._count = 0
        self._last: Tensor | None = None
        self._generated: list[Tensor] = []

    def prefill(self, prompts: Sequence[Ids]) -> Tensor:
        """Compute prompts, one after the other, each into a slot; logits (prompts, vocabulary).

        Raises:
            OutOfBlocks: a pool is too small.
        """
        logits = torch.cat([self._open(slot, np.asarray(p)) for slot, p in enumerate(prompts)])
        self._count = len(prompts)
        self._take(logits)
        return logits

    def step(self) -> Tensor:
        """The next token of every sequence; logits (sequences, vocabulary)."""
        assert self._last is not None
        logits = self.sparse.run(range(self._count), self._last[:, None], self.take_block)
        self._take(logits)
        return logits

    def tokens(self) -> Ids:
        """What has been generated, (sequences, tokens); waits for the device."""
        return np.asarray(torch.stack(self._generated, dim=1).cpu())

    def take_block(self) -> int:
        """A host block."""
        return self.forward.arena.pools["kv", "host"].allocate(1)[0]

    def close(self) -> None:
        """Give all blocks back."""
        for slot in range(self._count):
            self.forward.arena.pools["kv", "host"].free(self.slots.close(slot))
        self._count, self._last, self._generated = 0, None, []

    def _open(self, slot: int, prompt: Ids) -> Tensor:
        forward, pools = self.forward, self.forward.arena.pools
        block = forward.arena.block_tokens
        device = pools["kv", "device"].allocate(-(-len(prompt) // block))
        pages = Pages(np.array(device))
        for start in range(0, len(prompt), _CHUNK_TOKENS):
            part = prompt[: start + _CHUNK_TOKENS]
            logits = forward.compute([prompt_row(part, pages, start=start)])
        count = self.slots.host_part(len(prompt)) // block
        host = pools["kv", "host"].allocate(count)
        copied = promote_from_device(self.slots, slot, len(prompt), device, host, range(count))
        if copied is not None:
            forward.mover.wait(copied)
        pools["kv", "device"].free(device)
        return logits

    def _take(self, logits: Tensor) -> None:
        self._last = logits.argmax(dim=-1)
        self._generated.append(self._last)


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
