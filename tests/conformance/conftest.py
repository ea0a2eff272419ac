"""The whole ingress in one process: its real application, router and report streams over two
emulated engines, served by uvicorn on loopback. Ray Serve's proxy and actors are all that is
missing."""

import asyncio
import os
import socket
import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace

import httpx
import pytest
import uvicorn

import router.live.live_router
from kappa.cost import StepModel
from kappa.hardware import node_profile
from kappa.protocol import Announcement, Streamed
from kappa.settings.routing import RouterSettings
from router.api.app import Access, make_app
from router.api.endpoints import ROUTES, KappaIngress
from router.api.metadata import PIN_HEADER
from router.api.render import PromptRenderer
from router.api.request import EndpointModel, model_of
from router.api.start import IngressSettings
from router.live.replica_registry import ReplicaRegistry
from router.page.mount import add_page
from tests.router.front.conftest import routing
from tests.workers.emulation import emulated_plan
from workers.generated import begin
from workers.own_engine.emulated import EmulatedEngine
from workers.report_stream import ReportStream
from workers.tiny_model import make_tiny_model
from workers.vllm.arguments import Endpoints, EngineLimits

MODEL = "tiny"
BLOCK = 16
DEVICE_BLOCKS, HOST_BLOCKS, CONTEXT_TOKENS = 64, 128, 512
MAX_BODY_BYTES = 1 << 16
STEP = StepModel(1e-7, 0.0, 1e-5, 0.0)
_PATIENCE_S = 30.0


class Node:
    """One emulated engine with the report stream of a real replica."""

    def __init__(self, name):
        self.name = name
        sockets = f"ipc://@kappa-test-{os.getpid()}-{id(self)}"
        self.stream = ReportStream(name, "127.0.0.1", f"{sockets}-stats", f"{sockets}-kv")
        self.stream.start()
        limits = EngineLimits(
            CONTEXT_TOKENS, BLOCK, DEVICE_BLOCKS, HOST_BLOCKS * BLOCK * 2, 512, 64, "float32"
        )
        plan = emulated_plan(name, limits, Endpoints(f"{sockets}-stats", f"{sockets}-kv"))
        config = SimpleNamespace(engine_kwargs={"kappa_own": plan}, model_id=MODEL)
        self.engine = EmulatedEngine(config)

    def announcement(self, **changes):
        said = Announcement(
            worker=self.name, model=MODEL, node=replace(node_profile("pcie"), name=self.name),
            step=STEP, kv_bytes_per_token=1e3, emulated_model="", fingerprint="f",
            block_tokens=BLOCK, device_blocks=DEVICE_BLOCKS, host_blocks=HOST_BLOCKS,
            max_batch_tokens=512, max_context_tokens=CONTEXT_TOKENS, engine="emulated",
            events_endpoint=self.stream.events_endpoint,
            snapshot_endpoint=self.stream.snapshot_endpoint,
        )  # fmt: skip
        return replace(said, **changes).to_dict()

    async def close(self):
        await self.engine.shutdown()
        self.stream.close()


class InProcess(KappaIngress):
    """The ingress with its engines in this process instead of behind Ray's handles."""

    def __init__(self, renderer, nodes, settings):
        self._wire(settings, {MODEL: renderer})
        card = {"id": MODEL, "object": "model", "owned_by": "test", "permission": []}
        self._default_serve_handles = {MODEL: SimpleNamespace(llm_config=None)}
        self._model_cards = {MODEL: card}
        self._engines = {node.name: node.engine for node in nodes}

    async def _wake_router(self):
        return

    async def models(self):
        return {"object": "list", "data": list(self._model_cards.values())}

    async def model_data(self, model: str):
        model_of(self._path.models, model)
        return self._model_cards[model]

    async def profile(self):
        return await self.nodes()

    async def _call(self, body, method, headers):
        engine = self._engines[headers[PIN_HEADER]]
        tally = begin()
        async for item in getattr(engine, method)(body):
            yield Streamed(item, tally.take()) if isinstance(item, str) else item


@dataclass
class Stack:
    """What serves, and questions to ask it. app: the application itself."""

    url: str
    app: object
    live: object
    http: httpx.Client

    def reserved(self):
        return self.live.router.reservations


class Serving:
    """The stack on an event loop in a thread of its own."""

    def __init__(self, renderer):
        self._renderer = renderer
        self._ready, self._stop = threading.Event(), threading.Event()
        self._error = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(_PATIENCE_S) and self._error is None, self._error
        self._http = httpx.Client(base_url=self.url, timeout=_PATIENCE_S)
        return Stack(self.url, self.app, self.live, self._http)

    def __exit__(self, *_):
        self._http.close()
        self._stop.set()
        self._thread.join(_PATIENCE_S)
        assert not self._thread.is_alive() and self._error is None, self._error

    def _run(self):
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self):
        live_router = router.live.live_router
        registry, live_router.REGISTRY = live_router.REGISTRY, ReplicaRegistry()
        nodes = [Node("a"), Node("b")]
        ingress = InProcess(self._renderer, nodes, settings_of_ingress())
        self.app = make_app(Access(max_body_bytes=MAX_BODY_BYTES))
        add_page(self.app)
        # As Ray's own ingress does: `kappa route` asks for it every second.
        self.app.get("/health", include_in_schema=False)(lambda: {})
        for name, route in ROUTES.items():
            route(self.app)(getattr(ingress, name))
        for node in nodes:
            await node.engine.start()
        self.live = ingress._live()
        announcements = {node.name: node.announcement() for node in nodes}
        live_router.REGISTRY.publish("d", announcements)
        async with asyncio.timeout(_PATIENCE_S):
            while len(self.live.router.workers) < len(nodes):
                await asyncio.sleep(0.01)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        # An idle connection that the server closes just as its client uses it is not what we try.
        config = uvicorn.Config(
            self.app, log_level="warning", lifespan="off", access_log=False, timeout_keep_alive=600
        )
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        self._ready.set()
        while not self._stop.is_set():
            await asyncio.sleep(0.05)
        server.should_exit = True
        await serving
        await ingress._live.close()
        for node in nodes:
            await node.close()
        live_router.REGISTRY = registry


class Fronted(Serving):
    """`kappa route` before a stack."""

    def __init__(self, stack):
        super().__init__(None)
        self._behind = stack.url

    async def _serve(self):
        backend = {"url": self._behind, "profile": "h100-pcie5"}
        limits = {"max_body_bytes": MAX_BODY_BYTES}
        passed = ["/openapi.json"]
        async with routing(backend, router=limits, probe={}, passed=passed) as made:
            self.url, self.app, self.live = made.url, None, made.front.live
            self._ready.set()
            while not self._stop.is_set():
                await asyncio.sleep(0.05)


def settings_of_ingress():
    small = RouterSettings(index_blocks=10_000, max_queue=64, stale_after_s=1e9)
    return IngressSettings((EndpointModel(MODEL, ""),), secret="s", router=small)


@pytest.fixture(scope="session")
def stack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    renderer = PromptRenderer(str(make_tiny_model(folder, ["hello world " * 20])))
    with Serving(renderer) as made:
        yield made


@pytest.fixture(scope="module", params=["ingress", "route"])
def face(request, stack):
    """Each of the two faces: the ingress, and `kappa route` before it."""
    if request.param == "ingress":
        yield stack
    else:
        with Fronted(stack) as made:
            yield made
