"""The ingress with a script in place of Ray's delivery; routing, limits and HTTP are real.

Fault injection for the tests of the request path: `script(worker)` yields what that worker answers,
or raises. The fixture `serve` (conftest) makes one, with workers of which only announcements are
known.
"""

import json
import pickle
from dataclasses import dataclass, replace

import httpx
import numpy as np

import router.live.live_router
from kappa.cost import StepModel
from kappa.hardware import node_profile
from kappa.keys import digest_of
from kappa.protocol import Announcement, Streamed
from kappa.settings.routing import RouterSettings
from router.api.app import Access, make_app
from router.api.endpoints import ROUTES, KappaIngress
from router.api.metadata import PIN_HEADER
from router.api.render import PromptRenderer
from router.api.request import EndpointModel
from router.api.start import IngressSettings
from router.api.tenants import Tenants
from router.decision import RouteRequest
from router.live.replica_registry import ReplicaRegistry
from tests.router.stream_worker import until as until
from workers.tiny_model import make_tiny_model

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


def as_streamed(events):
    return Streamed("".join(events), sum('"content":' in one for one in events))


async def words(_worker):
    yield [event("one")]
    yield [event("two"), event("three")]


def ingress_settings(**changes):
    """Settings of an ingress, in which those of the router may be changed by their own names."""
    known = IngressSettings.__dataclass_fields__
    own = {name: changes.pop(name) for name in list(changes) if name in known}
    small = {
        "policy": "ttft", "index_blocks": 1000, "max_queue": 8, "stale_after_s": 1e9,
        "calibrate": False, "request_timeout_s": 60.0,
    }  # fmt: skip
    own.setdefault("models", (EndpointModel("m", ""),))
    return IngressSettings(secret="s", router=RouterSettings(**small | changes), **own)


class Scripted(KappaIngress):
    """The ingress with a script in place of Ray's delivery; `script(worker)` yields its items.

    sent, bodies, headers: of each delivery the worker, the body as its engine gets it, and the
    headers; closed: deliveries that are over.
    """

    def __init__(self, renderer, script, **changes):
        settings = ingress_settings(**changes)
        self._wire(settings, {model.name: renderer for model in settings.models})
        self._model_cards = {"m": None}
        self.script, self.sent, self.closed = script, [], 0
        self.bodies, self.headers = [], []

    async def _wake_router(self):
        return

    @property
    def told(self):
        """The metadata of each delivery."""
        return [body.vllm_xargs for body in self.bodies]

    async def _call(self, body, method, headers):
        worker = headers.get(PIN_HEADER, "")
        self.sent.append(worker)
        # Ray pickles a body on its way.
        self.bodies.append(pickle.loads(pickle.dumps(body)))
        self.headers.append(headers)
        try:
            async for item in self.script(worker):
                # One word is one token.
                yield as_streamed(item) if isinstance(item, list) else item
        finally:
            self.closed += 1


def announcement(worker, device_blocks=100, **changes):
    said = Announcement(
        worker=worker, model="m", node=replace(node_profile("pcie"), name=worker),
        step=StepModel(1e-5, 0.0, 1e-3, 0.0), kv_bytes_per_token=1e5, emulated_model="",
        fingerprint="f", block_tokens=16, device_blocks=device_blocks, host_blocks=0,
        max_batch_tokens=512, max_context_tokens=1024, events_endpoint="tcp://127.0.0.1:9",
        snapshot_endpoint="tcp://127.0.0.1:9",
    )  # fmt: skip
    return replace(said, **changes).to_dict()


def client_of(app, **options):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, **options)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def post(app, key=None, **changes):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with client_of(app) as client:
        return await client.post(PATH, json=BODY | changes, headers=headers)


async def get(app, path, key=None):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with client_of(app) as client:
        return await client.get(path, headers=headers)


def code(answer, status=None):
    """The code of an error, whose status is checked where one is given."""
    assert status in (None, answer.status_code), answer.text
    return answer.json()["error"]["code"]


