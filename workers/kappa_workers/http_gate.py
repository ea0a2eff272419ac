"""Stands between a worker's own HTTP port and its engine's application: a pure ASGI middleware.

Only the cluster's fronts may ask: each request carries the cluster's secret. What the front decided
comes in headers (`kappa.protocol`): fields that the body gets (tenant, weight, charges, expected
tokens, salt, priority), and names of fields that it loses. No client can send these headers, since
the front removes them. The gate counts a request from its arrival to its end, so that every router
hears of it. It answers for an engine that drains, has died, or stands still as a front found out
(`GIVE_UP_PATH`): 503 with a header by which the front may try the request at another worker. The
decider judges which request may have killed an engine.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import msgspec
import structlog

from kappa.asgi import Message, Receive, body_of, replayed
from kappa.protocol import (
    ERROR_EVENT,
    GIVE_UP_PATH,
    RETRY_DIED,
    RETRY_ELSEWHERE,
    RETRY_HEADER,
    TO_BODY_HEADER,
    TO_DROP_HEADER,
    TO_SECRET_HEADER,
    TO_SHOW_HEADER,
    EngineDiedError,
)
from kappa_workers import generated
from kappa_workers.in_flight import InFlight
from kappa_workers.request_metadata import tenant_of

log = structlog.get_logger(__name__)

Scope = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 64 << 20
# Of a client's headers what an engine's application may see: it also reads some that name a rank of
# it, and answers any website that names itself.
_SEEN = frozenset(
    (b"accept", b"content-type", b"host", b"traceparent", b"tracestate", b"user-agent",
     b"x-request-id")
)  # fmt: skip
_ARGUMENTS = "vllm_xargs"
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_AGAIN_S = 1
# Its errors have Anthropic's shape.
_MESSAGES = "/v1/messages"
_LEAVES = "this worker takes no more requests"
_BROKE = "the engine failed while it answered"
# vLLM's error of a request that ended in its scheduler. There are two reasons: a load that failed,
# after which our connectors compute the prompt instead, and a grammar that does not compile.
_ENDED_BY_SCHEDULER = b"Internal server error"
_CONSTRAINTS = ("structured_outputs", "response_format", "text", "tools")
_GRAMMAR = "the schema, expression or grammar of the answer could not be compiled; simplify it"


class _BodyError(Exception):
    """A body that cannot be taken; `args`: status and message."""


class WorkerGate:
    """The middleware around an engine's application.

    Args:
        app: the engine's application.
        secret: what every request must carry; not empty.
        in_flight: counts requests, and reports them.
        check_health: raises `EngineDiedError` if the engine is dead.
        own: what the worker itself does for its decider, by path; each gives JSON.
        marks: headers that each of the application's answers gets.
    """

    def __init__(
        self,
        app: Application,
        secret: str,
        in_flight: InFlight,
        check_health: Callable[[], Awaitable[None]],
        own: Mapping[str, Callable[[], Awaitable[Any]]] = MappingProxyType({}),
        marks: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        if not secret:
            raise ValueError("a worker's port needs the cluster's secret")
        self._app, self._secret = app, secret.encode()
        self._in_flight, self._check_health, self._own = in_flight, check_health, own
        self._marks = [(name.encode(), value.encode()) for name, value in marks.items()]
        self.draining = False
        """Whether requests that have not begun are sent elsewhere."""
        self.open = 0
        """Requests that are being answered."""
        self._answering: set[asyncio.Timeout] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of a front."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            return
        headers = dict(reversed(scope["headers"]))  # Of several with one name, the first.
        given = headers.get(TO_SECRET_HEADER.encode(), b"")
        if not hmac.compare_digest(given, self._secret):
            await _answer(send, 403, "this port is for the cluster's fronts alone")
            return
        own = self._own.get(scope["path"])
        if own is not None:
            await _send_json(send, 200, json.dumps(await own()).encode())
            return
        if scope["path"] == GIVE_UP_PATH:
            await _answer(send, 200, f"gave up {self.give_up()} requests")
            return
        if self.draining:
            await _answer(send, 503, _LEAVES, retry=RETRY_ELSEWHERE)
            return
        try:
            too_large = _BodyError(413, f"a body has at most {MAX_BODY_BYTES} bytes")
            body = await body_of(receive, MAX_BODY_BYTES, too_large)
            if body is None:
                return
            sets = _json_object(headers.get(TO_BODY_HEADER.encode(), b""))
            drops = headers.get(TO_DROP_HEADER.encode(), b"").decode("latin-1")
            body, fields = _rewritten(body, sets, [one for one in drops.split(",") if one])
            show = _json_object(headers.get(TO_SHOW_HEADER.encode(), b""))
        except _BodyError as error:
            await _answer(send, *error.args)
            return
        kept = [pair for pair in scope["headers"] if pair[0] in _SEEN]
        kept.append((b"content-length", str(len(body)).encode()))
        shown = [(name.encode(), str(value).encode()) for name, value in show.items()]
        await self._serve({**scope, "headers": kept}, body, fields, shown, receive, send)

    async def _serve(
        self, scope: Scope, body: bytes, fields: Any, shown: Headers, receive: Receive, send: Send
    ) -> None:
        request_id = self._in_flight.arrived(fields, time.monotonic())
        tally = generated.begin(tenant_of(getattr(fields, _ARGUMENTS, None)))
        self.open += 1
        anthropic = str(scope["path"]).startswith(_MESSAGES)
        shown = [*self._marks, *shown]
        reply = _GateReply(send, self._fault, shown, fields.constrained, anthropic)
        given_up = asyncio.timeout(None)
        try:
            async with given_up:
                self._answering.add(given_up)
                await self._app(scope, replayed(body, receive), reply)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # Not its text, which may quote a prompt.
            log.error("request_crashed", error=type(error).__name__, request_id=request_id)
            await reply.broke(await self._fault())
        finally:
            self._answering.discard(given_up)
            self.open -= 1
            self._in_flight.ended(request_id, tally.tokens, failed=reply.failed)

    async def _fault(self) -> str:
        """Why no request can be served here, as `RETRY_HEADER` says it; empty: nothing is wrong."""
        try:
            await self._check_health()
        except EngineDiedError:
            return RETRY_DIED
        except Exception:  # What else makes a worker unfit is said by its health.
            return RETRY_ELSEWHERE
        return ""

    def give_up(self) -> int:
        """End the open requests, since the engine stands still: requests without a first byte may
        be tried elsewhere, begun streams end with an error event. Returns how many there were."""
        now_s, given_up = asyncio.get_running_loop().time(), self._answering
        self._answering = set()
        for one in given_up:
            one.reschedule(now_s)
        return len(given_up)

    async def drained(self, within_s: float) -> int:
        """Take no more requests and wait for those that are open; how many are left then."""
        self.draining = True
        end_s = time.monotonic() + within_s
        while self.open and time.monotonic() < end_s:
            await asyncio.sleep(0.05)
        return self.open


class _GateReply:
    """Passes the application's answer on, and words failures before its first byte."""

    def __init__(
        self, send: Send, fault: Callable[[], Awaitable[str]], shown: Headers, constrained: bool,
        anthropic: bool,
    ) -> None:  # fmt: skip
        """`shown`: headers of an answer by the engine; `constrained`: by a grammar; `anthropic`:
        the shape of its errors."""
        self._send, self._fault, self._shown, self._constrained = send, fault, shown, constrained
        self._anthropic = anthropic
        self.failed = False
        """Whether the engine failed behind the first byte."""
        self._begun = self._over = self._replaced = self._events = False
        # What fails before its first byte may be tried elsewhere: its head waits for that.
        self._head: Message | None = None

    async def __call__(self, message: Message) -> None:
        if self._replaced or self._over:
            return
        if message["type"] == "http.response.start":
            if message["status"] >= 500:
                fault = await self._fault()
                if fault:
                    await self._instead(fault)
                    return
                # It lives, and computed nothing that the client has seen: another may do better.
                retry = (RETRY_HEADER.encode(), RETRY_ELSEWHERE.encode())
                message = {**message, "headers": [*message.get("headers", ()), retry]}
            elif message["status"] < 400:
                message = {**message, "headers": [*message.get("headers", ()), *self._shown]}
            kinds = [v for n, v in message.get("headers", ()) if n.lower() == b"content-type"]
            self._events = any(kind.startswith(b"text/event-stream") for kind in kinds)
            self._head = message
            return
        if message["type"] == "http.response.body":
            self._over = not message.get("more_body", False)
            if not message.get("body") and not self._over:
                return
        if self._head is not None:
            head, self._head = self._head, None
            if await self._failed(head["status"], message.get("body", b"")):
                return
            self._begun = True
            await self._send(head)
        elif self._events and message.get("body", b"").startswith(ERROR_EVENT.encode()):
            self.failed = True
        await self._send(message)

    async def _failed(self, status: int, body: bytes) -> bool:
        """Whether an answer is replaced: vLLM begins streams with 200, whatever comes first."""
        told = self._events and body.startswith(ERROR_EVENT.encode())
        if told:
            error = _error_in(body)
            code = error.get("code")
            status = code if isinstance(code, int) and 400 <= code < 600 else 500
        if status >= 500 and self._constrained and _ENDED_BY_SCHEDULER in body:
            # Its client's fault, which would be the same elsewhere.
            self._replaced = True
            await _answer(
                self._send, 400, _GRAMMAR, code="invalid_grammar", anthropic=self._anthropic
            )
        elif self._anthropic and not self._events and 400 <= status < 500:
            # What vLLM refuses before its Messages API begins it words for OpenAI's clients.
            self._replaced = True
            message = str(_error_in(body).get("message", ""))
            await _answer(self._send, status, message, anthropic=True)
        elif told and status < 500:
            self._replaced = True
            await _send_json(self._send, status, json.dumps({"error": error}).encode())
        elif told:
            await self._instead(await self._fault() or RETRY_ELSEWHERE)
        return self._replaced

    async def broke(self, fault: str) -> None:
        """The application raised. Begun streams end with an error event; begun answers of other
        kinds stay incomplete, so that the client does not take them for whole."""
        if self._replaced or self._over:
            return
        self.failed = self._begun
        if not self._begun:
            await self._instead(fault or RETRY_ELSEWHERE)
        elif self._events:
            error = _error(500, _BROKE, anthropic=self._anthropic)
            named = f"event: error\ndata: {error}\n\n"
            event = named if self._anthropic else f"data: {error}\n\ndata: [DONE]\n\n"
            await self._send({"type": "http.response.body", "body": f"\n\n{event}".encode()})
        self._over = True

    async def _instead(self, retry: str) -> None:
        self._replaced = True
        await _answer(self._send, 503, _BROKE, retry=retry, anthropic=self._anthropic)


