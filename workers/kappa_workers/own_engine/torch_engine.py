"""Our torch engine as a Ray Serve LLM engine: `engine: torch` in the settings. Load plans, and
which heads of sparse decoding keep their KV on the device, come from rates measured at the
start."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import structlog
import torch

from kappa.hardware import NodeProfile
from kappa.model import ModelShape
from kappa.plans.clo import (
    CloConfig,
    SparseSettings,
    equal_heads,
    layer_seconds,
    persistent_heads,
    prefetchable_heads,
)
from kappa.plans.hybridserve import planned_share
from kappa.plans.measured import as_measured, rates_from_measured
from kappa.plans.planners import Planning, host_planners
from kappa.plans.rates import PlanRates, rates_from_law
from kappa_engine.config import read_config
from kappa_engine.forward import Forward
from kappa_engine.kv_cache import Arena, ArenaSize
from kappa_engine.llm_engine import Engine
from kappa_engine.peaks import machine_peaks
from kappa_engine.profile import cached_profile
from kappa_engine.settings import EngineOptions
from kappa_engine.sparse.forward import SparseForward, sparse_forward
from kappa_engine.sparse.serving import SparseServing
from kappa_engine.transfer import mover_for
from kappa_engine.weights import DTYPES, HostWeights, Weights, load_weights
from kappa_scheduler.config import FairConfig
from kappa_workers.identity import WorkerPlan, measured_node
from kappa_workers.own_engine.core import Built
from kappa_workers.own_engine.reports import EngineReports, KvPublisher
from kappa_workers.own_engine.server import OwnEngine

log = structlog.get_logger(__name__)


class TorchEngine(OwnEngine):
    """An engine of the model in its plan's `model_source`; rates: as this machine was measured."""

    CALLED = "the engine of kind torch"
    rates: dict[str, Any]

    def build(self) -> Built:
        plan, limits, given = self.plan, self.plan.limits, self.plan.engine
        act_share = given.act_share
        to_plan = given.planner == "host-hybrid" and not act_share
        if to_plan:
            # To be measured with; the planned share replaces it.
            act_share = 0.5
        settings = EngineOptions(
            budget_tokens=limits.max_batch_tokens,
            max_running=limits.max_sequences,
            scheduler=plan.scheduler.rule,
            fair=FairConfig(**plan.scheduler.config),
            planner=given.planner,
            act_share=act_share,
            keep_kv=given.planner != "host-hybrid",
            act_device_blocks=given.act_device_blocks,
            cpu_room_share=given.cpu_room_share,
        )
        weights = self._weights()
        forward = self._forward(weights, settings)
        rates = self._measured(forward)
        if to_plan:
            on_device = given.act_device_blocks
            act_share = planned_share(
                rates, limits.block_tokens, limits.host_bytes, limits.max_sequences,
                device_act_blocks=on_device,
            )  # fmt: skip
            log.info("act_share_planned", act_share=act_share, act_blocks_on_device=on_device)
            settings = replace(settings, act_share=act_share)
            forward.close()
            forward.mover.stop()
            forward.arena.close()
            forward = self._forward(weights, settings)
        cpu, host = given.cpu_threads > 0, host_planners(given.planner, act_share)
        planning = Planning(limits.block_tokens, rates, cpu=cpu, host=host)
        endpoints, iterations = self.own.endpoints, plan.scheduler.for_rank(self.own.rank).log
        blocks = limits.device_blocks + plan.host_blocks
        kv_events = KvPublisher(endpoints.kv_events)
        reports = EngineReports(endpoints.stats, kv_events, iterations, blocks)
        approximate = None
        if given.approx != "never":
            approximate = partial(SparseServing, _sparse(plan, forward, rates))
        engine = Engine(forward, settings, planning, observer=reports, approximate=approximate)

        def close() -> None:
            forward.close()
            forward.arena.close()

        return Built(engine, reports, close)

    def _weights(self) -> Weights:
        plan = self.plan
        device = given_device(plan.gpus, ray.get_gpu_ids() if plan.gpus else (), os.environ)
        dtype, config = DTYPES[plan.limits.dtype], read_config(plan.model_source, self._model)
        placed = plan.engine.weights
        host = HostWeights(placed.share if placed.place == "host" else 0.0, placed.part)
        return load_weights(plan.model_source, config, dtype=dtype, device=device, host=host)

    def _forward(self, weights: Weights, settings: EngineOptions) -> Forward:
        plan, limits = self.plan, self.plan.limits
        shape, device = weights.config.shape, weights.device
        kv_host, act_host = host_blocks(
            shape, plan.host_blocks, settings.act_share, keep_kv=settings.keep_kv,
            on_device=settings.act_device_blocks,
        )  # fmt: skip
        act_device = settings.capture_blocks(limits.block_tokens) + settings.act_device_blocks
        size = ArenaSize(limits.device_blocks, kv_host, act_device, act_host, limits.block_tokens)
        arena = Arena(shape, size, dtype=weights.dtype, device=device)
        return Forward(weights, arena, mover_for(device), cpu_threads=plan.engine.cpu_threads)

    def _measured(self, forward: Forward) -> PlanRates:
        """Measured rates of this machine; on one too busy to be measured, rates by law from its
        peaks."""
        try:
            self.rates = cached_profile(forward, str(Path(self.plan.cache_dir) / "profiles"))
            return rates_from_measured(self.rates)
        except ValueError as error:
            log.warning("rates_by_law", reason=str(error), planner=self.plan.engine.planner)
        node = self._by_peaks()
        rates = rates_from_law(forward.config.shape, node)
        self.rates = as_measured(rates, self._model, node.gpu)
        return rates

    def _by_peaks(self) -> NodeProfile:
        """This machine, with its link and its products measured."""
        prior = replace(self.plan.node(self.own.rank), source="catalogue", dilation=1.0)
        return measured_node(prior, machine_peaks(self.plan.profile_request()))


