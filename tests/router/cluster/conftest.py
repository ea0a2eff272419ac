"""A cluster in one process: a real Envoy, decider, gates, ports, report streams and emulated
engines. Ray Serve, which places and watches these, is all that is missing."""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

import router.live.live_router
from kappa.host import free_port
from router.api.app import Access
from router.cluster.paths import DECIDED, own_paths
from router.cluster.replica import KappaDecider
from router.gateway.process import Gateway
from router.gateway.spec import GatewaySpec
from router.live.replica_registry import ReplicaRegistry
from tests.conformance.conftest import MODEL, Node, settings_of_ingress
from tests.router.stream_worker import until
from workers.http_gate import WorkerGate
from workers.http_port import WorkerPort

SECRET = "the cluster's"


class PortedNode(Node):
    """An emulated worker that answers on a port of its own."""

    def __init__(self, name, **slow):
        super().__init__(name)
        self.slow = slow
        self.port = None

    async def open(self):
        await self.engine.start()
        app = await self.engine.build_asgi_app()
        gate = WorkerGate(app, SECRET, self.stream.in_flight, self.engine.check_health)
        self.port = WorkerPort(gate, "127.0.0.1")
        return super().announcement(http=self.port.endpoint, **self.slow)

    async def shut(self):
        if self.port is not None:
            port, self.port = self.port, None
            await port.close(0.0)

    async def close(self):
        await self.shut()
        await super().close()


class InProcess(KappaDecider):
    """The decider without Ray."""

    def __init__(self):
        """Nothing: `open`."""

    async def open(self, renderer, settings, access, spec):
        self._pools, self._began_s = None, int(time.time())
        self._wire(settings, {MODEL: renderer})
        await self._open(settings, access, spec, SECRET)

    async def close(self):
        await self._stack.aclose()
        await self._live.close()
        self._path.tokenizing.close()

    async def _wake_router(self):
        return

    async def __del__(self):
        return


@contextlib.asynccontextmanager
async def clustered(renderer, monkeypatch, *nodes, access=None, deciders=1, **changes):
    """A cluster of these nodes: a client of it, and its parts; `restart` replaces its first
    decider."""
    registry = ReplicaRegistry()
    monkeypatch.setattr(router.live.live_router, "REGISTRY", registry)
    access = access or Access(max_body_bytes=1 << 20)
    settings = replace(settings_of_ingress(), tenants=access.tenants, **changes)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kappa-test-")))
        spec = GatewaySpec(
            folder, "127.0.0.1", free_port("127.0.0.1"), DECIDED, own_paths((MODEL,)),
            deciders=deciders,
        )  # fmt: skip
        gateway = await stack.enter_async_context(Gateway(spec, threads=1))
        announced = {}
        for node in nodes:
            announced[node.name] = await node.open()
            stack.push_async_callback(node.close)
        registry.publish("d", announced)
        here = SimpleNamespace(spec=spec, gateway=gateway, registry=registry, deciders=[])

        async def start():
            made = InProcess()
            here.deciders.append(made)
            await made.open(renderer, settings, access, spec)
            here.live = here.deciders[0]._live()
            await until(lambda: made._live().choosable == len(nodes))

        async def end():
            if here.deciders:
                await here.deciders.pop(0).close()

        async def restart():
            await end()
            await start()

        here.start, here.end, here.restart = start, end, restart
        for _ in spec.slots:
            stack.push_async_callback(end)
            await start()
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{spec.port}", timeout=30.0)
        here.http = await stack.enter_async_context(client)
        yield here


@pytest.fixture
def cluster(renderer, monkeypatch):
    """Makes one."""

    def make(*nodes, **options):
        return clustered(renderer, monkeypatch, *nodes, **options)

    return make
