"""`kappa route` over fake servers, spoken to over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from types import SimpleNamespace

import aiohttp

from kappa.settings.front import load_front_settings
from router.front.gateway import opened

QUICK = {"every_s": 0.05, "timeout_s": 1.0}


@contextlib.asynccontextmanager
async def routing(*servers, ready=True, **sections):
    """`kappa route` over the servers: its url, its `front`, a client, and a wait until every
    request has ended."""
    backends = [
        one if isinstance(one, dict) else {"url": one.url, "profile": profile, "name": name}
        for one, profile, name in zip(
            servers, ("h100-pcie5", "gh200-c2c", "a100-pcie4"), "abc", strict=False
        )
    ]
    given = {"probe": QUICK, **sections, "http": {"port": 0}}
    async with opened(load_front_settings(None, backends=backends, **given)) as here:
        front = here.front
        if ready:
            await until(lambda: front.live.choosable == len(backends))
            known = len(backends) + bool(front.rollout.balancer)
            await until(lambda: len(here.scene.endpoints) == known)
        async with aiohttp.ClientSession(here.url) as http:
            flights = front.live.router.flights
            settled = partial(until, lambda: not flights)
            yield SimpleNamespace(url=here.url, front=front, http=http, settled=settled)


async def until(condition, within_s=20.0):
    """Wait until it holds."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def chat(text="hello", **fields):
    return {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": text}], **fields}
