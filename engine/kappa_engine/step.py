"""One iteration's work: what to compute, and where the keys and values of every token come from.

A `StepRow` is one sequence's part: the tokens to compute and, as spans of positions, the source of
every token up to them: the device pool, a host block, an activation block, or this very step. A
`DeviceStep` is all rows as index tensors, made by `input_batch` and used by every layer.
Attention reads the pool in whole blocks; all other keys and values meet in one buffer per layer:
rows loaded from host, rows projected from activations, and the new tokens' rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kappa.plans.cpu_offload import Division
from kappa.plans.load_plan import Segment
from kappa_engine.block_pool import BlockType, CopyRun, Ids, Place
from kappa_engine.kv_cache import Arena
from kappa_engine.transfer import LinkMover

Wanted = Literal["last", "all"]


class PlanRefused(ValueError):
    """A load plan that this engine does not execute, or not for this sequence."""


class NoSuchBlock(ValueError):
    """A token is to come from, or go to, a block that its sequence does not have."""


class Source(IntEnum):
    """The source of a token's keys and values; the nearest place first."""

    NEW = 0  # computed in this step
    KV_DEVICE = 1
    ACT_DEVICE = 2
    KV_HOST = 3
    ACT_HOST = 4
    KV_CPU = 5  # in host memory: the CPU attends to it, and only queries and results cross


COLUMN_OF: dict[Source, tuple[BlockType, Place]] = {
    Source.KV_DEVICE: ("kv", "device"), Source.ACT_DEVICE: ("act", "device"),
    Source.KV_HOST: ("kv", "host"), Source.ACT_HOST: ("act", "host"),
    Source.KV_CPU: ("kv", "host"),
}  # fmt: skip
"""Which column of `Pages` has the blocks of a source."""
_OF_SEGMENT = {"K": Source.KV_HOST, "A": Source.ACT_HOST, "R": Source.NEW}
_NO_BLOCKS: Ids = np.empty(0, np.int64)


class Pages:
    """The block table of one sequence: a column of block ids for each type and place.

    Block i holds tokens [i·block_tokens, (i+1)·block_tokens). A column has -1 for, or ends before,
    a block that is not in its place.
    """

    __slots__ = ("_columns",)

    def __init__(self, kv_device: Ids = _NO_BLOCKS) -> None:
        self._columns: dict[tuple[BlockType, Place], Ids] = {("kv", "device"): kv_device}

    def column(self, type: BlockType, place: Place) -> Ids:
        """Ids of that type and place, to read and to write."""
        return self._columns.get((type, place), _NO_BLOCKS)

    def put(self, start: int, type: BlockType, place: Place, ids: Ids | list[int]) -> None:
        """Set the ids of blocks from index `start` on; the column grows to hold them."""
        column = self.column(type, place)
        missing = start + len(ids) - len(column)
        if missing > 0:
            column = np.concatenate((column, np.full(missing, -1, np.int64)))
            self._columns[type, place] = column
        column[start : start + len(ids)] = ids

    def of(self, source: Source, blocks: Ids) -> Ids:
        """Ids of these blocks of the sequence in the place of `source`; -1 where there is none."""
        return self.ids(*COLUMN_OF[source], blocks)

    def ids(self, type: BlockType, place: Place, blocks: Ids) -> Ids:
        """Ids of these blocks of that type and place; -1 where there is none."""
        column = self.column(type, place)
        if len(blocks) and blocks.max() < len(column):
            return column[blocks]
        ids = np.full(len(blocks), -1, np.int64)
        there = blocks < len(column)
        ids[there] = column[blocks[there]]
        return ids


class TokenSpan(NamedTuple):
    """Positions [start, stop) of a sequence, all from one source."""

    source: Source
    start: int
    stop: int


