"""The ingress with a script in place of Ray's delivery; routing, limits and HTTP are real.

Fault injection for the tests of the request path: `script(worker)` yields what that worker answers,
or raises. The fixture `serve` (conftest) makes one, with workers that only their announcement tells
of.
"""

import json
from dataclasses import replace

import httpx
import numpy as np

import router.live.live_router
from kappa.cost import StepModel
from kappa.hardware import node_profile
from kappa.protocol import Announcement
from kappa.settings.routing import RouterSettings
from router.admission import AdmissionRule
from router.api.app import Access, make_app
from router.api.auth import Tenants
from router.api.endpoints import KappaIngress
from router.api.metadata import PIN_HEADER
from router.api.render import PromptRenderer
from router.api.start import IngressSettings
from router.decision import RouteRequest
from router.live.replica_registry import ReplicaRegistry
from tests.router.stream_worker import until as until
from workers.tiny_model import make_tiny_model

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
PATH = "/v1/chat/completions"
_PATIENCE_S = 30.0


def event(text):
    choice = {"index": 0, "delta": {"content": text}}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def ingress_settings(**changes):
    """Settings of an ingress, in which those of the router may be changed by their own names."""
    known = IngressSettings.__dataclass_fields__
    own = {name: changes.pop(name) for name in list(changes) if name in known}
    small = {
        "policy": "ttft", "index_blocks": 1000, "max_queue": 8, "stale_after_s": 1e9,
        "calibrate": False, "request_timeout_s": 60.0,
    }  # fmt: skip
    return IngressSettings("", "s", RouterSettings(**small | changes), **own)


class Scripted(KappaIngress):
    """The ingress with a script in place of Ray's delivery; `script(worker)` yields its items."""

    def __init__(self, renderer, script, **changes):
        self._wire(ingress_settings(**changes), renderer)
        self._model_cards = {"m": None}
        self._script, self.sent, self.closed = script, [], 0
        self.told, self.headers = [], []

    async def _wake_router(self):
        return

    async def _call(self, body, method, headers):
        worker = headers[PIN_HEADER]
        self.sent.append(worker)
        self.told.append(dict(body.vllm_xargs))
        self.headers.append(headers)
        try:
            async for item in self._script(worker):
                yield item
        finally:
            self.closed += 1


def announcement(worker, device_blocks=100):
    return Announcement(
        worker=worker, model="m", node=replace(node_profile("pcie"), name=worker),
        step=StepModel(1e-5, 0.0, 1e-3, 0.0), kv_bytes_per_token=1e5, emulated_model="",
        fingerprint="f", block_tokens=16, device_blocks=device_blocks, host_blocks=0,
        max_batch_tokens=512, max_context_tokens=1024, events_endpoint="tcp://127.0.0.1:9",
        snapshot_endpoint="tcp://127.0.0.1:9",
    ).to_dict()  # fmt: skip


async def post(app, key=None, **changes):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(PATH, json=BODY | changes, headers=headers)


async def get(app, path, key=None):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        return await client.get(path, headers=headers)


def code(answer):
    return answer.json()["error"]["code"]


async def words(_worker):
    yield [event("one")]
    yield [event("two"), event("three")]


class Scene:
    """Makes scripted ingresses, each with a registry of its own, and closes them."""

    def __init__(self, renderer, monkeypatch):
        self._renderer, self._monkeypatch = renderer, monkeypatch
        self._made = []

    async def __call__(self, script, workers=("a", "b"), device_blocks=(100, 100), **changes):
        """(ingress, live router, application) with these workers on `ingress.registry`."""
        registry = ReplicaRegistry()
        self._monkeypatch.setattr(router.live.live_router, "REGISTRY", registry)
        ingress = Scripted(self._renderer, script, **changes)
        app = make_app(Access(changes.get("tenants") or Tenants(), max_body_bytes=1 << 20))
        app.post(PATH)(ingress.chat)
        app.get("/metrics")(ingress.metrics)
        app.get("/v1/tenants")(ingress.tenants)
        app.get("/v1/nodes")(ingress.nodes)
        live = ingress._live()
        ingress.registry = registry
        said = zip(workers, device_blocks, strict=False)
        registry.publish("d", {worker: announcement(worker, blocks) for worker, blocks in said})
        await until(lambda: len(live.router.workers) == len(workers))
        self._made.append(ingress)
        return ingress, live, app

    async def close(self):
        """Stop everything that was made."""
        for ingress in self._made:
            await ingress._start.close()
            ingress._path.close()


def tiny_renderer(folder):
    """A renderer of a tiny model made in `folder`."""
    return PromptRenderer(str(make_tiny_model(folder, ["hello world " * 20])))


def overload(live):
    """From now on each worker has a request in flight, and whoever comes next would be too late."""
    workers = frozenset(live.router.workers)
    for worker in workers:
        busy = RouteRequest(f"on-{worker}", np.arange(16), max_tokens=4, exclude=workers - {worker})
        live.router.route(busy, live.now_s())
    strict = AdmissionRule(floor_s=0.0, ttft_factor=0.0)
    live.router.config = replace(live.router.config, admission=strict)
    return len(workers)
