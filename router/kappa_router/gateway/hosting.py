"""A decider that runs: on its sockets Envoy asks, tells of ends, and finds our own paths."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.types import ASGIApp

from kappa.host import Lock
from kappa_router.gateway.authz import AuthzServer
from kappa_router.gateway.decider import Decider
from kappa_router.gateway.events import Ends
from kappa_router.gateway.face import faced
from kappa_router.gateway.spec import GOES_ON_S, DeciderSlot, GatewaySpec
from kappa_router.live.supervised import supervised

# Envoy tells of what goes on so often that three in a row are lost only with it.
UNHEARD_S = 4 * GOES_ON_S
"""A request of which Envoy says nothing for so long is over."""
# Ray ends one that it replaces within so long.
_SLOT_S, _SLOT_POLL_S = 60.0, 0.1


@contextlib.asynccontextmanager
async def hosted(
    decider: Decider[Any], app: ASGIApp, spec: GatewaySpec
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve the decider and our own paths, `app`, in a slot that is free; the task ends where the
    latter fails. RuntimeError: none became free."""
    flights = decider.flights
    async with contextlib.AsyncExitStack() as stack:
        slot = await stack.enter_async_context(free_slot(spec))
        events = Ends(
            slot.events_socket, flights.ended, flights.failed, flights.goes_on, flights.cut
        )
        await stack.enter_async_context(events)
        await stack.enter_async_context(
            AuthzServer(decider.decide, flights, slot, spec.bounds.body_bytes)
        )
        yield await stack.enter_async_context(faced(app, slot))


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
    tasks: Mapping[str, Callable[[], Awaitable[None]]], restarted: Callable[[str], None]
) -> AsyncIterator[None]:
    """Run tasks, by name, again where they fail; `restarted` is told their names."""
    started = [
        asyncio.create_task(supervised(name, task, restarted, "")) for name, task in tasks.items()
    ]
    try:
        yield
    finally:
        for task in started:
            task.cancel()
        await asyncio.gather(*started, return_exceptions=True)
