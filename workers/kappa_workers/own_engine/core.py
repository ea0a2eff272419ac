"""An engine of ours as the core of vLLM's front end: requests that vLLM would send to its engine's
process go to our engine's thread, and outputs come back in vLLM's shapes. Tokenizing, chat
templates, stop strings, streams and every API are vLLM's own. Private names of vLLM:
tests/workers/test_contracts.py."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    async_llm,
)
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor
from vllm.v1.metrics.stats import PrefillStats

from kappa_engine.account import Account
from kappa_engine.engine_thread import EngineThread
from kappa_engine.llm_engine import Engine
from kappa_engine.peaks import machine_peaks
from kappa_engine.sampling import GREEDY
from kappa_engine.sequence import EngineRequest, Output
from kappa_workers.own_engine.asked import engine_request, refuse_unknown
from kappa_workers.own_engine.reports import EngineReports
from kappa_workers.request_metadata import charges_of

_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Built:
    """An engine before it runs."""

    engine: Engine
    reports: EngineReports
    # Frees its memory, once its thread has ended.
    close: Callable[[], None]


@dataclass(slots=True)
class _Served:
    """Makes a request's outputs in vLLM's shapes."""

    request: EngineCoreRequest
    params: SamplingParams
    # Replace the engine's tokens, in turn.
    words: Sequence[int]
    tokens: int = 0

    def output(self, given: Output) -> EngineCoreOutput:
        """The next output."""
        tokens, before, over = given.tokens, self.tokens, given.finish_reason
        self.tokens += len(tokens)
        if self.words:
            tokens = [self.words[i % len(self.words)] for i in range(before, self.tokens)]
        stopped = tokens[-1] if over == "stop" and tokens else None
        return EngineCoreOutput(
            request_id=self.request.request_id,
            new_token_ids=tokens,
            finish_reason=None if over is None else FinishReason[over.upper()],
            stop_reason=None if stopped == self.params.eos_token_id else stopped,
            prefill_stats=None if before or given.account is None else self._stats(given.account),
        )

    def _stats(self, account: Account) -> PrefillStats:
        stats, device = PrefillStats(), account.device_tokens
        prompt = len(self.request.prompt_token_ids or ())
        stats.set(prompt, device, account.cached_tokens - device)
        return stats


class OwnCore(EngineCoreClient):
    """Runs an engine for a `FrontEnd` on the running event loop, until it is shut down. words: what
    answers consist of if the engine's tokens mean nothing; empty: they do."""

    def __init__(self, built: Built) -> None:
        self.engine = built.engine
        self.words: Sequence[int] = ()
        self.runner = EngineThread(built.engine, built.reports.publish)
        self._built: Built | None = built
        self._loop = asyncio.get_running_loop()
        self._submitted: dict[str, Future[int]] = {}
        # The engine's thread appends, and says so unless that was said and not heard yet.
        self._outputs: deque[EngineCoreOutput] = deque()
        self._news, self._said = asyncio.Event(), False

    # -- requests -----------------------------------------------------------------------------

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Begin a request without waiting, so that it can be aborted meanwhile."""
        params = request.sampling_params
        assert params is not None  # There is no task but to generate.
        asked = self.asked(request.prompt_token_ids, params, request.cache_salt, request.priority)
        # What others charged each tenant, and its weight, for rules that care. The engine's thread
        # does its calls in order, so the request comes after it.
        charges, weights = charges_of(params.extra_args or {}, asked.tenant)
        self.runner.call(lambda engine: engine.charge(charges, weights))
        answer = _Served(request, params, self.words)
        submitted = self.runner.submit(asked, lambda given: self._give(answer.output(given)))
        self._submitted[request.request_id] = submitted
        submitted.add_done_callback(partial(self._begun, answer))

    def asked(
        self, tokens: Sequence[int] | None, params: SamplingParams, salt: str | None, priority: int
    ) -> EngineRequest:
        """A request as the engine's."""
        asked = engine_request(tokens or (), params, salt, priority)
        return replace(asked, sampling=GREEDY) if self.words else asked

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if (submitted := self._submitted.pop(request_id, None)) is not None:
                self.runner.withdraw(submitted)

    async def get_output_async(self) -> EngineCoreOutputs:
        """The outputs since the last call, once there is one.

        Raises:
            EngineDeadError: the engine's thread has failed.
        """
        while not self._outputs:
            if self.engine_dead:
                raise EngineDeadError from self.runner.error
            await self._news.wait()
            self._news.clear()
            self._said = False
        outputs = [self._outputs.popleft() for _ in range(len(self._outputs))]
        for output in outputs:
            if output.finished:
                self._submitted.pop(output.request_id, None)
        return EngineCoreOutputs(outputs=outputs)

    def _begun(self, answer: _Served, submitted: Future[int]) -> None:
        """End a request as failed that the engine refuses after all, or did not live to take."""
        if submitted.exception() is not None:
            self._give(answer.output(Output(0, [], "error")))

    def _give(self, output: EngineCoreOutput) -> None:
        if output.finish_reason != FinishReason.ERROR or not self.engine_dead:
            self._outputs.append(output)
        if not self._said:
            self._said = True
            self._loop.call_soon_threadsafe(self._news.set)

    # -- what else vLLM asks ------------------------------------------------------------------

    @property
    def resources(self) -> OwnCore:
        """Where vLLM looks whether its engine is dead."""
        return self

    @property
    def engine_dead(self) -> bool:
        return self.runner.error is not None

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def collective_rpc_async(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        """`kappa_profile` measures this process, for real; there is no other method."""
        if method != "kappa_profile":
            raise ValueError(f"an engine of ours has no method {method!r}")
        return [await asyncio.to_thread(machine_peaks, *args)]

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine's thread, then free its memory, which its copies use until then."""
        built, self._built = self._built, None
        if built is None:
            return
        try:
            self.runner.stop(_STOP_S)
            built.close()
        finally:
            built.reports.close()


class FrontEnd(async_llm.AsyncLLM):
    """vLLM's front end over a core of ours. called: the engine, in a sentence."""

    engine_core: OwnCore

    def __init__(self, config: VllmConfig, core: OwnCore, called: str) -> None:
        self._called = called
        # There is no other way in: vLLM would start its engine's process here.
        theirs = async_llm.EngineCoreClient
        async_llm.EngineCoreClient = SimpleNamespace(make_async_mp_client=lambda **_: core)
        try:
            super().__init__(config, Executor, log_stats=False, log_requests=False)
        finally:
            async_llm.EngineCoreClient = theirs

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **more: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As vLLM's, but what the engine cannot serve is refused at once, before a stream begins.
        Raises as `check` does."""
        self.check(prompt.get("prompt_token_ids"), sampling_params)
        return super().generate(prompt, sampling_params, request_id, **more)

    def check(self, tokens: Sequence[int] | None, params: SamplingParams) -> None:
        """Raise `VLLMValidationError`, with the field or the misfit, for a prompt or parameters
        that the engine cannot serve."""
        refuse_unknown(params, self._called)
        try:
            self.engine_core.engine.check(self.engine_core.asked(tokens, params, None, 0))
        except ValueError as error:
            raise VLLMValidationError(str(error)) from None