def given_device(
    gpus: int, ids: Sequence[object], environment: MutableMapping[str, str]
) -> torch.device:
    """The GPU that Ray gave this process, or its CPU; no other GPU is visible to it afterwards.
    Call before anything asks for CUDA. gpus: that the worker was placed by; ids: Ray's.

    Raises:
        ValueError: there is none, or torch cannot use it.
    """
    if gpus and not ids:
        raise ValueError("placement.gpus is 1, and Ray gave this worker no GPU")
    # All threads of this process then mean this one by "cuda", and without one, none.
    if gpus or torch.backends.cuda.is_built():
        environment["CUDA_VISIBLE_DEVICES"] = str(ids[0]) if gpus else ""
    if not gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            f"Ray gave this worker GPU {ids[0]}, and torch {torch.__version__} cannot use it: is "
            "this its CUDA build, and the driver new enough ('nvidia-smi')?"
        )
    return torch.device("cuda", 0)


def host_blocks(
    shape: ModelShape, blocks: int, act_share: float, *, keep_kv: bool = True, on_device: int = 0
) -> tuple[int, int]:
    """Blocks of KV and of activations in the room of `blocks` blocks of KV: `act_share` of the
    stored blocks have activations, beside their KV (`keep_kv`) or in its place; `on_device` of
    these take no such room."""
    ratio = shape.hidden / (2 * shape.kv_heads * shape.head_dim)
    kv_share = 1.0 if keep_kv else 1.0 - act_share
    stored = (blocks + ratio * on_device) / (kv_share + act_share * ratio)
    return min(int(kv_share * stored), blocks), max(int(act_share * stored) - on_device, 0)


def _sparse(plan: WorkerPlan, forward: Forward, rates: PlanRates) -> SparseForward:
    """Sparse decoding of requests of up to the longest context, answers included."""
    shape, max_tokens, s = forward.config.shape, plan.limits.max_context_tokens, plan.engine.sparse
    clo = CloConfig(s.share, s.sink_tokens, s.recent_tokens, s.eta, s.power, s.epsilon, s.code_bits)
    settings = SparseSettings(
        clo, s.lanes, max_tokens, s.retriever, s.prefetch, s.max_age, s.chunk_tokens
    )
    heads = plan.heads or equal_heads(shape)
    layer_s = layer_seconds(rates, settings.clo, settings.slots, max_tokens)
    ahead = prefetchable_heads(shape, settings.clo, max_tokens, layer_s, rates.h2d_bytes_per_s)
    persistent = persistent_heads(
        shape, settings.clo, heads, ahead / settings.slots, most_heads=s.persistent_heads
    )
    return sparse_forward(forward, settings, persistent=persistent, heads=heads)
