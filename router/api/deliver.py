"""Deciding and sending: one attempt at a worker, one more elsewhere, and the answer's way back.

A worker that fails before its first item may be followed by another; from then on the status has
gone out, and a failure ends the stream with an error event in OpenAI's shape. However an attempt
ends, the reservation is released and Ray's stream closed. Ray, vLLM and our own replicas report
trouble as exceptions, as error objects in place of an answer, and as error events inside a stream:
all become a `WorkerFailed`, or an `ApiError` where the client itself is to blame.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import structlog
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kappa import metrics as m
from kappa.protocol import APPROX_KEY, ERROR_EVENT, PROMPT_ENGINES, EngineDiedError, Streamed
from router.api import errors
from router.api.app import places_of
from router.api.errors import ApiError
from router.api.metadata import (
    APPROX_HEADER,
    Metadata,
    decision_headers,
    peer_params,
    prompt_metadata,
    routed_metadata,
    tenant_metadata,
    worker_headers,
)
from router.api.request import ApiRequest, is_approximate, late_workers
from router.decision import Decision, NoWorkerError, OverloadedError, RouteRequest
from router.live.live_router import LiveRouter
from router.live.membership import DIED, ENGINE_DIED
from router.live.replica_registry import PinGoneError
from router.live.waiting import Wait, WorkerLostError
from router.rollout import Rollout, Unsteered

log = structlog.get_logger(__name__)

_ATTEMPTS = 2
# vLLM's and our own engines' names of a dead engine, where their classes do not travel.
_DEAD_ENGINES = frozenset(("EngineDeadError", "EngineDiedError", "EngineStopped"))
# vLLM's error of a request that ended in its scheduler. There are two reasons: a load that failed,
# after which our connectors compute the prompt instead, and a grammar that does not compile.
_ENDED_BY_SCHEDULER = "Internal server error"
_CONSTRAINTS = ("structured_outputs", "response_format", "tools")

Call = Callable[[Any, str, dict[str, str]], AsyncGenerator[Any, None]]
"""Hands a body, Ray's name of its kind and a worker's headers to Ray; what comes back."""
_Decided = Decision | Unsteered


@dataclass(frozen=True, slots=True)
class Delivery:
    """Has requests served by workers; `timeout_s`: to the first item."""

    call: Call
    rollout: Rollout
    timeout_s: float

    async def serve(self, live: LiveRouter, routed: RouteRequest, request: ApiRequest) -> Response:
        """Decide and send; once more elsewhere if the worker fails before its first token.

        Raises:
            ApiError: nobody can serve it, an engine refused it, or it came too late.
        """
        last: WorkerFailed | None = None
        for attempt in range(_ATTEMPTS):
            try:
                decision = self.decide(live, routed, request)
            except OverloadedError as error:
                after_s = error.retry_after_s
                raise errors.OVERLOADED(reason=error, retry_after_s=after_s) from last
            except NoWorkerError as error:
                raise _nobody_left(live, request, last, str(error)) from last
            try:
                request.timeline.decided(decision, time.time())
                request.body.vllm_xargs = engine_metadata(live, decision, routed, request)
                if decision.fetch is not None:
                    peer = live.router.workers[decision.fetch.source_worker].announcement.peer
                    request.body.kv_transfer_params = peer_params(decision, peer)
                return await self._send(live, decision, request)
            except WorkerFailed as failure:
                log.warning(
                    "worker_failed", request_id=request.request_id, tenant=request.tenant.name,
                    worker=decision.worker, attempt=attempt, why=failure.why,
                )  # fmt: skip
                last = failure
                if failure.end == "worker_died":
                    may_pass_on(live, request, decision.worker)
                live.retried(request.request_id, failure.why)
                # What was handed over is gone with the worker that took it.
                request.body.kv_transfer_params = None
                tried = routed.exclude | {decision.worker}
                routed = replace(routed, exclude=tried, retry=True, handed_tokens=0)
            except BaseException:
                # An attempt ends what it began; this is for what fails before it, which says
                # nothing of the worker: a client must not open its breaker by asking for what it
                # lacks.
                live.release(request.request_id, "unsent")
                raise
        why = "two workers failed on this request"
        raise _nobody_left(live, request, last, why) from last

    async def serve_by_ray(
        self, live: LiveRouter, request: ApiRequest, metadata: Metadata
    ) -> Response:
        """Have Ray's own router choose the worker. Raises ApiError as `serve` does."""
        own = tenant_metadata(live.sent_as(request.request_id), request.tenant)
        request.body.vllm_xargs = own | metadata
        live.metrics.inc(m.ROLLOUT_REQUESTS, "ray")
        model = request.model
        pool = live.pool_for_ray(request.request_id, model.name) or next(iter(model.pools), "")
        unsteered = Unsteered(request.request_id, pool)
        try:
            return await self._send(live, unsteered, request)
        except WorkerFailed as failure:
            why = "the worker failed on this request"
            raise _nobody_left(live, request, failure, why) from None

    def decide(self, live: LiveRouter, routed: RouteRequest, request: ApiRequest) -> Decision:
        """Choose and reserve, by our rule or, as the rollout has it, by Ray's; kept from workers
        that are predicted to answer after the deadline. Raises ApiError if that is all of them or
        it has passed, NoWorkerError."""
        tenant, deadline = request.tenant.name, request.deadline
        if deadline is not None:
            now_s = time.monotonic()
            deadline.check(now_s)
            estimates = live.explain(routed).estimates
            if estimates is not None and routed.sized:
                streamed = bool(request.body.stream)
                late = late_workers(deadline, estimates, now_s, streamed=streamed)
                routed = replace(routed, exclude=routed.exclude | late) if late else routed
        if self.rollout.arm(f"{tenant} {request.conversation}") == "ray":
            return live.route_as(routed, tenant)
        return live.route(routed, tenant)

    async def _send(self, live: LiveRouter, decision: _Decided, request: ApiRequest) -> Response:
        """One attempt: the response, begun. Raises ApiError if the engine refused the request or
        was too late; WorkerFailed, when nothing was sent to the client."""
        request.timeline.sent(time.time())
        attempt = Attempt.begin(self.call, live, decision, request, request.body)
        try:
            item = await attempt.first(self.timeout_s)
            raise_error_item(item, request.body)
            live.first_token(decision.request_id)
            request.timeline.first_item(time.time())
            shown = {} if isinstance(decision, Unsteered) else decision_headers(decision)
            if (request.body.vllm_xargs or {}).get(APPROX_KEY):
                shown[APPROX_HEADER] = "ok"
            if isinstance(item, Streamed):
                return _Stream(attempt, _relayed(attempt, item), shown)
            content = item.model_dump_json()
            attempt.generated(getattr(item.usage, "completion_tokens", 0) or 0)
        except BaseException as error:
            raise await attempt.failed(error, self.timeout_s) from None
        await attempt.over("done")
        attempt.finish()
        return Response(content, headers=shown, media_type="application/json")


