"""The configuration of a router."""

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
        """Adjust a row of the estimates to the worker's load plan; None: the row stays as it is."""

    @property
    def kappa_eff(self) -> float | None:
        """The ratio at which its predicted TTFT is twice the compute time."""


PlannerOf = Callable[[Announcement], RowPlanner | None]


def no_planner(announcement: Announcement) -> RowPlanner | None:
    """No planner: workers load prefixes whole and then compute; ValueError for others."""
    if announcement.load_plan:
        raise ValueError(
            f"worker {announcement.worker} plans its loads; make the router with "
            "router.load_plans.planner_of"
        )
    return None


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The options of a router."""

    policy: Policy
    # Of the prefix hasher.
    secret: int
    # The most blocks in the prefix index.
    index_blocks: int = 1_000_000
    # A worker that was silent for longer is not chosen.
    stale_after_s: float = 10.0
    calibrate: bool = True
    # Learning ends after this number of first tokens; None: never.
    calibrate_requests: int | None = None
    # The most workers that are forecast step by step for every decision; queues of more are
    # arithmetic (`kappa_router.ttft`), which costs microseconds.
    forecast_workers: int = 4
    # Reject requests that would miss their objective (`router.admission`).
    admission: bool = False
    # That objective, by which workers are priced, too.
    objective: ServiceObjective = OBJECTIVE
    # Where the order of workers begins, from 0 to below 1; deciders that share workers take
    # different ones, so that they break ties differently.
    first: float = 0.0
    # Makes the load planner that a worker announces; by default such workers are refused.
    planner_of: PlannerOf = no_planner
