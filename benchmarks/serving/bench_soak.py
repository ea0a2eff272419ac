"""`kappa bench soak`: mixed load with random faults, and what every process kept of it.

Starts a cluster of emulated engines behind the real Serve, ingress and router. Writes `soak.json`
(every sample) and `soak.png`. The exit code is 1 if a request was lost, a process grew, or
something was left behind.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.faults.started import EMULATED, started
from benchmarks.faults.target import FaultsError
from benchmarks.faults.traffic import Mix
from benchmarks.serving.soak.leaks import MOST_MB_PER_HOUR
from benchmarks.serving.soak.picture import draw
from benchmarks.serving.soak.run import Plan, SoakResult
from benchmarks.serving.soak.run import soak as run_soak
from deploy.commands.provenance import Json, command, machine

_STEEPEST = 8


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
                result = asyncio.run(run_soak(target, plan, mix, console.print))
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
