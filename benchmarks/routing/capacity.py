"""`kappa bench capacity`: the highest request rate at which enough requests meet the objective.

Of a policy, on a simulated cluster and a trace: bisection over a ladder of loads, each seed by
itself. The ladder and the seeds are the same for all policies, so that each rung is the same
arrivals. A request meets the objective (`kappa.slo`) if its TTFT and its TPOT do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.harness import (
    Json,
    finite,
    half_width,
    note,
    paired,
    publish,
    result,
    table,
    usage_errors,
)
from benchmarks.routing import grid
from benchmarks.routing.grid import Row

US = "priced"
# Loads from 0.0084 of the capacity bound to 1.28 times it: eight bisections settle one of them.
_STEP = 1.02
_ROUNDS = 8
_RUNGS = 2**_ROUNDS - 1
_MOST_LOAD = 1.28

Key = tuple[str, str, str, int]
"""Cluster, trace, policy, seed."""


def load_of(rung: int) -> float:
    """Share of the capacity bound at a rung, from 0 on."""
    return _MOST_LOAD * _STEP ** (rung - _RUNGS + 1)


@dataclass(slots=True)
class Search:
    """Bisection for the last rung that holds; `held` and `failed` enclose what is not known yet.

    It finds one crossing: attainment that rises again at a higher rate is not looked for.
    """

    held: int = -1
    failed: int = _RUNGS

    def rung(self) -> int | None:
        """The rung to try next; None where the last that holds is known."""
        return None if self.failed - self.held == 1 else (self.held + self.failed) // 2

    def tried(self, rung: int, holds: bool) -> None:
        if holds:
            self.held = rung
        else:
            self.failed = rung


def capacity(
    trace: Annotated[
        list[str], typer.Option(help="A built-in workload or a trace file; repeat for several.")
    ],
    cluster: Annotated[
        list[str] | None, typer.Option(help="mixed, small, uniform, or a file; repeat for several.")
    ] = None,
    policies: Annotated[
        str | None, typer.Option(help="As of `kappa bench routing`. Default: all of them.")
    ] = None,
    attainment: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of requests within the objective.")
    ] = 0.9,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds.")] = 3,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    requests: Annotated[
        int, typer.Option(min=10, help="Requests a run; the first fifth is not measured.")
    ] = 4_000,
    cold: Annotated[bool, typer.Option("--cold/--warm", help="Caches at the start.")] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; one per core if not given.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory that keeps finished runs, to go on there.")
    ] = None,
    json_output: Json = False,
) -> None:
    """The rate that each policy sustains within the objective. With --out, resumes."""
    places = tuple(product(cluster or ["mixed"], trace))
    chosen = grid.policies_of(policies)
    if policies is None:
        chosen = tuple(name for name in chosen if name != grid.TUNED)
    with usage_errors(), ExitStack() as stack:
        if grid.TUNED in chosen:
            raise ValueError(
                f"--policies: {grid.TUNED} is tuned for one load; give {grid.dynamo_with(0.5)}"
            )
        settings = grid.Settings(requests)
        cells = {place: grid.Cell(*place, load_of(0), not cold) for place in places}
        grid.check(cells.values(), chosen, settings)
        directory = out or Path(stack.enter_context(TemporaryDirectory()))
        runs = grid.Grid(directory, settings, jobs or os.cpu_count() or 1, grid.show_progress)
        seen = range(first_seed, first_seed + seeds)
        try:
            found = search(runs, list(cells.values()), chosen, seen, attainment)
        except KeyboardInterrupt:
            note(f"stopped; the same command goes on from {out}" if out else "stopped")
            raise typer.Exit(130) from None
    rows = [
        summary(place, policy, [found[(*place, policy, seed)] for seed in seen])
        for place, policy in product(places, chosen)
    ]  # fmt: skip
    facts = result(
        attainment=attainment, requests=requests, rows=rows, against=against(rows),
    )  # fmt: skip
    publish(facts, lambda console: show(facts, console), json_output=json_output)


def search(
    runs: grid.Grid, cells: Sequence[grid.Cell], policies: Sequence[str], seeds: Sequence[int],
    attainment: float,
) -> dict[Key, tuple[Row | None, Row | None]]:  # fmt: skip
    """Of each cell, policy and seed the run at the last rung that holds and at the next; None
    beyond the ladder's ends."""
    searches = {each: Search() for each in product(cells, policies, seeds)}
    tried: dict[tuple[grid.Cell, str, int], dict[int, Row]] = {each: {} for each in searches}
    runs.total = _ROUNDS * len(searches)
    while open_ := {each: at for each, one in searches.items() if (at := one.rung()) is not None}:
        wanted = [
            grid.Run(replace(cell, load=load_of(rung)), policy, seed)
            for (cell, policy, seed), rung in open_.items()
        ]
        for (each, rung), row in zip(open_.items(), runs.rows(wanted), strict=True):
            tried[each][rung] = row
            searches[each].tried(rung, row["slo"]["met"] >= attainment)
    return {
        (cell.cluster, cell.trace, policy, seed): (
            tried[cell, policy, seed].get(one.held), tried[cell, policy, seed].get(one.failed)
        )
        for (cell, policy, seed), one in searches.items()
    }  # fmt: skip


