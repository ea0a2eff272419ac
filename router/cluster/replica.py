"""The decider of a cluster as a Ray Serve replica: no request passes Ray on its way.

Envoy runs beside it (`kappa serve` starts it) and asks by Unix sockets in a folder that both know.
Ray places this process, replaces it when it dies, and tells it of the workers; begun answers go on
meanwhile, since none passes here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kappa.logging import configure
from router.api.app import Access, Door, make_app
from router.api.cluster_face import ClusterFace, PoolHandles
from router.api.endpoints import ROUTES
from router.api.reading import prepare
from router.api.render import PromptRenderer
from router.api.request import model_of
from router.api.start import IngressSettings
from router.cluster.scene import ClusterScene
from router.gateway.authz import AuthzServer
from router.gateway.decider import Decider, DeciderRule
from router.gateway.events import Ends
from router.gateway.face import faced
from router.gateway.spec import GOES_ON_S, GatewaySpec
from router.live.supervised import supervised
from router.page.mount import add_page

# Envoy tells of what goes on so often that three in a row are lost only with it.
_UNHEARD_S = 4 * GOES_ON_S

_DECIDED = {"chat", "completions", "responses", "messages"}
OWN = {name: route for name, route in ROUTES.items() if name not in _DECIDED}
"""What is answered here, as `ROUTES`."""


class KappaDecider(ClusterFace):
    """Decides for one Envoy, and answers its own paths."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits constructors
        self, pools: dict[str, Any], *, kappa: IngressSettings, access: Access, spec: GatewaySpec,
        secret: str,
    ) -> None:  # fmt: skip
        """`secret`: the cluster's, which workers demand."""
        seen = kappa.observing
        configure(seen.log_format, seen.log_file, kappa.log_level)
        self._pools, self._began_s = PoolHandles(pools), int(time.time())
        self._wire(kappa, {m.name: PromptRenderer(m.tokenizer_source) for m in kappa.models})
        await self._open(kappa, access, spec, secret)
        prepare()

    async def _open(
        self, kappa: IngressSettings, access: Access, spec: GatewaySpec, secret: str
    ) -> None:
        live, router = self._live(), kappa.router
        door, scene = Door(access), ClusterScene(self._path, spec, secret)
        rule = DeciderRule(
            router.max_queue, router.max_body_bytes, access.body_timeout_s,
            router.request_timeout_s, router.request_timeout_s, _UNHEARD_S, foreign=False,
        )  # fmt: skip
        decider = Decider(scene, door, rule)
        flights = decider.flights
        async with contextlib.AsyncExitStack() as stack:
            events = Ends(spec.events_socket, flights.ended, flights.failed, flights.goes_on)
            await stack.enter_async_context(events)
            most_bytes = spec.bounds.body_bytes
            authz = AuthzServer(decider.decide, flights, spec.decider_socket, most_bytes)
            await stack.enter_async_context(authz)
            await stack.enter_async_context(faced(self._application(access, door), spec))
            tasks: dict[str, Callable[[], Awaitable[None]]] = {
                "servers": scene.follow, "ends": flights.sweep,
            }  # fmt: skip
            for name, task in tasks.items():
                running = asyncio.create_task(supervised(name, task, live.task_restarted, ""))
                stack.callback(running.cancel)
            self._stack = stack.pop_all()

    def _application(self, access: Access, door: Door) -> Any:
        app = make_app(access, door)
        add_page(app)
        for name, route in OWN.items():
            route(app)(getattr(self, name))
        return app

    async def __del__(self) -> None:  # type: ignore[override]  # Ray Serve awaits it
        """Ray Serve calls it when the replica goes."""
        stack, live = vars(self).get("_stack"), vars(self).get("_live")
        if stack is not None:
            await stack.aclose()
        if live is not None:
            await live.close()
        super().__del__()

    async def models(self, request: Request) -> Response:
        """Every model that is served, and its adapters."""
        names = [name for model in self._path.models for name in (model.name, *model.adapters)]
        return JSONResponse({"object": "list", "data": [self._card(name) for name in names]})

    async def model_data(self, model: str, request: Request) -> Response:
        """One model's card, or 404."""
        model_of(self._path.models, model)
        return JSONResponse(self._card(model))

    def _card(self, name: str) -> dict[str, Any]:
        base, _ = model_of(self._path.models, name)
        return {
            "id": name, "object": "model", "created": self._began_s, "owned_by": "kappa-serve",
            "permission": [], "metadata": {"model_id": base.name},
        }  # fmt: skip
