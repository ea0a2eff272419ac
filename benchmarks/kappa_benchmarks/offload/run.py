"""Runs settings of `kappa bench offload`, cell by cell: rows, and the table of them.

Ways to bring a cache back from host memory take turns in one process, order reversed every round,
the first round dropped. In each row `speedup` is the median over the rounds of the baseline's
latency to the policy's. `gpu_busy` is the share of the latency in which the computation did not
stand still for a copy. `gbps` is bytes to the device over the whole latency, `link_gbps` over the
seconds in which copies ran, `alone_gbps` that of like copies with nothing else to do; GB is 1e9.
`same_as` names the row of a plan that is the very same: it was measured once.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kappa_benchmarks.harness import note, quartiles, result, save_json, table
from kappa_benchmarks.offload import policies, prefixes
from kappa_benchmarks.offload.cells import Cell, DecodeCell, Group, PrefixCell, Setting, SparseCell
from kappa_benchmarks.offload.rig import (
    LINK,
    Arm,
    Sample,
    Unsteady,
    alternate,
    leaders,
    ratios,
    rig,
)
from kappa_benchmarks.offload.sparse import answer_rows, sparse_arms, sparse_rig, sparse_rows
from kappa_engine.block_pool import OutOfBlocks
from kappa_engine.kv_cache import ArenaTooLarge

Row = dict[str, Any]


class Run:
    """Settings, cell by cell; `rows`, `profiles` and `left_out` grow, and `out` after each cell."""

    def __init__(self, settings: Sequence[Setting], repeats: int, out: Path | None = None) -> None:
        self.settings, self.repeats, self._out = settings, repeats, out
        self.rows: list[Row] = []
        self.profiles: list[Row] = []
        self.left_out: list[dict[str, str]] = []

    def run(self) -> dict[str, Any]:
        """Run all settings; groups that cannot run are left out by name."""
        for setting in self.settings:
            for group in setting.groups:
                try:
                    self._group(setting, group)
                except (ArenaTooLarge, OutOfBlocks, Unsteady, FileNotFoundError) as error:
                    self._leave_out(f"{setting.name} {group.model}: all", str(error))
        return self.result()

    def result(self) -> dict[str, Any]:
        """The result so far."""
        return result(
            settings=[one.name for one in self.settings], device=self._device(),
            torch=torch.__version__, cores=os.cpu_count(),
            rows=self.rows, left_out=self.left_out, profiles=self.profiles,
        )  # fmt: skip

    def _device(self) -> str:
        kinds = {one.device for one in self.settings}
        return torch.cuda.get_device_name() if "cuda" in kinds else "cpu, 1 computing thread"

    def _group(self, setting: Setting, group: Group) -> None:
        for cell in group.cells:
            if isinstance(cell, SparseCell):
                with sparse_rig(setting, group, cell) as made:
                    if cell.depths:
                        for row in answer_rows(made):
                            note(f"{setting.name} {group.model} {cell.name}: {row['policy']}")
                            self._add(setting, group, cell, [row])
                        continue
                    arms = sparse_arms(made)
                    samples = self._samples(setting, group, cell, arms)
                    self._add(setting, group, cell, sparse_rows(made, arms, samples))
        dense = [cell for cell in group.cells if not isinstance(cell, SparseCell)]
        if not dense:
            return
        note(f"{setting.name}: {group.model}, measuring rates")
        with rig(setting, group) as made:
            if setting.psi_over_mu:
                setting = replace(setting, link_bytes_per_s=made.rates.h2d_bytes_per_s)
            self.profiles.append({"setting": setting.name, **made.measured})
            for cell in dense:
                if isinstance(cell, DecodeCell):
                    arms, left_out = policies.decode_arms(made, cell)
                    self._measure(setting, group, cell, arms)
                else:
                    with prefixes.stored(made, cell) as prompt:
                        arms, left_out = prefixes.prefix_arms(made, cell, prompt)
                        self._measure(setting, group, cell, arms)
                for name, why in left_out.items():
                    self._leave_out(f"{setting.name} {group.model} {cell.name}: {name}", why)

    def _measure(
        self, setting: Setting, group: Group, cell: DecodeCell | PrefixCell, arms: Sequence[Arm]
    ) -> None:
        rows = rows_of(cell, arms, self._samples(setting, group, cell, arms))
        self._add(setting, group, cell, rows)

    def _samples(
        self, setting: Setting, group: Group, cell: Cell, arms: Sequence[Arm]
    ) -> dict[str, list[Sample]]:
        note(f"{setting.name} {group.model} {cell.name}: {len(arms)} ways")
        return alternate(arms, self.repeats)

    def _add(self, setting: Setting, group: Group, cell: Cell, rows: Sequence[Row]) -> None:
        where = {
            "setting": setting.name, "system": cell.system, "cell": cell.name, "model": group.model,
            "dtype": setting.dtype, "link": setting.link,
        }  # fmt: skip
        self.rows += [where | row for row in rows]
        if self._out is not None:
            save_json(self.result(), self._out)

    def _leave_out(self, what: str, why: str) -> None:
        note(f"left out: {what}: {why}")
        self.left_out.append({"what": what, "why": why})


def rows_of(
    cell: DecodeCell | PrefixCell, arms: Sequence[Arm], samples: dict[str, list[Sample]]
) -> list[Row]:
    """One row per arm, in their order."""
    baseline = cell.policies[0] if isinstance(cell, DecodeCell) else prefixes.BASELINE
    base = samples[baseline]
    alone = statistics.median(one.h2d_bytes / one.link_s / 1e9 for one in samples[LINK])
    lead = leaders(arms)
    if isinstance(cell, DecodeCell):
        sizes = {"prompt": cell.prompt, "gen": cell.gen}
    else:
        prompt = cell.cached + cell.new
        sizes = {"prompt": prompt, "cached": cell.cached, "gen": 1}
    rows = []
    for arm in arms:
        mine = samples[arm.name]
        # Answers; ways of a cell may differ in how many requests memory holds.
        batch, of_base = (len(each[-1].tokens) // sizes["gen"] or 1 for each in (mine, base))
        low, latency_s, high = quartiles([one.latency_s for one in mine])
        least_s = min(one.latency_s for one in mine)
        predicted_s = arm.predicted_s
        row: Row = {
            "batch": batch, **sizes, "policy": arm.name,
            "latency_s": latency_s, "latency_iqr_s": high - low,
            "latency_least_s": least_s, "repeats": len(mine), "bytes_h2d": mine[-1].h2d_bytes,
            "gbps": statistics.median(one.h2d_bytes / one.latency_s / 1e9 for one in mine),
            "link_gbps": statistics.median(
                one.h2d_bytes / one.link_s / 1e9 if one.link_s else 0.0 for one in mine
            ),
            "alone_gbps": alone, "predicted_s": predicted_s,
            "predicted_error": predicted_s and predicted_s / latency_s - 1.0,
            "predicted_error_of_least": predicted_s and predicted_s / least_s - 1.0,
            "baseline": baseline, "chosen": arm.chosen, "note": arm.note,
            "same_as": None if lead[arm.name] == arm.name else lead[arm.name],
            **dict.fromkeys(
                ("tokens_per_s", "gpu_busy", "speedup", "speedup_iqr", "tokens_equal", "held")
            ),
        }  # fmt: skip
        if arm.name != LINK:
            gains = [batch / of_base * one for one in ratios(samples, baseline, arm.name)]
            gain_low, gain, gain_high = quartiles(gains)
            # Of decoding, tokens behind the first one (paper 000).
            tokens = 1
            if isinstance(cell, DecodeCell):
                tokens = batch * (cell.gen - cell.decodes_alone)
            stalled = [min(1.0, one.stalled_s / one.latency_s) for one in mine]
            row |= {
                "tokens_per_s": tokens / latency_s, "gpu_busy": 1.0 - statistics.median(stalled),
                "speedup": gain, "speedup_iqr": gain_high - gain_low,
                "tokens_equal": _equal(base[-1].tokens, mine[-1].tokens),
            }  # fmt: skip
            if isinstance(cell, DecodeCell):
                row |= _end_to_end(base, mine)
        rows.append(row)
    return rows


def _end_to_end(base: Sequence[Sample], mine: Sequence[Sample]) -> Row:
    """With the prompts' computation (paper 003 counts it): tokens per second, and the speed-up."""
    totals_s = [one.before_s + one.latency_s for one in mine]
    base_s = [one.before_s + one.latency_s for one in base]
    made, of_base = len(mine[-1].tokens), len(base[-1].tokens)
    pairs = zip(base_s, totals_s, strict=True)
    speedups = [made / of_base * theirs / ours for theirs, ours in pairs]
    return {
        "prefill_s": statistics.median(one.before_s for one in mine),
        "end_to_end_tokens_per_s": made / statistics.median(totals_s),
        "end_to_end_speedup": statistics.median(speedups),
        "held": max(one.held for one in mine),
    }


