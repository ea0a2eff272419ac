"""Weights of the layers in turn: streamed from host memory, or where they lie.

`engine.forward` begins to load a layer while it computes the one before, and asks for it when it is
needed, first only for what makes keys and values. After the last layer comes the first one: the
next pass finds it there.
"""

from __future__ import annotations

import math

import torch

from engine.transfer import Event, Mover
from engine.weights import Layer, Weights


class WeightStream:
    """Weights of the layers in turn: those on the device as they are, others copied.

    Two device buffers: the next layer is copied while one is computed. A layer can be copied in
    several pieces, so that other copies get their turn in between.
    """

    def __init__(self, weights: Weights, mover: Mover) -> None:
        self.weights, self.mover = weights, mover
        # The layer in each buffer, and the copies that bring it.
        self._held = [-1, -1]
        self._events: list[list[Event]] = [[], []]
        self._newest = 1
        self._loading = -1
        if weights.streamed:
            flat = torch.empty(
                (2, weights.layers.shape[1]), dtype=weights.dtype, device=weights.device
            )
            self._flat = flat
            self._layers = [weights.view(flat[0]), weights.view(flat[1])]

    def has(self, index: int) -> bool:
        """Whether the layer is there or on its way."""
        return not self.weights.streamed or index in self._held

    def load_kv(self, index: int, after: Event) -> None:
        """Begin to copy what keys and values are made with, over the layer before the last one.

        A layer that is there (of a model of one or two) is not copied again.
        """
        self._loading = -1
        if not self.has(index):
            self._loading = index
            self._newest = 1 - self._newest
            self._held[self._newest], self._events[self._newest] = index, []
            self._load(index, 0, self.weights.kv_elements, after)

    def load_rest(self, index: int, piece: int, pieces: int) -> None:
        """Begin to copy one of `pieces` equal parts of the rest."""
        if self._loading == index:
            first, end = self.weights.kv_elements, self.weights.layers.shape[1]
            step = math.ceil((end - first) / pieces)
            start = first + piece * step
            self._load(index, start, min(start + step, end), None)

    def wait_kv(self, index: int) -> Layer:
        """The layer, of which only the first part need have arrived."""
        return self._wait(index, 0)

    def wait(self, index: int) -> Layer:
        """The layer, all of it."""
        # Copies of one direction end in order.
        return self._wait(index, -1)

    def _wait(self, index: int, which: int) -> Layer:
        if not self.weights.streamed:
            return self.weights.layer(index)
        slot = self._held.index(index)
        self.mover.wait(self._events[slot][which])
        return self._layers[slot]

    def _load(self, index: int, start: int, end: int, after: Event | None) -> None:
        if start < end:
            slot = self._held.index(index)
            copy = (self._flat[slot, start:end], self.weights.layers[index, start:end])
            self._events[slot].append(self.mover.h2d([copy], after))