def summary(
    place: tuple[str, str], policy: str, ends: Sequence[tuple[Row | None, Row | None]]
) -> Row:
    """One row of the result.

    capacity_rps: mean over seeds of the highest rate that held (0 where none did); low, high: its
    95 % interval over seeds, widened at the top to the rate that failed next; of one seed these two
    rates. missed: at those next rates, which part of the objective how many requests missed.
    """
    held = [0.0 if row is None else float(row["rate_rps"]) for row, _ in ends]
    # Where nothing failed the ladder ended: the interval is open there.
    failed = [float("inf") if row is None else float(row["rate_rps"]) for _, row in ends]
    low, high = mean_interval(held)[0], mean_interval(failed)[1]
    beyond = [row["slo"] for _, row in ends if row is not None]
    missed = {
        part: float(np.mean([1 - slo[f"{part}_met"] for slo in beyond])) if beyond else None
        for part in ("ttft", "tpot")
    }
    return {
        "trace": place[1], "cluster": place[0], "policy": policy,
        "capacity_rps": float(np.mean(held)), "low": low, "high": finite(high), "seeds": len(ends),
        "by_seed_rps": held, "missed": missed,
    }  # fmt: skip


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean that cannot be below 0, Student's t; the value itself of one."""
    mean = float(np.mean(values))
    if len(values) < 2 or not np.isfinite(mean):
        return mean, mean
    half = half_width(values)
    return max(mean - half, 0.0), mean + half


def against(rows: Sequence[Row]) -> list[Row]:
    """Our capacity over the best other system's, paired by seed; the worst first."""
    places: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        places.setdefault((row["trace"], row["cluster"]), {})[row["policy"]] = row
    found = [one for place, named in places.items() if (one := _against(place, named)) is not None]
    return sorted(found, key=lambda one: one["ratio"])


def _against(place: tuple[str, str], named: Mapping[str, Row]) -> Row | None:
    peers = [row for name, row in named.items() if name not in grid.OURS]
    if US not in named or not peers:
        return None
    best = max(peers, key=lambda row: row["capacity_rps"])
    ours, theirs = named[US]["by_seed_rps"], best["by_seed_rps"]
    if min(*ours, *theirs) <= 0:
        return None
    ratio = paired(ours, theirs)
    return {
        "trace": place[0], "cluster": place[1], "peer": best["policy"], "ratio": ratio.mean,
        "low": finite(ratio.low), "high": finite(ratio.high), "seeds": ratio.count,
    }  # fmt: skip


def show(facts: Mapping[str, Any], console: Any) -> None:
    """Print a result: each policy's capacity, then ours over the best other system's."""
    rows, ratios = facts["rows"], facts["against"]
    shown = [
        (
            row["trace"], row["cluster"], row["policy"], f"{row['capacity_rps']:.4g}/s",
            f"{row['low']:.4g} to {_number(row['high'], '.4g')}",
            *(_number(row["missed"][part], ".0%") for part in ("ttft", "tpot")),
        )
        for row in sorted(rows, key=lambda r: (r["trace"], r["cluster"], -r["capacity_rps"]))
    ]  # fmt: skip
    columns = ("trace", "cluster", "policy", "capacity", "95 %", "next: TTFT missed", "TPOT missed")
    console.print(table("", columns, shown, left=("cluster", "policy")))
    compared = [
        (
            one["trace"], one["cluster"], one["peer"], f"{one['ratio']:.2f}",
            f"{_number(one['low'], '.2f')} to {_number(one['high'], '.2f')}",
        )
        for one in ratios
    ]  # fmt: skip
    if compared:
        heads = ("trace", "cluster", "best peer", f"{US} / peer", "95 %")
        console.print(table("", heads, compared, left=("cluster", "best peer")))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
