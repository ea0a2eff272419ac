"""`kappa bench capacity`: the highest request rate at which enough requests meet the objective.

Of a policy, on a simulated cluster and a trace: a search over a ladder of loads, by the mean of the
seeds, that starts where the first policy's ended. The ladder and the seeds are the same for all
policies, and each rung is the same sessions nearer together. A request meets the objective
(`kappa.slo`) if its TTFT and its TPOT do.
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
from rich.console import Console

from kappa_benchmarks.harness import Column, Json, note, publish, result, rows_table, usage_errors
from kappa_benchmarks.routing import grid
from kappa_benchmarks.routing.grid import Row

US, FETCHING = "priced", "priced_fetch"
# Loads from 0.0084 of the capacity bound to 1.28 times it: eight bisections settle one of them, and
# about five runs from near it.
_STEP = 1.02
_ROUNDS = 8
_RUNGS = 2**_ROUNDS - 1
_MOST_LOAD = 1.28

Key = tuple[str, str, str]
"""Cluster, trace, policy."""
Each = tuple[grid.Cell, str]
"""The same, of the lowest rung."""


def load_of(rung: int) -> float:
    """Share of the capacity bound at a rung, from 0 on."""
    return _MOST_LOAD * _STEP ** (rung - _RUNGS + 1)


@dataclass(slots=True)
class Search:
    """A search for the last rung that holds; `held` and `failed` enclose the unknown rungs.

    From `near`, if given, in steps of 4, 16, 64 until the crossing is enclosed; then bisection.
    It finds one crossing: attainment that rises again at a higher rate is not looked for.
    """

    near: int | None = None
    held: int = -1
    failed: int = _RUNGS
    step: int = 4

    def rung(self) -> int | None:
        """The rung to try next; None where the last that holds is known."""
        if self.failed - self.held == 1:
            return None
        below, above = self.held < 0, self.failed == _RUNGS
        if self.near is None or not (below or above):
            return (self.held + self.failed) // 2
        if below and above:
            return max(self.near, 0)
        step, self.step = self.step, 4 * self.step
        return min(self.held + step, _RUNGS - 1) if above else max(self.failed - step, 0)

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
        list[str] | None,
        typer.Option(help="mixed, small, uniform, these with -silicon, or a file; repeatable."),
    ] = None,
    policies: Annotated[
        str | None, typer.Option(help="As of `kappa bench routing`. Default: all of them.")
    ] = None,
    attainment: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of requests within the objective.")
    ] = 0.9,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds.")] = 3,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    requests: grid.Requests = 4_000,
    cold: Annotated[bool, typer.Option("--cold/--warm", help="Caches at the start.")] = False,
    jobs: grid.Jobs = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory that keeps finished runs, to go on there.")
    ] = None,
    json_output: Json = False,
) -> None:
    """The rate that each policy sustains within the objective. With --out, resumes."""
    places = tuple(product(cluster or ["mixed"], trace))
    chosen = grid.policies_of(policies)
    with usage_errors(), ExitStack() as stack:
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
        summary(place, policy, *found[(*place, policy)])
        for place, policy in product(places, chosen)
    ]
    facts = result(attainment=attainment, requests=requests, rows=rows, against=against(rows))
    publish(facts, lambda console: show(facts, console), json_output=json_output)


def search(
    runs: grid.Grid, cells: Sequence[grid.Cell], policies: Sequence[str], seeds: Sequence[int],
    attainment: float,
) -> dict[Key, tuple[list[Row], list[Row]]]:  # fmt: skip
    """By cell and policy: the runs, one a seed, at the last rung that holds and at the next;
    none beyond the ladder's ends.

    Where the first policy's search ends the other policies' begin.
    """
    done: dict[Each, Search] = {}
    tried: dict[tuple[Each, int], list[Row]] = {}
    runs.total = _ROUNDS * len(cells) * len(policies) * len(seeds)
    for wave in (policies[:1], policies[1:]):
        searches: dict[Each, Search] = {}
        for cell, policy in product(cells, wave):
            first = done.get((cell, policies[0]))
            searches[cell, policy] = Search(first.held if first else None)
        while open_ := {e: rung for e, one in searches.items() if (rung := one.rung()) is not None}:
            wanted = [
                grid.Run(replace(cell, load=load_of(rung)), policy, seed)
                for ((cell, policy), rung), seed in product(open_.items(), seeds)
            ]
            found = iter(runs.rows(wanted))
            for each, rung in open_.items():
                rows = tried[each, rung] = [next(found) for _ in seeds]
                met = float(np.mean([row["slo"]["met"] for row in rows]))
                searches[each].tried(rung, met >= attainment)
        done |= searches
    return {
        (each[0].cluster, each[0].trace, each[1]): (
            tried.get((each, one.held), []),
            tried.get((each, one.failed), []),
        )
        for each, one in done.items()
    }


def summary(place: tuple[str, str], policy: str, held: Sequence[Row], failed: Sequence[Row]) -> Row:
    """One row of the result.

    capacity_rps: the highest rate that held in the mean of the seeds (0: none did), high: the one
    that failed next. met: at the former, by seed, the share within the objective. missed: at the
    latter, which part of the objective how many requests missed.
    """
    slos = [row["slo"] for row in failed]
    missed = {
        part: float(np.mean([1 - slo[f"{part}_met"] for slo in slos])) if slos else None
        for part in ("ttft", "tpot")
    }
    return {
        "trace": place[1], "cluster": place[0], "policy": policy,
        "capacity_rps": _rate(held) or 0.0, "high": _rate(failed), "seeds": len(held or failed),
        "met": [row["slo"]["met"] for row in held], "missed": missed,
    }  # fmt: skip


def _rate(rows: Sequence[Row]) -> float | None:
    return float(rows[0]["rate_rps"]) if rows else None


def against(rows: Sequence[Row]) -> list[Row]:
    """Our capacity over that of the best policy that is not ours, each with the same nodes, and our
    policy and rule over the best of the others with the best other rule; the worst first."""
    places: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        places.setdefault((row["trace"], row["cluster"]), {})[row["policy"]] = row
    found = []
    for place, named in places.items():
        rules = sorted({grid.parted(name)[1] for name in named})
        for ours in rules:
            others = [rule for rule in rules if rule != ours]
            for theirs in ([ours], others if ours else []):
                if (one := _against(place, named, ours, theirs)) is not None:
                    found.append(one)
    return sorted(found, key=lambda one: one["ratio"])


def _against(
    place: tuple[str, str], named: Mapping[str, Row], ours: str, theirs: Sequence[str]
) -> Row | None:
    """Our policy on nodes with the one rule, the others on nodes with any of their rules."""
    peers = [
        row
        for name, row in named.items()
        if (parts := grid.parted(name))[0] not in (*grid.OURS, FETCHING) and parts[1] in theirs
    ]
    us = named.get(f"{US}@{ours}" if ours else US)
    if us is None or not peers:
        return None
    best = max(peers, key=lambda row: row["capacity_rps"])
    if min(us["capacity_rps"], best["capacity_rps"]) <= 0:
        return None
    return {
        "trace": place[0], "cluster": place[1], "policy": us["policy"], "peer": best["policy"],
        "ratio": us["capacity_rps"] / best["capacity_rps"],
    }  # fmt: skip


_SHOWN = {
    "trace": "trace", "cluster": "cluster", "policy": "policy", "capacity /s": "capacity_rps:.4g",
    "next": "high:.4g", "there: TTFT missed": "missed.ttft:.0%", "TPOT missed": "missed.tpot:.0%",
}  # fmt: skip
_AGAINST: dict[str, Column] = {
    "trace": "trace", "cluster": "cluster", "ours": lambda row: row.get("policy", US),
    "best peer": "peer", f"{US} / peer": "ratio:.2f",
}  # fmt: skip


def show(facts: Mapping[str, Any], console: Console) -> None:
    """Print a result: each policy's capacity, then ours over the best other."""
    rows = sorted(facts["rows"], key=lambda r: (r["trace"], r["cluster"], -r["capacity_rps"]))
    console.print(rows_table("", _SHOWN, rows, left=("cluster", "policy")))
    if facts["against"]:
        left = ("cluster", "ours", "best peer")
        console.print(rows_table("", _AGAINST, facts["against"], left))
