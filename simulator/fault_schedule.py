"""Everything that goes wrong in a run, drawn at random from a seed: who, what, when, for how long.

The faults that are tried on a real cluster, as far as a simulated one has what they hit: it has no
Serve controller, no files and one router that does not die.
"""

from __future__ import annotations

from typing import get_args

import numpy as np

from simulator.faults import (
    RESOURCES,
    Failure,
    Faults,
    Misprofile,
    Straggler,
    Trouble,
    TroubleKind,
)

KINDS: tuple[str, ...] = ("killed", "stalled", "poisoned", *get_args(TroubleKind))
_STALL_FACTOR = 50.0
_SLOW_LINK_FACTOR = 10.0
_POISON_FACTOR = 30.0
_JUMP_S = 3600.0
_DOWN_S = 60.0
_SHORTEST_S, _LONGEST_S = 5.0, 30.0


def random_faults(
    nodes: int, horizon_s: float, count: int, seed: int, noise_sigma: float = 0.03
) -> Faults:
    """`count` faults, of each kind in turn, on nodes and at times that the seed draws.

    A node that is killed is not hurt in another way, so that each fault has its own effect.

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
    mortal, others = order[:kills], order[kills:]
    failures: list[Failure] = []
    stragglers: list[Straggler] = []
    wrong: dict[int, Misprofile] = {}
    troubles: list[Trouble] = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        start_s = float(rng.uniform(0.1, 0.8)) * horizon_s
        end_s = start_s + float(rng.uniform(_SHORTEST_S, _LONGEST_S))
        node = int(others[int(rng.integers(len(others)))])
        sign = 1.0 if rng.random() < 0.5 else -1.0
        if kind == "killed":
            failures.append(Failure(int(mortal[len(failures)]), start_s, _DOWN_S))
        elif kind == "stalled":
            stragglers.append(Straggler(node, start_s, end_s, _STALL_FACTOR))
        elif kind == "poisoned":
            resource = RESOURCES[int(rng.integers(len(RESOURCES)))]
            wrong[node] = Misprofile(node, resource, _POISON_FACTOR**sign)
        else:
            size = {"slow_link": _SLOW_LINK_FACTOR, "worker_clock": sign * _JUMP_S,
                    "router_clock": sign * _JUMP_S}.get(kind, 0.0)  # fmt: skip
            troubles.append(Trouble(kind, node, start_s, end_s, size))  # type: ignore[arg-type]
    return Faults(
        noise_sigma, tuple(stragglers), tuple(failures), tuple(wrong.values()), tuple(troubles)
    )
