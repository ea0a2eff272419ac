"""The input batch of an iteration: builds the index tensors of a `DeviceStep` from its rows.

They are built once for all layers. A context in device blocks costs as much as its block table is
long; only tokens that are computed, loaded or projected have an element each. Rows that decode from
device blocks are handled together; Python loops run over the other rows, their spans, and groups.
The tensors go to the device in a single copy, so that no layer waits for the host.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kappa_engine.block_pool import Ids, runs
from kappa_engine.step import (
    COLUMN_OF,
    BufferPart,
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
    """Build the step that computes `rows` together; tokens and logits are in their order.

    Raises:
        NoSuchBlock: a token's source is a block that its sequence does not have; or no token of a
            row is to be computed.
    """
    step = _Builder(rows, block_tokens).step()
    # All of its tensors in a single copy; then say which keys are padding.
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
    return step


def _tensors(one: Any) -> Iterator[tuple[Any, str]]:
    """Every dataclass of a step that holds a tensor, with the name of the tensor's field."""
    for each in fields(one):
        value = getattr(one, each.name)
        if isinstance(value, Tensor):
            yield one, each.name
        for inner in value if isinstance(value, list) else [value]:
            if is_dataclass(inner):
                yield from _tensors(inner)


@dataclass(slots=True)
class _Queries:
    """A run of one sequence's queries, and the keys up to its last query, in order of position."""

    # New tokens of the step: the first one's index, and how many.
    first: int
    count: int
    # Device blocks, and how many keys they hold.
    blocks: Ids
    keys: int
    # The other keys, as rows of K and of V in the buffer.
    k: Ids
    v: Ids
    # Whether the CPU attends to part of the context.
    on_cpu: bool

    @property
    def batch_key(self) -> tuple[int, ...]:
        """Runs of queries with equal keys are computed in one attention call.

        A single query (decoding) goes with others of a similar context, padded by less than half; a
        longer run with those of the same shape, so that causality needs no mask.
        """
        if self.count == 1:
            return 1, len(self.blocks).bit_length(), len(self.k).bit_length(), self.on_cpu
        return self.count, self.keys, len(self.k), self.on_cpu


