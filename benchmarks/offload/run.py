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

from benchmarks.harness import note, quartiles, result, save_json, table
from benchmarks.offload import decoding, policies, prefixes
from benchmarks.offload.cells import Cell, DecodeCell, Group, PrefixCell, Setting, SparseCell
from benchmarks.offload.rig import LINK, Arm, Rig, Sample, Unsteady, alternate, leaders, ratios, rig
from benchmarks.offload.sparse import sparse_arms, sparse_rig, sparse_rows
from engine.arena import ArenaTooLarge
from engine.blocks import OutOfBlocks

Row = dict[str, Any]


class Run:
    """Settings, cell by cell; `rows`, `profiles` and `left_out` grow, and `out` after each cell."""

    def __init__(self, settings: Sequence[Setting], repeats: int, out: Path | None = None) -> None:
        self.settings, self.repeats, self._out = settings, repeats, out
        self._load_average = os.getloadavg()
        self.rows: list[Row] = []
        self.profiles: list[Row] = []
        self.left_out: list[dict[str, str]] = []

    def run(self) -> dict[str, Any]:
        """All of them; what cannot run is left out by name, and the others go on."""
        for setting in self.settings:
            for group in setting.groups:
                try:
                    self._group(setting, group)
                except (ArenaTooLarge, OutOfBlocks, Unsteady) as error:
                    self._leave_out(f"{setting.name} {group.model}: all", str(error))
        return self.result()

    def result(self) -> dict[str, Any]:
        """What there is so far."""
        return result(
            settings=[one.name for one in self.settings], device="cpu, 1 computing thread",
            torch=torch.__version__, cores=os.cpu_count(),
            load_average={"start": self._load_average, "end": os.getloadavg()},
            rows=self.rows, left_out=self.left_out, profiles=self.profiles,
        )  # fmt: skip

    def _group(self, setting: Setting, group: Group) -> None:
        for cell in group.cells:
            if isinstance(cell, SparseCell):
                self._sparse(setting, group, cell)
        if any(not isinstance(cell, SparseCell) for cell in group.cells):
            note(f"{setting.name}: {group.model}, measuring rates")
            with rig(setting, group) as made:
                self.profiles.append({"setting": setting.name, **made.measured})
                for cell in group.cells:
                    self._cell(setting, made, cell)

    def _cell(self, setting: Setting, made: Rig, cell: Cell) -> None:
        where = f"{setting.name} {made.config.shape.name} {cell.name}"
        if isinstance(cell, DecodeCell):
            arms, left_out = decoding.decode_arms(made, cell)
            self._measure(setting, made, cell, arms)
        elif isinstance(cell, PrefixCell):
            with prefixes.stored(made, cell) as prompt:
                arms, left_out = prefixes.prefix_arms(made, cell, prompt)
                self._measure(setting, made, cell, arms)
        for name, why in left_out.items():
            self._leave_out(f"{where}: {name}", why)

    def _measure(
        self, setting: Setting, made: Rig, cell: DecodeCell | PrefixCell, arms: Sequence[Arm]
    ) -> None:
        note(f"{setting.name} {made.config.shape.name} {cell.name}: {len(arms)} ways")
        weights = {"weights": "streamed" if made.streamed else "device"}
        samples = alternate(arms, self.repeats)
        self._add(
            _where(setting, made.config.shape.name, cell) | weights,
            rows_of(cell, arms, samples),
        )

    def _sparse(self, setting: Setting, group: Group, cell: SparseCell) -> None:
        note(f"{setting.name} {group.model} {cell.name}")
        with sparse_rig(setting, group, cell) as made:
            arms = sparse_arms(made)
            rows = sparse_rows(made, arms, alternate(arms, self.repeats))
            self._add(_where(setting, made.config.shape.name, cell), rows)

    def _add(self, where: Row, rows: Sequence[Row]) -> None:
        self.rows += [where | row for row in rows]
        if self._out is not None:
            save_json(self.result(), self._out)

    def _leave_out(self, what: str, why: str) -> None:
        note(f"left out: {what}: {why}")
        self.left_out.append({"what": what, "why": why})


def _where(setting: Setting, model: str, cell: Cell) -> Row:
    return {
        "setting": setting.name, "system": cell.system, "cell": cell.name, "model": model,
        "dtype": "float32", "link": setting.link,
    }  # fmt: skip


