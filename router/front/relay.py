"""A request passed on to a server, and its answer back, byte for byte.

A server that fails before the first byte of its answer may be followed by one other; from then on
what it sends is what the client gets. A client that leaves closes the connection to the server.
Every wait has a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import replace
from typing import Any

import aiohttp
import structlog
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from router.api import errors
from router.api.app import Inbound, inbound_of
from router.api.errors import ApiError
from router.api.metadata import DEADLINE_HEADER, SESSION_HEADER, decision_headers
from router.api.tenants import Places
from router.decision import NoWorkerError, OverloadedError, RouteRequest
from router.front.backend import KEY_HEADERS, Call, Head
from router.front.facts import usage_in
from router.front.front import DECIDED_PATHS, Flying, Front
from router.live.waiting import Wait, WorkerLostError

log = structlog.get_logger(__name__)

_ATTEMPTS = 2
# Answers by which a server says that it failed, or has no room: another may do better.
_FULL, _FAILED, _LATE = (429,), (500, 502, 503, 504), 504
_MOST_KEPT = 1 << 16
_TAIL = 4096
_TOKEN_MARKS = (b'"choices"', b"delta")
_REST_S = 2.0


class Unserved(Exception):
    """A server did not serve a request. end: how it ended there (`LiveRouter.release`); reached:
    whether the server may have seen it; answer: what it said instead, if anything."""

    def __init__(self, end: str, why: str, *, reached: bool = True) -> None:
        super().__init__(why)
        self.end, self.why, self.reached = end, why, reached
        self.answer: tuple[Head, bytes] | None = None


class Relay:
    """The ASGI application behind all paths that are not our own."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self._keyed = bool(front.settings.tenants.digests)
        self._places = Places(front.settings.router.max_queue, shared=self._keyed)
        self._open: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; ends when its client has left."""
        inbound, live = inbound_of(Request(scope)), self.front.live
        request_id, tenant = inbound.request_id, inbound.tenant
        record = live.records.get(request_id)
        if request_id in self._open or (record is not None and record.tenant != tenant.name):
            request_id = f"{request_id}-{uuid.uuid4().hex[:8]}"
        if not self._places.take(request_id, tenant):
            limit = self._places.limit
            raise errors.QUEUE_FULL(limit=limit, retry_after_s=live.retry_after_s())
        self._open.add(request_id)
        inbound.accepted = True  # What fails from here on is no fault of its body.
        passage = _Passage(self.front, inbound, request_id, send)
        try:
            await _unless_gone(receive, passage.serve(_call_of(scope, inbound, self._keyed)))
        except ApiError as error:
            live.answered(tenant.name, error.status, error.code)
            raise
        finally:
            self._open.discard(request_id)
            self._places.leave(request_id)
        if passage.status:
            live.answered(tenant.name, passage.status)


def _call_of(scope: Scope, inbound: Inbound, keyed: bool) -> Call:
    query = scope.get("query_string", b"").decode("latin-1")
    path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
    headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in scope["headers"]}
    if keyed:  # No server needs the keys that are ours, or may log one.
        headers = {n: v for n, v in headers.items() if n not in KEY_HEADERS}
    headers["x-request-id"] = inbound.request_id
    return Call(scope["method"], f"{path}?{query}" if query else path, headers, inbound.body)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work unless the client leaves first."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
    finally:
        for task in (watching, working):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await working


class _Passage:
    """One request on its way; status: of the answer that has begun, 0 until then."""

    def __init__(self, front: Front, inbound: Inbound, request_id: str, send: Send) -> None:
        self._front, self._live, self._inbound = front, front.live, inbound
        self._request_id, self._send = request_id, send
        self.status = 0
        self._streamed = self._has_deadline = False

    async def serve(self, call: Call) -> None:
        """Send the request to a server; once more to another. Raises ApiError."""
        path = call.target.partition("?")[0]
        wanted = await self._front.read(path, call.body)
        wanted.session = call.headers.get(SESSION_HEADER) or wanted.session
        self._streamed = wanted.streamed
        self._has_deadline = DEADLINE_HEADER in call.headers
        routed = self._front.request(self._request_id, wanted)
        if self._inbound.lease is not None and wanted.tokens is not None:
            now_s = time.monotonic()
            self._inbound.lease.reserve(len(wanted.tokens), wanted.max_tokens, now_s)
        harmless = call.method in ("GET", "HEAD") or path in DECIDED_PATHS
        last: Unserved | None = None
        for attempt in range(_ATTEMPTS):
            try:
                flying = self._front.decide(routed, self._inbound.tenant.name)
            except OverloadedError as error:
                raise errors.OVERLOADED(reason=error, retry_after_s=error.retry_after_s) from None
            except NoWorkerError as error:
                await self._give_up(last, str(error))
                return
            try:
                await self._attempt(flying, routed, call)
                return
            except Unserved as failure:
                log.warning(
                    "backend_failed", request_id=self._request_id, worker=flying.decision.worker,
                    attempt=attempt, why=failure.why,
                )  # fmt: skip
                last = failure
                if failure.reached and not harmless:
                    break
                if attempt + 1 < _ATTEMPTS:
                    self._live.retried(self._request_id, failure.end)
                    tried = routed.exclude | {flying.decision.worker}
                    routed = replace(routed, exclude=tried, retry=True)
        await self._give_up(last, "two servers failed on this request")

    async def _give_up(self, last: Unserved | None, why: str) -> None:
        """What the last server said is the answer; if it said nothing, ours."""
        if last is not None and last.answer is not None:
            head, body = last.answer
            await self._begin(head, {})
            await self._send({"type": "http.response.body", "body": body})
            return
        if last is not None:
            why = f"{why}: {last.why}"
        raise errors.NO_WORKER(why=why, retry_after_s=self._live.retry_after_s())

    @property
    def _patience_s(self) -> float:
        settings = self._front.settings
        return settings.first_byte_s if self._streamed else settings.router.request_timeout_s

    async def _attempt(self, flying: Flying, routed: RouteRequest, call: Call) -> None:
        """One server's answer, sent on; Unserved if nothing of it was."""
        worker, waits = flying.decision.worker, self._live.members.waits
        stream = flying.backend.stream(call, flying.via)
        wait, end = waits.begin(worker), "client_gone"
        try:
            end = await self._relay(flying, routed, stream, wait)
        except Unserved as failure:
            # A real balancer's failure says nothing of the server that it was thought to choose.
            end = "unsent" if flying.via else failure.end
            raise
        finally:
            waits.end(worker, wait)
            self._front.ended(flying, end)
            await stream.aclose()

    async def _relay(
        self, flying: Flying, routed: RouteRequest, stream: AsyncGenerator[Head | bytes, None],
        wait: Wait,
    ) -> str:  # fmt: skip
        """Send on what comes; how it ended."""
        head, part = await self._first(flying, stream, wait)
        # What is late by the client's own deadline says nothing of the server.
        late = head.status == _LATE and self._has_deadline
        if head.status in (*_FULL, *_FAILED) and not late:
            end = "worker_full" if head.status in _FULL else "error"
            failure = Unserved(end, f"it answered {head.status}")
            kept = [pair for pair in head.headers if pair[0] != b"content-length"]
            failure.answer = Head(head.status, kept), await _rest(stream, wait, part)
            raise failure
        if flying.via:
            header = self._front.settings.present_header.lower().encode()
            given = dict(head.headers).get(header, b"").decode("latin-1")
            self._front.answered(flying, routed, given)
        begun = self._token_in(head, part)
        decided = flying.decision.informed
        await self._begin(head, decision_headers(flying.decision) if decided else {})
        tail, events = b"", 0
        try:
            while part:
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
                tail = (tail + part)[-_TAIL:]
                events += part.count(b"data: {") if head.streamed else 0
                part = await _next(stream, wait, self._front.settings.router.request_timeout_s)
                begun = begun or self._token_in(head, part)
        except _BROKEN as error:
            log.warning("answer_broken", request_id=self._request_id, error=repr(error))
            if head.streamed:
                event = json.dumps(errors.ENGINE_FAILED().body())
                await self._send(
                    {"type": "http.response.body", "body": f"\n\ndata: {event}\n\n".encode()}
                )
            # Else it is left unfinished: the client must not take what it has for all of it.
            return "worker_died" if isinstance(error, WorkerLostError) else "error"
        usage = usage_in(tail)
        if usage is not None:
            self._front.used(flying, usage)
        generated = usage.completion_tokens if usage is not None else events
        self._live.tokens(self._request_id, generated)
        if self._inbound.lease is not None:
            self._inbound.lease.generated(generated)
        await self._send({"type": "http.response.body", "body": b""})
        return "done" if head.status < 400 else "refused"

    def _token_in(self, head: Head, part: bytes) -> bool:
        """Whether a part of a stream has a token, the first one. `/v1/responses` announces itself
        before it computes anything, and comments keep connections open."""
        found = head.streamed and any(mark in part for mark in _TOKEN_MARKS)
        if found:
            self._live.first_token(self._request_id)
        return found

    async def _first(
        self, flying: Flying, stream: AsyncGenerator[Head | bytes, None], wait: Wait
    ) -> tuple[Head, bytes]:
        """The head of an answer and the first of its body; Unserved if there is none."""
        limit_s = self._patience_s
        try:
            head = await wait.next(stream, limit_s)
            return head, await _next(stream, wait, limit_s)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            if not flying.via:
                flying.backend.unreachable(error)
            raise Unserved("worker_died", "it cannot be reached", reached=False) from None
        except WorkerLostError as error:
            raise Unserved("worker_died", str(error)) from None
        except TimeoutError:
            raise Unserved("error", f"no byte within {limit_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unserved("error", f"its answer broke: {type(error).__name__}") from None

    async def _begin(self, head: Head, more: dict[str, str]) -> None:
        """Send the head of an answer on, with some headers of ours."""
        self.status = head.status
        own = {"x-request-id": self._request_id, **more}
        kept = [pair for pair in head.headers if pair[0].decode("latin-1") not in own]
        kept += [(name.encode(), value.encode()) for name, value in own.items()]
        await self._send({"type": "http.response.start", "status": head.status, "headers": kept})


_BROKEN = (aiohttp.ClientError, WorkerLostError, TimeoutError, OSError)


async def _next(stream: AsyncGenerator[Head | bytes, None], wait: Wait, timeout_s: float) -> bytes:
    """The next part of a body; empty at its end."""
    try:
        part: bytes = await wait.next(stream, timeout_s)
    except StopAsyncIteration:
        return b""
    return part


async def _rest(stream: AsyncGenerator[Head | bytes, None], wait: Wait, part: bytes) -> bytes:
    """A failed server's explanation, as far as it is short and comes soon."""
    body = part
    with contextlib.suppress(*_BROKEN):
        while part and len(body) <= _MOST_KEPT:
            part = await _next(stream, wait, _REST_S)
            body += part
    return body
