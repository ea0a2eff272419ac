"""A decider that runs: on its sockets Envoy asks, tells of ends, and finds our own paths."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from kappa.host import Lock
from kappa_router.gateway.authz import AuthzServer
from kappa_router.gateway.decider import Decider
from kappa_router.gateway.events import Ends
from kappa_router.gateway.spec import GOES_ON_S, DeciderSlot, GatewaySpec, Tls
from kappa_router.live.supervised import supervised

# Envoy tells of what goes on so often that three in a row are lost only with it.
UNHEARD_S = 4 * GOES_ON_S
"""A request of which Envoy says nothing for so long is over."""
# Ray ends one that it replaces within so long.
_SLOT_S, _SLOT_POLL_S = 60.0, 0.1
_END_S = 5


@contextlib.asynccontextmanager
async def hosted(
    decider: Decider[Any], app: ASGIApp, spec: GatewaySpec
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve the decider and our own paths, `app`, in a slot that is free; the task ends where the
    latter fails. RuntimeError: none became free."""
    flights = decider.flights
    async with contextlib.AsyncExitStack() as stack:
        slot = await stack.enter_async_context(free_slot(spec))
        await stack.enter_async_context(Ends(slot.events_socket, flights))
        await stack.enter_async_context(
            AuthzServer(decider.decide, flights, slot, spec.bounds.body_bytes)
        )
        yield await stack.enter_async_context(faced(app, slot.face_socket))


@contextlib.asynccontextmanager
async def faced(
    app: ASGIApp, at: Path | socket.socket, tls: Tls | None = None
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve it as a face of a front door, on a Unix socket or on one that listens; the task ends
    where that fails."""
    # A `log_config` closes all handlers, Ray's among them, which then recovers no replica.
    config = uvicorn.Config(
        app, uds=str(at) if isinstance(at, Path) else None,
        lifespan="off", log_config=None, access_log=False,
        server_header=False, date_header=False, proxy_headers=False, ws="none",
        timeout_graceful_shutdown=_END_S, ssl_certfile=tls.cert if tls else None,
        ssl_keyfile=tls.key if tls else None,
    )  # fmt: skip
    server = uvicorn.Server(config)
    # Signals are the decider's.
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    serving = asyncio.create_task(server.serve(None if isinstance(at, Path) else [at]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    try:
        yield serving
    finally:
        server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def free_slot(spec: GatewaySpec, wait_s: float = _SLOT_S) -> AsyncIterator[DeciderSlot]:
    """The first slot that no living process has; waits for one that ends. RuntimeError: all were
    taken for so long."""
    until_s = time.monotonic() + wait_s
    while (found := _taken(spec)) is None:
        if time.monotonic() >= until_s:
            raise RuntimeError(
                f"each of the {spec.deciders} deciders of {spec.folder} (http.replicas) was there "
                f"for {wait_s:g} s: one that is to be replaced has not ended"
            )
        await asyncio.sleep(_SLOT_POLL_S)
    slot, lock = found
    try:
        yield slot
    finally:
        lock.release()


def _taken(spec: GatewaySpec) -> tuple[DeciderSlot, Lock] | None:
    for slot in spec.slots:
        lock = Lock(slot.lock_file)
        if lock.take():
            return slot, lock
        lock.release()
    return None


@contextlib.asynccontextmanager
async def running(
    decider: Decider[Any], follow: Callable[[], Awaitable[None]], restarted: Callable[[str], None]
) -> AsyncIterator[None]:
    """Follow the servers, and end requests that are lost; `restarted` is told the name of a task
    that failed and runs again."""
    tasks = {"servers": follow, "ends": decider.flights.sweep}
    started = [
        asyncio.create_task(supervised(name, task, restarted, "")) for name, task in tasks.items()
    ]
    try:
        yield
    finally:
        for task in started:
            task.cancel()
        await asyncio.gather(*started, return_exceptions=True)
