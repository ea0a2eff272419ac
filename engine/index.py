"""Makes a `Step` of works: all index arrays of an iteration, once, for all of its layers.

Numpy over the tokens of all sequences at once; Python loops run over sequences and over runs of
consecutive blocks, never over tokens or blocks. The arrays go to the device in a single copy, so
that nothing in the step's layers has to wait for the host.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.grouping import Later, LaterGroup, Queries, grouped, is_range
from engine.host_context import HostContext, NotWhole, OnCpu, host_context
from engine.step import (
    COLUMNS,
    LINE_OF,
    Ids,
    NoSuchBlock,
    Out,
    Run,
    Scatter,
    Source,
    Step,
    Work,
)


def build_step(works: list[Work], block_tokens: int, device: torch.device) -> Step:
    """The step that computes `works` together.

    Raises:
        NoSuchBlock: a token's source is a block that its sequence does not have; or no token of a
            work is to be computed.
    """
    return _Build(works, block_tokens, device).step()


class _Build:
    """One step in the making. Arrays have an element for every token of every work."""

    def __init__(self, works: list[Work], block_tokens: int, device: torch.device) -> None:
        self.works, self.bt, self.device = works, block_tokens, device
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
        self.new_index[self.new] = np.arange(len(self.new))
        self._check()
        self._upload: list[Ids] = []

    def step(self) -> Step:
        """All of it: first what is sent, in one go, then what is made of it."""
        host_kv = self.source == Source.KV_HOST
        host_act = np.flatnonzero(self.source == Source.ACT_HOST)
        device_act = np.flatnonzero(self.source == Source.ACT_DEVICE)
        acts = np.concatenate((host_act, device_act))
        kv_slot, kv_runs = _slots(self.block[Source.KV_HOST][host_kv])
        act_slot, act_runs = _slots(self.block[Source.ACT_HOST][host_act])
        kv_blocks, act_blocks = (sum(n for _, _, n in runs) for runs in (kv_runs, act_runs))
        loaded_rows = kv_blocks * 2 * self.bt
        k, v = self._buffer_rows(host_kv, kv_slot, acts, loaded_rows)
        in_order = len(host_act) == act_blocks * self.bt and is_range(
            act_slot * self.bt + self.offset[host_act]
        )
        sending = self._send_tokens(acts, host_act, act_slot, device_act)
        groups = self._groups(k, v)
        writes, outs = self._writes(k, v), self._stores(k, v) + self._spills()
        on_cpu = self._on_cpu()
        sent = self._sent()
        tokens, positions, act_positions, logit_rows, act_rows, act_device = (
            fetch(sent) for fetch in sending
        )
        from_pool, to_pool, to_act = (
            Scatter(t(sent), s(sent)) if n else None for n, t, s in writes
        )
        store_kv, store_act, spill_kv, spill_act = (
            Out(rows(sent), runs) if runs else None for rows, runs in outs
        )
        return Step(
            tokens,
            positions,
            act_positions,
            logit_rows,
            [group(sent) for group in groups],
            kv_runs,
            act_runs,
            None if in_order else act_rows,
            act_device if len(device_act) else None,
            loaded_rows,
            act_blocks,
            len(acts),
            len(self.new),
            len(self.copied),
            from_pool,
            to_pool,
            to_act,
            store_kv,
            store_act,
            spill_kv,
            spill_act,
            None if on_cpu is None else OnCpu(on_cpu[0](sent), *on_cpu[1:]),
        )

    def _send_tokens(
        self, acts: Ids, host_act: Ids, act_slot: Ids, device_act: Ids
    ) -> tuple[Later, ...]:
        tokens = np.concatenate([w.tokens[: len(w.sources)] for w in self.works])
        on_device = self.block[Source.ACT_DEVICE][device_act]
        return (
            self._send(tokens[self.new]),
            self._send(self.position[self.new]),
            self._send(self.position[acts]),
            self._send(self._logit_rows()),
            self._send(act_slot * self.bt + self.offset[host_act]),
            self._send(on_device * self.bt + self.offset[device_act]),
        )

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
        k[self.new] = loaded_rows + 2 * (len(acts) + np.arange(len(self.new)))
        v[self.new] = k[self.new] + 1
        behind = loaded_rows + 2 * (len(acts) + len(self.new))
        k[self.copied] = behind + 2 * np.arange(len(self.copied))
        v[self.copied] = k[self.copied] + 1
        return k, v

    def _logit_rows(self) -> Ids:
        rows = []
        starts = np.searchsorted(self.owner[self.new], np.arange(len(self.works) + 1))
        for work, first, end in zip(self.works, starts, starts[1:], strict=False):
            if work.wanted != "none":
                rows.append(np.arange(end - 1 if work.wanted == "last" else first, end))
        return np.concatenate(rows) if rows else np.empty(0, np.int64)

    # -- attention ----------------------------------------------------------------------------

    def _groups(self, k: Ids, v: Ids) -> list[LaterGroup]:
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
        return grouped(queries, len(self.new), self._send)

    def _on_cpu(self) -> tuple[Later, int, list[HostContext]] | None:
        """What the CPU attends to, and for which of the new tokens."""
        if not self.on_cpu.any():
            return None
        blocks, rows = self.block[Source.KV_CPU], list[Ids]()
        contexts: list[HostContext] = []
        taken = 0
        for index in np.unique(self.owner[self.on_cpu]):
            mine = np.flatnonzero(self.on_cpu & (self.owner == index))
            queries = self.new_index[self.new[self.owner[self.new] == index]]
            try:
                found = host_context(blocks[mine], self.offset[mine], self.bt, taken, len(queries))
            except NotWhole as error:
                raise NoSuchBlock(f"sequence {index} of the step, {error}") from error
            contexts.append(found)
            taken += len(queries)
            rows.append(queries)
        return self._send(np.concatenate(rows)), taken, contexts

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

    def _writes(self, k: Ids, v: Ids) -> list[tuple[int, Later, Later]]:
        """(how many, target rows, source rows): pool to buffer, buffer to pool, activations."""
        few = self.copied
        copied = self.block[Source.KV_DEVICE][few] * (2 * self.bt) + self.offset[few]
        land = np.flatnonzero(
            (self.block[Source.KV_DEVICE] >= 0) & (self.source != Source.KV_DEVICE) & ~self.on_cpu
        )
        row = self.block[Source.KV_DEVICE][land] * (2 * self.bt) + self.offset[land]
        keep = self.new[self.block[Source.ACT_DEVICE][self.new] >= 0]
        act = self.block[Source.ACT_DEVICE][keep] * self.bt + self.offset[keep]
        return [
            (
                len(few),
                self._send(np.concatenate((k[few], v[few]))),
                self._send(np.concatenate((copied, copied + self.bt))),
            ),
            (
                len(land),
                self._send(np.concatenate((row, row + self.bt))),
                self._send(np.concatenate((k[land], v[land]))),
            ),
            (len(keep), self._send(act), self._send(self.new_index[keep])),
        ]

    def _stores(self, k: Ids, v: Ids) -> list[tuple[Later, list[Run]]]:
        """Rows of new tokens, by host row, so that neighbours are copied at once."""
        since = np.array([work.store_from for work in self.works])
        new = self.new[self.position[self.new] >= since[self.owner[self.new]]]
        kv = new[self.block[Source.KV_HOST][new] >= 0]
        row = self.block[Source.KV_HOST][kv] * (2 * self.bt) + self.offset[kv]
        target = np.concatenate((row, row + self.bt))
        order = np.argsort(target)
        act = new[self.block[Source.ACT_HOST][new] >= 0]
        act_row = self.block[Source.ACT_HOST][act] * self.bt + self.offset[act]
        act_order = np.argsort(act_row)
        return [
            (self._send(np.concatenate((k[kv], v[kv]))[order]), _runs(target[order])),
            (self._send(self.new_index[act][act_order]), _runs(act_row[act_order])),
        ]

    def _spills(self) -> list[tuple[Later, list[Run]]]:
        """Whole blocks from device to host, for those types that have both."""
        outs = []
        for type in ("kv", "act"):
            pairs = [
                (work.pages.column(type, "host")[i], work.pages.column(type, "device")[i])
                for work in self.works
                for i in work.spill
            ]
            table = np.array([p for p in pairs if min(p) >= 0], np.int64).reshape(-1, 2)
            table = table[np.argsort(table[:, 0])]
            outs.append((self._send(table[:, 1]), _runs(table[:, 0])))
        return outs

    # -- upload -------------------------------------------------------------------------------

    def _send(self, array: Ids) -> Later:
        self._upload.append(np.ascontiguousarray(array, np.int64).ravel())
        index = len(self._upload) - 1
        return lambda sent: sent[index]

    def _sent(self) -> list[Tensor]:
        flat = torch.from_numpy(np.concatenate(self._upload))
        if self.device.type == "cuda":
            flat = flat.pin_memory().to(self.device, non_blocking=True)
        return list(flat.split([len(a) for a in self._upload]))


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
