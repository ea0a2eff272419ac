"""How an engine of kind torch decodes approximately, as its worker is told, and the lanes it makes.

Plain data until the engine starts: head importance travels as numbers, since the file that it was
read from need not be on the worker's machine. Which heads keep their KV on the device follows from
what the machine was measured to load and compute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kappa.plans.clo import (
    CloConfig,
    HeadProfile,
    equal_heads,
    layer_seconds,
    persistent_heads,
    prefetchable_heads,
)
from kappa.plans.rates import PlanRates

if TYPE_CHECKING:
    # torch: only where an engine runs.
    from engine.forward import Forward
    from engine.sparse.forward import SparseForward


@dataclass(frozen=True, slots=True)
class LanesPlan:
    """clo: the method's numbers; the rest as in the settings of `engine.sparse`. heads: scores, if
    any were given."""

    clo: CloConfig = field(default_factory=CloConfig)
    lanes: int = 4
    retriever: Literal["hash", "oracle"] = "hash"
    prefetch: bool = True
    max_age: int = 0
    chunk_tokens: int = 64
    heads: HeadProfile | None = None
    persistent_heads: int | None = None


def make_lanes(
    plan: LanesPlan, forward: Forward, rates: PlanRates, max_tokens: int
) -> SparseForward:
    """The lanes of an engine, for requests of up to `max_tokens`, answers included."""
    from engine.sparse.forward import over_lanes
    from engine.sparse.settings import SparseSettings

    shape = forward.config.shape
    heads = plan.heads or equal_heads(shape)
    layer_s = layer_seconds(rates, plan.clo, plan.lanes, max_tokens)
    ahead = prefetchable_heads(shape, plan.clo, max_tokens, layer_s, rates.h2d_bytes_per_s)
    persistent = persistent_heads(
        shape, plan.clo, heads, ahead / plan.lanes, most_heads=plan.persistent_heads
    )
    settings = SparseSettings(
        plan.clo, plan.lanes, max_tokens, plan.retriever, plan.prefetch, plan.max_age,
        plan.chunk_tokens,
    )  # fmt: skip
    return over_lanes(forward, settings, persistent=persistent, heads=heads)
