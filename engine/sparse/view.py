"""Where a slot keeps which token, and what a pass over several slots may see of it.

Slots of an offloaded head: sinks, a ring of recent tokens, the chosen ones. `make_view` works out,
once per pass and for all of its layers, where new tokens go and which places each query may attend
to: host arithmetic in numpy, sent to the device without waiting.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(slots=True)
class Slot:
    """One sequence: tokens in it, how many of them are in host blocks, and how many are chosen.

    blocks: host blocks of the first `host_tokens`. fresh: nothing was looked up yet. stuck: what is
    no longer recent had no host block, or did not arrive there; it can take no more tokens.
    """

    tokens: int = 0
    host_tokens: int = 0
    chosen: int = 0
    blocks: list[int] = field(default_factory=list)
    fresh: bool = True
    stuck: bool = False


Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    """sinks, ring: places of each kind; behind them the chosen. group: query heads per KV head."""

    sinks: int
    ring: int
    group: int

    @property
    def choice_start(self) -> int:
        """The first place of the chosen tokens."""
        return self.sinks + self.ring

    def place(self, positions: Tensor) -> Tensor:
        """Slots of tokens that are sinks or recent."""
        ring = self.sinks + positions % self.ring
        return torch.where(positions < self.sinks, positions, ring)

    def seen(self, positions: Ints, host: Ints, chosen: Ints) -> NDArray[np.bool_]:
        """(batch, new, places used): what queries at positions (batch, new) may attend to.

        Args:
            host: tokens of each slot that have left its ring.
            chosen: tokens of its choice.
        """
        places = np.arange(self.choice_start + int(chosen.max()))
        ring = (places >= self.sinks) & (places < self.choice_start)
        last = positions[..., None]
        # The latest token at or before each query that a place of the ring can hold.
        held = last - (last - (places - self.sinks)) % self.ring
        first = np.maximum(host, self.sinks)[:, None, None]
        sink = (places < self.sinks) & (places <= last)
        choice = (places >= self.choice_start) & (
            places < self.choice_start + chosen[:, None, None]
        )
        visible: NDArray[np.bool_] = sink | (ring & (held >= first)) | choice
        return visible


@dataclass(slots=True)
class View:
    """A pass over some slots, `new` tokens each: what all of its layers share.

    index (batch,): slots. positions (batch, new). places (batch, new): where new tokens go. seen
    (batch, 1, new·group, places used), all_seen (…, tokens): what each query may attend to, of
    places and of persistent heads. candidates (batch, host tokens): what may be chosen. chosen:
    places of the longest choice. forced (batch,): slots that have looked nothing up.
    """

    slots: list[int]
    new: int
    index: Tensor
    positions: Tensor
    places: Tensor
    seen: Tensor
    all_seen: Tensor
    candidates: Tensor
    table: Tensor
    chosen: int
    forced: Tensor | None


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array there; the host does not wait for it, nor for what is computed before it."""
    flat = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        flat = flat.pin_memory()
    return flat.to(device, non_blocking=True)


def make_view(
    slots: list[int], states: list[Slot], new: int, layout: Layout, block_tokens: int, table: Tensor
) -> View:
    """The pass over `slots`, whose states are `states`, with so many new tokens each.

    table: host blocks of all slots (slots, blocks).
    """
    device = table.device

    def send(array: NDArray[np.generic]) -> Tensor:
        return to_device(array, device)

    def for_queries(seen: NDArray[np.bool_]) -> Tensor:
        """(batch, new, keys) for the queries of a group: (batch, 1, new·group, keys)."""
        return send(seen).repeat_interleave(layout.group, dim=1)[:, None]

    tokens, host, chosen = (
        np.array([getattr(state, name) for state in states])
        for name in ("tokens", "host_tokens", "chosen")
    )
    positions = tokens[:, None] + np.arange(new)
    there = np.arange(int(host.max()))
    fresh = np.array([state.fresh for state in states]) & (chosen > 0)
    index, where = send(np.array(slots)), send(positions)
    return View(
        slots=slots,
        new=new,
        index=index,
        positions=where,
        places=layout.place(where),
        seen=for_queries(layout.seen(positions, host, chosen)),
        all_seen=for_queries(np.arange(positions.max() + 1) <= positions[..., None]),
        candidates=send((there >= layout.sinks) & (there < host[:, None])),
        table=table[index, : len(there) // block_tokens],
        chosen=int(chosen.max()),
        forced=send(fresh) if fresh.any() else None,
    )
