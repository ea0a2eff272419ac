"""`kappa bench scheduler`: scheduling policies against each other, on real vLLM or simulated.

On vLLM the engines of all policies of a setting are started first and then take turns, run by run,
so that whatever else the machine does hits all alike.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness import (
    Json,
    append_line,
    publish,
    result,
    save_json,
    table,
    usage_errors,
)
from benchmarks.scheduling import mix, report

Row = dict[str, Any]


def scheduler(
    backend: Annotated[str, typer.Option(help="vllm or simulator.")] = "vllm",
    policies: Annotated[
        str, typer.Option(help=f"With commas, of {', '.join(mix.POLICIES)}.")
    ] = "fcfs,fcfs_link,cap1,greedy,fair",
    workloads: Annotated[
        str, typer.Option(help=f"With commas, of {', '.join(mix.WORKLOADS)}.")
    ] = "mixed",
    links: Annotated[
        str, typer.Option(help=f"The link's speed; with commas, of {', '.join(mix.LINKS)}.")
    ] = "x1",
    stores: Annotated[
        str,
        typer.Option(help="free: a link each way; shared: one for loads and stores; with commas."),
    ] = "free,shared",
    runs: Annotated[int, typer.Option(min=1, help="Runs of each policy and setting.")] = 5,
    dilation: Annotated[
        float, typer.Option(min=0.1, help="Wall seconds per emulated second (vllm).")
    ] = 2.0,
    out: Annotated[Path | None, typer.Option(help="Directory for every run's row.")] = None,
    json_output: Json = False,
) -> None:
    """Policies on fixed workloads: TTFT by kind, makespan, how full, how long and how fair."""
    names = tuple(policies.split(","))
    settings = [
        mix.Setting(workload, link, sharing)
        for workload in workloads.split(",")
        for link in links.split(",")
        for sharing in stores.split(",")
    ]
    with usage_errors():
        check(backend, names, settings)
    console = Console(stderr=True)
    rows, details = [], []
    for row, detail in _play(backend, names, settings, runs, dilation, console):
        rows.append(row)
        if detail is not None:
            details.append(detail)
        if out is not None:
            append_line(out / "runs.jsonl", {"row": row, "detail": detail})
    middle, spread = report.medians(rows)
    facts = result(
        rows=middle, spread=spread, details=report.medians(details)[0], runs=runs,
        dilation=dilation if backend == "vllm" else None,
    )  # fmt: skip
    if out is not None:
        save_json(facts, out / "scheduler.json")

    def show(console: Console) -> None:
        for setting in settings:
            console.print(_table(setting, middle, spread))

    publish(facts, show, json_output=json_output, remark="paced" if backend == "vllm" else "")


def check(backend: str, policies: tuple[str, ...], settings: list[mix.Setting]) -> None:
    """Raise ValueError, naming what is known, for a name that is not."""
    if backend not in ("vllm", "simulator"):
        raise ValueError(f"unknown backend {backend!r}: choose vllm or simulator")
    known = (*mix.POLICIES, "bare") if backend == "vllm" else mix.POLICIES
    for policy in policies:
        if policy not in known:
            raise ValueError(f"unknown policy {policy!r}: choose of {', '.join(known)}")
    for setting in settings:
        setting.check(tuple(mix.WORKLOADS))


Run = tuple[Row, Row | None]


def _play(
    backend: str,
    policies: tuple[str, ...],
    settings: list[mix.Setting],
    runs: int,
    dilation: float,
    console: Console,
) -> Iterator[Run]:
    if backend == "simulator":
        from benchmarks.scheduling.simulated import runs_of

        for setting in settings:
            for policy in policies:
                for row in runs_of(policy, setting, runs):
                    yield row, None
        return
    # Engines are ended on the way out, whatever the reason.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for number, setting in enumerate(settings, start=1):
        title = f"{setting.workload} {setting.link} {setting.stores} ({number}/{len(settings)})"
        with console.status(title) as status:
            turns = _Turns(setting, policies, dilation, runs, lambda t: status.update(t), title)
            yield from asyncio.run(turns.play())


@dataclass(slots=True)
class _Turns:
    """The engines of one setting, and their turns."""

    setting: mix.Setting
    policies: tuple[str, ...]
    dilation: float
    runs: int
    progress: Callable[[str], None]
    title: str

    async def play(self) -> list[Run]:
        """All runs: every policy once before any twice."""
        from benchmarks.scheduling.vllm_runs import Engine

        played: list[Run] = []
        with ExitStack() as ended:
            engines = []
            for policy in self.policies:
                self.progress(f"{self.title}: starting {policy}")
                engine = Engine(policy, self.setting, self.dilation)
                ended.callback(engine.close)
                engines.append(engine)
            for run in range(self.runs):
                for engine in engines:
                    self.progress(f"{self.title}: run {run + 1} of {self.runs}, {engine.policy}")
                    one = await engine.play(run)
                    played.append(
                        (
                            report.row_of(engine.policy, self.setting, "vllm", one),
                            report.details_of(engine.policy, self.setting, one),
                        )
                    )
        return played


def _table(setting: mix.Setting, rows: list[Row], spread: list[Row]) -> Table:
    mine = [
        (row, around)
        for row, around in zip(rows, spread, strict=True)
        if all(row[key] == getattr(setting, key) for key in ("workload", "link", "stores"))
    ]
    kinds = dict.fromkeys(k for row, _ in mine for k, q in row["ttft_s"].items() if q["p50"])
    columns: list[tuple[str, tuple[str, ...]]] = [
        (f"{kind} {quantile}", ("ttft_s", kind, quantile))
        for kind in kinds
        for quantile in ("p50", "p99")
    ]
    columns += [(key.removesuffix("_s"), (key,)) for key in _SHOWN]
    return table(
        f"{setting.workload}, link {setting.link}, stores {setting.stores}",
        ("policy", *(name.replace("_", " ") for name, _ in columns)),
        [
            (row["policy"], *(_cell(row, around, path) for _, path in columns))
            for row, around in mine
        ],
    )


_SHOWN = (
    "makespan_s", "budget_fill", "vram_fill", "max_wait_s", "max_skips", "service_gap", "jain",
)  # fmt: skip


def _cell(row: Any, around: Any, path: tuple[str, ...]) -> str:
    """A median, and by how much the runs differ, in percent of it."""
    for key in path:
        row, around = row[key], around[key]
    if row is None:
        return "-"
    percent = 50.0 * (around[1] - around[0]) / row if row else 0.0
    return f"{row:.3g} ±{percent:.0f}%"
