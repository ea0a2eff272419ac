"""Decoding with a sparse choice of a cache in host memory (paper 004), one arm per way.

CLO with injected hit rates beside what it is compared with: the whole choice loaded each step one
layer ahead ("prefetch-all"), and the gather of rows beside a plain copy of as many bytes. Keys and
values are zeros and codes random: with injected hit rates seconds and bytes do not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
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
from engine.sparse.slots import Slots, View
from kappa.plans.clo import Persistent, SparseSettings, equal_heads, sparse_step_s

PREFETCH_ALL, NO_LOADS, NO_COPIES = "prefetch-all", "clo-100", "choose-only"
GATHER, COPY = "gather-alone", "copy-alone"
WAITED = "clo-79-waited"


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

    def reopen(self) -> None:
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
    longest, size = cell.context + setting.steps + 2, setting.block_tokens
    blocks = cell.batch * -(-longest // size)
    with loaded(setting, group, ArenaSize(1, blocks, block_tokens=size)) as forward:
        config, arena = forward.config, forward.arena
        # All heads of the first layer: no similarities are known of random weights.
        persistent = (tuple(range(config.kv_heads)), *[()] * (config.layers - 1))
        settings = SparseSettings(setting.clo, cell.batch, longest, chunk_tokens=1)
        slots = Slots(config, arena, forward.mover, settings, persistent)
        for codes in slots.codes:
            codes.random_()
        needed = slots.host_part(cell.context) // size
        taken = arena.pools["kv", "host"].allocate(cell.batch * needed)
        made = SparseRig(
            forward=forward, setting=setting, cell=cell, slots=slots, persistent=persistent,
            host_blocks=np.array(taken, np.int64).reshape(cell.batch, needed),
        )  # fmt: skip
        made.prepare()
        yield made


def sparse_arms(rig: SparseRig) -> list[Arm]:
    """All ways of decoding, and the two copies."""
    hits = {PREFETCH_ALL: 0.0, **{f"clo-{round(100 * share)}": share for share in rig.cell.hits}}
    hits |= {WAITED: PAPER_HITS, NO_LOADS: 1.0, NO_COPIES: 0.0}
    decoding = [Arm(name, partial(_decoded, rig, name, share)) for name, share in hits.items()]
    return [*decoding, Arm(GATHER, lambda: _gathered(rig)), Arm(COPY, lambda: _copied(rig))]


def _decoded(rig: SparseRig, name: str, hits: float) -> Sample:
    """All steps from a fresh start."""
    rig.reopen()
    kind = _NoCopies if name == NO_COPIES else InjectedCache
    cache = kind(rig.slots, equal_heads(rig.config.shape), hits)
    sparse = SparseForward(rig.forward, cache, name != WAITED)
    slots = range(rig.cell.batch)
    first = torch.zeros((rig.cell.batch, 1), dtype=torch.int64, device=rig.arena.device)
    # The first step has nothing to hit.
    sparse.run(slots, first, rig.take_block)
    before = cache.counts()

    def steps() -> None:
        last = first
        for _ in range(rig.setting.steps):
            last = sparse.run(slots, last, rig.take_block).argmax(dim=-1)[:, None]

    sample, counts = rig.timed(steps), cache.counts()
    rig.hit_ratios[name] = (counts.hits - before.hits) / (counts.lookups - before.lookups)
    return replace(sample, h2d_bytes=counts.gathered_bytes - before.gathered_bytes)


def _gathered(rig: SparseRig) -> Sample:
    """The choice of every head of a layer, at random places, a few times."""
    rows, target, source = _choice(rig)
    wanted = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
    sample = _repeated(rig, lambda: pairs([Gather(target, source, rows, wanted, None)]))
    return replace(sample, h2d_bytes=rig.setting.steps * target.nbytes)


def _copied(rig: SparseRig) -> Sample:
    """As many bytes in one piece."""
    _, target, source = _choice(rig)
    flat = source.flatten()[: target.numel()].view(target.shape)
    return _repeated(rig, lambda: [(target, flat)])


def _repeated(rig: SparseRig, copies: Callable[[], Any]) -> Sample:
    return rig.timed(lambda: [rig.mover.h2d(copies()) for _ in range(rig.setting.steps)])


def _choice(rig: SparseRig) -> tuple[Tensor, Tensor, Tensor]:
    slots = rig.slots
    source = slots.rows(1)
    chosen = slots.settings.clo.chosen_tokens(rig.cell.context)
    shape = (rig.cell.batch, 2 * slots.config.kv_heads, chosen)
    device = rig.arena.device
    rows = torch.randint(0, len(source), shape, generator=torch.Generator().manual_seed(3))
    return rows.to(device), source.new_empty((*shape, source.shape[1]), device=device), source


def sparse_rows(
    rig: SparseRig, arms: Sequence[Arm], samples: dict[str, list[Sample]]
) -> list[dict[str, Any]]:
    """One per arm, seconds of a step, predicted beside measured; speed-ups over `prefetch-all`."""
    steps = rig.setting.steps
    _, link, _ = quartiles([s.h2d_bytes / s.link_s for s in samples[GATHER]])
    # Other work on the machine only adds: of what plans are made of, the least counts.
    idle_s, choosing_s = (
        min(s.latency_s for s in samples[n]) / steps for n in (NO_LOADS, NO_COPIES)
    )
    found = []
    for arm in arms:
        mine, hits = samples[arm.name], rig.hit_ratios.get(arm.name)
        low, latency_s, high = quartiles([s.latency_s / steps for s in mine])
        gain_low, gain, gain_high = quartiles(ratios(samples, PREFETCH_ALL, arm.name))
        rates = [s.h2d_bytes / s.link_s / 1e9 for s in mine if s.link_s]
        predicted_s = None
        if hits is not None and arm.name not in (NO_LOADS, NO_COPIES):
            # What a step takes that loads nothing, and where choices are only made for what misses
            # (a CPU knows), their part of what choosing takes.
            layer_s = idle_s + (1.0 - hits) * max(0.0, choosing_s - idle_s)
            predicted_s = sparse_step_s(
                rig.config.shape, rig.setting.clo, rig.persistent, rig.cell.context,
                miss=1.0 - hits, link=link, layer_s=layer_s / rig.config.layers,
                batch=rig.cell.batch, ahead=arm.name != WAITED,
            )  # fmt: skip
        decodes = arm.name not in (GATHER, COPY)
        found.append({
            "batch": rig.cell.batch, "context": rig.cell.context, "share": rig.setting.clo.share,
            "policy": arm.name, "hits": hits, "hits_are": "injected" if decodes else None,
            "latency_s": latency_s, "latency_iqr_s": high - low,
            "latency_least_s": min(s.latency_s for s in mine) / steps, "repeats": len(mine),
            "tokens_per_s": rig.cell.batch / latency_s if decodes else None,
            "bytes_h2d": quartiles([s.h2d_bytes for s in mine])[1] / steps,
            "link_gbps": quartiles(rates)[1] if rates else None,
            "predicted_s": predicted_s,
            "predicted_error": None if predicted_s is None else predicted_s / latency_s - 1.0,
            "baseline": PREFETCH_ALL, "speedup": gain if decodes else None,
            "speedup_iqr": gain_high - gain_low if decodes else None,
        })  # fmt: skip
    return found
