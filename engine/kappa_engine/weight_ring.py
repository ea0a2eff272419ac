"""Weights in host memory: of their layers two at a time are on the device.

While a layer computes, the next one's matrices cross the link: those of keys and values first,
since activations are projected by them alone (paper 000, Fig. 5), then the rest of attention, then
the MLP. The ring runs on from step to step, so that the first layers of the next one cross while
its requests are chosen. All copies go through the engine's mover: KV that loads meanwhile is in the
same queue. What crossed serves all requests of a step, its mini-batches included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kappa_engine.kv_cache import pin_pages, unpin_pages
from kappa_engine.transfer import Event, LinkMover
from kappa_engine.weights import GROUPS, Group, Layer, Weights

_SLOTS = 2


@dataclass(slots=True)
class _Slot:
    """Memory for the matrices of one layer."""

    tensors: dict[str, Tensor]
    # The ends of its copies, by group, and of the last computation that used it.
    events: dict[Group, Event]
    free: Event
    # The first row of each matrix that is there, or on its way.
    first: dict[str, int]


class WeightRing:
    """The layers of one model, wherever they lie.

    Raises:
        ArenaTooLarge: CUDA does not pin the host's part.
    """

    def __init__(self, weights: Weights, mover: LinkMover) -> None:
        self._weights, self._mover = weights, mover
        self.layers = [i for i in range(weights.config.layers) if weights.host.has(i)]
        self._pinned: list[Tensor] = []
        tensors = [{name: self._of(i, name) for name in weights.host.names} for i in self.layers]
        if weights.device.type == "cuda":
            try:
                for tensor in (t for each in tensors for t in each.values()):
                    pin_pages(tensor, "give a smaller engine.weights.share")
                    self._pinned.append(tensor)
            except BaseException:
                self.close()
                raise
        self._slots = [
            _Slot({n: torch.empty_like(t, device=weights.device) for n, t in like.items()},
                  {}, mover.mark(), {})
            for like in tensors[:_SLOTS]
        ]  # fmt: skip
        self.reset()

    def reset(self) -> None:
        """Forget what crossed; no copy may be under way."""
        self._free, self._next, self._frozen = deque(self._slots), 0, False
        self._held: dict[int, _Slot] = {}
        self._begun: list[tuple[int, _Slot]] = []
        self._skipped: dict[str, int] = {}

    def skip(self, rows: dict[str, int]) -> None:
        """From now on leave out so many first rows of matrices by name, which the CPU computes;
        what is needed now of layers that crossed without is fetched."""
        if rows == self._skipped:
            return
        self._skipped = rows
        for layer, slot in self._held.items():
            for group in GROUPS:
                self._copy(layer, slot, group)

    def fetch(self, *groups: Group) -> None:
        """Start copies of these groups: "kv", for the layers that come next, as far as slots are
        free; others, for the layers that "kv" was started for."""
        if "kv" in groups:
            while self._free:
                layer, slot = self.layers[self._next], self._free.popleft()
                self._next = (self._next + 1) % len(self.layers)
                self._held[layer], slot.events = slot, {}
                slot.first = {name: len(tensor) for name, tensor in slot.tensors.items()}
                self._begun.append((layer, slot))
        for group in groups:
            for layer, slot in self._begun:
                self._copy(layer, slot, group)
        if "kv" not in groups or len(groups) > 1:
            self._begun = []

    def _copy(self, layer: int, slot: _Slot, group: Group) -> None:
        """Start to copy what a slot lacks of a group."""
        copies = []
        for name in GROUPS[group]:
            start, stop = self._skipped.get(name, 0), slot.first.get(name, 0)
            if start < stop:
                source = self._of(layer, name)[start:stop]
                copies.append((slot.tensors[name][start:stop], source))
                slot.first[name] = start
        if copies:
            # Behind those of before: what failed then is not forgotten.
            slot.events[group] = self._mover.h2d(copies, slot.events.get(group, slot.free))

    def layer(self, index: int) -> Layer:
        """A layer for computation behind `wait`, all on the device but for the rows of `skip`."""
        slot = self._slot(index)
        layer = self._weights.layers[index]
        return layer if slot is None else replace(layer, **slot.tensors)

    def wait(self, index: int, group: Group) -> None:
        """Let the next computation come behind the copies of a layer's group; `TransferFailed` as
        `LinkMover.wait`."""
        slot = self._slot(index)
        if slot is not None and group in slot.events:
            self._mover.wait(slot.events[group])

    def used(self, index: int) -> None:
        """The computation that needs a layer has been asked for: its slot may be written to."""
        if not self._frozen and index in self._held:
            slot = self._held.pop(index)
            slot.free = self._mover.mark()
            self._free.append(slot)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Meanwhile nothing crosses: all layers compute with what is there, to measure how long
        computing takes alone."""
        self.fetch(*GROUPS)
        self._mover.drain()
        self._frozen = True
        try:
            yield
        finally:
            self._frozen = False

    def close(self) -> None:
        """Unpin the host's part, when no copy is under way."""
        while self._pinned:
            unpin_pages(self._pinned.pop())

    def _slot(self, index: int) -> _Slot | None:
        if not self._weights.host.has(index):
            return None
        return self._slots[0] if self._frozen else self._held[index]

    def _of(self, index: int, name: str) -> Tensor:
        tensor: Tensor = getattr(self._weights.layers[index], name)
        return tensor
