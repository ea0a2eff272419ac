"""A worker's own HTTP port over real sockets."""

import asyncio
import logging
from logging.handlers import MemoryHandler

import httpx
import pytest

from kappa.protocol import RETRY_HEADER, TO_SECRET_HEADER
from kappa_workers.http_gate import WorkerGate
from kappa_workers.http_port import WorkerPort
from kappa_workers.in_flight import InFlight

SECRET = {TO_SECRET_HEADER: "s3cret"}


async def healthy():
    pass


class Slow:
    """Answers each request in two parts, the second when it is let."""

    def __init__(self):
        self.may_end, self.begun = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        self.begun.set()
        await self.may_end.wait()
        await send({"type": "http.response.body", "body": b"two"})


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_port_serves_fronts_and_drains(host):
    app = Slow()
    port = WorkerPort(WorkerGate(app, "s3cret", InFlight(0.0), healthy), host)
    url = f"http://{port.endpoint}/v1/completions"
    async with httpx.AsyncClient(timeout=30) as client:
        assert (await client.post(url, json={})).status_code == 403
        first = asyncio.create_task(client.post(url, json={}, headers=SECRET))
        await app.begun.wait()
        closing = asyncio.create_task(port.close(30.0))
        await asyncio.sleep(0)
        second = await client.post(url, json={}, headers=SECRET)
        assert (second.status_code, second.headers[RETRY_HEADER]) == (503, "elsewhere")
        app.may_end.set()
        assert (await first).text == "one two"
        assert await closing == 0
        with pytest.raises(httpx.ConnectError):
            await client.post(url, json={}, headers=SECRET)


async def test_port_cuts_what_does_not_end_in_time():
    app = Slow()
    port = WorkerPort(WorkerGate(app, "s3cret", InFlight(0.0), healthy), "127.0.0.1")
    async with httpx.AsyncClient(timeout=30) as client:
        url = f"http://{port.endpoint}/v1/completions"
        first = asyncio.create_task(client.post(url, json={}, headers=SECRET))
        await app.begun.wait()
        assert await port.close(0.0) == 1
        with pytest.raises(httpx.TransportError):
            await first


async def test_port_names_an_address_that_is_not_here():
    gate = WorkerGate(Slow(), "s3cret", InFlight(0.0), healthy)
    with pytest.raises(OSError, match="assign requested address"):
        WorkerPort(gate, "192.0.2.1")


async def test_port_leaves_the_handlers_of_others_open():
    handler = MemoryHandler(1, target=logging.NullHandler())
    port = WorkerPort(WorkerGate(Slow(), "s3cret", InFlight(0.0), healthy), "127.0.0.1")
    assert handler.target is not None, "without one Ray recovers no replica"
    await port.close(0.0)
