"""The FastAPI application around the endpoints: who may ask, how much, in what size; its errors.

One middleware stands before every endpoint and refuses a request before more is spent on it: its
id, its headers, its key and role, its tenant's limits, and only then its body. It buffers no
stream. What is logged of a request or a crash never holds a text of the client's: codes,
parameters, and places in the code. Made once per ingress replica.
"""

from __future__ import annotations

import asyncio
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.auth import Tenant, Tenants, keys_in
from router.api.errors import (
    ApiError,
    bodies_outstanding,
    body_too_large,
    body_too_slow,
    headers_too_large,
    invalid_api_key,
    operator_only,
    unreadable_body,
    validation_error,
)
from router.api.keyring import Keyring
from router.api.limits import Allowance, Lease, Places, TenantLimiter

log = structlog.get_logger(__name__)

_BODY_PATHS = ("/v1/chat/completions", "/v1/completions")
# What makes engines work, or the ingress: counted against a tenant's limits.
_LIMITED_PATHS = (*_BODY_PATHS, "/v1/route", "/v1/decisions")
# What probes ask, who have no key.
_OPEN_PATHS = ("/health", "/ready")
_METRICS_PATH = "/metrics"
# What concerns the whole cluster. Decisions show a tenant its own ones, an operator all.
_OPERATOR_PATHS = ("/v1/nodes", "/v1/nodes/profile", "/v1/tenants")
_ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:-")
_LONGEST_ID = 128
_PLACES_LOGGED = 12


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


@dataclass(slots=True)
class Inbound:
    """What is known of a request before its endpoint sees it.

    arrived_s: by the monotonic clock. lease: what it holds of its tenant's limits, if these count
    it. accepted: it got past its schema: what fails from then on is not the client's fault.
    """

    request_id: str
    arrived_s: float
    tenant: Tenant = field(default_factory=Tenant)
    lease: Lease | None = None
    body: bytes = b""
    accepted: bool = False

    def may_see(self, tenant: str) -> bool:
        """Whether whoever asks may see what is `tenant`'s: itself, or an operator."""
        return self.tenant.operator or self.tenant.name == tenant


def inbound_of(request: Request) -> Inbound:
    """What the middleware found out about a request."""
    inbound: Inbound = request.scope["state"]["inbound"]
    return inbound


def current_tenants(app: Any, otherwise: Tenants) -> Tenants:
    """The tenants as the application knows them now; `otherwise` before its first request."""
    keyring: Keyring | None = getattr(app.state, "keyring", None)
    return otherwise if keyring is None else keyring.current()


# -- the application --------------------------------------------------------------------------


def make_app(access: Access | None = None) -> FastAPI:
    """An application with our middleware and error handlers, and no routes yet.

    `app.state.keys_refused` counts requests that were refused for want of a known key,
    `app.state.refused` those that were by their tenant's limits, by (tenant, code).
    """
    app = FastAPI(title="kappa-serve", docs_url=None, redoc_url=None)
    app.state.keys_refused = 0
    app.state.refused = Counter()

    async def on_error(request: Request, error: Any) -> Response:
        return error_response(request, _as_api_error(request, error))

    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_middleware(Gate, access=access or Access())
    return app


def _as_api_error(request: Request, error: Exception) -> ApiError:
    """What a client sees of anything that was raised."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return validation_error(list(error.errors()))
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    if request.url.path in _BODY_PATHS and not inbound_of(request).accepted:
        return unreadable_body(error)
    log.error(
        "request_crashed", request_id=inbound_of(request).request_id, error=type(error).__name__,
        places=places_of(error),
    )  # fmt: skip
    return ApiError(500, "Internal error.", code="internal")


def error_response(request: Request, error: ApiError) -> Response:
    """Log an error once and turn it into a response."""
    inbound = inbound_of(request)
    log.warning(
        "request_refused" if error.status < 500 else "request_failed",
        request_id=inbound.request_id,
        tenant=inbound.tenant.name if error.status != 401 else None,
        path=request.url.path,
        status=error.status,
        code=error.code,
        # A validation message may quote the request, and so may a place within a parameter.
        param=None if error.param is None else error.param.partition(".")[0],
    )
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())


def places_of(error: BaseException) -> list[str]:
    """Where an error came from, innermost last, without its message, which may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-_PLACES_LOGGED:]
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]


# -- what stands before every endpoint --------------------------------------------------------


