"""Whole engines over tiny models, links that fail on request, and what the model would say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from kappa.hardware import REACHED, node_profile
from kappa.plans.clo import SparseSettings
from kappa.plans.load_plan import LoadPlan, layout
from kappa.plans.planners import Cached, Planner, Planning, host_planners
from kappa.plans.rates import PlanRates, rates_from_law
from kappa_engine.forward import Forward
from kappa_engine.kv_cache import Arena, ArenaSize
from kappa_engine.llm_engine import Engine, Observer
from kappa_engine.sampling import GREEDY, Sampling
from kappa_engine.sequence import EngineRequest, Output
from kappa_engine.sequence import Sequence as Handle
from kappa_engine.settings import EngineOptions
from kappa_engine.sparse.forward import sparse_forward
from kappa_engine.sparse.serving import SparseServing
from kappa_engine.transfer import mover_for
from kappa_engine.weights import HostWeights
from tests.engine import hf
from tests.engine.books import check_engine
from tests.engine.links import Link
from tests.engine.rig import weights

BLOCK = 4
SIZE = ArenaSize(48, 128, 32, 128, block_tokens=BLOCK)


def fixed(recompute: int = 0, activations: int = 0, *, tail: bool = False) -> Planner:
    """A planner that always splits so, as far as the cached tokens reach."""

    def plan(request: Cached) -> LoadPlan:
        first = min(recompute, request.cached)
        second = min(activations, request.cached - first)
        return LoadPlan(layout(request.cached, recompute=first, activations=second, tail=tail))

    return plan


@contextmanager
def engine(
    family: str = "llama",
    *,
    size: ArenaSize = SIZE,
    rates: PlanRates | None = None,
    device: str = "cpu",
    observer: Observer | None = None,
    sparse: SparseSettings | None = None,
    slots: dict[str, Any] | None = None,
    cpu_threads: int = 0,
    host: HostWeights | None = None,
    **settings: Any,
) -> Iterator[Engine]:
    """An engine; in the end its books must be right and its blocks free."""
    model = weights(family, torch.float64, device, host)
    arena = Arena(model.config.shape, size, dtype=torch.float64, device=device)
    link = Link() if device == "cpu" else mover_for(device)
    forward = Forward(model, arena, link, cpu_threads=cpu_threads)
    made = Engine(
        forward, EngineOptions(**settings),
        Planning(
            size.block_tokens, rates, cpu=cpu_threads > 0,
            host=host_planners(settings.get("planner", ""), settings.get("act_share", 0.0)),
        ),
        observer=observer,
        approximate=sparse
        and partial(SparseServing, sparse_forward(forward, sparse, **(slots or {}))),
    )  # fmt: skip
    try:
        yield made
        finish(made)
        check_engine(made)
        assert not any(pool.misused for pool in made.arena.pools.values())
    finally:
        if isinstance(link, Link):
            link.open.set()
        forward.close()
        link.stop(20)
        arena.close()


def link_of(made: Engine) -> Link:
    assert isinstance(made.mover, Link)
    return made.mover


def loaded_bytes(made: Engine) -> int:
    """Bytes that have crossed to the device."""
    return made.mover.counters["h2d"].copied_bytes


def weight_bytes(made: Engine) -> int:
    """Bytes of weights that cross at every step."""
    weights = made._model.weights
    names, layers = weights.host.names, made._model.ring.layers
    return sum(getattr(weights.layers[i], name).nbytes for i in layers for name in names)


def finish(made: Engine, most: int = 3000) -> list[Output]:
    """Step until there is nothing to do, stores included."""
    outputs: list[Output] = []
    for _ in range(most):
        if not made.busy:
            made.store.drain(20)
            return outputs
        outputs += made.step()
    raise AssertionError("the engine does not finish")


def submit(
    made: Engine, tokens: Sequence[int], count: int, sampling: Sampling = GREEDY, **options: Any
) -> Handle:
    return made.submit(EngineRequest(tokens, count, sampling, **options))


def generate(made: Engine, *prompts: list[int], count: int = 6, **options: Any) -> list[list[int]]:
    """Answers to prompts that are submitted together."""
    handles = [submit(made, prompt, count, **options) for prompt in prompts]
    finish(made)
    return [handle.tokens[handle.prompt_tokens :] for handle in handles]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, hf.VOCAB, length).tolist()


LONG = prompt(40, seed=5)


def even_rates(**costs: float) -> PlanRates:
    """A link and a gpu that are alike to OPT, so that a prefix comes half each way."""
    shape = weights("opt", torch.float64, "cpu").config.shape
    # As announced: reached rates of a large model would outweigh the one that is set.
    node = replace(node_profile("h100-pcie5"), **dict.fromkeys((*REACHED, "exposed"), 0.0))
    law = rates_from_law(shape, node)
    flops_per_s = node.flops_per_s * law.project_token_s / law.load_token_s
    return rates_from_law(shape, replace(node, flops_per_s=flops_per_s, **costs))


def evict_device(made: Engine) -> None:
    """Only host memory knows the past."""
    device = made.memory.device
    device.release(device.take(device.pool.count))
    assert loaded_bytes(made) == 0 or made._model.ring.layers


def generate_in_host(made: Engine, *prompts: list[int], **options: Any) -> list[list[int]]:
    """Answers to prompts, of which only host memory has the blocks then."""
    answers = generate(made, *prompts, **options)
    evict_device(made)
    return answers


def step_until(made: Engine, handle: Handle, tokens: int = 1) -> None:
    """Step until a request's answer has that number of tokens."""
    while handle.output_tokens < tokens:
        made.step()


def expected(tokens: Sequence[int], count: int = 6, family: str = "llama") -> list[int]:
    """What Hugging Face's model answers, greedily."""
    return list(_expected(tuple(tokens), count, family))


@cache
def _expected(tokens: tuple[int, ...], count: int, family: str) -> tuple[int, ...]:
    return tuple(hf.greedy(hf.reference(family), tokens, count)[0])
