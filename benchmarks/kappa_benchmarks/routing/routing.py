"""`kappa bench routing`: policies against each other over a grid of simulated cells."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from kappa_benchmarks.harness import Json, publish, result, usage_errors
from kappa_benchmarks.routing import grid, report

_CLUSTERS = ("mixed", "small", "uniform")
_TRACES = ("narrativeqa", "mooncake", "sharegpt", "miniswe", "azure")
_LOADS = (0.5, 0.8, 0.95, 1.2)
_OUR_POLICY = "priced"


def _kinds(
    cold: bool | None, misprofile: bool, failures: bool, admission: bool
) -> list[tuple[bool, str, bool]]:
    """Warm caches or cold, what goes wrong, whether late requests are rejected: of each cell; warm
    beside the plain ones."""
    kinds = [(warm, "none", False) for warm in ((True, False) if cold is None else (not cold,))]
    kinds += [(True, "misprofile", False)] * misprofile + [(True, "failure", False)] * failures
    return kinds + [(True, "none", True)] * admission


def routing(
    out: Annotated[Path, typer.Option(help="Directory for the rows.")],
    trace: Annotated[
        list[str] | None, typer.Option(help="Workload by name or file; repeat for several.")
    ] = None,
    cluster: Annotated[
        list[str] | None, typer.Option(help="Cluster by name or file; repeat for several.")
    ] = None,
    load: Annotated[
        list[float] | None,
        typer.Option(min=0.01, help="Fraction of the capacity bound; repeat for several."),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help="Separated by commas, parameters after a colon: "
            "priced,ttft,dynamo:host_credit=0.5. Separate with semicolons where one has several."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds, from 0 on.")] = 5,
    requests: grid.Requests = 25_000,
    cold: Annotated[
        bool | None,
        typer.Option("--cold/--warm", help="Caches at the start. Default: both, a cell each."),
    ] = None,
    misprofile: Annotated[
        bool, typer.Option(help="Also cells where a third of the nodes is misprofiled by 3.")
    ] = False,
    failures: Annotated[bool, typer.Option(help="Also cells where nodes fail.")] = False,
    admission: Annotated[
        bool, typer.Option(help="Also cells where requests that would be late are rejected.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Model that the nodes serve. Default: their tables', or llama-3.1-8b."),
    ] = None,
    scheduler: Annotated[str, typer.Option(help="Scheduler of the nodes.")] = "fcfs",
    jobs: grid.Jobs = None,
    only_report: Annotated[
        bool, typer.Option("--report", help="Run nothing: tables of the rows in the directory.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Policies over clusters, traces and loads. Goes on where it was stopped."""
    kinds = _kinds(cold, misprofile, failures, admission)
    points = product(cluster or _CLUSTERS, trace or _TRACES, load or _LOADS)
    names = grid.policies_of(policies)
    try:
        with usage_errors():
            if only_report:
                rows = grid.reported_rows(out)
            else:
                cells = [grid.Cell(*point, *kind) for point, kind in product(points, kinds)]
                settings = grid.Settings(requests, model or "", scheduler)
                grid.check(cells, names, settings)
                made = grid.Grid(out, settings, jobs or os.cpu_count() or 1, grid.show_progress)
                rows = made.run(cells, names, seeds)
    except KeyboardInterrupt:
        typer.echo(f"stopped; the same command goes on from {out / 'rows.jsonl'}", err=True)
        raise typer.Exit(130) from None
    facts = result(rows=rows, **report.summary(rows, _OUR_POLICY, grid.OURS))
    publish(facts, lambda console: report.show(facts, console), json_output=json_output)
