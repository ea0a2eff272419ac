"""A cluster whose engines are scripts: a real Envoy, decider and gates on ports of their own.

For the tests of what a cluster promises its clients: `script(worker)` yields what that worker's
engine answers, or raises. The fixture `serve` (conftest) makes one. Workers tell which requests
came and went, and nothing of what they hold or compute: tests say that by `WorkerReport`s.
"""

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from unittest import mock

import httpx
import numpy as np

import kappa_router.cluster.replica
import kappa_router.live.live_router
from kappa.hardware import node_profile
from kappa.keys import digest_of
from kappa.protocol import EngineDiedError, WorkerReport
from kappa.settings.routing import RouterSettings
from kappa_router.api.app import Access
from kappa_router.api.render import PromptRenderer
from kappa_router.api.request import EndpointModel
from kappa_router.api.start import DeciderSettings
from kappa_router.api.tenants import Tenants
from kappa_router.cluster.paths import ASKED, own_paths
from kappa_router.cluster.replica import KappaDecider
from kappa_router.decision import RouteRequest
from kappa_router.gateway.spec import Bounds, GatewaySpec
from kappa_router.live.replica_registry import ReplicaRegistry
from kappa_workers.http_gate import WorkerGate
from kappa_workers.http_port import WorkerPort
from kappa_workers.in_flight import InFlight
from kappa_workers.tiny_model import make_tiny_model
from tests.router.building import small
from tests.router.envoys import lent
from tests.router.patience import until

SECRET = "the cluster's"

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
TEXT = {"model": "m", "prompt": "hello", "max_tokens": 4}
PATH, TEXTS, ROUTE = "/v1/chat/completions", "/v1/completions", "/v1/route"
KEYS = {"alice": "sk-alice", "bob": "sk-bob", "ops": "sk-ops"}
OWN = Tenants(own_caches=True, operators=frozenset({"ops"})).with_digests(
    {digest_of(key): name for name, key in KEYS.items()}
)
"""Tenants with caches of their own, of which `ops` is an operator."""

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
BOMB = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
"""Three loops of 99,999 never end."""


def said(content=None, **more):
    return {**BODY, "messages": [{"role": "user", "content": content, **more}]}


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


def event(text):
    choice = {"index": 0, "delta": {"content": text}}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


async def words(_worker):
    yield [event("one")]
    yield [event("two"), event("three")]


def decider_settings(**changes):
    """Settings of a decider, in which those of the router may be changed by their own names."""
    known = DeciderSettings.__dataclass_fields__
    own = {name: changes.pop(name) for name in list(changes) if name in known}
    small = {
        "policy": "ttft", "index_blocks": 1000, "max_queue": 8, "stale_after_s": 1e9,
        "calibrate": False, "request_timeout_s": 60.0,
    }  # fmt: skip
    own.setdefault("models", (EndpointModel("m", ""),))
    return DeciderSettings(secret="s", router=RouterSettings(**small | changes), **own)


class Body:
    """A body as an engine gets it; fields that it lacks are None."""

    def __init__(self, fields):
        self.fields = fields

    def __getattr__(self, name):
        return self.fields.get(name)


