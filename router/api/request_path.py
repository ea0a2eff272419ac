"""The path of one request through the ingress, from an accepted body to its response.

Check, tokenize (off the loop), find who may serve it; `router.api.deliver` decides and sends.
Everything that waits stands before the decision, so that a decision and its reservation are one
act.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from starlette.requests import Request
from starlette.responses import Response

from kappa import metrics as m
from kappa.protocol import PROMPT_ENGINES
from kappa.settings.engine import TransferSettings
from kappa.settings.routing import RouterSettings
from router.api import errors
from router.api.deliver import Call, Delivery
from router.api.errors import ApiError
from router.api.metadata import prompt_metadata
from router.api.prefill import PREFILL_SUFFIX, PrefillElsewhere
from router.api.render import TokenizedPrompt, Tokenizing, bounded
from router.api.request import ApiRequest, EndpointModel, exact_workers, unfit_workers
from router.api.tenants import Places, Tenant
from router.decision import RouteRequest
from router.live.live_router import LiveRouter
from router.rollout import Rollout
from router.telemetry import Telemetry

log = structlog.get_logger(__name__)

_FIRST_WORKER_S = 5.0


@dataclass(eq=False)
class RequestPath:
    """What happens to a chat or completion request.

    live: the live router; models: that are served; call: Ray's delivery.
    """

    settings: RouterSettings
    transfer: TransferSettings
    tokenizing: Tokenizing
    places: Places
    telemetry: Telemetry
    live: Callable[[], LiveRouter]
    models: Sequence[EndpointModel]
    call: Call
    open: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        timeout_s = self.settings.request_timeout_s
        self.rollout = Rollout.parse(self.settings.mode)
        self.delivery = Delivery(self.call, self.rollout, timeout_s)
        self.prefill = PrefillElsewhere(self.call, self.transfer, timeout_s)

    async def serve(self, body: Any, method: str, http: Request) -> Response:
        """Answer a request; `method` is Ray's name for the kind: `chat` or `completions`."""
        live, request = self.live(), ApiRequest.of(http, body, method)
        self._begin(live, request)
        try:
            response = await self._answer(live, request)
        except BaseException as error:
            end, status = "error", 500
            if isinstance(error, ApiError):
                end, status = error.code or "error", error.status
                live.answered(request.tenant.name, status, error.code)
            elif isinstance(error, asyncio.CancelledError):
                end, status = "client_gone", 0
            request.finish(end, status)
            raise
        live.answered(request.tenant.name, response.status_code)
        return response

    async def to_explain(self, body: Any, http: Request) -> RouteRequest:
        """What the router would decide about, for a body that is only explained: it holds a place
        until it is tokenized."""
        live, request, holder = self.live(), ApiRequest.of(http, body, ""), object()
        request.prepare(self.models)
        self._take_place(live, holder, request.tenant)
        try:
            return _route_request(request, await self._tokenized(live, request), frozenset())
        finally:
            self.places.leave(holder)

    # -- parts --------------------------------------------------------------------------------

    def _begin(self, live: LiveRouter, request: ApiRequest) -> None:
        """Give a request an id of its own: a client may send one id twice at a time, or that of
        another's prefill, and a reservation must not be shared; nor another tenant's record taken
        over."""
        request_id, tenant = request.request_id, request.tenant.name
        record = live.records.get(request_id)
        foreign = record is not None and record.tenant != tenant
        if foreign or request_id in self.open or request_id.endswith(PREFILL_SUFFIX):
            request.request_id = request_id = f"{request_id}-{uuid.uuid4().hex[:8]}"
        self.open.add(request_id)
        self.begin(request)

    def begin(self, request: ApiRequest) -> None:
        """Follow a request, under the id that it has now, to its end."""
        traceparent = request.headers.get("traceparent", "")
        request.timeline = self.telemetry.begin(
            request.request_id, request.tenant.name, time.time(), traceparent
        )
        request.inbound.accepted, request.on_end = True, self._end

    def _end(self, request: ApiRequest, end: str, status: int) -> None:
        self.open.discard(request.request_id)
        self.places.leave(request.request_id)
        self.telemetry.end(request.timeline, end, status, time.time())

    async def _answer(self, live: LiveRouter, request: ApiRequest) -> Response:
        request.prepare(self.models)
        if live.suspects and live.suspects.refused(request.digest, live.now_s()):
            raise errors.KILLED_AN_ENGINE()
        self._take_place(live, request.request_id, request.tenant)
        if not self.rollout.decides:
            return await self._by_ray(live, request)
        routed = await self.routed(live, request)
        return await self.delivery.serve(live, routed, request)

    async def routed(self, live: LiveRouter, request: ApiRequest) -> RouteRequest:
        """What is to be decided about a request that holds a place: its prompt in tokens, and who
        must not serve it; a prefill worker may have computed it by then. Raises ApiError."""
        # An ingress that has only just begun may be asked before it knows of any worker.
        await live.members.first_joined(_FIRST_WORKER_S)
        prompt = await self._tokenized(live, request)
        count = None if prompt.token_ids is None else prompt.tokens
        request.timeline.tokenized(count, time.time())
        request.tokenized(prompt)
        workers, approx = live.announcements(request.model.name), request.approx
        unfit = unfit_workers(workers, prompt.longest_tokens, request.max_tokens)
        routed = _route_request(request, prompt, unfit | exact_workers(workers, approx))
        return await self.prefill(live, routed, request)

    async def _by_ray(self, live: LiveRouter, request: ApiRequest) -> Response:
        """Hand a request to Ray's own router; nothing is decided, reserved or foreseen here."""
        by_ids = any(one.engine in PROMPT_ENGINES for one in live.announcements(request.model.name))
        prompt = await self._tokenized(live, request) if by_ids else bounded(request.body)
        sent = prompt_metadata(prompt.token_ids, request.load_plan) if by_ids else {}
        request.tokenized(prompt)
        return await self.delivery.serve_by_ray(live, request, sent)

    def _take_place(self, live: LiveRouter, holder: Hashable, tenant: Tenant) -> None:
        """One of `max_queue` places, held until the request ends; ApiError 429 if it gets none."""
        here = len(self.places)
        # Workers report as others' what Ray's router sent them for us: nothing is reserved then.
        ours = min(live.router.reservations, here) if self.rollout.decides else here
        elsewhere = max(live.router.in_flight - ours, 0)
        if not self.places.take(holder, tenant, elsewhere):
            limit, after_s = self.settings.max_queue, live.retry_after_s()
            raise errors.QUEUE_FULL(limit=limit, retry_after_s=after_s)

    async def _tokenized(self, live: LiveRouter, request: ApiRequest) -> TokenizedPrompt:
        """The prompt as token ids; bounded in length if it cannot be rendered here.

        Raises:
            ApiError: 400, it cannot fit, or took too much; 503, 504, it was not done in time.
        """
        start_s, limit_s = time.perf_counter(), self.settings.request_timeout_s
        workers = live.announcements(request.model.name)
        largest = max((one.max_context_tokens for one in workers), default=None)
        body_bytes = len(request.inbound.body)
        try:
            async with asyncio.timeout(request.patience_s(limit_s)):
                prompt = await self.tokenizing.tokens(
                    request.model.name, request.body, body_bytes, request.tenant, largest
                )
        except ApiError:
            raise
        except TimeoutError:
            if request.deadline is not None and request.expired:
                raise errors.DEADLINE_PASSED(allowed_s=request.deadline.allowed_s) from None
            raise errors.NOT_TOKENIZED_IN_TIME(limit_s=limit_s) from None
        except Exception as error:
            # The engine renders too and will say what is wrong; routing only knows less.
            log.info("not_tokenized", error=type(error).__name__)
            return bounded(request.body)
        live.metrics.observe(m.TOKENIZE_SECONDS, value=time.perf_counter() - start_s)
        return prompt


def _route_request(
    request: ApiRequest, prompt: TokenizedPrompt, exclude: frozenset[str]
) -> RouteRequest:
    return RouteRequest(
        request.request_id, prompt.token_ids, request.max_tokens, request.salt, exclude=exclude,
        prompt_tokens=prompt.tokens, model=request.model.name, tenant=request.tenant.name,
        weight=request.tenant.weight, priority=request.body.priority or 0,
    )  # fmt: skip