class Gate:
    """Lets a request through to its endpoint, or answers it with what is wrong with it."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access
        self._limits = TenantLimiter(access.default_allowance, access.allowances, access.replicas)
        self._outstanding = Places(access.max_outstanding_bodies)
        self._keyring: Keyring | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its `Inbound` in its state, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id")
        # Ray Serve sends its id in the same header, so the two are one.
        fit = 0 < len(given) <= _LONGEST_ID and _ID_CHARACTERS.issuperset(given)
        inbound = Inbound(given if fit else uuid.uuid4().hex, time.monotonic())
        scope.setdefault("state", {})["inbound"] = inbound
        # Whatever is logged on the way carries the id.
        with structlog.contextvars.bound_contextvars(request_id=inbound.request_id):
            reply = _Reply(send)
            try:
                await self._admit(scope, inbound, reply)
                await self._serve(scope, receive, inbound, reply)
            except ApiError as error:
                await error_response(Request(scope), error)(scope, receive, reply)
            finally:
                if inbound.lease is not None:
                    inbound.lease.close(time.monotonic(), served=0 < reply.status < 400)

    async def _admit(self, scope: Scope, inbound: Inbound, reply: _Reply) -> None:
        """Raises ApiError 401, 403, 429 or 431."""
        self._check_headers(scope["headers"])
        path = _path(scope)
        try:
            inbound.tenant = self._authenticated(scope, path, await self._tenants(scope))
        except ApiError as error:
            scope["app"].state.keys_refused += error.status == 401
            raise
        if path in _LIMITED_PATHS:
            tenant = inbound.tenant.name
            reply.headers = lambda: self._limits.headers(tenant, time.monotonic())
            try:
                inbound.lease = self._limits.enter(tenant, time.monotonic())
            except ApiError as error:
                scope["app"].state.refused[tenant, error.code or ""] += 1
                raise

    def _check_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """More or longer headers than any client of ours has reason to send are refused."""
        size, most = sum(len(name) + len(value) for name, value in headers), self._access
        if len(headers) > most.max_headers:
            raise headers_too_large(f"{len(headers)} headers; at most {most.max_headers} are read")
        if size > most.max_header_bytes:
            raise headers_too_large(
                f"{size} bytes of headers; at most {most.max_header_bytes} are read"
            )

    async def _tenants(self, scope: Scope) -> Tenants:
        if self._keyring is None:
            access = self._access
            self._keyring = Keyring(access.tenants, access.keys_file, access.keys_check_s)
            scope["app"].state.keyring = self._keyring
        await self._keyring.refresh()
        return self._keyring.current()

    def _authenticated(self, scope: Scope, path: str, tenants: Tenants) -> Tenant:
        """Whose a request is. Raises ApiError 401, or 403 for an operator's path."""
        keys = keys_in(_header(scope, b"authorization"), _header(scope, b"x-api-key"))
        tenant = tenants.find(keys)
        is_open = path in _OPEN_PATHS or (path == _METRICS_PATH and self._access.open_metrics)
        if tenant is None and not is_open:
            raise invalid_api_key(given=bool(keys))
        tenant = tenant or tenants.default
        guarded = path in _OPERATOR_PATHS or (path == _METRICS_PATH and not is_open)
        if guarded and not tenant.operator:
            raise operator_only(path)
        return tenant

    async def _serve(self, scope: Scope, receive: Receive, inbound: Inbound, reply: _Reply) -> None:
        """Read the body whole and have the request answered, whatever is raised on the way.

        Starlette would answer an exception, too, but then raise it again, and the server would
        close a connection that its client believes to be good.
        """
        body = await self._body(scope, receive, inbound.tenant)
        if body is None:
            return  # The client left.
        inbound.body = body
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        try:
            await self._app(scope, replay, reply)
        except Exception as error:
            if reply.status:
                raise
            raise _as_api_error(Request(scope), error) from None

    async def _body(self, scope: Scope, receive: Receive, tenant: Tenant) -> bytes | None:
        """The whole body; None if the client left.

        Only so many are awaited at a time, shared among tenants, or among addresses where there are
        no keys: each holds one of the ingress' slots. Raises ApiError 408, 413 or 429.
        """
        timeout_s, has_body = self._access.body_timeout_s, scope["method"] not in ("GET", "HEAD")
        holder = object()
        if has_body:
            self._take_place(holder, scope, tenant)
        try:
            async with asyncio.timeout(timeout_s):
                return await _read(scope, receive, self._access.max_body_bytes)
        except TimeoutError:
            raise body_too_slow(timeout_s) from None
        finally:
            self._outstanding.leave(holder)

    def _take_place(self, holder: object, scope: Scope, tenant: Tenant) -> None:
        who = f"tenant {tenant.name}"
        if not self._access.tenants.by_digest:
            tenant, who = Tenant((scope.get("client") or ("",))[0]), "this address"
        if not self._outstanding.take(holder, tenant):
            raise bodies_outstanding(who, self._access.max_outstanding_bodies)


class _Reply:
    """Where the answer goes. status: of what has begun, 0 until then; headers: what to add."""

    def __init__(self, send: Send) -> None:
        self._send, self.status = send, 0
        self.headers: Callable[[], dict[str, str]] | None = None

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.headers is not None:
                MutableHeaders(scope=message).update(self.headers())
        return self._send(message)


async def _read(scope: Scope, receive: Receive, limit_bytes: int) -> bytes | None:
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


def _path(scope: Scope) -> str:
    path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
    return path if len(path) == 1 else path.rstrip("/")


def _header(scope: Scope, name: bytes) -> str:
    for key, value in scope["headers"]:
        if key.lower() == name:
            return bytes(value).decode("latin-1")
    return ""
