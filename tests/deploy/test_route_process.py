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

from kappa.host import free_port
from tests.router.front.conftest import chat, until
from tests.router.front.offering import FakeServer, serving, stream_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tmp_path():
    """A folder with a path so short that sockets fit in it."""
    with tempfile.TemporaryDirectory(prefix="kappa-") as folder:
        yield Path(folder)


async def route(tmp_path, url, port):
    """The command, before one server."""
    given = ("-b", f"{url}=pcie", "--port", str(port))
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from kappa_deploy.cli import app; app()", "route", *given, cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


@asynccontextmanager
async def routed(server, tmp_path):
    """The command, once it takes requests: its process, and a client."""
    port = free_port("127.0.0.1")
    process = await route(tmp_path, server.url, port)
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


async def test_route_takes_its_envoy_along_when_it_is_killed(tmp_path):
    async with (
        serving(FakeServer()) as (server,),
        routed(server, tmp_path) as (process, _),
    ):
        envoy = envoy_of(process)
        process.kill()
        await process.wait()
        await until(lambda: not envoy.is_running() or envoy.status() == psutil.STATUS_ZOMBIE)


async def test_route_names_a_port_that_is_taken(tmp_path):
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    process = await route(tmp_path, "http://127.0.0.1:1", port)
    async with asyncio.timeout(120):
        _, said = await process.communicate()
    taken.close()
    assert process.returncode == 1 and b"address already in use" in said
    assert not list(tmp_path.iterdir())
