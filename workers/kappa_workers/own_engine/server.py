"""An engine of ours as a Ray Serve LLM engine: Ray's vLLM engine, with vLLM's front end and all its
APIs, over a core of ours (`kappa_workers.own_engine.core`). It generates text and nothing else."""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import structlog
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from vllm.platforms import current_platform

from kappa_workers.identity import WorkerPlan
from kappa_workers.own_engine.core import Built, FrontEnd, OwnCore
from kappa_workers.vllm.arguments import Endpoints

# A front end needs a model's configuration for the length of a context alone; that of a large model
# would be refused on small machines (its quantization), or taken for another protocol's (Harmony).
# Which tokens end an answer is the tokenizer's to say.
_STAND_IN = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 1 << 20,
    "bos_token_id": None,
    "eos_token_id": None,
}

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OwnPlan:
    """The worker's plan, name and rank, and where the engine reports."""

    plan: WorkerPlan
    worker: str
    rank: int
    endpoints: Endpoints


class OwnEngine(VLLMEngine):
    """The engine that `LLMServer` drives. A subclass builds it, and gives its name in sentences and
    the `system_fingerprint` of its answers."""

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
        if not current_platform.device_type:  # vLLM's build for GPUs, on a machine without one
            current_platform.device_type = "cpu"
        with TemporaryDirectory(prefix="kappa-front-") as folder:
            config = {**_STAND_IN, "max_position_embeddings": self.plan.limits.max_context_tokens}
            (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            self.llm_config.update_engine_kwargs(hf_config_path=folder)
            await super().start()
        # Streamed, they ask the engine for the first time when they have begun to answer.
        responses = self._app_state.openai_serving_responses
        responses.create_responses = partial(self._respond, responses.create_responses)

    async def _respond(self, theirs: Any, request: Any, raw_request: Any = None) -> Any:
        self._engine_client.check((0,), request.to_sampling_params(1, {}))
        return await theirs(request, raw_request)

    def _front_arguments(self) -> dict[str, Any]:
        """vLLM's arguments for a front end; nothing of the model but its tokenizer is read."""
        return {
            "max_model_len": self.plan.limits.max_context_tokens,
            "enforce_eager": True,
            "generation_config": "vllm",
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
