"""Streamed weights for two who share a layer: the CPU reads its part, the device is sent its own.

Used by `cpu_offload`. The CPU computes with the weights where they lie in host memory, or
with wider copies of those it needs, made once. The device has two slots of matrices, of which only
what its mode and its columns need is copied, one layer ahead; biases and norms stay there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from benchmarks.offload.cpu_kv import CpuKv
from engine.arena import ArenaTooLarge, free_host_bytes
from engine.transfer import Event, Mover
from engine.weights import Layer, Weights
from kappa.plans.cpu_offload import Mode

# A matrix's rows with their part of the bias.
Rows = tuple[Tensor, Tensor | None]

_MATRICES = ("kv", "q", "out", "up", "down")
_OF_MLP = ("up", "down", "up_bias", "down_bias")


class CpuWeights:
    """The layers as the CPU computes with them.

    Args:
        weights: in host memory.
        dtype: to compute in; where it is not the weights' own, `widen` must come first.
    """

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        self._weights, self._dtype = weights, dtype
        self._same = weights.dtype == dtype
        self._wide: dict[int, Layer] = {}
        self._columns: dict[int, list[Rows]] = {}

    def widen(self) -> None:
        """Copies of what attention needs in the wider dtype, if they are not there.

        Raises:
            ArenaTooLarge: host memory does not hold them.
        """
        if self._same or self._wide:
            return
        first = self._weights.layer(0)
        each = sum(x.numel() for name, x in _tensors(first).items() if name not in _OF_MLP)
        wanted, free = self._weights.config.layers * each * self._dtype.itemsize, free_host_bytes()
        if wanted > free:
            raise ArenaTooLarge(
                f"attention weights in {self._dtype} need {wanted} bytes of host memory, but only "
                f"{free} are free: use a smaller model"
            )
        for index in range(self._weights.config.layers):
            layer = self._weights.layer(index)
            wide = {
                name: x.to(self._dtype)
                for name, x in _tensors(layer).items()
                if name not in _OF_MLP
            }
            self._wide[index] = replace(layer, **wide)

    def layer(self, index: int) -> Layer:
        """A layer, its MLP's matrices in the weights' own dtype."""
        return self._weights.layer(index) if self._same else self._wide[index]

    def columns(self, index: int, count: int) -> list[Rows]:
        """FC1's first `count` columns, of gate and of value where the MLP is gated."""
        config, layer = self._weights.config, self._weights.layer(index)
        starts = (0, config.inner) if config.gated else (0,)
        if self._same:
            return [_rows(layer, start, start + count) for start in starts]
        held = self._columns.get(index)
        if held is None or len(held[0][0]) < count:
            held = [
                (w.to(self._dtype), None if b is None else b.to(self._dtype))
                for w, b in (_rows(layer, start, start + count) for start in starts)
            ]
            self._columns[index] = held
        return [(w[:count], None if b is None else b[:count]) for w, b in held]


@dataclass(slots=True)
class _Slot:
    """Matrices of one layer on the device. columns: of FC1 that are not here."""

    up: Tensor
    down: Tensor
    out: Tensor | None = None
    values: Tensor | None = None
    layer: int = -1
    columns: int = 0
    event: Event | None = None
    free: Event | None = None


class LayerStream:
    """The device's part of the layers, one ahead.

    Args:
        weights: in host memory.
        mover: of the copies.
        kv: whose values are sent where the device multiplies by them.
    """

    def __init__(self, weights: Weights, mover: Mover, kv: CpuKv) -> None:
        self._weights, self._mover, self._kv = weights, mover, kv
        self._small = [
            {
                name: x.to(weights.device)
                for name, x in _tensors(weights.layer(index)).items()
                if name not in _MATRICES
            }
            for index in range(weights.config.layers)
        ]
        self._nothing = torch.empty(0, dtype=weights.dtype, device=weights.device)
        first = weights.layer(0)
        self._slots = [
            _Slot(self._like(first.up), self._like(first.down), free=mover.mark()) for _ in (0, 1)
        ]
        self._newest = 0
        self._current = self._slots[0]

    def begin(self, layer: int, mode: Mode, columns: int) -> None:
        """Start to copy what the device needs of a layer, over the one before the last."""
        self._newest = 1 - self._newest
        slot, held = self._slots[self._newest], self._weights.layer(layer)
        slot.layer, slot.columns = layer, columns
        copies = [(slot.down, held.down)]
        for start in self._starts():
            stop = start + self._weights.config.inner
            if columns < self._weights.config.inner:
                copies.append((slot.up[start + columns : stop], held.up[start + columns : stop]))
        if mode != "mha":
            slot.out = self._like(held.out) if slot.out is None else slot.out
            copies.append((slot.out, held.out))
        if mode == "mha-av-o":
            if slot.values is None:
                # Zeros: what is not written yet is weighed with zero, and must be numbers.
                like = self._kv.values[layer]
                slot.values = torch.zeros(like.shape, dtype=like.dtype, device=self._nothing.device)
            for index, length in enumerate(self._kv.lengths.tolist()):
                copies.append((slot.values[index, :length], self._kv.values[layer, index, :length]))
        slot.event = self._mover.h2d(copies, slot.free)

    def wait(self, layer: int) -> Layer:
        """The layer on the device; K, V and Q are not there.

        Raises:
            TransferFailed: a copy failed or did not end in time.
        """
        slot = self._current = self._slots[self._newest if self._is(layer) else 1 - self._newest]
        assert slot.layer == layer and slot.event is not None
        self._mover.wait(slot.event)
        nothing = self._nothing
        out = nothing if slot.out is None else slot.out
        return Layer(nothing, nothing, out, slot.up, slot.down, **self._small[layer])

    def columns(self) -> list[Rows]:
        """FC1's columns that the CPU leaves to the device, of gate and of value; may be none."""
        slot, inner = self._current, self._weights.config.inner
        bias = self._small[slot.layer].get("up_bias")
        return [
            (
                slot.up[start + slot.columns : start + inner],
                None if bias is None else bias[start + slot.columns : start + inner],
            )
            for start in self._starts()
        ]

    def values(self) -> Tensor:
        """The batch's values (sequences, most_tokens, kv_heads, d), without the newest token's."""
        assert self._current.values is not None
        return self._current.values

    def used(self) -> None:
        """The layer that was waited for last is computed: its slot may be written to."""
        self._current.free = self._mover.mark()

    def _is(self, layer: int) -> bool:
        return self._slots[self._newest].layer == layer

    def _starts(self) -> tuple[int, ...]:
        config = self._weights.config
        return (0, config.inner) if config.gated else (0,)

    def _like(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._weights.device)


def _rows(layer: Layer, start: int, stop: int) -> Rows:
    bias = None if layer.up_bias is None else layer.up_bias[start:stop]
    return layer.up[start:stop], bias


def _tensors(layer: Layer) -> dict[str, Tensor]:
    pairs = ((field.name, getattr(layer, field.name)) for field in fields(layer))
    return {name: x for name, x in pairs if x is not None}


def matrix_bytes(weights: Weights) -> dict[str, int]:
    """Bytes of one layer's matrices, by name."""
    specs, each = weights.specs, weights.dtype.itemsize
    return {name: math.prod(specs[name].shape) * each for name in _MATRICES}