def rows_of(
    cell: DecodeCell | PrefixCell, arms: Sequence[Arm], samples: dict[str, list[Sample]]
) -> list[Row]:
    """One row per arm, in their order."""
    decodes = isinstance(cell, DecodeCell)
    baseline = policies.BASELINE if decodes else prefixes.BASELINE
    alone = statistics.median(one.h2d_bytes / one.link_s / 1e9 for one in samples[LINK])
    lead = leaders(arms)
    rows = []
    for arm in arms:
        mine = samples[arm.name]
        low, latency_s, high = quartiles([one.latency_s for one in mine])
        least_s = min(one.latency_s for one in mine)
        row: Row = {
            **_sizes(cell), "policy": arm.name, "latency_s": latency_s, "latency_iqr_s": high - low,
            "latency_least_s": least_s, "repeats": len(mine),
            "bytes_h2d": mine[-1].h2d_bytes,
            "gbps": statistics.median(one.h2d_bytes / one.latency_s / 1e9 for one in mine),
            "link_gbps": statistics.median(
                one.h2d_bytes / one.link_s / 1e9 if one.link_s else 0.0 for one in mine
            ),
            "alone_gbps": alone, "predicted_s": arm.predicted_s,
            "predicted_error": _error(arm.predicted_s, latency_s),
            "predicted_error_of_least": _error(arm.predicted_s, least_s),
            "baseline": baseline, "chosen": arm.chosen, "note": arm.note,
            "same_as": None if lead[arm.name] == arm.name else lead[arm.name],
            **dict.fromkeys(("tokens_per_s", "gpu_busy", "speedup", "speedup_iqr", "tokens_equal")),
        }  # fmt: skip
        if arm.name != LINK:
            gain_low, gain, gain_high = quartiles(ratios(samples, baseline, arm.name))
            tokens = cell.sequences * (cell.gen - 1) if isinstance(cell, DecodeCell) else 1
            row |= {
                # Of decoding, tokens behind the first one (paper 000).
                "tokens_per_s": tokens / latency_s,
                "gpu_busy": statistics.median(
                    1.0 - min(1.0, one.stalled_s / one.latency_s) for one in mine
                ),
                "speedup": gain, "speedup_iqr": gain_high - gain_low,
                "tokens_equal": _equal(samples[baseline][-1].tokens, mine[-1].tokens),
            }  # fmt: skip
            if isinstance(cell, DecodeCell):
                row |= _end_to_end(cell, samples[baseline], mine)
        rows.append(row)
    return rows


def _sizes(cell: DecodeCell | PrefixCell) -> Row:
    if isinstance(cell, DecodeCell):
        return {
            "batch": cell.sequences, "batches": cell.batches, "prompt": cell.prompt,
            "gen": cell.gen,
        }  # fmt: skip
    return {
        "batch": 1, "batches": 1, "prompt": cell.cached + cell.new, "cached": cell.cached, "gen": 1,
    }  # fmt: skip


def _error(predicted_s: float | None, measured_s: float) -> float | None:
    return None if predicted_s is None else predicted_s / measured_s - 1.0


def _end_to_end(cell: DecodeCell, base: Sequence[Sample], mine: Sequence[Sample]) -> Row:
    """With the prompts' computation (paper 003 counts it): tokens per second, and the speed-up."""
    totals_s = [one.before_s + one.latency_s for one in mine]
    pairs = zip(base, totals_s, strict=True)
    return {
        "prefill_s": statistics.median(one.before_s for one in mine),
        "end_to_end_tokens_per_s": cell.sequences * cell.gen / statistics.median(totals_s),
        "end_to_end_speedup": statistics.median(
            (one.before_s + one.latency_s) / total_s for one, total_s in pairs
        ),
    }


def _equal(want: tuple[int, ...], got: tuple[int, ...]) -> float:
    """Share of the tokens that are the baseline's; a near tie may fall otherwise by rounding."""
    if len(want) != len(got) or not want:
        return 0.0
    return sum(a == b for a, b in zip(want, got, strict=True)) / len(want)


# Printing -----------------------------------------------------------------------------------------

_COLUMNS = (
    ("hits", "hits", 1.0), ("ms", "latency_s", 1e3), ("IQR", "latency_iqr_s", 1e3),
    ("least", "latency_least_s", 1e3), ("predicted", "predicted_s", 1e3),
    ("error", "predicted_error", "+.0%"), ("tokens/s", "tokens_per_s", 1.0),
    ("busy", "gpu_busy", ".0%"), ("MB to device", "bytes_h2d", 1e-6),
    ("GB/s, copying", "link_gbps", 1.0), ("speed-up", "speedup", 1.0),
    ("IQR", "speedup_iqr", 1.0), ("same tokens", "tokens_equal", ".0%"),
)  # fmt: skip


def show(facts: dict[str, Any], console: Console) -> None:
    """A table for each cell, and what was left out."""
    cells: dict[tuple[str, ...], list[Row]] = {}
    for row in facts["rows"]:
        key = tuple(row[name] for name in ("setting", "system", "model", "cell", "link"))
        cells.setdefault(key, []).append(row)
    for (setting, system, model, cell, link), rows in cells.items():
        columns = [column for column in _COLUMNS if any(column[1] in row for row in rows)]
        lines = [
            (row["policy"] + (" *" if row.get("chosen") else ""),
             *(_text(row[key], form) for _, key, form in columns))
            for row in rows
        ]  # fmt: skip
        injected = "; hit rates injected" if "hits" in rows[0] else ""
        title = f"{setting}: {system} {cell}, {model}, link {link}{injected}"
        console.print(table(title, ("policy", *(name for name, _, _ in columns)), lines))
    for one in facts["left_out"]:
        console.print(f"left out: {one['what']}: {one['why']}", highlight=False)


def _text(value: float | None, form: float | str) -> str:
    """A value by a format, or times a factor."""
    if value is None:
        return ""
    return format(value, form) if isinstance(form, str) else f"{value * form:.3g}"


def selected(settings: Sequence[Setting], only: Sequence[str]) -> list[Setting]:
    """The settings with those cells alone that have one of `only` in their name.

    Raises:
        ValueError: no cell has.
    """

    def wanted(group: Group, cell: Cell) -> bool:
        name = f"{group.model} {cell.system} {cell.name}"
        return not only or any(part in name for part in only)

    found = []
    for setting in settings:
        groups = [
            replace(group, cells=tuple(cell for cell in group.cells if wanted(group, cell)))
            for group in setting.groups
        ]
        found.append(replace(setting, groups=tuple(group for group in groups if group.cells)))
    if not any(setting.groups for setting in found):
        raise ValueError(f"no cell has any of {', '.join(only)} in its name")
    return found
