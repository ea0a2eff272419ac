"""Runs settings: checks memory first, then cell by cell, writing what is there after each one.

A run that is told a limit begins no cell whose predicted time does not fit in what is left, and
names those that it left out. What fails for want of memory, or of a steady machine, is named as
well, and the others go on.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.offload import decoding, policies, prefixes
from benchmarks.offload.goals import judge
from benchmarks.offload.needs import refuse_too_large
from benchmarks.offload.rig import Rig, Unsteady, rig, sparse_rig
from benchmarks.offload.rounds import LEAST_REPEATS, Arm, alternate, leaders
from benchmarks.offload.rows import rows_of
from benchmarks.offload.settings import (
    Cell,
    DecodeCell,
    Group,
    PrefixCell,
    Setting,
    SparseCell,
    setting,
)
from benchmarks.offload.sparse import SparseArms
from engine.arena import ArenaTooLarge
from engine.blocks import OutOfBlocks
from engine.profiling import device_name

Told = Callable[[str], None]

_KINDS: dict[type, str] = {PrefixCell: "ttft", SparseCell: "sparse"}


@dataclass(frozen=True, slots=True)
class Options:
    """only: parts of the names of cells ("64x128", "ttft"); all, if empty. limit_s: of the run."""

    repeats: int = LEAST_REPEATS
    only: tuple[str, ...] = ()
    limit_s: float = float("inf")
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.repeats < LEAST_REPEATS:
            raise ValueError(f"{self.repeats} repeats say too little: give {LEAST_REPEATS} or more")


def run(names: Sequence[str], options: Options, told: Told = lambda line: None) -> dict[str, Any]:
    """Measure the settings of these names; the result, ready for JSON.

    Raises:
        ArenaTooLarge: a setting does not fit this machine, with both numbers.
        ValueError: a name that is not known, or no cell that is asked for.
    """
    settings = [_cut(setting(name), options.only) for name in names]
    if len({one.device for one in settings}) > 1:
        raise ValueError("settings for a CPU and for a GPU do not go together: run them apart")
    if not any(one.groups for one in settings):
        raise ValueError(f"no cell has any of {', '.join(options.only)} in its name")
    for one in settings:
        if not one.is_sparse:
            refuse_too_large(one)
    return _Run(settings, options, told).run()


def _cut(setting: Setting, only: tuple[str, ...]) -> Setting:
    """The setting with those cells alone."""

    def wanted(group: Group, cell: Cell | SparseCell) -> bool:
        kind = cell.order if isinstance(cell, DecodeCell) else _KINDS[type(cell)]
        return not only or any(part in f"{group.model} {kind} {cell.name}" for part in only)

    groups = (
        replace(
            group,
            cells=tuple(cell for cell in group.cells if wanted(group, cell)),
            sparse=tuple(cell for cell in group.sparse if wanted(group, cell)),
        )
        for group in setting.groups
    )
    return replace(setting, groups=tuple(one for one in groups if one.cells or one.sparse))


class _Run:
    def __init__(self, settings: list[Setting], options: Options, told: Told) -> None:
        self.settings, self.options, self.told = settings, options, told
        self.start_s = time.monotonic()
        self.load_at_start = os.getloadavg()
        self.device = torch.device(settings[0].device)
        self.rows: list[dict[str, Any]] = []
        self.profiles: list[dict[str, Any]] = []
        self.left_out: list[dict[str, str]] = []

    def run(self) -> dict[str, Any]:
        for one in self.settings:
            for group in one.groups:
                try:
                    self._group(one, group)
                except (ArenaTooLarge, torch.OutOfMemoryError, Unsteady) as error:
                    self._leave_out(f"{one.name} {group.model}: all", str(error))
                self._write()
        return self.result()

    def _group(self, setting: Setting, group: Group) -> None:
        if setting.is_sparse:
            for sparse in group.sparse:
                self._sparse(setting, group, sparse)
            return
        self.told(f"{setting.name}: {group.model}, measuring rates")
        with rig(setting, group) as made:
            self.profiles.append({"setting": setting.name, **made.measured})
            for cell in group.cells:
                self._cell(setting, made, cell)
                self._write()

    def _cell(self, setting: Setting, made: Rig, cell: Cell) -> None:
        where = f"{setting.name} {made.config.shape.name} {cell.name}"
        try:
            if isinstance(cell, DecodeCell):
                arms, left_out = decoding.decode_arms(made, cell)
                self._measure(setting, made, cell, arms, policies.BASELINE)
            else:
                with prefixes.stored(made, cell) as prompt:
                    arms, left_out = prefixes.prefix_arms(made, cell, prompt)
                    self._measure(setting, made, cell, arms, prefixes.BASELINE)
        except (torch.OutOfMemoryError, OutOfBlocks) as error:
            left_out = {"all": f"out of memory: {error}"}
        for name, why in left_out.items():
            self._leave_out(f"{where}: {name}", why)

    def _sparse(self, setting: Setting, group: Group, cell: SparseCell) -> None:
        """One that does not fit is left out, and the others go on."""
        where = f"{setting.name} {group.model} {cell.name}"
        self.told(where)
        try:
            with sparse_rig(setting, group, cell) as made:
                ways = SparseArms(setting, made)
                arms = ways.arms()
                self.rows += ways.rows(arms, alternate(arms, self.options.repeats))
        except (ArenaTooLarge, OutOfBlocks, torch.OutOfMemoryError) as error:
            self._leave_out(where, str(error))
        self._write()

    def _measure(
        self, setting: Setting, made: Rig, cell: Cell, arms: list[Arm], baseline: str
    ) -> None:
        where = f"{setting.name} {made.config.shape.name} {cell.name}"
        rounds = self.options.repeats + 1
        leads = leaders(arms)
        apart = [arm for arm in arms if leads[arm.name] == arm.name]
        needed_s = rounds * sum(arm.predicted_s or 0.0 for arm in apart)
        left_s = self.options.limit_s - (time.monotonic() - self.start_s)
        if needed_s > left_s:
            self._leave_out(where, f"{needed_s:.0f} s predicted, {left_s:.0f} s left of the limit")
            return
        self.told(f"{where}: {len(apart)} ways, {needed_s:.0f} s predicted beside the prompts")
        samples = alternate(arms, self.options.repeats)
        self.rows += rows_of(setting, made, cell, arms, samples, baseline)

    def _leave_out(self, what: str, why: str) -> None:
        self.told(f"left out: {what}: {why}")
        self.left_out.append({"what": what, "why": why})

    def _write(self) -> None:
        """What there is so far; a run that is cut off leaves a whole file."""
        out = self.options.out
        if out is None:
            return
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_name(f"{out.name}.{os.getpid()}.part")
        part.write_text(json.dumps(self.result(), allow_nan=False, indent=1) + "\n")
        part.replace(out)

    def _device_name(self) -> str:
        """As the engine calls it; of a CPU, the threads that the settings compute with."""
        threads = {one.threads for one in self.settings} - {0}
        if self.device.type == "cpu" and threads:
            return f"cpu, {'/'.join(map(str, sorted(threads)))} computing thread"
        return device_name(self.device)

    def result(self) -> dict[str, Any]:
        sparse = any(one.is_sparse for one in self.settings)
        injected = {"hit_rates": "injected: contents are random and no model's"} if sparse else {}
        return {
            "device": self._device_name(),
            "date": datetime.now(UTC).date().isoformat(),
            "command": _command(),
            "settings": [one.name for one in self.settings],
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "load_average": {"start": self.load_at_start, "end": os.getloadavg()},
            "seconds": time.monotonic() - self.start_s,
            "rows": self.rows,
            "goals": judge(self.rows, self.device.type),
            "left_out": self.left_out,
            "profiles": self.profiles,
            **injected,
        }


def _command() -> str:
    """The command line, as typed."""
    name = Path(sys.argv[0]).name
    first = ["python", "-m", "benchmarks.offload"] if name == "__main__.py" else [name]
    return shlex.join([*first, *sys.argv[1:]])
