"""The FastAPI application around the ingress: keys, body limit, errors in OpenAI's shape, logs.

Plain ASGI middleware: it must not buffer streams. Made once per ingress replica.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import (
    ApiError,
    body_too_large,
    invalid_api_key,
    unreadable_body,
    validation_error,
)
from router.tenants import Tenant, Tenants, keys_sent

log = structlog.get_logger(__name__)

_BODY_PATHS = ("/v1/chat/completions", "/v1/completions")
# What probes and scrapers ask, who have no key.
_OPEN_PATHS = ("/health", "/ready", "/metrics")


class _BodyLimit:
    """Refuses bodies over the limit, declared or not, before they are parsed."""

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self._app, self._limit_bytes = app, limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._limit_bytes:
            await self._refuse(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._limit_bytes:
                await self._refuse(scope, receive, send)
                return
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        await self._app(scope, replay, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(Request(scope), body_too_large(self._limit_bytes))(
            scope, receive, send
        )


class _Authentication:
    """Finds each request's tenant by its key; without one that is known it may be turned away."""

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self._app, self._tenants = app, tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
            keys = keys_sent(headers.get(b"authorization", ""), headers.get(b"x-api-key", ""))
            tenant = self._tenants.find(keys)
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if tenant is None and path not in _OPEN_PATHS:
                scope["app"].state.keys_refused += 1
                refusal = error_response(Request(scope), invalid_api_key(given=bool(keys)))
                await refusal(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant or self._tenants.default
        await self._app(scope, receive, send)


class _RequestId:
    """Gives every request an id: Ray Serve's own if it sent one, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name.lower(): value for name, value in scope["headers"]}
            given = headers.get(b"x-request-id", b"").decode("latin-1")
            scope.setdefault("state", {})
            scope["state"]["request_id"] = given or uuid.uuid4().hex
        await self._app(scope, receive, send)


class EndedStream(StreamingResponse):
    """A stream with something to do at its end, also if its client left before it began.

    Starlette drops the iterator of such a client without starting it, so the iterator's own
    `finally` would not run.
    """

    def __init__(
        self, content: AsyncIterator[str], end: Callable[[], Awaitable[None]], **options: Any
    ) -> None:
        super().__init__(content, **options)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; whatever happens, call `end` then."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._end()


def request_id_of(request: Request) -> str:
    """The request's id."""
    return str(request.scope.get("state", {}).get("request_id", ""))


def tenant_of(request: Request) -> Tenant:
    """Whose request it is."""
    tenant: Tenant = request.scope.get("state", {}).get("tenant") or Tenant()
    return tenant


def body_accepted(request: Request) -> None:
    """Note that a request got past its schema: what fails from now on is not the client's fault."""
    request.scope.setdefault("state", {})["body_accepted"] = True


def _schema_crashed(request: Request) -> bool:
    state = request.scope.get("state", {})
    return request.url.path in _BODY_PATHS and not state.get("body_accepted")


def error_response(request: Request, error: ApiError) -> Response:
    """Log an error once and turn it into a response."""
    log.warning(
        "request_refused" if error.status < 500 else "request_failed",
        request_id=request_id_of(request),
        tenant=tenant_of(request).name if error.status != 401 else None,
        path=request.url.path,
        status=error.status,
        code=error.code,
        # A validation message may quote the request; codes and parameters do not.
        param=error.param,
    )
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())


def make_app(max_body_bytes: int, tenants: Tenants | None = None) -> FastAPI:
    """An application with our middleware and error handlers, and no routes yet.

    `app.state.keys_refused` counts requests that were turned away for want of a known key.
    """
    app = FastAPI(title="kappa-serve", docs_url=None, redoc_url=None)
    app.state.keys_refused = 0

    async def on_api_error(request: Request, error: Any) -> Response:
        return error_response(request, error)

    async def on_invalid(request: Request, error: Any) -> Response:
        return error_response(request, validation_error(error.errors()))

    async def on_http_error(request: Request, error: Any) -> Response:
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return error_response(request, ApiError(error.status_code, str(error.detail), kind=kind))

    async def on_anything(request: Request, error: Any) -> Response:
        if _schema_crashed(request):
            return error_response(request, unreadable_body(error))
        log.exception("request_crashed", request_id=request_id_of(request), exc_info=error)
        return error_response(
            request, ApiError(500, "Internal error.", kind="server_error", code="internal")
        )

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_anything)
    app.add_middleware(_BodyLimit, limit_bytes=max_body_bytes)
    app.add_middleware(_Authentication, tenants=tenants or Tenants())
    app.add_middleware(_RequestId)
    return app
