"""All reimplemented policies by name, and how `name:key=value,...` becomes one."""

from __future__ import annotations

import math

from kappa_benchmarks.baselines.routing import base
from kappa_benchmarks.baselines.routing.aibrix import Aibrix
from kappa_benchmarks.baselines.routing.dynamo import Dynamo, DynamoJsew, DynamoTwoTier
from kappa_benchmarks.baselines.routing.learner import LlmDLatency, Lodestar
from kappa_benchmarks.baselines.routing.llm_d import LlmD, LlmDAffinity
from kappa_benchmarks.baselines.routing.lmetric import LMetric
from kappa_benchmarks.baselines.routing.production_stack import ProductionStack
from kappa_benchmarks.baselines.routing.ray_prefix import RayPrefix
from kappa_benchmarks.baselines.routing.sglang import SglangCacheAware
from kappa_benchmarks.baselines.routing.simple import ConsistentHash, PowerOfTwo, RoundRobin, Sticky
from kappa_router.policy import Policy

Value = float | int

_CLASSES: tuple[type[base.Baseline], ...] = (
    RoundRobin, PowerOfTwo, Sticky, ConsistentHash, RayPrefix, SglangCacheAware, Dynamo,
    DynamoJsew, DynamoTwoTier, LlmD, LlmDAffinity, LlmDLatency, LMetric, Lodestar, Aibrix,
    ProductionStack,
)  # fmt: skip

BASELINES: dict[str, type[base.Baseline]] = {cls.name: cls for cls in _CLASSES}


def baseline_named(spec: str, seed: int = 0) -> Policy:
    """The baseline of `name` or `name:key=value,...`, its name the whole spec.

    Each entry point of `kappa.routing_policies` in pyproject.toml calls it.

    Raises:
        ValueError: a parameter is unknown, twice there, malformed or out of range.
        KeyError: there is no such baseline.
    """
    name, colon, text = spec.partition(":")
    cls = BASELINES[name]
    given = _parsed(spec, text, base.parameters(cls)) if colon else {}
    try:
        made = cls(seed, **given)
    except ValueError as error:
        raise ValueError(f"policy {spec!r}: {error}") from None
    made.name = spec
    return made


def _parsed(spec: str, text: str, known: dict[str, Value]) -> dict[str, Value]:
    given: dict[str, Value] = {}
    takes = ", ".join(f"{key}={value}" for key, value in known.items()) or "none"
    takes = f"parameters and defaults: {takes}"
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ValueError(f"policy {spec!r}: {part!r} is not key=value; {takes}")
        if key not in known:
            raise ValueError(f"policy {spec!r}: no parameter {key!r}; {takes}")
        if key in given:
            raise ValueError(f"policy {spec!r}: {key!r} is given twice")
        whole = isinstance(known[key], int)
        try:
            given[key] = int(value) if whole else float(value)
        except ValueError:
            given[key] = math.nan
        if math.isnan(given[key]):
            kind = "a whole number" if whole else "a number"
            raise ValueError(f"policy {spec!r}: {key} must be {kind}, got {value!r}")
    return given
