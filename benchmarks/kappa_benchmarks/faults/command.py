"""`kappa faults`: faults injected into clusters that it starts; each trial passes or fails.

The real stack under load: Ray Serve, decider, router, report streams, HTTP. Engines are emulated
where the catalogue says so, else vLLM's. One line per fault; the exit code is 1 if a guarantee was
violated.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from kappa_benchmarks.faults.bodies import CHAT, COMPLETION
from kappa_benchmarks.faults.catalogue import FAULTS, Fault, fault_named
from kappa_benchmarks.faults.cluster import CLOSED, SETTINGS, FaultsError, Target, key_of, started
from kappa_benchmarks.faults.fuzz import FuzzPlan
from kappa_benchmarks.faults.fuzz import fuzz as run_fuzz
from kappa_benchmarks.faults.isolation import KINDS
from kappa_benchmarks.faults.isolation import isolation as run_isolation
from kappa_benchmarks.faults.storm import KillPlan, kill_workers, open_streams
from kappa_benchmarks.faults.traffic import Mix
from kappa_benchmarks.faults.trial import try_faults
from kappa_benchmarks.harness import (
    Column,
    Json,
    names,
    publish,
    result,
    rows_table,
    usage_errors,
)

_MIXES = {"emulated": Mix(), "vllm": Mix(clients=4, documents=12, words=150, max_tokens=6)}
# vLLM engines as `kappa serve` starts them, but for the bound on answers, which must be awaited.
_HOSTILE = {"emulated": SETTINGS["emulated"], "vllm": "router: {request_timeout_s: 60}\n"}
_STREAMS = Mix(words=60, max_tokens=20, timeout_s=300.0)

Report = dict[str, Any]


def faults(
    only: Annotated[list[str] | None, typer.Argument(help="Names; default: all.")] = None,
    list_them: Annotated[bool, typer.Option("--list", help="Say what there is.")] = False,
    engine: Annotated[
        str | None, typer.Option(help="Those of emulated or of vllm clusters only.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of load and victims.")] = 0,
    storm_requests: Annotated[
        int,
        typer.Option(min=0, help="Instead: requests; meanwhile a worker is killed every 20 s."),
    ] = 0,
    storm_kills: Annotated[
        int, typer.Option(min=0, help="Instead: number of kills, each after recovery.")
    ] = 0,
    streams: Annotated[int, typer.Option(min=0, help="Instead: streams to open at once.")] = 0,
    fuzz: Annotated[
        int, typer.Option(min=0, help="Instead: number of requests that no client should send.")
    ] = 0,
    isolation: Annotated[
        float,
        typer.Option(
            min=0.0, help="Instead: a small request beside each kind of bad traffic, for so long."
        ),
    ] = 0.0,
    limit_s: Annotated[
        float, typer.Option(min=30.0, help="Seconds after which the killing ends in any case.")
    ] = 3600.0,
    out: Annotated[Path | None, typer.Option(help="Folder for faults.json.")] = None,
    json_output: Json = False,
) -> None:
    """Inject faults into a cluster and report what its clients saw."""
    if list_them:
        return _list(json_output)
    with usage_errors():
        kinds = names(",".join(only or KINDS), KINDS, "traffic") if isolation else ()
        chosen = [fault_named(name) for name in only] if only and not kinds else list(FAULTS)
        if engine is not None:
            names(engine, SETTINGS, "--engine")
    chosen = [fault for fault in chosen if engine in (None, fault.engine)]
    report: Report = {"seed": seed, "engine": engine, "survivors": [], "kept": True}
    runs = Runs(report, Console(stderr=True, highlight=False))
    killing = storm_requests or storm_kills
    try:
        if fuzz or isolation:
            runs.hostile(engine or "emulated", fuzz, isolation, kinds)
        if streams or killing:
            plan = KillPlan(storm_requests, storm_kills, limit_s) if killing else None
            runs.long(engine or "emulated", streams, plan)
        if not (fuzz or isolation or streams or killing):
            runs.trials(chosen)
    except FaultsError as error:
        runs.console.print(f"[red]{error}[/red]")
        raise typer.Exit(1) from None
    report = result(**report)
    file = out and out / "faults.json"
    publish(report, lambda console: show(report, console), json_output=json_output, out=file)
    if not report["kept"]:
        raise typer.Exit(1)


def _list(json_output: bool) -> None:
    rows = [{"name": f.name, "title": f.title, "engine": f.engine} for f in FAULTS]
    lines = [f"{f.name:<22} {f.engine:<9} {f.title}" for f in FAULTS]
    print(json.dumps(rows) if json_output else "\n".join(lines))


@dataclass(frozen=True, slots=True)
class Runs:
    """The trials on clusters; each adds its result to the report."""

    report: Report
    console: Console

    @contextmanager
    def _cluster(self, engine: str, settings: str, operator: bool = False) -> Iterator[Target]:
        """A cluster of these engines; what outlives it is noted in the report."""
        survivors: list[str] = []
        headers = key_of("operator") if operator else None
        with tempfile.TemporaryDirectory(prefix="kappa-faults-") as folder:
            self.console.print(f"[dim]starting a cluster of {engine} engines[/dim]")
            with started(Path(folder), settings, survivors, headers) as target:
                yield target
        self.report["survivors"] += survivors
        self.report["kept"] &= not survivors

    def trials(self, chosen: Sequence[Fault]) -> None:
        """Each fault, on a cluster of its engines."""
        report = self.report
        report["verdicts"] = []
        for engine, settings in SETTINGS.items():
            mine = [fault for fault in chosen if fault.engine == engine]
            if mine:
                with self._cluster(engine, settings) as target:
                    tried = try_faults(
                        target, mine, _MIXES[engine], report["seed"], self.console.print
                    )
                    report["verdicts"] += [one.to_dict() for one in asyncio.run(tried)]
        report["kept"] &= all(row["kept"] for row in report["verdicts"])

    def long(self, engine: str, streams: int, plan: KillPlan | None) -> None:
        """Many streams at once, then worker after worker killed."""
        report, console = self.report, self.console
        report["engine"] = engine
        with self._cluster(engine, SETTINGS[engine]) as target:
            if streams:
                seen = asyncio.run(open_streams(target, streams, _STREAMS, 0))
                report["crowd"] = asdict(seen)
                report["kept"] &= not (seen.failed or seen.reservations)
                console.print(f"streams: {report['crowd']}")
            if plan is not None:
                killing = kill_workers(target, plan, _MIXES[engine], 0, console.print)
                done = asyncio.run(killing)
                report["storm"] = asdict(done)
                console.print(f"killing: {report['storm']}")
                leaked = done.reservations or done.orphans
                report["kept"] &= not (done.whole_lost or done.streams_cut_untold or leaked)

    def hostile(self, engine: str, requests: int, seconds: float, kinds: Sequence[str]) -> None:
        """Fuzz, then traffic of every kind, from one tenant beside another."""
        report, console = self.report, self.console
        report["engine"] = engine
        with self._cluster(engine, _HOSTILE[engine] + CLOSED, operator=True) as target:
            if requests:
                self._fuzz(target, requests)
            if kinds:
                measuring = run_isolation(
                    target, kinds, seconds, lambda name: console.print(f"[dim]beside {name}[/dim]")
                )
                rows = asyncio.run(measuring)
                report["isolation"] = [row.to_dict() for row in rows]
                report["kept"] &= not any(row.broken() for row in rows)

    def _fuzz(self, target: Target, requests: int) -> None:
        from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest

        schemas = {
            CHAT: ChatCompletionRequest.model_json_schema(),
            COMPLETION: CompletionRequest.model_json_schema(),
        }
        plan = FuzzPlan(requests, int(self.report["seed"]), schemas)
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("fuzz", total=requests)
            sent = asyncio.run(run_fuzz(target, plan, lambda: progress.advance(task)))
        self.report["fuzz"] = sent.to_dict()
        self.report["summary"] = sent.summary()
        self.report["kept"] &= not sent.broken()


_VERDICTS: dict[str, Column] = {
    "fault": "fault", "verdict": lambda row: "kept" if row["kept"] else "; ".join(row["failed"]),
    "requests": "requests", "lost": "lost", "first answer": "first_answer_s:.2f",
    "recovery": "recovery_s:.2f", "its start": "start_s:.1f",
}  # fmt: skip
_BESIDE: dict[str, Column] = {
    "traffic": "kind", "p50": "ttft.p50_s:.2f", "p90": "ttft.p90_s:.2f", "max": "ttft.max_s:.2f",
    "p50/fair": "ratio:.2f", "p90/fair": "tail_ratio:.2f",
    "lost": lambda row: f"{sum(row['ttft']['failed'].values())}/{row['ttft']['requests']}",
    "verdict": lambda row: "broken" if row["broken"] else "kept",
}  # fmt: skip


def show(report: Report, console: Console) -> None:
    """Print every part that the report holds."""
    if "verdicts" in report:
        title = f"seed {report['seed']} on {report['machine']}; seconds"
        console.print(rows_table(title, _VERDICTS, report["verdicts"], left=("verdict",)))
    if "fuzz" in report:
        lines = [report["summary"], *report["fuzz"]["wrong"]]
        for slow, *beside in report["fuzz"]["slow"]:
            lines += [
                f"the honest client waited {slow}, beside:",
                *(f"  {each}" for each in beside),
            ]
        for death in report["fuzz"]["deaths"]:
            lines += [f"{death['at_s']:.0f} s: {death['lost']} died", *death["suspects"]]
        console.print("\n".join(lines), markup=False, soft_wrap=True)
    if "isolation" in report:
        title = "seconds to the first token of a small request beside another tenant's traffic"
        console.print(rows_table(title, _BESIDE, report["isolation"], left=("verdict",)))
    for key, name in (("storm", "killing"), ("crowd", "streams")):
        if key in report:
            shown = {k: v for k, v in report[key].items() if k != "kills"}
            console.print(f"{name}: {shown}")
            for each in report[key].get("kills", ()):
                console.print(f"  {each}")
    for survivor in report["survivors"]:
        console.print(f"[red]outlived its cluster: {survivor}[/red]")


app = typer.Typer(
    help="Inject faults into a cluster and report what its clients saw.", add_completion=False
)
app.command()(faults)
