"""`kappa bench regret`: policies against the best plan that a search in hindsight finds.

One short instance without noise and without admission. Every policy plays it; then
`benchmarks.routing.hindsight` looks for a better plan. If it does not beat every policy there is no
reference plan, and no regret is given.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Json, note, publish, result, table, usage_errors
from benchmarks.routing.hindsight import Plan, Search, p99_s
from kappa.shapes import model_shape
from router.policies import policy_named
from simulator.clusters import cluster_named
from simulator.faults import Faults
from simulator.outcome import RequestRecords, spread
from simulator.run import SimulationConfig, simulate, traffic_of
from workload.catalogue import workload_named


def regret(
    trace: Annotated[str, typer.Option(help="Workload by name or file.")] = "miniswe",
    cluster: Annotated[str, typer.Option(help="Cluster by name or file.")] = "small",
    load: Annotated[float, typer.Option(min=0.01, help="Fraction of the capacity bound.")] = 0.5,
    policies: Annotated[str, typer.Option(help="With commas.")] = "priced,ttft,llm_d,sticky",
    seeds: Annotated[int, typer.Option(min=1, help="Instances, a seed each.")] = 1,
    requests: Annotated[int, typer.Option(min=10, help="Requests of an instance.")] = 1000,
    evaluations: Annotated[
        int, typer.Option(min=1, help="Budget of the search: instances played.")
    ] = 2000,
    cold: Annotated[bool, typer.Option("--cold/--warm", help="Caches at the start.")] = False,
    model: Annotated[str, typer.Option(help="Model that the nodes serve.")] = "llama-3.1-8b",
    json_output: Json = False,
) -> None:
    """Policies against the best plan that a search in hindsight finds."""
    names = policies.split(",")
    instances = []
    with usage_errors():
        for name in names:
            policy_named(name)
        for seed in range(seeds):
            config = SimulationConfig(
                cluster=cluster_named(cluster), workload=workload_named(trace),
                shape=model_shape(model), load=load, requests=requests, seed=seed, warm=not cold,
            )  # fmt: skip
            instances.append(instance(config, names, evaluations))
            note(f"{_title(instances[-1])}: (evaluations, p99 s) {instances[-1]['plan']['curve']}")

    def show(console: Console) -> None:
        for one in instances:
            console.print(_table(one))

    publish(result(instances=instances), show, json_output=json_output)


def instance(config: SimulationConfig, policies: Sequence[str], evaluations: int) -> dict[str, Any]:
    """Play all policies and search for a better plan; `regret_plan` is a ratio of p99 TTFTs.

    Args:
        config: the instance; its policy and its faults are not used, and nothing is rejected.
        policies: that are compared.
        evaluations: budget of the search, in runs.
    """
    config = replace(config, faults=Faults(noise_sigma=0.0), admission=None)
    traffic = traffic_of(config)

    def evaluate(plan: Plan) -> RequestRecords:
        return simulate(config, traffic=traffic, assignment=plan.tolist()).records

    played = {
        name: simulate(replace(config, policy=name), traffic=traffic).records for name in policies
    }
    search = Search(evaluate, len(config.cluster.nodes), random.Random(config.seed), evaluations)
    best = search.run({name: records.node for name, records in played.items()})
    plan_s = p99_s(best.records)
    beats_all = all(plan_s < p99_s(records) for records in played.values())
    return {
        "cluster": config.cluster.name, "trace": config.workload.name, "load": config.load,
        "seed": config.seed, "requests": config.requests, "warm": config.warm,
        "plan": {
            "beats_all": beats_all, "start": best.start, "evaluations": search.used,
            "ttft_s": spread(best.records.ttft_s[best.records.measured]), "curve": search.curve,
        },
        "rows": [
            {
                "policy": name,
                "ttft_s": spread(records.ttft_s[records.measured]),
                "regret_plan": p99_s(records) / plan_s if beats_all else None,
            }
            for name, records in played.items()
        ],
    }  # fmt: skip


def _title(found: dict[str, Any]) -> str:
    caches = "warm" if found["warm"] else "cold"
    return f"{found['cluster']} {found['trace']} {found['load']:g} {caches}, seed {found['seed']}"


def _table(found: dict[str, Any]) -> Table:
    plan = found["plan"]
    reference = f"plan from {plan['start']}: p99 {plan['ttft_s']['p99']:.3g} s"
    if not plan["beats_all"]:
        reference = "no plan beat every policy"
    rows = [
        (row["policy"], *("-" if value is None else f"{value:.3g}" for value in figures))
        for row in found["rows"]
        for figures in [(row["ttft_s"]["p50"], row["ttft_s"]["p99"], row["regret_plan"])]
    ]
    return table(f"{_title(found)}; {reference}", ("policy", "p50 s", "p99 s", "p99 / plan"), rows)
