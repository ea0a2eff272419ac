"""A model with lanes that are open for a cell of the bench of sparse decoding, contents aside.

Keys and values are zeros in host memory and codes are random: with hit rates that are injected,
seconds and bytes do not depend on them, and half a million tokens need not be computed first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.offload.meter import Metered, metered_mover, settled
from benchmarks.offload.rounds import Sample
from benchmarks.offload.shapes import model
from benchmarks.offload.sparse_settings import GIB, SparseCell, SparseSetting
from engine.arena import Arena, ArenaSize, ArenaTooLarge, free_host_bytes
from engine.forward import Forward
from engine.sparse.lanes import Lanes
from engine.sparse.settings import SparseSettings
from engine.step import Ids
from engine.weights import DTYPES, random_weights
from kappa.plan.clo import Persistent, memory

_SEED = 7
_LONGEST_S = 900.0


@dataclass(slots=True)
class SparseRig:
    """What a cell's arms run on. host_blocks (batch, blocks): of each sequence."""

    forward: Forward
    arena: Arena
    mover: Metered
    lanes: Lanes
    host_blocks: Ids
    cell: SparseCell
    persistent: Persistent

    def open(self) -> None:
        """Every lane as at the start: `context` tokens each, nothing chosen."""
        needed = self.lanes.host_part(self.cell.context) // self.arena.block_tokens
        for lane in range(self.cell.batch):
            taken = self.lanes.close(lane)[needed:]
            self.arena.pools["kv", "host"].free(taken)
            blocks = [int(block) for block in self.host_blocks[lane]]
            self.lanes.prepare(lane, self.cell.context, blocks)

    def take_block(self, lane: int) -> int:
        """A host block for what gets old."""
        return self.arena.pools["kv", "host"].allocate(1)[0]

    def timed(self, action: Callable[[], Any]) -> Sample:
        """Run it and wait for its end."""
        self._finish()
        copied, link_s = settled(self.mover)
        stalled_s = self.mover.stalled_s()
        start_s = time.perf_counter()
        action()
        self._finish()
        latency_s = time.perf_counter() - start_s
        more, more_s = settled(self.mover)
        return Sample(
            latency_s, h2d_bytes=more - copied, link_s=more_s - link_s,
            stalled_s=self.mover.stalled_s() - stalled_s,
        )  # fmt: skip

    def _finish(self) -> None:
        self.mover.drain(_LONGEST_S)
        if self.arena.device.type == "cuda":
            torch.cuda.synchronize(self.arena.device)


def needed_bytes(setting: SparseSetting, cell: SparseCell) -> tuple[float, float]:
    """Device and host bytes of a cell, weights and a round's tokens included."""
    config = model(setting.model, setting.dtype)
    longest = cell.context + setting.steps + 2
    persistent = first_layer(config.kv_heads, config.layers)
    one = memory(config.shape, setting.clo, persistent, longest)
    weights = config.shape.params_total * DTYPES[setting.dtype].itemsize
    device = weights + cell.batch * one.device_bytes
    # Baselines hold their own caches beside it: one at a time, of three choices.
    device += 3 * cell.batch * one.cache_bytes
    return device, cell.batch * one.host_bytes


def first_layer(kv_heads: int, layers: int) -> Persistent:
    """All heads of the first layer: no similarities are known of random weights."""
    return (tuple(range(kv_heads)), *[()] * (layers - 1))


def refuse_too_large(setting: SparseSetting, cell: SparseCell) -> None:
    """Raise unless the cell fits what is free.

    Raises:
        ArenaTooLarge: with what is needed and what is free in both places.
    """
    device, host = needed_bytes(setting, cell)
    free_host, free_device = float(free_host_bytes()), 0.0
    if setting.device == "cpu":
        device, host = 0.0, device + host
    elif torch.cuda.is_available():
        free_device = float(torch.cuda.mem_get_info()[0])
        free_device = min(free_device, setting.cap_bytes or math.inf)
    if device > free_device or host > free_host:
        raise ArenaTooLarge(
            f"cell {cell.name} of {setting.name} needs {device / GIB:.1f} GiB of device and "
            f"{host / GIB:.1f} GiB of host memory, of which {free_device / GIB:.1f} and "
            f"{free_host / GIB:.1f} are free: choose clo-cpu, or a larger machine"
        )


@contextmanager
def sparse_rig(setting: SparseSetting, cell: SparseCell) -> Iterator[SparseRig]:
    """A rig for one cell.

    Raises:
        ArenaTooLarge: it does not fit.
    """
    refuse_too_large(setting, cell)
    config, dtype = model(setting.model, setting.dtype), DTYPES[setting.dtype]
    device = torch.device(setting.device)
    before = torch.get_num_threads()
    torch.set_num_threads(setting.threads or before)
    _cap(setting.cap_bytes)
    mover = metered_mover(device, setting.link_bytes_per_s)
    arena = None
    try:
        longest = cell.context + setting.steps + 2
        blocks = cell.batch * -(-longest // setting.block_tokens)
        size = ArenaSize(1, blocks, block_tokens=setting.block_tokens)
        arena = Arena(config.shape, size, dtype=dtype, device=device)
        weights = random_weights(config, seed=_SEED, dtype=dtype, device=device)
        forward = Forward(weights, arena, mover)
        settings = SparseSettings(setting.clo, cell.batch, longest, chunk_tokens=1)
        persistent = first_layer(config.kv_heads, config.layers)
        lanes = Lanes(config, arena, mover, settings, persistent)
        for codes in lanes.codes:
            codes.random_()
        needed = lanes.host_part(cell.context) // setting.block_tokens
        taken = arena.pools["kv", "host"].allocate(cell.batch * needed)
        named = np.array(taken, np.int64).reshape(cell.batch, needed)
        made = SparseRig(forward, arena, mover, lanes, named, cell, persistent)
        for lane in range(cell.batch):
            lanes.prepare(lane, cell.context, named[lane].tolist())
        yield made
    finally:
        mover.stop()
        if arena is not None:
            arena.close()
        torch.set_num_threads(before)
        _cap(0)


def _cap(cap_bytes: int) -> None:
    """Of a GPU's memory only so much for this process; 0: all."""
    if not torch.cuda.is_available():
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total) if cap_bytes else 1.0)
