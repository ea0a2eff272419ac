"""Makes a `DeviceStep` of the rows of an iteration: all of its index arrays, once, for all layers.

A context in device blocks costs as much as its block table is long, whoever attends to it; arrays
with an element per token are made only of what is computed, loaded or projected. Rows that decode
from device blocks are handled together; Python loops run over the other rows, their spans, and
groups. The arrays go to the device in a single copy, so that no layer waits for the host.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.blocks import Ids
from engine.step import (
    COLUMN_OF,
    COLUMNS,
    BufferPart,
    CopyRun,
    DeviceStep,
    Group,
    HostContext,
    NoSuchBlock,
    OnCpu,
    PoolPart,
    Scatter,
    Source,
    StepRow,
    TokenSpan,
    ids,
)

_NONE = np.empty(0, np.int64)


def build_step(rows: Sequence[StepRow], block_tokens: int, device: torch.device) -> DeviceStep:
    """The step that computes `rows` together; tokens and logits are in their order.

    Raises:
        NoSuchBlock: a token's source is a block that its sequence does not have; or no token of a
            row is to be computed.
    """
    step = _Builder(rows, block_tokens).step()
    _send(step, device)
    return step


@dataclass(slots=True)
class _Queries:
    """A run of one sequence's queries, from new token `first` on.

    blocks: of the device pool, which hold `keys` tokens before the last query; k, v: rows of the
    buffer with the others; all in order of position, but for those that the CPU attends to.
    """

    first: int
    count: int
    blocks: Ids
    keys: int
    k: Ids = field(default_factory=lambda: _NONE)
    v: Ids = field(default_factory=lambda: _NONE)
    on_cpu: bool = False

    @property
    def alike(self) -> tuple[int, ...]:
        """Those with the same key are attended to together.

        A single query (decoding) goes with others of a similar context, padded by less than half; a
        longer run with those of the same shape, so that causality needs no mask.
        """
        if self.count == 1:
            return 1, len(self.blocks).bit_length(), len(self.k).bit_length(), self.on_cpu
        return self.count, self.keys, len(self.k), self.on_cpu


@dataclass(slots=True)
class _PoolRun:
    """What attention reads of a sequence from the device pool, as it grows with its spans."""

    blocks: Ids
    keys: int = 0
    stop: int = 0

    def takes(self, span: TokenSpan, block_tokens: int) -> bool:
        """Whether whole blocks still say where the tokens are, with those of `span` added."""
        begins = span.start % block_tokens == 0 and self.keys % block_tokens == 0
        return begins or span.start == self.stop

    def add(self, span: TokenSpan, table: Ids, block_tokens: int) -> None:
        more = table[-(-span.start // block_tokens) : -(-span.stop // block_tokens)]
        self.blocks = np.concatenate((self.blocks, more))
        self.keys, self.stop = self.keys + span.stop - span.start, span.stop


class _Builder:
    """A step in the making. `first`: index in the step of each row's first new token."""

    def __init__(self, rows: Sequence[StepRow], block_tokens: int) -> None:
        self.rows, self.bt = rows, block_tokens
        self.first = np.cumsum([0, *(len(row.tokens) for row in rows)]).tolist()
        self.decodes = [index for index, row in enumerate(rows) if row.decodes]
        self.others = [index for index, row in enumerate(rows) if not row.decodes]
        self._check()
        spans = [(index, span) for index in self.others for span in rows[index].spans]
        count: Counter[Source] = Counter()
        for _, span in spans:
            count[span.source] += span.stop - span.start
        self.kv_host = self._wanted(spans, Source.KV_HOST)
        self.act_host = self._wanted(spans, Source.ACT_HOST)
        self.loaded_rows = len(self.kv_host) * 2 * block_tokens
        self.act_tokens = count[Source.ACT_HOST] + count[Source.ACT_DEVICE]
        # Where each source's pairs of K and V begin: in tokens, behind the loaded rows.
        self._next = {
            Source.ACT_HOST: 0,
            Source.ACT_DEVICE: count[Source.ACT_HOST],
            Source.NEW: self.act_tokens,
            Source.KV_DEVICE: self.act_tokens + self.first[-1],
        }
        self.copied_tokens = 0
        self.queries: list[_Queries] = []
        self.contexts: list[HostContext] = []
        # Pieces of index arrays, by what they are of.
        self.pieces: dict[str, list[Ids]] = defaultdict(list)

    def step(self) -> DeviceStep:
        for index in self.others:
            self._add(index)
        if self.decodes:
            self._add_decodes()
        groups = _groups(self.queries, self.bt)
        if len(groups) == 1:
            alone = groups[0].rows.numpy()
            groups[0].in_order = len(alone) == self.first[-1] and _is_range(alone)
        positions = [
            np.arange(span.start, span.stop)
            for row in self.rows for span in row.spans if span.source is Source.NEW
        ]  # fmt: skip
        act_host, act_device = self._joined("act_host"), self._joined("act_device")
        in_order = len(act_host) == len(self.act_host) * self.bt and _is_range(act_host)
        on_cpu = OnCpu(ids(self._joined("on_cpu")), self.contexts) if self.contexts else None
        return DeviceStep(
            tokens=ids(np.concatenate([row.tokens for row in self.rows])),
            positions=ids(np.concatenate(positions)),
            logit_rows=ids(self._logit_rows()),
            groups=groups,
            act_positions=ids(
                np.concatenate((self._joined("host_positions"), self._joined("device_positions")))
            ),
            act_rows=None if in_order else ids(act_host),
            act_device=ids(act_device) if len(act_device) else None,
            to_pool=self._scatter("pool", "from_buffer"),
            to_act=self._scatter("act", "captured"),
            from_pool=self._scatter("copied", "from_pool"),
            kv_runs=_runs(self.kv_host),
            act_runs=_runs(self.act_host),
            loaded_rows=self.loaded_rows,
            loaded_act_blocks=len(self.act_host),
            act_tokens=self.act_tokens,
            copied_tokens=self.copied_tokens,
            on_cpu=on_cpu,
        )

    def _joined(self, name: str) -> Ids:
        return np.concatenate(self.pieces[name]) if self.pieces[name] else _NONE

    def _scatter(self, target: str, source: str) -> Scatter | None:
        rows = self._joined(target)
        return Scatter(ids(rows), ids(self._joined(source))) if len(rows) else None

    def _logit_rows(self) -> list[int]:
        wanted: list[int] = []
        for row, first in zip(self.rows, self.first, strict=False):
            end = first + len(row.tokens)
            wanted += range(first if row.wanted == "all" else end - 1, end)
        return wanted

    def _check(self) -> None:
        for index, row in enumerate(self.rows):
            if not len(row.tokens):
                raise NoSuchBlock(f"sequence {index} of the step has no token to compute")

    # -- blocks -------------------------------------------------------------------------------

    def _ids_of(self, index: int, span: TokenSpan, source: Source) -> Ids:
        """The id of each block of a span in the place of a source."""
        blocks = np.arange(span.start // self.bt, -(-span.stop // self.bt))
        found = self.rows[index].pages.of(source, blocks)
        if len(found) and found.min() < 0:
            first = int(blocks[int(found.argmin())])
            name = " ".join(reversed(COLUMNS[COLUMN_OF[source]]))
            raise NoSuchBlock(
                f"token {max(first * self.bt, span.start)} of sequence {index} of the step is to "
                f"come from {name}, but its sequence has no such block there"
            )
        return found

    def _wanted(self, spans: list[tuple[int, TokenSpan]], source: Source) -> Ids:
        """Ids of all blocks that come from there, ascending: neighbours are copied at once."""
        mine = [self._ids_of(i, span, source) for i, span in spans if span.source is source]
        return np.unique(np.concatenate(mine)) if mine else _NONE

    def _rows_of(self, blocks: Ids, span: TokenSpan, block_rows: int) -> Ids:
        """The row of each token of a span, from the ids of its blocks."""
        positions = np.arange(span.start, span.stop)
        return blocks[positions // self.bt - span.start // self.bt] * block_rows + (
            positions % self.bt
        )

    # -- rows in general ----------------------------------------------------------------------

    def _add(self, index: int) -> None:
        """One row's queries, span by span: where each finds what comes before it."""
        row, bt = self.rows[index], self.bt
        pool = _PoolRun(_NONE)
        k, v, done, on_cpu = list[Ids](), list[Ids](), self.first[index], list[Ids]()
        pooled = _mostly_in_pool(row)
        table = row.pages.column("kv", "device")
        self._next[Source.NEW] = self.act_tokens + done
        for span in row.spans:
            if span.source is Source.KV_CPU:
                on_cpu.append(self._on_cpu(index, span, done > self.first[index]))
                continue
            placed = None
            if span.source is Source.KV_DEVICE:
                self._ids_of(index, span, span.source)
            else:
                placed = self._place(index, span)
            if pooled and self._held(row, span) and pool.takes(span, bt):
                pool.add(span, table, bt)
            else:
                rows = placed or self._copy(index, span)
                k.append(rows[0])
                v.append(rows[1])
            if span.source is Source.NEW:
                count = span.stop - span.start
                held_k, held_v = (np.concatenate(x) if x else _NONE for x in (k, v))
                self.queries.append(
                    _Queries(done, count, pool.blocks, pool.keys, held_k, held_v, bool(on_cpu))
                )
                done += count
        if on_cpu:
            taken = sum(context.queries for context in self.contexts)
            self.contexts.append(HostContext(taken, len(row.tokens), np.concatenate(on_cpu)))
            self.pieces["on_cpu"].append(np.arange(self.first[index], done))

    def _held(self, row: StepRow, span: TokenSpan) -> bool:
        """Whether its tokens are in device blocks; a single new one is, as it is written first."""
        if span.source is not Source.NEW or len(row.tokens) > 1:
            return span.source is Source.KV_DEVICE
        block = row.pages.of(Source.KV_DEVICE, np.array([span.start // self.bt]))
        return bool(block[0] >= 0)

    def _on_cpu(self, index: int, span: TokenSpan, late: bool) -> Ids:
        if late:
            raise NoSuchBlock(
                f"token {span.start} of sequence {index} is to be attended to on the CPU, but one "
                "before it is computed: compute those behind it"
            )
        if span.start % self.bt or span.stop % self.bt:
            raise NoSuchBlock(
                f"token {span.start} of sequence {index} of the step: the CPU attends to whole "
                "blocks"
            )
        return self._ids_of(index, span, Source.KV_CPU)

    def _pairs(self, source: Source, count: int) -> tuple[Ids, Ids]:
        """The next rows of K and of V of a source, side by side."""
        k = self.loaded_rows + 2 * (self._next[source] + np.arange(count))
        self._next[source] += count
        return k, k + 1

    def _place(self, index: int, span: TokenSpan) -> tuple[Ids, Ids]:
        """Rows of K and V in the buffer of tokens that are loaded, projected or computed, which are
        written to the device blocks that there are for them."""
        source, bt = span.source, self.bt
        positions = np.arange(span.start, span.stop)
        if source is Source.KV_HOST:
            slots = np.searchsorted(self.kv_host, self._ids_of(index, span, source))
            k = self._rows_of(slots, span, 2 * bt)
            v = k + bt
        else:
            k, v = self._pairs(source, len(positions))
        if source is Source.ACT_HOST:
            slots = np.searchsorted(self.act_host, self._ids_of(index, span, source))
            self.pieces["act_host"].append(self._rows_of(slots, span, bt))
            self.pieces["host_positions"].append(positions)
        elif source is Source.ACT_DEVICE:
            held = self._ids_of(index, span, source)
            self.pieces["act_device"].append(self._rows_of(held, span, bt))
            self.pieces["device_positions"].append(positions)
        pages = self.rows[index].pages
        block = pages.of(Source.KV_DEVICE, positions // bt)
        there = block >= 0
        target = block[there] * (2 * bt) + positions[there] % bt
        self.pieces["pool"] += [target, target + bt]
        self.pieces["from_buffer"] += [k[there], v[there]]
        if source is Source.NEW:
            act = pages.of(Source.ACT_DEVICE, positions // bt)
            kept = np.flatnonzero(act >= 0)
            self.pieces["act"].append(act[kept] * bt + positions[kept] % bt)
            new = (k[kept] - self.loaded_rows) // 2 - self.act_tokens
            self.pieces["captured"].append(new)
        return k, v

    def _copy(self, index: int, span: TokenSpan) -> tuple[Ids, Ids]:
        """Rows in the buffer for tokens of the pool that are copied there."""
        k, v = self._pairs(Source.KV_DEVICE, span.stop - span.start)
        held = self._rows_of(self._ids_of(index, span, Source.KV_DEVICE), span, 2 * self.bt)
        self.pieces["copied"] += [k, v]
        self.pieces["from_pool"] += [held, held + self.bt]
        self.copied_tokens += len(k)
        return k, v

    # -- rows that decode from device blocks --------------------------------------------------

    def _add_decodes(self) -> None:
        bt, rows = self.bt, [self.rows[index] for index in self.decodes]
        at = np.array([self.first[index] for index in self.decodes])
        positions = np.array([row.spans[1].start for row in rows])
        counts = (positions // bt + 1).tolist()
        last = np.empty(len(rows), np.int64)
        for line, (row, first, count) in enumerate(zip(rows, at.tolist(), counts, strict=True)):
            held = row.pages.column("kv", "device")[:count]
            if len(held) < count or held.min() < 0:
                raise NoSuchBlock(
                    f"a sequence of {row.length - 1} tokens is to be decoded from device kv, but "
                    "it has no such block for each of them and the next"
                )
            last[line] = held[-1]
            self.queries.append(_Queries(first, 1, held, row.length))
            act = row.pages.column("act", "device")
            if len(act) >= count and act[count - 1] >= 0:
                self.pieces["act"].append(act[count - 1 : count] * bt + (row.length - 1) % bt)
                self.pieces["captured"].append(np.array([first]))
        target = last * (2 * bt) + positions % bt
        k = self.loaded_rows + 2 * (self.act_tokens + at)
        self.pieces["pool"] += [target, target + bt]
        self.pieces["from_buffer"] += [k, k + 1]


def _mostly_in_pool(row: StepRow) -> bool:
    """Attention in two places costs more than to copy the few of the pool to the many beside."""
    held = sum(s.stop - s.start for s in row.spans if s.source is Source.KV_DEVICE)
    elsewhere = sum(s.stop - s.start for s in row.spans if s.source is Source.KV_CPU)
    return 2 * held >= row.length - elsewhere


def _runs(blocks: Ids) -> list[CopyRun]:
    """Ascending ids as (index of the first, the first, how many) per run of neighbours."""
    if not len(blocks):
        return []
    cut = np.flatnonzero(np.diff(blocks) != 1) + 1
    firsts = np.concatenate(([0], cut))
    ends = np.concatenate((cut, [len(blocks)]))
    return [(int(a), int(blocks[a]), int(b - a)) for a, b in zip(firsts, ends, strict=True)]


def _is_range(rows: Ids) -> bool:
    return bool((rows == np.arange(len(rows))).all())


# -- groups ---------------------------------------------------------------------------------------


def _groups(queries: list[_Queries], block_tokens: int) -> list[Group]:
    alike: dict[tuple[int, ...], list[_Queries]] = defaultdict(list)
    for one in queries:
        alike[one.alike].append(one)
    return [_group(alike[key], block_tokens) for key in sorted(alike)]


def _group(members: list[_Queries], block_tokens: int) -> Group:
    count = members[0].count
    tokens = (np.array([one.first for one in members])[:, None] + np.arange(count)).ravel()
    parts: list[PoolPart | BufferPart] = []
    if members[0].keys:
        parts.append(_pool_part(members, block_tokens))
    if len(members[0].k):
        parts.append(_buffer_part(members))
    return Group(len(members), count, ids(tokens), parts, members[0].on_cpu)


def _pool_part(members: list[_Queries], block_tokens: int) -> PoolPart:
    counts = np.array([len(one.blocks) for one in members])
    most = int(counts.max())
    table = np.empty((len(members), most), np.int64)
    for line, one, count in zip(table, members, counts, strict=True):
        line[:count] = one.blocks
        # Whoever has fewer blocks than others here has several, and the first of them is full.
        line[count:] = one.blocks[0]
    lengths = np.array([one.keys for one in members])
    keys = int(lengths.max())
    last = np.arange(len(members)) * most + counts - 1
    halves = 2 * ids(table.ravel())
    return PoolPart(block_tokens, halves, halves + 1, keys, ids(last), _unlike(lengths, keys))


def _buffer_part(members: list[_Queries]) -> BufferPart:
    lengths = np.array([len(one.k) for one in members])
    keys = int(lengths.max())
    padded = []
    for lists in ([one.k for one in members], [one.v for one in members]):
        # Padding names a row that is there: what nobody wrote may hold no number.
        full = np.full((len(members), keys), lists[0][0])
        for line, mine in zip(full, lists, strict=True):
            line[: len(mine)] = mine
        padded.append(ids(full.ravel()))
    return BufferPart(padded[0], padded[1], keys, _unlike(lengths, keys))


def _unlike(lengths: Ids, keys: int) -> Tensor | None:
    return ids(lengths) if (lengths != keys).any() else None


# -- to the device --------------------------------------------------------------------------------


def _send(step: DeviceStep, device: torch.device) -> None:
    """Move all of a step's tensors in a single copy; then say which keys are padding."""
    if device.type == "cuda":
        places = list(_tensors(step))
        tensors = [getattr(one, name) for one, name in places]
        flat = torch.cat(tensors).pin_memory().to(device, non_blocking=True)
        for (one, name), tensor in zip(places, flat.split([len(t) for t in tensors]), strict=True):
            setattr(one, name, tensor)
    for part in (part for group in step.groups for part in group.parts):
        if part.lengths is not None:
            ends = part.lengths[:, None]
            part.visible = torch.arange(part.keys, device=device) < ends
            if isinstance(part, PoolPart):
                size = part.block_tokens
                part.inside = torch.arange(size, device=device) <= (ends - 1) % size


def _tensors(one: Any) -> Iterator[tuple[Any, str]]:
    """Everything in a step that holds a tensor, with the name of that."""
    for each in fields(one):
        value = getattr(one, each.name)
        if isinstance(value, Tensor):
            yield one, each.name
        for inner in value if isinstance(value, list) else [value]:
            if is_dataclass(inner):
                yield from _tensors(inner)
