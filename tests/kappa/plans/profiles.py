"""Random nodes and requests for the planners' tests: wide enough that every regime occurs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from numpy.random import Generator, default_rng

from kappa.cost import StepModel
from kappa.hardware import NodeProfile
from kappa.plans.rates import LineFit, PlanRates, rates_from_law
from kappa.plans.split import Costs
from kappa.shapes import SHAPES


@dataclass(frozen=True)
class Case:
    """A node, and a request on it."""

    rates: PlanRates
    cached: int
    new: int
    device: int
    block: int

    @property
    def costs(self) -> Costs:
        return Costs(self.rates, self.cached, self.new, self.device)


def log_uniform(rng: Generator, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def maybe(rng: Generator, value: float) -> float:
    return value if rng.random() < 0.5 else 0.0


def random_rates(rng: Generator, *, plain: bool = False) -> PlanRates:
    """Rates from a laptop's to a rack's; `plain` has no floor, no fixed cost and no attention."""
    phi = log_uniform(rng, 1e-6, 1e-3)
    mu = phi / log_uniform(rng, 0.05, 200.0)
    some = 0.0 if plain else 1.0
    return PlanRates(
        name="random",
        layers=int(rng.integers(1, 81)),
        kv_bytes=2.0,
        activation_bytes=2.0 * (0.5 if rng.random() < 0.5 else log_uniform(rng, 0.2, 4.0)),
        load=LineFit("load", mu, some * maybe(rng, mu * log_uniform(rng, 1.0, 100.0))),
        project=LineFit(
            "KV projection", phi * log_uniform(rng, 0.02, 1.5), some * maybe(rng, 5.0 * phi)
        ),
        step=StepModel(
            token_s=phi,
            pair_s=some * maybe(rng, phi / log_uniform(rng, 100.0, 1e5)),
            weights_s=some * phi * log_uniform(rng, 1.0, 600.0),
            context_token_s=some * phi * log_uniform(rng, 1e-4, 0.1),
            fixed_s=some * maybe(rng, 10.0 * phi),
            exposed=some * maybe(rng, float(rng.random())),
        ),
        overlap=[None, 0.0, 1.0, float(rng.random())][int(rng.integers(4))],
        weights_s=some * maybe(rng, phi * log_uniform(rng, 1.0, 1e5)),
    )


def random_cases(count: int, seed: int, most_blocks: int = 64) -> Iterator[Case]:
    rng = default_rng(seed)
    for _ in range(count):
        rates = random_rates(rng)
        block = int(rng.choice([1, 8, 16, 64]))
        cached = int(rng.integers(1, most_blocks * block + 1))
        yield Case(
            rates=rates,
            cached=cached,
            new=int(log_uniform(rng, 1.0, 500.0)),
            device=int(rng.choice([0, cached // 2, 4 * cached])),
            block=block,
        )


def node(gigabytes_per_s: float, teraflops: float = 600, **more: float) -> NodeProfile:
    """A node with an H200's memory."""
    return NodeProfile(
        name="h200", gpu="H200", link_name="PCIe 5", h2d_bytes_per_s=gigabytes_per_s * 1e9,
        flops_per_s=teraflops * 1e12, hbm_bytes_per_s=4.8e12, **more,
    )  # fmt: skip


def opt_rates() -> PlanRates:
    """OPT-6.7B on an H200: 524,288 bytes of KV per token, and half as many of activations."""
    return rates_from_law(SHAPES["opt-6.7b"], node(50))
