"""The service objective, the same live and simulated.

A request meets it if its first token comes within 0.5 s (times the dilation) or five times its idle
TTFT, whichever is longer, and its later tokens within three times the idle time per token; an
operator may set other figures (`ServiceObjective`). Idle figures are those of the pool's median
node with nothing else to do and the request's reusable prefix in the host tier. A rejected request
misses. Figures are vectors over requests, in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kappa.cost import StepModel, StepWork, load_token_s, prompt_s, step_model, transfer_s
from kappa.hardware import NodeProfile
from kappa.model import ModelShape

Floats = NDArray[np.float64]


class ServiceObjective(NamedTuple):
    """Limits on a first token and on each later one.

    Each is a number of seconds, in the node's own time, or a multiple of the idle node's seconds,
    whichever is longer.
    """

    ttft_s: float = 0.5
    ttft_idle_factor: float = 5.0
    tpot_s: float = 0.0
    tpot_idle_factor: float = 3.0


OBJECTIVE = ServiceObjective()


@dataclass(frozen=True, slots=True)
class IdleSpeed:
    """A node's speed for a request that it serves alone, in seconds of its own time."""

    step: StepModel
    load_token_s: float
    load_fixed_s: float
    budget_tokens: int = 8192  # of a step


def idle_speed(shape: ModelShape, node: NodeProfile) -> IdleSpeed:
    """The speed of a node that serves a model, by the law."""
    return IdleSpeed(step_model(shape, node), load_token_s(shape, node), node.load_fixed_s)


def idle_ttft_s(speed: IdleSpeed, cached_tokens: ArrayLike, new_tokens: ArrayLike) -> Floats:
    """Real seconds to the first token: the load, then the prompt in steps of the token budget."""
    tokens = np.broadcast_arrays(cached_tokens, new_tokens)
    cached, new = (np.asarray(each, dtype=np.float64) for each in tokens)
    load_s = transfer_s(cached, speed.load_token_s, speed.load_fixed_s)
    return (load_s + prompt_s(speed.step, new, cached, speed.budget_tokens)) * speed.step.dilation


def idle_tpot_s(speed: IdleSpeed, prompt_tokens: ArrayLike, output_tokens: ArrayLike) -> Floats:
    """Real seconds per later token, at the mean context of the output."""
    context = np.asarray(prompt_tokens, float) + np.asarray(output_tokens, float) / 2
    # Half of the token's own pair and the read of its KV are left out of the objective.
    work = StepWork(np.ones_like(context), context, context)
    return speed.step.work_s(work) * speed.step.dilation


def median_node(by_node: Sequence[Floats], counts: Sequence[int] | None = None) -> Floats:
    """The median node's figure for each request: the least that half of the nodes reach.

    by_node: a vector over requests for each node or kind of node; counts: nodes of each kind.
    """
    values = np.stack([np.atleast_1d(row) for row in by_node])
    weights = np.asarray([1] * len(by_node) if counts is None else counts)
    order = np.argsort(values, axis=0, kind="stable")
    reached = np.cumsum(weights[order], axis=0)
    first = np.argmax(2 * reached >= weights.sum(), axis=0)
    picked = np.take_along_axis(order, first[None, :], axis=0)
    median: Floats = np.take_along_axis(values, picked, axis=0)[0]
    return median


def median_idle(
    speeds: Iterable[IdleSpeed], cached: NDArray[Any], new: NDArray[Any], output: NDArray[Any]
) -> tuple[Floats, Floats]:
    """Each request's idle TTFT, and its idle seconds per later token, on the median of nodes with
    these speeds. cached, new, output: tokens, shape (requests,)."""
    kinds = Counter(speeds)
    counts = list(kinds.values())
    ttft = [idle_ttft_s(kind, cached, new) for kind in kinds]
    tpot = [idle_tpot_s(kind, cached + new, output) for kind in kinds]
    return median_node(ttft, counts), median_node(tpot, counts)


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Limits of each request: seconds to the first token, and seconds per later token."""

    ttft_s: Floats
    tpot_s: Floats

    def met(self, ttft_s: ArrayLike, tpot_s: ArrayLike) -> NDArray[np.bool_]:
        """Whether each request meets both. TTFT is NaN for a rejection, TPOT for a single token."""
        ttft, tpot = np.asarray(ttft_s, dtype=np.float64), np.asarray(tpot_s, dtype=np.float64)
        met: Any = (ttft <= self.ttft_s) & (np.isnan(tpot) | (tpot <= self.tpot_s))
        return np.asarray(met, dtype=np.bool_)


def limits(idle_ttft: Floats, idle_tpot: Floats, dilation: float = 1.0) -> Limits:
    """The limits of requests with these idle figures by `OBJECTIVE`, in real seconds."""
    return Limits(
        ttft_s=np.maximum(OBJECTIVE.ttft_s * dilation, OBJECTIVE.ttft_idle_factor * idle_ttft),
        tpot_s=OBJECTIVE.tpot_idle_factor * idle_tpot,
    )
