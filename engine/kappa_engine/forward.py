"""Runs a step through the model: loads and computation overlapped, layer by layer.

While a layer is computed, the next one's activations and KV are on their way. Loaded rows land in
one of two buffers, which the layers use in turn. Mini-batches of a step take turns within each
layer, before the next layer begins: what crossed of its weights serves all of them (FlexGen's
zig-zag block; column by column in paper 000, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kappa.plans.cpu_offload import Division, Product
from kappa_engine import attention, layers
from kappa_engine.block_pool import CopyRun
from kappa_engine.cpu_attention import CpuAttention, result
from kappa_engine.input_batch import build_step
from kappa_engine.kv_cache import Arena
from kappa_engine.step import DeviceStep, StepRow
from kappa_engine.transfer import Event, LinkMover, TransferFailed
from kappa_engine.weight_ring import WeightRing
from kappa_engine.weights import GROUPS, Layer, Weights

_PRODUCTS: dict[Product, tuple[str, ...]] = {"qkv": ("q", "kv"), "out": ("out",)}
# Steps of the CPU's share of FC1.
_SHARES = 16


@dataclass(slots=True)
class RunningStep:
    """A step under way."""

    step: DeviceStep
    # States (new tokens, hidden) before the layer that comes next.
    hidden: Tensor
    # Rotary angles of its new tokens, and of those projected from activations.
    angles: layers.Angles
    act_angles: layers.Angles


@dataclass(slots=True)
class Buffer:
    """Memory for the keys and values of one layer."""

    # (n, kv_width): loaded, projected, new.
    rows: Tensor
    # Loaded activations, as whole blocks.
    acts: Tensor
    # The memory of the loaded rows, as whole blocks.
    landing: Tensor
    # The end of the last computation that used it, and of the copies into it.
    free: Event | None = None
    kv: Event | None = None
    act: Event | None = None


class Forward:
    """The forward pass of a model over one arena, of its dtype and on its device.

    Args:
        cpu_threads: threads that attend to KV in host memory; 0: the CPU does not.

    Raises:
        ArenaTooLarge: weights in host memory cannot be pinned.
    """

    def __init__(
        self, weights: Weights, arena: Arena, mover: LinkMover, cpu_threads: int = 0
    ) -> None:
        config = weights.config
        self.weights, self.arena, self.mover, self.config = weights, arena, mover, config
        self.max_tokens, self.vocab = config.max_tokens, config.vocab
        self.ring = WeightRing(weights, mover)
        self.cpu = CpuAttention(arena, config, cpu_threads) if cpu_threads else None
        self.angles = layers.rotation(weights)
        self._cpu_rows: dict[str, int] = {}
        self._buffers: list[Buffer] = []
        # Whether contexts cross; not while computing alone is measured.
        self._crosses = True
        # Buffers of passes in which a copy did not end in time.
        self._stuck: list[object] = []

    @torch.no_grad()
    def compute(self, *batches: Sequence[StepRow], division: Division | None = None) -> Tensor:
        """Compute rows and write their KV; logits (wanted, vocabulary), in their order.

        batches: the rows of each go through a layer together, one batch after the other; no row
        needs what another batch writes. division: what the CPU computes besides attention, of
        weights in host memory, which then do not cross.

        Raises:
            ValueError: a sequence is longer than the model's learned positions.
            NoSuchBlock: a row names a block that its sequence does not have.
            TransferFailed: a load failed. The content of blocks that the rows write is undefined;
                blocks that they only read are as they were.
        """
        # Learned positions end; rotary ones do not.
        longest = max(row.length for rows in batches for row in rows)
        if not self.config.rope and longest > self.max_tokens:
            raise ValueError(
                f"a sequence of {longest} tokens: this model has {self.max_tokens} positions"
            )
        running = [self._begun(rows) for rows in batches]
        turns = [(n, one) for n in range(self.config.layers) for one in running]
        try:
            self._divide(division)
            self._reserve(
                max(one.step.buffer_rows for one in running),
                max(one.step.loaded_act_blocks for one in running),
            )
            self._load_ahead(turns, 0, weights=True)
            for turn, (layer, one) in enumerate(turns):
                # Behind the first batch: the slot that the layer before had is free.
                first = turn % len(running) == 0
                self._load_ahead(turns, turn + 1, weights=first)
                self._compute(layer, one, self._buffers[turn % 2])
                if one is running[-1]:
                    self.ring.used(layer)
            self.ring.fetch(*GROUPS)
        except BaseException:
            self._abandon()
            raise
        ends = [one.hidden[one.step.logit_rows] for one in running]
        return layers.logits(torch.cat(ends) if len(ends) > 1 else ends[0], self.weights)

    def _divide(self, division: Division | None) -> None:
        """Leave to the CPU, by the names of weights, so many of their first rows."""
        rows: dict[str, int] = {}
        if division is not None and self.ring.layers and self.cpu is not None:
            one = self.weights.layers[self.ring.layers[0]]
            rows = {n: len(getattr(one, n)) for p in division.products for n in _PRODUCTS[p]}
            # In coarse steps: what a change adds has to cross at once.
            if share := round(_SHARES * division.fc1_share):
                rows["up"] = len(one.up) * share // _SHARES
        # Matrices that are on the device stay its own.
        self._cpu_rows = {n: count for n, count in rows.items() if n in self.weights.host.names}
        self.ring.skip(self._cpu_rows)

    def _product(self, layer: int, name: str) -> layers.Linear:
        """How a layer's weight is multiplied by: on the device, or on the CPU in part or whole."""
        rows, cpu = self._cpu_rows.get(name, 0), self.cpu
        if not rows or cpu is None or not self.weights.host.has(layer):
            return F.linear

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            future = cpu.product(x, getattr(self.weights.layers[layer], name)[:rows])
            if name == "up":
                # The rest of FC1, and FC2, cross while the CPU computes.
                self.ring.wait(layer, "mlp")
            rest = [F.linear(x, weight[rows:])] if rows < len(weight) else []
            out = torch.cat([result(future).to(x.device), *rest], dim=1)
            return out if bias is None else out + bias

        return product

    def _begun(self, rows: Sequence[StepRow]) -> RunningStep:
        step = build_step(rows, self.arena.block_tokens, self.weights.device)
        hidden = layers.embed(self.weights, step.tokens, step.positions)
        return RunningStep(
            step, hidden, self.angles(step.positions), self.angles(step.act_positions)
        )

    def _load_ahead(
        self, turns: Sequence[tuple[int, RunningStep]], turn: int, *, weights: bool
    ) -> None:
        """Start what the next turn loads, and with `weights` those of the layers that come next:
        what projects first, then what is projected, then the rest."""
        if turn >= len(turns):
            # Those of the next step.
            self.ring.fetch(*GROUPS)
            return
        layer, one = turns[turn]
        buffer = self._buffers[turn % 2]
        if weights:
            self.ring.fetch("kv")
        self._load_acts(layer, one.step, buffer)
        if weights:
            self.ring.fetch("attention", "mlp")
        self._load_kv(layer, one.step, buffer)

    def close(self) -> None:
        """End the CPU's thread, if there is one; no computation may be under way."""
        if self.cpu is not None:
            self.cpu.worker.stop()
        if self.ring.layers:
            self.mover.drain()
            self.ring.close()

    # -- buffers ------------------------------------------------------------------------------

    def _reserve(self, rows: int, acts: int) -> None:
        """Allocate two buffers of this many rows and blocks of activations, unless they suffice."""
        have = self._buffers[0] if self._buffers else None
        if have is not None:
            if len(have.rows) >= rows and len(have.acts) >= acts:
                return
            # Decoding grows by a block at a time: not each time by new buffers.
            rows = max(rows + rows // 8, len(have.rows))
            acts = max(acts + acts // 8, len(have.acts))
        dtype, device = self.weights.dtype, self.weights.device
        shape = self.arena.kv_block_shape
        block_rows = shape[0] * shape[1]
        self._buffers = []
        for _ in range(2):
            buffer = torch.empty((rows, self.config.kv_width), dtype=dtype, device=device)
            loaded = torch.empty((acts, *self.arena.act_block_shape), dtype=dtype, device=device)
            landing = buffer[: rows // block_rows * block_rows].view(-1, *shape)
            # New memory may still be in use by computation that was asked for before.
            self._buffers.append(Buffer(buffer, loaded, landing, free=self.mover.mark()))
            if not self._crosses:
                # Denormal numbers would make arithmetic slow.
                buffer.normal_(), loaded.normal_()

    def _abandon(self) -> None:
        """After a failure, wait until no copy writes to the buffers.

        If copies do not end, their buffers are kept, so that their memory is not used again.
        """
        old, self._buffers = self._buffers, []
        try:
            if self.cpu is not None:
                self.cpu.worker.settle()
            self.mover.drain()
        except TransferFailed:
            self._stuck.append(old)
            raise
        self.ring.reset()

    # -- a layer ------------------------------------------------------------------------------

    def _load_acts(self, layer: int, step: DeviceStep, buffer: Buffer) -> None:
        """Start the layer's loads of activations from host memory, behind the buffer's last use."""
        buffer.act = self._copied(
            buffer.acts, self.arena.act_host[layer], step.act_runs, buffer.free
        )

    def _load_kv(self, layer: int, step: DeviceStep, buffer: Buffer) -> None:
        """The same of KV."""
        buffer.kv = self._copied(
            buffer.landing, self.arena.kv_host[layer], step.kv_runs, buffer.free
        )

    def _copied(
        self, target: Tensor, source: Tensor, runs: list[CopyRun], after: Event | None
    ) -> Event | None:
        copies = [(target[t : t + n], source[s : s + n]) for t, s, n in runs]
        return self.mover.h2d(copies, after) if copies and self._crosses else None

    @contextmanager
    def landed(self) -> Iterator[None]:
        """Meanwhile no context crosses, and what a pass's buffers hold counts as loaded, to measure
        how long computing takes alone."""
        self._crosses = False
        try:
            yield
        finally:
            self._crosses = True

    def _compute(self, layer: int, running: RunningStep, buffer: Buffer) -> None:
        """Compute one layer."""
        step, config = running.step, self.config
        tensors, ring = self.ring.layer(layer), self.ring
        ring.wait(layer, "kv")
        if step.act_tokens:
            self._project_acts(layer, tensors, running, buffer)
        ring.wait(layer, "attention")
        a = layers.attention_input(running.hidden, tensors, config)
        product = partial(self._product, layer)
        q = layers.project_q(a, tensors, config, running.angles, product("q"))
        first = step.first_new_row
        new = buffer.rows[first : first + 2 * step.new_tokens].view(step.new_tokens, -1)
        by_cpu = product("kv") if "kv" in self._cpu_rows else None
        layers.project_kv(a, tensors, config, running.angles, new, by_cpu)
        there = None
        if step.on_cpu is not None:
            # Let the CPU begin to attend to host memory; without threads no planner asks for it.
            assert self.cpu is not None
            there = self.cpu.begin(layer, step.on_cpu, q, self.mover)
        if buffer.kv is not None:
            self.mover.wait(buffer.kv)
        pool = self.arena.kv_device[layer].view(-1, config.kv_width)
        # Copy new and loaded tokens to the device blocks of their sequences, and the few tokens of
        # a context that lie in device blocks to the many that do not.
        if step.to_pool is not None:
            moved = buffer.rows.index_select(0, step.to_pool.source)
            pool.index_copy_(0, step.to_pool.target, moved)
        if step.from_pool is not None:
            moved = pool.index_select(0, step.from_pool.source)
            buffer.rows.index_copy_(0, step.from_pool.target, moved)
        if step.to_act is not None:
            acts = self.arena.act_device[layer].view(-1, config.hidden)
            acts.index_copy_(0, step.to_act.target, a.index_select(0, step.to_act.source))
        attended = attention.attend(step.groups, q, pool, buffer.rows, config, there)
        hidden = layers.project_out(running.hidden, attended, tensors, config, product("out"))
        if "up" not in self._cpu_rows:
            ring.wait(layer, "mlp")
        running.hidden = layers.feed_forward(hidden, tensors, config, product("up"))
        buffer.free = self.mover.mark()

    def _project_acts(
        self, layer: int, tensors: Layer, running: RunningStep, buffer: Buffer
    ) -> None:
        """Project keys and values of the step's activations, into the buffer; those that are on the
        device first, for they wait for no copy."""
        step, hidden, angles = running.step, self.config.hidden, running.act_angles
        rows = buffer.rows[step.loaded_rows : step.first_new_row].view(step.act_tokens, -1)
        crossed = step.act_tokens - (0 if step.act_here is None else len(step.act_here))

        def project(a: Tensor, part: slice) -> None:
            turned = angles and (angles[0][part], angles[1][part])
            layers.project_kv(a, tensors, self.config, turned, rows[part])

        if step.act_here is not None:
            here = self.arena.act_device[layer].view(-1, hidden)
            project(here.index_select(0, step.act_here), slice(crossed, None))
        if crossed:
            if buffer.act is not None:
                self.mover.wait(buffer.act)
            a = buffer.acts[: step.loaded_act_blocks].view(-1, hidden)
            a = a if step.act_rows is None else a.index_select(0, step.act_rows)
            project(a, slice(crossed))
