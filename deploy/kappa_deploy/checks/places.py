"""Pools that fit no machine, and workers that find no place beside the others. Pure.

Ray would leave such a worker pending for ever; here it is an error that names what the pool wants
and what the machines have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kappa.settings.pools import PoolSettings
from kappa_deploy.app.machine import Machine
from kappa_deploy.app.plan import worker_demand
from kappa_deploy.checks.facts import Facts
from kappa_deploy.checks.findings import Finding

_REASONS_SHOWN = 3
# Ray counts in ten-thousandths.
_ROUNDING = 1e-5


def misfits(pools: Sequence[PoolSettings], machines: Sequence[Machine]) -> dict[str, str]:
    """Every pool that fits no machine, and how many workers of the others find no place: by the
    pool's name, with the place in the settings and what to change."""
    faults, fitting = {}, []
    for number, pool in enumerate(pools):
        lacking = sorted(
            ((machine.lacks(pool), machine.name) for machine in machines),
            key=lambda found: len(found[0]),
        )
        if any(not lacks for lacks, _ in lacking):
            fitting.append(pool)
            continue
        reasons = dict.fromkeys(f"{name} has {', '.join(lacks)}" for lacks, name in lacking)
        why = "; ".join(list(reasons)[:_REASONS_SHOWN]) or "there is none"
        faults[pool.name] = (
            f"pools.{number}.placement: pool {pool.name} fits none of {len(lacking)} machine(s): "
            f"{why}. Change its placement, or add a machine that offers it"
            f"{_of_ranks(pool, machines)}"
        )
    return faults | dict(_without_place(fitting, machines))


def _of_ranks(pool: PoolSettings, machines: Sequence[Machine]) -> str:
    """A hint where machines have a worker's GPUs together, and none alone."""
    gpus, offered = pool.placement.gpus, [machine.offers.get("GPU", 0) for machine in machines]
    if gpus <= max(offered, default=0) or gpus > sum(offered):
        return ""
    return (
        f". All {gpus} GPUs of a worker are of one machine, since its ranks talk over that "
        "machine's sockets: several machines serve as several workers"
    )


def _without_place(
    pools: Iterable[PoolSettings], machines: Sequence[Machine]
) -> Iterator[tuple[str, str]]:
    """Pools with workers that find no place. Pools that fit the fewest machines are placed first,
    and among these the most demanding."""
    free = [dict(machine.offers) for machine in machines]

    def freedom(pool: PoolSettings) -> tuple[int, float]:
        suiting = sum(not machine.lacks(pool) for machine in machines)
        return suiting, -sum(worker_demand(pool).values())

    for pool in sorted(pools, key=freedom):
        demand, placed = worker_demand(pool), 0
        for machine, offers in zip(machines, free, strict=True):
            if machine.lacks(pool):
                continue
            while placed < pool.least and all(
                offers.get(name, 0) >= wanted - _ROUNDING for name, wanted in demand.items()
            ):
                placed += 1
                for name, wanted in demand.items():
                    offers[name] -= wanted
        if placed < pool.least:
            room = f"room for {placed} of {pool.least} workers beside the others"
            yield pool.name, f"pool {pool.name}: {room}: lower its number, or add machines"


def places(facts: Facts) -> Iterator[Finding]:
    """Pools that do not all find a place on the machines, where these are known."""
    if facts.machines:
        found = misfits(facts.settings.all_pools, facts.machines)
        yield from (Finding("fail", fault, where=pool) for pool, fault in found.items())
