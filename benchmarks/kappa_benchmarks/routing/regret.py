"""`kappa bench regret`: how many misses of the objective a policy could have avoided.

A local search that knows the whole trace. It starts from each policy's decisions, sends a few
requests elsewhere, simulates again, and keeps a plan that is no worse. It ends with a plan that
exists, not with the optimum, so the distance to it is a lower bound of what a policy could gain.
Where every start ends at about the same share, the search has converged.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from kappa_benchmarks.harness import Column, Json, note, publish, result, rows_table, usage_errors
from kappa_benchmarks.routing import grid
from kappa_benchmarks.routing.grid import Row
from kappa_simulator.faults import Faults
from kappa_simulator.outcome import Outcome
from kappa_simulator.run import simulate

Plan = NDArray[np.int64]
Evaluate = Callable[[Plan], Outcome]

_QUIET = Faults(noise_sigma=0.0)
# A miss counts 1. The lateness of a request counts less, so that the cost has a slope.
_LATENESS_WEIGHT = 0.05
_USE_WEIGHT = 0.01
_MOVES = (1, 1, 2, 4)
_BLOCKER_TOKENS = 200.0  # a prompt's weight as a blocker, beside the tokens that it computes


@dataclass(slots=True)
class Search:
    """Moves requests of a plan, one evaluation a trial.

    Args:
        evaluate: plays a plan, the node of each request.
        nodes: how many nodes there are.
        rng: for this search alone.
        patience: trials in a row without a lower cost, after which it has converged.

    `curve` holds (trials, share within the objective) at the start and of every improvement.
    """

    evaluate: Evaluate
    nodes: int
    rng: random.Random
    patience: int
    trials: int = 0
    converged: bool = False
    curve: list[tuple[int, float]] = field(default_factory=list)

    def run(self, plan: Sequence[int], trials: int) -> Outcome:
        """The best outcome of at most `trials` trials."""
        best = np.array(plan, dtype=np.int64)
        lost = (best < 0) | (best >= self.nodes)
        best[lost] = [self.rng.randrange(self.nodes) for _ in range(int(lost.sum()))]
        outcome = self.evaluate(best)
        least, since = cost(outcome), 0
        self.curve.append((0, met(outcome)))
        while self.trials < trials and self.nodes > 1 and not self.converged:
            moved = self._moved(best, outcome)
            self.trials += 1
            if moved is None:
                self.converged = True  # no request is late
                break
            found = self.evaluate(moved)
            new = cost(found)
            since = 0 if new < least else since + 1
            if new <= least:
                if met(found) > self.curve[-1][1]:
                    self.curve.append((self.trials, met(found)))
                best, outcome, least = moved, found, new
            self.converged = since >= self.patience
        return outcome

    def _moved(self, plan: Plan, outcome: Outcome) -> Plan | None:
        """The plan with some requests elsewhere: late ones, or those beside them; None if none is
        late."""
        records = outcome.records
        late = np.flatnonzero(use(outcome) > 1)
        if not len(late):
            return None
        plan = plan.copy()
        ends_s = records.arrival_s + records.e2e_s
        for _ in range(self.rng.choice(_MOVES)):
            moved = int(self.rng.choice(late))
            if self.rng.random() < 0.6:
                here = (plan == plan[moved]) & (records.arrival_s < ends_s[moved])
                beside = np.flatnonzero(here & (ends_s > records.arrival_s[moved]))
                if len(beside):
                    weights = records.new_tokens[beside] + _BLOCKER_TOKENS
                    (moved,) = self.rng.choices(beside.tolist(), weights.tolist())
            other = self.rng.randrange(self.nodes - 1)
            other += other >= plan[moved]
            if self.rng.random() < 0.5:
                plan[moved] = other
            else:
                # With it the later turns of its session, which find its cache.
                rest = np.arange(len(plan)) >= moved
                plan[rest & (records.session == records.session[moved])] = other
        return plan


def use(outcome: Outcome) -> NDArray[np.float64]:
    """Of each request, the seconds it took over those the objective allows: of TTFT or TPOT, the
    larger ratio."""
    records, limits = outcome.records, outcome.limits
    ttft = np.nan_to_num(records.ttft_s / limits.ttft_s, nan=np.inf)
    tpot = np.nan_to_num(records.tpot_s / limits.tpot_s)
    return np.maximum(ttft, tpot)


def met(outcome: Outcome) -> float:
    """The share of the measured requests within the objective."""
    return float(outcome.records.met[outcome.records.measured].mean())


def cost(outcome: Outcome) -> float:
    """The cost that the search reduces."""
    used = np.minimum(use(outcome)[outcome.records.measured], 1e6)
    late = np.clip(used - 1, 0, 1)
    return float(
        (used > 1).mean() + _LATENESS_WEIGHT * late.mean() + _USE_WEIGHT * np.log1p(used).mean()
    )


def regret(
    trace: Annotated[str, typer.Option(help="A built-in workload or a trace file.")] = "miniswe",
    cluster: Annotated[str, typer.Option(help="mixed, small, uniform, or a file.")] = "small",
    load: Annotated[float, typer.Option(min=0.01, help="Fraction of the capacity bound.")] = 0.5,
    policies: Annotated[
        str, typer.Option(help="As of `kappa bench routing`; a search starts from each.")
    ] = "priced;llm_d;ray_prefix;lmetric",
    requests: grid.Requests = 1_000,
    seeds: Annotated[int, typer.Option(min=1, help="Instances, a seed each.")] = 2,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    trials: Annotated[int, typer.Option(min=0, help="Runs of a search at most.")] = 3_000,
    patience: Annotated[
        int, typer.Option(min=1, help="Trials without gain, after which it has converged.")
    ] = 500,
    cold: Annotated[bool, typer.Option("--cold/--warm", help="Caches at the start.")] = False,
    jobs: grid.Jobs = None,
    json_output: Json = False,
) -> None:
    """The misses that a plan made in hindsight avoids, with every request known."""
    cell, settings = grid.Cell(cluster, trace, load, not cold), grid.Settings(requests)
    with usage_errors():
        chosen = grid.policies_of(policies)
        grid.check([cell], chosen, settings)
    tasks = [
        (cell, settings, policy, seed, trials, patience)
        for seed, policy in product(range(first_seed, first_seed + seeds), chosen)
    ]
    found: dict[tuple[Any, ...], Row] = {}
    many = min(jobs or os.cpu_count() or 1, len(tasks))
    for task, row in grid.in_processes(searched, tasks, many):
        found[task] = row
        note(f"{len(found)}/{len(tasks)}: {row['policy']}, seed {row['seed']}")
    rows = [found[task] for task in tasks]
    facts = result(
        trace=trace, cluster=cluster, load=load, warm=not cold, requests=requests, rows=rows,
        left=left(rows),
    )  # fmt: skip
    publish(facts, lambda console: show(facts, console), json_output=json_output)


def searched(
    cell: grid.Cell, settings: grid.Settings, policy: str, seed: int, trials: int, patience: int
) -> Row:
    """Play a policy, and search from its decisions."""
    traffic, config = grid.traffic_in(cell, seed, settings)
    name, rule = grid.parted(policy)
    config = replace(config, policy=name, faults=_QUIET, scheduler=rule or settings.scheduler)
    played = simulate(config, traffic=traffic)
    search = Search(
        lambda plan: simulate(config, traffic=traffic, assignment=plan.tolist()),
        len(config.cluster.nodes), random.Random(f"{seed} {policy}"), patience,
    )  # fmt: skip
    found = search.run(played.records.node.tolist(), trials)
    return {
        "policy": policy, "seed": seed, "rate_rps": traffic.rate_rps, "met": met(played),
        "plan_met": met(found), "trials": search.trials, "converged": search.converged,
        "curve": search.curve,
    }  # fmt: skip


def left(rows: Sequence[Row]) -> list[Row]:
    """By policy, means over seeds: the share within the objective, that of the best plan from any
    start, and of its misses those that the plan avoids (None: it missed none)."""
    best: dict[int, float] = {}
    for row in rows:
        best[row["seed"]] = max(best.get(row["seed"], 0.0), row["plan_met"])
    plan = float(np.mean(list(best.values())))
    found = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        share = float(np.mean([row["met"] for row in rows if row["policy"] == policy]))
        avoided = (plan - share) / (1 - share) if share < 1 else None
        found.append({"policy": policy, "met": share, "plan_met": plan, "avoided": avoided})
    return sorted(found, key=lambda one: -one["met"])


def show(facts: Mapping[str, Any], console: Console) -> None:
    """Print a result: each policy beside the best plan, then where each search ended."""
    title = f"{facts['trace']} on {facts['cluster']}, load {facts['load']:g}"
    best = {
        "policy": "policy", "met": "met:.1%", "best plan": "plan_met:.1%",
        "misses avoided": "avoided:.0%",
    }  # fmt: skip
    ends: dict[str, Column] = {
        "search from": "policy", "seed": "seed", "met": "met:.1%", "plan": "plan_met:.1%",
        "runs": "trials", "converged": lambda row: "yes" if row["converged"] else "no",
    }  # fmt: skip
    console.print(rows_table(title, best, facts["left"]))
    console.print(rows_table("", ends, facts["rows"]))
