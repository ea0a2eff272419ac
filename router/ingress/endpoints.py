"""The HTTP face: Ray Serve LLM's OpenAI ingress, with one decision per request taken here.

Endpoints only. What happens to a chat or completion is `router.ingress.request_path`'s; the live
router is `router.ingress.start`'s to make. Ray's own ingress does model look-up and delivery.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable
from itertools import islice
from typing import Any

import structlog
from fastapi import FastAPI, Request
from ray import serve
from ray.exceptions import RayActorError
from ray.llm._internal.serve.core.protocol import RawRequestInfo
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.llm.ingress import OpenAiIngress, make_fastapi_ingress
from starlette.responses import JSONResponse, PlainTextResponse, Response

from kappa.logging import configure
from router.access.middleware import Access, current_tenants
from router.decision import NoWorkerError, RouteRequest
from router.errors import no_worker, unknown_request
from router.ingress.app import make_app, may_see, request_id_of, tenant_of
from router.ingress.messages import (
    POOL_HEADER,
    ChatBody,
    CompletionBody,
    explanation,
    max_tokens_of,
    parse_body,
    salt_of_body,
)
from router.ingress.pool_handles import PoolHandles
from router.ingress.rendering import PromptRenderer
from router.ingress.request_path import RequestPath
from router.ingress.settings import IngressSettings
from router.ingress.start import LiveStart
from router.ingress.terms import set_terms
from router.live import view as live_view
from router.live.board import PinGoneError
from router.live.live_router import LiveRouter
from router.live.merging import merged
from router.live.peers import Peers
from router.observing.observers import Observing
from router.ray_router import PIN_HEADER

log = structlog.get_logger(__name__)

_PROFILE_TIMEOUT_S = 90.0
_WAKE_TIMEOUT_S = 120.0
_MOST_DECISIONS = 256
# Of a candidate: what it does for others, which only operators see, as in /v1/nodes.
_OPERATORS_FIELDS = ("worker", "in_flight", "queue_s", "harm_s")
# Workers that start with us take longer; one that joins others knows them sooner.
_FIRST_SIGHT_S = 25.0


class KappaIngress(OpenAiIngress):
    """OpenAI endpoints, `GET /v1/nodes`, `GET /v1/tenants`, `POST /v1/route`,
    `GET /v1/decisions`, `GET /v1/decisions/ID`, `GET /metrics`."""

    def __init__(
        self,
        pools: dict[str, Any],
        model_cards: dict[str, Any],
        *,
        kappa: IngressSettings,
    ) -> None:
        seen = kappa.observing
        configure(seen.log_format, seen.log_file, kappa.log_level)
        self._pools = PoolHandles(pools)
        # Ray's ingress knows one deployment for each model; it is never asked to deliver.
        super().__init__(dict.fromkeys(model_cards, self._pools.all()[0]), model_cards)
        self._wire(kappa, PromptRenderer(kappa.tokenizer_source))

    def _wire(self, settings: IngressSettings, renderer: PromptRenderer) -> None:
        self._settings = settings
        self._start = LiveStart(settings, self._wake_router, self._rank())
        self._checked = False
        self._peers = Peers(settings.replicas, "for_peers")
        self._observing = Observing(settings.observing, lambda i: self._live().records.get(i))
        self._path = RequestPath(
            settings, renderer, self._live, lambda: list(self._model_cards), self._call,
            self._observing.observer,
        )  # fmt: skip

    def __del__(self) -> None:
        """Ray Serve calls it when the replica goes: its threads end, the last spans are sent."""
        for part in ("_path", "_observing"):
            if part in vars(self):
                vars(self)[part].close()

    # -- endpoints ----------------------------------------------------------------------------

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """OpenAI chat completions, streamed or not."""
        return await self._path.serve(body, "chat", request)

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """OpenAI completions, streamed or not."""
        return await self._path.serve(body, "completions", request)

    async def model_data(self, model: str) -> Any:
        """One model's card, or 404."""
        self._path.known_model(model)
        return await super().model_data(model)

    async def nodes(self) -> Response:
        """Every worker with its profile, backlogs and critical ratio."""
        return JSONResponse({"nodes": live_view.nodes(self._live())})

    async def tenants(self, request: Request) -> Response:
        """Every tenant with its weight, what it was charged, and its share of all charges."""
        known = current_tenants(request.app, self._settings.tenants)
        return JSONResponse({"tenants": live_view.tenants(self._live(), known)})

    async def profile(self) -> Response:
        """Measure every worker's machine anew, one after the other, and show the nodes."""
        for worker in list(self._live().router.workers):
            pin = RawRequestInfo(headers={PIN_HEADER: worker})
            handle = self._pools.of(self._live().pool_of(worker))
            try:
                await asyncio.wait_for(handle.profile.remote(None, pin), _PROFILE_TIMEOUT_S)
            except (TimeoutError, RayActorError, BackPressureError, PinGoneError):
                raise no_worker(f"worker {worker} could not be measured", 10.0) from None
        return await self.nodes()

    async def route(self, request: Request) -> Response:
        """What would be decided for a chat or completion body; nothing is run or reserved."""
        body = await parse_body(request)
        self._path.known_model(body.model)
        set_terms(request, body, tenant_of(request))
        prompt = await self._path.only_tokenized(body, request)
        live = self._live()
        routed = RouteRequest(
            request_id_of(request), prompt.token_ids, max_tokens_of(body), salt_of_body(body),
            prompt_tokens=prompt.tokens,
        )  # fmt: skip
        try:
            decision = live.explain(routed)
        except NoWorkerError as error:
            raise no_worker(str(error), live.retry_after_s()) from None
        told = explanation(decision)
        if not tenant_of(request).operator:
            for candidate in told["candidates"]:
                for name in _OPERATORS_FIELDS:
                    del candidate[name]
        return JSONResponse(told)

    async def decisions(self, request: Request, limit: int = 100) -> Response:
        """The last decisions with their outcomes, newest last; of other tenants to operators.

        At most `_MOST_DECISIONS` to others.
        """
        asker = tenant_of(request)
        only = None if asker.operator else asker.name
        count = max(min(limit, sys.maxsize if asker.operator else _MOST_DECISIONS), 0)
        told = await self._peers.ask(self.for_peers, "decisions", only, count)
        records = sorted((r for one in told for r in one), key=lambda record: record["time_s"])
        return JSONResponse({"decisions": records[-count:] if count else []})

    async def decision(self, request_id: str, request: Request) -> Response:
        """One request: its decision, what became of it, and where its time went; or 404."""
        for tenant, told in await self._peers.ask(self.for_peers, "decision", request_id):
            if told is not None and tenant is not None and may_see(request, tenant):
                return JSONResponse(told)
        raise unknown_request(request_id)

    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics, of all ingresses together."""
        self._asgi_app = request.app
        told = await self._peers.ask(self.for_peers, "metrics")
        text = merged(told) if len(told) > 1 else told[0]
        return Response(text, media_type="text/plain; version=0.0.4")

    async def ready(self) -> Response:
        """200 while a worker can be chosen, else 503."""
        count = self._live().choosable
        return JSONResponse({"workers": count}, status_code=200 if count else 503)

    # -- what other ingresses ask ---------------------------------------------------------------

    async def for_peers(self, what: str, *args: Any) -> Any:
        """What this ingress alone knows: its `metrics`, its last `decisions`, or one `decision`."""
        match what:
            case "metrics":
                return self._own_metrics()
            case "decisions":
                tenant, count = args
                # Of the newest first, no more than are wanted: a record takes 7 us of this loop.
                newest = reversed(self._live().records.values())
                wanted = (r for r in newest if tenant is None or r.tenant == tenant)
                return [record.to_dict() for record in islice(wanted, count)]
            case "decision":
                (request_id,) = args
                return self._observing.tenant(request_id), self._observing.account(request_id)
        raise ValueError(f"an ingress asked for {what!r}, which this one does not know")

    def _own_metrics(self) -> bytes:
        live, app = self._live(), self._asgi_app
        live_view.refresh_gauges(live)
        live_view.refresh_tenants(live, current_tenants(app, self._settings.tenants))
        live_view.refresh_refusals(live, app.state)
        return live.metrics.exposition()

    # -- what Ray asks, and is asked ------------------------------------------------------------

    async def check_health(self) -> None:
        """Called by Ray; the first time, before this ingress is sent any request, it waits until
        the workers' state is known here, as far as there are workers.

        Raises:
            RuntimeError: it cannot follow the workers any more; Ray replaces it.
        """
        if not self._checked:
            self._checked = True
            await self._start.known(_FIRST_SIGHT_S)
        fault = self._live().members.fault()
        if fault:
            raise RuntimeError(f"this ingress must be replaced: {fault}")

    def _rank(self) -> int:
        """Which of the ingresses this is; 0 outside of Ray Serve."""
        try:
            return int(serve.get_replica_context().rank.rank)
        except RayServeException:
            return 0

    def _live(self) -> LiveRouter:
        return self._start()

    def _call(self, body: Any, method: str, request: Request) -> AsyncGenerator[Any, None]:
        worker = request.headers.get(PIN_HEADER, "")
        pool = request.headers.get(POOL_HEADER) or self._live().pool_of(worker)
        return self._pools.stream(pool, body, method, request)

    async def _wake_router(self) -> None:
        """Ray makes a handle's router at its first call; until then nobody posts announcements."""
        for handle in self._pools.all():
            try:
                await asyncio.wait_for(handle.llm_config.remote(), _WAKE_TIMEOUT_S)
            except Exception as error:
                log.warning("workers_not_reached", error=repr(error))


ROUTES: dict[str, Callable[[FastAPI], Any]] = {
    "models": lambda a: a.get("/v1/models"),
    "model_data": lambda a: a.get("/v1/models/{model:path}"),
    "chat": lambda a: a.post("/v1/chat/completions"),
    "completions": lambda a: a.post("/v1/completions"),
    "nodes": lambda a: a.get("/v1/nodes"),
    "tenants": lambda a: a.get("/v1/tenants"),
    "profile": lambda a: a.post("/v1/nodes/profile"),
    "route": lambda a: a.post("/v1/route"),
    "decisions": lambda a: a.get("/v1/decisions"),
    "decision": lambda a: a.get("/v1/decisions/{request_id:path}"),
    "metrics": lambda a: a.get("/metrics", response_class=PlainTextResponse),
    "ready": lambda a: a.get("/ready"),
}
"""Every endpoint by the method that answers it: how it is added to an application."""


def make_ingress(access: Access | None = None) -> type:
    """The ingress class with its routes, ready for `serve.deployment`."""
    app: FastAPI = make_app(access)
    ingress: type = make_fastapi_ingress(KappaIngress, endpoint_map=ROUTES, app=app)
    return ingress
