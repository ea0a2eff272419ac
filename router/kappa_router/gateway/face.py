"""Our own paths: an application on a Unix socket that Envoy reaches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import uvicorn
from starlette.types import ASGIApp

from kappa_router.gateway.spec import DeciderSlot

_END_S = 5


@contextlib.asynccontextmanager
async def faced(app: ASGIApp, slot: DeciderSlot) -> AsyncIterator[asyncio.Task[None]]:
    """Serve it as a face of a front door; the task ends where that fails."""
    # A `log_config` closes all handlers, Ray's among them, which then recovers no replica.
    config = uvicorn.Config(
        app, uds=str(slot.face_socket), lifespan="off", log_config=None, access_log=False,
        server_header=False, date_header=False, proxy_headers=False, ws="none",
        timeout_graceful_shutdown=_END_S,
    )  # fmt: skip
    server = uvicorn.Server(config)
    # Signals are the decider's.
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    try:
        yield serving
    finally:
        server.should_exit = True
        await serving
