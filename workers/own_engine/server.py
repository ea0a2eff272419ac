"""An engine of ours as a Ray Serve LLM engine: Ray's vLLM engine, with vLLM's front end and all its
APIs, over a core of ours (`workers.own_engine.core`). It generates text and nothing else."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import structlog
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine

from workers.identity import WorkerPlan
from workers.own_engine.core import Built, FrontEnd, OwnCore
from workers.vllm.arguments import Endpoints

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OwnPlan:
    """What an engine of ours must know: its worker's plan, name and rank, and where it reports."""

    plan: WorkerPlan
    worker: str
    rank: int
    endpoints: Endpoints


class OwnEngine(VLLMEngine):
    """What `LLMServer` drives. A subclass builds the engine, and says what it is called in a
    sentence, and what answers have as their `system_fingerprint`."""

    CALLED: ClassVar[str]
    FINGERPRINT: ClassVar[str | None] = None

    def __init__(self, llm_config: Any, own: OwnPlan) -> None:
        self.own, self.plan = own, own.plan
        self._model: str = llm_config.model_id
        self._core: OwnCore | None = None
        self._failure_logged = False
        llm_config.update_engine_kwargs(**self._front_arguments())
        super().__init__(llm_config)

    @abstractmethod
    def build(self) -> Built:
        """Make the engine; may take minutes, on a thread of its own."""

    def words(self, tokenizer: Any) -> Sequence[int]:
        """Tokens that answers consist of, where the engine's mean nothing."""
        return ()

    async def start(self) -> None:
        self._core = OwnCore(await asyncio.to_thread(self.build))
        await super().start()
        # Streamed, they ask the engine for the first time when they have begun to answer.
        responses = self._app_state.openai_serving_responses
        responses.create_responses = partial(self._respond, responses.create_responses)

    async def _respond(self, theirs: Any, request: Any, raw_request: Any = None) -> Any:
        self._engine_client.check((0,), request.to_sampling_params(1, {}))
        return await theirs(request, raw_request)

    def _front_arguments(self) -> dict[str, Any]:
        """vLLM's arguments for a front end alone: nothing of the model but its configuration and
        tokenizer is read, and what only vLLM's engine would make of these must not matter."""
        return {
            "max_model_len": self.plan.limits.max_context_tokens,
            "enforce_eager": True,
            "generation_config": "vllm",
            "language_model_only": True,
            "hf_overrides": {"quantization_config": None},
            "fingerprint_mode": "custom" if self.FINGERPRINT else "none",
            "fingerprint_value": self.FINGERPRINT,
        }

    def _start_async_llm_engine(self, args: Any, config: Any, placement_group: Any) -> FrontEnd:
        assert self._core is not None
        front = FrontEnd(config, self._core, self.CALLED)
        self._core.words = self.words(front.get_tokenizer())
        return front

    async def check_health(self) -> None:
        """Raise if the engine's thread has failed: Ray Serve then replaces the replica."""
        if self._core is None:
            raise RuntimeError(f"{self.CALLED} has not started")
        if (error := self._core.runner.error) is not None:
            if not self._failure_logged:
                self._failure_logged = True
                log.error("engine_failed", exc_info=error)
            raise RuntimeError(f"{self.CALLED} has failed: {error!r}")
        await super().check_health()

    async def shutdown(self) -> None:
        await super().shutdown()
        if self._core is not None:
            await asyncio.to_thread(self._core.shutdown)
        if self._engine_client is not None:
            self._engine_client.shutdown()