def engine_metadata(
    live: LiveRouter, decision: Decision, routed: RouteRequest, request: ApiRequest
) -> Metadata:
    """What the chosen worker's engine is sent with a request; ApiError 400 if it cannot do it."""
    sent = tenant_metadata(live.records[request.request_id].sent_as, request.tenant)
    sent |= routed_metadata(decision, live.charges.elsewhere(decision.worker))
    state = live.router.workers.get(decision.worker)
    if state is not None and state.announcement.engine in PROMPT_ENGINES:
        sent |= prompt_metadata(routed.token_ids, request.load_plan)
        if is_approximate(state.announcement, request.approx):
            sent[APPROX_KEY] = "ok"
    elif request.load_plan:
        raise errors.NO_LOAD_PLANS()
    return sent


def _nobody_left(
    live: LiveRouter, request: ApiRequest, last: WorkerFailed | None, why: str
) -> ApiError:
    """The error of a request that cannot be tried again."""
    if last is not None and last.end == "error":
        return errors.ENGINE_FAILED()
    return errors.NO_WORKER(why=why, retry_after_s=live.retry_after_s(request.model.name))


@dataclass(slots=True, eq=False)
class Attempt:
    """One request at one worker; end: how it ended, empty until then."""

    live: LiveRouter
    request: ApiRequest
    decision: _Decided
    stream: AsyncGenerator[Any, None]
    wait: Wait
    end: str = ""

    @classmethod
    def begin(
        cls, call: Call, live: LiveRouter, decision: _Decided, request: ApiRequest, body: Any
    ) -> Attempt:
        """Send a body of a request to the worker of a decision."""
        pool = decision.pool if isinstance(decision, Unsteered) else None
        headers = worker_headers(request.headers, decision.worker, pool)
        stream = call(body, request.method, headers)
        return cls(live, request, decision, stream, live.members.waits.begin(decision.worker))

    async def first(self, timeout_s: float) -> Any:
        """What comes first: of a stream `Streamed`, else the whole answer; ApiError 400 if the
        request's own grammar is at fault."""
        try:
            return await self.wait.next(self.stream, self.request.patience_s(timeout_s))
        except Exception as error:
            if "GenerationError" in _names(error):
                _raise_if_constrained(self.request.body)
            raise

    def generated(self, tokens: int) -> None:
        """Output tokens go out."""
        self.live.tokens(self.decision.request_id, tokens)
        self.request.generated(tokens)

    async def failed(self, error: BaseException, timeout_s: float) -> BaseException:
        """End an attempt that failed before its first item; what to raise of it: an `ApiError`, a
        `WorkerFailed`, or what ends the task."""
        request, raised = self.request, error
        if isinstance(error, ApiError):
            # A passed deadline says nothing of the worker.
            end = "deadline" if request.expired else "refused"
        elif isinstance(error, TimeoutError) and request.deadline and request.expired:
            end, raised = "deadline", errors.DEADLINE_PASSED(allowed_s=request.deadline.allowed_s)
        elif isinstance(error, TimeoutError):
            end, raised = "timeout", errors.NO_TOKEN_IN_TIME(limit_s=timeout_s)
        elif not isinstance(error, Exception):
            end = "client_gone" if isinstance(error, asyncio.CancelledError) else "error"
        else:
            raised = failure = worker_failed(error)
            end = failure.end
            self.live.members.failed(self.decision.worker, failure.why)
            if failure is not error and failure.why == "error":
                # Not its text, which may quote the prompt.
                log.error(
                    "engine_error", request_id=request.request_id, error=type(error).__name__,
                    places=places_of(error),
                )  # fmt: skip
        await self.over(end)
        return raised

    async def over(self, end: str) -> None:
        """Release and close. The first end counts: by a second one, which may come late, the same
        id can be another request's."""
        if self.end:
            return
        self.end = end
        try:
            self.request.attempt_over(end)
            self.live.release(self.decision.request_id, end)
        finally:
            self.live.members.waits.end(self.decision.worker, self.wait)
            await self.stream.aclose()

    def finish(self) -> None:
        """Its request is over with it: the engine survived the content, or died of it."""
        live, request = self.live, self.request
        if self.end == "done" and live.suspects:
            live.suspects.served(request.digest)
        elif self.end == "worker_died" and request.request_id in live.records:
            live.suspects.blame(self.decision.worker, request.digest, live.now_s())
        request.finish(self.end, 200)


