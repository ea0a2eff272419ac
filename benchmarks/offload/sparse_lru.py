"""An LRU cache of KV blocks, managed on the host, as a baseline for CLO (paper 004, Table 1).

Our own rendering of what the paper says of such systems: each KV head chooses blocks by the means
of their keys, the host learns which (a synchronisation), keeps a list per head in order of use,
gathers what is missing into a staging buffer, copies it, and merges it into the cache. Which blocks
are chosen is drawn so that a set part of them stays from step to step. What the lists take in
Python is timed apart, since a compiled program would take less.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.offload.rig import SparseRig
from engine import layers
from engine.layers import angles, frequencies
from engine.sparse.view import View

CAPACITY = 3
"""Blocks in the cache, in choices (paper 004: 30 % of the context at a choice of 10 %)."""
STAYING = 0.9
"""Of a choice, the part that stays to the next step; gives about the hit rates of Table 4."""


@dataclass(slots=True)
class LruCounts:
    """Blocks asked for, found, and seconds that the lists took."""

    asked: int = 0
    found: int = 0
    managed_s: float = 0.0


class LruDecoder:
    """Decoding steps over a rig's lanes, with LRU caches in place of choices.

    Args:
        rig: sequences in lanes 0, 1, ...
        batch, context: as the rig is open for.
        seed: of the blocks that are chosen.
    """

    def __init__(self, rig: SparseRig, batch: int, context: int, seed: int) -> None:
        self.rig, self.batch, self.counts = rig, batch, LruCounts()
        lanes, config = rig.lanes, rig.forward.config
        self._size = lanes.arena.block_tokens
        self._blocks = lanes.host_part(context) // self._size
        self._chosen = max(1, -(-lanes.settings.clo.chosen_tokens(context) // self._size))
        slots = min(CAPACITY * self._chosen, self._blocks)
        device, dtype = lanes.arena.device, lanes.arena.dtype
        self._rng = np.random.default_rng(seed)
        shape = (batch, config.kv_heads)
        self._cache: list[Tensor] = []
        self._means: list[Tensor] = []
        self._lists: list[list[OrderedDict[int, int]]] = []
        self._now: list[np.ndarray] = []
        for _ in range(config.layers):
            self._cache.append(
                torch.zeros(
                    (*shape, slots, 2, self._size, config.head_dim), dtype=dtype, device=device
                )
            )
            means = (*shape, self._blocks, config.head_dim)
            self._means.append(torch.zeros(means, dtype=dtype, device=device))
            firsts = [self._rng.permutation(self._blocks)[:slots] for _ in range(np.prod(shape))]
            self._lists.append(
                [OrderedDict((int(b), i) for i, b in enumerate(first)) for first in firsts]
            )
            self._now.append(np.stack([first[: self._chosen] for first in firsts]))
        inverse, factor = frequencies(config.rope, config.head_dim)
        self._rope = inverse.to(device), factor
        self._tokens = torch.zeros(batch, dtype=torch.int64, device=device)

    @torch.no_grad()
    def step(self) -> None:
        """One token of every sequence."""
        rig, lanes = self.rig, self.rig.lanes
        weights, config = rig.forward.weights, rig.forward.config
        view = lanes.begin(range(self.batch), 1)
        flat = view.positions.flatten()
        hidden = layers.embed(weights, self._tokens, flat)
        turn = angles(flat, *self._rope, weights.dtype)
        for index in range(config.layers):
            layer = weights.layer(index)
            a = layers.attention_input(hidden, layer, config)
            queries = layers.project_q(a, layer, config, turn)
            kv = torch.empty((self.batch, 2 * config.kv_width), dtype=a.dtype, device=a.device)
            layers.project_kv(a, layer, config, turn, kv)
            lanes.write(index, view, kv)
            attended = self._attend(index, queries, view)
            hidden = layers.finish(hidden, attended, layer, config)
        lanes.end(view, rig.take_block)
        self._tokens = layers.logits(hidden, weights).argmax(dim=-1)

    def _attend(self, index: int, queries: Tensor, view: View) -> Tensor:
        lanes, config = self.rig.lanes, self.rig.forward.config
        if not len(lanes.offloaded[index]):
            from engine.sparse.forward import attend

            return attend(lanes, index, queries, view)
        q = queries.view(self.batch, config.kv_heads, lanes.layout.group, -1)
        scores = torch.matmul(q, self._means[index].transpose(2, 3)).sum(dim=2)
        # The host has to know; what it uses in place of it is drawn.
        scores.topk(self._chosen, dim=-1).indices.cpu()
        slots, missing = self._looked_up(index)
        self._fetch(index, missing)
        found = torch.from_numpy(slots).to(q.device).view(self.batch, config.kv_heads, -1)
        cache, at = self._cache[index], torch.arange(self.batch, device=q.device)[:, None, None]
        heads = torch.arange(config.kv_heads, device=q.device)[None, :, None]
        chosen = cache[at, heads, found]
        near = lanes.lane_slice(lanes.store[index], view)[:, :, :, : lanes.layout.choice_start]
        k, v = (
            torch.cat((near[:, which], chosen[:, :, :, which].flatten(2, 3)), dim=2)
            for which in (0, 1)
        )
        more = k.shape[2] - lanes.layout.choice_start
        seen = F.pad(view.seen[..., : lanes.layout.choice_start], (0, more), value=True)
        out = F.scaled_dot_product_attention(q, k, v, seen, scale=config.head_dim**-0.5)
        return out.reshape(self.batch, config.query_width)

    def _looked_up(self, index: int) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
        """Slots (heads of all lanes, chosen), and what is missing: (head, block, slot)."""
        wanted = self._drawn(index)
        begin_s = time.perf_counter()
        slots, missing = np.empty_like(wanted), []
        for head, (blocks, order) in enumerate(zip(wanted, self._lists[index], strict=True)):
            for place, block in enumerate(blocks.tolist()):
                slot = order.get(block)
                if slot is None:
                    _, slot = order.popitem(last=False)
                    order[block] = slot
                    missing.append((head, block, slot))
                else:
                    order.move_to_end(block)
                slots[head, place] = slot
        self.counts.managed_s += time.perf_counter() - begin_s
        self.counts.asked += wanted.size
        self.counts.found += wanted.size - len(missing)
        return slots, missing

    def _drawn(self, index: int) -> np.ndarray:
        """The choice of each head: most of what it was, the rest anew."""
        now = self._now[index]
        leave = self._rng.random(now.shape) >= STAYING
        for head, going in enumerate(leave):
            others = np.setdiff1d(np.arange(self._blocks), now[head], assume_unique=True)
            fresh = self._rng.permutation(others)[: int(going.sum())]
            now[head, np.flatnonzero(going)[: len(fresh)]] = fresh
        return now

    def _fetch(self, index: int, missing: list[tuple[int, int, int]]) -> None:
        """Gather in host memory, copy, merge."""
        if not missing:
            return
        rig, lanes, heads = self.rig, self.rig.lanes, self.rig.forward.config.kv_heads
        head, block, slot = np.array(missing).T
        table = rig.host_blocks
        host = lanes.arena.kv_host[index]
        named = torch.from_numpy(table[head // heads, block])
        staged = host[named, :, :, torch.from_numpy(head % heads)]
        if lanes.arena.device.type == "cuda":
            staged = staged.pin_memory()
        landed = torch.empty(staged.shape, dtype=staged.dtype, device=lanes.arena.device)
        lanes.mover.wait(lanes.mover.h2d([(landed, staged)], lanes.mover.mark()))
        device = landed.device
        place = [torch.from_numpy(np.ascontiguousarray(x)).to(device)
                 for x in (head // heads, head % heads, slot)]  # fmt: skip
        self._cache[index][place[0], place[1], place[2]] = landed
