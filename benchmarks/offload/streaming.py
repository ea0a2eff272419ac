"""Schedules of papers 000 and 003 over the engine's model: streamed weights, columns, stores.

Weights in host memory are sent layer by layer, the next one while one is computed. A pass serves
all layers of one step after the other (row by row), or every step's share of a layer before the
next layer (column by column). The order of work at each layer of a step is Algorithm 1 of paper
000: the next layer's weights, the next item's activations and KV, this item's computation, its
stores: new tokens to the host blocks of their sequences, and blocks that have become full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from engine.arena import Arena
from engine.blocks import BlockType, Ids, runs
from engine.forward import Buffer, Forward, RunningStep
from engine.step import DeviceStep, Source, StepRow
from engine.transfer import Event, LinkMover
from engine.weights import Layer, Weights

Order = Literal["row", "column"]
Item = tuple[int, int]  # layer, step
Copies = list[tuple[Tensor, Tensor]]
Outgoing = tuple[Tensor, list[tuple[int, int, int]]] | None
"""Rows or blocks to send to host memory, and runs of them: from, to, how many."""

_KV_FIRST = ("kv", "kv_bias", "k_norm")


# -- weights --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamedWeights(Weights):
    """Weights whose layers lie in host memory, pinned for a GPU."""


def streamed(weights: Weights) -> StreamedWeights:
    """The same weights with their layers in host memory."""
    cuda = weights.device.type == "cuda"

    def host(tensor: Tensor) -> Tensor:
        return tensor.cpu().pin_memory() if cuda else tensor

    layers = [
        Layer(**{name: host(tensor) for name, tensor in layer.tensors().items()})
        for layer in weights.layers
    ]
    return StreamedWeights(weights.config, weights.dtype, weights.device, layers, weights.outer)


def same_layer_everywhere(weights: Weights) -> Weights:
    """The model with its first layer, on the device, in place of every layer."""
    first = {name: x.to(weights.device) for name, x in weights.layers[0].tensors().items()}
    layers = [Layer(**first)] * weights.config.layers
    return Weights(weights.config, weights.dtype, weights.device, layers, weights.outer)


def model_bytes(weights: Weights) -> int:
    """Bytes of all layers."""
    return sum(layer.nbytes for layer in weights.layers)


class WeightStream:
    """Layers in turn, copied to one of two device buffers while the other is computed with.

    A layer can be copied in several pieces, so that other copies get their turn in between.
    """

    def __init__(self, weights: StreamedWeights, mover: LinkMover) -> None:
        self._layers, self._mover = weights.layers, mover
        # The layer in each buffer, and the copies that bring it.
        self._held = [-1, -1]
        self._events: list[list[Event]] = [[], []]
        self._newest, self._loading = 1, -1
        like = weights.layers[0].tensors()
        self._there = [
            Layer(**{name: torch.empty_like(x, device=weights.device) for name, x in like.items()})
            for _ in self._held
        ]

    def load_kv(self, index: int, after: Event) -> bool:
        """Begin to copy what keys and values are made with, over the layer before the last one.

        False for a layer that is there or on its way (of a model of one or two): it is not copied
        again.
        """
        self._loading = -1
        if index in self._held:
            return False
        self._loading, self._newest = index, 1 - self._newest
        self._held[self._newest], self._events[self._newest] = index, []
        self._load([pair for name, pair in self._pairs().items() if name in _KV_FIRST], after)
        return True

    def load_rest(self, index: int, piece: int = 0, pieces: int = 1) -> None:
        """Begin to copy one of `pieces` parts of the rest: as many rows of every tensor."""
        if self._loading != index:
            return
        parts = []
        for name, (target, source) in self._pairs().items():
            rows = np.array_split(np.arange(len(target)), pieces)[piece]
            if name not in _KV_FIRST and len(rows):
                here = slice(int(rows[0]), int(rows[-1]) + 1)
                parts.append((target[here], source[here]))
        self._load(parts, None)

    def wait(self, index: int, *, kv_only: bool = False) -> Layer:
        """The layer once it has arrived, all of it or what keys and values are made with."""
        slot = self._held.index(index)
        # Copies of one direction end in order.
        self._mover.wait(self._events[slot][0 if kv_only else -1])
        return self._there[slot]

    def _pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        source = self._layers[self._loading].tensors()
        target = self._there[self._newest].tensors()
        return {name: (target[name], source[name]) for name in source}

    def _load(self, copies: Copies, after: Event | None) -> None:
        self._events[self._newest].append(self._mover.h2d(copies, after))


# -- stores ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Store:
    """What a row's sequence sends to host memory.

    from_token: new tokens from this position on go to the host blocks that the pages name. full:
    indices of blocks that the step completes, sent whole from the device.
    """

    row: StepRow
    from_token: int | None = None
    full: Sequence[int] = ()


@dataclass(slots=True)
class Sent:
    """Copies to host of an item: their sources must stay until the event."""

    sources: list[Tensor] = field(default_factory=list)
    event: Event | None = None


def _outgoing(
    step: DeviceStep, stores: Sequence[Store], bt: int, device: torch.device
) -> tuple[Outgoing, ...]:
    """Of a step: rows of the buffer, rows of the activations, blocks of KV, of activations."""
    kv: list[tuple[Ids, Ids]] = []
    act: list[tuple[Ids, Ids]] = []
    index = 0
    for store in stores:
        new_spans = [span for span in store.row.spans if span.source is Source.NEW]
        positions = np.concatenate([np.arange(span.start, span.stop) for span in new_spans])
        new = index + np.arange(len(positions))
        index += len(positions)
        if store.from_token is None:
            continue
        for source in (Source.KV_HOST, Source.ACT_HOST):
            blocks = store.row.pages.of(source, positions // bt)
            there = (blocks >= 0) & (positions >= store.from_token)
            block, offset, mine = blocks[there], positions[there] % bt, new[there]
            if source is Source.ACT_HOST:
                act.append((block * bt + offset, mine))
            else:
                target, k = block * (2 * bt) + offset, step.first_new_row + 2 * mine
                kv += [(target, k), (target + bt, k + 1)]
    full = [_full(stores, "kv"), _full(stores, "act")]
    return tuple(_ordered(pairs, device) for pairs in (kv, act, *full))


def _full(stores: Sequence[Store], type: BlockType) -> list[tuple[Ids, Ids]]:
    """Host and device blocks of those that are completed, where a sequence has both."""
    pairs = []
    for store in stores:
        host, device = (store.row.pages.column(type, place) for place in ("host", "device"))
        there = [i for i in store.full if i < min(len(host), len(device))]
        pairs += [(host[i], device[i]) for i in there if min(host[i], device[i]) >= 0]
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return [(table[:, 0], table[:, 1])]


def _ordered(pairs: list[tuple[Ids, Ids]], device: torch.device) -> Outgoing:
    """Copies in the order of their targets, so that neighbours are copied at once."""
    target = np.concatenate([t for t, _ in pairs]) if pairs else np.empty(0, np.int64)
    if not len(target):
        return None
    order = np.argsort(target)
    source = np.concatenate([s for _, s in pairs])[order]
    copies = runs(target[order].tolist(), range(len(order)))
    return torch.from_numpy(source).to(device), [(s, t, n) for t, s, n in copies]


# -- passes ---------------------------------------------------------------------------------------


class ScheduledForward(Forward):
    """A model whose weights may be streamed, and whose passes may store and serve several steps.

    `trace`, if set to a list, collects what was begun, in order: what, layer, step.
    """

    def __init__(
        self, weights: Weights, arena: Arena, mover: LinkMover, cpu_threads: int = 0
    ) -> None:
        super().__init__(weights, arena, mover, cpu_threads)
        self.trace: list[tuple[str, int, int]] | None = None
        self._stream: WeightStream | None = None
        self._restart()
        # Host blocks written by a pass are there before a later one reads them.
        self._wrote = False

    @property
    def streamed(self) -> bool:
        return isinstance(self.weights, StreamedWeights)

    def store(self, stores: Sequence[Store]) -> Tensor:
        """Compute the rows of `stores` and store what they say; logits as `compute` has them."""
        return self.run_all([(self.build([store.row for store in stores]), stores)])[0]

    def run(self, step: DeviceStep) -> Tensor:
        return self.run_all([(step, ())])[0]

    @torch.no_grad()
    def run_all(
        self, steps: Sequence[tuple[DeviceStep, Sequence[Store]]], order: Order = "row"
    ) -> list[Tensor]:
        """Logits of each step, with the stores of its rows.

        Raises:
            TransferFailed: as `run`; or a store failed.
        """
        bt, device = self.arena.block_tokens, self.weights.device
        running = [self._begin(step) for step, _ in steps]
        outgoing = [_outgoing(step, stores, bt, device) for step, stores in steps]
        items = [(layer, i) for i in range(len(steps)) for layer in range(self.config.layers)]
        if order == "column":
            items.sort()
        # Column by column each step of a layer brings a piece of the next layer's weights.
        pieces = len(steps) if order == "column" else 1
        try:
            self._reserve(
                max(step.buffer_rows for step, _ in steps),
                max(step.loaded_act_blocks for step, _ in steps),
            )
            self._load_first(items[0], running)
            for index, (item, following) in enumerate(pairwise([*items, None])):
                assert item is not None
                layer, which = item
                self._load_next(index, item, following, running, (which % pieces, pieces))
                self._note("compute", item)
                buffer, sent = self._buffers[index % 2], self._sent[index % 2]
                a = self._compute(layer, running[which], buffer)
                if any(outgoing[which]):
                    self._note("store", item)
                    self._send(sent, layer, outgoing[which], buffer, a)
            self._settle()
        except BaseException:
            self._abandon()
            raise
        return [self._logits(one) for one in running]

    # -- weights ------------------------------------------------------------------------------

    def _weights(self, layer: int) -> Layer:
        return super()._weights(layer) if self._stream is None else self._stream.wait(layer)

    def _kv_weights(self, layer: int) -> Layer:
        if self._stream is None:
            return super()._kv_weights(layer)
        return self._stream.wait(layer, kv_only=True)

    def _restart(self) -> None:
        self._sent = [Sent(), Sent()]
        if isinstance(self.weights, StreamedWeights):
            self._stream = WeightStream(self.weights, self.mover)

    def _abandon(self) -> None:
        old = (self._sent, self._stream)
        try:
            super()._abandon()
        except BaseException:
            self._stuck.append(old)
            raise
        finally:
            self._restart()

    # -- items --------------------------------------------------------------------------------

    def _note(self, what: str, item: Item) -> None:
        if self.trace is not None:
            self.trace.append((what, *item))

    def _load_first(self, item: Item, running: list[RunningStep]) -> None:
        stream, layer = self._stream, item[0]
        if stream is not None and stream.load_kv(layer, self.mover.mark()):
            self._note("load_weight", item)
        self._load_item(0, item, running)
        if stream is not None:
            stream.load_rest(layer)

    def _load_next(
        self, index: int, item: Item, following: Item | None, running: list[RunningStep],
        share: tuple[int, int],
    ) -> None:  # fmt: skip
        """Begin to load for the next item; of the weights, one piece of so many.

        Behind the last layer comes the first one, which every pass begins with.
        """
        piece, pieces = share
        layer = (item[0] + 1) % self.config.layers
        self._note("load_weight", (layer, item[1]))
        if self._stream is not None and piece == 0:
            self._stream.load_kv(layer, self.mover.mark())
        if following is not None:
            self._load_item(index + 1, following, running)
        if self._stream is not None:
            self._stream.load_rest(layer, piece, pieces)

    def _load_item(self, index: int, item: Item, running: list[RunningStep]) -> None:
        step, buffer = running[item[1]].step, self._buffers[index % 2]
        if self._wrote and (step.act_runs or step.kv_runs):
            # All until now: those stores, and the buffer's last use. Copies of one direction
            # happen in order, so that the first to wait is enough.
            buffer.free, self._wrote = self.mover.mark(), False
        for what, loads in (("load_act", step.act_runs), ("load_cache", step.kv_runs)):
            if loads:
                self._note(what, item)
        self._load(item[0], step, buffer)

    def _send(
        self, sent: Sent, layer: int, outgoing: tuple[Outgoing, ...], buffer: Buffer, a: Tensor
    ) -> None:
        """Begin to copy to host what this item made, and what it completed."""
        arena = self.arena
        if sent.event is not None:
            self.mover.wait(sent.event)
        sent.sources.clear()
        kv, act = arena.kv_host[layer], arena.act_host[layer]
        rows = kv.view(-1, self.config.kv_width), act.view(-1, self.config.hidden)
        sources = (buffer.rows, a, arena.kv_device[layer], arena.act_device[layer])
        copies: Copies = []
        for out, source, host in zip(outgoing, sources, (*rows, kv, act), strict=True):
            if out is not None:
                gathered = source.index_select(0, out[0])
                sent.sources.append(gathered)
                copies += [(host[t : t + n], gathered[s : s + n]) for s, t, n in out[1]]
        sent.event = self.mover.d2h(copies)
        buffer.free = self.mover.mark()

    def _settle(self) -> None:
        """Let what is computed next come after the stores."""
        for sent in self._sent:
            if sent.event is not None:
                self.mover.wait(sent.event)
                self._wrote = True
            sent.event = None
            sent.sources.clear()
