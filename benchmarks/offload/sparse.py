"""Decoding with a sparse choice of a cache in host memory, one arm per way, and its rows.

CLO with injected hit rates beside what it is compared with in paper 004: the whole choice loaded
each step one layer ahead ("prefetch-all"), and the gather of rows beside a plain copy of as many
bytes. Every row says the rate that was injected; none is a property of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.offload.rig import SparseRig
from benchmarks.offload.rounds import COPY, GATHER, Arm, Sample, ratios, spread
from benchmarks.offload.rows import error
from benchmarks.offload.settings import PAPER_HITS, Setting
from engine.sparse.cache import Pending, SimilarityCache
from engine.sparse.forward import SparseForward
from engine.sparse.gather import Gather, pairs
from engine.sparse.retriever import Asked
from engine.sparse.view import View
from kappa.plans.clo import equal_heads, step_seconds

PREFETCH_ALL, NO_LOADS = "prefetch-all", "clo-100"
NO_COPIES = "choose-only"


class _NoCopies(SimilarityCache):
    """Chooses anew as often as it misses, and copies nothing: what choosing takes."""

    def _gather(self, asked: Asked, positions: Tensor, wanted: Tensor, view: View) -> Pending:
        return Pending(self.lanes.mover.mark(), [])


class SparseArms:
    """The arms of one cell, and their rows."""

    def __init__(self, setting: Setting, rig: SparseRig) -> None:
        self.setting, self.rig, self.cell = setting, rig, rig.cell
        self.hit_ratios: dict[str, float | None] = {}

    def arms(self) -> list[Arm]:
        """All ways of decoding, and the two copies."""
        made = [Arm(PREFETCH_ALL, self._clo(PREFETCH_ALL, 0.0))]
        for hits in self.cell.hits:
            name = f"clo-{round(100 * hits)}"
            made.append(Arm(name, self._clo(name, hits)))
        made.append(Arm("clo-79-waited", self._clo("clo-79-waited", PAPER_HITS, ahead=False)))
        made.append(Arm(NO_LOADS, self._clo(NO_LOADS, 1.0)))
        made.append(Arm(NO_COPIES, self._clo(NO_COPIES, 0.0, kind=_NoCopies)))
        return [*made, Arm(GATHER, self._gather), Arm(COPY, self._copy)]

    def _clo(
        self, name: str, hits: float, ahead: bool = True,
        kind: type[SimilarityCache] = SimilarityCache,
    ) -> Callable[[], Sample]:  # fmt: skip
        rig = self.rig

        def run() -> Sample:
            rig.open()
            heads = equal_heads(rig.config.shape)
            cache = kind(rig.lanes, heads, injected_hits=hits)
            sparse = SparseForward(rig.forward, cache, ahead)
            lanes = range(self.cell.batch)
            last = torch.zeros((self.cell.batch, 1), dtype=torch.int64, device=rig.arena.device)
            # The first step has nothing to hit.
            sparse.run(lanes, last, rig.take_block)
            before = cache.counts()

            def steps() -> None:
                now = last
                for _ in range(self.setting.steps):
                    now = sparse.run(lanes, now, rig.take_block).argmax(dim=-1)[:, None]

            sample = rig.timed(steps)
            counts = cache.counts()
            looked = counts.lookups - before.lookups
            self.hit_ratios[name] = (counts.hits - before.hits) / looked
            moved = counts.gathered_bytes - before.gathered_bytes
            return replace(sample, h2d_bytes=moved)

        return run

    def _gather(self) -> Sample:
        """The choice of every head of a layer, at random places, a few times."""
        rig, lanes = self.rig, self.rig.lanes
        rows, target, source = self._choice()
        wanted = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
        counted = None
        if rows.device.type == "cuda":
            counted = torch.zeros(1, dtype=torch.int64, device=rows.device)
        gather = Gather(target, source, rows, wanted, counted)

        def copies() -> None:
            for _ in range(self.setting.steps):
                lanes.mover.h2d(pairs([gather]))

        sample = rig.timed(copies)
        return replace(sample, h2d_bytes=self.setting.steps * target.nbytes)

    def _copy(self) -> Sample:
        """As many bytes in one piece."""
        _, target, source = self._choice()
        flat = source.flatten()[: target.numel()].view(target.shape)

        def copies() -> None:
            for _ in range(self.setting.steps):
                self.rig.mover.h2d([(target, flat)])

        return self.rig.timed(copies)

    def _choice(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        lanes = self.rig.lanes
        source = lanes.rows(1)
        chosen = lanes.settings.clo.chosen_tokens(self.cell.context)
        shape = (self.cell.batch, 2 * lanes.config.kv_heads, chosen)
        generator = torch.Generator(device=lanes.arena.device)
        generator.manual_seed(3)
        rows = torch.randint(0, len(source), shape, generator=generator, device=lanes.arena.device)
        target = source.new_empty((*shape, source.shape[1]), device=lanes.arena.device)
        return rows, target, source

    # -- rows ---------------------------------------------------------------------------------

    def rows(self, arms: Sequence[Arm], samples: dict[str, list[Sample]]) -> list[dict[str, Any]]:
        """One per arm, predicted beside measured."""
        steps = self.setting.steps
        link = spread([s.h2d_bytes / s.link_s for s in samples[GATHER] if s.link_s]).median
        # Other work on the machine only adds: of what plans are made of, the least counts.
        least = {n: min(s.latency_s for s in samples[n]) / steps for n in (NO_LOADS, NO_COPIES)}
        found = []
        for arm in arms:
            mine = [s.latency_s / steps for s in samples[arm.name]]
            latency, gain = spread(mine), ratios(samples, PREFETCH_ALL, arm.name)
            decoding = arm.name not in (GATHER, COPY)
            predicted = self._predicted(arm.name, link, least)
            moved = spread([float(s.h2d_bytes) for s in samples[arm.name]]).median
            found.append({
                **self._where(), "policy": arm.name,
                "hits": self.hit_ratios.get(arm.name), "hits_are": _label(arm.name),
                "latency_s": latency.median, "latency_iqr_s": latency.iqr,
                "latency_least_s": min(mine), "repeats": len(mine),
                "tokens_per_s": self.cell.batch / latency.median if decoding else None,
                "bytes_h2d": moved / steps, "link_gbps": _rate(samples[arm.name]),
                "predicted_s": predicted,
                "predicted_error": error(predicted, latency.median),
                "predicted_error_of_least": error(predicted, min(mine)),
                "baseline": PREFETCH_ALL, "speedup": gain.median if decoding else None,
                "speedup_iqr": gain.iqr if decoding else None,
            })  # fmt: skip
        return found

    def _predicted(self, name: str, link: float, least: dict[str, float]) -> float | None:
        """Seconds of a step by the planner, from the gather's rate and T_comp.

        T_comp is what a step takes that loads nothing, and where choices are only made for what
        misses (a CPU knows), their part of what choosing takes.
        """
        hits = self.hit_ratios.get(name)
        if hits is None or name in (NO_LOADS, NO_COPIES):
            return None
        layers = self.rig.config.layers
        step_s = least[NO_LOADS] + (1.0 - hits) * max(0.0, least[NO_COPIES] - least[NO_LOADS])
        return step_seconds(
            self.rig.config.shape, self.setting.clo, self.rig.persistent,
            self.cell.context, miss=1.0 - hits, link=link, layer_s=step_s / layers,
            batch=self.cell.batch, ahead=not name.endswith("waited"),
        ).tbt_s  # fmt: skip

    def _where(self) -> dict[str, Any]:
        return {
            "setting": self.setting.name, "system": "decode-sparse", "cell": self.cell.name,
            "model": self.rig.config.shape.name, "dtype": self.setting.dtype,
            "batch": self.cell.batch, "context": self.cell.context,
            "share": self.setting.clo.share,
            "link": self.setting.link,
        }  # fmt: skip


def _label(name: str) -> str | None:
    if name in (GATHER, COPY):
        return None
    return "injected"


def _rate(samples: Sequence[Sample]) -> float | None:
    rates = [one.h2d_bytes / one.link_s / 1e9 for one in samples if one.link_s]
    return spread(rates).median if len(rates) > 1 else None
