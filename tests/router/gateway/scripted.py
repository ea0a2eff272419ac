"""A decider before servers that are only names, with a live router that decides among them."""

import asyncio
import json
import math
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np

from kappa_router.api import errors
from kappa_router.api.app import Access, Door
from kappa_router.config import RouterConfig
from kappa_router.decision import RouteRequest
from kappa_router.gateway.authz import Inquiry
from kappa_router.gateway.decider import Decider
from kappa_router.gateway.events import StreamEnd
from kappa_router.gateway.scene import DeciderRule, Reading, Used
from kappa_router.live.live_router import LiveRouter
from kappa_router.live.membership import MembershipRule
from kappa_router.live.replica_registry import ReplicaRegistry
from kappa_router.policy import policy_named
from tests.router.building import Followed, announcement

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"


class ScriptedScene:
    """Servers `a`, `b`, ... at 10.0.0.1:80 and so on. dead: those that do not live; hold: bodies
    are not read while it is not set; ends: what was called with each flight that ended; refusals:
    with each request that was read and refused."""

    priced, passed = frozenset((CHAT, "/v1/messages")), frozenset((EMBEDDINGS,))

    def __init__(self, workers, record=None):
        self.workers, self.dead, self.ends, self.moves = workers, set(), [], []
        self.overs, self.refusals = [], []
        self.hold, self.via, self.patience = asyncio.Event(), "", math.inf
        self.hold.set()
        registry = ReplicaRegistry()
        rule = MembershipRule(follow=lambda announced, listener: Followed())
        config = RouterConfig(policy=policy_named("ttft"), secret=7, stale_after_s=1e9)
        self.live = LiveRouter(config, record, rule, registry=registry)
        registry.publish("d", {one: announcement(one).to_dict() for one in workers})

    async def read(self, asked):
        await self.hold.wait()
        data = json.loads(asked.body or b"{}")
        if data.get("model") == "none":
            raise errors.UNKNOWN_MODEL(model="none", served="m")
        tokens = None if asked.path in self.passed else np.arange(data.get("tokens", 100))
        most, tenant = data.get("max_tokens", 0), asked.tenant.name
        request = RouteRequest(asked.request_id, tokens, most, tenant=tenant)
        streamed = data.get("stream", False)
        return Reading(request, request.max_tokens, streamed, data.get("repeatable", True))

    def decide(self, request):
        decision = self.live.route(request)
        return SimpleNamespace(decision=decision, via=self.via)

    def refused(self, request, error):
        self.refusals.append((request.request_id, error.status))

    def others(self, flight, request):
        return [] if flight.via else [one for one in self.workers if one not in self.dead]

    def address(self, name):
        return name if name == self.via else f"10.0.0.{1 + self.workers.index(name)}:80"

    def headers(self, flight):
        return {"x-kappa-to-body": "{}"}

    def arrived(self, flight, request, at):
        self.moves.append((flight.decision.worker, at))

    def used(self, flight, tail):
        return Used(*map(int, tail.split())) if tail else None

    def patience_s(self, flight):
        return self.patience

    async def lives(self, worker):
        if worker in self.dead:
            self.live.worker_died(worker)
        return worker not in self.dead

    def ended(self, flight, end):
        self.ends.append((flight.decision.worker, end))
        self.live.release(flight.decision.request_id, end)

    def over(self, flight, end, status):
        self.overs.append((flight.decision.request_id, end, status))


@asynccontextmanager
async def deciding(*workers, access=None, record=None, **rule):
    """A decider before these workers: itself, its scene, its door, and ways to use it."""
    scene = ScriptedScene(workers or ("a", "b"), record)
    door = Door(access or Access(max_body_bytes=64 << 20))
    decider = Decider(scene, door, DeciderRule(**rule))
    while len(scene.live.router.workers) < len(scene.workers):
        await asyncio.sleep(0)

    async def ask(path=CHAT, body=None, headers=None, method="POST"):
        raw = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        return await decider.decide(Inquiry(method, path, headers or {}, raw))

    async def admit(length, headers=None, path=CHAT):
        given = {} if length is None else {"content-length": str(length)}
        return await decider.decide(Inquiry("POST", path, {**given, **(headers or {})}, None))

    yield SimpleNamespace(
        decider=decider, scene=scene, door=door, live=scene.live, flights=decider.flights,
        ask=ask, admit=admit,
    )  # fmt: skip
    await scene.live.close()


def end(request_id, status=200, flags=(), upstream="10.0.0.1:80", **more):
    """An entry of Envoy's log."""
    return StreamEnd(request_id, status, frozenset(flags), upstream=upstream, **more)
