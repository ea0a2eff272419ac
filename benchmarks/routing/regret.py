"""How far policies are from what could have been: a lower bound, and a plan that exists.

One short instance without noise. Every policy plays it; then `clairvoyant` looks for a better plan,
and `lower_bound` says what no plan could undercut. If the search does not beat every policy, there
is no reference plan and the bound alone is reported.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.routing.clairvoyant import Found, Plan, Point, p99, search
from benchmarks.routing.lower_bound import Bound, lower_bound
from simulator.faults import Faults
from simulator.outcome import Records, spread
from simulator.run import SimulationConfig, idle_speed, simulate, traffic_of


@dataclass(frozen=True, slots=True, eq=False)
class Regret:
    """What came out. policies: each one's records; bounds: for the arrivals that it had."""

    config: SimulationConfig
    policies: dict[str, Records]
    bounds: dict[str, Bound]
    idle: Bound
    found: Found

    @property
    def beats_all(self) -> bool:
        """Whether the plan found is better than what every policy did."""
        return all(self.found.p99_s < p99(records) for records in self.policies.values())

    def summary(self) -> dict[str, Any]:
        """The figures, ready for JSON; regrets are ratios of TTFTs, 1 means none."""
        plan = spread(self.found.records.ttft_s[self.found.records.measured])
        return {
            "cluster": self.config.cluster.name,
            "trace": self.config.workload.name,
            "load": self.config.load,
            "seed": self.config.seed,
            "requests": self.config.requests,
            "warm": self.config.warm,
            "idle_bound_s": _bound(self.idle),
            "clairvoyant": {
                "beats_all": self.beats_all,
                "ttft_s": plan,
                "start": self.found.start,
                "evaluations": self.found.evaluations,
                "starts_p99_s": self.found.starts,
                "curve": [[point.evaluations, point.p99_s] for point in self.found.curve],
            },
            "rows": [self._row(name) for name in self.policies],
        }

    def _row(self, name: str) -> dict[str, Any]:
        records, bound = self.policies[name], self.bounds[name]
        ttft_s = spread(records.ttft_s[records.measured])
        mine = p99(records)
        return {
            "policy": name,
            "ttft_s": ttft_s,
            "bound_s": _bound(bound),
            "regret_bound": _ratio(mine, bound.p99_s),
            "regret_bound_mean": _ratio(ttft_s["mean"], bound.mean_s),
            "regret_plan": _ratio(mine, self.found.p99_s) if self.beats_all else None,
        }


def regret(
    config: SimulationConfig,
    policies: Sequence[str],
    *,
    evaluations: int,
    may_go_on: Callable[[], bool] = lambda: True,
    improved: Callable[[Point], None] = lambda point: None,
) -> Regret:
    """Play all policies, search for a better plan, and bound.

    Args:
        config: the instance; its policy and its faults are not used, and nobody is refused.
        policies: whom to compare.
        evaluations: budget of the search, in runs.
        may_go_on: asked before each run of the search; false ends it early.
        improved: told of each new best plan.
    """
    config = replace(config, faults=Faults(noise_sigma=0.0), admission=None)
    traffic = traffic_of(config)
    played = {
        name: simulate(replace(config, policy=name), traffic=traffic).records for name in policies
    }

    def evaluate(plan: Plan) -> Records:
        return simulate(config, traffic=traffic, assignment=plan.tolist()).records

    nodes = config.cluster.nodes
    found = search(
        {name: records.node for name, records in played.items()},
        evaluate, len(nodes), random.Random(config.seed),
        evaluations=evaluations, may_go_on=may_go_on, improved=improved,
    )  # fmt: skip
    speeds = [idle_speed(node, config.shape, config.budget_tokens) for node in nodes]
    return Regret(
        config=config,
        policies=played,
        bounds={
            name: lower_bound(traffic, speeds, np.asarray(records.arrival_s))
            for name, records in played.items()
        },
        idle=lower_bound(traffic, speeds),
        found=found,
    )


def _bound(bound: Bound) -> dict[str, float]:
    return {"mean": bound.mean_s, "p50": bound.p50_s, "p99": bound.p99_s}


def _ratio(value: float | None, reference: float) -> float | None:
    return value / reference if value is not None and reference > 0 else None
