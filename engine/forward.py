"""Runs steps through the model: loads, computation and stores overlapped, layer by layer.

A pass is a sequence of items, each one layer of one step: all layers of one step (prefill, and
row-by-row decoding), or every step's share of a layer before the next layer (column by column). The
order of work at each item is Algorithm 1 of paper 000: the next layer's weights, the next item's
activations and KV, then this item's computation, then its stores. Loaded rows land in one of two
buffers, so an item's load runs while the one before is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from engine import attention, layers
from engine.arena import Arena
from engine.cpu_attention import CpuAttention, Pending
from engine.layers import angles, frequencies
from engine.step import Run, Step
from engine.transfer import Event, Mover, TransferFailed
from engine.weight_stream import WeightStream
from engine.weights import Weights


@dataclass(slots=True)
class Running:
    """A step under way: hidden states, and the angles of its new and its projected tokens."""

    step: Step
    hidden: Tensor
    angles: layers.Angles = None
    act_angles: layers.Angles = None


@dataclass(slots=True)
class Buffer:
    """Where an item's rows meet.

    rows: shape (n, kv_width): loaded, projected, new.
    acts: loaded activations, as whole blocks.
    landing: the loaded rows' memory, as whole blocks.
    """

    rows: Tensor
    acts: Tensor
    landing: Tensor
    # The end of the computation that used it last.
    free: Event | None = None
    kv: Event | None = None
    act: Event | None = None


@dataclass(slots=True)
class Outgoing:
    """Copies to host of an item: their sources must stay until the event."""

    sources: list[Tensor] = field(default_factory=list)
    event: Event | None = None


Order = Literal["row", "column"]
Traced = tuple[str, int, int]  # what, layer, step


Copies = list[tuple[Tensor, Tensor]]
"""Targets and sources of equal shapes."""


class NoCpuAttention(ValueError):
    """The CPU is to attend to host memory, and there are no threads for that."""


class Forward:
    """A model over one arena and one mover.

    Args:
        weights: of the model.
        arena: blocks, of the same dtype and on the same device.
        mover: copies between them.
        cpu_threads: that may attend to KV in host memory; 0: the CPU is not asked to.

    `trace`, if set to a list, collects what was begun, in order.

    Raises:
        ValueError: weights and arena are of different dtypes, devices or models.
    """

    def __init__(
        self,
        weights: Weights,
        arena: Arena,
        mover: Mover,
        cpu_threads: int = 0,
    ) -> None:
        config = weights.config
        if (weights.dtype, weights.device) != (arena.dtype, arena.device):
            raise ValueError(
                f"weights are {weights.dtype} on {weights.device}, the arena {arena.dtype} on "
                f"{arena.device}: make both alike"
            )
        made_for = (config.layers, config.hidden, config.kv_heads, config.head_dim)
        shape = arena.shape
        if made_for != (shape.layers, shape.hidden, shape.kv_heads, shape.head_dim):
            raise ValueError(f"the arena is for {shape.name}, not for the model of the weights")
        self.weights, self.arena, self.mover, self.config = weights, arena, mover, config
        self.cpu = CpuAttention(arena, config, cpu_threads) if cpu_threads else None
        self.trace: list[Traced] | None = None
        self.rope: tuple[Tensor, float] | None = None
        if config.rope:
            inverse, factor = frequencies(config.rope, config.head_dim)
            self.rope = inverse.to(weights.device), factor
        self._stream = WeightStream(weights, mover)
        self._buffers: list[Buffer] = []
        self._outgoing = [Outgoing(), Outgoing()]
        # Host blocks written by a pass are there before a later one reads them.
        self._wrote = False
        # Of passes whose copies did not end in time.
        self._stuck: list[object] = []

    @torch.no_grad()
    def run(self, steps: Sequence[Step], order: Order = "row") -> list[Tensor]:
        """Logits (rows, vocabulary) of each step, as its works wanted.

        Raises:
            TransferFailed: a load or a store failed. Blocks that the steps write hold anything;
                those that they only read are as they were.
        """
        running = [self._begin(step) for step in steps]
        count, depth = len(steps), self.config.layers
        items = (
            [(j, k) for k in range(count) for j in range(depth)]
            if order == "row"
            else [(j, k) for j in range(depth) for k in range(count)]
        )
        try:
            self._reserve(steps)
            self._load_first(items[0], running)
            for index, item in enumerate(items):
                following = items[index + 1] if index + 1 < len(items) else None
                self._load_next(index, item, following, running, order)
                self._compute(index, item, running[item[1]])
            self._settle()
        except BaseException:
            self._abandon()
            raise
        return [self._logits(one) for one in running]

    def close(self) -> None:
        """End the CPU's thread, if it has one. Nothing may be under way."""
        if self.cpu is not None:
            self.cpu.stop()

    # -- begin and end ------------------------------------------------------------------------

    def _begin(self, step: Step) -> Running:
        running = Running(step, layers.embed(self.weights, step.tokens, step.positions))
        if self.rope is not None:
            inverse, factor = self.rope
            dtype = self.weights.dtype
            running.angles = angles(step.positions, inverse, factor, dtype)
            running.act_angles = angles(step.act_positions, inverse, factor, dtype)
        return running

    def _logits(self, running: Running) -> Tensor:
        return layers.logits(running.hidden[running.step.logit_rows], self.weights)

    def _reserve(self, steps: Sequence[Step]) -> None:
        """Two buffers that hold any of the steps; kept from pass to pass."""
        rows = max(step.buffer_rows for step in steps)
        acts = max(step.loaded_act_blocks for step in steps)
        have = self._buffers[0] if self._buffers else None
        if have is not None and len(have.rows) >= rows and len(have.acts) >= acts:
            return
        if have is not None:
            # Decoding grows by a block at a time: not each time by new buffers.
            rows, acts = (
                max(rows + rows // 8, len(have.rows)),
                max(acts + acts // 8, len(have.acts)),
            )
        dtype, device = self.weights.dtype, self.weights.device
        self._buffers = []
        for _ in range(2):
            buffer = torch.empty((rows, self.config.kv_width), dtype=dtype, device=device)
            loaded = torch.empty((acts, *self.arena.act_block_shape), dtype=dtype, device=device)
            landing = self._blocks_of(buffer)
            # New memory may still be in use by what was asked for before.
            self._buffers.append(Buffer(buffer, loaded, landing, free=self.mover.mark()))

    def _blocks_of(self, rows: Tensor) -> Tensor:
        """The same memory as whole KV blocks (n, *kv_block_shape), where loaded ones land."""
        shape = self.arena.kv_block_shape
        block_rows = shape[0] * shape[1]
        return rows[: len(rows) // block_rows * block_rows].view(-1, *shape)

    def _settle(self) -> None:
        """Let what is computed next come after the stores."""
        for outgoing in self._outgoing:
            if outgoing.event is not None:
                self.mover.wait(outgoing.event)
                self._wrote = True
            outgoing.event = None
            outgoing.sources.clear()

    def _abandon(self) -> None:
        """After a failure nothing may still be writing to buffers that the next pass uses.

        If copies do not end, what they use is kept, so that nobody else gets that memory.
        """
        old = (self._buffers, self._outgoing, self._stream)
        self._buffers, self._outgoing = [], [Outgoing(), Outgoing()]
        try:
            if self.cpu is not None:
                self.cpu.worker.settle()
            self.mover.drain()
        except TransferFailed:
            self._stuck.append(old)
            raise
        finally:
            self._stream = WeightStream(self.weights, self.mover)

    # -- loads --------------------------------------------------------------------------------

    def _note(self, what: str, layer: int, step: int) -> None:
        if self.trace is not None:
            self.trace.append((what, layer, step))

    def _load_first(self, item: tuple[int, int], running: list[Running]) -> None:
        layer = item[0]
        there = self._stream.has(layer)
        if not there:
            self._note("load_weight", layer, item[1])
            self._stream.load_kv(layer, self.mover.mark())
        self._load(0, item, running[item[1]].step)
        if not there:
            self._stream.load_rest(layer, 0, 1)

    def _load_next(
        self,
        index: int,
        item: tuple[int, int],
        following: tuple[int, int] | None,
        running: list[Running],
        order: Order,
    ) -> None:
        """Begin to load for the next item; weights in as many pieces as the layer has items.

        Behind the last layer comes the first one, which every pass begins with.
        """
        piece, pieces = (item[1], len(running)) if order == "column" else (0, 1)
        layer = (item[0] + 1) % self.config.layers
        self._note("load_weight", layer, item[1])
        if piece == 0:
            self._stream.load_kv(layer, self.mover.mark())
        if following is not None:
            self._load(index + 1, following, running[following[1]].step)
        self._stream.load_rest(layer, piece, pieces)

    def _load(self, index: int, item: tuple[int, int], step: Step) -> None:
        layer, which = item
        buffer = self._buffers[index % 2]
        after = buffer.free
        if self._wrote and (step.act_runs or step.kv_runs):
            # All until now: those stores, and the buffer's last use. Copies of one direction
            # happen in order, so that the first to wait is enough.
            after, self._wrote = self.mover.mark(), False
        buffer.act = buffer.kv = None
        if step.act_runs:
            self._note("load_act", layer, which)
            host = self.arena.act_host[layer]
            copies = [(buffer.acts[t : t + n], host[s : s + n]) for t, s, n in step.act_runs]
            buffer.act = self.mover.h2d(copies, after)
        if step.kv_runs:
            self._note("load_cache", layer, which)
            host = self.arena.kv_host[layer]
            copies = [(buffer.landing[t : t + n], host[s : s + n]) for t, s, n in step.kv_runs]
            buffer.kv = self.mover.h2d(copies, after)

    # -- computation --------------------------------------------------------------------------

    def _compute(self, index: int, item: tuple[int, int], running: Running) -> None:
        layer, which = item
        step, buffer, config = running.step, self._buffers[index % 2], self.config
        if step.act_tokens:
            self._project_acts(layer, running, buffer)
        tensors = self._stream.wait(layer)
        self._note("compute", layer, which)
        a = layers.attention_input(running.hidden, tensors, config)
        q = layers.project_q(a, tensors, config, running.angles)
        first = step.loaded_rows + 2 * step.act_tokens
        new = buffer.rows[first : first + 2 * step.new_tokens].view(step.new_tokens, -1)
        layers.project_kv(a, tensors, config, running.angles, new)
        there = self._attend_on_cpu(layer, step, q)
        if buffer.kv is not None:
            self.mover.wait(buffer.kv)
        self._write(layer, step, buffer.rows, a)
        pool = self.arena.kv_device[layer].view(-1, config.kv_width)
        attended = attention.attend(step.groups, q, pool, buffer.rows, config, there)
        running.hidden = layers.finish(running.hidden, attended, tensors, config)
        buffer.free = self.mover.mark()
        if step.stores:
            self._note("store", layer, which)
            self._store(index, layer, step, buffer.rows, a)

    def _attend_on_cpu(self, layer: int, step: Step, q: Tensor) -> Pending | None:
        """Let the CPU begin with what it attends to where it lies."""
        if step.on_cpu is None:
            return None
        if self.cpu is None:
            raise NoCpuAttention(
                "a step has context that the CPU is to attend to, but this model has no threads "
                "for it: give cpu_threads"
            )
        self._note("attend_cpu", layer, 0)
        return self.cpu.begin(layer, step.on_cpu, q, self.mover)

    def _project_acts(self, layer: int, running: Running, buffer: Buffer) -> None:
        """Keys and values of the step's activations, into the buffer."""
        step = running.step
        if buffer.act is not None:
            self.mover.wait(buffer.act)
        hidden = self.config.hidden
        loaded = buffer.acts[: step.loaded_act_blocks].view(-1, hidden)
        a = loaded if step.act_rows is None else loaded.index_select(0, step.act_rows)
        if step.act_device is not None:
            held = self.arena.act_device[layer].view(-1, hidden).index_select(0, step.act_device)
            a = held if not len(a) else torch.cat((a, held))
        tensors = self._stream.wait_kv(layer)
        end = step.loaded_rows + 2 * step.act_tokens
        rows = buffer.rows[step.loaded_rows : end].view(step.act_tokens, -1)
        layers.project_kv(a, tensors, self.config, running.act_angles, rows)

    def _write(self, layer: int, step: Step, rows: Tensor, a: Tensor) -> None:
        """New and loaded tokens to the device blocks that their sequences have for them.

        And those few of a context that lie in device blocks to the many that do not.
        """
        pool = self.arena.kv_device[layer].view(-1, self.config.kv_width)
        if step.to_pool is not None:
            pool.index_copy_(0, step.to_pool.target, rows.index_select(0, step.to_pool.source))
        if step.from_pool is not None:
            rows.index_copy_(0, step.from_pool.target, pool.index_select(0, step.from_pool.source))
        if step.to_act is not None:
            acts = self.arena.act_device[layer].view(-1, self.config.hidden)
            acts.index_copy_(0, step.to_act.target, a.index_select(0, step.to_act.source))

    # -- stores -------------------------------------------------------------------------------

    def _store(self, index: int, layer: int, step: Step, rows: Tensor, a: Tensor) -> None:
        """Begin to copy to host what this item made, and what it completed."""
        arena, outgoing = self.arena, self._outgoing[index % 2]
        if outgoing.event is not None:
            self.mover.wait(outgoing.event)
        outgoing.sources.clear()
        copies: Copies = []
        width, hidden = self.config.kv_width, self.config.hidden
        size = 2 * arena.block_tokens
        if step.store_kv is not None:
            gathered = rows.index_select(0, step.store_kv.source)
            self._add_kv(layer, step.store_kv.runs, gathered, copies, outgoing)
        if step.spill_kv is not None:
            gathered = arena.kv_device[layer].index_select(0, step.spill_kv.source)
            runs = [(s * size, t * size, n * size) for s, t, n in step.spill_kv.runs]
            self._add_kv(layer, runs, gathered.view(-1, width), copies, outgoing)
        acts = arena.act_host[layer]
        for out, source, host in (
            (step.store_act, a, acts.view(-1, hidden)),
            (step.spill_act, arena.act_device[layer], acts),
        ):
            if out is not None:
                gathered = source.index_select(0, out.source)
                outgoing.sources.append(gathered)
                copies += [(host[t : t + n], gathered[s : s + n]) for s, t, n in out.runs]
        outgoing.event = self.mover.d2h(copies)

    def _add_kv(
        self, layer: int, runs: list[Run], rows: Tensor, copies: Copies, outgoing: Outgoing
    ) -> None:
        # Host row b·2·block_tokens + i is row i of block b: its keys, then its values.
        host = self.arena.kv_host[layer].view(-1, self.config.kv_width)
        copies += [(host[t : t + n], rows[s : s + n]) for s, t, n in runs]
        outgoing.sources.append(rows)
