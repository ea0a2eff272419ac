"""Makes a `Step` of the works of an iteration: all of its index arrays, once, for all layers.

Sequences that decode from device blocks cost what their block tables are long. For the others
(prompts, and whatever loads, projects or is attended to on the CPU) arrays have an element per
token; Python loops run over sequences and over runs of consecutive blocks, never over tokens or
blocks. The arrays go to the device in a single copy, so that no layer has to wait for the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.blocks import Ids
from engine.grouping import Queries, decode_groups, is_range, query_groups
from engine.step import (
    COLUMNS,
    LINE_OF,
    Decode,
    Group,
    HostContext,
    NoSuchBlock,
    OnCpu,
    Out,
    PagedPart,
    Run,
    Scatter,
    Source,
    Step,
    Work,
)


def build_step(works: Sequence[Work | Decode], block_tokens: int, device: torch.device) -> Step:
    """The step that computes `works` together; its logits are in their order.

    Raises:
        NoSuchBlock: a token's source is a block that its sequence does not have; or no token of a
            work is to be computed.
    """
    decodes = [work for work in works if isinstance(work, Decode)]
    others = [work for work in works if isinstance(work, Work)]
    step, wanted = Step(_ids([]), _ids([]), _ids([]), []), list[Ids]()
    if others:
        builder = _Builder(others, block_tokens, len(decodes))
        step, wanted = builder.step(), builder.logit_rows()
    if decodes:
        _add_decodes(step, decodes, block_tokens)
    rows, first = iter(wanted), iter(range(len(decodes)))
    step.logit_rows = _ids(np.concatenate(
        [[next(first)] if isinstance(work, Decode) else next(rows) for work in works]
    ))  # fmt: skip
    if len(step.groups) == 1:
        alone = step.groups[0].rows
        step.groups[0].in_order = len(alone) == step.new_tokens and is_range(alone.numpy())
    _send(step, device)
    return step


def _add_decodes(step: Step, decodes: list[Decode], block_tokens: int) -> None:
    """Sequences that decode from device blocks, in front of what is computed besides."""
    positions = np.array([one.position for one in decodes])
    needed = positions // block_tokens + 1
    for one, count in zip(decodes, needed, strict=True):
        if len(one.blocks) < count or one.blocks[:count].min() < 0:
            raise NoSuchBlock(
                f"a sequence of {one.position} tokens is to be decoded from device kv, but it has "
                "no such block for each of them and the next"
            )
    last = np.array([one.blocks[n - 1] for one, n in zip(decodes, needed, strict=True)])
    rows = last * (2 * block_tokens) + positions % block_tokens
    made = step.loaded_rows + 2 * (step.act_tokens + np.arange(len(decodes)))
    acts = np.array([one.act_block for one in decodes])
    captured = np.flatnonzero(acts >= 0)
    act_rows = acts[captured] * block_tokens + positions[captured] % block_tokens
    step.tokens = torch.cat((_ids([one.token for one in decodes]), step.tokens))
    step.positions = torch.cat((_ids(positions), step.positions))
    step.to_pool = _joined(
        _scatter(np.concatenate((rows, rows + block_tokens)), np.concatenate((made, made + 1))),
        step.to_pool,
    )
    step.to_act = _joined(_scatter(act_rows, captured), step.to_act)
    step.groups = [*decode_groups(decodes, needed, block_tokens), *step.groups]


class _Builder:
    """A step in the making. Arrays have an element for every token of every work.

    before: tokens that are computed in front of those of the works.
    """

    def __init__(self, works: list[Work], block_tokens: int, before: int) -> None:
        self.works, self.bt, self.before = works, block_tokens, before
        counts = np.array([len(w.sources) for w in works])
        self.begin = np.concatenate(([0], np.cumsum(counts)))
        self.position = np.concatenate([np.arange(n) for n in counts])
        self.source = np.concatenate([w.sources for w in works])
        self.owner = np.repeat(np.arange(len(works)), counts)
        self.offset = self.position % block_tokens
        held = np.bincount(self.owner[self.source == Source.KV_DEVICE], minlength=len(works))
        self.on_cpu = self.source == Source.KV_CPU
        elsewhere = np.bincount(self.owner[self.on_cpu], minlength=len(works))
        # Attention in two places costs more than to copy the few of the pool to the many beside.
        self.pooled = 2 * held >= counts - elsewhere
        self.copied = np.flatnonzero((self.source == Source.KV_DEVICE) & ~self.pooled[self.owner])
        self.block = self._blocks(counts)
        self.new = np.flatnonzero(self.source == Source.NEW)
        self.new_index = np.full(len(self.source), -1)
        self.new_index[self.new] = before + np.arange(len(self.new))
        self._check()

    def step(self) -> Step:
        """All of it, but for the rows of the logits."""
        host_kv = self.source == Source.KV_HOST
        host_act = np.flatnonzero(self.source == Source.ACT_HOST)
        device_act = np.flatnonzero(self.source == Source.ACT_DEVICE)
        acts = np.concatenate((host_act, device_act))
        kv_slot, kv_runs = _slots(self.block[Source.KV_HOST][host_kv])
        act_slot, act_runs = _slots(self.block[Source.ACT_HOST][host_act])
        kv_blocks, act_blocks = (sum(n for _, _, n in runs) for runs in (kv_runs, act_runs))
        loaded_rows = kv_blocks * 2 * self.bt
        k, v = self._buffer_rows(host_kv, kv_slot, acts, loaded_rows)
        act_rows = act_slot * self.bt + self.offset[host_act]
        in_order = len(act_rows) == act_blocks * self.bt and is_range(act_rows)
        held = self.block[Source.ACT_DEVICE][device_act] * self.bt + self.offset[device_act]
        tokens = np.concatenate([w.tokens[: w.length] for w in self.works])
        from_pool, to_pool, to_act = self._writes(k, v)
        store_kv, store_act = self._stores(k, v)
        spill_kv, spill_act = self._spills()
        return Step(
            tokens=_ids(tokens[self.new]),
            positions=_ids(self.position[self.new]),
            logit_rows=_ids([]),
            groups=self._groups(k, v),
            to_pool=to_pool,
            to_act=to_act,
            act_positions=_ids(self.position[acts]),
            act_rows=None if in_order else _ids(act_rows),
            act_device=_ids(held) if len(held) else None,
            kv_runs=kv_runs,
            act_runs=act_runs,
            loaded_rows=loaded_rows,
            loaded_act_blocks=act_blocks,
            act_tokens=len(acts),
            copied_tokens=len(self.copied),
            from_pool=from_pool,
            store_kv=store_kv,
            store_act=store_act,
            spill_kv=spill_kv,
            spill_act=spill_act,
            on_cpu=self._on_cpu(),
        )

    def logit_rows(self) -> list[Ids]:
        """Which computed tokens' logits each work wants."""
        starts = np.searchsorted(self.owner[self.new], np.arange(len(self.works) + 1)) + self.before
        pairs = zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        return [
            np.arange({"all": first, "last": end - 1, "none": end}[work.wanted], end)
            for work, (first, end) in zip(self.works, pairs, strict=True)
        ]

    # -- tokens and blocks --------------------------------------------------------------------

    def _blocks(self, counts: Ids) -> dict[Source, Ids]:
        """Every token's block id in each place that it can come from, -1 where there is none."""
        needed = -(-counts // self.bt)
        lines = [
            work.pages.ids[:, :n]
            if len(work.pages) >= n
            else np.pad(work.pages.ids, ((0, 0), (0, n - len(work.pages))), constant_values=-1)
            for work, n in zip(self.works, needed, strict=True)
        ]
        first = np.concatenate(([0], np.cumsum(needed)[:-1]))
        ids = np.concatenate(lines, axis=1)[:, self.position // self.bt + first[self.owner]]
        return {source: ids[line] for source, line in LINE_OF.items()}

    def _check(self) -> None:
        for source, block in self.block.items():
            lost = np.flatnonzero((self.source == source) & (block < 0))
            if len(lost):
                name = " ".join(reversed(COLUMNS[LINE_OF[source]]))
                raise NoSuchBlock(
                    f"token {self.position[lost[0]]} of sequence {self.owner[lost[0]]} of the step "
                    f"is to come from {name}, but its sequence has no such block there"
                )
        computed = np.bincount(self.owner[self.new], minlength=len(self.works))
        if not computed.all():
            idle = int(np.flatnonzero(computed == 0)[0])
            raise NoSuchBlock(f"sequence {idle} of the step has no token to compute")
        first = np.full(len(self.works), len(self.source))
        np.minimum.at(first, self.owner[self.new], self.new)
        early = np.flatnonzero(self.on_cpu & (np.arange(len(self.source)) > first[self.owner]))
        if len(early):
            raise NoSuchBlock(
                f"token {self.position[early[0]]} of sequence {self.owner[early[0]]} is to be "
                "attended to on the CPU, but one before it is computed: compute those behind it"
            )

    def _buffer_rows(
        self, host_kv: NDArray[np.bool_], slot: Ids, acts: Ids, loaded_rows: int
    ) -> tuple[Ids, Ids]:
        """Row of K and of V in the buffer; -1 for tokens that only the pool has."""
        k, v = np.full(len(self.source), -1), np.full(len(self.source), -1)
        k[host_kv] = slot * (2 * self.bt) + self.offset[host_kv]
        v[host_kv] = k[host_kv] + self.bt
        # One GEMM writes a token's K and V side by side.
        k[acts] = loaded_rows + 2 * np.arange(len(acts))
        v[acts] = k[acts] + 1
        k[self.new] = loaded_rows + 2 * (len(acts) + self.new_index[self.new])
        v[self.new] = k[self.new] + 1
        behind = loaded_rows + 2 * (len(acts) + self.before + len(self.new))
        k[self.copied] = behind + 2 * np.arange(len(self.copied))
        v[self.copied] = k[self.copied] + 1
        return k, v

    # -- attention ----------------------------------------------------------------------------

    def _groups(self, k: Ids, v: Ids) -> list[Group]:
        """The queries of this step, with where their keys and values are found."""
        in_pool = self._in_pool()
        pool_k = self.block[Source.KV_DEVICE] * (2 * self.bt) + self.offset
        queries = []
        for first, end in self._computed_runs():
            start = self.begin[self.owner[first]]
            context = np.arange(start, end)
            on_cpu = self.on_cpu[start:end]
            pool = context[in_pool[start:end]]
            rest = context[~in_pool[start:end] & ~on_cpu]
            queries.append(
                Queries(
                    int(self.new_index[first]),
                    end - first,
                    (pool_k[pool], pool_k[pool] + self.bt),
                    (k[rest], v[rest]),
                    bool(on_cpu.any()),
                )
            )
        return query_groups(queries)

    def _on_cpu(self) -> OnCpu | None:
        """What the CPU attends to, and for which of the new tokens."""
        rows, contexts, taken = list[Ids](), list[HostContext](), 0
        for index in np.unique(self.owner[self.on_cpu]):
            mine = np.flatnonzero(self.on_cpu & (self.owner == index))
            queries = self.new_index[self.new[self.owner[self.new] == index]]
            context = self._host_context(mine)
            context.first, context.queries = taken, len(queries)
            contexts.append(context)
            taken += len(queries)
            rows.append(queries)
        return OnCpu(_ids(np.concatenate(rows)), taken, contexts) if rows else None

    def _host_context(self, mine: Ids) -> HostContext:
        """One sequence's tokens that the CPU attends to: whole blocks, and the front of one."""
        blocks, offsets = self.block[Source.KV_CPU][mine], self.offset[mine]
        unique, counts = np.unique(blocks, return_counts=True)
        short = np.flatnonzero(counts < self.bt)
        if not len(short):
            return HostContext(0, 0, unique)
        last = int(unique[short[0]])
        held = np.flatnonzero(blocks == last)
        if len(short) > 1 or int(offsets[held].max()) >= len(held):
            token = mine[held[0]]
            raise NoSuchBlock(
                f"token {self.position[token]} of sequence {self.owner[token]} of the step: "
                "the CPU attends to whole blocks, and to the front of one"
            )
        return HostContext(0, 0, unique, last, len(held))

    def _computed_runs(self) -> list[tuple[int, int]]:
        """[first, end) of neighbouring tokens that are computed, within one sequence."""
        new, owner = self.new, self.owner[self.new]
        cut = np.flatnonzero((np.diff(new) != 1) | (np.diff(owner) != 0)) + 1
        firsts, ends = np.concatenate(([0], cut)), np.concatenate((cut, [len(new)]))
        return [(int(new[a]), int(new[b - 1]) + 1) for a, b in zip(firsts, ends, strict=True)]

    def _in_pool(self) -> NDArray[np.bool_]:
        """Which tokens attention reads from the device pool.

        A sequence that decodes from the pool finds its new token there too: it is written first.
        """
        held = (self.source == Source.KV_DEVICE) & self.pooled[self.owner]
        single = np.bincount(self.owner[self.new], minlength=len(self.works)) == 1
        own = (self.source == Source.NEW) & (self.pooled & single)[self.owner]
        mask: NDArray[np.bool_] = held | (own & (self.block[Source.KV_DEVICE] >= 0))
        return mask

    # -- what is written ----------------------------------------------------------------------

    def _writes(self, k: Ids, v: Ids) -> list[Scatter | None]:
        """Pool to buffer, buffer to pool, and activations."""
        few = self.copied
        copied = self.block[Source.KV_DEVICE][few] * (2 * self.bt) + self.offset[few]
        land = np.flatnonzero(
            (self.block[Source.KV_DEVICE] >= 0) & (self.source != Source.KV_DEVICE) & ~self.on_cpu
        )
        row = self.block[Source.KV_DEVICE][land] * (2 * self.bt) + self.offset[land]
        keep = self.new[self.block[Source.ACT_DEVICE][self.new] >= 0]
        act = self.block[Source.ACT_DEVICE][keep] * self.bt + self.offset[keep]
        return [
            _scatter(np.concatenate((k[few], v[few])), np.concatenate((copied, copied + self.bt))),
            _scatter(np.concatenate((row, row + self.bt)), np.concatenate((k[land], v[land]))),
            _scatter(act, self.new_index[keep]),
        ]

    def _stores(self, k: Ids, v: Ids) -> list[Out | None]:
        """Rows of new tokens, by host row, so that neighbours are copied at once."""
        since = np.array([work.store_from for work in self.works])
        new = self.new[self.position[self.new] >= since[self.owner[self.new]]]
        kv = new[self.block[Source.KV_HOST][new] >= 0]
        row = self.block[Source.KV_HOST][kv] * (2 * self.bt) + self.offset[kv]
        act = new[self.block[Source.ACT_HOST][new] >= 0]
        act_row = self.block[Source.ACT_HOST][act] * self.bt + self.offset[act]
        return [
            _out(np.concatenate((row, row + self.bt)), np.concatenate((k[kv], v[kv]))),
            _out(act_row, self.new_index[act]),
        ]

    def _spills(self) -> list[Out | None]:
        """Whole blocks from device to host, for those types that have both."""
        outs = []
        for type in ("kv", "act"):
            pairs = [
                (work.pages.column(type, "host")[i], work.pages.column(type, "device")[i])
                for work in self.works
                for i in work.spill
            ]
            table = np.array([p for p in pairs if min(p) >= 0], np.int64).reshape(-1, 2)
            outs.append(_out(table[:, 0], table[:, 1]))
        return outs


def _slots(blocks: Ids) -> tuple[Ids, list[Run]]:
    """Where each token's host block lands in the buffer, in blocks; and the copies that do it."""
    if not len(blocks):
        return blocks, []
    wanted = np.zeros(int(blocks.max()) + 1, bool)
    wanted[blocks] = True
    slot = np.cumsum(wanted) - 1
    return slot[blocks], _runs(np.flatnonzero(wanted))


def _runs(targets: Ids) -> list[Run]:
    """Ascending numbers as (index of the first, the first, how many) per run of neighbours."""
    if not len(targets):
        return []
    cut = np.flatnonzero(np.diff(targets) != 1) + 1
    firsts = np.concatenate(([0], cut))
    ends = np.concatenate((cut, [len(targets)]))
    return [(int(a), int(targets[a]), int(b - a)) for a, b in zip(firsts, ends, strict=True)]


# -- tensors --------------------------------------------------------------------------------------


def _ids(values: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int64))


def _scatter(target: Ids, source: Ids) -> Scatter | None:
    return Scatter(_ids(target), _ids(source)) if len(target) else None


def _joined(one: Scatter | None, more: Scatter | None) -> Scatter | None:
    if one is None or more is None:
        return one or more
    return Scatter(torch.cat((one.target, more.target)), torch.cat((one.source, more.source)))


def _out(target: Ids, source: Ids) -> Out | None:
    """Copies in the order of their targets."""
    order = np.argsort(target)
    return Out(_ids(source[order]), _runs(target[order])) if len(target) else None


def _send(step: Step, device: torch.device) -> None:
    """Move all of a step's tensors in a single copy; then say which keys are padding."""
    places = [(one, name) for one, name in _tensors(step) if getattr(one, name) is not None]
    if device.type == "cuda":
        tensors = [getattr(one, name) for one, name in places]
        flat = torch.cat(tensors).pin_memory().to(device, non_blocking=True)
        for (one, name), tensor in zip(places, flat.split([len(t) for t in tensors]), strict=True):
            setattr(one, name, tensor)
    for part in (part for group in step.groups for part in group.parts):
        if part.lengths is not None:
            ends = part.lengths[:, None]
            part.visible = torch.arange(part.keys, device=device) < ends
            if isinstance(part, PagedPart):
                size = part.block_tokens
                part.inside = torch.arange(size, device=device) <= (ends - 1) % size


def _tensors(step: Step) -> Iterator[tuple[Any, str]]:
    """Everything in a step that holds an index tensor, or may, and the names of those."""
    for name in ("tokens", "positions", "logit_rows", "act_positions", "act_rows", "act_device"):
        yield step, name
    outs = (step.store_kv, step.store_act, step.spill_kv, step.spill_act)
    scatters = [one for one in (step.from_pool, step.to_pool, step.to_act) if one is not None]
    for one in (*scatters, *(out for out in outs if out is not None)):
        yield one, "source"
    for scatter in scatters:
        yield scatter, "target"
    if step.on_cpu is not None:
        yield step.on_cpu, "rows"
    for group in step.groups:
        yield group, "rows"
        for part in group.parts:
            for name in ("k_rows", "v_rows", "lengths"):
                yield part, name
            if isinstance(part, PagedPart):
                yield part, "last"
