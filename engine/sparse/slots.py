"""What a sequence that decodes sparsely has on the device: one slot of every layer's tensors.

Per KV head that is offloaded: places for sinks, recent tokens (a ring) and the chosen ones; per
persistent head: all tokens. All KV, in whole blocks, is in the arena's host blocks, which the
slot's table names; the tokens behind the last of them are in the ring. A block leaves the ring when
it is older than the recent tokens: it is copied to host memory, hashed, and its newest tokens take
the places by which the choice has grown, so that at a share of 1 nothing is ever missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.arena import Arena, ArenaTooLarge, free_host_bytes
from engine.config import ModelConfig
from engine.sparse.codes import Hasher
from engine.sparse.settings import SparseSettings
from engine.sparse.view import Layout, Slot, View, make_view, to_device
from engine.transfer import Event, LinkMover, TransferFailed
from kappa.plans.clo import Persistent


class Slots:
    """The slots of one engine.

    Args:
        config: of the model.
        arena: its host blocks hold the KV.
        mover: copies to them.
        settings: how many slots, how long, how they choose.
        persistent: KV heads of each layer that keep all KV on the device.

    Raises:
        ValueError: persistent heads that the model has not.
        ArenaTooLarge: they do not fit the memory that is free, with both numbers.
    """

    def __init__(
        self,
        config: ModelConfig,
        arena: Arena,
        mover: LinkMover,
        settings: SparseSettings,
        persistent: Persistent,
    ) -> None:
        _check(config, persistent)
        self.config, self.arena, self.mover, self.settings = config, arena, mover, settings
        clo, block = settings.clo, arena.block_tokens
        self.layout = Layout(
            clo.sink_tokens,
            clo.recent_tokens + block - 1 + settings.chunk_tokens,
            config.heads // config.kv_heads,
        )
        self.most_chosen = clo.chosen_tokens(settings.max_tokens)
        self.states = [Slot() for _ in range(settings.slots)]
        device = arena.device
        self.hasher = None
        if settings.retriever == "hash":
            bits = clo.code_bits
            self.hasher = Hasher(config.head_dim, bits, settings.seed, arena.dtype, device)
        self.persistent = [_ids(heads, device) for heads in persistent]
        every = range(config.kv_heads)
        self.offloaded = [
            _ids([head for head in every if head not in heads], device) for heads in persistent
        ]
        self._refuse_too_large()
        self.store, self.full, self.labels, self.ages, self.codes = self._tensors(device)
        self.table = torch.zeros(
            (settings.slots, -(-settings.max_tokens // block)), dtype=torch.int64, device=device
        )
        # Blocks on their way to host memory, with what they are copied from, and whose they are.
        self._leaving: list[tuple[Event, list[Tensor], Slot]] = []

    def _tensors(self, device: torch.device) -> list[list[Tensor]]:
        """Of each layer: places, all tokens of persistent heads, labels, ages, and codes."""
        arena, settings, layout = self.arena, self.settings, self.layout
        slots, width, dtype = settings.slots, self.config.head_dim, arena.dtype
        places = layout.choice_start + self.most_chosen
        words = self.hasher.words if self.hasher else 0

        def zeros(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        counts = [len(heads) for heads in self.offloaded]
        whole = [len(heads) for heads in self.persistent]
        host, block = arena.size.kv_host, arena.block_tokens
        return [
            [zeros(dtype, slots, 2, n, places, width) for n in counts],
            [zeros(dtype, slots, 2, n, settings.max_tokens, width) for n in whole],
            [zeros(dtype, slots, n, layout.group, width) for n in counts],
            [zeros(torch.int32, slots, n) for n in counts],
            [zeros(torch.int64, host, n, block, words) for n in counts],
        ]

    def _refuse_too_large(self) -> None:
        """Before any of it is taken."""
        arena, settings = self.arena, self.settings
        shapes = self._tensors(torch.device("meta"))
        wanted = sum(tensor.nbytes for tensors in shapes for tensor in tensors)
        cuda = arena.device.type == "cuda"
        free = torch.cuda.mem_get_info(arena.device)[0] if cuda else free_host_bytes()
        if wanted > free:
            raise ArenaTooLarge(
                f"{settings.slots} sparse slots of {settings.max_tokens} tokens and the codes of "
                f"{arena.size.kv_host} host blocks need {wanted} bytes of device memory, but only "
                f"{free} are free: give fewer slots, a smaller share, or less host memory"
            )

    # -- sizes --------------------------------------------------------------------------------

    def host_part(self, tokens: int) -> int:
        """Of so many tokens those that are in host blocks: whole blocks behind the recent ones."""
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

    @property
    def value_step(self) -> int:
        """From a key's row to its value's."""
        return self.arena.block_tokens * self.config.kv_heads

    def resident(self, state: Slot) -> Tensor:
        """Positions of a slot's sinks and recent tokens."""
        first = max(min(self.layout.sinks, state.tokens), state.host_tokens)
        sinks = torch.arange(min(self.layout.sinks, state.tokens, first))
        return torch.cat((sinks, torch.arange(first, state.tokens))).to(self.arena.device)

    # -- a sequence comes and goes --------------------------------------------------------------

    def prepare(self, slot: int, tokens: int, blocks: Sequence[int]) -> Slot:
        """Take a slot for a sequence of so many tokens, whose first ones are in host `blocks`.

        Raises:
            ValueError: more tokens than a slot holds, or blocks for too few of them.
        """
        if tokens > self.settings.max_tokens:
            raise ValueError(
                f"a sequence of {tokens} tokens: a sparse slot holds {self.settings.max_tokens}"
            )
        host_tokens = self.host_part(tokens)
        needed = host_tokens // self.arena.block_tokens
        if len(blocks) != needed:
            raise ValueError(
                f"{len(blocks)} host blocks for {tokens} tokens: {needed} of them are behind the "
                "recent ones"
            )
        chosen = self._chosen(tokens, host_tokens)
        state = self.states[slot] = Slot(tokens, host_tokens, chosen, list(blocks))
        if blocks:
            self.table[slot, :needed] = to_device(np.array(blocks), self.table.device)
        for ages in self.ages:
            ages[slot] = 0
        return state

    def fill(self, slot: int, layer: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keys and values (n, kv_heads, head_dim) of resident tokens, into their places."""
        heads, places = self.offloaded[layer], self.layout.place(positions)
        for which, rows in enumerate((keys, values)):
            self.store[layer][slot, which][:, places] = rows[:, heads].transpose(0, 1)

    def fill_persistent(self, slot: int, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keys and values (n, kv_heads, head_dim) of the first n tokens, of persistent heads."""
        heads = self.persistent[layer]
        for which, rows in enumerate((keys, values)):
            self.full[layer][slot, which, :, : len(rows)] = rows[:, heads].transpose(0, 1)

    def hash_blocks(self, layer: int, blocks: Tensor, keys: Tensor) -> None:
        """Codes of host blocks from their keys (blocks, block_tokens, kv_heads, head_dim)."""
        heads = self.offloaded[layer]
        if self.hasher is not None and len(heads):
            codes = self.hasher.encode(keys[:, :, heads])
            self.codes[layer][blocks] = codes.transpose(1, 2)

    def close(self, slot: int) -> list[int]:
        """Give a slot back; the host blocks that it named."""
        blocks, self.states[slot] = self.states[slot].blocks, Slot()
        return blocks

    # -- a pass -------------------------------------------------------------------------------

    def begin(self, slots: Sequence[int], new: int) -> View:
        """A pass over `slots` with `new` tokens each.

        Raises:
            ValueError: a slot has no room for them, or they are more than a chunk.
            TransferFailed: a block of one of them did not arrive in host memory.
        """
        self._room(slots, new)
        self._arrived()
        states = [self.states[slot] for slot in slots]
        if any(state.stuck for state in states):
            raise TransferFailed("tokens that are no longer recent did not reach host memory")
        block = self.arena.block_tokens
        return make_view(list(slots), states, new, self.layout, block, self.table)

    def write(self, layer: int, view: View, kv: Tensor) -> None:
        """Keys and values (batch·new, 2·kv_width) of new tokens, into places and full caches."""
        config = self.config
        shape = (len(view.slots), view.new, 2, config.kv_heads, config.head_dim)
        rows = kv.view(shape)
        at = view.index[:, None]
        if len(self.offloaded[layer]):
            self.store[layer][at, :, :, view.places] = rows[:, :, :, self.offloaded[layer]]
        if len(self.persistent[layer]):
            self.full[layer][at, :, :, view.positions] = rows[:, :, :, self.persistent[layer]]

    def end(self, view: View, take_block: Callable[[int], int | None]) -> None:
        """The pass is over: slots are longer, and blocks that are no longer recent leave.

        take_block: a host block for a slot; None where there is none: the slot is stuck.
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
                block = take_block(slot)
                if block is None:
                    state.stuck = True
                    break
                self._leave(slot, state, block)

    def slot_slice(self, tensor: Tensor, view: View) -> Tensor:
        """The view's slots of a tensor (slots, ...): as it stands where they are neighbours."""
        first, last = view.slots[0], view.slots[-1]
        if view.slots == list(range(first, last + 1)):
            return tensor[first : last + 1]
        return tensor.index_select(0, view.index)

    # -- inside -------------------------------------------------------------------------------

    def _arrived(self) -> None:
        """What is gathered from now on may be in blocks that have left: after those.

        One that did not arrive costs its own slot, whichever slots go on first.
        """
        leaving, self._leaving = self._leaving, []
        for event, _, state in leaving:
            try:
                self.mover.wait(event)
            except TransferFailed:
                state.stuck = True

    def _chosen(self, tokens: int, host_tokens: int) -> int:
        most = max(0, host_tokens - self.layout.sinks)
        return min(self.settings.clo.chosen_tokens(tokens), most, self.most_chosen)

    def _room(self, slots: Sequence[int], new: int) -> None:
        if not 1 <= new <= self.settings.chunk_tokens:
            raise ValueError(
                f"a pass of {new} tokens: a slot takes 1 to {self.settings.chunk_tokens} at a time"
            )
        for slot in slots:
            tokens = self.states[slot].tokens
            if self.states[slot].stuck:
                raise ValueError(f"slot {slot} is stuck: its older tokens are not in host memory")
            if tokens + new > self.settings.max_tokens:
                raise ValueError(
                    f"slot {slot} has {tokens} tokens and room for {self.settings.max_tokens}: "
                    f"{new} more do not fit"
                )

    def _leave(self, slot: int, state: Slot, block: int) -> None:
        """The oldest block of the ring goes to host memory."""
        size, arena, start = self.arena.block_tokens, self.arena, state.host_tokens
        stop = start + size
        # Where a chunk of many tokens made it grow by more, later blocks bring the rest.
        chosen = min(self._chosen(state.tokens, stop), state.chosen + size)
        kept = chosen - state.chosen
        targets, sources = [], []
        positions = torch.arange(start, stop, device=arena.device)
        places = self.layout.place(positions)
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
            if len(always):
                rows[:, :, always] = self.full[layer][slot][:, :, start:stop].transpose(1, 2)
            self.hash_blocks(layer, named, rows[None, 0])
            targets.append(arena.kv_host[layer, block])
            sources.append(rows)
        event = self.mover.d2h(list(zip(targets, sources, strict=True)))
        self._leaving.append((event, sources, state))
        self.table[slot, len(state.blocks)] = block
        state.blocks.append(block)
        state.host_tokens, state.chosen = stop, chosen


def _ids(heads: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(heads), dtype=torch.int64, device=device)


def _check(config: ModelConfig, persistent: Persistent) -> None:
    if len(persistent) != config.layers:
        raise ValueError(
            f"persistent heads of {len(persistent)} layers: the model has {config.layers}"
        )
    for layer, heads in enumerate(persistent):
        wrong = [head for head in heads if not 0 <= head < config.kv_heads]
        if wrong or len(set(heads)) != len(heads):
            raise ValueError(
                f"persistent heads {list(heads)} of layer {layer}: name each of 0 to "
                f"{config.kv_heads - 1} at most once"
            )
