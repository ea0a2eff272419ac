"""The workers of a cluster as a decider sees them, and as Envoy reaches them."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog

from kappa.host import Lock
from kappa.protocol import (
    APPROX_HEADER,
    APPROX_KEY,
    DECIDED_PATHS,
    GIVE_UP_PATH,
    RETRY_DIED,
    RETRY_HEADER,
    TO_BODY_HEADER,
    TO_DROP_HEADER,
    TO_SHOW_HEADER,
)
from kappa.settings.engine import TransferSettings
from kappa_router.api import errors
from kappa_router.api.errors import ApiError
from kappa_router.api.metadata import decision_headers, peer_params
from kappa_router.api.reading import read
from kappa_router.api.request import ApiRequest
from kappa_router.api.request_path import RequestPath, engine_metadata
from kappa_router.cluster.ports import WorkerPorts
from kappa_router.cluster.prefill import PrefillElsewhere
from kappa_router.cluster.reading import Changes, taken
from kappa_router.decision import Decision, RouteRequest
from kappa_router.gateway.endpoints import EndpointsFile, shared_addresses
from kappa_router.gateway.known import KnownServers
from kappa_router.gateway.process import Gateway
from kappa_router.gateway.scene import Asked, Reading, Used
from kappa_router.gateway.spec import GatewaySpec, ServerEndpoint
from kappa_router.live.membership import DIED, ENGINE_DIED

log = structlog.get_logger(__name__)

# Of what a worker puts into a body, which comes in a header.
_MOST_SET_BYTES = 1000 << 10
_HEALTH_S = 2.0
_json = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest(RouteRequest):
    """A request with the parts that only its delivery needs."""

    api: ApiRequest
    # Of its body.
    changes: Changes


@dataclass(slots=True)
class ClusterFlight:
    """A request at a worker."""

    decision: Decision
    api: ApiRequest
    # By which the worker's gate changes its body and shows the decision.
    headers: Mapping[str, str]
    via: str = ""


class ClusterScene(KnownServers):
    """A `Scene` over the workers of a live router."""

    priced = frozenset(DECIDED_PATHS)
    passed = frozenset[str]()

    def __init__(
        self, path: RequestPath, transfer: TransferSettings, spec: GatewaySpec, secret: str
    ) -> None:
        """`path`: what a request takes; `secret`: the cluster's, which workers demand."""
        live = path.live
        super().__init__(live, live.changed)
        self._path, self._spec, self._secret = path, spec, secret
        self.ports = WorkerPorts(self._port, secret)
        timeout_s = path.settings.request_timeout_s
        self._prefill = PrefillElsewhere(self.ports, transfer, timeout_s)
        self._giving_up: dict[str, asyncio.Task[None]] = {}
        live.members.on_hung = self._hung

    def _port(self, worker: str) -> str:
        state = self.live.router.workers.get(worker)
        return state.announcement.http if state is not None else ""

    # -- requests -----------------------------------------------------------------------------

    async def read(self, asked: Asked) -> Reading:
        """Check the body and tokenize its prompt. Raises ApiError."""
        found = await read(asked.body, partial(taken, asked.path))
        api = ApiRequest(
            asked.request_id, found.body, asked.headers, asked.tenant, time.monotonic(),
            len(asked.body), asked.digest,
        )  # fmt: skip
        self._path.begin(api)
        try:
            api.prepare(self._path.models, self._path.settings)
            routed = await self._path.routed(api)
            routed = await self._prefill(self.live, routed, api)
            workers = self.live.router.workers
            await self.first_known(lambda: workers.keys() - routed.exclude)
        except BaseException as error:
            end, status = "client_gone", 0
            if isinstance(error, ApiError):
                end, status = error.code or "error", error.status
            elif isinstance(error, Exception):
                end, status = "error", 500
            self._path.end(api, end, status)
            raise
        away = self.live.router.workers.keys() - self.endpoints.keys()
        request = _with_delivery(routed, api, found.changes, routed.exclude | away)
        return Reading(request, api.body.answers * api.body.max_tokens, streamed=api.body.stream)

    def decide(self, request: RouteRequest) -> ClusterFlight:
        """As `RequestPath.decide`; what its worker is sent with it."""
        assert isinstance(request, ClusterRequest)
        api, live, path = request.api, self.live, self._path
        if request.retry:
            # What was handed over is gone with the worker that took it.
            api.body.kv_transfer_params = None
            request = replace(request, handed_tokens=0)
        decision = path.decide(request, api)
        try:
            api.body.vllm_xargs = engine_metadata(live, decision, api)
            if decision.fetch is not None:
                peer = live.router.workers[decision.fetch.source_worker].announcement.peer
                api.body.kv_transfer_params = peer_params(decision, peer)
            # Who names none, where there is one, gets that; not every API of vLLM's allows it.
            named = {} if api.body.model else {"model": api.model.name}
            sets = {**request.changes.sets, **api.body.sets(), **named}
            flight = ClusterFlight(decision, api, _headers(decision, sets, request.changes.drops))
        except BaseException:
            live.release(request.request_id, "unsent")
            raise
        api.timeline.decided(decision, time.time())
        return flight

    def refused(self, request: RouteRequest, error: ApiError) -> None:
        """End its timeline."""
        assert isinstance(request, ClusterRequest)
        self._path.end(request.api, error.code or "error", error.status)

    def others(self, flight: ClusterFlight, request: RouteRequest) -> Sequence[str]:
        """Those that were priced."""
        return self.by_price(flight.decision.priced.workers, flight.decision, request)

    def headers(self, flight: ClusterFlight) -> Mapping[str, str]:
        """Headers for the worker's gate."""
        return flight.headers

    def patience_s(self, flight: ClusterFlight) -> float:
        """Until its deadline."""
        deadline = flight.api.deadline
        return math.inf if deadline is None else max(deadline.at_s - time.monotonic(), 0.0)

    def arrived(self, flight: ClusterFlight, request: RouteRequest, at: str) -> None:
        """Nothing: `Flights` decides about every attempt."""

    def used(self, flight: ClusterFlight, tail: bytes) -> Used | None:
        """Tokens as its worker reports them; its prompt was counted before."""
        record = self.live.records.get(flight.decision.request_id)
        if record is None or record.generated_tokens is None:
            return None
        return Used(0, record.generated_tokens, record.engine_failed)

    async def lives(self, worker: str) -> bool:
        """Whether its engine does, as its port says; one that does not answer in time may."""
        if not self.address(worker) or self.live.members.get(worker) is None:
            self.live.members.failed(worker, DIED)
            return False
        try:
            answer = await self.ports.ask(worker, "/health", _HEALTH_S)
        except TimeoutError:
            return True
        except OSError:
            self.live.members.failed(worker, DIED)
            return False
        # One that drains answers nothing, either, and is as well as before.
        died = answer.headers.get(RETRY_HEADER) == RETRY_DIED
        if died:
            self.live.members.failed(worker, ENGINE_DIED)
        return not died

    def _hung(self, worker: str) -> None:
        """Have it end its streams. A worker that answers nothing at all ends itself."""
        if worker not in self._giving_up:
            self._giving_up[worker] = asyncio.create_task(self._give_up(worker))

    async def _give_up(self, worker: str) -> None:
        try:
            await self.ports.ask(worker, GIVE_UP_PATH, _HEALTH_S, b"")
        except (TimeoutError, OSError) as error:
            log.warning("worker_not_told", worker=worker, error=repr(error))
        finally:
            await asyncio.sleep(_HEALTH_S)
            del self._giving_up[worker]

    def ended(self, flight: ClusterFlight, end: str) -> None:
        """It is over at its worker."""
        if end == "worker_died":
            self.live.members.failed(flight.decision.worker, DIED)
        self.live.release(flight.decision.request_id, end)

    def over(self, flight: ClusterFlight, end: str, status: int) -> None:
        """It is over."""
        record = self.live.records.get(flight.decision.request_id)
        attempts = flight.api.timeline.attempts
        if record is not None and record.ttft_s is not None and attempts:
            flight.api.timeline.first_item(attempts[-1].decided_s + record.ttft_s)
        self._path.end(flight.api, end, status)

    # -- for Envoy ------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Have Envoy know the workers as they come and go, until cancelled. Of several deciders one
        writes them down, and the next when its process has ended."""
        file, envoy = EndpointsFile(self._spec.endpoints_file), Gateway(self._spec)
        turn, changed = Lock(self._spec.writer_lock_file), self.live.changed
        try:
            while not self.live.router.workers:
                # Those that an earlier decider wrote down are better than none.
                changed.clear()
                await changed.wait()
            await self.keep_known(envoy, lambda: file if turn.take() else None)
        finally:
            turn.release()

    async def _found(self) -> list[ServerEndpoint]:
        found = []
        for name, state in self.live.router.workers.items():
            host, _, port = state.announcement.http.rpartition(":")
            if not host:
                log.error("worker_without_port", worker=name)
                continue
            endpoint = ServerEndpoint(name, host.strip("[]"), int(port), secret=self._secret)
            found.append(endpoint)
        for fault in shared_addresses(found):
            log.error("worker_not_used", why=fault)
        return found


def _with_delivery(
    routed: RouteRequest, api: ApiRequest, changes: Changes, exclude: frozenset[str]
) -> ClusterRequest:
    known = {name: getattr(routed, name) for name in RouteRequest.__slots__}
    return ClusterRequest(**known | {"exclude": exclude}, api=api, changes=changes)


def _headers(
    decision: Decision, sets: Mapping[str, Any], drops: tuple[str, ...]
) -> Mapping[str, str]:
    """The headers by which a gate sets and drops fields of a body, and shows the decision. ApiError
    400 if the fields to set are too much."""
    text = _json(sets)
    if len(text) > _MOST_SET_BYTES:
        names = sorted(sets.keys() - {"vllm_xargs"}) or ["vllm_xargs"]
        raise errors.bad_field(
            names[0],
            "is too long to be sent on changed: leave out what the API does not name, "
            "or shorten it",
        )
    dropped = {TO_DROP_HEADER: ",".join(drops)} if drops else {}
    shown = decision_headers(decision) if decision.informed else {}
    if sets["vllm_xargs"].get(APPROX_KEY):
        shown[APPROX_HEADER] = "ok"
    return {TO_BODY_HEADER: text, **dropped, TO_SHOW_HEADER: _json(shown)}
