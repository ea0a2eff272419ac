"""What a sequence that decodes sparsely has on the device: one lane of every layer's tensors.

Per KV head that is offloaded: slots for sinks, recent tokens (a ring) and the chosen ones; per
persistent head: all tokens. All KV, in whole blocks, is in the arena's host blocks, which the
lane's table names; the tokens behind the last of them are in the ring. A block leaves the ring when
it is older than the recent tokens: it is copied to host memory, hashed, and its newest tokens take
the slots by which the choice has grown, so that at a share of 1 nothing is ever missing.
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
from engine.sparse.view import Lane, Layout, View, make_view, to_device
from engine.transfer import Event, Mover, TransferFailed
from kappa.plans.clo import Persistent


class Lanes:
    """The lanes of one engine.

    Args:
        config: of the model.
        arena: its host blocks hold the KV.
        mover: copies to them.
        settings: how many lanes, how long, how they choose.
        persistent: KV heads of each layer that keep all KV on the device.

    Raises:
        ValueError: persistent heads that the model has not.
        ArenaTooLarge: they do not fit the memory that is free, with both numbers.
    """

    def __init__(
        self,
        config: ModelConfig,
        arena: Arena,
        mover: Mover,
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
        _refuse_too_large(config, arena, settings, persistent, self.layout, self.most_chosen)
        self.states = [Lane() for _ in range(settings.lanes)]
        device, dtype = arena.device, arena.dtype
        self.hasher = None
        if settings.retriever == "hash":
            self.hasher = Hasher(config.head_dim, clo.code_bits, settings.seed, dtype, device)
        every = range(config.kv_heads)
        self.persistent = [_ids(heads, device) for heads in persistent]
        self.offloaded = [
            _ids([head for head in every if head not in heads], device) for heads in persistent
        ]
        lanes, width, group = settings.lanes, config.head_dim, self.layout.group
        slots = self.layout.choice_start + self.most_chosen

        def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        counts = [len(heads) for heads in self.offloaded]
        self.store = [zeros(lanes, 2, n, slots, width) for n in counts]
        self.full = [
            zeros(lanes, 2, len(heads), settings.max_tokens, width) for heads in self.persistent
        ]
        self.labels = [zeros(lanes, n, group, width) for n in counts]
        self.ages = [zeros(lanes, n, kind=torch.int32) for n in counts]
        self.held = [zeros(lanes, n, self.most_chosen, kind=torch.int64) for n in counts]
        words = self.hasher.words if self.hasher else 0
        host_blocks = arena.size.kv_host
        self.codes = [zeros(host_blocks, n, block, words, kind=torch.int64) for n in counts]
        most_blocks = -(-settings.max_tokens // block)
        self.table = zeros(lanes, most_blocks, kind=torch.int64)
        # Blocks on their way to host memory, with what they are copied from, and whose they are.
        self._leaving: list[tuple[Event, list[Tensor], Lane]] = []

    # -- sizes --------------------------------------------------------------------------------

    @property
    def device_bytes(self) -> int:
        """Device memory of all lanes and codes."""
        tensors = [*self.store, *self.full, *self.labels, *self.ages, *self.held, *self.codes]
        return sum(tensor.nbytes for tensor in tensors)

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

    def resident(self, state: Lane) -> Tensor:
        """Positions of a lane's sinks and recent tokens."""
        first = max(min(self.layout.sinks, state.tokens), state.host_tokens)
        sinks = torch.arange(min(self.layout.sinks, state.tokens, first))
        return torch.cat((sinks, torch.arange(first, state.tokens))).to(self.arena.device)

    # -- a sequence comes and goes --------------------------------------------------------------

    def prepare(self, lane: int, tokens: int, blocks: Sequence[int]) -> Lane:
        """Take a lane for a sequence of so many tokens, whose first ones are in host `blocks`.

        Raises:
            ValueError: more tokens than a lane holds, or blocks for too few of them.
        """
        if tokens > self.settings.max_tokens:
            raise ValueError(
                f"a sequence of {tokens} tokens: a sparse lane holds {self.settings.max_tokens}"
            )
        host_tokens = self.host_part(tokens)
        needed = host_tokens // self.arena.block_tokens
        if len(blocks) != needed:
            raise ValueError(
                f"{len(blocks)} host blocks for {tokens} tokens: {needed} of them are behind the "
                "recent ones"
            )
        chosen = self._chosen(tokens, host_tokens)
        state = self.states[lane] = Lane(tokens, host_tokens, chosen, list(blocks))
        if blocks:
            self.table[lane, :needed] = to_device(np.array(blocks), self.table.device)
        for ages in self.ages:
            ages[lane] = 0
        return state

    def fill(self, lane: int, layer: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keys and values (n, kv_heads, head_dim) of resident tokens, into their slots."""
        heads, slots = self.offloaded[layer], self.layout.slot(positions)
        for which, rows in enumerate((keys, values)):
            self.store[layer][lane, which][:, slots] = rows[:, heads].transpose(0, 1)

    def fill_persistent(self, lane: int, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keys and values (n, kv_heads, head_dim) of the first n tokens, of persistent heads."""
        heads = self.persistent[layer]
        for which, rows in enumerate((keys, values)):
            self.full[layer][lane, which, :, : len(rows)] = rows[:, heads].transpose(0, 1)

    def hash_blocks(self, layer: int, blocks: Tensor, keys: Tensor) -> None:
        """Codes of host blocks from their keys (blocks, block_tokens, kv_heads, head_dim)."""
        heads = self.offloaded[layer]
        if self.hasher is not None and len(heads):
            codes = self.hasher.encode(keys[:, :, heads])
            self.codes[layer][blocks] = codes.transpose(1, 2)

    def close(self, lane: int) -> list[int]:
        """Give a lane back; the host blocks that it named."""
        blocks, self.states[lane] = self.states[lane].blocks, Lane()
        return blocks

    # -- a pass -------------------------------------------------------------------------------

    def begin(self, lanes: Sequence[int], new: int) -> View:
        """A pass over `lanes` with `new` tokens each.

        Raises:
            ValueError: a lane has no room for them, or they are more than a chunk.
            TransferFailed: a block of one of them did not arrive in host memory.
        """
        self._room(lanes, new)
        self._arrived()
        states = [self.states[lane] for lane in lanes]
        if any(state.stuck for state in states):
            raise TransferFailed("tokens that are no longer recent did not reach host memory")
        block = self.arena.block_tokens
        return make_view(list(lanes), states, new, self.layout, block, self.table)

    def write(self, layer: int, view: View, kv: Tensor) -> None:
        """Keys and values (batch·new, 2·kv_width) of the new tokens, into slots and full caches."""
        config = self.config
        shape = (len(view.lanes), view.new, 2, config.kv_heads, config.head_dim)
        rows = kv.view(shape)
        at = view.index[:, None]
        if len(self.offloaded[layer]):
            self.store[layer][at, :, :, view.slots] = rows[:, :, :, self.offloaded[layer]]
        if len(self.persistent[layer]):
            self.full[layer][at, :, :, view.positions] = rows[:, :, :, self.persistent[layer]]

    def end(self, view: View, take_block: Callable[[int], int | None]) -> None:
        """The pass is over: lanes are longer, and blocks that are no longer recent leave.

        take_block: a host block for a lane; None where there is none: the lane is stuck.
        """
        for lane in view.lanes:
            state = self.states[lane]
            state.tokens += view.new
            if state.chosen:
                state.fresh = False
        for lane in view.lanes:
            state = self.states[lane]
            wanted = self.host_part(state.tokens)
            while state.host_tokens < wanted:
                block = take_block(lane)
                if block is None:
                    state.stuck = True
                    break
                self._leave(lane, state, block)

    def lane_slice(self, tensor: Tensor, view: View) -> Tensor:
        """The view's lanes of a tensor (lanes, ...): as it stands where they are neighbours."""
        first, last = view.lanes[0], view.lanes[-1]
        if view.lanes == list(range(first, last + 1)):
            return tensor[first : last + 1]
        return tensor.index_select(0, view.index)

    # -- inside -------------------------------------------------------------------------------

    def _arrived(self) -> None:
        """What is gathered from now on may be in blocks that have left: after those.

        One that did not arrive costs its own lane, whichever lanes go on first.
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

    def _room(self, lanes: Sequence[int], new: int) -> None:
        if not 1 <= new <= self.settings.chunk_tokens:
            raise ValueError(
                f"a pass of {new} tokens: a lane takes 1 to {self.settings.chunk_tokens} at a time"
            )
        for lane in lanes:
            tokens = self.states[lane].tokens
            if self.states[lane].stuck:
                raise ValueError(f"lane {lane} is stuck: its older tokens are not in host memory")
            if tokens + new > self.settings.max_tokens:
                raise ValueError(
                    f"lane {lane} has {tokens} tokens and room for {self.settings.max_tokens}: "
                    f"{new} more do not fit"
                )

    def _leave(self, lane: int, state: Lane, block: int) -> None:
        """The oldest block of the ring goes to host memory."""
        size, arena, start = self.arena.block_tokens, self.arena, state.host_tokens
        stop = start + size
        # Where a chunk of many tokens made it grow by more, later blocks bring the rest.
        chosen = min(self._chosen(state.tokens, stop), state.chosen + size)
        kept = range(stop - (chosen - state.chosen), stop)
        targets, sources = [], []
        positions = torch.arange(start, stop, device=arena.device)
        slots = self.layout.slot(positions)
        named = to_device(np.array([block]), arena.device)
        for layer in range(self.config.layers):
            rows = torch.empty(arena.kv_block_shape, dtype=arena.dtype, device=arena.device)
            heads, always = self.offloaded[layer], self.persistent[layer]
            if len(heads):
                mine = self.store[layer][lane]
                rows[:, :, heads] = mine[:, :, slots].transpose(1, 2)
                if len(kept):
                    first = self.layout.choice_start + state.chosen
                    new = slots[len(slots) - len(kept) :]
                    mine[:, :, first : first + len(kept)] = mine[:, :, new]
                    held = torch.arange(kept.start, kept.stop, device=arena.device)
                    self.held[layer][lane, :, state.chosen : chosen] = held
            if len(always):
                rows[:, :, always] = self.full[layer][lane][:, :, start:stop].transpose(1, 2)
            self.hash_blocks(layer, named, rows[None, 0])
            targets.append(arena.kv_host[layer, block])
            sources.append(rows)
        event = self.mover.d2h(list(zip(targets, sources, strict=True)))
        self._leaving.append((event, sources, state))
        self.table[lane, len(state.blocks)] = block
        state.blocks.append(block)
        state.host_tokens, state.chosen = stop, chosen


def _ids(heads: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(heads), dtype=torch.int64, device=device)


def _refuse_too_large(
    config: ModelConfig,
    arena: Arena,
    settings: SparseSettings,
    persistent: Persistent,
    layout: Layout,
    most_chosen: int,
) -> None:
    """Before any of it is taken: lanes of the longest sequence, and codes of all host blocks."""
    kept = sum(map(len, persistent))
    offloaded = config.layers * config.kv_heads - kept
    row_bytes = config.head_dim * arena.dtype.itemsize
    # Of an offloaded head: slots, labels, age, and which tokens are in the slots.
    head_bytes = (2 * (layout.choice_start + most_chosen) + layout.group) * row_bytes
    head_bytes += 4 + 8 * most_chosen
    whole_bytes = 2 * settings.max_tokens * row_bytes
    wanted = settings.lanes * (offloaded * head_bytes + kept * whole_bytes)
    if settings.retriever == "hash":
        tokens = arena.size.kv_host * arena.block_tokens
        wanted += offloaded * tokens * settings.clo.code_bits // 8
    cuda = arena.device.type == "cuda"
    free = torch.cuda.mem_get_info(arena.device)[0] if cuda else free_host_bytes()
    if wanted > free:
        raise ArenaTooLarge(
            f"{settings.lanes} sparse lanes of {settings.max_tokens} tokens and the codes of "
            f"{arena.size.kv_host} host blocks need {wanted} bytes of device memory, but only "
            f"{free} are free: give fewer lanes, a smaller share, or less host memory"
        )


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
