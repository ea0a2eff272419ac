"""HybridServe's mini-batches: requests packed so that projecting and loading take equally long.

A mini-batch is what the device's two buffers hold at once (Section 4.3.3 of the paper). Requests
join in order if they fit and do not make the imbalance F_b (Eq. 12 and 13) worse; when none can,
the next mini-batch begins. The paper leaves open what F_b is without either kind of block: infinite
here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kappa.plan.fits import LineFit


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of each type: a request's, a mini-batch's, or what the buffers hold."""

    act: int
    kv: int

    def __add__(self, other: Blocks) -> Blocks:
        return Blocks(self.act + other.act, self.kv + other.kv)

    def fits(self, most: Blocks) -> bool:
        """Whether both types are within `most`."""
        return self.act <= most.act and self.kv <= most.kv


def imbalance(blocks: Blocks, project: LineFit, load: LineFit) -> float:
    """F_b = max(r, 1/r) of r = T_kv_gen(ACT) / T_load_kv(KV); infinite without either."""
    project_s, load_s = project.seconds(blocks.act), load.seconds(blocks.kv)
    if project_s <= 0 or load_s <= 0:
        return math.inf
    return max(project_s / load_s, load_s / project_s)


def pack(
    requests: Sequence[Blocks], most: Blocks, project: LineFit, load: LineFit
) -> list[list[int]]:
    """Mini-batches as lists of indices into `requests`; each request is in exactly one.

    Args:
        requests: blocks of each, in order of preference.
        most: what the two buffers hold.
        project: T_kv_gen in blocks.
        load: T_load_kv in blocks.

    Raises:
        ValueError: a request that exceeds a buffer by itself.
    """
    for i, request in enumerate(requests):
        if not request.fits(most):
            raise ValueError(
                f"request {i} has {request.act} activation and {request.kv} KV blocks, and the "
                f"buffers hold {most.act} and {most.kv}: enlarge them, or change its ratio"
            )
    waiting = list(range(len(requests)))
    batches: list[list[int]] = []
    while waiting:
        batch = [waiting.pop(0)]
        total = requests[batch[0]]
        joined = True
        while joined:
            joined = False
            for i in list(waiting):
                grown = total + requests[i]
                worse = imbalance(grown, project, load) > imbalance(total, project, load)
                if grown.fits(most) and not worse:
                    waiting.remove(i)
                    batch.append(i)
                    total, joined = grown, True
        batches.append(batch)
    return batches