# -- the answer -------------------------------------------------------------------------------


class _Stream(StreamingResponse):
    """A stream whose attempt ends with it, also if its client left before it began: Starlette drops
    the iterator of such a client without starting it, so its own `finally` would not run."""

    def __init__(
        self, attempt: Attempt, content: AsyncIterator[str], headers: dict[str, str]
    ) -> None:
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._attempt = attempt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; whatever happens, end the attempt then."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._attempt.over("client_gone")
            self._attempt.finish()


async def _relayed(attempt: Attempt, first: Streamed) -> AsyncGenerator[str, None]:
    packet, tokens = first
    try:
        while True:
            error = error_in(packet)
            if error is not None:
                await attempt.over("error")
                yield f"{packet[: packet.find(ERROR_EVENT)]}{_error_event(error)}"
                return
            attempt.generated(tokens)
            yield packet
            try:
                packet, tokens = await attempt.wait.next(attempt.stream)
            except StopAsyncIteration:
                break
        if not packet.rstrip().endswith("[DONE]"):
            yield "data: [DONE]\n\n"
        await attempt.over("done")
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except Exception as error:
        # The status has gone out; an event in OpenAI's shape is the only way left to say so.
        failure = worker_failed(error)
        attempt.live.members.failed(attempt.decision.worker, failure.why)
        await attempt.over(failure.end)
        log.warning(
            "stream_broken", request_id=attempt.request.request_id, why=failure.why,
            error=type(error).__name__,
        )  # fmt: skip
        yield _error_event(errors.ENGINE_FAILED())
    finally:
        await attempt.over("client_gone")


