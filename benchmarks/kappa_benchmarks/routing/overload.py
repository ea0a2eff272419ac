"""`kappa bench overload`: how much of its peak goodput a simulated cluster keeps past saturation.

The same traffic at rising loads, with admission and without, on nodes that schedule by `fair`.
Goodput counts requests within their objective, since their first try; the peak is the best load of
the same column. Simulated, as by `kappa simulate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

from kappa.shapes import model_shape
from kappa_benchmarks.harness import (
    Column,
    Json,
    note,
    numbers,
    publish,
    result,
    rows_table,
    usage_errors,
)
from kappa_deploy.commands.console import Patience, RefusedClients
from kappa_router.policy import policy_named
from kappa_scheduler.catalogue import FAIR
from kappa_simulator.clusters import cluster_named, model_served
from kappa_simulator.run import SimulationConfig, capacity_of, simulate
from kappa_simulator.traffic import Clients, Retry
from kappa_workload.catalogue import workload_named

_MOST_LOAD = 1000.0
_SHOWN: dict[str, Column] = {
    "admission": lambda row: "on" if row["admission"] else "off", "load": "load:g",
    "rate /s": "rate_rps:.3g", "goodput /s": "goodput_rps:.3g", "of its peak": "of_peak:.0%",
    "admitted": "let_in:.0%", "met of those": "met_of_let_in:.0%", "tries": "tries:.2f",
}  # fmt: skip


def overload(
    trace: Annotated[str, typer.Option(help="A built-in workload or a trace file.")] = "azure",
    cluster: Annotated[
        str, typer.Option(help="mixed, small, uniform, these with -silicon, or a file.")
    ] = "small",
    policy: Annotated[str, typer.Option(help="Routing policy.")] = "priced",
    loads: Annotated[
        str, typer.Option(help="Fractions of the capacity bound, with commas.")
    ] = "0.6,0.8,1.0,3.0",
    retry: RefusedClients = "never",
    patience: Patience = math.inf,
    seconds: Annotated[float, typer.Option(min=1.0, help="Of arrivals, at each load.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    json_output: Json = False,
) -> None:
    """Goodput past saturation, with admission and without."""
    with usage_errors():
        chosen = numbers(loads, "--loads", _MOST_LOAD)
        policy_named(policy, seed=seed)
        where = cluster_named(cluster)
        config = SimulationConfig(
            cluster=where, workload=workload_named(trace),
            shape=model_shape(model_served(where)), policy=policy, load=chosen[0], seed=seed,
            scheduler=FAIR, clients=Clients(cast(Retry, retry), patience),
        )  # fmt: skip
    rows = measure(config, chosen, seconds)
    facts = result(
        trace=trace, cluster=cluster, policy=policy, seed=seed, seconds=seconds, retry=retry,
        patience_s=patience if patience < math.inf else None, rows=rows,
    )  # fmt: skip
    publish(
        facts, lambda console: console.print(rows_table("", _SHOWN, rows)), json_output=json_output
    )


def measure(
    config: SimulationConfig, loads: Sequence[float], seconds: float
) -> list[dict[str, Any]]:
    """A row for each load, without admission and with it."""
    note("computing the capacity bound")
    capacity_rps = capacity_of(config)
    rows = []
    for admission in (False, True):
        column = []
        for load in loads:
            note(f"load {load:g}, {'with' if admission else 'without'} admission")
            requests = max(int(load * capacity_rps * seconds), 100)
            run = config.replaced(
                load=load, capacity_rps=capacity_rps, admission=admission, requests=requests
            )
            outcome = simulate(run)
            summary = outcome.summary()
            let_in, met = 1 - summary["rejected"] / summary["requests"], summary["slo"]["met"]
            column.append({
                "admission": admission, "load": summary["load"],
                "rate_rps": summary["rate_rps"], "goodput_rps": summary["goodput_rps"],
                "let_in": let_in, "met": met, "met_of_let_in": met / let_in if let_in else 0.0,
                "tries": 1 + outcome.refusals / requests,
            })  # fmt: skip
        peak_rps = max(row["goodput_rps"] for row in column)
        rows += [{**row, "of_peak": row["goodput_rps"] / max(peak_rps, 1e-9)} for row in column]
    return rows
