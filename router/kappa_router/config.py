"""What a router is made with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kappa.protocol import Announcement
from kappa.slo import OBJECTIVE, ServiceObjective
from kappa_router.decision import PlannedLoad
from kappa_router.policy import Policy


class RowPlanner(Protocol):
    """A worker's load planner."""

    def __call__(self, row: np.void) -> PlannedLoad | None:
        """Change a row of the estimates to what the worker's plan makes of it; None: nothing."""

    def kappa_eff(self) -> float | None:
        """The ratio at which its predicted TTFT is twice the compute time."""


PlannerOf = Callable[[Announcement], RowPlanner | None]


def no_planner(announcement: Announcement) -> RowPlanner | None:
    """Of workers that load prefixes whole and then compute; ValueError for others."""
    if announcement.load_plan:
        raise ValueError(
            f"worker {announcement.worker} plans its loads; make the router with "
            "router.load_plans.planner_of"
        )
    return None


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """index_blocks bounds the prefix index; stale_after_s a worker's silence.

    forecast_workers: up to so many workers are forecast step by step for every decision; of more,
    queues are arithmetic (`router.pricing`), which costs microseconds. calibrate_requests: after so
    many first tokens nothing is learnt any more. admission: reject requests that would miss their
    objective (`router.admission`). objective: that, and what workers are priced by. first: where
    the order of workers begins, from 0 to below 1; deciders that share workers take different
    ones, so that ties are broken differently.
    planner_of: makes the load planner that a worker announces; without one such workers are
    refused.
    """

    policy: Policy
    secret: int
    index_blocks: int = 1_000_000
    stale_after_s: float = 10.0
    calibrate: bool = True
    calibrate_requests: int | None = None
    forecast_workers: int = 4
    admission: bool = False
    objective: ServiceObjective = OBJECTIVE
    first: float = 0.0
    planner_of: PlannerOf = no_planner
