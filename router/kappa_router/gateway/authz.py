"""HTTP/1.1 on a Unix socket, by which Envoy asks the decider and tells it of foreign answers.

Envoy's `ext_authz` asks under `ADMIT` and `DECIDE`, Lua under `AGAIN`; it tells under `FIRST`. A
raw protocol, since an HTTP library would cost more than a decision. Only Envoy can reach the
socket, since its folder is private; a malformed question closes its connection. An Envoy that
gives a question up closes its connection, too: the decision is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import msgspec
import structlog

from kappa_router.api import errors
from kappa_router.api.app import places_of
from kappa_router.api.checks import digits
from kappa_router.gateway.spec import (
    ADMIT,
    ADMITTER_HEADER,
    AGAIN,
    DECIDE,
    FIRST,
    SLOT_HEADER,
    TOLD_HEADER,
    DeciderSlot,
    veiled,
)

log = structlog.get_logger(__name__)

ATTEMPT_HEADER = "x-envoy-attempt-count"
MAX_HEAD_BYTES = 128 << 10
"""Of a question; Envoy bounds a client's headers first."""
# A connection that ends so soon after an answer was given up before Envoy read it.
_UNREAD_S = 1.0
_BACKLOG = 4096
_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A request that Envoy asks about."""

    method: str
    # Path and query as the client sent them.
    target: str
    # By lower-case names; the first of one name.
    headers: Mapping[str, str]
    # None before it is buffered (`ADMIT`).
    body: bytes | None


class Go(NamedTuple):
    """The request goes on."""

    # Headers for its server.
    upstream: Mapping[str, str] = {}
    # Headers for the client's answer.
    client: Mapping[str, str] = {}


class Refuse(NamedTuple):
    """The answer that the client gets instead."""

    status: int
    headers: Mapping[str, str]
    body: bytes


Verdict = Go | Refuse


Decide = Callable[[Inquiry], Awaitable[Verdict]]


class Echo(Protocol):
    """Hears the outcome of a decision. told: the server that an answer names, if it does;
    `unread` follows a `Go` that Envoy has probably not taken note of."""

    def again(self, request_id: str, attempt: int) -> Awaitable[Verdict]: ...
    def first(self, request_id: str, told: str) -> None: ...
    def unread(self, answer: Go) -> None: ...


class AuthzServer:
    """The socket of a slot and its connections; `async with` runs it."""

    def __init__(self, decide: Decide, echo: Echo, slot: DeciderSlot, max_body_bytes: int) -> None:
        self.decide, self.echo, self.slot = decide, echo, slot
        self.max_body_bytes = max_body_bytes
        self.connections: set[_Connection] = set()

    async def __aenter__(self) -> AuthzServer:
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _Connection(self), str(self.slot.decider_socket), backlog=_BACKLOG
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in list(self.connections):
            connection.abort()


class BrokenProtocolError(ValueError):
    """Who asks does not speak as the protocol has it."""


class _Head(NamedTuple):
    method: str
    target: str
    headers: dict[str, str]
    body_bytes: int


class _Connection(asyncio.Protocol):
    """One connection: one question at a time, answered before the next is read."""

    def __init__(self, server: AuthzServer) -> None:
        self._server, slot = server, server.slot
        # Envoy comes back to who decided, and with a body to who has room for it.
        self._decided = {SLOT_HEADER: str(slot.number)}
        self._admitted = {ADMITTER_HEADER: str(slot.decider_socket)}
        self._transport: asyncio.Transport
        self._unread = b""  # of a head that has not come whole
        self._head: _Head | None = None
        self._parts: list[bytes] = []  # of the body that follows it
        self._missing_bytes = 0
        self._later = bytearray()  # what came before the answer
        self._task: asyncio.Task[None] | None = None
        self._last: Go | None = None
        self._last_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass.
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        if self._task is not None:
            self._task.cancel()
        elif self._last is not None and time.monotonic() - self._last_s < _UNREAD_S:
            self._server.echo.unread(self._last)

    def abort(self) -> None:
        self._transport.abort()

    # -- questions ----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        try:
            while data and self._task is None:
                data = self._body(data) if self._head is not None else self._begun(data)
        except BrokenProtocolError as error:
            self._malformed(str(error))
            return
        self._later += data
        if len(self._later) > MAX_HEAD_BYTES:
            self._malformed("too much before the answer")

    def _malformed(self, why: str) -> None:
        log.error("authz_malformed", why=why)
        self._transport.abort()

    def _begun(self, data: bytes) -> bytes:
        """Take the head of a question, as far as it is there; returns the bytes behind it."""
        data = self._unread + data
        end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if end < 0 and len(data) >= MAX_HEAD_BYTES:
            raise BrokenProtocolError("the head is too long")
        if end < 0:
            self._unread = data
            return b""
        self._unread, self._last = b"", None
        self._head = head = _head(data[:end])
        if head.body_bytes > self._server.max_body_bytes:
            raise BrokenProtocolError("the body is too long")
        self._missing_bytes = head.body_bytes
        return self._body(data[end + 4 :])

    def _body(self, data: bytes) -> bytes:
        """Take the body, as far as it is there, and ask once it is whole; returns the rest."""
        part = data[: self._missing_bytes]
        self._missing_bytes -= len(part)
        if part:
            self._parts.append(part)
        if not self._missing_bytes:
            head, self._head = self._head, None
            assert head is not None
            # Of one part there is no copy.
            body, self._parts = b"".join(self._parts), []
            self._ask(head, body)
        return data[len(part) :]

    def _ask(self, head: _Head, body: bytes) -> None:
        echo, target = self._server.echo, head.target
        if target.startswith(FIRST):
            echo.first(target[len(FIRST) :], head.headers.get(TOLD_HEADER, ""))
            self._answer(Go(), head)
        elif target.startswith(AGAIN):
            attempt = _count(head.headers.get(ATTEMPT_HEADER, "1"))
            self._start(echo.again(target[len(AGAIN) :], attempt), head)
        elif target.startswith(DECIDE + "/"):
            inquiry = Inquiry(head.method, target[len(DECIDE) :], head.headers, body)
            self._start(self._asked(inquiry), head, self._decided)
        elif target.startswith(ADMIT + "/"):
            inquiry = Inquiry(head.method, target[len(ADMIT) :], head.headers, None)
            self._start(self._asked(inquiry), head, self._admitted)
        else:
            raise BrokenProtocolError("nothing is known by that path")

    # -- answers ------------------------------------------------------------------------------

    async def _asked(self, inquiry: Inquiry) -> Verdict:
        verdict = await self._server.decide(inquiry)
        if isinstance(verdict, Go):
            return verdict
        return verdict._replace(status=veiled(verdict.status))

    def _start(
        self, answer: Awaitable[Verdict], head: _Head, ours: Mapping[str, str] = _NOTHING
    ) -> None:
        self._task = asyncio.get_running_loop().create_task(self._answered(answer, head, ours))

    async def _answered(
        self, answer: Awaitable[Verdict], head: _Head, ours: Mapping[str, str]
    ) -> None:
        """Answer, with headers of `ours` where the request goes on."""
        verdict = await verdict_of(answer)
        if isinstance(verdict, Go) and ours:
            verdict = verdict._replace(upstream={**verdict.upstream, **ours})
        self._task = None
        self._answer(verdict, head)
        if self._later:
            later, self._later = bytes(self._later), bytearray()
            self.data_received(later)

    def _answer(self, verdict: Verdict, head: _Head) -> None:
        if isinstance(verdict, Go):
            self._last, self._last_s = verdict, time.monotonic()
        if not self._transport.is_closing():
            self._transport.write(_rendered(verdict, without_body=head.method == "HEAD"))


async def verdict_of(answer: Awaitable[Verdict]) -> Verdict:
    """Wait for it; one that crashes is a 500."""
    try:
        return await answer
    except Exception as error:
        # Its message may quote a prompt.
        log.error("decision_crashed", error=type(error).__name__, places=places_of(error))
        return refusal(errors.INTERNAL())


def refusal(error: errors.ApiError, *, anthropic: bool = False) -> Refuse:
    """An error as the answer to its client, in OpenAI's shape or in Anthropic's."""
    body = error.message_body() if anthropic else error.body()
    headers = {"content-type": "application/json", **error.headers()}
    return Refuse(error.status, headers, msgspec.json.encode(body))


def _head(text: bytes) -> _Head:
    """A question's first line and headers; raises BrokenProtocolError."""
    first, *lines = text.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise BrokenProtocolError("the first line is none")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise BrokenProtocolError("a header is none")
        headers.setdefault(name.lower(), value.strip())
    if "transfer-encoding" in headers:
        raise BrokenProtocolError("the body is in chunks")
    return _Head(words[0], words[1], headers, _count(headers.get("content-length", "0")))


def _count(text: str) -> int:
    count = digits(text, 12)
    if count is None:
        raise BrokenProtocolError("a count is none")
    return count


def _rendered(verdict: Verdict, *, without_body: bool) -> bytes:
    """An answer as it is written; a line break in a header would begin another."""
    if isinstance(verdict, Go):
        status, body = 200, b""
        headers = {**verdict.upstream, **verdict.client}  # Envoy tells them apart by name.
    else:
        status, body, headers = verdict.status, verdict.body, {**verdict.headers}
    lines = [f"HTTP/1.1 {status} {'OK' if status == 200 else 'Refused'}"]
    for name, value in headers.items():
        lines.append(f"{name}: {value}".replace("\r", " ").replace("\n", " "))
    lines.append(f"content-length: {len(body)}\r\n\r\n")
    head = "\r\n".join(lines).encode("latin-1", errors="replace")
    return head if without_body else head + body
