"""What stands before every endpoint: sizes, keys, roles and limits, as plain ASGI middleware.

In this order, each before more is spent on a request: its id, its headers, its key and role, its
tenant's limits, and only then its body. None of them buffers a stream. `router.ingress.app` stacks
them; what they need is an `Access`, made once per ingress replica.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.access.keyring import Keyring
from router.access.limits import Allowance, Lease, Limits
from router.access.places import Places
from router.access.tenants import Tenant, Tenants, keys_sent
from router.errors import (
    ApiError,
    bodies_outstanding,
    body_too_large,
    body_too_slow,
    headers_too_large,
    invalid_api_key,
    operator_only,
)

Refuse = Callable[[Request, ApiError], Response]

# What makes engines work, or the ingress: counted against a tenant's limits.
_LIMITED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/route", "/v1/decisions")
# What probes ask, who have no key.
_OPEN_PATHS = ("/health", "/ready")
_METRICS_PATH = "/metrics"
# What concerns the whole cluster. Decisions show a tenant its own ones, an operator all.
_OPERATOR_PATHS = ("/v1/nodes", "/v1/nodes/profile", "/v1/tenants")
_ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:-")
_LONGEST_ID = 128


@dataclass(slots=True)
class Access:
    """What an ingress replica knows of who may ask, how much, and in what size.

    replicas: so many ingresses share every tenant's limits. max_outstanding_bodies: requests at a
    time whose bodies have not arrived.
    """

    tenants: Tenants = field(default_factory=Tenants)
    keys_file: str | None = None
    keys_check_s: float = 2.0
    max_body_bytes: int = 4 << 20
    max_headers: int = 100
    max_header_bytes: int = 32 << 10
    body_timeout_s: float = 30.0
    max_outstanding_bodies: int = 512
    open_metrics: bool = True
    default_allowance: Allowance = field(default_factory=Allowance)
    allowances: dict[str, Allowance] = field(default_factory=dict)
    replicas: int = 1

    def keyring(self) -> Keyring:
        """The tenants, following their file."""
        return Keyring(self.tenants, self.keys_file, self.keys_check_s)

    def limits(self) -> Limits:
        """Full allowances for everybody."""
        return Limits(self.default_allowance, self.allowances, self.replicas)


class Identity:
    """Gives every request an id and the time of its arrival: its own id if that is fit for a log.

    Ray Serve sends its id in the same header, so the two are one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with `request_id` and `arrived_s` in its state."""
        if scope["type"] == "http":
            given = _header(scope, b"x-request-id")
            fit = 0 < len(given) <= _LONGEST_ID and _ID_CHARACTERS.issuperset(given)
            state = scope.setdefault("state", {})
            state["request_id"] = given if fit else uuid.uuid4().hex
            state["arrived_s"] = time.monotonic()
            # Whatever is logged on the way carries the id.
            with structlog.contextvars.bound_contextvars(request_id=state["request_id"]):
                await self._app(scope, receive, send)
            return
        await self._app(scope, receive, send)


class HeaderLimit:
    """Refuses more headers, or longer ones, than any client of ours has reason to send."""

    def __init__(self, app: ASGIApp, access: Access, refuse: Refuse) -> None:
        self._app, self._access, self._refuse = app, access, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 431."""
        if scope["type"] == "http":
            headers = scope["headers"]
            size = sum(len(name) + len(value) for name, value in headers)
            what = ""
            if len(headers) > self._access.max_headers:
                what = f"{len(headers)} headers; at most {self._access.max_headers} are read"
            elif size > self._access.max_header_bytes:
                what = f"{size} bytes of headers; at most {self._access.max_header_bytes} are read"
            if what:
                refusal = self._refuse(Request(scope), headers_too_large(what))
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Authentication:
    """Finds each request's tenant by its key; turns away the unknown, and from operators' paths
    those who are none."""

    def __init__(self, app: ASGIApp, access: Access, refuse: Refuse) -> None:
        self._app, self._access, self._refuse = app, access, refuse
        self._keyring: Keyring | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with `tenant` in its state, or answer 401 or 403."""
        if scope["type"] == "http":
            error = self._admit(scope, await self._tenants(scope))
            if error is not None:
                scope["app"].state.keys_refused += error.status == 401
                await self._refuse(Request(scope), error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _tenants(self, scope: Scope) -> Tenants:
        if self._keyring is None:
            self._keyring = scope["app"].state.keyring = self._access.keyring()
        await self._keyring.refresh()
        return self._keyring.current()

    def _admit(self, scope: Scope, tenants: Tenants) -> ApiError | None:
        keys = keys_sent(_header(scope, b"authorization"), _header(scope, b"x-api-key"))
        tenant = tenants.find(keys)
        path = _path(scope)
        is_open = path in _OPEN_PATHS or (path == _METRICS_PATH and self._access.open_metrics)
        state = scope.setdefault("state", {})
        if tenant is None and not is_open:
            return invalid_api_key(given=bool(keys))
        state["tenant"] = tenant or tenants.default
        guarded = path in _OPERATOR_PATHS or (path == _METRICS_PATH and not is_open)
        if guarded and not state["tenant"].operator:
            return operator_only(path)
        return None


class TenantLimit:
    """Holds each tenant to its requests per minute and at a time, and says what is left.

    The request's `Lease` stands in its state; whoever knows its tokens settles them there.
    """

    def __init__(self, app: ASGIApp, access: Access, refuse: Refuse) -> None:
        self._app, self._refuse = app, refuse
        self._limits = access.limits()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 429."""
        if scope["type"] != "http" or _path(scope) not in _LIMITED_PATHS:
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        tenant = state["tenant"].name
        try:
            lease = self._limits.enter(tenant, time.monotonic())
        except ApiError as error:
            scope["app"].state.refused[tenant, error.code or ""] += 1
            refusal = self._refuse(Request(scope), error)
            refusal.headers.update(self._limits.headers(tenant, time.monotonic()))
            await refusal(scope, receive, send)
            return
        state["lease"] = lease
        status = 500

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                left = self._limits.headers(tenant, time.monotonic())
                MutableHeaders(scope=message).update(left)
            await send(message)

        try:
            await self._app(scope, receive, told)
        finally:
            lease.close(time.monotonic(), served=status < 400)


