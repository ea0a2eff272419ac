"""`kappa bench routing`: policies against each other over a grid of simulated cells."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.harness import Json, note, publish, result, usage_errors
from benchmarks.routing import grid, report

_CLUSTERS = ("mixed", "small", "uniform")
_TRACES = ("narrativeqa", "mooncake", "sharegpt", "miniswe", "azure")
_LOADS = (0.5, 0.8, 0.95, 1.2)
_US = "priced"


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
    requests: Annotated[
        int, typer.Option(min=10, help="Requests a run; the first fifth is not measured.")
    ] = 25_000,
    cold: Annotated[
        bool | None,
        typer.Option("--cold/--warm", help="Caches at the start. Default: both, a cell each."),
    ] = None,
    misprofile: Annotated[
        bool, typer.Option(help="Also cells where a third of the nodes is misprofiled by 3.")
    ] = False,
    failures: Annotated[bool, typer.Option(help="Also cells where nodes fail.")] = False,
    admission: Annotated[
        bool, typer.Option(help="Also cells where requests that would be late are refused.")
    ] = False,
    model: Annotated[str, typer.Option(help="Model that the nodes serve.")] = "llama-3.1-8b",
    scheduler: Annotated[str, typer.Option(help="Scheduler of the nodes.")] = "fcfs",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; one per core if not given.")
    ] = None,
    only_report: Annotated[
        bool, typer.Option("--report", help="Run nothing: tables of what is in the directory.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Policies over clusters, traces and loads. Goes on where it was stopped."""
    try:
        with usage_errors():
            if only_report:
                rows = reported_rows(out)
            else:
                warmth = (True, False) if cold is None else (not cold,)
                cells = grid.cells_of(
                    tuple(cluster or _CLUSTERS), tuple(trace or _TRACES), tuple(load or _LOADS),
                    warmth,
                    misprofile=misprofile, failures=failures, admission=admission,
                )  # fmt: skip
                settings = grid.Settings(requests, model, scheduler)
                names = policy_names(policies)
                grid.check(cells, names, settings)
                rows = grid.run_grid(
                    cells, names, seeds, grid.Store(out, settings), settings,
                    jobs=jobs or os.cpu_count() or 1, progress=_tell,
                )  # fmt: skip
                _remember(out, rows)
    except KeyboardInterrupt:
        typer.echo(f"stopped; the same command goes on from {out / 'rows.jsonl'}", err=True)
        raise typer.Exit(130) from None

    def show(console: Console) -> None:
        print(report.markdown(rows, _US, grid.OURS))

    facts = result(rows=rows, **report.summary(rows, _US, grid.OURS))
    publish(facts, show, json_output=json_output)


def reported_rows(out: Path) -> list[dict[str, Any]]:
    """Rows of the last finished grid in a directory, or of all that a grid under way has so far."""
    finished = {row["key"]: row for row in grid.read_rows(out / "rows.jsonl")}
    index = out / "grid.json"
    if not index.exists():
        return [
            {**row, "spec": row["policy"]}
            for key, row in finished.items()
            if key.startswith("run|")
        ]
    return [
        {**finished[key], "policy": policy, "spec": finished[key]["policy"]}
        for key, policy in json.loads(index.read_text(encoding="utf-8"))
        if key in finished
    ]


def _remember(out: Path, rows: list[dict[str, Any]]) -> None:
    """Which rows the grid that was asked for consists of; older ones may be in the file too."""
    asked = [[row["key"], row["policy"]] for row in rows]
    index = out / "grid.json"
    kept = json.loads(index.read_text(encoding="utf-8")) if index.exists() else []
    # A grid may be run in parts, a trace at a time; a part that is run anew replaces its rows.
    fresh = {_run_of(key, policy) for key, policy in asked}
    kept = [pair for pair in kept if _run_of(*pair) not in fresh]
    temporary = index.with_suffix(".part")
    temporary.write_text(json.dumps(kept + asked), encoding="utf-8")
    temporary.replace(index)


def _run_of(key: str, policy: str) -> tuple[str, ...]:
    """A run without what it was made with: kind, cell, policy, seed."""
    kind, cell, _, seed, _ = key.split("|")
    return (kind, cell, policy, seed)


def policy_names(text: str | None) -> tuple[str, ...]:
    """The policies of a command line; all of them if it names none."""
    if text is None:
        return grid.default_policies()
    separator = ";" if ";" in text else ","
    return tuple(part.strip() for part in text.split(separator) if part.strip())


def _tell(at: grid.Progress) -> None:
    left = "" if at.eta_s is None else f", {at.eta_s / 60:.1f} min left"
    note(f"{at.done}/{at.total}{left}: {at.last}")
