"""`kappa bench soak`: mixed load with random faults, and what every process kept of it.

Starts a cluster of emulated engines behind the real Serve, ingress and router. Writes `soak.json`
(every sample) and `soak.png`. The exit code is 1 if a request was lost, a process grew, or
something was left behind.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.faults.started import EMULATED, started
from benchmarks.faults.target import FaultsError
from benchmarks.faults.traffic import Mix
from benchmarks.serving import soak as soaking
from benchmarks.serving.soak import MOST_MB_PER_HOUR, Held, Plan, Sample, SoakResult
from deploy.commands.provenance import Json, command, machine

_STEEPEST = 8
_COLOURS = {
    "worker": "#4477aa", "ingress": "#ee6677", "controller": "#228833", "proxy": "#ccbb44",
    "engine": "#66ccee", "raylet": "#aa3377", "gcs": "#bbbbbb", "other": "#888888",
}  # fmt: skip


def soak(
    minutes: Annotated[float, typer.Option(min=1.0, help="Of load.")] = 60.0,
    pause: Annotated[float, typer.Option(min=1.0, help="Mean seconds between faults.")] = 45.0,
    clients: Annotated[int, typer.Option(min=1, help="That ask at the same time.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of load and faults.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for soak.json and soak.png.")] = Path("soak"),
    json_output: Json = False,
) -> None:
    """Keep a cluster busy, hurt it at random, and see whether anything grows or is left."""
    console = Console(stderr=True, highlight=False)
    survivors: list[str] = []
    plan = Plan(minutes, pause, max(1.0, min(10.0, minutes)), seed)
    mix = Mix(clients=clients, words=200, pause_s=0.05)
    try:
        with tempfile.TemporaryDirectory(prefix="kappa-soak-") as folder:
            console.print("[dim]starting a cluster of emulated engines[/dim]")
            with started(Path(folder), EMULATED, survivors) as target:
                result = asyncio.run(soaking.soak(target, plan, mix, console.print))
    except FaultsError as error:
        console.print(f"[red]{error}[/red]")
        raise typer.Exit(1) from None
    kept = result.kept and not survivors
    report = {**_told(result), "survivors": survivors, "kept": kept}
    out.mkdir(parents=True, exist_ok=True)
    with_samples = {**report, "samples": [asdict(sample) for sample in result.samples]}
    (out / "soak.json").write_text(json.dumps(with_samples) + "\n", encoding="utf-8")
    draw(result, out / "soak.png", f"{minutes:g} minutes, {result.requests} requests, {machine()}")
    if json_output:
        print(json.dumps(report))
    else:
        _print(report)
    if not kept:
        raise typer.Exit(1)


def _told(result: SoakResult) -> dict[str, Any]:
    return {
        "command": command(), "machine": machine(), "seconds": result.seconds,
        "requests": result.requests, "lost": result.lost, "streams_cut": result.streams_cut,
        "streams_cut_untold": result.streams_cut_untold, "faults": result.faults,
        "slopes": [{**asdict(slope), "kept": slope.kept} for slope in result.slopes],
        "left_behind": result.left_behind,
    }  # fmt: skip


def _print(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(
        f"{report['requests']} requests in {report['seconds']:.0f} s, {len(report['faults'])} "
        f"faults: {report['lost']} lost, {report['streams_cut']} streams cut, "
        f"{report['streams_cut_untold']} of them without a word"
    )
    for slope in report["slopes"][:_STEEPEST]:
        console.print(
            f"  {slope['role']:<10} {slope['pid']:>7}  {slope['mb_per_hour']:+9.1f} MB/h, "
            f"at most {slope['upper_mb_per_hour']:+9.1f} (limit {MOST_MB_PER_HOUR:g})"
        )
    for line in (*report["left_behind"], *report["survivors"]):
        console.print(f"[red]  {line}[/red]")
    console.print("kept" if report["kept"] else "[red]not kept[/red]")


def draw(result: SoakResult, path: Path, title: str) -> Path:
    """Draw memory and descriptors of every process, index and reservations over time, as a PNG."""
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