def _json_object(header: bytes) -> Mapping[str, Any]:
    if not header:
        return {}
    try:
        found = json.loads(header)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _BodyError(400, f"header {TO_BODY_HEADER} holds no JSON object")
    return found


def _rewritten(
    body: bytes, sets: Mapping[str, Any], drops: list[str]
) -> tuple[bytes, SimpleNamespace]:
    """The body with some top-level fields set and others left out, and the fields that are counted:
    the front's arguments and the client's bound on generated tokens. No other value is parsed."""
    if not body:
        return body, SimpleNamespace(constrained=False)
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        if sets or drops:
            raise _BodyError(400, "the body is not a JSON object") from None
        return body, SimpleNamespace(constrained=False)
    constrained = any(bytes(fields.get(name, b"null")) != b"null" for name in _CONSTRAINTS)
    counted = SimpleNamespace(vllm_xargs=sets.get(_ARGUMENTS), constrained=constrained)
    for name in _LIMITS:
        if name in fields:
            counted.max_tokens = msgspec.json.decode(fields[name])
            break
    if not sets and not drops:
        return body, counted
    for name in drops:
        fields.pop(name, None)
    for name, value in sets.items():
        fields[name] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields), counted


def _error(status: int, message: str, code: str = "", *, anthropic: bool = False) -> str:
    ours = status >= 500
    if anthropic:
        kind = "api_error" if ours else "invalid_request_error"
        return json.dumps({"type": "error", "error": {"type": kind, "message": message}})
    kind = "server_error" if ours else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": code or status}
    return json.dumps({"error": error})


def _error_in(body: bytes) -> Mapping[str, Any]:
    """The error of a stream's first event; empty if it cannot be read."""
    try:
        error = json.loads(body.split(b"\n", 1)[0].removeprefix(b"data: "))["error"]
    except ValueError:
        return {}
    return error if isinstance(error, dict) else {}


async def _answer(
    send: Send, status: int, message: str, retry: str = "", code: str = "",
    *, anthropic: bool = False,
) -> None:  # fmt: skip
    headers = []
    if status == 503:
        headers.append((b"retry-after", str(_AGAIN_S).encode()))
    if retry:
        headers.append((RETRY_HEADER.encode(), retry.encode()))
    content = _error(status, message, code, anthropic=anthropic).encode()
    await _send_json(send, status, content, headers)


async def _send_json(send: Send, status: int, content: bytes, headers: Headers = ()) -> None:
    about = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": [*about, *headers]})
    await send({"type": "http.response.body", "body": content})
