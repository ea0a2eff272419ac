"""What a vLLM engine measures of itself before it serves, in its worker process: its host tier's
link and its steps. What cannot be measured is left out, and why is in the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import structlog
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.parallel_state import get_world_group

from kappa.cost import StepModel
from workers.vllm.measured_link import LinkTimer, TierRoom, beside_work
from workers.vllm.measured_steps import StepLimits, StepTimer, without_connector

log = structlog.get_logger(__name__)

# Of the time there is, the link's part.
_LINK_SHARE = 0.25


def measure_engine(
    worker: Any, execute: Callable[[Any], Any], sample: Callable[[None], Any],
    prior: Mapping[str, float], budget_s: float,
) -> dict[str, Any]:  # fmt: skip
    """Measure an engine that has nothing in flight; its device cache is zeros afterwards: an
    attention kernel may multiply slots past a sequence's end by zero, so what is left there must be
    finite.

    execute, sample: the worker's methods for a step, unmetered. prior: the fields of a `StepModel`:
    the order of the steps, and what the fit is compared to. budget_s: for all of it. Returns what
    `LinkTimer.measure` does, "step" (what `StepTimer.measure` does), and "unmeasured": sentences on
    what of these is missing."""
    found: dict[str, Any] = {"unmeasured": []}
    try:
        _measure(found, worker, execute, sample, StepModel.from_dict(prior), budget_s)
    finally:
        for cache in worker.model_runner.kv_caches:
            for tensor in cache if isinstance(cache, list | tuple) else [cache]:
                tensor.zero_()
    return found


def _measure(
    found: dict[str, Any], worker: Any, execute: Callable[[Any], Any],
    sample: Callable[[None], Any], prior: StepModel, budget_s: float,
) -> None:  # fmt: skip
    groups = len(worker.model_runner.kv_cache_config.kv_cache_groups)
    device_blocks = int(worker.cache_config.num_gpu_blocks)
    connector = getattr(kv_transfer_state._KV_CONNECTOR_AGENT, "connector_worker", None)
    tier, spec = getattr(connector, "worker", None), getattr(connector, "spec", None)
    if tier is not None and spec is not None:
        room = TierRoom(device_blocks, int(spec.host_blocks), groups)
        timer = LinkTimer(tier, room, beside_work(torch.device(worker.device)))
        found |= _tried(
            "the host tier's link", lambda: timer.measure(_LINK_SHARE * budget_s), found
        )
    scheduler = worker.scheduler_config
    limits = StepLimits(
        context_tokens=int(worker.model_config.max_model_len),
        batch_tokens=int(scheduler.max_num_batched_tokens),
        sequences=int(scheduler.max_num_seqs),
        block_tokens=int(worker.cache_config.block_size),
        blocks=device_blocks,
        groups=groups,
    )
    steps = StepTimer(execute, sample, limits, _agreement(worker.parallel_config.world_size))
    if worker.parallel_config.pipeline_parallel_size > 1:
        found["unmeasured"].append("a step: its stages run on several devices in turn")
        return
    with without_connector(worker.model_runner):
        left_s = (1 - _LINK_SHARE) * budget_s
        found |= _tried("a step", lambda: {"step": steps.measure(prior, left_s)}, found)


def _agreement(ranks: int) -> Callable[[bool], bool]:
    if ranks == 1:
        return bool
    return lambda mine: bool(get_world_group().broadcast_object(mine, src=0))


def _tried(
    what: str, measure: Callable[[], dict[str, Any]], found: dict[str, Any]
) -> dict[str, Any]:
    try:
        return measure()
    except Exception as error:
        log.warning("engine_unmeasured", what=what, exc_info=error)
        found["unmeasured"].append(f"{what}: {error!r}")
        return {}
