"""Decoding with a sparse choice of a cache in host memory (paper 004), one arm per way.

CLO with injected hit rates beside what it is compared with: the whole choice loaded each step one
layer ahead ("prefetch-all"), and the gather of rows beside a plain copy of as many bytes. Keys and
values are zeros and codes random: with injected hit rates seconds and bytes do not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import quartiles
from benchmarks.offload.cells import PAPER_HITS, Group, Setting, SparseCell
from benchmarks.offload.injected import InjectedCache
from benchmarks.offload.rig import Arm, Loaded, Sample, loaded, ratios
from engine.arena import ArenaSize
from engine.blocks import Ids
from engine.sparse.cache import HeadQueries, PendingGather
from engine.sparse.forward import SparseForward
from engine.sparse.gather import Gather, pairs
from engine.sparse.settings import SparseSettings
from engine.sparse.slots import Slots, View
from kappa.plans.clo import Persistent, equal_heads, sparse_step_s

PREFETCH_ALL, NO_LOADS, NO_COPIES = "prefetch-all", "clo-100", "choose-only"
GATHER, COPY = "gather-alone", "copy-alone"


class _NoCopies(InjectedCache):
    """Chooses anew as often as it misses, and copies nothing: what choosing takes."""

    def _gather(
        self, queried: HeadQueries, positions: Tensor, wanted: Tensor, view: View
    ) -> PendingGather:
        return PendingGather(self.slots.mover.mark(), [])


@dataclass(slots=True, kw_only=True)
class SparseRig(Loaded):
    """Slots that are open for a cell. host_blocks (batch, blocks): of each sequence; hit_ratios: as
    they were found by the arms."""

    setting: Setting
    cell: SparseCell
    slots: Slots
    host_blocks: Ids
    persistent: Persistent
    hit_ratios: dict[str, float] = field(default_factory=dict)

    def open(self) -> None:
        """Every slot as at the start: `context` tokens each, nothing chosen."""
        needed = self.slots.host_part(self.cell.context) // self.arena.block_tokens
        for slot in range(self.cell.batch):
            taken = self.slots.close(slot)[needed:]
            self.arena.pools["kv", "host"].free(taken)
        self.prepare()

    def prepare(self) -> None:
        """Fill slots that are closed."""
        for slot, blocks in enumerate(self.host_blocks.tolist()):
            self.slots.prepare(slot, self.cell.context, blocks)

    def take_block(self) -> int:
        """A host block for what gets old."""
        return self.arena.pools["kv", "host"].allocate(1)[0]


@contextmanager
def sparse_rig(setting: Setting, group: Group, cell: SparseCell) -> Iterator[SparseRig]:
    """A rig for one cell.

    Raises:
        ArenaTooLarge: it does not fit.
    """
    # The step before a round included.
    longest = cell.context + setting.steps + 2
    blocks = cell.batch * -(-longest // setting.block_tokens)
    with loaded(setting, group, ArenaSize(1, blocks, block_tokens=setting.block_tokens)) as forward:
        config, arena = forward.config, forward.arena
        # All heads of the first layer: no similarities are known of random weights.
        persistent = (tuple(range(config.kv_heads)), *[()] * (config.layers - 1))
        settings = SparseSettings(setting.clo, cell.batch, longest, chunk_tokens=1)
        slots = Slots(config, arena, forward.mover, settings, persistent)
        for codes in slots.codes:
            codes.random_()
        needed = slots.host_part(cell.context) // setting.block_tokens
        taken = arena.pools["kv", "host"].allocate(cell.batch * needed)
        made = SparseRig(
            forward=forward, setting=setting, cell=cell, slots=slots, persistent=persistent,
            host_blocks=np.array(taken, np.int64).reshape(cell.batch, needed),
        )  # fmt: skip
        made.prepare()
        yield made


def sparse_arms(rig: SparseRig) -> list[Arm]:
    """All ways of decoding, and the two copies."""
    clo = {f"clo-{round(100 * hits)}": hits for hits in rig.cell.hits}
    return [
        Arm(PREFETCH_ALL, _decoding(rig, PREFETCH_ALL, 0.0)),
        *(Arm(name, _decoding(rig, name, hits)) for name, hits in clo.items()),
        Arm("clo-79-waited", _decoding(rig, "clo-79-waited", PAPER_HITS, ahead=False)),
        Arm(NO_LOADS, _decoding(rig, NO_LOADS, 1.0)),
        Arm(NO_COPIES, _decoding(rig, NO_COPIES, 0.0, kind=_NoCopies)),
        Arm(GATHER, lambda: _gathered(rig)),
        Arm(COPY, lambda: _copied(rig)),
    ]


def _decoding(
    rig: SparseRig, name: str, hits: float, ahead: bool = True,
    kind: type[InjectedCache] = InjectedCache,
) -> Callable[[], Sample]:  # fmt: skip
    def run() -> Sample:
        rig.open()
        cache = kind(rig.slots, equal_heads(rig.config.shape), hits)
        sparse = SparseForward(rig.forward, cache, ahead)
        slots = range(rig.cell.batch)
        first = torch.zeros((rig.cell.batch, 1), dtype=torch.int64)
        # The first step has nothing to hit.
        sparse.run(slots, first, rig.take_block)
        before = cache.counts()

        def steps() -> None:
            last = first
            for _ in range(rig.setting.steps):
                last = sparse.run(slots, last, rig.take_block).argmax(dim=-1)[:, None]

        sample = rig.timed(steps)
        counts = cache.counts()
        rig.hit_ratios[name] = (counts.hits - before.hits) / (counts.lookups - before.lookups)
        return replace(sample, h2d_bytes=counts.gathered_bytes - before.gathered_bytes)

    return run


def _gathered(rig: SparseRig) -> Sample:
    """The choice of every head of a layer, at random places, a few times."""
    rows, target, source = _choice(rig)
    wanted = torch.ones(rows.shape[:2], dtype=torch.bool)
    gather = Gather(target, source, rows, wanted, None)

    def copies() -> None:
        for _ in range(rig.setting.steps):
            rig.slots.mover.h2d(pairs([gather]))

    return replace(rig.timed(copies), h2d_bytes=rig.setting.steps * target.nbytes)


def _copied(rig: SparseRig) -> Sample:
    """As many bytes in one piece."""
    _, target, source = _choice(rig)
    flat = source.flatten()[: target.numel()].view(target.shape)

    def copies() -> None:
        for _ in range(rig.setting.steps):
            rig.mover.h2d([(target, flat)])

    return rig.timed(copies)


def _choice(rig: SparseRig) -> tuple[Tensor, Tensor, Tensor]:
    slots = rig.slots
    source = slots.rows(1)
    chosen = slots.settings.clo.chosen_tokens(rig.cell.context)
    shape = (rig.cell.batch, 2 * slots.config.kv_heads, chosen)
    rows = torch.randint(0, len(source), shape, generator=torch.Generator().manual_seed(3))
    return rows, source.new_empty((*shape, source.shape[1])), source


def sparse_rows(
    rig: SparseRig, arms: Sequence[Arm], samples: dict[str, list[Sample]]
) -> list[dict[str, Any]]:
    """One per arm, seconds of a step, predicted beside measured; speed-ups over `prefetch-all`."""
    steps = rig.setting.steps
    _, link, _ = quartiles([s.h2d_bytes / s.link_s for s in samples[GATHER]])
    # Other work on the machine only adds: of what plans are made of, the least counts.
    idle, choosing = (min(s.latency_s for s in samples[n]) / steps for n in (NO_LOADS, NO_COPIES))
    found = []
    for arm in arms:
        low, latency_s, high = quartiles([s.latency_s / steps for s in samples[arm.name]])
        gain_low, gain, gain_high = quartiles(ratios(samples, PREFETCH_ALL, arm.name))
        predicted_s = _predicted_s(rig, arm.name, link, (idle, choosing))
        moved = [s.h2d_bytes for s in samples[arm.name]]
        rates = [s.h2d_bytes / s.link_s / 1e9 for s in samples[arm.name] if s.link_s]
        decodes = arm.name not in (GATHER, COPY)
        found.append({
            "batch": rig.cell.batch, "context": rig.cell.context, "share": rig.setting.clo.share,
            "policy": arm.name, "hits": rig.hit_ratios.get(arm.name),
            "hits_are": "injected" if decodes else None,
            "latency_s": latency_s, "latency_iqr_s": high - low,
            "latency_least_s": min(s.latency_s for s in samples[arm.name]) / steps,
            "repeats": len(moved), "tokens_per_s": rig.cell.batch / latency_s if decodes else None,
            "bytes_h2d": quartiles(moved)[1] / steps,
            "link_gbps": quartiles(rates)[1] if rates else None,
            "predicted_s": predicted_s,
            "predicted_error": None if predicted_s is None else predicted_s / latency_s - 1.0,
            "baseline": PREFETCH_ALL, "speedup": gain if decodes else None,
            "speedup_iqr": gain_high - gain_low if decodes else None,
        })  # fmt: skip
    return found


def _predicted_s(
    rig: SparseRig, name: str, link: float, compute: tuple[float, float]
) -> float | None:
    """Seconds of a step by the planner, from the gather's rate and T_comp.

    T_comp is what a step takes that loads nothing, and where choices are only made for what misses
    (a CPU knows), their part of what choosing takes.
    """
    if name not in rig.hit_ratios or name in (NO_LOADS, NO_COPIES):
        return None
    miss, (idle_s, choosing_s) = 1.0 - rig.hit_ratios[name], compute
    layer_s = (idle_s + miss * max(0.0, choosing_s - idle_s)) / rig.config.layers
    return sparse_step_s(
        rig.config.shape, rig.setting.clo, rig.persistent, rig.cell.context, miss=miss, link=link,
        layer_s=layer_s, batch=rig.cell.batch, ahead=not name.endswith("waited"),
    )  # fmt: skip
