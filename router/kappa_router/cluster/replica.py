"""The decider of a cluster as a Ray Serve replica: no request passes Ray on its way.

Envoy runs beside it (`kappa serve` starts it) and asks by Unix sockets in a folder that both know.
Ray places this process, replaces it when it dies, and tells it of the workers; begun answers go on
meanwhile, since none passes here. Of several each decides what Envoy asks it, and knows of the
others' requests by the workers' reports. What it answers itself shows or explains, and runs
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from fastapi import FastAPI, Request
from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from kappa.logging import configure
from kappa.protocol import DECIDED_PATHS, PROFILE_PATH
from kappa_router.api import errors, status
from kappa_router.api.app import Access, Door, make_app
from kappa_router.api.face import Face
from kappa_router.api.reading import prepare, read
from kappa_router.api.render import PromptRenderer, Tokenizing
from kappa_router.api.request import model_of
from kappa_router.api.request_path import RequestPath
from kappa_router.api.start import DeciderSettings, live_router
from kappa_router.api.tenants import Places
from kappa_router.api.tokenizer import keep_models_away
from kappa_router.cluster.reading import counted_message, either
from kappa_router.cluster.scene import ClusterScene
from kappa_router.gateway.decider import Decider
from kappa_router.gateway.hosting import UNHEARD_S, hosted, running
from kappa_router.gateway.scene import DeciderRule
from kappa_router.gateway.spec import GatewaySpec
from kappa_router.live.deciders import Deciders
from kappa_router.page.mount import add_page
from kappa_router.policy import policy_named
from kappa_router.telemetry import Telemetry

log = structlog.get_logger(__name__)

_PROFILE_TIMEOUT_S = 90.0
_WAKE_TIMEOUT_S = 120.0
# Workers that start with us take longer; one that joins others knows them sooner.
FIRST_SIGHT_S = 25.0
_OF_WORKERS: dict[str, Any] = {
    "post": {
        "summary": "Answered by a worker",
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"type": "object"}}},
        },
        "responses": {"200": {"description": "The answer, or its events"}},
    },
}


Route = Callable[[FastAPI], Any]
"""How an endpoint is added to an application."""
OWN: dict[str, Route] = {
    "models": lambda a: a.get("/v1/models"),
    "model_data": lambda a: a.get("/v1/models/{model:path}"),
    "count_tokens": lambda a: a.post("/v1/messages/count_tokens"),
    "nodes": lambda a: a.get("/v1/nodes"),
    "tenants": lambda a: a.get("/v1/tenants"),
    "profile": lambda a: a.post("/v1/nodes/profile"),
    "route": lambda a: a.post("/v1/route"),
    "decisions": lambda a: a.get("/v1/decisions"),
    "decision": lambda a: a.get("/v1/decisions/{request_id:path}"),
    "metrics": lambda a: a.get("/metrics", response_class=PlainTextResponse),
    "ready": lambda a: a.get("/ready"),
}
"""Endpoints that run nothing, by the method that answers each."""


class KappaDecider(Face):
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
        renderers = {m.name: PromptRenderer(m.tokenizer_source) for m in kappa.models}
        await self._open(kappa, renderers, access, spec, secret)
        prepare()

    async def _open(
        self, kappa: DeciderSettings, renderers: Mapping[str, PromptRenderer], access: Access,
        spec: GatewaySpec, secret: str,
    ) -> None:  # fmt: skip
        try:
            rank = int(serve.get_replica_context().rank.rank)
        except RayServeException:  # outside of Ray Serve
            rank = 0
        router, self._checked = kappa.router, False
        self._door, self._deciders = Door(access), Deciders(kappa.replicas, "for_deciders")
        async with contextlib.AsyncExitStack() as stack:
            self._live = live = live_router(kappa, rank)
            stack.push_async_callback(live.close)
            stack.callback(asyncio.create_task(self._wake_router()).cancel)
            self._telemetry = Telemetry(live.records.get)
            if kappa.observing.otlp_endpoint is not None:
                # Half a second of imports that only a collector needs.
                from kappa_router.tracing import Tracing

                tracing = Tracing(kappa.observing, live.records.get)
                stack.callback(tracing.close)
                self._telemetry.on_end = tracing.ended
            tokenizing = Tokenizing(renderers)
            stack.callback(tokenizing.close)
            # Without keys tenants cannot be told apart.
            places = Places(router.max_queue, shared=access.tenants.apart)
            self._path = RequestPath(
                router, tokenizing, places, self._telemetry, live, kappa.models
            )
            scene = ClusterScene(self._path, kappa.transfer, spec, secret)
            self._ports = scene.ports
            stack.push_async_callback(scene.ports.close)
            rule = DeciderRule(
                router.max_queue, unheard_s=UNHEARD_S, foreign=False,
                late_s=router.failover.stall_after_s,
            )  # fmt: skip
            decider = Decider(scene, self._door, rule)
            if spec.deciders > 1:
                # Others know more until then.
                await live.members.known(FIRST_SIGHT_S)
            await stack.enter_async_context(hosted(decider, self._application(), spec))
            await stack.enter_async_context(running(decider, scene.follow, live.task_restarted))
            self._stack = stack.pop_all()

    def _application(self) -> Any:
        app = make_app(self._door)
        add_page(app)
        for name, route in OWN.items():
            route(app)(getattr(self, name))
        # The document is made once.
        app.openapi()["paths"].update(dict.fromkeys(DECIDED_PATHS, _OF_WORKERS))
        return app

    async def __del__(self) -> None:
        """Ray Serve calls and awaits it when the replica goes: its threads end, the last spans are
        sent."""
        stack = vars(self).get("_stack")
        if stack is not None:
            await stack.aclose()

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

    async def use_policy(self, name: str) -> None:
        """Decide by another policy from now on: for who started the cluster, by its Serve handle;
        no HTTP path leads here."""
        self._live.use_policy(policy_named(name))

    async def count_tokens(self, request: Request) -> Response:
        """The tokens of an Anthropic message's prompt; nothing is run or reserved."""
        chat = await read(await request.body(), counted_message)
        routed = await self._path.to_explain(chat, request)
        if routed.token_ids is None:
            raise errors.UNSUPPORTED_PROMPT()
        return JSONResponse({"input_tokens": len(routed.token_ids)})

    async def nodes(self) -> Response:
        """Every worker with its profile, backlogs and critical ratio."""
        return JSONResponse({"nodes": status.nodes(self._live)})

    async def profile(self) -> Response:
        """Measure every worker's machine again, one after the other, and show the nodes."""
        for worker in list(self._live.router.workers):
            try:
                answer = await self._ports.ask(worker, PROFILE_PATH, _PROFILE_TIMEOUT_S, b"")
            except (TimeoutError, OSError):
                answer = None
            if answer is None or answer.status != 200:
                why = f"worker {worker} could not be measured"
                raise errors.NO_WORKER(why=why, retry_after_s=10.0)
        return await self.nodes()

    async def route(self, request: Request) -> Response:
        """The decision that would be made for a body; nothing is run or reserved."""
        body = await read(await request.body(), either)
        routed = await self._path.to_explain(body, request)
        return self.explained(routed, request)

    async def of_all(self, what: str, *args: Any) -> list[Any]:
        """Every decider's answer, as far as they can be reached."""
        return await self._deciders.call(self.for_deciders, what, *args)

    def _account(self, request_id: str) -> tuple[str | None, dict[str, Any] | None]:
        return self._telemetry.tenant(request_id), self._telemetry.account(request_id)

    async def check_health(self) -> None:
        """Called by Ray; the first time, before this decider is sent any request, it waits until
        the workers' state is known here, as far as there are workers.

        Raises:
            RuntimeError: it cannot follow the workers any more; Ray replaces it.
        """
        if not self._checked:
            self._checked = True
            await self._live.members.known(FIRST_SIGHT_S)
        fault = self._live.members.fault()
        if fault:
            raise RuntimeError(f"this decider must be replaced: {fault}")

    async def _wake_router(self) -> None:
        """Ray makes a handle's router, which posts announcements, at its first call."""
        for handle in self._pools.values():
            try:
                # Any method with an answer of plain values will do: a class of Ray Serve LLM's
                # would have this process import all of vLLM.
                await asyncio.wait_for(handle.record_routing_stats.remote(), _WAKE_TIMEOUT_S)
            except Exception as error:
                log.warning("workers_not_reached", error=repr(error))
