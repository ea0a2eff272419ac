"""`kappa bench regret`: policies against a plan made in hindsight, and against a lower bound."""

from __future__ import annotations

import json
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

from benchmarks.routing import grid
from benchmarks.routing.bench_routing import policy_names
from benchmarks.routing.regret import regret as regret_of
from deploy.commands.provenance import Json, command, machine
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
    try:
        grid.check(cells, names, grid.Settings(requests, model))
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    console = Console(stderr=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = []
    with ProcessPoolExecutor(jobs or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        instances = [
            pool.submit(_instance, cell, names, seed, requests, evaluations, seconds, model)
            for cell in cells
            for seed in range(seeds)
        ]
        for instance in instances:
            result = instance.result()
            results.append(result)
            _print_curve(console, result)
    if out is not None:
        for result in results:
            console.print(f"[dim]drew {_draw(result, out)}[/dim]", highlight=False)
    if json_output:
        facts = {"instances": results, "machine": machine(), "command": command()}
        print(json.dumps(facts))
        return
    for result in results:
        Console().print(_table(result))
    print(f"{command()}  on {machine()}")


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


def _print_curve(console: Console, result: dict[str, Any]) -> None:
    plan = result["clairvoyant"]
    console.print(
        f"[dim]{_title(result)}: best p99 after evaluations: "
        + ", ".join(f"{n}: {p99_s:.3g} s" for n, p99_s in plan["curve"])
        + f" (of {plan['evaluations']}, {result['seconds']:.0f} s)[/dim]",
        highlight=False,
    )


def _title(result: dict[str, Any]) -> str:
    caches = "warm" if result["warm"] else "cold"
    return (
        f"{result['cluster']} {result['trace']} {result['load']:g} {caches}, "
        f"seed {result['seed']}, {result['requests']} requests"
    )


def _table(result: dict[str, Any]) -> Table:
    plan = result["clairvoyant"]
    reference = (
        f"plan from {plan['start']}: p99 {plan['ttft_s']['p99']:.3g} s"
        if plan["beats_all"]
        else "no plan beat every policy"
    )
    table = Table(title=f"{_title(result)}; {reference}")
    for column in ("policy", "p50 s", "p99 s", "p99 / plan", "p99 / bound", "mean / bound"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in sorted(result["rows"], key=lambda row: row["ttft_s"]["p99"] or float("inf")):
        shown = (
            row["ttft_s"]["p50"], row["ttft_s"]["p99"], row["regret_plan"], row["regret_bound"],
            row["regret_bound_mean"],
        )  # fmt: skip
        table.add_row(row["policy"], *("-" if v is None else f"{v:.3g}" for v in shown))
    return table


def _draw(result: dict[str, Any], directory: Path) -> Path:
    from benchmarks.routing.plots import draw_regret

    plan = result["clairvoyant"]["beats_all"]
    key = "regret_plan" if plan else "regret_bound"
    rows = [
        {"policy": row["policy"], "regret": row[key]}
        for row in result["rows"]
        if row[key] is not None
    ]
    caches = "warm" if result["warm"] else "cold"
    name = "_".join(
        (result["cluster"], result["trace"], f"{result['load']:g}", caches, f"s{result['seed']}")
    )
    title = f"{_title(result)}\nreference: {'plan in hindsight' if plan else 'lower bound'}"
    return draw_regret(rows, directory / f"regret_{name}.png", title)
