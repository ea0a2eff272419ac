"""The decider of a cluster as a Ray Serve replica: no request passes Ray on its way.

Envoy runs beside it (`kappa serve` starts it) and asks by Unix sockets in a folder that both know.
Ray places this process, replaces it when it dies, and tells it of the workers; begun answers go on
meanwhile, since none passes here. Of several each decides what Envoy asks it, and knows of the
others' requests by the workers' reports.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kappa.logging import configure
from kappa_router.api.app import Access, Door, make_app
from kappa_router.api.reading import prepare
from kappa_router.api.render import PromptRenderer
from kappa_router.api.request import model_of
from kappa_router.api.start import DeciderSettings
from kappa_router.api.tokenizer import keep_models_away
from kappa_router.cluster.face import FIRST_SIGHT_S, OWN, ClusterFace
from kappa_router.cluster.paths import DECIDED
from kappa_router.cluster.scene import ClusterScene
from kappa_router.gateway.decider import Decider, DeciderRule
from kappa_router.gateway.hosting import UNHEARD_S, hosted, running
from kappa_router.gateway.spec import GatewaySpec
from kappa_router.page.mount import add_page

_OF_WORKERS: dict[str, Any] = {
    "post": {
        "summary": "Answered by a worker",
        "requestBody": {
            "required": True, "content": {"application/json": {"schema": {"type": "object"}}},
        },
        "responses": {"200": {"description": "The answer, or its events"}},
    },
}  # fmt: skip


class KappaDecider(ClusterFace):
    """Decides for one Envoy, alone or with others, and answers its own paths."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits constructors
        self, pools: dict[str, Any], *, kappa: DeciderSettings, access: Access, spec: GatewaySpec,
        secret: str,
    ) -> None:  # fmt: skip
        """`secret`: the cluster's, which workers demand."""
        seen = kappa.observing
        configure(seen.log_format, seen.log_file, kappa.log_level)
        keep_models_away()
        self._pools, self._began_s = pools, int(time.time())
        self._wire(kappa, {m.name: PromptRenderer(m.tokenizer_source) for m in kappa.models})
        await self._open(kappa, access, spec, secret)
        prepare()

    async def _open(
        self, kappa: DeciderSettings, access: Access, spec: GatewaySpec, secret: str
    ) -> None:
        live, router = self._live(), kappa.router
        scene = ClusterScene(self._path, kappa.transfer, spec, secret)
        self._ports = scene.ports
        rule = DeciderRule(
            router.max_queue, router.max_body_bytes, access.body_timeout_s,
            unheard_s=UNHEARD_S, foreign=False, late_s=router.failover.stall_after_s,
        )  # fmt: skip
        self._door = Door(access)
        decider = Decider(scene, self._door, rule)
        if spec.deciders > 1:
            # Others know more until then.
            await self._live.known(FIRST_SIGHT_S)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(scene.ports.close)
            await stack.enter_async_context(hosted(decider, self._application(), spec))
            tasks = {"servers": scene.follow, "ends": decider.flights.sweep}
            await stack.enter_async_context(running(tasks, live.task_restarted))
            self._stack = stack.pop_all()

    def _application(self) -> Any:
        app = make_app(self._door)
        add_page(app)
        for name, route in OWN.items():
            route(app)(getattr(self, name))
        # The document is made once.
        app.openapi()["paths"].update(dict.fromkeys(DECIDED, _OF_WORKERS))
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
