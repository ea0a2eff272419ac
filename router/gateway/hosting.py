"""A decider that runs: on its sockets Envoy asks, tells of ends, and finds our own paths."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.types import ASGIApp

from router.gateway.authz import AuthzServer
from router.gateway.decider import Decider
from router.gateway.events import Ends
from router.gateway.face import faced
from router.gateway.spec import GOES_ON_S, GatewaySpec
from router.live.supervised import supervised

# Envoy tells of what goes on so often that three in a row are lost only with it.
UNHEARD_S = 4 * GOES_ON_S
"""A request of which Envoy says nothing for so long is over."""


@contextlib.asynccontextmanager
async def hosted(
    decider: Decider[Any], app: ASGIApp, spec: GatewaySpec
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve the decider and our own paths, `app`; the task ends where the latter fails."""
    flights = decider.flights
    async with contextlib.AsyncExitStack() as stack:
        events = Ends(spec.events_socket, flights.ended, flights.failed, flights.goes_on)
        await stack.enter_async_context(events)
        await stack.enter_async_context(
            AuthzServer(decider.decide, flights, spec.decider_socket, spec.bounds.body_bytes)
        )
        yield await stack.enter_async_context(faced(app, spec))


@contextlib.asynccontextmanager
async def running(
    tasks: Mapping[str, Callable[[], Awaitable[None]]], restarted: Callable[[str], None]
) -> AsyncIterator[None]:
    """Run tasks, by name, again where they fail; `restarted` hears of it."""
    started = [
        asyncio.create_task(supervised(name, task, restarted, "")) for name, task in tasks.items()
    ]
    try:
        yield
    finally:
        for task in started:
            task.cancel()
        for task in started:
            with contextlib.suppress(asyncio.CancelledError):
                await task
