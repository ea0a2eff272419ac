"""What goes wrong in a run: noise, slow nodes, wrong profiles, failures. All of it seeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from kappa.cost import StepModel
from kappa.types import NodeProfile

Resource = Literal["link", "compute"]
TroubleKind = Literal[
    "slow_link", "loads_fail", "events_lost", "events_repeated", "events_reordered",
    "worker_clock", "router_clock",
]  # fmt: skip
RESOURCES: tuple[Resource, ...] = ("link", "compute")


@dataclass(frozen=True, slots=True)
class Straggler:
    """A node that is `factor` times as slow, link and gpu, from `start_s` to `end_s`."""

    node: int
    start_s: float
    end_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class Failure:
    """A node that dies at `at_s` and is back, empty, `down_s` later."""

    node: int
    at_s: float
    down_s: float


@dataclass(frozen=True, slots=True)
class Misprofile:
    """A node that announces `factor` times its true rate of a resource."""

    node: int
    resource: Resource
    factor: float


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something else is wrong with a node from `start_s` to `end_s`.

    kind: `slow_link`, its link is `size` times as slow; `loads_fail`, no load arrives;
    `events_lost`, `events_repeated`, `events_reordered`, every second batch of its cache events;
    `worker_clock`, `router_clock`: that clock is `size` seconds off (the router's has no node).
    """

    kind: TroubleKind
    node: int
    start_s: float
    end_s: float
    size: float = 0.0


@dataclass(frozen=True, slots=True)
class Faults:
    """noise_sigma: standard deviation of the logarithm of every duration."""

    noise_sigma: float = 0.03
    stragglers: tuple[Straggler, ...] = ()
    failures: tuple[Failure, ...] = ()
    misprofiles: tuple[Misprofile, ...] = ()
    troubles: tuple[Trouble, ...] = ()


def misprofiled_third(
    nodes: int, resources: Sequence[Resource], factor: float, seed: int
) -> tuple[Misprofile, ...]:
    """A third of the nodes (at least one), drawn, announce `factor` times too much or too little.

    Which of the two alternates over the nodes drawn, and so do the resources where there are two.
    """
    rng = np.random.default_rng((seed, 11))
    drawn = rng.permutation(nodes)[: max(nodes // 3, 1)].tolist()
    return tuple(
        Misprofile(
            node,
            resources[(i // 2) % len(resources)],
            factor if i % 2 == 0 else 1.0 / factor,
        )
        for i, node in enumerate(drawn)
    )


def drawn_failures(
    nodes: int, count: int, horizon_s: float, down_s: float, seed: int
) -> tuple[Failure, ...]:
    """`count` failures of different nodes, spread over the middle of the run.

    Raises:
        ValueError: more failures than nodes but one; somebody has to stay.
    """
    if count >= nodes and count > 0:
        raise ValueError(f"{count} failures of {nodes} nodes: leave at least one node standing")
    rng = np.random.default_rng((seed, 12))
    drawn = rng.permutation(nodes)[:count].tolist()
    at_s = np.sort(rng.uniform(0.3, 0.8, count) * horizon_s).tolist()
    return tuple(Failure(node, at, down_s) for node, at in zip(drawn, at_s, strict=True))


def drawn_stragglers(
    nodes: int, count: int, horizon_s: float, factor: float, seed: int
) -> tuple[Straggler, ...]:
    """`count` nodes, each `factor` times as slow for a fifth of the run."""
    if count > nodes:
        raise ValueError(f"{count} stragglers of {nodes} nodes: give at most {nodes}")
    rng = np.random.default_rng((seed, 13))
    drawn = rng.permutation(nodes)[:count].tolist()
    start_s = (rng.uniform(0.2, 0.7, count) * horizon_s).tolist()
    return tuple(
        Straggler(node, at, at + horizon_s / 5, factor)
        for node, at in zip(drawn, start_s, strict=True)
    )


def announced(
    index: int, profile: NodeProfile, step: StepModel, wrong: Sequence[Misprofile]
) -> tuple[NodeProfile, StepModel]:
    """What node `index` says of itself."""
    for fault in wrong:
        if fault.node != index:
            continue
        if fault.resource == "link":
            rate = profile.h2d_bytes_per_s * fault.factor
            profile = replace(profile, h2d_bytes_per_s=rate)
        else:
            profile = replace(profile, flops_per_s=profile.flops_per_s * fault.factor)
            step = step.computing_scaled(1.0 / fault.factor)
    return profile, step