def _error_event(error: ApiError) -> str:
    return f"data: {json.dumps(error.body())}\n\n"


# -- what failures mean -----------------------------------------------------------------------


class WorkerFailed(Exception):
    """A worker did not serve a request. end: how it ended there (`LiveRouter.release`), `error`
    where its engine is to blame; why: one word."""

    def __init__(self, end: str, why: str) -> None:
        super().__init__(why)
        self.end, self.why = end, why


def worker_failed(error: Exception) -> WorkerFailed:
    """What an exception out of Ray's delivery means."""
    if isinstance(error, WorkerFailed):
        return error
    if isinstance(error, EngineDiedError) or _names(error) & _DEAD_ENGINES:
        return WorkerFailed("worker_died", ENGINE_DIED)
    for kind, end, why in (
        (WorkerLostError, "worker_died", str(error)), (RayActorError, "worker_died", DIED),
        (PinGoneError, "worker_full", "left"), (BackPressureError, "worker_full", "full"),
    ):  # fmt: skip
        if isinstance(error, kind):
            return WorkerFailed(end, why)
    return WorkerFailed("error", "error")


def _names(error: BaseException) -> set[str]:
    """Of the classes of an exception and of what Ray says caused it."""
    cause = getattr(error, "cause", None)
    return {type(e).__name__ for e in (error, cause) if e is not None}


def may_pass_on(live: LiveRouter, request: ApiRequest, worker: str) -> None:
    """Raises ApiError unless another worker may have a request that was lost with one before its
    first token: 503, it was alone in an engine that died; 422, it was in two."""
    blame = live.suspects.blame(worker, request.digest, live.now_s())
    if blame == "retry":
        return
    log.error(
        "request_killed_engine", request_id=request.request_id, tenant=request.tenant.name,
        worker=worker, blame=blame,
    )  # fmt: skip
    if blame == "killer":
        raise errors.KILLED_AN_ENGINE()
    raise errors.ALONE_IN_DEAD_ENGINE(
        request_id=request.request_id, retry_after_s=live.retry_after_s(request.model.name)
    )


def raise_error_item(item: Any, body: Any = None) -> None:
    """Raise if what came first is an error: an ApiError where the engine refused the request or
    could not compile its grammar, as others would; WorkerFailed where it failed."""
    text = item.text if isinstance(item, Streamed) else ""
    error = errors.from_engine(item) if hasattr(item, "error") else error_in(text)
    if error is None:
        return
    if error.status < 500:
        raise error
    if _ENDED_BY_SCHEDULER in (text or error.message):
        _raise_if_constrained(body)
    raise WorkerFailed("error", "error")


def _raise_if_constrained(body: Any) -> None:
    """Raises ApiError 400 if a schema, an expression or a grammar constrains the answer."""
    if any(getattr(body, name, None) for name in _CONSTRAINTS):
        raise errors.GRAMMAR_FAILED() from None


def error_in(packet: str) -> ApiError | None:
    """The error that a part of a stream holds, if it does; details of a failure stay here."""
    at = packet.find(ERROR_EVENT)
    if at < 0:
        return None
    line = packet[at:].split("\n", 1)[0].removeprefix("data: ")
    try:
        info = json.loads(line)["error"]
        status = int(info.get("code") or 500)
    except (ValueError, TypeError, AttributeError, KeyError):
        return errors.ENGINE_FAILED()
    if status >= 500:
        return errors.ENGINE_FAILED()
    return ApiError(status, str(info.get("message", "")), param=info.get("param"))
