"""Ray Serve LLM's engine protocol over an engine of our own (`engine.loop`) on a thread. It
generates text and nothing else: what else the protocol asks is refused by name."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import structlog
from ray.llm._internal.serve.core.configs.openai_api_models import ErrorInfo, ErrorResponse
from ray.llm._internal.serve.core.engine.protocol import LLMEngine
from ray.serve.llm.openai_api_models import ChatCompletionResponse, CompletionResponse
from starlette.applications import Starlette

from engine.loop import Engine
from engine.profile import machine_peaks
from engine.runner import EngineRunner, EngineStopped
from engine.sequence import RequestRefused
from workers import generated
from workers.identity import WorkerPlan
from workers.own_engine.app import engine_app
from workers.own_engine.openai import AnswerText, Body, BodyRefused, OpenAIAnswer, read_body
from workers.own_engine.reports import EngineReports
from workers.request_metadata import charges_of
from workers.vllm.arguments import Endpoints

log = structlog.get_logger(__name__)

OWN_KEY = "kappa_own"
"""Of the `OwnPlan` in an engine's arguments."""

_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class OwnPlan:
    """What an engine of ours must know: its worker's plan, name and rank, and where it reports."""

    plan: WorkerPlan
    worker: str
    rank: int
    endpoints: Endpoints


@dataclass(frozen=True, slots=True)
class Built:
    """An engine before it runs. eos: tokens that end an answer. close: gives its memory back, when
    its thread has ended."""

    engine: Engine
    reports: EngineReports
    tokenizer: Any
    eos: tuple[int, ...]
    close: Callable[[], None]


class OwnEngine(LLMEngine):
    """What `LLMServer` drives. A subclass builds the engine, and says what it is called in a
    sentence, and what answers that are not streamed have as their `system_fingerprint`."""

    CALLED: ClassVar[str]
    FINGERPRINT: ClassVar[str | None] = None

    def __init__(self, llm_config: Any) -> None:
        self.own: OwnPlan = llm_config.engine_kwargs[OWN_KEY]
        self.plan = self.own.plan
        self._model: str = llm_config.model_id
        self._built: Built | None = None
        self._runner: EngineRunner | None = None
        self._failure_logged = False

    @abstractmethod
    def build(self) -> Built:
        """Make the engine; may take minutes, on a thread of its own."""

    async def start(self) -> None:
        built = await asyncio.get_running_loop().run_in_executor(None, self.build)
        self._built = built
        self._runner = EngineRunner(built.engine, built.reports.publish)

    async def check_health(self) -> None:
        """Raise if the engine's thread has failed: Ray Serve then replaces the replica."""
        if self._runner is None or self._built is None:
            raise RuntimeError(f"{self.CALLED} has not started")
        if (error := self._runner.error) is not None:
            if not self._failure_logged:
                self._failure_logged = True
                log.error("engine_failed", exc_info=error)
            raise RuntimeError(f"{self.CALLED} has failed: {error!r}")

    @property
    def owed(self) -> int:
        """Requests that are not answered, whatever their clients have read of it."""
        return 0 if self._runner is None else self._runner.owed

    async def shutdown(self) -> None:
        runner, built = self._runner, self._built
        if runner is None or built is None:
            return
        try:
            await asyncio.get_running_loop().run_in_executor(None, runner.stop, _STOP_S)
            # Only now: until the thread and its copies have ended, the memory is in use.
            built.close()
        finally:
            built.reports.close()

    # -- one request --------------------------------------------------------------------------

    def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return self._answer(request, "chat")

    def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return self._answer(request, "completions")

    async def build_asgi_app(self) -> Starlette:
        """What the worker's own port serves."""
        return engine_app(self._answer, self.check_health)

    async def _answer(self, body: Any, kind: str) -> AsyncGenerator[Any, None]:
        assert self._built is not None
        try:
            async for item in self._generate(read_body(body, self._built.eos), body, kind):
                yield item
        except BodyRefused as error:
            yield error_answer(400, str(error), error.param)
        except (RequestRefused, ValueError) as error:
            yield error_answer(400, str(error))
        except EngineStopped as error:
            yield error_answer(500, str(error))

    async def _generate(self, body: Body, raw: Any, kind: str) -> AsyncGenerator[Any, None]:
        assert self._runner is not None and self._built is not None
        request = body.request
        answer = OpenAIAnswer(kind, request.name, self._model, time.time(), len(request.tokens))
        text = AnswerText(self._built.tokenizer, body)
        # What others charged each tenant, and its weight, for rules that care. Not waited for: the
        # engine's thread does its calls in order, so the request comes after it.
        charges, weights = charges_of(getattr(raw, "vllm_xargs", None) or {}, request.tenant)
        self._runner.call(lambda engine: engine.charge(charges, weights))
        stream = self._runner.stream(request)
        whole: list[str] = []
        opening = answer.opening() if body.stream else ""
        output_tokens, cached_tokens, reason = 0, 0, "stop"
        approximate: int | None = None
        tally = generated.current()
        try:
            async for output in stream:
                if opening:
                    yield opening
                    opening = ""
                output_tokens += len(output.tokens)
                if tally is not None:
                    tally.tokens += len(output.tokens)
                over = output.finish_reason
                if output.account is not None:
                    cached_tokens = output.account.cached_tokens
                    approximate = output.account.approximate_tokens if request.approx else None
                shown = text.push(output.tokens, over is not None)
                over = "stop" if text.stopped else over
                if body.stream:
                    yield answer.chunk(shown, over)
                else:
                    whole.append(shown)
                if over is not None:
                    reason = over
                    break
        finally:
            await stream.aclose()
        usage = answer.usage(output_tokens, cached_tokens, approximate)
        if body.stream:
            yield answer.closing(usage if body.include_usage else None)
            return
        shape = ChatCompletionResponse if kind == "chat" else CompletionResponse
        made = answer.whole("".join(whole), reason, usage)
        if self.FINGERPRINT is not None:
            made["system_fingerprint"] = self.FINGERPRINT
        yield shape.model_validate(made)

    # -- what else the protocol asks ----------------------------------------------------------

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> Any:
        yield self._has_no("embeddings")

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> Any:
        yield self._has_no("transcriptions")

    async def resolve_lora(self, lora_model: Any) -> None:
        raise ValueError(f"{self.CALLED} serves no LoRA adapters")

    def routing_stats(self) -> dict[str, Any]:
        """Nothing of Ray's own; the announcement is added by the replica."""
        return {}

    async def reset_prefix_cache(self) -> None:
        raise NotImplementedError(f"{self.CALLED} keeps its caches")

    async def collective_rpc(self, method: str, *_: Any, args: Any = (), **__: Any) -> list[Any]:
        """`kappa_profile` measures this process, for real; there is no other method."""
        if method != "kappa_profile":
            raise ValueError(f"{self.CALLED} has no method {method!r}")
        loop = asyncio.get_running_loop()
        return [await loop.run_in_executor(None, machine_peaks, *args)]

    def _has_no(self, what: str) -> ErrorResponse:
        return error_answer(400, f"{self.CALLED[0].upper()}{self.CALLED[1:]} has no {what}.")


def error_answer(status: int, message: str, param: str | None = None) -> ErrorResponse:
    """What `LLMServer` takes instead of an answer."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return ErrorResponse(error=ErrorInfo(message=message, type=kind, param=param, code=status))
