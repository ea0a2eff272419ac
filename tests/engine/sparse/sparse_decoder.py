"""Sparse decoding offline: prompts computed exactly, then greedy tokens, all sequences in step.

As `benchmarks.offload.decoder` is for exact schedules. Prompts are computed in
chunks into device blocks, move into lanes, and leave those blocks; from then on each step is one
sparse pass over all lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.forward import Forward
from engine.prefill import Prompt, prefill
from engine.sparse.forward import over_lanes
from engine.sparse.opening import open_from_device
from engine.sparse.settings import SparseSettings
from engine.step import Ids, Pages
from kappa.plans.clo import HeadProfile, Persistent

_CHUNK_TOKENS = 2048


class SparseDecoder:
    """Sequences in the lanes 0, 1, ...

    Args:
        forward: the model, its blocks, its mover.
        settings: of the lanes.
        persistent, heads, tau: as `over_lanes` has them.

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
    ) -> None:
        self.forward = forward
        self.sparse = over_lanes(forward, settings, persistent=persistent, heads=heads, tau=tau)
        self.cache, self.lanes = self.sparse.cache, self.sparse.lanes
        self._count = 0
        self._last: Tensor | None = None
        self._generated: list[Tensor] = []

    def prefill(self, prompts: Sequence[Ids]) -> Tensor:
        """Compute prompts, one after the other, each into a lane; logits (prompts, vocabulary).

        Raises:
            OutOfBlocks: a pool is too small.
        """
        logits = torch.cat([self._open(lane, np.asarray(p)) for lane, p in enumerate(prompts)])
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

    def take_block(self, lane: int) -> int:
        return self.forward.arena.pools["kv", "host"].allocate(1)[0]

    def close(self) -> None:
        """Give all blocks back."""
        for lane in range(self._count):
            self.forward.arena.pools["kv", "host"].free(self.lanes.close(lane))
        self._count, self._last, self._generated = 0, None, []

    def _open(self, lane: int, prompt: Ids) -> Tensor:
        forward, pools = self.forward, self.forward.arena.pools
        block = forward.arena.block_tokens
        device = pools["kv", "device"].allocate(-(-len(prompt) // block))
        pages = Pages(len(device))
        pages.put(0, "kv", "device", device)
        for start in range(0, len(prompt), _CHUNK_TOKENS):
            part = prompt[: start + _CHUNK_TOKENS]
            logits = prefill(forward, [Prompt(part, pages, start_tokens=start)])
        count = self.lanes.host_part(len(prompt)) // block
        host = pools["kv", "host"].allocate(count)
        copied = open_from_device(self.lanes, lane, len(prompt), device, host, range(count))
        if copied is not None:
            forward.mover.wait(copied)
        pools["kv", "device"].free(device)
        return logits

    def _take(self, logits: Tensor) -> None:
        self._last = logits.argmax(dim=-1)
        self._generated.append(self._last)
