"""`kappa bench regret`: policies against a plan made in hindsight, and against a lower bound."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Json, note, publish, result, table, usage_errors
from benchmarks.routing import grid
from benchmarks.routing.bench_routing import policy_names
from benchmarks.routing.regret import regret as regret_of
from kappa.shapes import model_shape
from simulator.clusters import cluster_named
from simulator.run import SimulationConfig
from workload.catalogue import workload_named


def regret(
    trace: Annotated[list[str] | None, typer.Option(help="Workload by name or file.")] = None,
    cluster: Annotated[list[str] | None, typer.Option(help="Cluster by name or file.")] = None,
    load: Annotated[
        list[float] | None, typer.Option(min=0.01, help="Fraction of the capacity bound.")
    ] = None,
    policies: Annotated[str | None, typer.Option(help="As for `bench routing`.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Instances, a seed each.")] = 1,
    requests: Annotated[int, typer.Option(min=10, help="Requests of an instance.")] = 1000,
    evaluations: Annotated[
        int, typer.Option(min=1, help="Budget of the search: instances played.")
    ] = 2000,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, help="The search also ends after this; then it is not repeatable."),
    ] = None,
    cold: Annotated[bool, typer.Option("--cold/--warm", help="Caches at the start.")] = False,
    model: Annotated[str, typer.Option(help="Model that the nodes serve.")] = "llama-3.1-8b",
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; one per core.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for pictures.")] = None,
    json_output: Json = False,
) -> None:
    """Policies against the best plan that a search in hindsight finds, and a lower bound."""
    names = tuple(p for p in policy_names(policies) if p != grid.TUNED)
    cells = grid.cells_of(
        tuple(cluster or ("small",)), tuple(trace or ("narrativeqa", "miniswe")),
        tuple(load or (0.5, 0.8)), (not cold,),
    )  # fmt: skip
    with usage_errors():
        grid.check(cells, names, grid.Settings(requests, model))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = []
    with ProcessPoolExecutor(jobs or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        instances = [
            pool.submit(_instance, cell, names, seed, requests, evaluations, seconds, model)
            for cell in cells
            for seed in range(seeds)
        ]
        for instance in instances:
            results.append(instance.result())
            note(_curve(results[-1]))
    if out is not None:
        for one in results:
            note(f"drew {_draw(one, out)}")

    def show(console: Console) -> None:
        for one in results:
            console.print(_table(one))

    publish(result(instances=results), show, json_output=json_output)


def _instance(
    cell: grid.Cell,
    policies: Sequence[str],
    seed: int,
    requests: int,
    evaluations: int,
    seconds: float | None,
    model: str,
) -> dict[str, Any]:
    config = SimulationConfig(
        cluster=cluster_named(cell.cluster),
        workload=workload_named(cell.trace),
        shape=model_shape(model),
        load=cell.load,
        requests=requests,
        seed=seed,
        warm=cell.warm,
    )
    start_s = time.monotonic()
    found = regret_of(
        config, policies, evaluations=evaluations,
        may_go_on=lambda: seconds is None or time.monotonic() - start_s < seconds,
    )  # fmt: skip
    return {**found.summary(), "seconds": time.monotonic() - start_s}


def _curve(found: dict[str, Any]) -> str:
    plan = found["clairvoyant"]
    curve = ", ".join(f"{n}: {p99_s:.3g} s" for n, p99_s in plan["curve"])
    return (
        f"{_title(found)}: best p99 after evaluations: {curve} "
        f"(of {plan['evaluations']}, {found['seconds']:.0f} s)"
    )


def _title(found: dict[str, Any]) -> str:
    caches = "warm" if found["warm"] else "cold"
    return (
        f"{found['cluster']} {found['trace']} {found['load']:g} {caches}, "
        f"seed {found['seed']}, {found['requests']} requests"
    )


def _table(found: dict[str, Any]) -> Table:
    plan = found["clairvoyant"]
    reference = (
        f"plan from {plan['start']}: p99 {plan['ttft_s']['p99']:.3g} s"
        if plan["beats_all"]
        else "no plan beat every policy"
    )
    rows = [
        (row["policy"], *("-" if value is None else f"{value:.3g}" for value in _figures(row)))
        for row in sorted(found["rows"], key=lambda row: row["ttft_s"]["p99"] or float("inf"))
    ]
    columns = ("policy", "p50 s", "p99 s", "p99 / plan", "p99 / bound", "mean / bound")
    return table(f"{_title(found)}; {reference}", columns, rows)


def _figures(row: dict[str, Any]) -> tuple[float | None, ...]:
    return (
        row["ttft_s"]["p50"], row["ttft_s"]["p99"], row["regret_plan"], row["regret_bound"],
        row["regret_bound_mean"],
    )  # fmt: skip


def _draw(found: dict[str, Any], directory: Path) -> Path:
    from benchmarks.routing.plots import draw_regret

    plan = found["clairvoyant"]["beats_all"]
    key = "regret_plan" if plan else "regret_bound"
    rows = [
        {"policy": row["policy"], "regret": row[key]}
        for row in found["rows"]
        if row[key] is not None
    ]
    caches = "warm" if found["warm"] else "cold"
    name = "_".join(
        (found["cluster"], found["trace"], f"{found['load']:g}", caches, f"s{found['seed']}")
    )
    title = f"{_title(found)}\nreference: {'plan in hindsight' if plan else 'lower bound'}"
    return draw_regret(rows, directory / f"regret_{name}.png", title)