def _equal(want: tuple[int, ...], got: tuple[int, ...]) -> float:
    """Share of the tokens that are the baseline's, of requests that both have; a near tie may fall
    otherwise by rounding."""
    pairs = list(zip(want, got, strict=False))
    return sum(a == b for a, b in pairs) / max(len(pairs), 1)


# Printing -----------------------------------------------------------------------------------------

_COLUMNS: tuple[tuple[str, str, float | str], ...] = (
    ("hits", "hits", 1.0), ("ms", "latency_s", 1e3), ("IQR", "latency_iqr_s", 1e3),
    ("least", "latency_least_s", 1e3), ("predicted", "predicted_s", 1e3),
    ("error", "predicted_error", "+.0%"), ("tokens/s", "tokens_per_s", 1.0),
    ("busy", "gpu_busy", ".0%"), ("MB to device", "bytes_h2d", 1e-6),
    ("GB/s, copying", "link_gbps", 1.0), ("at once", "held", 1.0), ("speed-up", "speedup", 1.0),
    ("IQR", "speedup_iqr", 1.0), ("same tokens", "tokens_equal", ".0%"),
    ("perplexity", "perplexity", 1.0), ("more", "perplexity_loss", ".1%"),
    ("from", "perplexity_loss_low", ".1%"), ("to", "perplexity_loss_high", ".1%"),
    ("numbers found", "found", ".0%"), ("heads kept", "persistent", ".0%"),
    ("over loading", "loading", 1.0),
)  # fmt: skip
"""Heading, key, and a format or a factor."""


