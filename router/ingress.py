"""The HTTP face: Ray Serve LLM's OpenAI ingress, with one decision per request taken here.

Chat and completions go: check, tokenize (off the loop), decide and reserve, mark, pin, deliver,
stream, release. Ray's own ingress does model look-up and delivery; what is ours is everything
between.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import structlog
from fastapi import FastAPI, Request
from ray.exceptions import RayActorError
from ray.llm._internal.serve.core.protocol import RawRequestInfo
from ray.serve.exceptions import BackPressureError
from ray.serve.llm.ingress import OpenAiIngress, make_fastapi_ingress
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from starlette.responses import JSONResponse, Response

from kappa import metrics as m
from router.admission import Admission
from router.core import (
    Decision,
    NoWorkerError,
    OverloadedError,
    RouterConfig,
    RouteRequest,
)
from router.errors import (
    ApiError,
    check_body,
    engine_failed,
    from_engine,
    no_plans_here,
    no_worker,
    overloaded,
    queue_full,
    unknown_model,
)
from router.footprint import unfit_workers
from router.http_app import EndedStream, body_accepted, make_app, request_id_of, tenant_of
from router.live import LiveRouter
from router.messages import (
    as_events,
    decision_headers,
    engine_marks,
    explanation,
    mark,
    max_tokens_of,
    parse_body,
    pinned,
    plan_asked,
    prompt_marks,
    salt_of_body,
    tokens_in,
)
from router.policies import policy_named
from router.prefix_hash import secret_from_seed
from router.ray_router import PIN_HEADER
from router.rendering import PromptRenderer
from router.tenants import Tenants

log = structlog.get_logger(__name__)

_TOKENIZER_THREADS = 2
_PROFILE_TIMEOUT_S = 90.0
_DEAD_WORKER = (RayActorError, BackPressureError)


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """What the ingress is told when it is deployed."""

    tokenizer_source: str
    policy: str
    index_blocks: int
    max_queue: int
    stale_after_s: float
    calibrate: bool
    calibrate_requests: int | None
    request_timeout_s: float
    secret: str
    record: str | None
    forecast_workers: int = 4
    admission: bool = False
    tenants: Tenants = field(default_factory=Tenants)


class KappaIngress(OpenAiIngress):
    """OpenAI endpoints, `GET /v1/nodes`, `GET /v1/tenants`, `POST /v1/route`,
    `GET /v1/decisions`, `GET /metrics`."""

    def __init__(
        self,
        llm_deployments: dict[str, Any],
        model_cards: dict[str, Any],
        *,
        kappa: IngressSettings,
    ) -> None:
        super().__init__(llm_deployments, model_cards)
        self._settings = kappa
        self._live_router: LiveRouter | None = None
        self._renderer = PromptRenderer(kappa.tokenizer_source)
        self._threads = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenize")
        self._follow: asyncio.Task[None] | None = None

    # -- endpoints ----------------------------------------------------------------------------

    async def chat(self, body: ChatCompletionRequest, request: Request) -> Response:
        """OpenAI chat completions, streamed or not."""
        return await self._serve(body, "chat", request)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """OpenAI completions, streamed or not."""
        return await self._serve(body, "completions", request)

    async def model_data(self, model: str) -> Any:
        """One model's card, or 404."""
        self._known_model(model)
        return await super().model_data(model)

    async def nodes(self) -> Response:
        """Every worker with its profile, backlogs and critical ratio."""
        return JSONResponse({"nodes": self._live().nodes()})

    async def tenants(self) -> Response:
        """Every tenant with its weight, what it was charged, and its share of all charges."""
        return JSONResponse({"tenants": self._live().tenants(self._settings.tenants)})

    async def profile(self) -> Response:
        """Measure every worker's machine anew, one after the other, and show the nodes."""
        (handle,) = self._default_serve_handles.values()
        for worker in list(self._live().router.state.workers):
            pin = RawRequestInfo(headers={PIN_HEADER: worker})
            try:
                await asyncio.wait_for(handle.profile.remote(None, pin), _PROFILE_TIMEOUT_S)
            except (TimeoutError, *_DEAD_WORKER):
                raise no_worker(f"worker {worker} could not be measured", 10.0) from None
        return await self.nodes()

    async def route(self, request: Request) -> Response:
        """What would be decided for a chat or completion body; nothing is run or reserved."""
        body = await parse_body(request)
        check_body(body)
        self._known_model(body.model)
        tokens = await self._tokenize(body)
        live = self._live()
        routed = RouteRequest(
            request_id_of(request), tokens, max_tokens_of(body), salt_of_body(body)
        )
        try:
            decision = live.router.explain(routed, time.time())
        except NoWorkerError as error:
            raise no_worker(str(error), live.retry_after_s()) from None
        return JSONResponse(explanation(decision))

    async def decisions(self, request: Request, limit: int = 100) -> Response:
        """The last decisions with their outcomes, newest last."""
        records = list(self._live().records.values())[-max(limit, 0) :] if limit else []
        return JSONResponse({"decisions": [record.to_dict() for record in records]})

    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics."""
        live = self._live()
        live.refresh_gauges()
        refused = request.app.state.keys_refused
        live.metrics.total(m.TENANT_REQUESTS, "unknown", "invalid_api_key", to=refused)
        return Response(live.metrics.exposition(), media_type="text/plain; version=0.0.4")

    async def ready(self) -> Response:
        """200 once a worker can be chosen, else 503."""
        count = len(self._live().router.state.workers)
        return JSONResponse({"workers": count}, status_code=200 if count else 503)

    # -- one request --------------------------------------------------------------------------

    async def _serve(self, body: Any, method: str, request: Request) -> Response:
        body_accepted(request)
        live, tenant = self._live(), tenant_of(request).name
        try:
            response = await self._checked(live, body, method, request)
        except ApiError as error:
            live.answered(tenant, error.status, error.code)
            raise
        live.answered(tenant, response.status_code)
        return response

    async def _checked(
        self, live: LiveRouter, body: Any, method: str, request: Request
    ) -> Response:
        self._known_model(body.model)
        check_body(body)
        if live.router.reservations >= self._settings.max_queue:
            raise queue_full(self._settings.max_queue, live.retry_after_s())
        tokens = await self._tokenize(body)
        unfit = self._unfit(live, body, tokens)
        request_id = request_id_of(request)
        if request_id in live.router:
            # A client may send one id twice at a time; a reservation must not be shared.
            request_id = f"{request_id}-{uuid.uuid4().hex[:8]}"
        routed = RouteRequest(
            request_id, tokens, max_tokens_of(body), salt_of_body(body), exclude=unfit
        )
        # Others were let in while this one was tokenized; from here to the decision nobody waits.
        if live.router.reservations >= self._settings.max_queue:
            raise queue_full(self._settings.max_queue, live.retry_after_s())
        return await self._deliver(live, routed, body, method, request)

    async def _deliver(
        self, live: LiveRouter, routed: RouteRequest, body: Any, method: str, request: Request
    ) -> Response:
        """Decide and send; once more elsewhere if the worker dies before its first token."""
        last: BaseException | None = None
        tenant = tenant_of(request)
        for attempt in range(2):
            try:
                decision = live.route(routed, tenant.name)
            except OverloadedError as error:
                raise overloaded(str(error), error.retry_after_s) from last
            except NoWorkerError as error:
                raise no_worker(str(error), live.retry_after_s()) from last
            marks = engine_marks(decision, tenant, live.charges.elsewhere(decision.worker))
            mark(body, {**marks, **self._torch_marks(live, decision, routed, request)})
            try:
                return await self._send(live, decision, body, method, request)
            except _DEAD_WORKER as error:
                live.release(routed.request_id, "worker_died")
                log.warning(
                    "worker_failed", request_id=routed.request_id, tenant=tenant.name,
                    worker=decision.worker, attempt=attempt,
                )  # fmt: skip
                last = error
                routed = replace(routed, exclude=routed.exclude | {decision.worker})
        raise no_worker("two workers failed on this request", live.retry_after_s()) from last

    async def _send(
        self, live: LiveRouter, decision: Decision, body: Any, method: str, request: Request
    ) -> Response:
        request_id = decision.request_id
        stream = self._get_response(
            body=body, call_method=method, raw_request=pinned(request, decision.worker)
        )
        end = "error"
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                first = await anext(stream)
            item = first[0] if isinstance(first, list) and first else first
            if hasattr(item, "error"):
                raise from_engine(item)
            headers = decision_headers(decision)
            if hasattr(item, "model_dump"):
                live.first_token(request_id)
                content = item.model_dump()
                live.tokens(request_id, (content.get("usage") or {}).get("completion_tokens", 0))
                end = "done"
                return JSONResponse(content, headers=headers)
            live.first_token(request_id)
            end = ""

            async def ended() -> None:
                live.release(request_id, "client_gone")
                await stream.aclose()

            return EndedStream(
                self._relay(live, request_id, first, stream),
                ended,
                media_type="text/event-stream",
                headers=headers,
            )
        except (ApiError, *_DEAD_WORKER):
            raise
        except asyncio.CancelledError:
            end = "client_gone"
            raise
        except TimeoutError:
            raise ApiError(
                504, f"No token within {self._settings.request_timeout_s:g} s.",
                kind="server_error", code="timeout",
            ) from None  # fmt: skip
        except Exception as error:
            log.exception("engine_error", request_id=request_id, exc_info=error)
            raise engine_failed() from None
        finally:
            if end:
                live.release(request_id, end)
                await stream.aclose()

    async def _relay(
        self, live: LiveRouter, request_id: str, first: Any, stream: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[str, None]:
        end = "client_gone"
        try:
            packet = as_events(first)
            live.tokens(request_id, tokens_in(packet))
            yield packet
            async for item in stream:
                packet = as_events(item)
                live.tokens(request_id, tokens_in(packet))
                yield packet
            if not packet.rstrip().endswith("[DONE]"):
                yield "data: [DONE]\n\n"
            end = "done"
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            # The status has gone out; an event in OpenAI's shape is the only way left to tell.
            end = "error"
            log.warning("stream_broken", request_id=request_id, error=type(error).__name__)
            yield f"data: {json.dumps(engine_failed().body())}\n\n"
        finally:
            live.release(request_id, end)
            await stream.aclose()

    # -- parts --------------------------------------------------------------------------------

    def _live(self) -> LiveRouter:
        if self._live_router is None:
            s = self._settings
            self._live_router = LiveRouter(
                RouterConfig(
                    policy=policy_named(s.policy),
                    secret=secret_from_seed(s.secret),
                    index_blocks=s.index_blocks,
                    stale_after_s=s.stale_after_s,
                    calibrate=s.calibrate,
                    calibrate_requests=s.calibrate_requests,
                    forecast_workers=s.forecast_workers,
                    admission=Admission() if s.admission else None,
                ),
                record=s.record,
            )
            self._follow = asyncio.get_running_loop().create_task(self._wake_router())
        return self._live_router

    async def _wake_router(self) -> None:
        """Ray makes a handle's router at its first call; until then nobody posts announcements."""
        for handle in self._default_serve_handles.values():
            try:
                await asyncio.wait_for(handle.llm_config.remote(), 120.0)
            except Exception as error:
                log.warning("workers_not_reached", error=repr(error))

    def _known_model(self, model: str | None) -> None:
        known = list(self._default_serve_handles)
        if model is not None and model not in known:
            raise unknown_model(str(model), known)

    def _torch_marks(
        self, live: LiveRouter, decision: Decision, routed: RouteRequest, request: Request
    ) -> dict[str, str]:
        """What only an engine of ours is told; releases the reservation if it is refused."""
        state = live.router.state.workers.get(decision.worker)
        plan = plan_asked(request)
        try:
            if state is not None and state.announcement.engine == "torch":
                return prompt_marks(routed.token_ids, plan)
            if plan:
                raise no_plans_here()
        except ApiError:
            live.release(routed.request_id, "error")
            raise
        return {}

    def _unfit(self, live: LiveRouter, body: Any, tokens: np.ndarray | None) -> frozenset[str]:
        if tokens is None:
            return frozenset()
        workers = (state.announcement for state in live.router.state.workers.values())
        return unfit_workers(workers, len(tokens), max_tokens_of(body))

    async def _tokenize(self, body: Any) -> np.ndarray | None:
        start_s = time.perf_counter()
        loop = asyncio.get_running_loop()
        try:
            tokens = await loop.run_in_executor(self._threads, self._renderer.render, body)
        except Exception as error:
            # The engine renders too and will say what is wrong; routing only knows less.
            log.info("not_tokenized", error=type(error).__name__)
            return None
        self._live().metrics.observe(m.TOKENIZE_SECONDS, value=time.perf_counter() - start_s)
        return tokens


def make_ingress(max_body_bytes: int, tenants: Tenants | None = None) -> type:
    """The ingress class with its routes, ready for `serve.deployment`."""
    app: FastAPI = make_app(max_body_bytes, tenants)
    routes = {
        "models": lambda a: a.get("/v1/models"),
        "model_data": lambda a: a.get("/v1/models/{model:path}"),
        "chat": lambda a: a.post("/v1/chat/completions"),
        "completions": lambda a: a.post("/v1/completions"),
        "nodes": lambda a: a.get("/v1/nodes"),
        "tenants": lambda a: a.get("/v1/tenants"),
        "profile": lambda a: a.post("/v1/nodes/profile"),
        "route": lambda a: a.post("/v1/route"),
        "decisions": lambda a: a.get("/v1/decisions"),
        "metrics": lambda a: a.get("/metrics"),
        "ready": lambda a: a.get("/ready"),
    }
    ingress: type = make_fastapi_ingress(KappaIngress, endpoint_map=routes, app=app)
    return ingress
