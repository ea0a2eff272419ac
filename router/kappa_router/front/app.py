"""The Starlette application of `kappa route`'s own paths."""

from __future__ import annotations

from dataclasses import replace

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kappa.protocol import DECIDED_PATHS
from kappa_router.api import errors, status
from kappa_router.api.app import Door, guard
from kappa_router.api.checks import digits
from kappa_router.api.face import Face
from kappa_router.api.metadata import SESSION_HEADER
from kappa_router.api.request import inbound_of, objective_of
from kappa_router.front.front import Front
from kappa_router.front.peers import PEERS_PATH
from kappa_router.page.mount import add_page

_JSON_LINES = "application/x-ndjson"


def make_face_app(front: Front, door: Door) -> Starlette:
    """The application, of a front that runs; door: of the decider that stands beside."""
    app = Starlette(routes=own_routes(front, door))
    app.router.redirect_slashes = False
    add_page(app)
    guard(app, door)
    return app


def own_routes(front: Front, door: Door) -> list[Route]:
    """Paths that are answered here."""
    face = _Face(front, door)
    return [
        Route("/health", face.health),
        Route("/ready", face.ready),
        Route("/metrics", face.metrics),
        Route("/v1/models", face.models),
        Route("/v1/models/{model:path}", face.model),
        Route("/v1/nodes", face.nodes),
        Route("/v1/tenants", face.tenants),
        Route("/v1/journal", face.journal),
        Route(PEERS_PATH, face.in_flight),
        Route("/v1/route", face.route, methods=["POST"]),
        Route("/v1/decisions", face.listed),
        Route("/v1/decisions/{request_id:path}", face.single),
    ]


class _Face(Face):
    """The endpoints that are answered here."""

    def __init__(self, front: Front, door: Door) -> None:
        self._front, self._door = front, door
        self._live = front.live

    async def health(self, request: Request) -> Response:
        """200 as long as this process serves."""
        return JSONResponse({"status": "healthy"})

    async def listed(self, request: Request) -> Response:
        """As `decisions`; FastAPI reads its parameters for the decider."""
        limit = digits(request.query_params.get("limit", "100"), 9)
        if limit is None:
            raise errors.bad_field("limit", "give a whole number")
        return await self.decisions(request, limit)

    async def single(self, request: Request) -> Response:
        """As `decision`."""
        return await self.decision(request.path_params["request_id"], request)

    async def metrics(self, request: Request) -> Response:
        """As `Face.metrics`."""
        self._front.peers.rows()
        return await super().metrics(request)

    async def models(self, request: Request) -> Response:
        """Every model that some server serves now."""
        return JSONResponse({"object": "list", "data": self._front.models()})

    async def model(self, request: Request) -> Response:
        """One of `models`; ApiError 404 if no server serves it now."""
        cards, name = (
            {card["id"]: card for card in self._front.models()},
            request.path_params["model"],
        )
        if name not in cards:
            raise errors.UNKNOWN_MODEL(model=name[:200], served=", ".join(cards))
        return JSONResponse(cards[name])

    async def nodes(self, request: Request) -> Response:
        """Every server as the router knows it, and whether it answers."""
        live = self._front.live
        peers = self._front.peers.rows()
        rows = {"nodes": status.nodes(live), "backends": self._front.rows(), "peers": peers}
        return JSONResponse(rows)

    async def in_flight(self, request: Request) -> Response:
        """What this router has in flight, as its peers follow it (`Peers.told`)."""
        return StreamingResponse(self._front.peers.told(), media_type=_JSON_LINES)

    async def journal(self, request: Request) -> Response:
        """The journal of the rollout, JSON lines; empty if none is written."""
        journal = self._front.journal
        return StreamingResponse(journal.parts() if journal else (), media_type=_JSON_LINES)

    async def route(self, request: Request) -> Response:
        """The decision that would be made for a body; nothing is sent or reserved.
        ApiError 400 if that is no JSON object, and for an objective that is none; what else is
        wrong with it a server would say."""
        inbound, front = inbound_of(request), self._front
        rules, tenant = front.settings.router, inbound.tenant
        priority, ttft_limit_s = objective_of(request.headers, rules, tenant)
        wanted = await front.read(DECIDED_PATHS[0], inbound.body, tenant, strict=True)
        wanted.session = request.headers.get(SESSION_HEADER) or wanted.session
        routed = front.request(inbound.request_id, wanted)
        routed = replace(routed, priority=priority, ttft_limit_s=ttft_limit_s)
        return self.explained(routed, request)
