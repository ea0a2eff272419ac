"""An engine that computes nothing: `engine: emulated`, for tests of a cluster on a small machine.

The replica, its report stream, the router, Ray Serve and HTTP are the real ones; only tokens are
made up, as late as the emulated node would have had them. Every answer says so in its text and its
`system_fingerprint`. Nodes must be paced: the pace is all there is. Never a default.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import structlog
from ray.serve.llm.openai_api_models import ChatCompletionResponse, CompletionResponse

from kappa.protocol import REQUEST_ID_KEY
from workers.emulated.blocks import EmulatedBlocks
from workers.emulated.faults import FaultsFile
from workers.emulated.loop import EmulatedLoop, EmulatedPace, Job, Told
from workers.emulated.reports import EmulatedReports
from workers.identity import WorkerPlan
from workers.own_engine.answers import Answer, Asked, BodyRefused, asked
from workers.own_engine.base import OwnEngine, error_answer
from workers.vllm.arguments import Pace

log = structlog.get_logger(__name__)

FINGERPRINT = "emulated"
WORD = " emulated"


class EngineStopped(RuntimeError):
    """The engine was stopped while a request was in it."""


@dataclass(frozen=True, slots=True)
class EmulatedPlan:
    """What the engine of one replica must know. worker: its name, by which a file of faults may
    mean it. max_context_tokens: of prompt and answer."""

    worker: str
    pace: EmulatedPace
    block_tokens: int
    device_blocks: int
    host_blocks: int
    max_context_tokens: int
    stats_endpoint: str
    kv_endpoint: str


def emulated_plan(
    plan: WorkerPlan, worker: str, stats_endpoint: str, kv_endpoint: str, rank: int
) -> EmulatedPlan:
    """What the replica of this rank emulates.

    Raises:
        ValueError: its node is not paced.
    """
    node, limits = plan.node(rank), plan.limits
    if node.source != "paced":
        raise ValueError(f"node {node.name} is not paced: an emulated engine has no other speed")
    pace = Pace(plan.emulated, node)
    return EmulatedPlan(
        worker=worker,
        pace=EmulatedPace(
            pace.step, pace.link.token_s, pace.link.fixed_s,
            limits.max_batch_tokens, limits.max_sequences,
        ),
        block_tokens=limits.block_tokens,
        device_blocks=limits.device_blocks,
        host_blocks=plan.host_blocks,
        max_context_tokens=limits.max_context_tokens,
        stats_endpoint=stats_endpoint,
        kv_endpoint=kv_endpoint,
    )  # fmt: skip


class EmulatedEngine(OwnEngine):
    """`llm_config.engine_kwargs["kappa_emulated"]` is an `EmulatedPlan`."""

    CALLED = "the emulated engine"

    def __init__(self, llm_config: Any) -> None:
        self._plan: EmulatedPlan = llm_config.engine_kwargs["kappa_emulated"]
        self._model = llm_config.model_id
        self._loop: EmulatedLoop | None = None
        self._reports: EmulatedReports | None = None

    async def start(self) -> None:
        """Begin to take requests."""
        plan = self._plan
        faults = FaultsFile.of_environment(plan.worker)
        blocks = EmulatedBlocks(plan.block_tokens, plan.device_blocks, plan.host_blocks)
        self._reports = reports = EmulatedReports(
            plan.stats_endpoint, plan.kv_endpoint, plan.block_tokens, lambda: faults.now().events
        )
        self._loop = loop = EmulatedLoop(
            plan.pace,
            blocks,
            Told(
                reports.admitted,
                reports.loaded,
                lambda took_s, tokens, done: reports.stepped(
                    took_s, tokens, done, loop.counts, loop.failed_loads
                ),
                reports.publish,
            ),
            link_slower=lambda: faults.now().link_slower,
            loads_fail=lambda: faults.now().loads_fail,
        )
        loop.start()

    async def check_health(self) -> None:
        """Raise if the loop has ended: Ray Serve then replaces the replica."""
        if self._loop is None or not self._loop.alive:
            raise RuntimeError("the emulated engine does not run")

    async def shutdown(self) -> None:
        """Stop the loop."""
        if self._loop is not None:
            self._loop.stop()
        if self._reports is not None:
            self._reports.close()

    # -- one request --------------------------------------------------------------------------

    async def answer(self, body: Any, kind: str) -> AsyncGenerator[Any, None]:
        """Made-up tokens, as late as the node would have had them."""
        assert self._loop is not None
        try:
            request = asked(body, ())
            extra = getattr(body, "vllm_xargs", None) or {}
            job = self._job(request, str(extra.get(REQUEST_ID_KEY, body.request_id)))
            self._loop.submit(job)
        except BodyRefused as error:
            yield error_answer(400, str(error), error.param)
            return
        except ValueError as error:
            yield error_answer(400, str(error))
            return
        try:
            async for item in self._generate(request, job, kind):
                yield item
        except EngineStopped as error:
            yield error_answer(500, str(error))
        finally:
            job.gone = True

    def _job(self, request: Asked, name: str) -> Job:
        room = self._plan.max_context_tokens - len(request.tokens)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(request.tokens)} tokens, the context of this model is "
                f"{self._plan.max_context_tokens}"
            )
        return Job(name, request.tokens, min(request.max_tokens, room), request.salt)

    async def _generate(self, request: Asked, job: Job, kind: str) -> AsyncGenerator[Any, None]:
        answer = Answer(kind, job.name, self._model, time.time(), len(request.tokens))
        if request.stream and (opening := answer.opening()):
            yield opening
        made = 0
        while made < job.max_tokens:
            if await job.outputs.get() is None:
                raise EngineStopped("the emulated engine was stopped")
            made += 1
            if request.stream:
                yield answer.piece(WORD, "length" if made == job.max_tokens else None)
        usage = answer.usage(made, job.device_tokens + job.host_tokens)
        if request.stream:
            yield answer.closing(usage if request.include_usage else None)
            return
        shape = ChatCompletionResponse if kind == "chat" else CompletionResponse
        whole: Mapping[str, Any] = answer.whole(WORD * made, "length", usage)
        yield shape.model_validate({**whole, "system_fingerprint": FINGERPRINT})
