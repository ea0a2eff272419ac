"""The application around the endpoints: who may ask, how much, in what size; its errors.

One middleware stands before every endpoint and refuses a request before more is spent on it: its
id, its key and role, its tenant's limits, and only then its body. Envoy has bounded its headers and
its time. It buffers no stream. Logs of a request or a crash never hold a text of the client's:
codes, parameters, and places in the code.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kappa.asgi import body_of, replayed
from kappa.keys import KeysUnreadableError, read_digests
from kappa.protocol import MAX_TENANTS
from kappa_router.api import errors
from kappa_router.api.errors import ApiError
from kappa_router.api.metadata import FAIRNESS_HEADER
from kappa_router.api.request import Inbound, inbound_of
from kappa_router.api.tenants import (
    Allowance,
    Lease,
    Places,
    Tenant,
    TenantLimiter,
    Tenants,
    keys_in,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

log = structlog.get_logger(__name__)

# Paths with errors in Anthropic's shape.
MESSAGES_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_BODY_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", *MESSAGES_PATHS)
# What makes engines work, or the decider: counted against a tenant's limits.
_LIMITED_PATHS = (*_BODY_PATHS, "/v1/route", "/v1/decisions")
# What probes ask, who have no key, and the page, which holds no data.
_OPEN_PATHS = ("/", "/health", "/ready")
_METRICS_PATH = "/metrics"
KEY_HEADERS = ("authorization", "x-api-key")
TENANT_HEADERS = (*KEY_HEADERS, FAIRNESS_HEADER)
OPERATOR_PATHS = ("/v1/nodes", "/v1/nodes/profile", "/v1/tenants", "/v1/journal", "/v1/in_flight")
"""What concerns the whole cluster. Decisions show a tenant its own ones, an operator all."""
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_PLACES_LOGGED = 12
_SETTLED_S = 0.5


@dataclass(slots=True)
class Access:
    """Who may ask, how much, and in what size, as a decider replica is told."""

    tenants: Tenants = field(default_factory=Tenants)
    # None: keys never change.
    keys_file: str | None = None
    keys_check_s: float = 2.0
    max_body_bytes: int = 4 << 20
    body_timeout_s: float = 30.0
    # Requests at a time that wait for their bodies.
    max_outstanding_bodies: int = 512
    # Metrics need no key.
    open_metrics: bool = True
    default_allowance: Allowance = field(default_factory=Allowance)
    # By tenant.
    allowances: dict[str, Allowance] = field(default_factory=dict)
    # The deciders that share every tenant's limits.
    replicas: int = 1
    # Requests that are only passed on are limited, too.
    limit_all: bool = False

    def limits(self, path: str) -> bool:
        """Whether a request for `path` counts against its tenant's limits."""
        if self.limit_all:
            return path not in (*_OPEN_PATHS, _METRICS_PATH, *OPERATOR_PATHS, "/v1/models")
        return path.rstrip("/") in _LIMITED_PATHS


def fit_id(given: str) -> str:
    """A request's id as its client gives it, if that may be one, else a new one."""
    return given if _ID.fullmatch(given) else uuid.uuid4().hex


def make_app(door: Door) -> FastAPI:
    """FastAPI behind a door, with no routes yet."""
    # Half a second and 7 MB that `kappa route` does without.
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError

    app = FastAPI(title="kappa-serve", docs_url=None, redoc_url=None)
    guard(app, door)

    async def on_invalid(request: Request, error: Any) -> Response:
        return _error_response(request, errors.validation_error(error.errors()[0]))

    app.add_exception_handler(RequestValidationError, on_invalid)
    return app


def guard(app: Starlette, door: Door) -> None:
    """Put our middleware and error handlers around an application."""

    async def on_error(request: Request, error: Any) -> Response:
        return _error_response(request, _as_api_error(request, error))

    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_middleware(Gate, door=door)


# -- errors -----------------------------------------------------------------------------------


def _as_api_error(request: Request, error: Exception) -> ApiError:
    """The error that a client sees of anything that was raised."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    log.error(
        "request_crashed", request_id=inbound_of(request).request_id, error=type(error).__name__,
        places=places_of(error),
    )  # fmt: skip
    return errors.INTERNAL()


def _error_response(request: Request, error: ApiError) -> Response:
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
    body = error.message_body() if request.url.path.endswith(MESSAGES_PATHS) else error.body()
    return JSONResponse(body, status_code=error.status, headers=error.headers())


def places_of(error: BaseException) -> list[str]:
    """The places of an error, innermost last, without its message, which may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-_PLACES_LOGGED:]
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]


# -- what stands before every endpoint --------------------------------------------------------


