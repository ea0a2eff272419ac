"""A soak as a picture: memory and descriptors of every process, index and reservations over time.

Faults stand as thin lines. Written as PNG, without a display.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.soak.run import SoakResult
from benchmarks.serving.soak.samples import Held, Sample

_COLOURS = {
    "worker": "#4477aa", "ingress": "#ee6677", "controller": "#228833", "proxy": "#ccbb44",
    "engine": "#66ccee", "raylet": "#aa3377", "gcs": "#bbbbbb", "other": "#888888",
}  # fmt: skip


def draw(result: SoakResult, path: Path, title: str) -> Path:
    """Draw it into `path`; returns that."""
    # Half a second to import: only where it is used, or every command would wait for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained")
    rss, fds, index, reserved = figure.subplots(4, 1, sharex=True)
    _processes(rss, result.samples, lambda held: held.rss_bytes / 1e6)
    _processes(fds, result.samples, lambda held: float(held.fds))
    minutes = [s.t_s / 60 for s in result.samples]
    index.plot(minutes, [s.index_blocks for s in result.samples], color="black", lw=1)
    reserved.plot(minutes, [s.reservations for s in result.samples], color="black", lw=1)
    names = ("resident memory, MB", "descriptors", "index, blocks", "reservations")
    for axis, name in zip((rss, fds, index, reserved), names, strict=True):
        axis.set_ylabel(name)
        for at_s, _, _ in result.faults:
            axis.axvline(at_s / 60, color="#bbbbbb", lw=0.6, zorder=0)
    reserved.set_xlabel("minutes of load; grey lines: faults")
    # Below the picture, where no line is: every process has a line in the first one.
    handles, roles = rss.get_legend_handles_labels()
    figure.legend(handles, roles, fontsize=8, ncol=len(roles), loc="outside lower center")
    figure.suptitle(title, fontsize=10)
    FigureCanvasAgg(figure).print_png(path)
    return path


def _processes(axis: Any, samples: Sequence[Sample], value: Callable[[Held], float]) -> None:
    shown: set[str] = set()
    for pid in sorted({pid for sample in samples for pid in sample.processes}):
        there = [(s.t_s / 60, s.processes[pid]) for s in samples if pid in s.processes]
        role = there[-1][1].role
        axis.plot(
            [t for t, _ in there], [value(held) for _, held in there], lw=0.9,
            color=_COLOURS.get(role, "#888888"), label=role if role not in shown else None,
        )  # fmt: skip
        shown.add(role)
