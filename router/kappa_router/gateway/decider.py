"""The sequence of one request before Envoy: who asks, how much, for what, and where it goes.

Whatever may refuse it stands in the order of its cost. No byte of an answer comes here; what became
of a request is heard from Envoy (`kappa_router.gateway.flights`). One decider serves one event
loop, and both commands: its `Scene` is all that differs between their servers.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic

import structlog

from kappa.protocol import ENDPOINT_HEADER, PASSED_PATHS, TO_ID_HEADER
from kappa_router.api import errors
from kappa_router.api.app import KEY_HEADERS, MESSAGES_PATHS, TENANT_HEADERS, Door, fit_id
from kappa_router.api.checks import digits
from kappa_router.api.errors import ApiError
from kappa_router.api.metadata import DEADLINE_HEADER, decision_headers
from kappa_router.api.tenants import Lease, Places, Tenant
from kappa_router.decision import NoWorkerError, OverloadedError, RouteRequest
from kappa_router.gateway.authz import Go, Inquiry, Refuse, Verdict, refusal
from kappa_router.gateway.flights import FULL, LATE, Aloft, Flights
from kappa_router.gateway.scene import Asked, DeciderRule, F, Reading, Scene
from kappa_router.gateway.spec import (
    REMOVED_HEADER,
    RETRIES_HEADER,
    STATUSES_HEADER,
    TRY_HEADER,
)

log = structlog.get_logger(__name__)

# What a foreign server answers that is tried at another.
_RETRIED = f"{FULL},500,502,503"
# Names of servers in one answer; Envoy tries two.
_MOST_SERVERS = 4
# So much of a body's beginning and of its end names its content, among those of its length.
_DIGEST_BYTES = 32 << 10
# Bodies that are buffered at a time, in parts; one of unknown length has as many as the longest.
_PART_BYTES, _BUFFERED_BYTES = 4 << 20, 256 << 20
_LATE_S = 5.0
# A time-out of 0 would be none.
_LEAST_S = 0.001


@dataclass(slots=True)
class _Coming:
    """A body that was let in and has not come yet, or is being decided about."""

    parts: int
    until_s: float


class Decider(Generic[F]):
    """Decides about requests; its `flights` hear how they end."""

    def __init__(self, scene: Scene[F], door: Door, rule: DeciderRule) -> None:
        self._scene, self._door, self._rule, self._live = scene, door, rule, scene.live
        tenants = door.access.tenants
        self._keyed, self._apart = bool(tenants.by_digest), tenants.apart
        self._places = Places(rule.max_queue, shared=self._apart)
        self._buffers = Places(_BUFFERED_BYTES // _PART_BYTES, shared=self._apart)
        self._coming: dict[str, _Coming] = {}
        self._deciding: set[str] = set()
        self.flights = Flights(scene, self._places.leave, rule)

    # -- questions ----------------------------------------------------------------------------

    async def decide(self, inquiry: Inquiry) -> Verdict:
        """Whether a request goes on, and where; without its body, whether that may come."""
        path, client = inquiry.target.partition("?")[0], dict[str, str]()
        request_id = fit_id(inquiry.headers.get("x-request-id", ""))
        tenant: Tenant | None = None
        try:
            now_s = time.monotonic()
            bearer, api_key, named = (inquiry.headers.get(one, "") for one in TENANT_HEADERS)
            tenant = await self._door.tenant(bearer, api_key, now_s, named)
            if path not in self._scene.priced and path not in self._scene.passed:
                known = path in PASSED_PATHS
                raise errors.NOT_SERVED(path=path) if known else errors.NO_SUCH_PATH()
            if path in self._scene.priced and inquiry.method != "POST":
                raise errors.WRONG_METHOD()
            if inquiry.body is None:
                return self._admit(inquiry, request_id, tenant, now_s)
            asked = Asked(
                self._free(request_id, tenant), path, inquiry.headers, inquiry.body, tenant
            )
            request_id = asked.request_id
            # Whatever is logged on the way carries the id.
            with structlog.contextvars.bound_contextvars(request_id=request_id):
                return await self._take(asked)
        except ApiError as error:
            if tenant is not None:
                client = self._door.limits.headers(tenant.name, time.monotonic())
            return self._refused(error, path, request_id, tenant, client)
        finally:
            if inquiry.body is not None:
                self._came(inquiry.headers.get(TO_ID_HEADER, ""))

    def _free(self, request_id: str, tenant: Tenant) -> str:
        """An id that no open request has, nor a remembered one of another tenant."""
        record = self._live.records.get(request_id)
        foreign = record is not None and record.tenant != tenant.name
        if foreign or request_id in self._deciding or request_id in self.flights:
            return f"{request_id}-{uuid.uuid4().hex[:8]}"
        return request_id

    def _refused(
        self, error: ApiError, path: str, request_id: str, tenant: Tenant | None,
        headers: Mapping[str, str],
    ) -> Refuse:  # fmt: skip
        log.warning(
            "request_refused" if error.status < 500 else "request_failed", request_id=request_id,
            tenant=tenant.name if tenant else None, path=path, status=error.status, code=error.code,
        )  # fmt: skip
        made = refusal(error, anthropic=path.endswith(MESSAGES_PATHS))
        return made._replace(headers={**made.headers, "x-request-id": request_id, **headers})

    # -- bodies that are to come --------------------------------------------------------------

    def _admit(self, inquiry: Inquiry, request_id: str, tenant: Tenant, now_s: float) -> Go:
        """Let a large body come, if there is room; none of its bytes have been read yet."""
        most = self._door.access.max_body_bytes
        declared = digits(inquiry.headers.get("content-length", ""), 19)
        if declared is not None and declared > most:
            raise errors.BODY_TOO_LARGE(limit_bytes=most)
        with self._door.counting(tenant):
            self._door.limits.check(tenant.name, now_s, declared or 0)
        size = most if declared is None else declared
        for name in [name for name, one in self._coming.items() if one.until_s < now_s]:
            self._came(name)
        coming = f"{request_id}-{uuid.uuid4().hex[:8]}"
        parts = -(-size // _PART_BYTES)
        for part in range(parts):
            if not self._buffers.take((coming, part), tenant):
                for taken in range(part):
                    self._buffers.leave((coming, taken))
                who = f"tenant {tenant.name}" if self._apart else "everybody"
                raise errors.BODIES_OUTSTANDING(limit=len(self._coming), who=who)
        until_s = now_s + self._door.access.body_timeout_s + _LATE_S
        self._coming[coming] = _Coming(parts, until_s)
        return Go({TO_ID_HEADER: coming, "x-request-id": request_id})

    def _came(self, coming: str) -> None:
        """A body that was let in is here and no longer wanted, or will not come."""
        known = self._coming.pop(coming, None)
        for part in range(known.parts if known is not None else 0):
            self._buffers.leave((coming, part))

    # -- decisions ----------------------------------------------------------------------------

    async def _take(self, asked: Asked) -> Go:
        """Decide about a request; raises ApiError. What it took it gives back unless it goes on."""
        live, tenant, request_id = self._live, asked.tenant, asked.request_id
        lease = self._door.enter(tenant, time.monotonic(), len(asked.body))
        aloft = None
        self._deciding.add(request_id)
        try:
            asked = asked._replace(digest=content_digest(asked))
            if live.suspects and live.suspects.refused(asked.digest, live.now_s()):
                raise errors.KILLED_AN_ENGINE()
            elsewhere = max(live.router.in_flight - live.router.reservations, 0)
            if not self._places.take(request_id, tenant, elsewhere):
                after_s = live.retry_after_s()
                raise errors.QUEUE_FULL(limit=self._places.limit, retry_after_s=after_s)
            reading = await self._scene.read(asked)
            try:
                lease.reserve(reading.request.tokens, reading.max_generated, time.monotonic())
                flight = self._chosen(reading.request)
            except ApiError as error:
                self._scene.refused(reading.request, error)
                raise
            try:
                made = self._aloft(asked, reading, flight, lease)
                go = self._go(asked, made)
            except BaseException:
                self._scene.ended(flight, "unsent")
                raise
            self.flights.add(aloft := made)
            return go
        except ApiError as error:
            live.answered(tenant.name, error.status, error.code)
            raise
        finally:
            self._deciding.discard(request_id)
            if aloft is None:
                self._places.leave(request_id)
                lease.close(time.monotonic(), served=False)

    def _chosen(self, request: RouteRequest) -> F:
        try:
            return self._scene.decide(request)
        except OverloadedError as error:
            raise errors.OVERLOADED(reason=error, retry_after_s=error.retry_after_s) from None
        except NoWorkerError as error:
            after_s = self._live.retry_after_s(request.model)
            raise errors.NO_WORKER(why=error, retry_after_s=after_s) from None

    def _aloft(self, asked: Asked, reading: Reading, flight: F, lease: Lease) -> Aloft[F]:
        request, decision, scene = reading.request, flight.decision, self._scene
        servers = dict.fromkeys((decision.worker, *scene.others(flight, request)))
        reached = [worker for worker in servers if scene.address(worker)]
        known = decision.priced.prefix_hashes if decision.informed else None
        kept = replace(request, prefix_hashes=known, prompt_tokens=request.tokens)
        if not self._live.recorded:
            # Its tokens were needed once, and may be megabytes.
            kept = replace(kept, token_ids=None)
        return Aloft(
            asked.request_id, asked.tenant, lease, flight, kept, reached[:_MOST_SERVERS],
            time.monotonic(), asked.digest, anthropic=asked.path in MESSAGES_PATHS,
            counts=asked.path in scene.priced,
            repeatable=reading.repeatable, streamed=reading.streamed,
            has_deadline=DEADLINE_HEADER in asked.headers, held=not self._rule.foreign,
            sent_s=time.monotonic(),
        )  # fmt: skip

    def _go(self, asked: Asked, aloft: Aloft[F]) -> Go:
        """The answer to Envoy: where it may go, by which rules, and headers for its client."""
        rule, flight, name = self._rule, aloft.flight, asked.request_id
        addresses = map(self._scene.address, aloft.servers)
        allowed_s = rule.first_byte_s if aloft.streamed else rule.answer_s
        if not rule.foreign:
            allowed_s = max(min(rule.late_s, self._scene.patience_s(flight)), _LEAST_S)
        upstream = {
            ENDPOINT_HEADER: self._scene.address(flight.via) if flight.via else ",".join(addresses),
            TO_ID_HEADER: name,
            "x-request-id": name,
            TRY_HEADER: str(round(1e3 * allowed_s)),
            **self._scene.headers(flight),
        }
        if rule.foreign and aloft.repeatable:
            # One that is late by its client's own wish would be so elsewhere, too.
            late = "" if aloft.has_deadline else f",{LATE}"
            upstream[STATUSES_HEADER] = _RETRIED + late
        if flight.via or len(aloft.servers) < 2:
            # Where no other is left, the answer of the one that has it is better than Envoy's own.
            upstream[RETRIES_HEADER] = "0"
        if self._keyed:  # No server needs the keys that are ours, or may log one.
            upstream[REMOVED_HEADER] = ",".join(KEY_HEADERS)
        client = {
            "x-request-id": name,
            **self._door.limits.headers(asked.tenant.name, time.monotonic()),
        }
        if rule.foreign and flight.decision.informed:
            client |= decision_headers(flight.decision)
        return Go(upstream, client)


def content_digest(asked: Asked) -> str:
    """A name for what a tenant asks an engine to do. Tenants do not share one, so none can have
    another's content refused."""
    named = hashlib.blake2b(f"{asked.tenant.name} {asked.path} ".encode(), digest_size=16)
    body = asked.body
    if len(body) > 2 * _DIGEST_BYTES:  # More would take the event loop's time.
        named.update(b"%d " % len(body))
        body = body[:_DIGEST_BYTES] + body[-_DIGEST_BYTES:]
    named.update(body)
    return named.hexdigest()
