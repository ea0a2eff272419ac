"""A cluster in one process: a real Envoy, decider, gates, ports, report streams and emulated
engines. Ray Serve, which places and watches these, is all that is missing."""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

import kappa_router.live.live_router
from kappa.cost import StepModel
from kappa.hardware import node_profile
from kappa.host import free_port
from kappa.protocol import PROFILE_PATH
from kappa.settings.routing import RouterSettings
from kappa_router.api.app import Access
from kappa_router.api.request import EndpointModel
from kappa_router.api.start import DeciderSettings
from kappa_router.cluster.paths import ASKED, own_paths
from kappa_router.gateway.process import Gateway
from kappa_router.gateway.spec import Bounds, GatewaySpec
from kappa_router.live.replica_registry import ReplicaRegistry
from kappa_workers.http_gate import WorkerGate
from kappa_workers.http_port import WorkerPort
from kappa_workers.paced.emulated_engine import EmulatedEngine
from kappa_workers.report_stream import ReportStream
from kappa_workers.vllm import output_collector
from kappa_workers.vllm.arguments import Endpoints, EngineLimits
from tests.router.building import SIZE as BLOCK
from tests.router.building import small
from tests.router.envoys import lent
from tests.router.patience import until
from tests.router.scripted import SECRET, Decider
from tests.workers.emulation import emulated_plan, llm_config

MODEL = "tiny"
DEVICE_BLOCKS, HOST_BLOCKS, CONTEXT_TOKENS = 64, 128, 512
STEP = StepModel(1e-7, 0.0, 1e-5, 0.0)
# For streams that must outlast what a test does to their nodes.
STEP_S = 0.03


class PortedNode:
    """One emulated engine with the report stream of a real replica, on a port of its own. step_s:
    that each of its steps lasts at least; slow: changes of what it announces."""

    def __init__(self, name, step_s=0.0, **slow):
        self.name, self.slow, self.port = name, slow, None
        sockets = f"ipc://@kappa-test-{os.getpid()}-{id(self)}"
        self.stream = ReportStream(name, "127.0.0.1", f"{sockets}-stats", f"{sockets}-kv")
        self.stream.start()
        limits = EngineLimits(
            CONTEXT_TOKENS, BLOCK, DEVICE_BLOCKS, HOST_BLOCKS * BLOCK * 2, 512, 64, "float32"
        )
        ends = Endpoints(f"{sockets}-stats", f"{sockets}-kv")
        plan = emulated_plan(name, limits, ends, step_s=step_s)
        output_collector.install()
        self.engine = EmulatedEngine(llm_config(MODEL), plan)

    def announcement(self, **changes):
        return small(
            self.name, replace(node_profile("pcie"), name=self.name), model=MODEL, step=STEP,
            kv_bytes_per_token=1e3, device_blocks=DEVICE_BLOCKS, host_blocks=HOST_BLOCKS,
            max_context_tokens=CONTEXT_TOKENS, engine="emulated",
            events_endpoint=self.stream.events_endpoint,
            snapshot_endpoint=self.stream.snapshot_endpoint, **changes,
        ).to_dict()  # fmt: skip

    async def open(self):
        await self.engine.start()
        app = await self.engine.build_asgi_app()
        own = {PROFILE_PATH: self.profile}
        gate = WorkerGate(app, SECRET, self.stream.in_flight, self.engine.check_health, own)
        self.port = WorkerPort(gate, "127.0.0.1")
        return self.announcement(http=self.port.endpoint, **self.slow)

    async def profile(self):
        return {}

    async def shut(self):
        if self.port is not None:
            port, self.port = self.port, None
            await port.close(0.0)

    async def close(self):
        await self.shut()
        await self.engine.shutdown()
        self.stream.close()


class StoppableNode:
    """A worker in a process of its own, which is ended once it was stopped for `fenced_s`."""

    def __init__(self, name, fenced_s):
        self.name, self._fenced_s = name, fenced_s

    async def open(self):
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.router.cluster.node", self.name, str(self._fenced_s),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20,
        )  # fmt: skip
        async for line in self.process.stdout:
            if line.startswith(b"{"):
                return json.loads(line)
        raise RuntimeError("the worker's process ended before it said what it is")

    async def close(self):
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


def settings_of_decider():
    small = RouterSettings(index_blocks=10_000, max_queue=64, stale_after_s=1e9)
    return DeciderSettings((EndpointModel(MODEL, ""),), secret="s", router=small)


@contextlib.asynccontextmanager
async def clustered(renderer, monkeypatch, *nodes, access=None, bounds=None, deciders=1, **changes):
    """A cluster of these nodes: its parts and a client; `restart` replaces its first
    decider."""
    registry = ReplicaRegistry()
    monkeypatch.setattr(kappa_router.live.live_router, "REGISTRY", registry)
    access = access or Access(max_body_bytes=1 << 20)
    settings = replace(settings_of_decider(), **changes)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kappa-test-")))
        spec = GatewaySpec(
            folder, "127.0.0.1", free_port("127.0.0.1"), ASKED, own_paths((MODEL,)),
            bounds=bounds or Bounds(), deciders=deciders,
        )  # fmt: skip
        if deciders > 1:
            await stack.enter_async_context(Gateway(spec, threads=1))
        else:
            spec = stack.enter_context(lent(spec)).spec
        announced = {}
        for node in nodes:
            announced[node.name] = await node.open()
            stack.push_async_callback(node.close)
        registry.publish("d", announced)
        here = SimpleNamespace(spec=spec, registry=registry, deciders=[])

        async def start():
            made = Decider()
            here.deciders.append(made)
            await made.open({MODEL: renderer}, settings, access, spec)
            here.live = here.deciders[0]._live
            await until(lambda: made._live.choosable == len(nodes))

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
