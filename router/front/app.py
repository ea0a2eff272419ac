"""The Starlette application of `kappa route`: our own paths, and behind them the servers'."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from kappa.settings.front import FrontSettings
from router.api import errors, status
from router.api.app import guard, inbound_of
from router.api.start import access_of, tenants_table
from router.api.tenants import Tenants
from router.decision import NoWorkerError
from router.front.front import DECIDED_PATHS, Front
from router.front.relay import Relay
from router.page.mount import add_page


def make_front_app(settings: FrontSettings) -> Starlette:
    """The application; `app.state.front` is there while it runs."""
    front = Front(settings)
    face = _Face(front)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with front:
            yield

    routes = [
        Route("/health", face.health),
        Route("/ready", face.ready),
        Route("/metrics", face.metrics),
        Route("/v1/models", face.models),
        Route("/v1/nodes", face.nodes),
        Route("/v1/tenants", face.tenants),
        Route("/v1/journal", face.journal),
        Route("/v1/route", face.route, methods=["POST"]),
        Route("/v1/decisions", face.decisions),
        Route("/v1/decisions/{request_id:path}", face.decision),
        Mount("/", Relay(front)),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.front = front
    add_page(app)
    guard(app, replace(access_of(settings), limit_all=True))
    return app


class _Face:
    """The endpoints that are answered here."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._known = tenants_table(front.settings.tenants)

    async def health(self, request: Request) -> Response:
        """200 as long as this process serves."""
        return JSONResponse({"status": "healthy"})

    async def ready(self, request: Request) -> Response:
        """200 while a server can be chosen, else 503."""
        count = self._front.live.choosable
        return JSONResponse({"workers": count}, status_code=200 if count else 503)

    async def metrics(self, request: Request) -> Response:
        state = request.app.state
        text = status.exposition(self._front.live, self._tenants(state), state)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """Every model that some server serves now."""
        return JSONResponse({"object": "list", "data": self._front.models()})

    async def nodes(self, request: Request) -> Response:
        """Every server as the router knows it, and whether it answers."""
        live = self._front.live
        return JSONResponse({"nodes": status.nodes(live), "backends": self._front.rows()})

    async def tenants(self, request: Request) -> Response:
        charged = self._front.live.charges.totals()
        return JSONResponse({"tenants": status.shares(self._tenants(request.app.state), charged)})

    async def journal(self, request: Request) -> Response:
        """The journal of the rollout, JSON lines; empty if none is written."""
        return StreamingResponse(self._front.rollout.journal(), media_type="application/x-ndjson")

    async def route(self, request: Request) -> Response:
        """What would be decided for a chat or completion body; nothing is sent or reserved.
        ApiError 400 if that is no JSON object; what else is wrong with it a server would say."""
        inbound, live = inbound_of(request), self._front.live
        data, size_bytes = errors.json_object(inbound.body), len(inbound.body)
        wanted = await self._front.understood(DECIDED_PATHS[0], data, size_bytes)
        routed = self._front.request(inbound.request_id, wanted)
        try:
            decision = live.explain(routed)
        except NoWorkerError as error:
            raise errors.NO_WORKER(why=error, retry_after_s=live.retry_after_s()) from None
        return JSONResponse(status.explanation(decision, operator=inbound.tenant.operator))

    async def decisions(self, request: Request) -> Response:
        """The last decisions with their outcomes, newest last; of other tenants to operators."""
        asker, text = inbound_of(request).tenant, request.query_params.get("limit", "100")
        if not text.isascii() or not text.isdigit() or len(text) > 9:
            raise errors.bad_field("limit", "give a whole number")
        most = int(text) if asker.operator else min(int(text), status.MOST_DECISIONS)
        only = None if asker.operator else asker.name
        rows = status.newest_decisions(self._front.live, only, most)
        return JSONResponse({"decisions": rows[::-1]})

    async def decision(self, request: Request) -> Response:
        """One request's decision and what became of it, or 404."""
        asker, request_id = inbound_of(request).tenant, request.path_params["request_id"]
        record = self._front.live.records.get(request_id)
        if record is None or not (asker.operator or asker.name == record.tenant):
            raise errors.UNKNOWN_REQUEST(request_id=request_id[:80])
        return JSONResponse(record.to_dict())

    def _tenants(self, state: Any) -> Tenants:
        return status.tenants_now(state, self._known)
