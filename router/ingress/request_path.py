"""The path of one request through the ingress, from an accepted body to its response.

Check, tokenize (off the loop), decide and reserve, mark, deliver; once more elsewhere if the worker
dies before its first token. Everything that waits stands before the decision, so that a decision
and its reservation are one act.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import structlog
from fastapi import Request
from starlette.responses import Response

from kappa import metrics as m
from kappa.protocol import APPROX_KEY, PROMPT_ENGINES
from router.access.places import Places
from router.access.tenants import Tenant
from router.decision import Decision, NoWorkerError, OverloadedError, RouteRequest
from router.errors import (
    ApiError,
    no_plans_here,
    no_worker,
    not_tokenized_in_time,
    overloaded,
    queue_full,
    unknown_model,
)
from router.ingress.app import body_accepted, request_id_of, tenant_of
from router.ingress.approx import exact_workers, is_approximate
from router.ingress.delivery import Call, Delivery
from router.ingress.failures import WorkerFailed, digest_of, may_pass_on, refuse_killer
from router.ingress.footprint import unfit_workers
from router.ingress.messages import (
    approx_asked_by,
    choices_of,
    conversation_of,
    engine_marks,
    headers_without_keys,
    mark,
    max_tokens_of,
    plain_marks,
    plan_asked,
    prompt_marks,
    salt_of_body,
)
from router.ingress.prefill import PREFILL_SUFFIX, PrefillElsewhere
from router.ingress.rendering import Prompt, PromptRenderer, bounded
from router.ingress.settings import IngressSettings
from router.ingress.terms import set_terms, terms_of
from router.ingress.tokenizing import Tokenizing
from router.live.live_router import LiveRouter
from router.observing.observer import NoObserver, RequestObserver
from router.rollout import Rollout, Unsteered

log = structlog.get_logger(__name__)

_ATTEMPTS = 2
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
        observer: RequestObserver | None = None,
    ) -> None:
        """`live`: the live router; `models`: names that are served; `call`: Ray's delivery."""
        self._settings = settings
        self._live, self._models = live, models
        self._observer = NoObserver() if observer is None else observer
        self._rollout = Rollout.parse(settings.mode)
        self._delivery = Delivery(call, self._observer, settings.request_timeout_s)
        self._prefill = PrefillElsewhere(call, settings.transfer, settings.request_timeout_s)
        self._tokenizing = Tokenizing(renderer)
        self._open: set[str] = set()
        # Without keys nobody can be told from another.
        self._places = Places(settings.max_queue, shared=bool(settings.tenants.by_digest))

    def close(self) -> None:
        """Let the tokenizer's threads and process go."""
        self._tokenizing.close()

    async def serve(self, body: Any, method: str, request: Request) -> Response:
        """Answer a request; `method` is Ray's name for the kind: `chat` or `completions`."""
        body_accepted(request)
        live, tenant = self._live(), tenant_of(request).name
        request_id = self._open_as(request, live)
        self._observer.received(request_id, tenant, headers_without_keys(request), time.time())
        begun = False

        def ended(end: str, status: int) -> None:
            nonlocal begun
            begun = True
            self._open.discard(request_id)
            self._places.leave(request_id)
            self._observer.ended(request_id, end, status, time.time())

        try:
            response = await self._checked(live, request_id, body, method, request, ended)
            begun = True
        except ApiError as error:
            live.answered(tenant, error.status, error.code)
            ended(error.code or "error", error.status)
            raise
        except asyncio.CancelledError:
            ended("client_gone", 0)
            raise
        finally:
            if not begun:
                ended("error", 500)
        live.answered(tenant, response.status_code)
        return response

    def known_model(self, model: str | None) -> None:
        """Refuse a model that is not served here: ApiError 404."""
        known = self._models()
        if model is not None and model not in known:
            raise unknown_model(str(model), known)

    async def only_tokenized(self, body: Any, request: Request) -> Prompt:
        """As `tokenize`, for a request that ends there: it holds a place until then."""
        holder = object()
        self._take_place(self._live(), holder, tenant_of(request))
        try:
            return await self.tokenize(body, request)
        finally:
            self._places.leave(holder)

    async def tokenize(self, body: Any, request: Request) -> Prompt:
        """A body's prompt as token ids; bounded in length if it cannot be rendered here.

        Raises:
            ApiError: 400, it cannot fit, or took too much; 503, 504, it was not done in time.
        """
        live, terms, start_s = self._live(), terms_of(request), time.perf_counter()
        limit_s = self._settings.request_timeout_s
        try:
            async with asyncio.timeout(terms.patience_s(limit_s)):
                prompt = await self._tokenizing.tokens(
                    body, terms.body_bytes, tenant_of(request), _largest_context(live)
                )
        except ApiError:
            raise
        except TimeoutError:
            terms.check()
            raise not_tokenized_in_time(limit_s) from None
        except Exception as error:
            # The engine renders too and will say what is wrong; routing only knows less.
            log.info("not_tokenized", error=type(error).__name__)
            return bounded(body)
        live.metrics.observe(m.TOKENIZE_SECONDS, value=time.perf_counter() - start_s)
        return prompt

    # -- parts --------------------------------------------------------------------------------

    def _open_as(self, request: Request, live: LiveRouter) -> str:
        """The request's id here: a client may send one id twice at a time, or that of another's
        prefill, and a reservation must not be shared; nor another tenant's record taken over."""
        request_id = request_id_of(request)
        record = live.records.get(request_id)
        others = record is not None and record.tenant != tenant_of(request).name
        if others or request_id in self._open or request_id.endswith(PREFILL_SUFFIX):
            request_id = f"{request_id}-{uuid.uuid4().hex[:8]}"
        self._open.add(request_id)
        return request_id

    async def _checked(
        self,
        live: LiveRouter,
        request_id: str,
        body: Any,
        method: str,
        request: Request,
        ended: Callable[[str, int], None],
    ) -> Response:
        self.known_model(body.model)
        terms = set_terms(request, body, tenant_of(request))
        refuse_killer(live, request, method)
        self._take_place(live, request_id, tenant_of(request))
        if not self._rollout.asks:
            return await self._by_ray(live, request_id, body, method, request, ended)
        # An ingress that has only just begun may be asked before it was told of any worker.
        await live.members.first_joined(_FIRST_WORKER_S)
        prompt = await self.tokenize(body, request)
        count = None if prompt.token_ids is None else prompt.tokens
        self._observer.tokenized(request_id, count, time.time())
        terms.tokenized(prompt.tokens, choices_of(body) * max_tokens_of(body))
        said = [state.announcement for state in live.router.workers.values()]
        approx = approx_asked_by(request, body)
        unfit = unfit_workers(said, prompt.longest_tokens, max_tokens_of(body))
        routed = RouteRequest(
            request_id, prompt.token_ids, max_tokens_of(body), salt_of_body(body),
            exclude=unfit | exact_workers(said, approx), prompt_tokens=prompt.tokens,
        )  # fmt: skip
        routed = await self._prefill(live, routed, body, method, request)
        return await self._deliver(live, routed, body, method, request, ended)

    def _take_place(self, live: LiveRouter, holder: Hashable, tenant: Tenant) -> None:
        """One of `max_queue` places, held until the request ends; ApiError 429 if it gets none."""
        here = len(self._places)
        # Workers report as others' what Ray's router sent them for us: nothing is reserved then.
        ours = min(live.router.reservations, here) if self._rollout.asks else here
        elsewhere = max(live.router.in_flight - ours, 0)
        if not self._places.take(holder, tenant, elsewhere):
            raise queue_full(self._settings.max_queue, live.retry_after_s())

    async def _deliver(
        self,
        live: LiveRouter,
        routed: RouteRequest,
        body: Any,
        method: str,
        request: Request,
        ended: Callable[[str, int], None],
    ) -> Response:
        """Decide and send; once more elsewhere if the worker fails before its first token."""
        last: WorkerFailed | None = None
        tenant = tenant_of(request)
        over = self._acquitting(live, method, request, routed.request_id, ended)
        for attempt in range(_ATTEMPTS):
            try:
                decision = self._decide(live, routed, body, request)
            except OverloadedError as error:
                raise overloaded(str(error), error.retry_after_s) from last
            except NoWorkerError as error:
                if last is not None and last.error is not None:
                    raise last.error from None
                raise no_worker(str(error), live.retry_after_s()) from last
            try:
                self._observer.decided(routed.request_id, decision, attempt, time.time())
                marks = engine_marks(
                    live.records[routed.request_id].sent_as, decision, tenant,
                    live.charges.elsewhere(decision.worker),
                )  # fmt: skip
                mark(body, {**marks, **self._torch_marks(live, decision, routed, body, request)})
                return await self._delivery.send(live, decision, body, method, request, over)
            except WorkerFailed as failure:
                log.warning(
                    "worker_failed", request_id=routed.request_id, tenant=tenant.name,
                    worker=decision.worker, attempt=attempt, why=failure.why,
                )  # fmt: skip
                last = failure
                if failure.end == "worker_died":
                    may_pass_on(live, request, method, routed.request_id, decision.worker)
                live.retried(routed.request_id, failure.why)
                tried = routed.exclude | {decision.worker}
                # What was handed over is gone with the worker that took it.
                body.kv_transfer_params = None
                routed = replace(routed, exclude=tried, retry=True, handed_tokens=0)
            except BaseException:
                # Delivery ends what it began; this is for what fails before it, which says nothing
                # of the worker: a client must not open its breaker by asking for what it lacks.
                live.release(routed.request_id, "unsent")
                raise
        assert last is not None
        if last.error is not None:
            raise last.error from None
        raise no_worker("two workers failed on this request", live.retry_after_s()) from last

    def _acquitting(
        self,
        live: LiveRouter,
        method: str,
        request: Request,
        request_id: str,
        ended: Callable[[str, int], None],
    ) -> Callable[[str, int], None]:
        """`ended`, which also notes that an engine survived the content, or died in mid-stream."""

        def over(end: str, status: int) -> None:
            if end == "done" and live.suspects:
                live.suspects.served(digest_of(request, method))
            elif end == "worker_died" and request_id in live.records:
                worker = live.records[request_id].decision.worker
                live.suspects.blame(worker, digest_of(request, method), live.now_s())
            ended(end, status)

        return over

    async def _by_ray(
        self,
        live: LiveRouter,
        request_id: str,
        body: Any,
        method: str,
        request: Request,
        ended: Callable[[str, int], None],
    ) -> Response:
        """Hand a request to Ray's own router; nothing is decided, reserved or foreseen here."""
        engines = {s.announcement.engine for s in live.router.workers.values()}
        tenant, marks = tenant_of(request), dict[str, str]()
        if engines & set(PROMPT_ENGINES):
            prompt = await self.tokenize(body, request)
            marks = prompt_marks(prompt.token_ids, plan_asked(request))
        else:
            prompt = bounded(body)
        terms_of(request).tokenized(prompt.tokens, choices_of(body) * max_tokens_of(body))
        mark(body, {**plain_marks(live.sent_as(request_id), tenant), **marks})
        live.metrics.inc(m.ROLLOUT_REQUESTS, "ray")
        try:
            unsteered = Unsteered(request_id, live.pool_for_ray(request_id))
            return await self._delivery.send(live, unsteered, body, method, request, ended)
        except WorkerFailed as failure:
            if failure.error is not None:
                raise failure.error from None
            raise no_worker("the worker failed on this request", live.retry_after_s()) from None

    def _decide(
        self, live: LiveRouter, routed: RouteRequest, body: Any, request: Request
    ) -> Decision:
        """Choose and reserve, by our rule or, as the rollout has it, by Ray's."""
        narrowed = terms_of(request).narrowed(live, routed)
        tenant = tenant_of(request).name
        conversation = conversation_of(body, request) or routed.request_id
        if self._rollout.arm(f"{tenant} {conversation}") == "ray":
            return live.route_as_ray(narrowed, tenant)
        return live.route(narrowed, tenant)

    def _torch_marks(
        self,
        live: LiveRouter,
        decision: Decision,
        routed: RouteRequest,
        body: Any,
        request: Request,
    ) -> dict[str, str]:
        """What only an engine of ours is told; raises ApiError 400 if it is refused."""
        state = live.router.workers.get(decision.worker)
        plan = plan_asked(request)
        if state is not None and state.announcement.engine in PROMPT_ENGINES:
            approx = is_approximate(state.announcement, approx_asked_by(request, body))
            marks = prompt_marks(routed.token_ids, plan)
            return {**marks, APPROX_KEY: "ok"} if approx else marks
        if plan:
            raise no_plans_here()
        return {}


def _largest_context(live: LiveRouter) -> int | None:
    """Tokens of the largest context that a worker announced; None before one has."""
    workers = live.router.workers.values()
    return max((state.announcement.max_context_tokens for state in workers), default=None)
