"""The memory that a setting needs on device and host, before any of it is taken.

Blocks and weights are counted exactly, what a pass works with by a rule from above. What does not
fit is refused with what is needed and what is free, in both places.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from benchmarks.offload.settings import (
    GIB,
    Cell,
    DecodeCell,
    Group,
    PrefixCell,
    Setting,
    SparseCell,
)
from benchmarks.offload.shapes import model
from engine.arena import ArenaSize, ArenaTooLarge, free_host_bytes
from engine.config import ModelConfig
from engine.weights import DTYPES, layer_specs, outer_specs
from kappa.plans.clo import Persistent, memory

STORE_CHUNK_TOKENS = 2_048
"""A prompt that is to be cached is computed and stored in pieces of so many tokens."""

_NO_KV = frozenset({"activations", "device"})
_NO_ACT = frozenset({"kv-only", "device"})
_CPU = "cpu-"


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes in each place; on a machine without an accelerator all of them are in host memory."""

    device_bytes: int
    host_bytes: int


def arena_size(setting: Setting, group: Group) -> ArenaSize:
    """Blocks that hold any one cell of the group, and a profile."""
    bt = setting.block_tokens
    profiled = math.ceil(setting.profile.tokens[-1] / bt)
    kv_device = kv_host = profiled
    act_device = act_host = 0
    for cell in group.cells:
        if isinstance(cell, PrefixCell):
            blocks = math.ceil((cell.cached + cell.new) / bt)
            kv_device, kv_host = max(kv_device, blocks), max(kv_host, blocks)
            # Where they cannot pay (grouped queries), nobody will ask for them.
            if _activations_smaller(model(group.model, setting.dtype)):
                act_host = max(act_host, blocks)
            continue
        blocks = cell.sequences * math.ceil((cell.prompt + cell.gen) / bt)
        # One that fills, and one that leaves.
        filling = 2 * cell.sequences
        kv_device = max(kv_device, blocks if "device" in cell.policies else filling)
        kv_host = max(kv_host, blocks if set(cell.policies) - _NO_KV else 0)
        if any(p not in _NO_ACT and not p.startswith(_CPU) for p in cell.policies):
            act_host, act_device = max(act_host, blocks), max(act_device, filling)
    return ArenaSize(kv_device, kv_host, act_device, act_host, block_tokens=bt)


def _activations_smaller(config: ModelConfig) -> bool:
    return config.hidden < 2 * config.kv_width


def needs(setting: Setting, group: Group) -> Needs:
    """What a group needs at once."""
    config = model(group.model, setting.dtype)
    size, each = arena_size(setting, group), DTYPES[setting.dtype].itemsize
    layer = sum(math.prod(spec.shape) for spec in layer_specs(config).values())
    outer = sum(math.prod(spec.shape) for spec in outer_specs(config).values())
    kv = config.layers * 2 * config.kv_width * size.block_tokens
    act = config.layers * config.hidden * size.block_tokens
    device = size.kv_device * kv + size.act_device * act + outer
    device += (2 if group.streamed else config.layers) * layer
    device += max(_working(config, cell) for cell in group.cells)
    host = size.kv_host * kv + size.act_host * act
    host += config.layers * layer if group.streamed else 0
    if setting.device == "cpu":
        return Needs(0, (device + host) * each)
    return Needs(device * each, host * each)


def _working(config: ModelConfig, cell: Cell) -> int:
    """Elements of the largest pass: what is loaded for two items, and what is computed for one."""
    if isinstance(cell, DecodeCell):
        loaded, computed = cell.batch * (cell.prompt + cell.gen), cell.batch * cell.prompt
    else:
        loaded = cell.cached
        share = max((*cell.sweep, 0.0))
        computed = max(STORE_CHUNK_TOKENS, int(share * cell.cached) + cell.new)
    # A product's operands and results, of which not all are alive at once.
    per_token = 4 * config.kv_width + 12 * config.hidden + 3 * config.inner
    return 2 * loaded * (2 * config.kv_width + config.hidden) + computed * per_token


def free(setting: Setting) -> Needs:
    """What may be taken now."""
    device_bytes = 0
    if setting.device == "cuda" and torch.cuda.is_available():
        device_bytes = torch.cuda.mem_get_info()[0]
        if setting.cap_bytes:
            device_bytes = min(device_bytes, setting.cap_bytes)
    return Needs(device_bytes, free_host_bytes())


def refuse_too_large(setting: Setting) -> None:
    """Raise unless every group of the setting fits what is free.

    Raises:
        ArenaTooLarge: names the setting and model, what is needed and what is free.
    """
    for group in setting.groups:
        what = f"setting {setting.name!r} with {group.model}"
        _refuse(setting, needs(setting, group), what, "a smaller setting, such as cpu-small")


def refuse_sparse(setting: Setting, group: Group, cell: SparseCell) -> None:
    """Raise unless a cell of sparse decoding fits what is free.

    Raises:
        ArenaTooLarge: names the cell, what is needed and what is free.
    """
    what = f"cell {cell.name} of {setting.name}"
    _refuse(setting, sparse_needs(setting, group, cell), what, "clo-cpu")


def _refuse(setting: Setting, wanted: Needs, what: str, instead: str) -> None:
    available = free(setting)
    fits = wanted.device_bytes <= available.device_bytes or not wanted.device_bytes
    if not fits or wanted.host_bytes > available.host_bytes:
        raise ArenaTooLarge(
            f"{what} needs {_gib(wanted.device_bytes)} of device memory and "
            f"{_gib(wanted.host_bytes)} of host memory, of which {_gib(available.device_bytes)} "
            f"and {_gib(available.host_bytes)} are free: choose {instead}, or a larger machine"
        )


def sparse_needs(setting: Setting, group: Group, cell: SparseCell) -> Needs:
    """Of a cell of sparse decoding, weights and a round's tokens included."""
    config = model(group.model, setting.dtype)
    persistent = first_layer(config.kv_heads, config.layers)
    one = memory(config.shape, setting.clo, persistent, longest_tokens(setting, cell))
    weights = config.shape.params_total * DTYPES[setting.dtype].itemsize
    # Baselines hold their own caches beside it: one at a time, of three choices.
    device = math.ceil(weights + cell.batch * (one.device_bytes + 3 * one.cache_bytes))
    host = math.ceil(cell.batch * one.host_bytes)
    return Needs(0, device + host) if setting.device == "cpu" else Needs(device, host)


def longest_tokens(setting: Setting, cell: SparseCell) -> int:
    """Of a sequence at the end of a round, the step before it included."""
    return cell.context + setting.steps + 2


def first_layer(kv_heads: int, layers: int) -> Persistent:
    """All heads of the first layer: no similarities are known of random weights."""
    return (tuple(range(kv_heads)), *[()] * (layers - 1))


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
