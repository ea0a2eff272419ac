"""A request's path through a cluster's decider, up to its decision.

Check, tokenize (off the loop), find who may serve it, decide, and say what its worker is sent.
Everything that waits stands before the decision, so that a decision and its reservation are one
act.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog
from starlette.requests import Request

from kappa import metrics as m
from kappa.protocol import APPROX_KEY, OWN_ENGINES, PLAN_KEY
from kappa.settings.routing import RouterSettings
from kappa_router.api import errors
from kappa_router.api.errors import ApiError
from kappa_router.api.metadata import Metadata, routed_metadata, tenant_metadata
from kappa_router.api.render import TokenizedPrompt, Tokenizing, bounded
from kappa_router.api.request import (
    ApiRequest,
    EndpointModel,
    exact_workers,
    is_approximate,
    late_workers,
    unfit_workers,
)
from kappa_router.api.request_body import RequestBody
from kappa_router.api.tenants import Places
from kappa_router.decision import Decision, RouteRequest
from kappa_router.live.live_router import LiveRouter
from kappa_router.rollout import Rollout
from kappa_router.telemetry import Telemetry

log = structlog.get_logger(__name__)

_FIRST_WORKER_S = 5.0


@dataclass(eq=False)
class RequestPath:
    """The path of a chat or completion request up to its decision."""

    settings: RouterSettings
    tokenizing: Tokenizing
    # Of requests that are only explained.
    places: Places
    telemetry: Telemetry
    live: LiveRouter
    # That are served.
    models: Sequence[EndpointModel]

    def __post_init__(self) -> None:
        self.rollout = Rollout.parse(self.settings.mode)

    async def to_explain(self, body: RequestBody, http: Request) -> RouteRequest:
        """The router's view of a body that is only explained; it holds a place until it is
        tokenized."""
        live, request, holder = self.live, ApiRequest.of(http, body), object()
        request.prepare(self.models, self.settings)
        if not self.places.take(holder, request.tenant, live.router.in_flight):
            after_s = live.retry_after_s()
            raise errors.QUEUE_FULL(limit=self.places.limit, retry_after_s=after_s)
        try:
            return _route_request(request, await self._tokenized(request), frozenset())
        finally:
            self.places.leave(holder)

    # -- before a decision --------------------------------------------------------------------

    def begin(self, request: ApiRequest) -> None:
        """Follow a request to its end."""
        traceparent, body = request.headers.get("traceparent", ""), request.body
        request.timeline = timeline = self.telemetry.begin(
            request.request_id, request.tenant.name, time.time(), traceparent
        )
        timeline.chat, timeline.max_tokens = body.is_chat, body.max_tokens

    def end(self, request: ApiRequest, end: str, status: int) -> None:
        """A request is over; only the first call counts."""
        self.telemetry.end(request.timeline, end, status, time.time())

    async def routed(self, request: ApiRequest) -> RouteRequest:
        """The router's view of a request: its prompt in tokens, and the workers that must not serve
        it. Raises ApiError."""
        live = self.live
        request.timeline.model = request.adapter or request.model.name
        # A decider that has only just begun may be asked before it knows of any worker.
        await live.members.first_joined(_FIRST_WORKER_S)
        prompt = await self._tokenized(request)
        count = None if prompt.token_ids is None else prompt.tokens
        request.timeline.tokenized(count, time.time())
        if request.deadline is not None:
            request.deadline.check(time.monotonic())
        workers, approx = live.announcements(request.model.name), request.approx
        unfit = unfit_workers(workers, prompt.longest_tokens, request.body.max_tokens)
        return _route_request(request, prompt, unfit | exact_workers(workers, approx))

    async def _tokenized(self, request: ApiRequest) -> TokenizedPrompt:
        """The prompt as token ids; bounded in length if it cannot be rendered here.

        Raises:
            ApiError: 400, it cannot fit, or took too much; 503, 504, it was not done in time.
        """
        start_s, limit_s = time.perf_counter(), self.settings.request_timeout_s
        workers = self.live.announcements(request.model.name)
        largest = max((one.max_context_tokens for one in workers), default=None)
        try:
            async with asyncio.timeout(request.patience_s(limit_s)):
                prompt = await self.tokenizing.tokens(
                    request.model.name, request.body, request.body_bytes, request.tenant, largest
                )
        except ApiError:
            raise
        except TimeoutError:
            if request.deadline is not None and request.expired:
                raise errors.DEADLINE_PASSED(allowed_s=request.deadline.allowed_s) from None
            raise errors.NOT_TOKENIZED_IN_TIME(limit_s=limit_s) from None
        except Exception as error:
            # The engine renders too and will name the fault; routing only knows less.
            log.info("not_tokenized", error=type(error).__name__)
            return bounded(request.body)
        self.live.metrics.observe(m.TOKENIZE_SECONDS, value=time.perf_counter() - start_s)
        return prompt

    # -- a decision ---------------------------------------------------------------------------

    def decide(self, routed: RouteRequest, request: ApiRequest) -> Decision:
        """Choose and reserve, by our rule or, as the rollout has it, by Ray's; kept from workers
        that are predicted to answer after the deadline. Raises ApiError if that is all of them or
        it has passed, NoWorkerError."""
        live, deadline = self.live, request.deadline
        explained = None
        if deadline is not None:
            now_s = time.monotonic()
            deadline.check(now_s)
            explained = live.priced(routed)
            if routed.sized:
                streamed, estimates = bool(request.body.stream), explained.decision.priced
                late = late_workers(deadline, estimates, now_s, streamed=streamed)
                if late:
                    routed = replace(routed, exclude=routed.exclude | late)
                    explained = live.priced(routed)
        present = self.rollout.other(f"{request.tenant.name} {request.conversation}")
        return live.route(routed, explained, present)


def engine_metadata(live: LiveRouter, decision: Decision, request: ApiRequest) -> Metadata:
    """Metadata for the chosen worker's engine; ApiError 400 if it cannot do as asked."""
    sent = tenant_metadata(live.records[request.request_id].sent_as, request.tenant)
    sent |= routed_metadata(decision, live.charges.elsewhere(decision.worker))
    state = live.router.workers.get(decision.worker)
    if state is not None and state.announcement.engine in OWN_ENGINES:
        if request.load_plan:
            sent[PLAN_KEY] = request.load_plan
        if is_approximate(state.announcement, request.approx):
            sent[APPROX_KEY] = "ok"
    elif request.load_plan:
        raise errors.NO_LOAD_PLANS()
    return sent


def _route_request(
    request: ApiRequest, prompt: TokenizedPrompt, exclude: frozenset[str]
) -> RouteRequest:
    return RouteRequest(
        request.request_id, prompt.token_ids, request.body.max_tokens, request.salt,
        exclude=exclude, prompt_tokens=prompt.tokens, model=request.model.name,
        tenant=request.tenant.name, weight=request.tenant.weight,
        priority=request.body.priority or 0, ttft_limit_s=request.ttft_limit_s,
    )  # fmt: skip
