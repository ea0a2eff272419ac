"""Decoding schedules over offloaded caches, offline: batches of equal standing, greedy tokens.

Row by row: a batch goes through all layers for its next token, then the next batch (for latency,
weights on the device). Column by column: each layer serves all batches before the next one (for
throughput, weights streamed), in the order of Algorithm 1 of paper 000. How a block is kept (KV or
activations, device or host, or both in host as KVPR needs them) is a `Kept` per block, so that both
schedules, KVPR's split and HybridServe's mixture are one loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from benchmarks.offload.streaming import Order, ScheduledForward, Store
from engine.blocks import BlockType, Ids, Place
from engine.step import DeviceStep, Pages, Source, StepRow, TokenSpan, joined, prompt_row


@dataclass(frozen=True, slots=True)
class Kept:
    """How one block of tokens is kept.

    filling: as what, on the device, while tokens are added to it. full: as what it goes to host
    memory when it is full, leaving the device; nothing: it stays.
    """

    filling: tuple[BlockType, ...]
    full: tuple[BlockType, ...] = ()

    def __post_init__(self) -> None:
        if not self.filling or not set(self.full) <= set(self.filling):
            raise ValueError(
                f"Kept(filling={self.filling}, full={self.full}): a block goes to host memory as "
                "what it was while it filled, which is kv, act or both"
            )


KV_DEVICE = Kept(("kv",))
KV_HOST = Kept(("kv",), ("kv",))
ACT_HOST = Kept(("act",), ("act",))
BOTH_HOST = Kept(("kv", "act"), ("kv", "act"))
"""KVPR's: the split moves with the length, so the first tokens are stored both ways."""

# How the next block is kept, given how many of the sequence are kept as KV alone, and how many not.
Placement = Callable[[int, int], Kept]
# Of so many tokens, how many of the first come from host activations where those are stored.
Split = Callable[[int], int]


def always(kept: Kept) -> Placement:
    """Every block alike."""
    return lambda kv_blocks, act_blocks: kept


@dataclass(slots=True)
class Decoding:
    """A sequence being decoded: tokens in its blocks, and how each block is kept."""

    length: int
    pages: Pages
    kept: list[Kept] = field(default_factory=list)


