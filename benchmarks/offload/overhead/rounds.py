"""The order in which `kappa bench offload-overhead` asks: rounds of every point, arm and node.

Whatever else the machine does, and however its clocks drift, hits all points, arms and nodes alike.
Free of vLLM; `benchmarks.offload.overhead.vllm_runs` has the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from benchmarks.offload.overhead.points import Arm, Point, Sample

# The load of a host hit leaves its prefix on the device for the device hit.
_HITS: tuple[Arm, ...] = ("host", "device")


class Asked(Protocol):
    """A node that can be asked one request at a time."""

    name: str

    async def ask(self, point: Point, arm: Arm) -> Sample:
        """One request, measured."""
        ...


async def rounds(
    nodes: Sequence[Asked],
    points: Sequence[Point],
    count: int,
    warm_up: int,
    seed: int,
    heard: Callable[[str, int, Sample], None],
) -> None:
    """Ask every point in every arm `warm_up` + `count` times, all interleaved.

    A round asks every point once per arm on every node, points in random order and the arm of new
    tokens before or after the hits; nodes take turns request by request, so that one rests while
    another works. `heard` gets the node's name, the round (negative: warm-up), and the sample.
    """
    rng = np.random.default_rng(seed)
    for number in range(-warm_up, count):
        for index in rng.permutation(len(points)):
            new_first = bool(rng.integers(2))
            for arm in ("new", *_HITS) if new_first else (*_HITS, "new"):
                for node in nodes:
                    heard(node.name, number, await node.ask(points[index], arm))