class _Builder:
    """Collects the pieces of a step's index arrays, row by row."""

    def __init__(self, rows: Sequence[StepRow], block_tokens: int) -> None:
        for index, row in enumerate(rows):
            if not len(row.tokens):
                raise NoSuchBlock(f"sequence {index} of the step has no token to compute")
        self.rows, self.bt = rows, block_tokens
        # The step's index of each row's first new token.
        self.first = np.cumsum([0, *(len(row.tokens) for row in rows)]).tolist()
        self.decodes: list[int] = []
        self.others: list[int] = []
        for index, row in enumerate(rows):
            (self.decodes if row.decodes else self.others).append(index)
        spans = [(index, span) for index in self.others for span in rows[index].spans]
        count: Counter[Source] = Counter()
        for _, span in spans:
            count[span.source] += span.stop - span.start
        # Ids of all blocks that are loaded, ascending: neighbours are copied at once.
        self.loaded: dict[Source, Ids] = {}
        for source in (Source.KV_HOST, Source.ACT_HOST):
            wanted = [self._ids_of(i, span, source) for i, span in spans if span.source is source]
            self.loaded[source] = np.unique(np.concatenate(wanted)) if wanted else _NONE
        self.loaded_rows = len(self.loaded[Source.KV_HOST]) * 2 * block_tokens
        self.act_tokens = count[Source.ACT_HOST] + count[Source.ACT_DEVICE]
        # Where each source's pairs of K and V begin: in tokens, behind the loaded rows.
        self._next = {
            Source.ACT_HOST: 0,
            Source.ACT_DEVICE: count[Source.ACT_HOST],
            Source.NEW: self.act_tokens,
            Source.KV_DEVICE: self.act_tokens + self.first[-1],
        }
        self.queries: list[_Queries] = []
        self.contexts: list[HostContext] = []
        # Pieces of index arrays, by the array's name.
        self.pieces: dict[str, list[Ids]] = defaultdict(list)

    def step(self) -> DeviceStep:
        for index in self.others:
            self._add(index)
        if self.decodes:
            self._add_decodes()
        batches: dict[tuple[int, ...], list[_Queries]] = defaultdict(list)
        for one in self.queries:
            batches[one.batch_key].append(one)
        groups = [_group(batches[key], self.bt) for key in sorted(batches)]
        if len(groups) == 1:
            alone = groups[0].rows.numpy()
            groups[0].in_order = len(alone) == self.first[-1] and _is_range(alone)
        tokens, positions, logit_rows = list[int](), list[int](), list[int]()
        for row, first, end in zip(self.rows, self.first, self.first[1:], strict=False):
            tokens.extend(row.tokens)
            for source, start, stop in row.spans:
                if source is Source.NEW:
                    positions += range(start, stop)
            logit_rows += range(first if row.wanted == "all" else end - 1, end)
        kv_host, act_host = self.loaded[Source.KV_HOST], self.loaded[Source.ACT_HOST]
        act_rows = self._joined("act_host")
        in_order = len(act_rows) == len(act_host) * self.bt and _is_range(act_rows)
        return DeviceStep(
            tokens=ids(tokens),
            positions=ids(positions),
            logit_rows=ids(logit_rows),
            groups=groups,
            act_positions=ids(
                np.concatenate([self._joined("act_positions"), self._joined("here_positions")])
            ),
            act_rows=None if in_order else ids(act_rows),
            act_here=ids(self._joined("act_here")) if self.pieces["act_here"] else None,
            to_pool=self._scatter("pool", "from_buffer"),
            to_act=self._scatter("act", "captured"),
            from_pool=self._scatter("copied", "from_pool"),
            kv_runs=runs(range(len(kv_host)), kv_host.tolist()),
            act_runs=runs(range(len(act_host)), act_host.tolist()),
            loaded_rows=self.loaded_rows,
            loaded_act_blocks=len(act_host),
            act_tokens=self.act_tokens,
            copied_tokens=len(self._joined("copied")) // 2,
            on_cpu=OnCpu(ids(self._joined("on_cpu")), self.contexts) if self.contexts else None,
        )

    def _joined(self, name: str) -> Ids:
        return np.concatenate(self.pieces[name]) if self.pieces[name] else _NONE

    def _scatter(self, target: str, source: str) -> Scatter | None:
        rows = self._joined(target)
        return Scatter(ids(rows), ids(self._joined(source))) if len(rows) else None

    # -- blocks -------------------------------------------------------------------------------

    def _ids_of(self, index: int, span: TokenSpan, source: Source) -> Ids:
        """Ids of a span's blocks in the place of a source."""
        blocks = np.arange(span.start // self.bt, -(-span.stop // self.bt))
        found = self.rows[index].pages.of(source, blocks)
        if len(found) and found.min() < 0:
            first = int(blocks[int(found.argmin())])
            name = " ".join(reversed(COLUMN_OF[source]))
            raise NoSuchBlock(
                f"token {max(first * self.bt, span.start)} of sequence {index} of the step is to "
                f"come from {name}, but its sequence has no such block there"
            )
        return found

    def _rows_of(self, blocks: Ids, span: TokenSpan, block_rows: int) -> Ids:
        """Rows of a span's tokens, from the ids of its blocks."""
        at = np.arange(span.start, span.stop)
        return blocks[at // self.bt - span.start // self.bt] * block_rows + at % self.bt

    # -- rows in general ----------------------------------------------------------------------

    def _add(self, index: int) -> None:
        """Add one row's queries, span by span, with the keys that come before each."""
        row, bt, done = self.rows[index], self.bt, self.first[index]
        table = row.pages.column("kv", "device")
        # Attention in two places costs more than to copy a few keys of the pool to the buffer.
        tokens: Counter[Source] = Counter()
        for source, start, stop in row.spans:
            tokens[source] += stop - start
        pooled = 2 * tokens[Source.KV_DEVICE] >= row.length - tokens[Source.KV_CPU]
        # Blocks and keys that attention reads from the device pool; they grow with the spans.
        blocks, keys, end = _NONE, 0, 0
        k, v, on_cpu = list[Ids](), list[Ids](), list[Ids]()
        self._next[Source.NEW] = self.act_tokens + done
        for span in row.spans:
            source, start, stop = span
            if source is Source.KV_CPU:
                on_cpu.append(self._on_cpu(index, span, done > self.first[index]))
                continue
            placed, held = None, source is Source.KV_DEVICE
            if held:
                self._ids_of(index, span, source)
            else:
                placed = self._place(index, span)
            if source is Source.NEW and len(row.tokens) == 1:
                # A single new token is in its block, too, as it is written first.
                held = bool(row.pages.of(Source.KV_DEVICE, np.array([start // bt]))[0] >= 0)
            # Whole blocks must still say where the tokens are, with these added.
            follows = start == end or (start % bt == 0 and keys % bt == 0)
            if pooled and held and follows:
                blocks = np.concatenate((blocks, table[-(-start // bt) : -(-stop // bt)]))
                keys, end = keys + stop - start, stop
            else:
                rows = placed or self._copy(index, span)
                k.append(rows[0])
                v.append(rows[1])
            if source is Source.NEW:
                in_k, in_v = (np.concatenate(x) if x else _NONE for x in (k, v))
                mine = _Queries(done, stop - start, blocks, keys, in_k, in_v, bool(on_cpu))
                self.queries.append(mine)
                done += mine.count
        if on_cpu:
            taken = sum(context.queries for context in self.contexts)
            self.contexts.append(HostContext(taken, len(row.tokens), np.concatenate(on_cpu)))
            self.pieces["on_cpu"].append(np.arange(self.first[index], done))

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
        """Take the next rows of K and of V of a source in the buffer."""
        k = self.loaded_rows + 2 * (self._next[source] + np.arange(count))
        self._next[source] += count
        return k, k + 1

    def _place(self, index: int, span: TokenSpan) -> tuple[Ids, Ids]:
        """Rows of K and V in the buffer of tokens that are loaded, projected or computed; they are
        also written to the device blocks that their sequence has for them."""
        source, bt, pages = span.source, self.bt, self.rows[index].pages
        positions = np.arange(span.start, span.stop)
        if source in self.loaded:
            slots = np.searchsorted(self.loaded[source], self._ids_of(index, span, source))
        if source is Source.KV_HOST:
            k = self._rows_of(slots, span, 2 * bt)
            v = k + bt
        else:
            k, v = self._pairs(source, len(positions))
        if source is Source.ACT_HOST:
            self.pieces["act_host"].append(self._rows_of(slots, span, bt))
            self.pieces["act_positions"].append(positions)
        if source is Source.ACT_DEVICE:
            held = self._ids_of(index, span, source)
            self.pieces["act_here"].append(self._rows_of(held, span, bt))
            self.pieces["here_positions"].append(positions)
        block = pages.of(Source.KV_DEVICE, positions // bt)
        there = block >= 0
        target = block[there] * (2 * bt) + positions[there] % bt
        self.pieces["pool"] += [target, target + bt]
        self.pieces["from_buffer"] += [k[there], v[there]]
        if source is Source.NEW:
            act = pages.ids("act", "device", positions // bt)
            kept = np.flatnonzero(act >= 0)
            self.pieces["act"].append(act[kept] * bt + positions[kept] % bt)
            new = (k[kept] - self.loaded_rows) // 2 - self.act_tokens
            self.pieces["captured"].append(new)
        return k, v

    def _copy(self, index: int, span: TokenSpan) -> tuple[Ids, Ids]:
        """Copy tokens of the device pool to the buffer; their rows of K and V there."""
        k, v = self._pairs(Source.KV_DEVICE, span.stop - span.start)
        held = self._rows_of(self._ids_of(index, span, Source.KV_DEVICE), span, 2 * self.bt)
        self.pieces["copied"] += [k, v]
        self.pieces["from_pool"] += [held, held + self.bt]
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
            self.queries.append(_Queries(first, 1, held, row.length, _NONE, _NONE, False))
            act = row.pages.column("act", "device")
            if len(act) >= count and act[count - 1] >= 0:
                self.pieces["act"].append(act[count - 1 : count] * bt + (row.length - 1) % bt)
                self.pieces["captured"].append(np.array([first]))
        target = last * (2 * bt) + positions % bt
        k = self.loaded_rows + 2 * (self.act_tokens + at)
        self.pieces["pool"] += [target, target + bt]
        self.pieces["from_buffer"] += [k, k + 1]


def _is_range(rows: Ids) -> bool:
    return bool((rows == np.arange(len(rows))).all())


def _group(members: list[_Queries], block_tokens: int) -> Group:
    batch, count = len(members), members[0].count
    tokens = (np.array([one.first for one in members])[:, None] + np.arange(count)).ravel()
    parts: list[PoolPart | BufferPart] = []
    if members[0].keys:
        # A context that is padded here has several blocks, the first of which is full.
        table = ids(_padded([one.blocks for one in members], [one.blocks[0] for one in members]))
        counts = np.array([len(one.blocks) for one in members])
        last = np.arange(batch) * (len(table) // batch) + counts - 1
        keys, lengths = _lengths([one.keys for one in members])
        parts.append(PoolPart(block_tokens, 2 * table, 2 * table + 1, keys, ids(last), lengths))
    if len(members[0].k):
        # Padding repeats a row of the context: rows that were never written may hold NaN.
        k, v = ([one.k for one in members], [one.v for one in members])
        keys, lengths = _lengths([len(one.k) for one in members])
        k_rows, v_rows = (ids(_padded(rows, [rows[0][0]] * batch)) for rows in (k, v))
        parts.append(BufferPart(k_rows, v_rows, keys, lengths))
    return Group(batch, count, ids(tokens), parts, members[0].on_cpu)


def _padded(rows: list[Ids], padding: list[int]) -> Ids:
    """The rows in one array, each filled up to the longest with its own padding."""
    full = np.empty((len(rows), max(map(len, rows))), np.int64)
    for line, mine, fill in zip(full, rows, padding, strict=True):
        line[: len(mine)] = mine
        line[len(mine) :] = fill
    return full.ravel()


def _lengths(keys: list[int]) -> tuple[int, Tensor | None]:
    """The greatest length, and all lengths if they differ."""
    most = max(keys)
    return most, ids(keys) if min(keys) != most else None
