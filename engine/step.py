"""One iteration's work: what to compute, and where every token's keys and values come from.

`Decode` and `Work` are one sequence's part, in blocks and positions; `Step` all of it as index
tensors, made by `engine.step_builder` and used by every layer. A sequence that decodes from device
blocks needs its block table alone. Any other has a source for each token: the device pool, a host
block, an activation block, or this very step. All but the pool meet in one buffer per layer: rows
loaded from host, rows projected from activations, and the new tokens' rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.blocks import BlockType, Place
from engine.blocks import Ids as Ids

Run = tuple[int, int, int]  # first target, first source, how many
Wanted = Literal["last", "all", "none"]


class Source(IntEnum):
    """Where a token's keys and values come from; of those where they lie, the nearest first."""

    NEW = 0  # computed in this step
    KV_DEVICE = 1
    ACT_DEVICE = 2
    KV_HOST = 3
    ACT_HOST = 4
    KV_CPU = 5  # in host memory, where the CPU attends to it: nothing crosses but queries, results


class NoSuchBlock(ValueError):
    """A token is to come from, or go to, a block that its sequence does not have."""


COLUMNS: tuple[tuple[BlockType, Place], ...] = (
    ("kv", "device"), ("act", "device"), ("kv", "host"), ("act", "host"),
)  # fmt: skip
"""What `Pages` has a line of ids for, as `Source` counts them from KV_DEVICE on."""

LINE_OF: dict[Source, int] = {source: source - 1 for source in Source if source != Source.NEW}
"""The line of `Pages` that has the blocks of a source."""
LINE_OF[Source.KV_CPU] = LINE_OF[Source.KV_HOST]


class Pages:
    """Where one sequence's blocks lie.

    ids (4, blocks): block i holds tokens [i·block_tokens, (i+1)·block_tokens), and ids[c, i] is its
    block of the type and place `COLUMNS[c]`, -1 where it is not there.
    """

    __slots__ = ("ids",)

    def __init__(self, blocks: int = 0) -> None:
        self.ids = np.full((len(COLUMNS), blocks), -1, np.int64)

    def __len__(self) -> int:
        """Blocks."""
        return self.ids.shape[1]

    def column(self, type: BlockType, place: Place) -> Ids:
        """Ids of that type and place, to read and to write."""
        return self.ids[COLUMNS.index((type, place))]

    def put(self, start: int, type: BlockType, place: Place, ids: Ids | list[int]) -> None:
        """Blocks from index `start` on lie there too; there may be more of them than before."""
        missing = start + len(ids) - len(self)
        if missing > 0:
            more = np.full((len(COLUMNS), missing), -1, np.int64)
            self.ids = np.concatenate((self.ids, more), axis=1)
        self.column(type, place)[start : start + len(ids)] = ids


@dataclass(slots=True)
class Decode:
    """The next token of a sequence, all of whose context is KV in device blocks.

    token: its id. position: of it, which is how many tokens come before it. blocks (n,): device
    blocks of all of them and of the token, which is written there first. act_block: takes its
    activation; -1: none does.
    """

    token: int
    position: int
    blocks: Ids
    act_block: int = -1

    @property
    def length(self) -> int:
        """Tokens of the sequence, this one included."""
        return self.position + 1


@dataclass(slots=True)
class Work:
    """One sequence's part of a step, with a source for each of its tokens.

    tokens: ids of its first tokens; those at positions of source NEW are computed. sources: a
    `Source` for each. store_from: new tokens from this position on are also written to the host
    blocks that their pages name. spill: indices of its blocks that the step completes, to be copied
    from the device to host. wanted: logits of the last, all, or no computed tokens.
    """

    tokens: Ids
    sources: NDArray[np.int8]
    pages: Pages
    store_from: int = 1 << 60
    spill: list[int] = field(default_factory=list)
    wanted: Wanted = "last"

    @property
    def length(self) -> int:
        """Tokens of the sequence, those to compute included."""
        return len(self.sources)


