"""The FastAPI application around the ingress: access, errors in OpenAI's shape, their log.

Access is `router.access.middleware`, stacked here. What is logged of a request or a crash never
holds a text of the client's: codes, parameters, and places in the code. Made once per ingress
replica.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.access.middleware import (
    Access,
    Authentication,
    BodyLimit,
    HeaderLimit,
    Identity,
    TenantLimit,
)
from router.access.tenants import Tenant
from router.errors import ApiError, unreadable_body, validation_error

log = structlog.get_logger(__name__)

_BODY_PATHS = ("/v1/chat/completions", "/v1/completions")
_PLACES_LOGGED = 12


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


def may_see(request: Request, tenant: str) -> bool:
    """Whether whoever asks may see what is `tenant`'s: itself, or an operator."""
    asker = tenant_of(request)
    return asker.operator or asker.name == tenant


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
        # A validation message may quote the request, and so may a place within a parameter.
        param=None if error.param is None else error.param.partition(".")[0],
    )
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())


def places_of(error: BaseException) -> list[str]:
    """Where an error came from, innermost last, without its message, which may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-_PLACES_LOGGED:]
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]


class LastResort:
    """Answers what nobody caught. Starlette would answer, too, but then raise it again, and the
    server would close a connection that its client believes to be good."""

    def __init__(
        self, app: ASGIApp, answer: Callable[[Request, Exception], Awaitable[Response]]
    ) -> None:
        self._app, self._answer = app, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; an error before the answer has begun becomes the answer."""
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            response = await self._answer(Request(scope), error)
            await response(scope, receive, send)


def make_app(access: Access | None = None) -> FastAPI:
    """An application with our middleware and error handlers, and no routes yet.

    `app.state.keys_refused` counts requests that were turned away for want of a known key,
    `app.state.refused` those that were by their tenant's limits, by (tenant, code).
    """
    access = access or Access()
    app = FastAPI(title="kappa-serve", docs_url=None, redoc_url=None)
    app.state.keys_refused = 0
    app.state.refused = Counter()

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
        log.error(
            "request_crashed", request_id=request_id_of(request), error=type(error).__name__,
            places=places_of(error),
        )  # fmt: skip
        return error_response(
            request, ApiError(500, "Internal error.", kind="server_error", code="internal")
        )

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_anything)
    # The last one added is the first that a request meets.
    app.add_middleware(LastResort, answer=on_anything)
    for middleware in (BodyLimit, TenantLimit, Authentication, HeaderLimit):
        app.add_middleware(middleware, access=access, refuse=error_response)
    app.add_middleware(Identity)
    return app
