"""Deciding and sending: one attempt at a worker, one more elsewhere, and the answer's way back.

A worker that fails before its first item may be followed by another; from then on the status has
gone out, and a failure ends the stream with an error event in OpenAI's shape. However an attempt
ends, the reservation is released and Ray's stream closed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import structlog
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kappa import metrics as m
from kappa.protocol import APPROX_KEY, ERROR_EVENT, PROMPT_ENGINES
from router.api.app import places_of
from router.api.constraints import is_approximate, late_workers
from router.api.errors import (
    ApiError,
    deadline_passed,
    engine_failed,
    no_plans_here,
    no_token_in_time,
    no_worker,
    overloaded,
)
from router.api.failures import (
    WorkerFailed,
    error_in,
    may_pass_on,
    raise_error_item,
    raise_refused,
    worker_failed,
)
from router.api.metadata import (
    Metadata,
    approx_headers,
    decision_headers,
    prompt_metadata,
    routed_metadata,
    tenant_metadata,
    worker_headers,
)
from router.api.request import ApiRequest
from router.decision import Decision, NoWorkerError, OverloadedError, RouteRequest
from router.live.live_router import LiveRouter
from router.live.waiting import Wait
from router.rollout import Rollout, Unsteered

log = structlog.get_logger(__name__)

_ATTEMPTS = 2

Call = Callable[[Any, str, dict[str, str]], AsyncGenerator[Any, None]]
"""Hands a body, Ray's name of its kind and a worker's headers to Ray; what comes back."""


@dataclass(slots=True, eq=False)
class _Attempt:
    """One request at one worker; end: how it ended, empty until then."""

    live: LiveRouter
    request: ApiRequest
    decision: Decision | Unsteered
    stream: AsyncGenerator[Any, None]
    wait: Wait
    end: str = ""

    @property
    def worker(self) -> str:
        return self.decision.worker

    async def first(self, timeout_s: float) -> Any:
        """The stream's first item; ApiError 400 if the request's own grammar is at fault."""
        try:
            return await self.wait.next(self.stream, self.request.patience_s(timeout_s))
        except Exception as error:
            raise_refused(error, self.request.body)
            raise

    def generated(self, tokens: int) -> None:
        """Output tokens go out."""
        self.live.tokens(self.decision.request_id, tokens)
        self.request.generated(tokens)

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
            self.live.members.waits.end(self.worker, self.wait)
            await self.stream.aclose()


class Delivery:
    """Has requests served by workers."""

    def __init__(self, call: Call, rollout: Rollout, timeout_s: float) -> None:
        """`timeout_s`: to the first item."""
        self._call, self._rollout, self._timeout_s = call, rollout, timeout_s

    async def serve(self, live: LiveRouter, routed: RouteRequest, request: ApiRequest) -> Response:
        """Decide and send; once more elsewhere if the worker fails before its first token.

        Raises:
            ApiError: nobody can serve it, an engine refused it, or it came too late.
        """
        last: WorkerFailed | None = None
        for attempt in range(_ATTEMPTS):
            try:
                decision = self._decide(live, routed, request)
            except OverloadedError as error:
                raise overloaded(str(error), error.retry_after_s) from last
            except NoWorkerError as error:
                raise _nobody_left(live, last, str(error)) from last
            try:
                request.timeline.decided(decision, time.time())
                request.body.vllm_xargs = _metadata(live, decision, routed, request)
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
        raise _nobody_left(live, last, "two workers failed on this request") from last

    async def serve_by_ray(
        self, live: LiveRouter, request: ApiRequest, metadata: Metadata
    ) -> Response:
        """Have Ray's own router choose the worker. Raises ApiError as `serve` does."""
        own = tenant_metadata(live.sent_as(request.request_id), request.tenant)
        request.body.vllm_xargs = own | metadata
        live.metrics.inc(m.ROLLOUT_REQUESTS, "ray")
        unsteered = Unsteered(request.request_id, live.pool_for_ray(request.request_id))
        try:
            return await self._send(live, unsteered, request)
        except WorkerFailed as failure:
            raise _nobody_left(live, failure, "the worker failed on this request") from None

    def _decide(self, live: LiveRouter, routed: RouteRequest, request: ApiRequest) -> Decision:
        """Choose and reserve, by our rule or, as the rollout has it, by Ray's."""
        routed, tenant = _in_time(live, routed, request), request.tenant.name
        if self._rollout.arm(f"{tenant} {request.conversation}") == "ray":
            return live.route_as_ray(routed, tenant)
        return live.route(routed, tenant)

    async def _send(
        self, live: LiveRouter, decision: Decision | Unsteered, request: ApiRequest
    ) -> Response:
        """One attempt: the response, begun.

        Raises:
            ApiError: the engine refused the request, or was too late.
            WorkerFailed: the worker did not serve it; nothing was sent to the client.
        """
        request.timeline.sent(time.time())
        pool = decision.pool if isinstance(decision, Unsteered) else None
        headers = worker_headers(request.headers, decision.worker, pool)
        stream = self._call(request.body, request.method, headers)
        wait = live.members.waits.begin(decision.worker)
        attempt = _Attempt(live, request, decision, stream, wait)
        try:
            first = await attempt.first(self._timeout_s)
            item = first[0] if isinstance(first, list) and first else first
            raise_error_item(item, request.body)
            live.first_token(decision.request_id)
            request.timeline.first_item(time.time())
            shown = {} if isinstance(decision, Unsteered) else decision_headers(decision)
            shown |= approx_headers(request.body)
            if not hasattr(item, "model_dump_json"):
                return _Stream(attempt, _relayed(attempt, first), shown)
            content = item.model_dump_json()
            attempt.generated(getattr(item.usage, "completion_tokens", 0) or 0)
        except BaseException as error:
            end, raised = self._failed(attempt, error)
            await attempt.over(end)
            raise raised from None
        await attempt.over("done")
        _finish(attempt, 200)
        return Response(content, headers=shown, media_type="application/json")

    def _failed(self, attempt: _Attempt, error: BaseException) -> tuple[str, BaseException]:
        """How an attempt ended that failed before its first item, and what to raise of it."""
        request = attempt.request
        if isinstance(error, ApiError):
            # A passed deadline says nothing of the worker.
            return "deadline" if request.expired else "refused", error
        if isinstance(error, TimeoutError):
            if request.deadline is not None and request.expired:
                return "deadline", deadline_passed(request.deadline.allowed_s)
            return "timeout", no_token_in_time(self._timeout_s)
        if not isinstance(error, Exception):
            return "client_gone" if isinstance(error, asyncio.CancelledError) else "error", error
        failure = worker_failed(error)
        attempt.live.members.failed(attempt.worker, failure.why)
        if failure is not error and failure.why == "error":
            # Not its text, which may quote the prompt.
            log.error(
                "engine_error", request_id=request.request_id, error=type(error).__name__,
                places=places_of(error),
            )  # fmt: skip
        return failure.end, failure


