"""`kappa faults`: things that go wrong, done to clusters started for it; each passes or fails.

The real stack under load: Ray Serve, ingress, router, report streams, HTTP. Engines are emulated
where the catalogue says so, else vLLM's. One line per fault; the exit code is 1 if a promise was
broken.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from benchmarks.faults.bodies import CHAT, COMPLETION
from benchmarks.faults.catalogue import FAULTS, Fault, fault_named
from benchmarks.faults.fuzz import FuzzPlan
from benchmarks.faults.fuzz import fuzz as run_fuzz
from benchmarks.faults.isolation import KINDS, Row
from benchmarks.faults.isolation import isolation as run_isolation
from benchmarks.faults.started import CLOSED, SETTINGS, key_of, started
from benchmarks.faults.storm import Storm, open_streams, storm
from benchmarks.faults.target import FaultsError, Target
from benchmarks.faults.traffic import Mix
from benchmarks.faults.trial import try_faults
from benchmarks.harness import Json, command, machine, save_json, table

_MIXES = {"emulated": Mix(), "vllm": Mix(clients=4, documents=12, words=150, max_tokens=6)}
# vLLM engines as `kappa serve` starts them, but for the bound on answers, which must be awaited.
_HOSTILE = {"emulated": SETTINGS["emulated"], "vllm": "router: {request_timeout_s: 60}\n"}
_STREAMS = Mix(words=60, max_tokens=20, timeout_s=300.0)


def faults(
    only: Annotated[list[str] | None, typer.Argument(help="Names; default: all.")] = None,
    list_them: Annotated[bool, typer.Option("--list", help="Say what there is.")] = False,
    engine: Annotated[
        str | None, typer.Option(help="Those of emulated or of vllm clusters only.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of load and victims.")] = 0,
    storm_requests: Annotated[
        int, typer.Option(min=0, help="Instead: kill a worker every 20 s for so many requests.")
    ] = 0,
    storm_kills: Annotated[
        int, typer.Option(min=0, help="Instead: so many kills, each after recovery.")
    ] = 0,
    streams: Annotated[int, typer.Option(min=0, help="Instead: open so many streams at once.")] = 0,
    fuzz: Annotated[
        int, typer.Option(min=0, help="Instead: send so many requests that no client should send.")
    ] = 0,
    isolation: Annotated[
        float,
        typer.Option(
            min=0.0, help="Instead: a small request beside each kind of bad traffic, for so long."
        ),
    ] = 0.0,
    limit_s: Annotated[
        float, typer.Option(min=30.0, help="End the killing after so many seconds in any case.")
    ] = 3600.0,
    out: Annotated[Path | None, typer.Option(help="Folder for faults.json.")] = None,
    json_output: Json = False,
) -> None:
    """Inject faults into a cluster and report what its clients saw."""
    if list_them:
        _list(json_output)
        return
    kinds = _kinds(only) if isolation else ()
    try:
        chosen = [fault_named(name) for name in only] if only and not kinds else list(FAULTS)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if engine is not None and engine not in SETTINGS:
        raise typer.BadParameter(f"--engine is {engine!r}: choose one of {', '.join(SETTINGS)}")
    chosen = [fault for fault in chosen if engine in (None, fault.engine)]
    console = Console(stderr=True, highlight=False)
    report: dict[str, Any] = {"command": command(), "machine": machine(), "seed": seed}
    report |= {"engine": engine, "survivors": [], "kept": True}
    try:
        if fuzz or isolation:
            _hostile(report, engine or "emulated", fuzz, (isolation, kinds), console)
        if storm_requests or storm_kills or streams:
            plan = Storm(
                storm_requests or 1 << 30, storm_kills or 1 << 30, patient=bool(storm_kills),
                limit_s=limit_s,
            )  # fmt: skip
            storms = plan if storm_requests or storm_kills else None
            _long_runs(report, engine or "emulated", storms, streams, console)
        if not (fuzz or isolation or storm_requests or storm_kills or streams):
            _trials(report, chosen, seed, console)
    except FaultsError as error:
        console.print(f"[red]{error}[/red]")
        raise typer.Exit(1) from None
    if out is not None:
        save_json(report, out / "faults.json")
    if json_output:
        print(json.dumps(report))
    else:
        _show(report, Console(highlight=False))
    if not report["kept"]:
        raise typer.Exit(1)


@contextmanager
def _cluster(
    report: dict[str, Any], engine: str, console: Console, settings: str, operator: bool = False
) -> Iterator[Target]:
    """A cluster of these engines; what outlives it is noted in the report."""
    survivors: list[str] = []
    headers = key_of("operator") if operator else None
    with tempfile.TemporaryDirectory(prefix="kappa-faults-") as folder:
        console.print(f"[dim]starting a cluster of {engine} engines[/dim]")
        with started(Path(folder), settings, survivors, headers) as target:
            yield target
    report["survivors"] += survivors
    report["kept"] &= not survivors


def _trials(report: dict[str, Any], chosen: Sequence[Fault], seed: int, console: Console) -> None:
    report["verdicts"] = []
    for engine in SETTINGS:
        mine = [fault for fault in chosen if fault.engine == engine]
        if mine:
            with _cluster(report, engine, console, SETTINGS[engine]) as target:
                trial = try_faults(target, mine, _MIXES[engine], seed, console.print)
                report["verdicts"] += [verdict.to_dict() for verdict in asyncio.run(trial)]
    report["kept"] &= all(row["kept"] for row in report["verdicts"])


def _long_runs(
    report: dict[str, Any], engine: str, plan: Storm | None, streams: int, console: Console
) -> None:
    report["engine"] = engine
    with _cluster(report, engine, console, SETTINGS[engine]) as target:
        if streams:
            seen = asyncio.run(open_streams(target, streams, _STREAMS, 0))
            report["crowd"] = asdict(seen)
            report["kept"] &= not (seen.failed or seen.reservations)
            console.print(f"crowd: {report['crowd']}")
        if plan is not None:
            done = asyncio.run(storm(target, plan, _MIXES[engine], 0, console.print))
            report["storm"] = asdict(done)
            console.print(f"storm: {report['storm']}")
            fine = not (done.whole_lost or done.reservations or done.orphans)
            report["kept"] &= fine and not done.streams_cut_untold


def _hostile(
    report: dict[str, Any],
    engine: str,
    requests: int,
    isolation: tuple[float, Sequence[str]],
    console: Console,
) -> None:
    """Fuzz, then traffic of every kind, from one tenant beside another."""
    seconds, kinds = isolation
    report["engine"] = engine
    settings = _HOSTILE[engine] + CLOSED
    with _cluster(report, engine, console, settings, operator=True) as target:
        if requests:
            _fuzz(report, target, requests, console)
        if kinds:
            _isolation(report, target, seconds, kinds, console)


def _fuzz(report: dict[str, Any], target: Target, requests: int, console: Console) -> None:
    from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest

    schemas = {
        CHAT: ChatCompletionRequest.model_json_schema(),
        COMPLETION: CompletionRequest.model_json_schema(),
    }
    plan = FuzzPlan(requests, int(report["seed"]), schemas)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("fuzz", total=requests)
        sent = asyncio.run(
            run_fuzz(
                target, plan, key_of("hostile"), key_of("honest"), lambda: progress.advance(task)
            )
        )
    report["fuzz"] = sent.to_dict()
    report["summary"] = sent.summary()
    report["kept"] &= not sent.broken()


def _isolation(
    report: dict[str, Any], target: Target, seconds: float, kinds: Sequence[str], console: Console
) -> None:
    tenants = (key_of("hostile"), key_of("honest"))
    rows: list[Row] = asyncio.run(
        run_isolation(
            target, kinds, seconds, tenants, lambda name: console.print(f"[dim]beside {name}[/dim]")
        )
    )
    report["isolation"] = [row.to_dict() for row in rows]
    report["kept"] &= not any(row.broken() for row in rows)


def _kinds(only: Sequence[str] | None) -> Sequence[str]:
    strangers = sorted(set(only or ()) - set(KINDS))
    if strangers:
        raise typer.BadParameter(f"no traffic {strangers}: there are {', '.join(KINDS)}")
    return only or tuple(KINDS)


def _list(json_output: bool) -> None:
    if json_output:
        print(json.dumps([{"name": f.name, "title": f.title, "engine": f.engine} for f in FAULTS]))
        return
    for fault in FAULTS:
        print(f"{fault.name:<22} {fault.engine:<9} {fault.title}")


def _show(report: dict[str, Any], console: Console) -> None:
    if "verdicts" in report:
        columns = ("fault", "verdict", "requests", "lost", "first answer", "recovery")
        rows = [
            (
                row["fault"], "kept" if row["kept"] else "; ".join(row["failed"]),
                str(row["requests"]), str(row["lost"]), _seconds(row["first_answer_s"]),
                _seconds(row["recovery_s"])
                + (f" (start {row['start_s']:.1f})" if row["start_s"] else ""),
            )
            for row in report["verdicts"]
        ]  # fmt: skip
        title = f"seed {report['seed']} on {report['machine']}"
        console.print(table(title, columns, rows, left=("verdict",)))
    if "fuzz" in report:
        console.print("\n".join(_fuzz_lines(report)), markup=False, soft_wrap=True)
    if "isolation" in report:
        console.print(_isolation_table(report["isolation"]))
    for name in ("storm", "crowd"):
        if name in report:
            shown = {k: v for k, v in report[name].items() if k != "kills"}
            console.print(f"{name}: {shown}")
            for each in report[name].get("kills", ()):
                console.print(f"  {each}")
    for survivor in report["survivors"]:
        console.print(f"[red]outlived its cluster: {survivor}[/red]")


def _fuzz_lines(report: dict[str, Any]) -> list[str]:
    lines = [report["summary"], *report["fuzz"]["wrong"]]
    for slow, *beside in report["fuzz"]["slow"]:
        lines += [f"the honest client waited {slow}, beside:", *(f"  {each}" for each in beside)]
    for death in report["fuzz"]["deaths"]:
        lines += [f"{death['at_s']:.0f} s: {death['lost']} died", *death["suspects"]]
    return lines


def _isolation_table(found: Sequence[dict[str, Any]]) -> Table:
    rows = [
        (
            row["kind"], *(f"{row['ttft'][f'{name}_s']:.2f} s" for name in ("p50", "p90", "max")),
            f"{row['ratio']:.2f}", f"{row['tail_ratio']:.2f}",
            f"{sum(row['ttft']['failed'].values())}/{row['ttft']['requests']}",
            "broken" if row["broken"] else "kept",
        )
        for row in found
    ]  # fmt: skip
    columns = ("traffic", "p50", "p90", "max", "p50/fair", "p90/fair", "lost", "verdict")
    title = "time to first token of a small request beside another tenant's traffic"
    return table(title, columns, rows, left=("verdict",))


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


app = typer.Typer(add_completion=False)
app.command()(faults)