class Decoder:
    """Prompts in batches, then tokens, all sequences in step.

    Args:
        forward: the model, its blocks, its mover.
        placement: how blocks are kept.
        order: "row" or "column".
        split: KVPR's l for a sequence of that length; none: what is stored as KV is loaded as KV.
        cpu: of a sequence of that length, how many of the first tokens the CPU attends to where
            they lie, as far as those are in host memory; none: it attends to nothing.

    `close` gives all blocks back.
    """

    def __init__(
        self, forward: ScheduledForward, placement: Placement, *, order: Order = "row",
        split: Split | None = None, cpu: Split | None = None,
    ) -> None:  # fmt: skip
        self.forward, self.placement, self.order, self.split = forward, placement, order, split
        self.cpu = cpu
        self.batches: list[list[Decoding]] = []
        self._last: list[Tensor] = []
        self._generated: list[list[Tensor]] = []

    def prefill(self, prompts: Sequence[Sequence[Ids]]) -> list[Tensor]:
        """Compute batches of prompts, each a pass; logits (sequences, vocabulary) of each.

        Raises:
            OutOfBlocks: a pool is too small.
        """
        logits = []
        for batch in prompts:
            decodings = [self._allocate(len(tokens)) for tokens in batch]
            self.batches.append(decodings)
            stores = [
                Store(prompt_row(tokens, decoding.pages), from_token=0)
                for tokens, decoding in zip(batch, decodings, strict=True)
            ]
            logits.append(self.forward.store(stores))
            self._take(len(self.batches) - 1, logits[-1])
        return logits

    def step(self) -> list[Tensor]:
        """The next token of every sequence; logits (sequences, vocabulary) of each batch.

        On a GPU this returns before the work is done; nothing waits for the host.
        """
        steps: list[tuple[DeviceStep, list[Store]]] = []
        leaving: list[tuple[Decoding, int]] = []
        for batch, last in zip(self.batches, self._last, strict=True):
            stores = [self._next(decoding, leaving) for decoding in batch]
            step = self.forward.build([store.row for store in stores])
            step.tokens = last
            steps.append((step, stores))
        logits = self.forward.run_all(steps, self.order)
        for index, scores in enumerate(logits):
            self._take(index, scores)
        # Blocks that have gone to host memory give their device blocks back.
        for decoding, index in leaving:
            for type in decoding.kept[index].filling:
                column = decoding.pages.column(type, "device")
                self._free(type, "device", column[index : index + 1])
                column[index] = -1
        return logits

    def tokens(self) -> list[Ids]:
        """What every batch has generated, (sequences, tokens); waits for the device."""
        return [torch.stack(tokens, dim=1).cpu().numpy() for tokens in self._generated]

    def close(self) -> None:
        """Give all blocks back."""
        for decoding in (d for batch in self.batches for d in batch):
            for type, place in self.forward.arena.pools:
                ids = decoding.pages.column(type, place)
                self._free(type, place, ids[ids >= 0])
        self.batches, self._last, self._generated = [], [], []

    # -- blocks -------------------------------------------------------------------------------

    def _allocate(self, tokens: int) -> Decoding:
        """Blocks of a prompt: full ones where they are kept, the last one to be filled on."""
        bt = self.forward.arena.block_tokens
        decoding = Decoding(tokens, Pages())
        for _ in range(-(-tokens // bt)):
            self._open(decoding)
        where: dict[tuple[BlockType, Place], list[int]] = {}
        for index, kept in enumerate(decoding.kept):
            gone = index < tokens // bt and bool(kept.full)
            for type in kept.full if gone else kept.filling:
                where.setdefault((type, "host" if gone else "device"), []).append(index)
        for (type, place), indices in where.items():
            ids = self.forward.arena.pools[type, place].allocate(len(indices))
            decoding.pages.put(len(decoding.kept), type, place, [])
            decoding.pages.column(type, place)[indices] = ids
        return decoding

    def _open(self, decoding: Decoding) -> None:
        act = sum("act" in kept.filling for kept in decoding.kept)
        decoding.kept.append(self.placement(len(decoding.kept) - act, act))

    def _next(self, decoding: Decoding, leaving: list[tuple[Decoding, int]]) -> Store:
        """Its part of the next step, with a block for the new token."""
        bt, pools = self.forward.arena.block_tokens, self.forward.arena.pools
        index, offset = divmod(decoding.length, bt)
        if offset == 0:
            self._open(decoding)
            for type in decoding.kept[index].filling:
                decoding.pages.put(index, type, "device", pools[type, "device"].allocate(1))
        length = decoding.length
        split = 0 if self.split is None else self.split(length)
        on_cpu = 0 if self.cpu is None else self.cpu(length)
        spans = held_spans(decoding.pages, length, bt, split, on_cpu)
        full = []
        if offset == bt - 1 and decoding.kept[index].full:
            for type in decoding.kept[index].full:
                decoding.pages.put(index, type, "host", pools[type, "host"].allocate(1))
            full = [index]
            leaving.append((decoding, index))
        decoding.length += 1
        # Which token it is, only the device knows yet.
        spans = joined([*spans, TokenSpan(Source.NEW, length, length + 1)])
        return Store(StepRow([0], spans, decoding.pages), full=full)

    def _free(self, type: BlockType, place: Place, ids: Ids) -> None:
        self.forward.arena.pools[type, place].free(int(i) for i in ids)

    def _take(self, batch: int, logits: Tensor) -> None:
        best = logits.argmax(dim=-1)
        if batch == len(self._generated):
            self._generated.append([])
            self._last.append(best)
        self._generated[batch].append(best)
        self._last[batch] = best


def held_spans(
    pages: Pages, tokens: int, block_tokens: int, activations: int = 0, on_cpu: int = 0
) -> tuple[TokenSpan, ...]:
    """Spans of tokens that are in their blocks: the nearest of those that a block has.

    In order: KV on the device, activations on the device, KV in host memory, activations in host
    memory. activations: the first so many tokens come from host activations where there are any,
    and no KV on the device (KVPR's split). on_cpu: of the first so many, those that lie in host
    memory as KV are left to the CPU.
    """
    blocks = np.arange(-(-tokens // block_tokens))
    nearest = (Source.KV_DEVICE, Source.ACT_DEVICE, Source.KV_HOST, Source.ACT_HOST)
    there = np.stack([pages.of(source, blocks) >= 0 for source in nearest])
    sources = np.repeat(there.argmax(axis=0) + Source.KV_DEVICE, block_tokens)[:tokens]
    act = np.repeat(there[nearest.index(Source.ACT_HOST)], block_tokens)[:activations]
    first = sources[:activations]
    first[act[: len(first)] & (first == Source.KV_HOST)] = Source.ACT_HOST
    left = sources[:on_cpu]
    left[left == Source.KV_HOST] = Source.KV_CPU
    cuts = [0, *(np.flatnonzero(np.diff(sources)) + 1).tolist(), tokens]
    return joined(TokenSpan(Source(sources[a]), a, b) for a, b in pairwise(cuts) if b > a)
