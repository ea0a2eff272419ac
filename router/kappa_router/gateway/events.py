"""Envoy's access log: how every request ended, and every attempt at a server that failed.

Envoy sends entries (`kappa_router.gateway.access_log`) some milliseconds after the fact, many in
one message. The log of requests has the tag `REQUESTS`, that of failed attempts `ATTEMPTS`; both
hold `TO_ID_HEADER`, without which no decider saw the request, and it is of no interest here.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import msgspec
import structlog

from kappa_router.api.app import places_of
from kappa_router.gateway.access_log import BEGINS, LogEntry, decode
from kappa_router.gateway.spec import ATTEMPTS, REQUESTS

log = structlog.get_logger(__name__)

_MAX_MESSAGE_BYTES = 16 << 20


class _Flagged:
    """Whether Envoy set one of these response flags."""

    def __init__(self, flags: str) -> None:
        self._flags = frozenset(flags.split())

    def __get__(self, end: StreamEnd, kind: type) -> bool:
        return not self._flags.isdisjoint(end.flags)


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The end of a request, or of one attempt at a server."""

    request_id: str
    # 0 if no answer began.
    status: int
    # Envoy's response flags, as it abbreviates them.
    flags: frozenset[str] = frozenset()
    # Of the answer's body.
    sent_bytes: int = 0
    duration_s: float = 0.0
    # Address of the last server; empty if none was tried.
    upstream: str = ""
    # Of a foreign server's answer that came to its end: the server that it names, its events, and
    # its last bytes.
    told: str = ""
    events: int = 0
    tail: bytes | None = None

    # The last server never saw the request.
    unreached = _Flagged("UF UH UO DF")
    # The connection to the server broke after it had some of the request.
    broken = _Flagged("UC UR UPE")
    # Nothing came for longer than it may take.
    late = _Flagged("UT SI DT UMSDR")
    client_gone = _Flagged("DC DR DPE")


class EndListener(Protocol):
    """Hears how requests end, how attempts failed, and which requests Envoy still has in flight.

    cut: a connection of requests' ends itself ended, as all do when Envoy is killed.
    """

    def ended(self, end: StreamEnd) -> None: ...
    def failed(self, failure: StreamEnd) -> None: ...
    def goes_on(self, request_id: str) -> None: ...
    def cut(self) -> None: ...


class Ends:
    """The socket to which Envoy logs; `async with` listens there."""

    def __init__(self, socket: Path, listener: EndListener) -> None:
        self._socket, self._listener = socket, listener
        self._heard = {REQUESTS: listener.ended, ATTEMPTS: listener.failed}
        self.connections: set[_LogConnection] = set()

    async def __aenter__(self) -> Ends:
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _LogConnection(self), str(self._socket)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in list(self.connections):
            connection.transport.abort()

    def over(self, name: str) -> None:
        """A connection of that log ended."""
        if name == REQUESTS:
            self._listener.cut()

    def take(self, name: str, entry: LogEntry) -> None:
        """Hear an entry of that log."""
        heard = self._heard.get(name)
        if heard is None or not entry.id:
            return
        try:
            if entry.goes_on:
                self._listener.goes_on(entry.id)
            else:
                heard(end_of(entry.id, entry))
        except Exception as error:
            # One that cannot be taken must not cost those behind it.
            log.error("end_not_taken", error=type(error).__name__, places=places_of(error))


class _LogConnection(asyncio.Protocol):
    """One of Envoy's connections, which only tells; at its `over` it says which log it was of."""

    transport: asyncio.Transport

    def __init__(self, ends: Ends) -> None:
        self._ends, self._name = ends, ""
        self._rest = b""  # of a message that has not come whole

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass.
        self._ends.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._ends.connections.discard(self)
        self._ends.over(self._name)

    def data_received(self, data: bytes) -> None:
        *whole, last = BEGINS.split(self._rest + data)
        for message in filter(None, whole):
            if not self._taken(message):
                log.error("ends_malformed", why="a message is none")
        self._rest = b"" if not last or self._taken(last) else last
        if len(self._rest) > _MAX_MESSAGE_BYTES:
            log.error("ends_malformed", why="a message is too long")
            self.transport.abort()

    def _taken(self, message: bytes) -> bool:
        """Take a message's entries; False for one that is not whole."""
        try:
            self._name, entries = decode(message)
        except msgspec.DecodeError:
            return False
        for _, entry in entries:
            self._ends.take(self._name, entry)
        return True


def end_of(request_id: str, entry: LogEntry) -> StreamEnd:
    """The end that an entry of the log tells."""
    return StreamEnd(
        request_id, entry.status or 0, frozenset((entry.flags or "").split(",")) - {"", "-"},
        entry.sent_bytes or 0, (entry.duration_ms or 0) / 1e3,
        entry.upstream or "", entry.told or "", int(entry.events or 0),
        None if entry.tail is None else entry.tail.encode(),
    )  # fmt: skip
