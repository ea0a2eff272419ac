"""How many workers a pool should have: enough to serve the arrivals at the target utilisation and
to clear what waits within the target seconds. `kappa_workers.scaling_policy` asks this for Ray
Serve. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

BACKLOG_KEY = "kappa_backlog_s"
DEMAND_KEY = "kappa_demand"
"""Names of a `WorkerLoad`'s figures among the statistics that Ray Serve collects."""

# A pool shrinks only if the workers that stay remain below the target by this share: a pool that
# had one worker too many must not have one too few a moment later.
_SLACK = 0.1
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Predicted seconds that wait for a worker, and the share of its time asked for: above 1 if
    more arrives than it can serve."""

    backlog_s: float
    demand: float


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """When a pool has enough workers; the settings check its bounds."""

    target_backlog_s: float
    target_utilisation: float

    def wanted(self, loads: Iterable[WorkerLoad], current: int) -> int:
        """Workers wanted where there are `current`; bounds and delays are Ray Serve's."""
        need = sum(
            load.demand / self.target_utilisation + load.backlog_s / self.target_backlog_s
            for load in loads
        )
        more = math.ceil(need - _ROUNDING)
        fewer = math.ceil(need / (1 - _SLACK) - _ROUNDING)
        return more if more > current else min(max(fewer, 1), current)


def loads_in(
    figures: Mapping[str, Mapping[str, float]], running: Iterable[str]
) -> list[WorkerLoad]:
    """The loads of the running workers that reported both figures, as Ray Serve hands them over:
    figure -> worker -> value. Figures that are no finite numbers count as none."""
    found = []
    for worker in running:
        backlog_s = figures.get(BACKLOG_KEY, {}).get(worker, math.nan)
        demand = figures.get(DEMAND_KEY, {}).get(worker, math.nan)
        if math.isfinite(backlog_s) and math.isfinite(demand):
            found.append(WorkerLoad(max(backlog_s, 0.0), max(demand, 0.0)))
    return found
