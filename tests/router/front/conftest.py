"""`kappa route` over fake servers, spoken to over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import aiohttp
import uvicorn

from kappa.settings.front import load_front_settings
from router.front.app import make_front_app

QUICK = {"every_s": 0.05, "timeout_s": 1.0}


@contextlib.asynccontextmanager
async def routing(*servers, ready=True, **sections):
    """A running front over the servers: its url, its application's `front`, and a client."""
    backends = [
        one if isinstance(one, dict) else {"url": one.url, "profile": profile, "name": name}
        for one, profile, name in zip(
            servers, ("h100-pcie5", "gh200-c2c", "a100-pcie4"), "abc", strict=False
        )
    ]
    settings = load_front_settings(None, backends=backends, **{"probe": QUICK, **sections})
    app = make_front_app(settings)
    config = uvicorn.Config(
        app, port=0, log_level="critical", access_log=False, server_header=False, date_header=False
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started or serving.done())
        port = server.servers[0].sockets[0].getsockname()[1]
        url, front = f"http://127.0.0.1:{port}", app.state.front
        if ready:
            await until(lambda: front.live.choosable == len(backends))
        async with aiohttp.ClientSession(url) as http:
            yield SimpleNamespace(url=url, front=front, http=http)
    finally:
        server.should_exit = True
        await serving


async def until(condition, within_s=20.0):
    """Wait until it holds."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def chat(text="hello", **fields):
    return {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": text}], **fields}
