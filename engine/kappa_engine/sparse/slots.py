"""Slots: the memory of sequences that decode sparsely, in tensors of every layer.

A slot has, for each offloaded KV head, places for sinks, recent tokens (a ring) and the chosen
tokens, and for each persistent head all tokens. All KV, in whole blocks, is in the arena's host
blocks, which the slot's table names; the tokens behind the last of them are in the ring. A block
leaves the ring when it is older than the recent tokens: it is copied to host memory and hashed, and
its newest tokens take the places by which the choice has grown, so that at a share of 1 nothing is
ever missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kappa.plans.clo import Persistent, SparseSettings
from kappa.plans.head_codes import CodeMaps
from kappa_engine.block_pool import Ids
from kappa_engine.forward import Forward
from kappa_engine.kv_cache import ArenaTooLarge, free_host_bytes
from kappa_engine.sparse.codes import Hasher
from kappa_engine.transfer import Event, TransferFailed


@dataclass(slots=True)
class Slot:
    """The sequence in one slot."""

    tokens: int = 0
    # How many of them are in host blocks, and how many are chosen.
    host_tokens: int = 0
    chosen: int = 0
    # Host blocks of the first `host_tokens`.
    blocks: list[int] = field(default_factory=list)
    # Whether nothing was looked up yet.
    fresh: bool = True
    # A block that left the ring had no host block, or did not arrive there: the slot can take no
    # more tokens.
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of a slot: sinks, a ring of recent tokens, and behind them the chosen ones."""

    sinks: int
    ring: int
    # Query heads per KV head.
    group: int

    @property
    def choice_start(self) -> int:
        """The first place of the chosen tokens."""
        return self.sinks + self.ring

    def place(self, positions: Tensor) -> Tensor:
        """Places of tokens that are sinks or recent."""
        ring = self.sinks + positions % self.ring
        return torch.where(positions < self.sinks, positions, ring)

    def seen(self, positions: Ids, host: Ids, chosen: Ids) -> NDArray[np.bool_]:
        """Which places (batch, new, places used) queries at positions (batch, new) may attend to.

        Args:
            host: tokens of each slot that have left its ring.
            chosen: tokens of its choice.
        """
        places = np.arange(self.choice_start + int(chosen.max()))
        last = positions[..., None]
        # The latest token at or before each query that a place of the ring can hold.
        held = last - (last - (places - self.sinks)) % self.ring
        ring = (places >= self.sinks) & (places < self.choice_start)
        ring = ring & (held >= np.maximum(host, self.sinks)[:, None, None])
        sink = (places < self.sinks) & (places <= last)
        end = self.choice_start + chosen[:, None, None]
        visible: NDArray[np.bool_] = sink | ring | ((places >= self.choice_start) & (places < end))
        return visible


@dataclass(slots=True)
class View:
    """A pass over some slots, `new` tokens each: the tensors that its layers share."""

    slots: list[int]
    new: int
    # The slots (batch,).
    index: Tensor
    # Of new tokens (batch, new), and their places.
    positions: Tensor
    places: Tensor
    # Keys that each query may attend to: places (batch, 1, new·group, places used), and of
    # persistent heads tokens (batch, 1, new·group, tokens).
    seen: Tensor
    all_seen: Tensor
    # (batch, host tokens): tokens that must not be chosen.
    outside: Tensor
    # Host blocks of each slot (batch, blocks).
    table: Tensor
    # Places of the longest choice; inside (batch, chosen): those of each slot, None: all of them.
    chosen: int
    inside: Tensor | None
    # (batch,): slots that have looked nothing up; None if there is none.
    forced: Tensor | None

    def of(self, tensor: Tensor) -> Tensor:
        """Rows of these slots of a tensor (slots, ...); a view where they are neighbours."""
        first, last = self.slots[0], self.slots[-1]
        if self.slots == list(range(first, last + 1)):
            return tensor[first : last + 1]
        return tensor.index_select(0, self.index)

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Copy values (batch, ...) to these slots of a tensor (slots, ...)."""
        first, last = self.slots[0], self.slots[-1]
        if self.slots == list(range(first, last + 1)):
            tensor[first : last + 1].copy_(values)
        else:
            tensor.index_copy_(0, self.index, values)


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy an array to the device; the host does not wait for the copy, nor for computation."""
    flat = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        flat = flat.pin_memory()
    return flat.to(device, non_blocking=True)


