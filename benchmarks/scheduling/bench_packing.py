"""`kappa bench packing`: how well iterations are filled, against the optimum, and how fast."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.harness import Json, publish, result


def packing(
    instances: Annotated[int, typer.Option(min=1, help="Random iterations a dimension.")] = 10_000,
    repeats: Annotated[int, typer.Option(min=1, help="Decisions timed in each case.")] = 300,
    seed: Annotated[int, typer.Option(help="Seed of the instances.")] = 0,
    json_output: Json = False,
) -> None:
    """Fill of an iteration's budget as a share of the optimum; milliseconds of a decision."""
    # scipy and the scheduler: only when they are wanted.
    from benchmarks.scheduling.packing import decision, shares

    fills = [
        {"dimensions": resources + 1, "instances": instances}
        | asdict(shares(instances, resources, seed))
        for resources in (1, 2)
    ]
    decisions = [
        {"waiting": waiting, "tenants": tenants, "case": "vram binds" if binds else "typical"}
        | asdict(decision(waiting, tenants, binds, repeats, seed))
        for waiting in (256, 4096)
        for tenants in (1, 8)
        for binds in (True, False)
    ]
    facts = result(fill=fills, decision=decisions, seed=seed, repeats=repeats)

    def show(console: Console) -> None:
        for row in fills:
            console.print(
                f"{row['dimensions']} dimensions, {row['instances']} instances: {row['mean']:.4f} "
                f"of the optimum, 1st percentile {row['p1']:.4f}, least {row['least']:.4f}; "
                f"{row['choice_us']:.0f} us a choice",
                highlight=False,
            )
        for row in decisions:
            console.print(
                f"{row['waiting']} waiting of {row['tenants']} tenants, {row['case']}: median "
                f"{row['median_ms']:.2f} ms, p99 {row['p99_ms']:.2f} ms",
                highlight=False,
            )

    publish(facts, show, json_output=json_output)
