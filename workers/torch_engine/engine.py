"""Our own torch engine as a Ray Serve LLM engine: `engine: torch` in the settings.

The same replica, report stream and router as with vLLM; only what computes is ours. The engine runs
on a thread of the replica's process (`engine.runner`); its reports go the way of a vLLM engine's
(`workers.torch_engine.reports`). Load plans come from rates that are measured at the start.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
import torch
from ray.serve.llm.openai_api_models import ChatCompletionResponse, CompletionResponse
from transformers import AutoTokenizer

from engine.arena import Arena, ArenaSize
from engine.config import read_config
from engine.forward import Forward
from engine.loop import Engine
from engine.profiling import cached_profile
from engine.runner import EngineRunner, EngineStopped
from engine.sequence import RequestRefused
from engine.settings import EngineSettings
from engine.transfer import mover_for
from engine.weights import DTYPES, load_weights
from kappa.plans.architecture import architecture_from_config
from kappa.plans.measured import as_measured, rates_from_measured
from kappa.plans.planners import Planning
from kappa.plans.rates import PlanRates, rates_from_law
from kappa.protocol import REQUEST_ID_KEY
from scheduler.config import FairConfig
from workers.identity import measured_node
from workers.own_engine.answers import Answer, AnswerText, Asked, BodyRefused, asked
from workers.own_engine.base import OwnEngine, error_answer
from workers.profiler import measure
from workers.request_metadata import DEFAULT_TENANT, charges_of, tenant_of
from workers.torch_engine.lanes import make_lanes
from workers.torch_engine.plan import TorchPlan, host_blocks
from workers.torch_engine.reports import TorchReports

log = structlog.get_logger(__name__)

_STOP_S = 30.0
# An iteration of a full budget takes seconds, and a load that hangs is given up after a minute.
_HANG_S = 120.0


class TorchEngine(OwnEngine):
    """`llm_config.engine_kwargs["kappa_torch"]` holds a `TorchPlan`."""

    CALLED = "the engine of kind torch"

    def __init__(self, llm_config: Any) -> None:
        self._plan: TorchPlan = llm_config.engine_kwargs["kappa_torch"]
        self._model = llm_config.model_id
        self._runner: EngineRunner | None = None
        self._reports: TorchReports | None = None
        self._arena: Arena | None = None
        self._forward: Forward | None = None
        self._failure_told = False
        self.rates: dict[str, Any] = {}

    async def start(self) -> None:
        """Load the model, measure its rates, start the thread."""
        await asyncio.get_running_loop().run_in_executor(None, self._build)

    async def check_health(self) -> None:
        """Raise if the engine's thread has failed or hangs: Ray Serve then replaces the replica."""
        runner, reports = self._runner, self._reports
        if runner is None or reports is None:
            raise RuntimeError("the engine has not started")
        if runner.error is not None:
            if not self._failure_told:
                self._failure_told = True
                log.error("engine_failed", exc_info=runner.error)
            raise RuntimeError(f"the engine has failed: {runner.error!r}")
        idle_s = time.monotonic() - reports.ran_s
        if idle_s > _HANG_S and reports.was_busy:
            raise RuntimeError(f"the engine has not ended an iteration for {idle_s:.0f} s")

    def shutdown(self) -> None:
        """Stop the thread, within a bound."""
        if self._runner is None:
            return
        try:
            self._runner.stop(_STOP_S)
            if self._forward is not None:
                self._forward.close()
            # Only now: until the thread and its copies have ended, the memory is in use.
            if self._arena is not None:
                self._arena.close()
        finally:
            if self._reports is not None:
                self._reports.close()

    # -- the engine ---------------------------------------------------------------------------

    def _build(self) -> None:
        plan = self._plan
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = DTYPES[plan.dtype]
        raw = json.loads((Path(plan.source) / "config.json").read_text(encoding="utf-8"))
        config = read_config(raw, self._model)
        weights = load_weights(plan.source, config, dtype=dtype, convert=True, device=device)
        settings = EngineSettings(
            budget_tokens=plan.max_batch_tokens,
            max_running=plan.max_sequences,
            scheduler=plan.scheduler,
            fair=FairConfig(**plan.fair),
            planner=plan.planner,
            act_share=plan.act_share,
            cpu_room_share=plan.cpu_room_share,
        )
        kv_host, act_host = host_blocks(config.shape, plan.host_blocks, plan.act_share)
        size = ArenaSize(
            plan.device_blocks,
            kv_host,
            settings.capture_blocks(plan.block_tokens),
            act_host,
            block_tokens=plan.block_tokens,
        )
        self._arena = arena = Arena(config.shape, size, dtype=dtype, device=device)
        mover = mover_for(device)
        self._forward = forward = Forward(weights, arena, mover, cpu_threads=plan.cpu_threads)
        kinds = architecture_from_config(raw).kinds()
        rates = self._measured(forward)
        planning = Planning(
            plan.block_tokens, rates, activations="A" in kinds, cpu=plan.cpu_threads > 0
        )
        if plan.act_share and "A" not in kinds:
            raise ValueError(
                f"engine.act_share is {plan.act_share}, but the KV of {self._model} cannot be made "
                "from activations: set it to 0"
            )
        self._reports = TorchReports(
            plan.stats_endpoint, plan.kv_endpoint, plan.log, plan.device_blocks + plan.host_blocks
        )
        lanes = None
        if plan.approx != "never":
            lanes = make_lanes(plan.lanes, forward, rates, plan.max_context_tokens)
        engine = Engine(
            forward, settings, planning, observer=self._reports, sparse=lanes,
        )  # fmt: skip
        self._tokenizer = AutoTokenizer.from_pretrained(plan.source)
        self._eos = [i for i in (self._tokenizer.eos_token_id,) if i is not None]
        self._runner = EngineRunner(engine, self._reports.publish)

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

    # -- one request --------------------------------------------------------------------------

    async def answer(self, body: Any, kind: str) -> AsyncGenerator[Any, None]:
        """What the model says to it."""
        assert self._runner is not None
        try:
            request = asked(body, self._eos)
            async for item in self._generate(request, body, kind):
                yield item
        except BodyRefused as error:
            yield error_answer(400, str(error), error.param)
        except (RequestRefused, ValueError) as error:
            yield error_answer(400, str(error))
        except EngineStopped as error:
            yield error_answer(500, str(error))

    async def _generate(self, request: Asked, body: Any, kind: str) -> AsyncGenerator[Any, None]:
        assert self._runner is not None
        extra = getattr(body, "vllm_xargs", None) or {}
        name = str(extra.get(REQUEST_ID_KEY, body.request_id))
        answer = Answer(kind, name, self._model, time.time(), len(request.tokens))
        text = AnswerText(self._tokenizer, request)
        whole: list[str] = []
        self._tell_charges(extra)
        stream = self._runner.stream(
            request.tokens,
            request.max_tokens,
            request.sampling,
            tenant=_tenant(extra),
            planner=request.plan or None,
            salt=request.salt,
            name=name,
            approx=request.approx,
        )
        opened = False
        output_tokens, cached_tokens, reason = 0, 0, "stop"
        approximate: int | None = None
        try:
            async for output in stream:
                if request.stream and not opened:
                    opened = True
                    if opening := answer.opening():
                        yield opening
                output_tokens += len(output.tokens)
                over = output.finish_reason
                if output.account is not None:
                    account = output.account
                    cached_tokens = account.device_tokens + account.loaded_tokens
                    cached_tokens += account.activation_tokens + account.sparse_tokens
                    cached_tokens += account.kept_tokens
                    approximate = account.approximate_tokens if request.approx else None
                shown = text.push(output.tokens, over is not None)
                if text.stopped:
                    over = "stop"
                if request.stream:
                    yield answer.piece(shown, over)
                else:
                    whole.append(shown)
                if over is not None:
                    reason = over
                    break
        finally:
            await stream.aclose()
        usage = answer.usage(output_tokens, cached_tokens, approximate)
        if request.stream:
            yield answer.closing(usage if request.include_usage else None)
            return
        shape = ChatCompletionResponse if kind == "chat" else CompletionResponse
        yield shape.model_validate(answer.whole("".join(whole), reason, usage))

    def _tell_charges(self, extra: Mapping[str, Any]) -> None:
        """What others charged each tenant, and this one's weight, for rules that care.

        Not waited for: the engine's thread answers in order, so the request comes after it.
        """
        assert self._runner is not None
        charges, weights = charges_of(extra, _tenant(extra))
        self._runner.call(lambda engine: engine.heard(charges, weights))


def _tenant(extra: Mapping[str, Any]) -> str:
    return tenant_of(extra) or DEFAULT_TENANT
