"""The application that a worker's own port serves where its engine is ours: chats and completions.

Bodies come past the worker's gate, so the front has checked them and put the prompt's tokens in.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from pydantic import ValidationError
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kappa.protocol import ERROR_EVENT

Answer = Callable[[Any, str], AsyncGenerator[Any, None]]
"""A body and its kind, `chat` or `completions`; what comes of it, as `OwnEngine` gives it."""

_KINDS = {
    "/v1/chat/completions": ("chat", ChatCompletionRequest),
    "/v1/completions": ("completions", CompletionRequest),
}


def engine_app(answer: Answer, check_health: Callable[[], Awaitable[None]]) -> Starlette:
    """The application; check_health: raises if the engine is dead."""

    async def served(request: Request) -> Response:
        kind, schema = _KINDS[request.url.path]
        try:
            body = schema.model_validate_json(await request.body())
        except ValidationError as error:
            fault = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, fault["loc"]))
            return _refused(400, f"{where}: {fault['msg']}", where)
        return await _response(answer(body, kind))

    async def health(_: Request) -> Response:
        try:
            await check_health()
        except Exception:
            return Response(status_code=503)
        return Response()

    routes = [Route(path, served, methods=["POST"]) for path in _KINDS]
    return Starlette(routes=[*routes, Route("/health", health)])


async def _response(items: AsyncGenerator[Any, None]) -> Response:
    """What the engine gives, once its first item is there: that says what kind it is of."""
    first = await anext(items)
    if isinstance(first, str):
        return StreamingResponse(_events(first, items), media_type="text/event-stream")
    await items.aclose()
    if hasattr(first, "error"):
        fault = first.error
        return _refused(int(fault.code), fault.message, fault.param)
    return Response(first.model_dump_json(), media_type="application/json")


async def _events(first: str, items: AsyncGenerator[Any, None]) -> AsyncIterator[str]:
    try:
        yield first
        async for item in items:
            if isinstance(item, str):
                yield item
                continue
            error = item.model_dump()["error"]
            yield f"{ERROR_EVENT}: {json.dumps(error)}}}\n\ndata: [DONE]\n\n"
    finally:
        await items.aclose()


def _refused(status: int, message: str, param: str | None) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": status}
    return JSONResponse({"error": error}, status_code=status)