class Door:
    """The check of keys and limits that stands before endpoints.

    keys_refused: requests that were refused for want of a known key; refused: those that were by
    their tenant's limits, by (tenant, code).
    """

    def __init__(self, access: Access) -> None:
        self.access = access
        self.limits = TenantLimiter(access.default_allowance, access.allowances, access.replicas)
        self.keyring = Keyring(access.tenants, access.keys_file, access.keys_check_s)
        self.keys_refused, self.refused = 0, Counter[tuple[str, str]]()

    async def tenant(
        self, authorization: str, api_key: str, now_s: float, fairness_id: str = "", *,
        is_open: bool = False,
    ) -> Tenant:  # fmt: skip
        """The tenant of a request with these headers; an open endpoint needs no key.

        Raises ApiError 401, or 403 for another's fairness header."""
        await self.keyring.refresh(now_s)
        tenants, keys = self.keyring.tenants, keys_in(authorization, api_key)
        tenant = tenants.find(keys)
        if tenant is None and not is_open:
            self.keys_refused += 1
            raise errors.UNKNOWN_KEY() if keys else errors.NO_KEY()
        if tenant is None or is_open:
            return tenant or tenants.default
        with self.counting(tenant):
            return tenants.named(tenant, fairness_id)

    def enter(self, tenant: Tenant, now_s: float, body_bytes: int = 0) -> Lease:
        """A request of `tenant` came, with a body announced as so large; raises ApiError 429."""
        with self.counting(tenant):
            return self.limits.enter(tenant.name, now_s, body_bytes)

    @contextlib.contextmanager
    def counting(self, tenant: Tenant) -> Iterator[None]:
        """Count what the tenant's limits refuse."""
        try:
            yield
        except ApiError as error:
            self.refused[tenant.name, error.code or ""] += 1
            raise