def show(facts: dict[str, Any], console: Console) -> None:
    """A table for each cell, and what was left out."""

    def text(value: float | None, form: float | str) -> str:
        if value is None:
            return ""
        return format(value, form) if isinstance(form, str) else f"{value * form:.3g}"

    cells: dict[tuple[str, ...], list[Row]] = {}
    for row in facts["rows"]:
        key = tuple(row[name] for name in ("setting", "system", "model", "cell", "link"))
        cells.setdefault(key, []).append(row)
    for (setting, system, model, cell, link), rows in cells.items():
        columns = [column for column in _COLUMNS if any(column[1] in row for row in rows)]
        lines = [
            (row["policy"] + (" *" if row.get("chosen") else ""),
             *(text(row.get(key), form) for _, key, form in columns))
            for row in rows
        ]  # fmt: skip
        title = f"{setting}: {system} {cell}, {model}, link {link}"
        console.print(table(title, ("policy", *(name for name, _, _ in columns)), lines))
    for one in facts["left_out"]:
        console.print(f"left out: {one['what']}: {one['why']}", highlight=False)


def selected(settings: Sequence[Setting], only: Sequence[str]) -> list[Setting]:
    """The settings with those cells alone that have one of `only` in their name.

    Raises:
        ValueError: no cell has.
    """

    def part(group: Group) -> Group:
        names = {cell: f"{group.model} {cell.system} {cell.name}" for cell in group.cells}
        wanted = (c for c, name in names.items() if not only or any(o in name for o in only))
        return replace(group, cells=tuple(wanted))

    found = [replace(one, groups=tuple(map(part, one.groups))) for one in settings]
    found = [replace(one, groups=tuple(g for g in one.groups if g.cells)) for one in found]
    if not any(setting.groups for setting in found):
        raise ValueError(f"no cell has any of {', '.join(only)} in its name")
    return found
