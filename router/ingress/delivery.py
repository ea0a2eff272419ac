"""One attempt to have a request served by one worker: send it there, relay what comes back.

A worker that fails before its first item raises out of `send`, and the caller may try another; from
then on the status has gone out, and a failure ends the stream with an error event in OpenAI's
shape. However it ends, the reservation is released and Ray's stream closed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import structlog
from fastapi import Request
from starlette.responses import JSONResponse, Response

from kappa.protocol import ERROR_EVENT
from router.decision import Decision
from router.errors import ApiError, engine_failed
from router.ingress.app import EndedStream, places_of
from router.ingress.failures import error_in, raise_error_item, raise_refused, worker_failed
from router.ingress.messages import approx_headers, as_events, decision_headers, pinned, tokens_in
from router.ingress.terms import Terms, terms_of
from router.live.live_router import LiveRouter
from router.live.waiting import Wait
from router.observing.observer import RequestObserver
from router.rollout import Unsteered

log = structlog.get_logger(__name__)

Call = Callable[[Any, str, Request], AsyncGenerator[Any, None]]
Ended = Callable[[str, int], None]


@dataclass(slots=True, eq=False)
class _Attempt:
    """One request at one worker; end: how it ended, empty until then."""

    live: LiveRouter
    decision: Decision | Unsteered
    stream: AsyncGenerator[Any, None]
    wait: Wait
    terms: Terms
    end: str = ""

    def generated(self, tokens: int) -> None:
        """Output tokens go out."""
        self.live.tokens(self.decision.request_id, tokens)
        self.terms.generated(tokens)

    async def over(self, end: str) -> None:
        """Release and close. The first end counts: by a second one, which may come late, the same
        id can be another request's."""
        if self.end:
            return
        self.end = end
        try:
            self.terms.over(end)
            self.live.release(self.decision.request_id, end)
        finally:
            self.live.members.waits.end(self.decision.worker, self.wait)
            await self.stream.aclose()


class Delivery:
    """Sends a decided request to its worker."""

    def __init__(self, call: Call, observer: RequestObserver, timeout_s: float) -> None:
        """`call` hands body, method and pinned request to Ray; `timeout_s` is to the first item."""
        self._call, self._observer, self._timeout_s = call, observer, timeout_s

    async def send(
        self,
        live: LiveRouter,
        decision: Decision | Unsteered,
        body: Any,
        method: str,
        request: Request,
        ended: Ended,
    ) -> Response:
        """The response, begun; `ended` is called with end and status once it is over.

        Raises:
            ApiError: the engine refused the request, or was too late; `ended` is not called.
            WorkerFailed: the worker did not serve it; nothing was sent to the client.
        """
        request_id = decision.request_id
        self._observer.sent(request_id, decision.worker, time.time())
        pool = decision.pool if isinstance(decision, Unsteered) else None
        stream = self._call(body, method, pinned(request, decision.worker, pool))
        wait, terms = live.members.waits.begin(decision.worker), terms_of(request)
        attempt = _Attempt(live, decision, stream, wait, terms)
        end = "error"
        try:
            first = await _first(wait, stream, terms.patience_s(self._timeout_s), body)
            item = first[0] if isinstance(first, list) and first else first
            raise_error_item(item, body)
            told = {} if isinstance(decision, Unsteered) else decision_headers(decision)
            headers = {**told, **approx_headers(body)}
            live.first_token(request_id)
            self._observer.first_token(request_id, time.time())
            if hasattr(item, "model_dump"):
                content = item.model_dump()
                attempt.generated((content.get("usage") or {}).get("completion_tokens", 0))
                end = "done"
                ended(end, 200)
                return JSONResponse(content, headers=headers)
            end = ""
            return self._streamed(attempt, first, headers, ended)
        except ApiError:
            # A passed deadline says nothing of the worker.
            end = "deadline" if terms.expired else "refused"
            raise
        except asyncio.CancelledError:
            end = "client_gone"
            raise
        except TimeoutError:
            end = "deadline" if terms.expired else "timeout"
            terms.check()
            raise ApiError(
                504, f"No token within {self._timeout_s:g} s.",
                kind="server_error", code="timeout",
            ) from None  # fmt: skip
        except Exception as error:
            failure = worker_failed(error)
            end = failure.end
            live.members.failed(decision.worker, failure.why)
            if failure is not error and failure.why == "error":
                # Not its text, which may quote the prompt.
                log.error(
                    "engine_error", request_id=request_id, error=type(error).__name__,
                    places=places_of(error),
                )  # fmt: skip
            raise failure from None
        finally:
            if end:
                await attempt.over(end)

    def _streamed(
        self, attempt: _Attempt, first: Any, headers: dict[str, str], ended: Ended
    ) -> Response:
        async def over() -> None:
            await attempt.over("client_gone")
            ended(attempt.end, 200)

        return EndedStream(
            self._relay(attempt, first),
            over,
            media_type="text/event-stream",
            headers=headers,
        )

    async def _relay(self, attempt: _Attempt, first: Any) -> AsyncGenerator[str, None]:
        live, request_id = attempt.live, attempt.decision.request_id
        end, item, packet = "client_gone", first, ""
        try:
            while True:
                packet = as_events(item)
                told = error_in(packet)
                if told is not None:
                    end = "error"
                    before = packet[: packet.find(ERROR_EVENT)]
                    yield f"{before}{_event(told)}"
                    return
                attempt.generated(tokens_in(packet))
                yield packet
                try:
                    item = await attempt.wait.next(attempt.stream)
                except StopAsyncIteration:
                    break
            if not packet.rstrip().endswith("[DONE]"):
                yield "data: [DONE]\n\n"
            end = "done"
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            # The status has gone out; an event in OpenAI's shape is the only way left to tell.
            failure = worker_failed(error)
            end = failure.end
            live.members.failed(attempt.decision.worker, failure.why)
            log.warning(
                "stream_broken", request_id=request_id, why=failure.why, error=type(error).__name__
            )
            yield _event(engine_failed())
        finally:
            await attempt.over(end)


async def _first(wait: Wait, stream: Any, timeout_s: float, body: Any) -> Any:
    """A stream's first item; what is the fault of the request's own grammar as ApiError 400."""
    try:
        return await wait.next(stream, timeout_s)
    except Exception as error:
        raise_refused(error, body)
        raise


def _event(error: ApiError) -> str:
    return f"data: {json.dumps(error.body())}\n\n"
