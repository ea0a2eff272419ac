"""The faults of a run: noise, slow nodes, wrong profiles, failures; all from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from kappa.cost import StepModel
from kappa.hardware import NodeProfile

Resource = Literal["link", "compute"]
TransientKind = Literal[
    "slow_link", "loads_fail", "events_lost", "events_repeated", "events_reordered",
    "worker_clock", "router_clock",
]  # fmt: skip
RESOURCES: tuple[Resource, ...] = get_args(Resource)
KINDS: tuple[str, ...] = ("killed", "stalled", "misprofiled", *get_args(TransientKind))
_STALL_FACTOR = 50.0
_SLOW_LINK_FACTOR = 10.0
_MISPROFILE_FACTOR = 30.0
_JUMP_S = 3600.0
_DOWN_S = 60.0
_SHORTEST_S, _LONGEST_S = 5.0, 30.0


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
class TransientFault:
    """Something else is wrong with a node from `start_s` to `end_s`.

    kind: `slow_link`, its link is `size` times as slow; `loads_fail`, no load arrives;
    `events_lost`, `events_repeated`, `events_reordered`, every second batch of its cache events;
    `worker_clock`, `router_clock`: that clock is `size` seconds off (the router's has no node).
    """

    kind: TransientKind
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
    transients: tuple[TransientFault, ...] = ()


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
    """What node `index` announces of itself."""
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


def random_faults(
    nodes: int, horizon_s: float, count: int, seed: int, noise_sigma: float = 0.03
) -> Faults:
    """`count` faults, of each kind in turn, on nodes and at times that the seed draws.

    They are those tried on a real cluster, as far as a simulated one has what they hit: it has no
    Serve controller, no files and one router that does not die.

    A node that is killed has no other fault, so that each fault has its own effect.

    Args:
        nodes: of the cluster.
        horizon_s: about how long the run lasts; faults begin in its first four fifths.
        count: how many.
        seed: of the draws.
        noise_sigma: of the run's durations.

    Raises:
        ValueError: fewer than two nodes, or more kills than nodes but one.
    """
    kills = -(-count // len(KINDS))
    if nodes < 2 or kills > nodes // 2:
        raise ValueError(f"{count} faults kill {kills} of {nodes} nodes: leave half of them alone")
    if not horizon_s > 0:
        raise ValueError(f"horizon_s is {horizon_s}: give seconds above zero")
    rng = np.random.default_rng((seed, 14))
    order = rng.permutation(nodes).tolist()
    mortal, lasting = order[:kills], order[kills:]
    failures: list[Failure] = []
    stragglers: list[Straggler] = []
    wrong: dict[int, Misprofile] = {}
    transients: list[TransientFault] = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        start_s = float(rng.uniform(0.1, 0.8)) * horizon_s
        end_s = start_s + float(rng.uniform(_SHORTEST_S, _LONGEST_S))
        node = int(lasting[int(rng.integers(len(lasting)))])
        sign = 1.0 if rng.random() < 0.5 else -1.0
        if kind == "killed":
            failures.append(Failure(int(mortal[len(failures)]), start_s, _DOWN_S))
        elif kind == "stalled":
            stragglers.append(Straggler(node, start_s, end_s, _STALL_FACTOR))
        elif kind == "misprofiled":
            resource = RESOURCES[int(rng.integers(len(RESOURCES)))]
            wrong[node] = Misprofile(node, resource, _MISPROFILE_FACTOR**sign)
        else:
            size = {"slow_link": _SLOW_LINK_FACTOR, "worker_clock": sign * _JUMP_S,
                    "router_clock": sign * _JUMP_S}.get(kind, 0.0)  # fmt: skip
            transients.append(TransientFault(kind, node, start_s, end_s, size))  # type: ignore[arg-type]
    return Faults(
        noise_sigma, tuple(stragglers), tuple(failures), tuple(wrong.values()), tuple(transients)
    )
