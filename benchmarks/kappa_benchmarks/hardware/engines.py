"""The engines of the ladder behind one face: our torch engine, and vLLM as the settings make it.

Both answer prompts of token ids, empty the device's cache, and report seconds of loads and steps.
vLLM gets the arguments that a replica would give it (`kappa_workers.vllm.arguments`), so its host
tier is the one that the settings resolve to; what it loads and stores is read from our stats
channel.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kappa.model import kv_bytes_per_token
from kappa.plans.cpu_offload import Division
from kappa.plans.planners import Planning
from kappa.protocol import TENANT_KEY
from kappa.settings.cluster import ClusterSettings
from kappa_benchmarks.hardware.device import Device, read_shape
from kappa_benchmarks.vllm_engine import BareEngine, stats_in
from kappa_deploy.app.model import Model
from kappa_deploy.app.plan import worker_plan
from kappa_engine.config import read_config
from kappa_engine.forward import Forward
from kappa_engine.kv_cache import Arena, ArenaSize
from kappa_engine.llm_engine import Engine
from kappa_engine.sequence import EngineRequest
from kappa_engine.settings import EngineOptions
from kappa_engine.step import StepRow
from kappa_engine.transfer import mover_for
from kappa_engine.weights import DTYPES, load_weights
from kappa_workers.identity import WorkerPlan, configure_vllm, of_all_ranks
from kappa_workers.vllm.arguments import CPU_ENV, Endpoints

BLOCK_TOKENS = 16
"""Tokens of a block of our torch engine."""

_STORED_WAIT_S = 20.0
_ANSWER_WAIT_S = 120.0
# Tokens of the request that decodes before the others come.
_BEFORE_TOKENS = 8
# The last reports are a little behind the last tokens.
_REPORTS_S, _BROKEN_OFF_S = 0.05, 0.3
Ids = Sequence[int]


class Missing(RuntimeError):
    """The subject of a measurement is not installed here."""


@dataclass(slots=True)
class Answer:
    """The answer to a prompt."""

    submitted_s: float
    # Of the prompt: that were not computed.
    cached_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    # When each token came.
    times_s: list[float] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.submitted_s


@dataclass(slots=True)
class Played:
    """The prompts that were played together."""

    # In the order of the prompts.
    answers: list[Answer]
    # The request that decoded beside them, if there was one.
    beside: Answer | None = None
    # In which the engine loaded, by its own report.
    load_s: float = 0.0
    # (tokens, seconds) of each step, as vLLM reports them.
    steps: list[tuple[int, float]] = field(default_factory=list)


# Ours ---------------------------------------------------------------------------------------------


class _Watched(Forward):
    """A model that keeps its last logits."""

    last: Tensor

    def compute(self, *batches: Sequence[StepRow], division: Division | None = None) -> Tensor:
        self.last = super().compute(*batches, division=division)
        return self.last


class TorchServed:
    """Our engine, which loads all that is cached (planner "kv").

    tier: of host memory, by name. kv_bytes: of one token. serial_share: of the shorter of a load
    and the computing behind it, what the other does not hide.
    """

    tier = "own"

    def __init__(self, device: Device, model: Path, rule: str = "fair") -> None:
        sizes, config = device.sizes, read_config(model)
        dtype = DTYPES[sizes.dtype]
        room = (2 * sizes.cached[-1] + sizes.burst * (sizes.cached[0] + 512)) // BLOCK_TOKENS
        size = ArenaSize(room, 2 * room, block_tokens=BLOCK_TOKENS)
        arena = Arena(config.shape, size, dtype=dtype, device=device.torch)
        weights = load_weights(model, config, dtype=dtype, device=device.torch)
        self.forward = _Watched(weights, arena, mover_for(device.torch))
        options = EngineOptions(budget_tokens=8_192, scheduler=rule, planner="kv")
        self._engine = Engine(self.forward, options, Planning(BLOCK_TOKENS, activations=False))
        self.kv_bytes, self.serial_share = kv_bytes_per_token(config.shape), 1 / config.layers

    def close(self) -> None:
        self.forward.mover.stop()
        self.forward.close()
        self.forward.arena.close()

    def play(
        self, prompts: Sequence[Ids], tokens: int = 1, beside: Ids = (), likeliest: int = 0
    ) -> Played:
        """All prompts at once, `tokens` of answer each.

        Args:
            beside: a prompt that decodes already and goes on.
            likeliest: of a single prompt, how many log-probabilities are kept of each token.
        """
        engine, answers = self._engine, dict[int, Answer]()
        played, end_s = Played([]), time.monotonic() + _ANSWER_WAIT_S

        def submit(ids: Ids, count: int) -> Answer:
            answer = Answer(time.perf_counter())
            answers[engine.submit(EngineRequest(ids, count)).request_id] = answer
            return answer

        def step() -> None:
            outputs, now_s = engine.step(), time.perf_counter()
            for output in outputs:
                answer = answers[output.request_id]
                answer.tokens += output.tokens
                answer.times_s += [now_s] * len(output.tokens)
                if likeliest:
                    found = torch.log_softmax(self.forward.last[-1].float(), -1).topk(likeliest)
                    pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
                    answer.logprobs.append(dict(pairs))
                if output.account is not None:
                    answer.cached_tokens = output.account.cached_tokens
                    played.load_s += output.account.load_s
            if time.monotonic() > end_s:
                raise TimeoutError(f"no answer of the torch engine within {_ANSWER_WAIT_S:g} s")

        if beside:
            played.beside = submit(beside, 1_000_000)
            while len(played.beside.tokens) < _BEFORE_TOKENS:
                step()
        played.answers = [submit(ids, tokens) for ids in prompts]
        while any(len(answer.tokens) < tokens for answer in played.answers):
            step()
        for request_id in answers:
            engine.abort(request_id)
        while engine.busy:
            engine.step()
        return played

    def evict(self) -> bool:
        """Empty the device's cache, once the host tier holds everything; False if it does not."""
        engine, device = self._engine, self._engine.memory.device
        end_s = time.monotonic() + _STORED_WAIT_S
        while len(engine.store) and time.monotonic() < end_s:
            engine.step()
        device.release(device.take(device.available()))
        return not len(engine.store) and not len(device)