@dataclass
class Here:
    """A scripted ingress, its live router, application and a client of it."""

    ingress: Scripted
    live: object
    app: object
    client: httpx.AsyncClient

    def __iter__(self):
        return iter((self.ingress, self.live, self.app))

    def ask(self, tenant=None, path=PATH, headers=None, **changes):
        """Post a streamed chat, changed as said, with the key of `tenant`."""
        key = {"authorization": f"Bearer {KEYS[tenant]}"} if tenant else {}
        body = {**BODY, "stream": path != ROUTE, **changes}
        return self.client.post(path, json=body, headers={**key, **(headers or {})})

    def send(self, path, body):
        """Post like a client whose JSON writer knows NaN and Infinity."""
        headers = {"content-type": "application/json"}
        return self.client.post(path, content=json.dumps(body).encode(), headers=headers)


class Scene:
    """Makes scripted ingresses, each with a registry of its own, and closes them."""

    def __init__(self, renderer, monkeypatch):
        self._renderer, self._monkeypatch = renderer, monkeypatch
        self._made = []

    async def __call__(
        self, script=words, workers=("a", "b"), device_blocks=(100, 100), access=None, **changes
    ):
        """A scripted ingress with these workers (names or announcements) on `ingress.registry`."""
        registry = ReplicaRegistry()
        self._monkeypatch.setattr(router.live.live_router, "REGISTRY", registry)
        ingress = Scripted(self._renderer, script, **changes)
        tenants = changes.get("tenants") or Tenants()
        app = make_app(Access(tenants, **{"max_body_bytes": 1 << 20, **(access or {})}))
        for name, route in ROUTES.items():
            route(app)(getattr(ingress, name))
        live = ingress._live()
        ingress.registry = registry
        if not isinstance(workers, dict):
            named = zip(workers, device_blocks, strict=False)
            workers = {name: announcement(name, blocks) for name, blocks in named}
        registry.publish("d", workers)
        await until(lambda: len(live.router.workers) == len(workers))
        here = Here(ingress, live, app, client_of(app))
        self._made.append(here)
        return here

    async def close(self):
        """Stop everything that was made."""
        for here in self._made:
            await here.client.aclose()
            await here.ingress._live.close()
            here.ingress._path.tokenizing.close()


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


# -- what vLLM answers chats with ------------------------------------------------------------------

USAGE = {
    "prompt_tokens": 40, "completion_tokens": 9, "total_tokens": 49,
    "prompt_tokens_details": {"cached_tokens": 32},
}  # fmt: skip


def calling(index, arguments, call_id=None, name=None):
    """A delta of a tool call; its first names id and function."""
    call = {"index": index, "function": {"name": name, "arguments": arguments}}
    return {"tool_calls": [call | ({"id": call_id, "type": "function"} if call_id else {})]}


def chunks(*deltas, finish="stop", stop=None, usage=USAGE):
    """A streamed chat as vLLM sends it, one event each: the role first, usage last."""

    def chunk(choices, **more):
        data = {"id": "chatcmpl-1", "model": "m", "choices": choices, **more}
        return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"

    def one(delta, **more):
        return chunk([{"index": 0, "delta": delta, "finish_reason": None, **more}])

    opening = chunk([{"index": 0, "delta": {"role": "assistant", "content": ""}}],
                    usage={"prompt_tokens": 40})  # fmt: skip
    ending = one({}, finish_reason=finish, stop_reason=stop)
    return [opening, *map(one, deltas), ending, chunk([], usage=usage), "data: [DONE]\n\n"]


def chat_answer(message, finish="stop", stop=None):
    """A whole chat as Ray's schema of it."""
    from ray.serve.llm.openai_api_models import ChatCompletionResponse

    choice = {
        "index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish,
        "stop_reason": stop,
    }  # fmt: skip
    return ChatCompletionResponse(id="chatcmpl-1", model="m", choices=[choice], usage=USAGE)


def post_scope(path):
    """ASGI's scope of a POST of JSON, for tests that are the server themselves."""
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "http_version": "1.1", "server": ("test", 80), "client": ("c", 1),
        "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