class Gate:
    """Lets a request through to its endpoint, or answers with its fault."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app, self._access, self._door = app, door.access, door
        self._outstanding = Places(door.access.max_outstanding_bodies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its `Inbound` in its state, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Of several with one name, the first.
        headers = {name.lower(): value for name, value in reversed(scope["headers"])}
        # Ray Serve sends its id in the same header, so the two are one.
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        inbound = Inbound(fit_id(given), time.monotonic())
        scope.setdefault("state", {})["inbound"] = inbound
        # Whatever is logged on the way carries the id.
        with structlog.contextvars.bound_contextvars(request_id=inbound.request_id):
            reply = _Reply(send)
            try:
                await self._admit(scope, headers, inbound, reply)
                body = await self._body(scope, receive, headers, inbound.tenant)
                if body is not None:  # else the client left
                    inbound.body = body
                    if inbound.lease is not None:
                        with self._door.counting(inbound.tenant):
                            inbound.lease.received(len(body), time.monotonic())
                    await self._serve(scope, receive, body, reply)
            except ApiError as error:
                await _error_response(Request(scope), error)(scope, receive, reply)
            finally:
                if inbound.lease is not None:
                    inbound.lease.close(time.monotonic(), served=0 < reply.status < 400)

    async def _admit(
        self, scope: Scope, headers: dict[bytes, bytes], inbound: Inbound, reply: _Reply
    ) -> None:
        """Find the tenant of the request and enter it; raises ApiError 401, 403 or 429."""
        path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
        bearer, api_key, fairness_id = (
            headers.get(name.encode(), b"").decode("latin-1") for name in TENANT_HEADERS
        )
        # Compared as routes are: with a slash more it is none of ours, and may be another's.
        is_open = path in _OPEN_PATHS or (path == _METRICS_PATH and self._access.open_metrics)
        now_s = time.monotonic()
        tenant = await self._door.tenant(bearer, api_key, now_s, fairness_id, is_open=is_open)
        inbound.tenant = tenant
        named = path.rstrip("/")
        guarded = named in OPERATOR_PATHS or (named == _METRICS_PATH and not is_open)
        if guarded and not tenant.operator:
            raise errors.OPERATOR_ONLY(path=path)
        if self._access.limits(path):
            reply.headers = lambda: self._door.limits.headers(tenant.name, time.monotonic())
            declared = min(_declared_bytes(headers), self._access.max_body_bytes)
            inbound.lease = self._door.enter(tenant, now_s, declared)

    async def _body(
        self, scope: Scope, receive: Receive, headers: dict[bytes, bytes], tenant: Tenant
    ) -> bytes | None:
        """The whole body; None if the client left.

        The number awaited at a time is bounded, and shared among tenants, or addresses if there are
        no keys: each holds one of the decider's slots. Envoy ends one that does not come in time.
        Raises ApiError 413 or 429.
        """
        holder, who = object(), f"tenant {tenant.name}"
        if scope["method"] not in ("GET", "HEAD"):
            if not self._access.tenants.apart:
                tenant, who = Tenant((scope.get("client") or ("",))[0]), "this address"
            if not self._outstanding.take(holder, tenant):
                raise errors.BODIES_OUTSTANDING(limit=self._access.max_outstanding_bodies, who=who)
        most_bytes = self._access.max_body_bytes
        if scope["path"] in (*_OPEN_PATHS, _METRICS_PATH):
            most_bytes = 0  # All may ask there, and no question has a body.
        too_large = errors.BODY_TOO_LARGE(limit_bytes=most_bytes)
        try:
            if _declared_bytes(headers) > most_bytes:
                raise too_large
            return await body_of(receive, most_bytes, too_large)
        finally:
            self._outstanding.leave(holder)

    async def _serve(self, scope: Scope, receive: Receive, body: bytes, reply: _Reply) -> None:
        """Have the request answered, whatever is raised on the way.

        Starlette would answer an exception, too, but then raise it again, and the server would
        close a connection that its client believes to be good.
        """
        try:
            await self._app(scope, replayed(body, receive), reply)
        except Exception as error:
            if reply.status:
                raise
            raise _as_api_error(Request(scope), error) from None


def _declared_bytes(headers: Mapping[bytes, bytes]) -> int:
    """The size that a body is announced with, 0 if it is not."""
    declared = headers.get(b"content-length", b"")[:20]
    return int(declared) if declared.isdigit() else 0


class _Reply:
    """Sends the answer on. status: of one that has begun, 0 until then; headers: to be added."""

    def __init__(self, send: Send) -> None:
        self._send, self.status = send, 0
        self.headers: Callable[[], dict[str, str]] | None = None

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.headers is not None:
                MutableHeaders(scope=message).update(self.headers())
        return self._send(message)


# -- the keys file ----------------------------------------------------------------------------


class Keyring:
    """The tenants as a decider knows them now: the table of its start, and the keys file as it is.

    The file is looked at, not watched: at most every `check_s` seconds, by the request that comes
    then, so nothing runs beside; it is read on a thread. While it cannot be read, is faulty, or
    holds no key any more, the keys that it held last stay valid, and the log says so: a slip must
    not lock everybody out. A file that is just being written is not taken before it has stayed the
    same for a moment.

    tenants: as of the last look; reloads, faults: how often the file was taken, and not.
    """

    def __init__(self, tenants: Tenants, path: str | None = None, check_s: float = 2.0) -> None:
        """`tenants`: the table at deployment, with the file's keys as they were then."""
        self.tenants, self._path, self._check_s = tenants, path, check_s
        self._next_s = float("-inf")
        self._taken: tuple[int, ...] | None = None
        self._changing: tuple[int, ...] | None = None
        self._fault = ""
        self.reloads = self.faults = 0
        # Before anybody is served: a key that was taken out must not be valid again by a restart.
        self.look(float("-inf"))

    async def refresh(self, now_s: float) -> None:
        """Look at the file if that is due; `now_s` is of the monotonic clock."""
        if self._path is not None and now_s >= self._next_s:
            self._next_s = now_s + self._check_s  # others do not wait for this look
            await asyncio.to_thread(self.look, now_s)

    def look(self, now_s: float) -> None:
        """Look at the file, and take its keys if it has changed."""
        if self._path is None:
            return
        self._next_s = now_s + self._check_s
        try:
            status = os.stat(self._path)
        except OSError as error:
            self._failed(f"keys_file {self._path}: cannot be read: {error.strerror}")
            return
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if stamp == self._taken:
            return
        # A time of writing that lies in the future (the clock was set back) is a moment ago, too.
        is_young = time.time() - status.st_mtime < _SETTLED_S
        if is_young and self._taken is not None and stamp != self._changing:
            self._changing, self._next_s = stamp, now_s + _SETTLED_S
            return
        first = self._taken is None
        try:
            by_digest = read_digests(self._path)
            tenants = self.tenants.with_file(by_digest)
            _check_change(self._path, self.tenants, tenants)
        except KeysUnreadableError as error:
            # Rights, or a machine out of files: it may be readable next time, though unchanged.
            self._failed(str(error))
            return
        except ValueError as error:
            self._taken = stamp  # Read once more only when it has changed again.
            self._failed(str(error))
            return
        self._taken, self._fault, self.tenants = stamp, "", tenants
        self.reloads += 1
        if not first:
            log.warning("keys_reloaded", path=self._path, keys=len(by_digest))

    def _failed(self, why: str) -> None:
        self.faults += 1
        if why != self._fault:
            self._fault = why
            log.error("keys_not_reloaded", reason=why, remedy="the keys read before stay valid")


def _check_change(path: str, before: Tenants, after: Tenants) -> None:
    """Raises ValueError for a file that takes every key away, or names too many tenants."""
    had, has = (len(table.by_digest.keys() - table.fixed) for table in (before, after))
    if had and not has:
        raise ValueError(
            f"keys_file {path}: holds no key, and held {had}: all of its tenants would be locked "
            "out. Leave one in it, or restart without keys_file"
        )
    count = len(after.all())
    if count > MAX_TENANTS:
        raise ValueError(
            f"keys_file {path}: there would be {count} tenants; at most {MAX_TENANTS} are kept "
            "apart"
        )
