"""An endpoint picker: the decider behind somebody else's gateway (Gateway API Inference Extension).

The gateway opens a gRPC stream for each HTTP request, sends its head and body, and waits until it
is told which servers may have it, the best first; it goes down that list by itself. Then it sends
the answer, too, from which the end of the request is known. Whatever passes is sent back unchanged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog

from kappa.protocol import ENDPOINT_HEADER, TO_ID_HEADER
from kappa_router.api import errors
from kappa_router.api.app import MESSAGES_PATHS
from kappa_router.api.checks import digits
from kappa_router.api.errors import ApiError
from kappa_router.gateway import ext_proc
from kappa_router.gateway.authz import (
    BrokenProtocolError,
    Decide,
    Go,
    Inquiry,
    Refuse,
    Verdict,
    refusal,
    verdict_of,
)
from kappa_router.gateway.events import StreamEnd
from kappa_router.gateway.ext_proc import MESSAGES, SERVED, SERVICE, SUBSET
from kappa_router.gateway.spec import REMOVED_HEADER, SUBSET_HEADER, TAIL_BYTES, Bounds, Tls

log = structlog.get_logger(__name__)

_HEALTH = "grpc.health.v1.Health"
_SERVING, _NOT_SERVING = 1, 2
# Only we may say these.
_OURS = ("x-kappa-to-", "x-gateway-destination-")
# A body that is not known to be smaller comes once there is room for it.
_LARGE_BYTES = 100_000
# In an event with a token; announcements and comments have neither.
_MARKS, _EVENT = (b'"choices"', b"delta"), b"data: {"
# A gateway that is gone is noticed after twice as long.
_ALIVE_MS = 20_000
# Of a message, besides a part of a body.
_FRAME_BYTES = 1 << 20
# A gateway that sent nothing for so long has heard that this one goes; at most so long it is given.
_QUIET_S, _HEARS_S = 1.0, 10.0


class Watcher(Protocol):
    """Hears what becomes of requests that went on (`kappa_router.gateway.flights`)."""

    def served(self, request_id: str, at: str) -> None: ...
    def first(self, request_id: str, told: str) -> None: ...
    def ended(self, end: StreamEnd) -> None: ...


class Picker:
    """The gRPC server of an endpoint picker, from `start` to `stop`.

    ready: True while a server can be chosen. streams: the most that are open at a time.
    """

    def __init__(
        self, decide: Decide, watcher: Watcher, ready: Callable[[], bool], bounds: Bounds,
        streams: int,
    ) -> None:  # fmt: skip
        self.decide, self.watcher, self.bounds = decide, watcher, bounds
        self._ready, self._stopped = ready, asyncio.Event()
        self._leaving, self._asked_s = False, 0.0
        options = (
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", bounds.body_bytes + _FRAME_BYTES),
            ("grpc.keepalive_time_ms", _ALIVE_MS),
            ("grpc.keepalive_timeout_ms", _ALIVE_MS),
        )
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=streams)
        process = grpc.stream_stream_rpc_method_handler(
            self._process, _reader("ProcessingRequest"), _bytes
        )
        check = grpc.unary_unary_rpc_method_handler(
            self._check, _reader("HealthCheckRequest"), _bytes
        )
        handlers = {SERVICE: {"Process": process}, _HEALTH: {"Check": check}}
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(*one) for one in handlers.items()]
        )

    async def start(self, host: str, port: int, tls: Tls | None) -> None:
        """Listen; port 0 is any free one, and without TLS it is plain text. Raises OSError, which
        says what to change."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                pair = Path(tls.key).read_bytes(), Path(tls.cert).read_bytes()
                credentials = grpc.ssl_server_credentials([pair])
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            raise OSError(
                f"cannot listen on {address}: end what listens there, or give another epp.port"
            ) from None
        await self._server.start()

    async def stop(self, drain_s: float = 0.0) -> None:
        """Say that it does not serve, take what comes until the gateway has heard that, then wait
        for open requests; for so long in all."""
        # Quiet counts from now on: a gateway that has few requests has not heard yet.
        self._leaving, self._asked_s = True, (now_s := time.monotonic())
        hears_s, until_s = now_s + min(_HEARS_S, drain_s / 2), now_s + drain_s
        while (left_s := min(self._asked_s + _QUIET_S, hears_s) - time.monotonic()) > 0:
            await asyncio.sleep(left_s)
        await self._server.stop(max(until_s - time.monotonic(), 0.0))
        self._stopped.set()

    async def died(self) -> None:
        """Returns once it was stopped."""
        # Who waits for the server itself, and is cancelled, cancels its end.
        await self._stopped.wait()

    async def _process(self, _: Any, context: Any) -> None:
        talk, self._asked_s = _Exchange(self, context), time.monotonic()
        try:
            await talk.run()
        except BrokenProtocolError as error:
            log.error("ext_proc_malformed", why=str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            talk.over()

    async def _check(self, asked: Any, context: Any) -> Any:
        """Health: of `liveness` while this process answers, of all else while it can choose and
        is not about to end."""
        if asked.service not in ("", "liveness", "readiness", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        serves = asked.service == "liveness" or (self._ready() and not self._leaving)
        return MESSAGES["HealthCheckResponse"](status=_SERVING if serves else _NOT_SERVING)


def _reader(name: str) -> Callable[[bytes], Any]:
    return MESSAGES[name].FromString


def _bytes(message: Any) -> bytes:
    return message.SerializeToString()


class _LeftError(Exception):
    """The gateway ended the stream: its client left, or it is done."""


class _Exchange:
    """One HTTP request, from its head to the end of its answer."""

    def __init__(self, picker: Picker, context: Any) -> None:
        self._picker, self._context = picker, context
        self._silent_s = picker.bounds.silent_s
        # As the protocol wants it, where the gateway does not say.
        self._request_mode = self._answer_mode = ext_proc.FULL_DUPLEX
        self._body, self._trailers = b"", False
        self._go: Go | None = None
        self._begun_s = time.monotonic()
        # Of the answer.
        self._status, self._served, self._streamed = 0, "", False
        self._began, self._whole = False, False
        self._sent_bytes = self._events = 0
        self._seam = self._tail = b""
        self._flags: frozenset[str] = frozenset({"DC"})
        self._ahead: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        """Decide about it, and follow its answer. Raises BrokenProtocolError."""
        try:
            message, field, head = await self._read()
            if field != "request_headers":
                raise BrokenProtocolError(f"it begins with {field or 'nothing'}")
            verdict = await self._asked(message, head)
            if isinstance(verdict, Refuse):
                await self._write(ext_proc.refused(*verdict))
                return
            self._go = verdict
            await self._sent_on(verdict, without_body=head.end_of_stream)
            while not self._whole:
                await self._heard(*await self._read())
        except _LeftError:
            pass  # `over` follows.
        except TimeoutError:
            self._flags = frozenset({"SI"})

    async def _read(self) -> tuple[Any, str, Any]:
        """The next message, and what it brings."""
        ahead, self._ahead = self._ahead, None
        async with asyncio.timeout(self._silent_s):
            message = await (ahead or self._context.read())
        if message is grpc.aio.EOF:
            raise _LeftError
        return message, *ext_proc.told_in(message)

    async def _write(self, message: Any) -> None:
        """Send it; raises TimeoutError where the gateway takes nothing for long."""
        async with asyncio.timeout(self._silent_s):
            await self._context.write(message)

    # -- the request --------------------------------------------------------------------------

    async def _asked(self, message: Any, head: Any) -> Verdict:
        given = ext_proc.headers_in(head)
        headers = {name: text for name, text in given.items() if not name.startswith(_OURS)}
        subset = ext_proc.endpoints_in(message, SUBSET)
        if subset is not None:
            headers[SUBSET_HEADER] = ",".join(subset)
        inquiry = Inquiry(headers.get(":method", ""), headers.get(":path", ""), headers, None)
        try:
            self._check_modes(message, head)
            if not head.end_of_stream:
                most = self._picker.bounds.body_bytes
                size = digits(headers.get("content-length", ""), 19)
                if size is not None and size < _LARGE_BYTES:
                    most = min(most, size)
                else:
                    verdict = await verdict_of(self._picker.decide(inquiry))
                    if isinstance(verdict, Refuse):
                        return verdict
                    headers[TO_ID_HEADER] = verdict.upstream[TO_ID_HEADER]
                await self._take_body(most)
        except ApiError as error:
            path = inquiry.target.partition("?")[0]
            return refusal(error, anthropic=path.endswith(MESSAGES_PATHS))
        return await verdict_of(self._picker.decide(replace(inquiry, body=self._body)))

    def _check_modes(self, message: Any, head: Any) -> None:
        """Raises ApiError 503 for a gateway that is set up otherwise than the protocol has it."""
        if message.HasField("protocol_config"):
            told = message.protocol_config
            self._request_mode, self._answer_mode = told.request_body_mode, told.response_body_mode
        duplex = head.end_of_stream or self._request_mode == ext_proc.FULL_DUPLEX
        if message.observability_mode or not duplex:
            log.error(
                "gateway_misconfigured", request_body_mode=self._request_mode,
                observability_mode=message.observability_mode,
                remedy="have the gateway's ext_proc send request bodies FULL_DUPLEX_STREAMED",
            )  # fmt: skip
            raise errors.GATEWAY_MISCONFIGURED()

    async def _take_body(self, most: int) -> None:
        """Take the body, of at most so many bytes, until it ends; raises ApiError 408 and 413."""
        parts, size, whole = list[bytes](), 0, False
        limit_s = self._picker.bounds.body_s
        try:
            async with asyncio.timeout(limit_s):
                while not whole:
                    _, field, told = await self._read()
                    self._trailers = field == "request_trailers"
                    if field == "request_body":
                        parts.append(told.body)
                        size += len(told.body)
                    elif not self._trailers:
                        raise BrokenProtocolError(f"{field or 'nothing'} comes within a body")
                    if size > most:
                        raise errors.BODY_TOO_LARGE(limit_bytes=most)
                    whole = self._trailers or told.end_of_stream
        except TimeoutError:
            raise errors.BODY_TOO_SLOW(limit_s=limit_s) from None
        self._body = b"".join(parts)

    async def _sent_on(self, go: Go, *, without_body: bool) -> None:
        """Tell where it goes, and send its body back."""
        to_server = {name: go.upstream[name] for name in (ENDPOINT_HEADER, "x-request-id")}
        # What a server says must be readable.
        removed = ["accept-encoding", *filter(None, go.upstream.get(REMOVED_HEADER, "").split(","))]
        await self._write(ext_proc.goes_on(to_server, removed))
        if not without_body:
            for part in ext_proc.parts(self._body, is_last=not self._trailers):
                await self._write(part)
        if self._trailers:
            await self._write(ext_proc.unchanged("request_trailers"))
        self._body = b""

    # -- the answer ---------------------------------------------------------------------------

    async def _heard(self, message: Any, field: str, told: Any) -> None:
        """Take a part of the answer, and pass it on. The gateway may end the stream as soon as it
        has the last one, and with it what waits here."""
        assert self._go is not None
        answer = ext_proc.unchanged(field) if field else None
        if field == "response_headers":
            answer = ext_proc.shown(self._go.client)
            self._head(ext_proc.headers_in(told), ext_proc.endpoints_in(message, SERVED))
            self._whole = told.end_of_stream
        elif field == "response_body":
            if self._answer_mode == ext_proc.FULL_DUPLEX:
                answer = ext_proc.streamed(field, told.body, is_last=told.end_of_stream)
            self._part(told.body)
            self._whole = told.end_of_stream
        elif field == "response_trailers":
            self._whole = True
        elif field != "request_trailers":
            raise BrokenProtocolError(f"{field or 'nothing'} comes after a request")
        if not self._whole:
            # grpc tells of a write's end by a thread, for which the next part need not wait.
            self._ahead = asyncio.ensure_future(self._context.read())
        await self._write(answer)

    def _head(self, headers: Mapping[str, str], served: list[str] | None) -> None:
        """Take the head of its answer."""
        assert self._go is not None
        self._status = digits(headers.get(":status", ""), 3) or 0
        kind = headers.get("content-type", "")
        self._streamed = kind.startswith("text/event-stream")
        listed = self._go.upstream[ENDPOINT_HEADER].split(",")
        self._served = (served or listed)[0]
        if self._served != listed[0]:
            self._picker.watcher.served(self._go.upstream[TO_ID_HEADER], self._served)

    def _part(self, body: bytes) -> None:
        """Look at a part of its answer."""
        assert self._go is not None
        self._sent_bytes += len(body)
        if self._streamed:
            if not self._began and any(mark in body for mark in _MARKS):
                self._began = True
                self._picker.watcher.first(self._go.upstream[TO_ID_HEADER], "")
            # What parts an event's beginning stands in no part as a whole.
            text = self._seam + body
            self._events += text.count(_EVENT)
            self._seam = text[1 - len(_EVENT) :]
        self._tail = (self._tail + body[-TAIL_BYTES:])[-TAIL_BYTES:]

    def over(self) -> None:
        """The stream ended, and so did the request."""
        if self._ahead is not None:
            self._ahead.cancel()
        if self._go is None:
            return
        unseen = self._answer_mode == ext_proc.NONE
        # Where bodies are kept from us, so does every answer end.
        whole = self._whole or (unseen and self._status > 0)
        self._picker.watcher.ended(
            StreamEnd(
                self._go.upstream[TO_ID_HEADER], self._status,
                frozenset() if whole else self._flags, self._sent_bytes,
                time.monotonic() - self._begun_s, self._served,
                events=self._events, tail=self._tail if whole and not unseen else None,
            )
        )  # fmt: skip
