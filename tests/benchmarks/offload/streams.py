"""A model whose weights cross the link, for `tests.engine.rig.rig(made_with=...)`."""

from benchmarks.offload.streaming import ScheduledForward, streamed
from engine.arena import Arena
from engine.transfer import LinkMover
from engine.weights import Weights


def over_streamed(
    weights: Weights, arena: Arena, mover: LinkMover, cpu_threads: int = 0
) -> ScheduledForward:
    return ScheduledForward(streamed(weights), arena, mover, cpu_threads)
