"""`kappa route` over fake servers, spoken to over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from types import SimpleNamespace

import aiohttp
import pytest
import uvicorn

from kappa.settings.front import load_front_settings
from router.front.app import make_front_app
from router.front.gateway import opened

QUICK = {"every_s": 0.05, "timeout_s": 1.0}


PLANES = ("python", "envoy")
planes = pytest.mark.parametrize("plane", PLANES)


@contextlib.asynccontextmanager
async def routing(*servers, ready=True, plane="python", **sections):
    """A running front over the servers: its url, its application's `front`, a client, and a wait
    until every request has ended."""
    backends = [
        one if isinstance(one, dict) else {"url": one.url, "profile": profile, "name": name}
        for one, profile, name in zip(
            servers, ("h100-pcie5", "gh200-c2c", "a100-pcie4"), "abc", strict=False
        )
    ]
    given = {"probe": QUICK, **sections, "http": {"port": 0, "data_plane": plane}}
    settings = load_front_settings(None, backends=backends, **given)
    async with _PLANES[plane](settings) as (url, front, scene):
        if ready:
            await until(lambda: front.live.choosable == len(backends))
            known = len(backends) + bool(front.rollout.balancer)
            await until(lambda: scene is None or len(scene.endpoints) == known)
        async with aiohttp.ClientSession(url) as http:
            flights = front.live.router.flights
            settled = partial(until, lambda: not flights)
            yield SimpleNamespace(url=url, front=front, http=http, settled=settled)


@contextlib.asynccontextmanager
async def _python(settings):
    app = make_front_app(settings)
    config = uvicorn.Config(
        app, port=0, log_level="critical", access_log=False, server_header=False, date_header=False
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started or serving.done())
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", app.state.front, None
    finally:
        server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def _envoy(settings):
    async with opened(settings) as here:
        yield here.url, here.front, here.scene


_PLANES = {"python": _python, "envoy": _envoy}


async def until(condition, within_s=20.0):
    """Wait until it holds."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def chat(text="hello", **fields):
    return {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": text}], **fields}