@dataclass(slots=True)
class HostContext:
    """Context of one sequence that the CPU attends to in host memory, and the queries that see it.

    first, queries: of the new tokens that have any such context, in their order. blocks: of host
    memory, each once, in any order: all come before whatever is computed, so that every query sees
    every key. last: the one that is not full, or -1, and how many tokens it holds.
    """

    first: int
    queries: int
    blocks: Ids
    last: int = -1
    last_tokens: int = 0

    @property
    def full(self) -> Ids:
        """The blocks that are full."""
        return self.blocks[self.blocks != self.last]


@dataclass(slots=True)
class OnCpu:
    """What of a step the CPU attends to. rows: which of the step's tokens its queries are."""

    rows: Tensor
    queries: int
    contexts: list[HostContext]


@dataclass(slots=True)
class Part:
    """Keys of a group of queries that lie in one place: rows (batch·keys,) of K and of V.

    lengths (batch,): keys of each query, visible (batch, keys): False behind those; None: all have
    `keys` of them.
    """

    pool: bool
    k_rows: Tensor
    v_rows: Tensor
    keys: int
    lengths: Tensor | None = None
    visible: Tensor | None = None


@dataclass(slots=True)
class PagedPart:
    """Contexts of single queries in the device pool, as whole blocks.

    k_rows, v_rows (batch·most,): the blocks of each context in order, padded with a full one of it,
    as rows of the pool in halves: a block's keys are half 2·block, its values the next. keys: of
    the longest context. last (batch,): where in `k_rows` each one ends. lengths, visible: as of
    `Part`; inside (batch, block_tokens): False behind the end in a context's last block.
    """

    block_tokens: int
    k_rows: Tensor
    v_rows: Tensor
    keys: int
    last: Tensor
    lengths: Tensor | None = None
    visible: Tensor | None = None
    inside: Tensor | None = None


@dataclass(slots=True)
class Group:
    """Queries attended to together. rows (batch·queries,): which of the step's tokens they are.

    in_order: they are all of the step's tokens as they stand. on_cpu: part of the context of one
    or more is attended to on the CPU.
    """

    in_order: bool
    batch: int
    queries: int
    rows: Tensor
    parts: list[Part | PagedPart]
    on_cpu: bool = False


@dataclass(slots=True)
class Scatter:
    """Rows of one tensor that become rows of another."""

    target: Tensor
    source: Tensor


@dataclass(slots=True)
class Out:
    """Rows to host: gathered by `source`, then copied in runs of consecutive rows or blocks."""

    source: Tensor
    runs: list[Run]


def _no_ids() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(slots=True)
class Step:
    """An iteration, ready to run on the device.

    kv_runs, act_runs: (block of the buffer, host block, how many), the same for every layer.
    act_rows: rows of the loaded activations to project, None for all in order; act_device: rows of
    device activations. Buffer rows: loaded, then K and V of each token from activations,
    then of each new one, then those that `from_pool` copies from the device's blocks.
    """

    tokens: Tensor
    positions: Tensor
    logit_rows: Tensor
    groups: list[Group]
    to_pool: Scatter | None = None
    to_act: Scatter | None = None
    act_positions: Tensor = field(default_factory=_no_ids)
    act_rows: Tensor | None = None
    act_device: Tensor | None = None
    kv_runs: list[Run] = field(default_factory=list)
    act_runs: list[Run] = field(default_factory=list)
    loaded_rows: int = 0
    loaded_act_blocks: int = 0
    act_tokens: int = 0
    copied_tokens: int = 0
    from_pool: Scatter | None = None
    store_kv: Out | None = None
    store_act: Out | None = None
    spill_kv: Out | None = None
    spill_act: Out | None = None
    on_cpu: OnCpu | None = None

    @property
    def new_tokens(self) -> int:
        """Tokens that are computed."""
        return len(self.tokens)

    @property
    def buffer_rows(self) -> int:
        """Rows of K or V that the step needs besides the device pool."""
        return self.loaded_rows + 2 * (self.act_tokens + self.new_tokens + self.copied_tokens)

    @property
    def stores(self) -> bool:
        """Whether the step writes to host memory."""
        return any((self.store_kv, self.store_act, self.spill_kv, self.spill_act))
