"""The path of one request through the ingress, from an accepted body to its response.

Check, tokenize (off the loop), find who may serve it; `router.api.deliver` decides and sends.
Everything that waits stands before the decision, so that a decision and its reservation are one
act.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Hashable
from typing import Any

import structlog
from starlette.requests import Request
from starlette.responses import Response

from kappa import metrics as m
from kappa.protocol import PROMPT_ENGINES, Announcement
from router.api.auth import Tenant
from router.api.constraints import exact_workers, unfit_workers
from router.api.deliver import Call, Delivery
from router.api.errors import ApiError, not_tokenized_in_time, queue_full, unknown_model
from router.api.failures import refuse_killer
from router.api.limits import Places
from router.api.metadata import prompt_metadata
from router.api.prefill import PREFILL_SUFFIX, PrefillElsewhere
from router.api.render import PromptRenderer, TokenizedPrompt, bounded
from router.api.request import ApiRequest
from router.api.start import IngressSettings
from router.api.tokenizing import Tokenizing
from router.decision import RouteRequest
from router.live.live_router import LiveRouter
from router.rollout import Rollout
from router.telemetry import Telemetry

log = structlog.get_logger(__name__)

_FIRST_WORKER_S = 5.0


class RequestPath:
    """What happens to a chat or completion request."""

    def __init__(
        self,
        settings: IngressSettings,
        renderer: PromptRenderer,
        live: Callable[[], LiveRouter],
        models: Callable[[], list[str]],
        call: Call,
        telemetry: Telemetry,
    ) -> None:
        """`live`: the live router; `models`: names that are served; `call`: Ray's delivery."""
        self._limits = limits = settings.router
        self._live, self._models, self._telemetry = live, models, telemetry
        self._rollout = Rollout.parse(limits.mode)
        self._delivery = Delivery(call, self._rollout, limits.request_timeout_s)
        self._prefill = PrefillElsewhere(call, settings.transfer, limits.request_timeout_s)
        self._tokenizing = Tokenizing(renderer)
        self._open: set[str] = set()
        # Without keys nobody can be told from another.
        self._places = Places(limits.max_queue, shared=bool(settings.tenants.by_digest))

    def close(self) -> None:
        """Let the tokenizer's threads and process go."""
        self._tokenizing.close()

    async def serve(self, body: Any, method: str, http: Request) -> Response:
        """Answer a request; `method` is Ray's name for the kind: `chat` or `completions`."""
        live, request = self._live(), ApiRequest.of(http, body, method)
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
        request = ApiRequest.of(http, body, "")
        self.known_model(body.model)
        request.prepare()
        holder = object()
        self._take_place(self._live(), holder, request.tenant)
        try:
            return _route_request(request, await self._tokenized(request), frozenset())
        finally:
            self._places.leave(holder)

    def known_model(self, model: str | None) -> None:
        """Refuse a model that is not served here: ApiError 404."""
        known = self._models()
        if model is not None and model not in known:
            raise unknown_model(str(model), known)

    # -- parts --------------------------------------------------------------------------------

    def _begin(self, live: LiveRouter, request: ApiRequest) -> None:
        """Give a request an id of its own: a client may send one id twice at a time, or that of
        another's prefill, and a reservation must not be shared; nor another tenant's record taken
        over."""
        request_id, tenant = request.request_id, request.tenant.name
        record = live.records.get(request_id)
        foreign = record is not None and record.tenant != tenant
        if foreign or request_id in self._open or request_id.endswith(PREFILL_SUFFIX):
            request.request_id = request_id = f"{request_id}-{uuid.uuid4().hex[:8]}"
        self._open.add(request_id)
        traceparent = request.headers.get("traceparent", "")
        request.timeline = self._telemetry.begin(request_id, tenant, time.time(), traceparent)
        request.inbound.accepted, request.on_end = True, self._end

    def _end(self, request: ApiRequest, end: str, status: int) -> None:
        self._open.discard(request.request_id)
        self._places.leave(request.request_id)
        self._telemetry.end(request.timeline, end, status, time.time())

    async def _answer(self, live: LiveRouter, request: ApiRequest) -> Response:
        self.known_model(request.body.model)
        request.prepare()
        refuse_killer(live, request)
        self._take_place(live, request.request_id, request.tenant)
        if not self._rollout.decides:
            return await self._by_ray(live, request)
        # An ingress that has only just begun may be asked before it knows of any worker.
        await live.members.first_joined(_FIRST_WORKER_S)
        prompt = await self._tokenized(request)
        count = None if prompt.token_ids is None else prompt.tokens
        request.timeline.tokenized(count, time.time())
        request.tokenized(prompt)
        workers, approx = _announcements(live), request.approx
        unfit = unfit_workers(workers, prompt.longest_tokens, request.max_tokens)
        routed = _route_request(request, prompt, unfit | exact_workers(workers, approx))
        routed = await self._prefill(live, routed, request)
        return await self._delivery.serve(live, routed, request)

    async def _by_ray(self, live: LiveRouter, request: ApiRequest) -> Response:
        """Hand a request to Ray's own router; nothing is decided, reserved or foreseen here."""
        tokenized = {one.engine for one in _announcements(live)} & set(PROMPT_ENGINES)
        prompt = await self._tokenized(request) if tokenized else bounded(request.body)
        sent = prompt_metadata(prompt.token_ids, request.load_plan) if tokenized else {}
        request.tokenized(prompt)
        return await self._delivery.serve_by_ray(live, request, sent)

    def _take_place(self, live: LiveRouter, holder: Hashable, tenant: Tenant) -> None:
        """One of `max_queue` places, held until the request ends; ApiError 429 if it gets none."""
        here = len(self._places)
        # Workers report as others' what Ray's router sent them for us: nothing is reserved then.
        ours = min(live.router.reservations, here) if self._rollout.decides else here
        elsewhere = max(live.router.in_flight - ours, 0)
        if not self._places.take(holder, tenant, elsewhere):
            raise queue_full(self._limits.max_queue, live.retry_after_s())

    async def _tokenized(self, request: ApiRequest) -> TokenizedPrompt:
        """The prompt as token ids; bounded in length if it cannot be rendered here.

        Raises:
            ApiError: 400, it cannot fit, or took too much; 503, 504, it was not done in time.
        """
        live, start_s = self._live(), time.perf_counter()
        limit_s, body_bytes = self._limits.request_timeout_s, len(request.inbound.body)
        largest = max((one.max_context_tokens for one in _announcements(live)), default=None)
        try:
            async with asyncio.timeout(request.patience_s(limit_s)):
                prompt = await self._tokenizing.tokens(
                    request.body, body_bytes, request.tenant, largest
                )
        except ApiError:
            raise
        except TimeoutError:
            request.check_deadline()
            raise not_tokenized_in_time(limit_s) from None
        except Exception as error:
            # The engine renders too and will say what is wrong; routing only knows less.
            log.info("not_tokenized", error=type(error).__name__)
            return bounded(request.body)
        live.metrics.observe(m.TOKENIZE_SECONDS, value=time.perf_counter() - start_s)
        return prompt


def _announcements(live: LiveRouter) -> list[Announcement]:
    return [state.announcement for state in live.router.workers.values()]


def _route_request(
    request: ApiRequest, prompt: TokenizedPrompt, exclude: frozenset[str]
) -> RouteRequest:
    return RouteRequest(
        request.request_id, prompt.token_ids, request.max_tokens, request.salt, exclude=exclude,
        prompt_tokens=prompt.tokens,
    )  # fmt: skip