class Engine:
    """A worker's engine, that does as a script says, behind a gate on a port of its own."""

    def __init__(self, name, cluster):
        self.name, self._cluster, self._dead = name, cluster, None
        self.in_flight = InFlight(time.monotonic())
        self.gate = WorkerGate(self._answer, SECRET, self.in_flight, self._check_health)
        self.port = WorkerPort(self.gate, "127.0.0.1")

    async def _check_health(self):
        if self._dead is not None:
            raise self._dead

    async def _answer(self, scope, receive, send):
        if scope["path"] == "/health":
            await _send(send, 503 if self._dead else 200, b"")
            return
        fields = json.loads((await receive())["body"])
        cluster = self._cluster
        cluster.sent.append(self.name)
        cluster.bodies.append(Body(fields))
        cluster.headers.append({n.decode(): v.decode() for n, v in scope["headers"]})
        cluster.paths.append(scope["path"])
        items = cluster.script(self.name)
        leaving = asyncio.ensure_future(_gone(receive))
        answering = asyncio.ensure_future(self._send_all(items, send))
        try:
            await asyncio.wait({leaving, answering}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        except EngineDiedError as error:
            self._dead = error
            raise
        finally:
            for task in (leaving, answering):
                task.cancel()
            await asyncio.gather(leaving, answering, return_exceptions=True)
            await items.aclose()
            cluster.closed += 1

    async def _send_all(self, items, send):
        """Events as they come; whatever has a status is the whole answer."""
        first = True
        async for item in items:
            if isinstance(item, Whole):
                await _send(send, item.status, json.dumps(item.content).encode())
                return
            if first:
                head = [(b"content-type", b"text/event-stream; charset=utf-8")]
                await send({"type": "http.response.start", "status": 200, "headers": head})
                first = False
            text = "".join(item).encode()
            await send({"type": "http.response.body", "body": text, "more_body": True})
        if first:
            raise RuntimeError("a script that yields nothing")
        done = b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": done, "more_body": False})


async def _gone(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send, status, content):
    head = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": content})


@dataclass
class Whole:
    """An answer that is not streamed."""

    content: dict
    status: int = 200


class Decider(KappaDecider):
    """The decider without Ray."""

    def __init__(self):
        """Nothing: `open`."""

    async def open(self, renderers, settings, access, spec):
        self._pools, self._began_s = {}, int(time.time())
        real = kappa_router.cluster.replica.Decider

        def noted(*given):
            self.flights = (made := real(*given)).flights
            return made

        with mock.patch.object(kappa_router.cluster.replica, "Decider", noted):
            await self._open(settings, renderers, access, spec, SECRET)

    async def close(self):
        await self._stack.aclose()

    async def _wake_router(self):
        return

    def __del__(self):
        """Nothing: `close`, since nobody would await the product's."""


@dataclass
class Scripted:
    """What was sent to the engines.

    sent, bodies, headers, paths: of each request the worker, and what its engine got; closed:
    answers that are over.
    """

    script: object
    sent: list = field(default_factory=list)
    bodies: list = field(default_factory=list)
    headers: list = field(default_factory=list)
    paths: list = field(default_factory=list)
    closed: int = 0

    @property
    def told(self):
        """The metadata of each request."""
        return [body.vllm_xargs for body in self.bodies]


@dataclass
class Here:
    """A scripted cluster, its live router and decider, and a client."""

    engines: Scripted
    workers: dict
    decider: Decider
    live: object
    registry: ReplicaRegistry
    spec: GatewaySpec
    client: httpx.AsyncClient
    announced: dict

    def __iter__(self):
        return iter((self.engines, self.live, self))

    def ask(self, tenant=None, path=PATH, headers=None, **changes):
        """Post a streamed chat, changed as said, with the key of `tenant`."""
        key = {"authorization": f"Bearer {KEYS[tenant]}"} if tenant else {}
        body = {**BODY, "stream": path != ROUTE, **changes}
        return self.client.post(path, json=body, headers={**key, **(headers or {})})

    def send(self, path, body):
        """Post like a client that writes NaN and Infinity as JSON."""
        headers = {"content-type": "application/json"}
        return self.client.post(path, content=json.dumps(body).encode(), headers=headers)

    async def idle(self):
        """Return when nothing is in flight any more: Envoy has told of every end."""
        await until(lambda: not self.live.router.reservations and not len(self.decider.flights))


def _bearer(key):
    return {"authorization": f"Bearer {key}"} if key else {}


async def post(here, key=None, **changes):
    """Post a chat."""
    return await here.client.post(PATH, json=BODY | changes, headers=_bearer(key))


async def get(here, path, key=None):
    return await here.client.get(path, headers=_bearer(key))


def _told(live, engine):
    """A worker tells its deciders what came and went, as its report stream would."""
    news = engine.in_flight.news()._asdict()
    live.reported(WorkerReport(engine.name, time.time(), **news))


class Scene:
    """Makes scripted clusters, each with a registry of its own, and closes them."""

    def __init__(self, renderer, monkeypatch):
        self._renderer, self._monkeypatch = renderer, monkeypatch
        self._stack = contextlib.AsyncExitStack()

    async def __call__(
        self,
        script=words,
        workers=("a", "b"),
        device_blocks=(100, 100),
        access=None,
        bounds=None,
        tenants=None,
        **changes,
    ):
        """A scripted cluster with these workers (names or announcements)."""
        stack, registry = self._stack, ReplicaRegistry()
        self._monkeypatch.setattr(kappa_router.live.live_router, "REGISTRY", registry)
        settings = decider_settings(**changes)
        names = [name for model in settings.models for name in (model.name, *model.adapters)]
        bounds = bounds or Bounds(silent_s=max(settings.router.request_timeout_s, 0.5))
        wanted = GatewaySpec(Path(), "127.0.0.1", 0, ASKED, own_paths(names), bounds=bounds)
        spec = stack.enter_context(lent(wanted)).spec
        access = Access(tenants or Tenants(), **{"max_body_bytes": 1 << 20, **(access or {})})
        engines = Scripted(script)
        if not isinstance(workers, dict):
            named = zip(workers, device_blocks, strict=False)
            workers = {name: announcement(name, blocks) for name, blocks in named}
        made = {}
        for name in workers:
            made[name] = Engine(name, engines)
            stack.push_async_callback(made[name].port.close, 0.0)
        announced = {
            name: {**said, "http": said["http"] or made[name].port.endpoint}
            for name, said in workers.items()
        }
        decider = Decider()
        renderers = {model.name: self._renderer for model in settings.models}
        await decider.open(renderers, settings, access, spec)
        stack.push_async_callback(decider.close)
        live = decider._live
        for engine in made.values():
            engine.in_flight.changed = partial(_told, live, engine)
        registry.publish("d", announced)
        await until(lambda: len(live.router.workers) == len(workers))
        client = httpx.AsyncClient(base_url=spec.url, timeout=30.0)
        await stack.enter_async_context(client)
        return Here(engines, made, decider, live, registry, spec, client, announced)

    async def close(self):
        """Stop everything that was made."""
        await self._stack.aclose()


def announcement(worker, device_blocks=100, **changes):
    node, nowhere = replace(node_profile("pcie"), name=worker), "tcp://127.0.0.1:9"
    ends = {"events_endpoint": nowhere, "snapshot_endpoint": nowhere}
    return small(worker, node, device_blocks=device_blocks, **ends | changes).to_dict()


def crowd(live):
    """Others were in each engine a moment ago, so that no request is alone there."""
    for worker in live.router.workers:
        live.suspects.ended(worker, live.now_s())


def code(answer, status=None):
    """The code of an error; its status is checked where one is given."""
    assert status in (None, answer.status_code), answer.text
    return answer.json()["error"]["code"]


def tiny_renderer(folder):
    """A renderer of a tiny model made in `folder`."""
    return PromptRenderer(str(make_tiny_model(folder, ["hello world " * 20])))


def overload(live):
    """From now on each worker has a request that is half a minute late, as the next would be."""
    live.router.config = replace(live.router.config, admission=True)
    workers = frozenset(live.router.workers)
    for worker in workers:
        busy = RouteRequest(f"on-{worker}", np.arange(16), max_tokens=4, exclude=workers - {worker})
        live.router.route(busy, live.now_s())
        live.router.flights[busy.request_id].sent_s -= 30.0
    return len(workers)
