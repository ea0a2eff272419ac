"""`kappa bench scheduler`: scheduling policies against each other, on real vLLM or simulated.

On vLLM the engines of all policies of a setting are started first and then take turns, run by run,
so that whatever else the machine does hits all alike.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kappa_benchmarks.harness import (
    Json,
    append_line,
    names,
    note,
    publish,
    result,
    table,
    usage_errors,
)
from kappa_benchmarks.scheduling import mix, report
from kappa_benchmarks.scheduling.report import Row
from kappa_benchmarks.serving.settings import ModelName, Unpaced, bench_model, bench_settings

_SHOWN = (
    "makespan_s", "iterations", "iteration_tokens", "budget_fill", "vram_fill", "link_use",
    "max_wait_s", "max_skips", "service_gap", "jain",
)  # fmt: skip


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
    model: ModelName = None,
    unpaced: Unpaced = False,
    out: Annotated[Path | None, typer.Option(help="Directory for every run's row.")] = None,
    json_output: Json = False,
) -> None:
    """Policies on fixed workloads: TTFT by kind, makespan, how full, how long and how fair.

    Unpaced, seconds are those of the engine over how much longer its full step takes than the
    emulated one; --link and --stores then say nothing.
    """
    with usage_errors():
        (chosen,) = names(backend, ("vllm", "simulator"), "--backend")
        # "bare": vLLM's own scheduler class, without even our measuring.
        known = (*mix.POLICIES, "bare") if chosen == "vllm" else mix.POLICIES
        rules = names(policies, known, "--policies")
        points = product(
            names(workloads, mix.WORKLOADS, "--workloads"),
            names(links, mix.LINKS, "--links"),
            names(stores, mix.STORES, "--stores"),
        )
    settings = [mix.Setting(*point) for point in points]
    rows, details = [], []
    how = None if chosen == "simulator" else _serving(model, unpaced, dilation)
    for row, detail in _played(rules, settings, runs, how):
        rows.append(row)
        details += [detail] if detail is not None else []
        if out is not None:
            append_line(out / "runs.jsonl", {"row": row, "detail": detail})
    middle, spread = report.medians(rows)
    facts = result(
        rows=middle, spread=spread, details=report.medians(details)[0], runs=runs,
        dilation=dilation if chosen == "vllm" and not unpaced else None, model=model,
        paced=chosen == "vllm" and not unpaced,
    )  # fmt: skip

    def show(console: Console) -> None:
        for setting in settings:
            console.print(_table(setting, middle, spread))

    file, remark = out and out / "scheduler.json", "paced" if facts["paced"] else ""
    publish(facts, show, json_output=json_output, out=file, remark=remark)


def _serving(model: str | None, unpaced: bool, dilation: float) -> tuple[str | None, bool, float]:
    """Fields of a `Serving`."""
    source = model and bench_model(bench_settings(None, model, unpaced)).source
    return source, not unpaced, 0.0 if unpaced else dilation


def _played(
    rules: Sequence[str], settings: Sequence[mix.Setting], runs: int,
    how: tuple[str | None, bool, float] | None,
) -> Iterator[tuple[Row, Row | None]]:  # fmt: skip
    """A row of every run, on vLLM with its details; `how`: fields of a `Serving`, or simulate."""
    if how is None:
        from kappa_benchmarks.scheduling.simulated import runs_of

        for setting, rule in product(settings, rules):
            for row in runs_of(rule, setting, runs):
                yield row, None
        return
    # Engines are ended on the way out, whatever the reason.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for setting in settings:
        note(f"{setting.workload} {setting.link} {setting.stores}")
        yield from asyncio.run(_turns(setting, rules, runs, how))


async def _turns(
    setting: mix.Setting, rules: Sequence[str], runs: int, how: tuple[str | None, bool, float]
) -> list[tuple[Row, Row]]:
    """All runs of a setting on vLLM: every policy once before any twice."""
    from kappa_benchmarks.scheduling.vllm_runs import Engine, Serving

    found, serving = [], Serving(*how)
    with ExitStack() as ended:
        engines = []
        for rule in rules:
            note(f"starting {rule}")
            engines.append(Engine(rule, setting, serving))
            ended.callback(engines[-1].close)
        if not serving.paced:
            # One for all: they are to play the same times.
            dilation = await engines[0].measured_dilation()
            note(f"an emulated second is {dilation:.2f} real ones")
            for engine in engines:
                engine.dilation = dilation
        for run, engine in product(range(runs), engines):
            note(f"run {run + 1} of {runs}, {engine.policy}")
            played = await engine.play(run)
            row = report.row_of(engine.policy, setting, "vllm", played)
            found.append((row, report.details_of(engine.policy, setting, played)))
    return found


def _table(setting: mix.Setting, rows: list[Row], spread: list[Row]) -> Table:
    mine = [
        (row, around)
        for row, around in zip(rows, spread, strict=True)
        if all(row[key] == getattr(setting, key) for key in ("workload", "link", "stores"))
    ]
    kinds = dict.fromkeys(k for row, _ in mine for k, q in row["ttft_s"].items() if q["p50"])
    paths: list[tuple[str, ...]] = [("ttft_s", *pair) for pair in product(kinds, ("p50", "p99"))]
    paths += [(key,) for key in _SHOWN]

    def cell(row: Any, around: Any, path: tuple[str, ...]) -> str:
        """A median, and half the range of the runs in percent."""
        for key in path:
            row, around = row[key], around[key]
        if row is None:
            return "-"
        percent = 50.0 * (around[1] - around[0]) / row if row else 0.0
        return f"{row:.3g} ±{percent:.0f}%"

    titles = (" ".join(path[-2:]).removesuffix("_s").replace("_", " ") for path in paths)
    lines = [(row["policy"], *(cell(row, around, path) for path in paths)) for row, around in mine]
    title = f"{setting.workload}, link {setting.link}, stores {setting.stores}"
    return table(title, ("policy", *titles), lines)