# vLLM ---------------------------------------------------------------------------------------------


def vllm_arguments(
    device: Device, model: Path, rule: str, folder: Path, eager: bool | None
) -> tuple[dict[str, Any], WorkerPlan]:
    """vLLM's arguments for one worker of a pool, and what that worker knows before it starts."""
    settings = ClusterSettings.model_validate({
        "model": {"id": "ladder", "source": str(model)}, "engine": device.sizes.engine,
        "scheduler": {"name": rule},
        "pools": [{"name": "ladder", "profile": "pcie", "placement": {"gpus": int(device.cuda)}}],
    })  # fmt: skip
    shape = read_shape(model, device.sizes.dtype)
    source = Model(str(model), shape, "")
    plan = worker_plan(settings, settings.all_pools[0], source, "127.0.0.1")
    endpoints = Endpoints(stats_in(folder), f"ipc://{folder}/kv")
    arguments = {
        "model": str(model), "skip_tokenizer_init": True, "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }  # fmt: skip
    config = SimpleNamespace(engine_kwargs={}, update_engine_kwargs=arguments.update)
    configure_vllm(config, plan, 0, endpoints, plan.engine_tier(0, {}))
    if eager is not None:
        arguments["enforce_eager"] = eager
    return arguments, plan


class VllmServed(BareEngine):
    """vLLM's engine, else as `TorchServed`."""

    serial_share = 1.0

    def __init__(
        self, device: Device, model: Path, rule: str = "fair", eager: bool | None = None
    ) -> None:
        if find_spec("vllm") is None:
            raise Missing("vLLM is not installed: ./dev setup brings it")
        os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR", **os.environ})
        os.environ.update({} if device.cuda else CPU_ENV)
        self._stored = self._to_store = self._number = 0
        self._reports: list[dict[str, Any]] = []
        self._runner = asyncio.Runner()

        def arguments(folder: Path) -> dict[str, Any]:
            made, self._plan = vllm_arguments(device, model, rule, folder, eager)
            return made

        async def start() -> None:
            BareEngine.__init__(self, arguments)

        self._runner.run(start())
        self.kv_bytes, self.tier = kv_bytes_per_token(self._plan.served), self._plan.tier
        self._block_tokens = int(self._llm.vllm_config.cache_config.block_size)

    def measured(self) -> dict[str, Any]:
        """The engine's own profile, as at a start; its blocks are written over."""
        request = self._plan.profile_request() | {"engine": self._plan.engine_request(0)}
        answer = self._llm.collective_rpc("kappa_profile", args=(request,))
        return of_all_ranks(self._runner.run(answer))

    def close(self) -> None:
        super().close()
        with suppress(Exception):
            self._runner.close()

    def play(
        self, prompts: Sequence[Ids], tokens: int = 1, beside: Ids = (), likeliest: int = 0
    ) -> Played:
        """As `TorchServed.play`."""
        self._read()
        self._reports.clear()
        played = self._runner.run(self._play(prompts, tokens, beside, likeliest))
        # Tokens that were found need not be stored again.
        for ids, answer in zip(prompts, played.answers, strict=True):
            full = len(ids) // self._block_tokens * self._block_tokens
            self._to_store += max(0, full - answer.cached_tokens)
        # The aborted request beside may still be stored: it must not count for the next prompts.
        time.sleep(_BROKEN_OFF_S if beside else _REPORTS_S)
        self._read()
        for report in self._reports:
            if report["kind"] == "load":
                played.load_s += report["took_s"]
            elif report["kind"] == "step":
                played.steps.append((report["tokens"], report["took_s"]))
        return played

    def evict(self) -> bool:
        """As `TorchServed.evict`, by the stores that were reported."""
        end_s = time.monotonic() + _STORED_WAIT_S
        while self._stored < self._to_store and time.monotonic() < end_s:
            self._runner.run(asyncio.sleep(_REPORTS_S))
            self._read()
        complete, self._stored, self._to_store = self._stored >= self._to_store, 0, 0
        # Blocks of requests that are just over are given back by the engine's next step.
        while not self._runner.run(self._llm.reset_prefix_cache()):
            if time.monotonic() > end_s + _STORED_WAIT_S:
                return False
            time.sleep(_REPORTS_S)
        return complete

    async def _play(
        self, prompts: Sequence[Ids], tokens: int, beside: Ids, likeliest: int
    ) -> Played:
        aside = Answer(0.0) if beside else None
        async with asyncio.timeout(_ANSWER_WAIT_S), asyncio.TaskGroup() as tasks:
            if aside is not None:
                decoding = tasks.create_task(self._answer(beside, 1_024, aside))
                while len(aside.tokens) < _BEFORE_TOKENS:
                    await asyncio.sleep(1e-3)
            answers = [Answer(time.perf_counter()) for _ in prompts]
            pairs = zip(prompts, answers, strict=True)
            await asyncio.gather(*(self._answer(i, tokens, a, likeliest) for i, a in pairs))
            if aside is not None:
                decoding.cancel()
        return Played(answers, aside)

    async def _answer(self, ids: Ids, tokens: int, answer: Answer, likeliest: int = 0) -> None:
        self._number += 1
        name, said = f"ladder-{self._number}", {TENANT_KEY: "ladder"}
        async for output in self.generate(ids, tokens, name, said, likeliest or None):
            now_s, made = time.perf_counter(), output.outputs[0]
            answer.cached_tokens = output.num_cached_tokens or answer.cached_tokens
            answer.tokens += made.token_ids
            answer.times_s += [now_s] * len(made.token_ids)
            answer.logprobs += [
                {token: float(one.logprob) for token, one in each.items()}
                for each in made.logprobs or ()
            ]

    def _read(self) -> None:
        """Take what the engine's processes have reported."""
        for report in self.reports():
            self._reports.append(report)
            if report["kind"] == "store":
                self._stored += report["tokens"]


Served = TorchServed | VllmServed


@dataclass(frozen=True, slots=True)
class Bench:
    """The input of a rung: the device, and a folder with a model for it."""

    device: Device
    model: Path

    def opened(self, name: str, rule: str = "fair", eager: bool | None = None) -> closing[Served]:
        """An engine by name, ended behind the block; `Missing` if it is not installed."""
        if name == "torch":
            return closing(TorchServed(self.device, self.model, rule))
        return closing(VllmServed(self.device, self.model, rule, eager))
