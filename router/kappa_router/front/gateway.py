"""`kappa route` behind Envoy: the decider and our own paths in this process, Envoy as its child.

What they share lies in a private folder: sockets, Envoy's configuration, the list of servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.routing import Route

from kappa.settings.front import FrontSettings
from kappa_router.api.app import Door
from kappa_router.api.reading import prepare
from kappa_router.api.start import access_of
from kappa_router.front.app import make_face_app, own_routes
from kappa_router.front.front import Front
from kappa_router.front.inference_pool import InferencePool, KubernetesApi
from kappa_router.front.scene import FrontScene
from kappa_router.gateway.decider import Decider
from kappa_router.gateway.hosting import UNHEARD_S, faced, hosted, running
from kappa_router.gateway.process import Gateway, check_pair, spec_of
from kappa_router.gateway.scene import DeciderRule
from kappa_router.gateway.spec import GatewaySpec

if TYPE_CHECKING:
    from kappa_router.gateway.picker import Picker


@dataclass(frozen=True, slots=True)
class FrontGateway:
    """A front door that runs."""

    front: Front
    scene: FrontScene
    gateway: Gateway | Picker
    # Serves our own paths.
    face: asyncio.Task[None]
    # The address where it listens; of a picker, where it does for our own paths.
    url: str


async def serve(settings: FrontSettings, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, then end open requests; `ready` is called with the url. Raises
    EnvoyError."""
    loop, ordered = asyncio.get_running_loop(), asyncio.Event()
    for signalled in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signalled, ordered.set)
    async with picking(settings) if settings.epp else opened(settings) as here:
        prepare()
        ready(here.url)
        until = [asyncio.create_task(ordered.wait()), asyncio.create_task(here.gateway.died())]
        done, left = await asyncio.wait((*until, here.face), return_when="FIRST_COMPLETED")
        for task in left - {here.face}:
            task.cancel()
        for task in done:
            await task
        await here.gateway.stop(settings.drain_s)


@contextlib.asynccontextmanager
async def opened(settings: FrontSettings) -> AsyncIterator[FrontGateway]:
    """Everything, from the first probe of a server to Envoy, which cuts open requests at the end.
    Raises EnvoyError (`kappa_router.gateway.process`) if it cannot run."""
    door = Door(replace(access_of(settings), limit_all=True))
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kappa-route-")))
        front = await stack.enter_async_context(Front(settings))
        scene = FrontScene(front)
        spec = _spec_of(settings, scene, own_routes(front, door), folder)
        decider = Decider(scene, door, _rule_of(settings))
        app = make_face_app(front, door)
        face = await stack.enter_async_context(hosted(decider, app, spec))
        gateway = await stack.enter_async_context(Gateway(spec))
        follow = partial(scene.follow, gateway)
        await stack.enter_async_context(running(decider, follow, front.live.task_restarted))
        front.meet()
        yield FrontGateway(front, scene, gateway, face, gateway.spec.url)


@contextlib.asynccontextmanager
async def picking(settings: FrontSettings) -> AsyncIterator[FrontGateway]:
    """As `opened`, but behind somebody else's gateway, for which it picks servers. Raises OSError,
    and EnvoyError for a bad certificate."""
    from kappa_router.gateway.picker import Picker

    assert settings.epp is not None
    door = Door(replace(access_of(settings), limit_all=True))
    async with contextlib.AsyncExitStack() as stack:
        front = await stack.enter_async_context(Front(settings))
        scene = FrontScene(front)
        if settings.epp.pool is not None:
            pool = InferencePool(settings.epp.pool, front, KubernetesApi.in_cluster())
            front.run("pool", "", pool.follow)
        scene.passed |= {"/v1/models"}  # The servers' own answer.
        decider = Decider(scene, door, replace(_rule_of(settings), unheard_s=math.inf))
        spec = _spec_of(settings, scene, [], Path())
        picker = Picker(
            decider.decide, decider.flights, lambda: front.live.choosable > 0, spec.bounds,
            2 * settings.router.max_queue,
        )  # fmt: skip
        if spec.tls is not None:
            check_pair(spec.tls)
        await picker.start(spec.host, settings.epp.port, spec.tls)
        stack.push_async_callback(picker.stop)
        family = socket.AF_INET6 if ":" in spec.host else socket.AF_INET
        listener = socket.create_server((spec.host, spec.port), family=family)
        app = make_face_app(front, door)
        face = await stack.enter_async_context(faced(app, listener, spec.tls))
        follow = partial(scene.follow, None)
        await stack.enter_async_context(running(decider, follow, front.live.task_restarted))
        front.meet()
        stack.callback(front.peers.end)
        yield FrontGateway(front, scene, picker, face, spec.url)


def _spec_of(
    settings: FrontSettings, scene: FrontScene, routes: list[Route], folder: Path
) -> GatewaySpec:
    """The front door that the settings ask for."""
    own = dict.fromkeys(("/", *(one.path.partition("{")[0] for one in routes)))
    spec = spec_of(
        settings.http, settings.access, folder=folder, own=tuple(own), foreign=True,
        max_body_bytes=settings.router.max_body_bytes,
        decided=tuple(sorted(scene.priced | scene.passed)),
        from_header=settings.present_header if scene.front.rollout.balancer else "",
    )  # fmt: skip
    bounds = replace(
        spec.bounds,
        silent_s=settings.router.request_timeout_s,
        connect_s=settings.probe.connect_timeout_s,
    )
    return replace(
        spec, ca=settings.ca or spec.ca, bounds=bounds, decider_away=settings.http.decider_away
    )


def _rule_of(settings: FrontSettings) -> DeciderRule:
    router = settings.router
    return DeciderRule(router.max_queue, settings.first_byte_s, router.request_timeout_s, UNHEARD_S)