class Slots:
    """The slots of one engine over the host blocks of a model's arena.

    Args:
        persistent: KV heads of each layer that keep all KV on the device.
        maps: before the codes of queries and keys, if they are calibrated.

    Raises:
        ArenaTooLarge: the slots do not fit the free memory.
    """

    def __init__(
        self, forward: Forward, settings: SparseSettings, persistent: Persistent,
        maps: CodeMaps | None = None,
    ) -> None:  # fmt: skip
        self.config, self.arena, self.mover = forward.config, forward.arena, forward.mover
        self.settings, config, arena = settings, self.config, self.arena
        every = set(range(config.kv_heads))
        clo, block, device = settings.clo, arena.block_tokens, arena.device
        ring = clo.recent_tokens + block - 1 + settings.chunk_tokens
        self.layout = Layout(clo.sink_tokens, ring, config.heads // config.kv_heads)
        self.most_chosen = clo.chosen_tokens(settings.max_tokens)
        self.states = [Slot() for _ in range(settings.slots)]
        self.hasher = None
        if settings.retriever == "hash":
            self.hasher = Hasher(config.head_dim, clo.code_bits, arena.dtype, device, maps)
        # From a key's row of host KV (`rows`) to its value's.
        self.value_step = block * config.kv_heads
        self.persistent, self.offloaded = (
            [torch.tensor(sorted(heads), dtype=torch.int64, device=device) for heads in layers]
            for layers in (persistent, [every.difference(heads) for heads in persistent])
        )
        # Of each layer: places; positions in those of the choice (max_tokens: none); all tokens of
        # persistent heads; labels; ages; and codes.
        wanted = sum(tensor.nbytes for each in self._tensors("meta") for tensor in each)
        cuda = device.type == "cuda"
        free = torch.cuda.mem_get_info(device)[0] if cuda else free_host_bytes()
        if wanted > free:
            raise ArenaTooLarge(
                f"{settings.slots} sparse slots of {settings.max_tokens} tokens and the codes of "
                f"{arena.size.kv_host} host blocks need {wanted} bytes of device memory, but only "
                f"{free} are free: give fewer slots, a smaller share, or less host memory"
            )
        self.store, self.held, self.full, self.labels, self.ages, self.codes = self._tensors(device)
        most_blocks = -(-settings.max_tokens // block)
        self.table = torch.zeros((settings.slots, most_blocks), dtype=torch.int64, device=device)
        # Blocks on their way to host memory, with the tensors that they are copied from, and their
        # slots.
        self._leaving: list[tuple[Event, list[Tensor], Slot]] = []

    def _tensors(self, device: torch.device | str) -> list[list[Tensor]]:
        arena, settings, layout = self.arena, self.settings, self.layout
        slots, width, dtype = settings.slots, self.config.head_dim, arena.dtype
        places = layout.choice_start + self.most_chosen
        words = self.hasher.words if self.hasher else 0

        def zeros(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        counts = [len(heads) for heads in self.offloaded]
        host, block = arena.size.kv_host, arena.block_tokens
        return [
            [zeros(dtype, slots, 2, n, places, width) for n in counts],
            [zeros(torch.int64, slots, n, self.most_chosen) for n in counts],
            [zeros(dtype, slots, 2, len(n), settings.max_tokens, width) for n in self.persistent],
            [zeros(dtype, slots, n, layout.group, width) for n in counts],
            [zeros(torch.int32, slots, n) for n in counts],
            [zeros(torch.int64, host, n, block, words) for n in counts],
        ]

    # -- sizes --------------------------------------------------------------------------------

    def host_part(self, tokens: int) -> int:
        """Leading tokens, of `tokens`, in host blocks: whole blocks before the recent tokens."""
        block = self.arena.block_tokens
        return max(0, tokens - self.settings.clo.recent_tokens) // block * block

    def rows(self, layer: int) -> Tensor:
        """Host KV of a layer as rows (n, head_dim), one per key or value of one head."""
        return self.arena.kv_host[layer].view(-1, self.config.head_dim)

    def key_rows(self, blocks: Tensor, positions: Tensor, heads: Tensor) -> Tensor:
        """Rows of the keys at `positions` in their `blocks`, of `heads`; shapes broadcast.

        Those of the values are `value_step` further on.
        """
        block = self.arena.block_tokens
        return (blocks * (2 * block) + positions % block) * self.config.kv_heads + heads

    def resident(self, state: Slot) -> Tensor:
        """Positions of a slot's sinks and recent tokens."""
        sinks = min(self.layout.sinks, state.tokens)
        first = max(sinks, state.host_tokens)
        recent = torch.arange(first, state.tokens)
        return torch.cat((torch.arange(sinks), recent)).to(self.arena.device)

    # -- a sequence comes and goes --------------------------------------------------------------

    def prepare(self, slot: int, tokens: int, blocks: Sequence[int]) -> Slot:
        """Take a slot for a sequence of `tokens` tokens, the first of them in host `blocks`."""
        host_tokens = self.host_part(tokens)
        chosen = self._chosen(tokens, host_tokens)
        state = self.states[slot] = Slot(tokens, host_tokens, chosen, list(blocks))
        if blocks:
            self.table[slot, : len(blocks)] = to_device(np.array(blocks), self.table.device)
        for ages, held in zip(self.ages, self.held, strict=True):
            ages[slot], held[slot] = 0, self.settings.max_tokens
        return state

    def fill(self, slot: int, layer: int, positions: Tensor, kv: Tensor) -> None:
        """Copy keys and values (2, n, kv_heads, head_dim) of resident tokens to their places."""
        places = self.layout.place(positions)
        self.store[layer][slot][:, :, places] = kv[:, :, self.offloaded[layer]].transpose(1, 2)

    def fill_persistent(self, slot: int, layer: int, kv: Tensor) -> None:
        """Copy keys and values (2, n, kv_heads, head_dim) of the first n tokens for persistent
        heads."""
        rows = kv[:, :, self.persistent[layer]].transpose(1, 2)
        self.full[layer][slot][:, :, : kv.shape[1]] = rows

    def hash_blocks(self, layer: int, blocks: Tensor, keys: Tensor) -> None:
        """Make the codes of host blocks from their keys (blocks, block_tokens, kv_heads,
        head_dim)."""
        heads = self.offloaded[layer]
        if self.hasher is not None and len(heads):
            codes = self.hasher.of_keys(layer, heads, keys[:, :, heads])
            self.codes[layer][blocks] = codes.transpose(1, 2)

    def close(self, slot: int) -> list[int]:
        """Give a slot back; returns its host blocks."""
        blocks, self.states[slot] = self.states[slot].blocks, Slot()
        return blocks

    # -- a pass -------------------------------------------------------------------------------

    def begin(self, slots: Sequence[int], new: int) -> View:
        """Begin a pass over `slots` with `new` tokens each, for which they have room.

        Host arithmetic is in numpy, once for all layers, and is sent to the device without waiting.

        Raises:
            TransferFailed: a slot is stuck: one of its blocks is not in host memory.
        """
        # Gathers may read blocks that have left the ring: they come after those copies. A block
        # that did not arrive costs its own slot alone, whichever slots go on first.
        leaving, self._leaving = self._leaving, []
        for event, _, state in leaving:
            try:
                self.mover.wait(event)
            except TransferFailed:
                state.stuck = True
        states = [self.states[slot] for slot in slots]
        if any(state.stuck for state in states):
            raise TransferFailed("tokens that are no longer recent are not in host memory")
        layout, device = self.layout, self.table.device

        def send(array: NDArray[np.generic]) -> Tensor:
            return to_device(array, device)

        def for_queries(seen: NDArray[np.bool_]) -> Tensor:
            """(batch, new, keys) for the queries of a group: (batch, 1, new·group, keys)."""
            return send(seen).repeat_interleave(layout.group, dim=1)[:, None]

        before, host, chosen = np.array([(s.tokens, s.host_tokens, s.chosen) for s in states]).T
        positions = before[:, None] + np.arange(new)
        there = np.arange(int(host.max()))
        fresh = np.array([state.fresh for state in states]) & (chosen > 0)
        index, where = send(np.array(slots)), send(positions)
        return View(
            slots=list(slots),
            new=new,
            index=index,
            positions=where,
            places=layout.place(where),
            seen=for_queries(layout.seen(positions, host, chosen)),
            all_seen=for_queries(np.arange(positions.max() + 1) <= positions[..., None]),
            outside=send((there < layout.sinks) | (there >= host[:, None])),
            table=self.table[index, : len(there) // self.arena.block_tokens],
            chosen=int(chosen.max()),
            inside=None
            if chosen.min() == chosen.max()
            else send(np.arange(chosen.max()) < chosen[:, None]),
            forced=send(fresh) if fresh.any() else None,
        )

    def write(self, layer: int, view: View, kv: Tensor) -> None:
        """Copy keys and values (batch·new, 2·kv_width) of new tokens to places and full caches."""
        shape = (len(view.slots), view.new, 2, self.config.kv_heads, self.config.head_dim)
        rows, at = kv.view(shape), view.index[:, None]
        offloaded, persistent = self.offloaded[layer], self.persistent[layer]
        if offloaded.shape[0]:
            self.store[layer][at, :, :, view.places] = rows[:, :, :, offloaded]
        if persistent.shape[0]:
            self.full[layer][at, :, :, view.positions] = rows[:, :, :, persistent]

    def end(self, view: View, take_block: Callable[[], int | None]) -> None:
        """End the pass: slots grow, and blocks that are no longer recent leave.

        take_block: allocates a host block; without one (None) the slot is stuck.
        """
        for slot in view.slots:
            state = self.states[slot]
            state.tokens += view.new
            if state.chosen:
                state.fresh = False
        for slot in view.slots:
            state = self.states[slot]
            wanted = self.host_part(state.tokens)
            while state.host_tokens < wanted:
                block = take_block()
                if block is None:
                    state.stuck = True
                    break
                self._leave(slot, state, block)

    def _chosen(self, tokens: int, host_tokens: int) -> int:
        most = max(0, host_tokens - self.layout.sinks)
        return min(self.settings.clo.chosen_tokens(tokens), most, self.most_chosen)

    def _leave(self, slot: int, state: Slot, block: int) -> None:
        """Send the oldest block of the ring to host memory."""
        size, arena, start = self.arena.block_tokens, self.arena, state.host_tokens
        stop = start + size
        # Where a chunk of many tokens made it grow by more, later blocks bring the rest.
        chosen = min(self._chosen(state.tokens, stop), state.chosen + size)
        kept = chosen - state.chosen
        pairs, sources = [], []
        places = self.layout.place(torch.arange(start, stop, device=arena.device))
        named = to_device(np.array([block]), arena.device)
        for layer in range(self.config.layers):
            rows = torch.empty(arena.kv_block_shape, dtype=arena.dtype, device=arena.device)
            heads, always = self.offloaded[layer], self.persistent[layer]
            if len(heads):
                mine = self.store[layer][slot]
                rows[:, :, heads] = mine[:, :, places].transpose(1, 2)
                if kept:
                    first = self.layout.choice_start + state.chosen
                    mine[:, :, first : first + kept] = mine[:, :, places[len(places) - kept :]]
                    held = self.held[layer][slot, :, state.chosen : chosen]
                    held.copy_(torch.arange(stop - kept, stop, device=arena.device))
            if len(always):
                rows[:, :, always] = self.full[layer][slot][:, :, start:stop].transpose(1, 2)
            self.hash_blocks(layer, named, rows[None, 0])
            pairs.append((arena.kv_host[layer, block], rows))
            sources.append(rows)
        self._leaving.append((self.mover.d2h(pairs), sources, state))
        self.table[slot, len(state.blocks)] = block
        state.blocks.append(block)
        state.host_tokens, state.chosen = stop, chosen
