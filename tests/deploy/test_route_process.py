"""`kappa route` behind Envoy as a process: how it starts, ends and fails."""

import asyncio
import os
import signal
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

from kappa.host import free_port, free_ports
from kappa_benchmarks.faults.cluster import alive
from tests.router.front.conftest import chat, until
from tests.router.front.offering import FakeServer, serving, stream_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tmp_path():
    """A folder with a path so short that sockets fit in it."""
    with tempfile.TemporaryDirectory(prefix="kappa-") as folder:
        yield Path(folder)


async def route(tmp_path, url, port, peers=()):
    """The command, before one server, beside those at the ports."""
    given = ["-b", f"{url}=pcie", "--port", str(port)]
    for peer in peers:
        given += ["--peer", f"http://127.0.0.1:{peer}"]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from kappa_deploy.cli import app; app()", "route", *given, cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


@asynccontextmanager
async def routed(server, tmp_path, port=0, peers=()):
    """The command, once it takes requests: its process, and a client."""
    port = port or free_port("127.0.0.1")
    process = await route(tmp_path, server.url, port, peers)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        try:
            await ready(http, process)
            yield process, http
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def ready(http, process):
    async with asyncio.timeout(120):
        while process.returncode is None:
            try:
                async with http.get("/ready") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.05)
    raise AssertionError((await process.stderr.read()).decode())


def envoy_of(process):
    (envoy,) = psutil.Process(process.pid).children()
    assert "envoy" in envoy.name()
    return envoy


async def test_route_lets_open_streams_end_when_it_is_stopped(tmp_path):
    async with (
        serving(FakeServer(tokens=3)) as (server,),
        routed(server, tmp_path) as (process, http),
    ):
        envoy, (folder,) = envoy_of(process), tmp_path.iterdir()
        assert folder.stat().st_mode & 0o077 == 0
        server.hold.clear()
        asking = asyncio.create_task(http.post("/v1/completions", json=chat(stream=True)))
        await until(lambda: server.seen)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        assert process.returncode is None
        server.hold.set()
        assert await (await asking).read() == stream_of(server)
        async with asyncio.timeout(30):
            assert await process.wait() == 0
        assert not envoy.is_running() and not list(tmp_path.iterdir())


async def test_two_routes_know_each_others_requests(tmp_path):
    ports = free_ports("127.0.0.1", 2)
    async with (
        serving(FakeServer()) as (server,),
        # Each is named the other and itself, as by a headless Service.
        routed(server, tmp_path, ports[0], ports) as (first, asked),
        routed(server, tmp_path, ports[1], ports) as (_, other),
    ):

        async def known():
            told = await (await other.get("/v1/nodes")).json()
            return told["nodes"][0]["others_in_flight"], told["peers"]

        async def settles(count):
            async with asyncio.timeout(60):
                while (await known())[0] != count:
                    await asyncio.sleep(0.05)

        server.hold.clear()
        asking = [
            asyncio.create_task(asked.post("/v1/chat/completions", json=chat(stream=True)))
            for _ in range(3)
        ]
        await settles(3)
        async with asyncio.timeout(60):
            while len(rows := (await known())[1]) > 1:  # It does not know yet that it is one.
                await asyncio.sleep(0.05)
        (peer,) = rows
        assert (peer["peer"], peer["in_flight"]) == (f"127.0.0.1:{ports[0]}", 3)
        metrics = await (await other.get("/metrics")).text()
        assert "kappa_others_reservations 3.0" in metrics
        assert f'kappa_peer_age_seconds{{peer="127.0.0.1:{ports[0]}"}}' in metrics
        asking.pop().cancel()
        await settles(2)
        # What it had in flight is forgotten with it.
        first.kill()
        await settles(0)
        assert (await known())[1][0]["why"]
        server.hold.set()
        assert (await other.post("/v1/chat/completions", json=chat())).status == 200
        await asyncio.gather(*asking, return_exceptions=True)


async def test_route_takes_its_envoy_along_when_it_is_killed(tmp_path):
    async with (
        serving(FakeServer()) as (server,),
        routed(server, tmp_path) as (process, _),
    ):
        envoy = envoy_of(process)
        process.kill()
        await process.wait()
        await until(lambda: not alive(envoy.pid))


async def test_route_names_a_port_that_is_taken(tmp_path):
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    process = await route(tmp_path, "http://127.0.0.1:1", port)
    async with asyncio.timeout(120):
        _, said = await process.communicate()
    taken.close()
    assert process.returncode == 1 and b"address already in use" in said
    assert not list(tmp_path.iterdir())
