"""Our torch engine as a Ray Serve LLM engine: `engine: torch` in the settings.

Load plans come from rates that are measured at the start. Which heads of sparse decoding keep their
KV on the device follows from what the machine was measured to load and compute.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
import torch
from transformers import AutoTokenizer

from engine.arena import Arena, ArenaSize
from engine.config import read_config
from engine.forward import Forward
from engine.loop import Engine
from engine.profile import cached_profile
from engine.settings import EngineOptions
from engine.sparse.forward import SparseForward, sparse_forward
from engine.transfer import mover_for
from engine.weights import DTYPES, load_weights
from kappa.plans.architecture import architecture_from_config
from kappa.plans.clo import equal_heads, layer_seconds, persistent_heads, prefetchable_heads
from kappa.plans.planners import Planning
from kappa.plans.rates import PlanRates, as_measured, rates_from_law, rates_from_measured
from scheduler.config import FairConfig
from workers.identity import measured_node
from workers.own_engine.plans import SparsePlan, TorchPlan, host_blocks
from workers.own_engine.reports import EngineReports, KvPublisher
from workers.own_engine.server import Built, OwnEngine
from workers.profiler import measure

log = structlog.get_logger(__name__)


class TorchEngine(OwnEngine):
    """`llm_config.engine_kwargs["kappa_torch"]` holds a `TorchPlan`."""

    CALLED = "the engine of kind torch"

    def __init__(self, llm_config: Any) -> None:
        super().__init__(llm_config.model_id)
        self._plan: TorchPlan = llm_config.engine_kwargs["kappa_torch"]
        self.rates: dict[str, Any] = {}

    def build(self) -> Built:
        """Load the model, measure its rates."""
        plan = self._plan
        raw = json.loads((Path(plan.source) / "config.json").read_text(encoding="utf-8"))
        kinds = architecture_from_config(raw).kinds()
        if plan.act_share and "A" not in kinds:
            raise ValueError(
                f"engine.act_share is {plan.act_share}, but the KV of {self._model} cannot be made "
                "from activations: set it to 0"
            )
        settings = EngineOptions(
            budget_tokens=plan.max_batch_tokens,
            max_running=plan.max_sequences,
            scheduler=plan.scheduler,
            fair=FairConfig(**plan.fair),
            planner=plan.planner,
            act_share=plan.act_share,
            cpu_room_share=plan.cpu_room_share,
        )
        forward = self._forward(raw, settings)
        rates = self._measured(forward)
        planning = Planning(
            plan.block_tokens, rates, activations="A" in kinds, cpu=plan.cpu_threads > 0
        )
        reports = EngineReports(
            plan.stats_endpoint, KvPublisher(plan.kv_endpoint), plan.log,
            plan.device_blocks + plan.host_blocks,
        )  # fmt: skip
        sparse = None
        if plan.approx != "never":
            sparse = _sparse(plan.sparse, forward, rates, plan.max_context_tokens)
        engine = Engine(forward, settings, planning, observer=reports, sparse=sparse)
        tokenizer = AutoTokenizer.from_pretrained(plan.source)
        eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)

        def close() -> None:
            forward.close()
            forward.arena.close()

        return Built(engine, reports, tokenizer, eos, close)

    def _forward(self, raw: dict[str, Any], settings: EngineOptions) -> Forward:
        plan = self._plan
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype, config = DTYPES[plan.dtype], read_config(raw, self._model)
        weights = load_weights(plan.source, config, dtype=dtype, device=device)
        kv_host, act_host = host_blocks(config.shape, plan.host_blocks, plan.act_share)
        captured = settings.capture_blocks(plan.block_tokens)
        size = ArenaSize(plan.device_blocks, kv_host, captured, act_host, plan.block_tokens)
        arena = Arena(config.shape, size, dtype=dtype, device=device)
        return Forward(weights, arena, mover_for(device), cpu_threads=plan.cpu_threads)

    def _measured(self, forward: Forward) -> PlanRates:
        """Rates of this machine, as measured; on one too busy for that, by law from its peaks."""
        try:
            self.rates = cached_profile(forward, self._plan.rates_dir)
            return rates_from_measured(self.rates)
        except ValueError as error:
            log.warning("rates_by_law", reason=str(error), planner=self._plan.planner)
        figures = measure(dict(self._plan.profile))
        node = measured_node(replace(self._plan.node, source="catalogue"), figures)
        rates = rates_from_law(forward.config.shape, node)
        self.rates = as_measured(rates, self._model, node.gpu)
        return rates


def _sparse(plan: SparsePlan, forward: Forward, rates: PlanRates, max_tokens: int) -> SparseForward:
    """Sparse decoding of requests of up to `max_tokens`, answers included."""
    shape, settings = forward.config.shape, replace(plan.settings, max_tokens=max_tokens)
    heads = plan.heads or equal_heads(shape)
    layer_s = layer_seconds(rates, settings.clo, settings.slots, max_tokens)
    ahead = prefetchable_heads(shape, settings.clo, max_tokens, layer_s, rates.h2d_bytes_per_s)
    persistent = persistent_heads(
        shape, settings.clo, heads, ahead / settings.slots, most_heads=plan.persistent_heads
    )
    return sparse_forward(forward, settings, persistent=persistent, heads=heads)
