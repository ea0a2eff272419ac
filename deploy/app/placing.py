"""Whether a cluster's machines can hold its pools: what each offers, what workers demand. Pure.

Ray would leave a worker that fits nowhere pending for ever; here it is an error before anything
starts, with what is missing and what there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.app.pools import worker_demand
from kappa.settings.pools import PoolSettings

_REASONS_SHOWN = 3
# Ray counts in ten-thousandths.
_ROUNDING = 1e-5


@dataclass(frozen=True, slots=True)
class Machine:
    """A Ray node: what it offers in all (CPU, GPU, custom resources) and how it is labelled."""

    name: str
    offers: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_ray(cls, node: Mapping[str, Any]) -> Machine:
        """From an entry of `ray.nodes()`."""
        return cls(str(node["NodeManagerHostname"]), node["Resources"], node.get("Labels") or {})

    def lacks(self, pool: PoolSettings) -> list[str]:
        """Why a worker of the pool cannot run here, empty if it can."""
        short = [
            f"{name} {self.offers.get(name, 0):g} of {wanted:g}"
            for name, wanted in worker_demand(pool).items()
            if self.offers.get(name, 0) < wanted
        ]
        other = [
            f"label {name}={self.labels.get(name, '(none)')}, not {wanted}"
            for name, wanted in pool.placement.labels.items()
            if self.labels.get(name) != wanted
        ]
        return short + other


def misfits(pools: Sequence[PoolSettings], machines: Sequence[Machine]) -> list[str]:
    """Every pool that fits no machine, and how many workers of the others find no room; with the
    place in the settings and what to change."""
    faults = [_fits_none(number, pool, machines) for number, pool in enumerate(pools)]
    fitting = [pool for pool, fault in zip(pools, faults, strict=True) if not fault]
    return [fault for fault in faults if fault] + _without_room(fitting, machines)


def _fits_none(number: int, pool: PoolSettings, machines: Iterable[Machine]) -> str:
    lacking = [(machine.name, machine.lacks(pool)) for machine in machines]
    if not all(lacks for _, lacks in lacking):
        return ""
    reasons = dict.fromkeys(
        f"{name} has {', '.join(lacks)}" for name, lacks in sorted(lacking, key=_lacks)
    )
    why = "; ".join(list(reasons)[:_REASONS_SHOWN]) or "there is none"
    return (
        f"pools.{number}.placement: pool {pool.name} fits none of {len(lacking)} machine(s): "
        f"{why}. Change its placement, or add a machine that offers it"
    )


def _lacks(of: tuple[str, list[str]]) -> int:
    return len(of[1])


def _without_room(pools: Iterable[PoolSettings], machines: Sequence[Machine]) -> list[str]:
    """Pools whose workers do not all find room when those are placed first that the fewest machines
    suit, and of them the most demanding."""
    left = [dict(machine.offers) for machine in machines]
    found = []

    def freedom(pool: PoolSettings) -> tuple[int, float]:
        suiting = sum(not machine.lacks(pool) for machine in machines)
        return suiting, -sum(worker_demand(pool).values())

    for pool in sorted(pools, key=freedom):
        demand, placed = worker_demand(pool), 0
        for machine, room in zip(machines, left, strict=True):
            if machine.lacks(pool):
                continue
            while placed < pool.least and all(
                room.get(name, 0) >= wanted - _ROUNDING for name, wanted in demand.items()
            ):
                placed += 1
                for name, wanted in demand.items():
                    room[name] -= wanted
        if placed < pool.least:
            found.append(
                f"pool {pool.name}: room for {placed} of {pool.least} workers beside the others: "
                "lower its number, or add machines"
            )
    return found