class BodyLimit:
    """Refuses bodies over the limit, declared or not, and those that take too long to come.

    Only so many are awaited at a time, shared among tenants, or among addresses where there are no
    keys: each holds one of the ingress' slots.
    """

    def __init__(self, app: ASGIApp, access: Access, refuse: Refuse) -> None:
        self._app, self._access, self._refuse = app, access, refuse
        self._outstanding = Places(access.max_outstanding_bodies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body whole and pass it on, or answer 413, 408 or 429."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._access.body_timeout_s):
                body = await self._awaited(scope, receive)
        except TimeoutError:
            error = body_too_slow(self._access.body_timeout_s)
            await self._refuse(Request(scope), error)(scope, receive, send)
            return
        except ApiError as error:
            await self._refuse(Request(scope), error)(scope, receive, send)
            return
        if body is None:
            return
        scope.setdefault("state", {})["body_bytes"] = len(body)
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        await self._app(scope, replay, send)

    async def _awaited(self, scope: Scope, receive: Receive) -> bytes | None:
        """As `_body`, in one of the places. Raises ApiError 413 or 429."""
        if scope["method"] in ("GET", "HEAD"):
            return await self._body(scope, receive)
        holder, tenant = object(), scope.get("state", {}).get("tenant") or Tenant()
        if not self._access.tenants.by_digest:
            tenant = Tenant((scope.get("client") or ("",))[0])
        if not self._outstanding.take(holder, tenant):
            who = f"tenant {tenant.name}" if self._access.tenants.by_digest else "this address"
            raise bodies_outstanding(who, self._access.max_outstanding_bodies)
        try:
            return await self._body(scope, receive)
        finally:
            self._outstanding.leave(holder)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None if the client left. Raises ApiError 413."""
        limit_bytes = self._access.max_body_bytes
        declared = _header(scope, b"content-length")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit_bytes:
            raise body_too_large(limit_bytes)
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > limit_bytes:
                raise body_too_large(limit_bytes)
        return bytes(body)


def lease_of(request: Request) -> Lease | None:
    """What a request holds of its tenant's limits; None where there are none to hold."""
    lease: Lease | None = request.scope.get("state", {}).get("lease")
    return lease


def arrived_s(request: Request) -> float:
    """When a request came, by the monotonic clock."""
    return float(request.scope.get("state", {}).get("arrived_s", time.monotonic()))


def current_tenants(app: Any, otherwise: Tenants) -> Tenants:
    """The tenants as the application knows them now; `otherwise` before its first request."""
    keyring: Keyring | None = getattr(app.state, "keyring", None)
    return otherwise if keyring is None else keyring.current()


def _path(scope: Scope) -> str:
    path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
    return path if len(path) == 1 else path.rstrip("/")


def _header(scope: Scope, name: bytes) -> str:
    for key, value in scope["headers"]:
        if key.lower() == name:
            return bytes(value).decode("latin-1")
    return ""
