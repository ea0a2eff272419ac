"""One attempt to have a request served by one worker: send it there, relay what comes back.

A worker that dies before its first item raises out of `send`, and the caller may try another; from
then on the status has gone out, and a failure ends the stream with an error event in OpenAI's
shape. However it ends, the reservation is released and Ray's stream closed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import structlog
from fastapi import Request
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from starlette.responses import JSONResponse, Response

from router.core import Decision
from router.errors import ApiError, engine_failed, from_engine
from router.http_app import EndedStream
from router.live import LiveRouter
from router.messages import as_events, decision_headers, pinned, tokens_in
from router.observer import RequestObserver
from router.terms import Terms, terms_of

log = structlog.get_logger(__name__)

DEAD_WORKER = (RayActorError, BackPressureError)

Call = Callable[[Any, str, Request], AsyncGenerator[Any, None]]
Ended = Callable[[str, int], None]


class Delivery:
    """Sends a decided request to its worker."""

    def __init__(self, call: Call, observer: RequestObserver, timeout_s: float) -> None:
        """`call` hands body, method and pinned request to Ray; `timeout_s` is to the first item."""
        self._call, self._observer, self._timeout_s = call, observer, timeout_s

    async def send(
        self,
        live: LiveRouter,
        decision: Decision,
        body: Any,
        method: str,
        request: Request,
        ended: Ended,
    ) -> Response:
        """The response, begun; `ended` is called with end and status once it is over.

        Raises:
            ApiError: the engine refused or failed, or was too late; `ended` is not called.
            DEAD_WORKER: the worker is gone; nothing was sent to the client.
        """
        request_id = decision.request_id
        self._observer.sent(request_id, decision.worker, time.time())
        stream = self._call(body, method, pinned(request, decision.worker))
        end = "error"
        try:
            async with asyncio.timeout(terms_of(request).patience_s(self._timeout_s)):
                first = await anext(stream)
            item = first[0] if isinstance(first, list) and first else first
            if hasattr(item, "error"):
                raise from_engine(item)
            headers = decision_headers(decision)
            live.first_token(request_id)
            self._observer.first_token(request_id, time.time())
            if hasattr(item, "model_dump"):
                content = item.model_dump()
                count = (content.get("usage") or {}).get("completion_tokens", 0)
                live.tokens(request_id, count)
                terms_of(request).generated(count)
                end = "done"
                ended(end, 200)
                return JSONResponse(content, headers=headers)
            end = ""
            return self._streamed(live, request_id, first, stream, headers, ended)
        except (ApiError, *DEAD_WORKER):
            raise
        except asyncio.CancelledError:
            end = "client_gone"
            raise
        except TimeoutError:
            terms_of(request).check()
            raise ApiError(
                504, f"No token within {self._timeout_s:g} s.",
                kind="server_error", code="timeout",
            ) from None  # fmt: skip
        except Exception as error:
            log.exception("engine_error", request_id=request_id, exc_info=error)
            raise engine_failed() from None
        finally:
            if end:
                live.release(request_id, end)
                await stream.aclose()

    def _streamed(
        self,
        live: LiveRouter,
        request_id: str,
        first: Any,
        stream: AsyncGenerator[Any, None],
        headers: dict[str, str],
        ended: Ended,
    ) -> Response:
        async def over() -> None:
            live.release(request_id, "client_gone")
            await stream.aclose()
            record = live.records.get(request_id)
            ended(record.end if record is not None and record.end else "client_gone", 200)

        return EndedStream(
            self._relay(live, request_id, first, stream),
            over,
            media_type="text/event-stream",
            headers=headers,
        )

    async def _relay(
        self, live: LiveRouter, request_id: str, first: Any, stream: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[str, None]:
        end = "client_gone"
        try:
            packet = as_events(first)
            live.tokens(request_id, tokens_in(packet))
            yield packet
            async for item in stream:
                packet = as_events(item)
                live.tokens(request_id, tokens_in(packet))
                yield packet
            if not packet.rstrip().endswith("[DONE]"):
                yield "data: [DONE]\n\n"
            end = "done"
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            # The status has gone out; an event in OpenAI's shape is the only way left to tell.
            end = "error"
            log.warning("stream_broken", request_id=request_id, error=type(error).__name__)
            yield f"data: {json.dumps(engine_failed().body())}\n\n"
        finally:
            live.release(request_id, end)
            await stream.aclose()