def _in_time(live: LiveRouter, routed: RouteRequest, request: ApiRequest) -> RouteRequest:
    """The same request, kept from workers that are predicted to answer after its deadline.

    Raises:
        ApiError: that is all of them, or it has passed.
        NoWorkerError: there is none to ask.
    """
    if request.deadline is None:
        return routed
    now_s = time.monotonic()
    request.deadline.check(now_s)
    estimates = live.explain(routed).estimates
    if estimates is None or not routed.sized:
        return routed
    late = late_workers(request.deadline, estimates, now_s, streamed=request.streamed)
    return replace(routed, exclude=routed.exclude | late) if late else routed


def _metadata(
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
        raise no_plans_here()
    return sent


def _nobody_left(live: LiveRouter, last: WorkerFailed | None, why: str) -> ApiError:
    """The error of a request that cannot be tried again."""
    if last is not None and last.error is not None:
        return last.error
    return no_worker(why, live.retry_after_s())


# -- the answer -------------------------------------------------------------------------------


def _finish(attempt: _Attempt, status: int) -> None:
    """The request is over with this attempt: its engine survived the content, or died of it."""
    live, request = attempt.live, attempt.request
    if attempt.end == "done" and live.suspects:
        live.suspects.served(request.digest)
    elif attempt.end == "worker_died" and request.request_id in live.records:
        live.suspects.blame(attempt.worker, request.digest, live.now_s())
    request.finish(attempt.end, status)


class _Stream(StreamingResponse):
    """A stream whose attempt ends with it, also if its client left before it began: Starlette drops
    the iterator of such a client without starting it, so its own `finally` would not run."""

    def __init__(
        self, attempt: _Attempt, content: AsyncIterator[str], headers: dict[str, str]
    ) -> None:
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._attempt = attempt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; whatever happens, end the attempt then."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._attempt.over("client_gone")
            _finish(self._attempt, 200)


async def _relayed(attempt: _Attempt, first: Any) -> AsyncGenerator[str, None]:
    item, packet = first, ""
    try:
        while True:
            packet = as_events(item)
            error = error_in(packet)
            if error is not None:
                await attempt.over("error")
                yield f"{packet[: packet.find(ERROR_EVENT)]}{_error_event(error)}"
                return
            attempt.generated(tokens_in(packet))
            yield packet
            try:
                item = await attempt.wait.next(attempt.stream)
            except StopAsyncIteration:
                break
        if not packet.rstrip().endswith("[DONE]"):
            yield "data: [DONE]\n\n"
        await attempt.over("done")
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except Exception as error:
        # The status has gone out; an event in OpenAI's shape is the only way left to tell.
        failure = worker_failed(error)
        attempt.live.members.failed(attempt.worker, failure.why)
        await attempt.over(failure.end)
        log.warning(
            "stream_broken", request_id=attempt.request.request_id, why=failure.why,
            error=type(error).__name__,
        )  # fmt: skip
        yield _error_event(engine_failed())
    finally:
        await attempt.over("client_gone")


def as_events(item: Any) -> str:
    """One or several stream items as server-sent events."""
    items = item if isinstance(item, list) else [item]
    return "".join(i if isinstance(i, str) else f"data: {i.model_dump_json()}\n\n" for i in items)


def tokens_in(packet: str) -> int:
    """Output tokens in a packet: its events, less the role, the usage and the end marker."""
    events = packet.count("data: {")
    return max(events - packet.count('"role":"assistant"') - packet.count('"choices":[]'), 0)


def _error_event(error: ApiError) -> str:
    return f"data: {json.dumps(error.body())}\n\n"