@dataclass(slots=True)
class StepRow:
    """One sequence's part of a step."""

    # Ids of the tokens to compute, in order of position.
    tokens: Sequence[int] | Ids
    # Cover all positions from 0 to the last one to compute.
    spans: tuple[TokenSpan, ...]
    # New tokens are written to its device blocks, of KV and of activations.
    pages: Pages
    # Logits of the last or of all computed tokens.
    wanted: Wanted = "last"

    @property
    def length(self) -> int:
        """Tokens of the sequence, those to compute included."""
        return self.spans[-1].stop

    @property
    def decodes(self) -> bool:
        """Whether one token is computed, behind a context that is all in device blocks."""
        alone = len(self.tokens) == 1 and len(self.spans) == 2
        return alone and self.spans[0].source is Source.KV_DEVICE


def joined(spans: Iterable[TokenSpan]) -> tuple[TokenSpan, ...]:
    """Drop empty spans, and merge neighbours of one source."""
    found: list[TokenSpan] = []
    for span in spans:
        if found and found[-1].source is span.source:
            found[-1] = found[-1]._replace(stop=span.stop)
        elif span.stop > span.start:
            found.append(span)
    return tuple(found)


_NEAREST = (Source.KV_DEVICE, Source.ACT_DEVICE, Source.KV_HOST, Source.ACT_HOST)


def held_spans(
    pages: Pages, tokens: int, block_tokens: int, activations: int = 0, on_cpu: int = 0
) -> tuple[TokenSpan, ...]:
    """Spans of tokens that are in their blocks, each from the nearest place that its block is in.

    The order is KV and activations on the device, KV and activations in host memory.

    Args:
        activations: of this many first tokens, in whole blocks, those without KV on the device come
            from host activations where there are any (KVPR's split).
        on_cpu: of this many first tokens, those in host memory as KV are left to the CPU.
    """
    blocks = np.arange(-(-tokens // block_tokens))
    there = np.stack([pages.of(source, blocks) >= 0 for source in _NEAREST])
    sources = there.argmax(axis=0) + Source.KV_DEVICE
    first = sources[: activations // block_tokens]
    first[there[-1][: len(first)] & (first == Source.KV_HOST)] = Source.ACT_HOST
    left = sources[: on_cpu // block_tokens]
    left[left == Source.KV_HOST] = Source.KV_CPU
    cuts = [0, *(np.flatnonzero(np.diff(sources)) + 1).tolist(), len(blocks)]
    return tuple(
        TokenSpan(Source(sources[a]), a * block_tokens, min(b * block_tokens, tokens))
        for a, b in pairwise(cuts)
        if b > a
    )


def plan_spans(segments: Sequence[Segment], start: int) -> list[TokenSpan]:
    """Spans of a load plan that begins at position `start`.

    Raises:
        PlanRefused: a segment that stays in host memory (C) or is attended to sparsely (S).
    """
    spans = []
    for segment in segments:
        if segment.kind not in _OF_SEGMENT:
            raise PlanRefused(
                f"segment {segment.kind} [{segment.start_tokens}, {segment.end_tokens}): a step "
                "executes K, A and R; plan with those"
            )
        first, end = start + segment.start_tokens, start + segment.end_tokens
        spans.append(TokenSpan(_OF_SEGMENT[segment.kind], first, end))
    return spans


def prompt_row(
    tokens: Sequence[int] | Ids, pages: Pages, segments: Sequence[Segment] = (), start: int = 0,
    wanted: Wanted = "last",
) -> StepRow:  # fmt: skip
    """The row of a prompt: its first `start` tokens are KV in device blocks, `segments` follow, and
    the rest is computed.

    Raises:
        PlanRefused: kinds that are not executed, or segments for more tokens than there are.
    """
    planned = plan_spans(segments, start)
    end = planned[-1].stop if planned else start
    if end >= len(tokens):
        raise PlanRefused(
            f"a plan for {end - start} tokens behind {start}, but the prompt has {len(tokens)}: at "
            "least one token must be computed"
        )
    spans = joined(
        [TokenSpan(Source.KV_DEVICE, 0, start), *planned, TokenSpan(Source.NEW, end, len(tokens))]
    )
    computed = [tokens[span.start : span.stop] for span in spans if span.source is Source.NEW]
    return StepRow(np.concatenate(computed), spans, pages, wanted)


# -- on the device --------------------------------------------------------------------------------


@dataclass(slots=True)
class HostContext:
    """Host blocks of one sequence that the CPU attends to, and the queries that see all of them."""

    # Among the step's queries that have such a context: the first one's index, and how many.
    first: int
    queries: int
    # Full blocks, each once, in any order: all come before the tokens that are computed.
    blocks: Ids


@dataclass(slots=True)
class OnCpu:
    """The contexts of a step that the CPU attends to."""

    # Which of the step's tokens the queries are.
    rows: Tensor
    contexts: list[HostContext]


@dataclass(slots=True)
class BufferPart:
    """Keys of a group of queries in the step's buffer."""

    # Rows (batch·keys,) of the buffer.
    k_rows: Tensor
    v_rows: Tensor
    keys: int
    # Keys of each query (batch,); None: all have `keys`.
    lengths: Tensor | None = None
    # (batch, keys): False behind `lengths`.
    visible: Tensor | None = None


@dataclass(slots=True)
class PoolPart:
    """Keys of a group of queries in the device pool, as whole blocks."""

    block_tokens: int
    # Halves (batch·blocks,) of the pool's blocks, of each context in order and padded with one of
    # its full blocks: a block's keys are half 2·block, its values half 2·block + 1.
    k_rows: Tensor
    v_rows: Tensor
    # Of the longest context.
    keys: int
    # Index in `k_rows` of each context's last block (batch,).
    last: Tensor
    # As of `BufferPart`.
    lengths: Tensor | None = None
    visible: Tensor | None = None
    # (batch, block_tokens): False behind the end of a context in its last block.
    inside: Tensor | None = None


@dataclass(slots=True)
class Group:
    """Queries of one attention call: `queries` of each of `batch` sequences."""

    batch: int
    queries: int
    # Which of the step's tokens they are (batch·queries,).
    rows: Tensor
    parts: list[PoolPart | BufferPart]
    # Whether the CPU attends to part of one context or more.
    on_cpu: bool = False
    # Whether `rows` are all of the step's tokens in order.
    in_order: bool = False


@dataclass(slots=True)
class Scatter:
    """Rows of one tensor that are copied to rows of another."""

    target: Tensor
    source: Tensor


@dataclass(slots=True)
class DeviceStep:
    """An iteration, ready to run on the device.

    The buffer's rows are those loaded, then K and V of each token projected from activations, then
    K and V of each new token, then those that `from_pool` copies from the device's blocks.
    """

    tokens: Tensor
    positions: Tensor
    logit_rows: Tensor
    groups: list[Group]
    act_positions: Tensor
    # Rows of the loaded activations to project; None for all in order.
    act_rows: Tensor | None
    # Rows of the device's activations to project, behind those.
    act_here: Tensor | None
    to_pool: Scatter | None
    to_act: Scatter | None
    from_pool: Scatter | None
    # Copies of every layer: (block of the buffer, host block, how many).
    kv_runs: list[CopyRun]
    act_runs: list[CopyRun]
    loaded_rows: int
    loaded_act_blocks: int
    act_tokens: int
    copied_tokens: int
    on_cpu: OnCpu | None

    @property
    def new_tokens(self) -> int:
        """Tokens that are computed."""
        return len(self.tokens)

    @property
    def first_new_row(self) -> int:
        """The buffer's row of the first new token's K; its V is the next, then the next token's."""
        return self.loaded_rows + 2 * self.act_tokens

    @property
    def buffer_rows(self) -> int:
        """Rows of K or V that the step needs besides the device pool."""
        return self.loaded_rows + 2 * (self.act_tokens + self.new_tokens + self.copied_tokens)


class ServedModel(Protocol):
    """The model that an engine drives: `kappa_engine.forward.Forward`, or one that only waits."""

    arena: Arena
    mover: LinkMover
    # Of a sequence.
    max_tokens: int
    # Token ids are below it.
    vocab: int

    def compute(self, *batches: Sequence[StepRow], division: Division | None = None) -> Tensor:
        """As `kappa_engine.forward.Forward.compute`."""
        ...


def ids(values: Ids | Sequence[int]) -> Tensor:
    """An index tensor of these values, on the CPU."""
    return torch.from_numpy(np.ascontiguousarray(values, np.int64))
