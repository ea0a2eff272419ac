"""Envoy's access log: how every request ended, and every attempt at a server that failed.

Envoy sends entries (`kappa_router.gateway.access_log`) some milliseconds after the fact, many in
one message. The log of requests has the tag `REQUESTS`, that of failed attempts `ATTEMPTS`; both
hold `TO_ID_HEADER`, without which no decider saw the request, and it is of no interest here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

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
    """How a request ended, or one attempt at a server."""

    request_id: str
    # 0 if no answer began.
    status: int
    # Envoy's response flags, as it abbreviates them.
    flags: frozenset[str] = frozenset()
    # Of the answer's body.
    sent_bytes: int = 0
    duration_s: float = 0.0
    # From the request to the first byte of the last server's answer; None if there was none.
    first_s: float | None = None
    # Address of the last server; empty if none was tried.
    upstream: str = ""
    # Servers tried.
    attempts: int = 1
    # Of a foreign server's answer that came to its end: whom it names as its server, the events
    # that it had, and its last bytes.
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


class Ends:
    """The socket to which Envoy logs; `async with` listens there.

    Args:
        ended, failed: called with every request's end, and every failed attempt's.
        goes_on: called with the id of a request that Envoy reports to be still in flight.
        cut: called when a connection of requests' ends itself ends, as all do when Envoy is killed.
    """

    def __init__(
        self, socket: Path, ended: Callable[[StreamEnd], None],
        failed: Callable[[StreamEnd], None], goes_on: Callable[[str], None],
        cut: Callable[[], None],
    ) -> None:  # fmt: skip
        self._socket, self._cut = socket, cut
        self._heard = {REQUESTS: ended, ATTEMPTS: failed}
        self._goes_on = goes_on
        self._connections: set[_LogConnection] = set()

    async def __aenter__(self) -> Ends:
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _LogConnection(self._take, self._connections, self._over), str(self._socket)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in list(self._connections):
            connection.transport.abort()

    def _over(self, name: str) -> None:
        if name == REQUESTS:
            self._cut()

    def _take(self, name: str, entry: LogEntry) -> None:
        heard = self._heard.get(name)
        if heard is None or not entry.id:
            return
        try:
            if entry.goes_on:
                self._goes_on(entry.id)
            else:
                heard(end_of(entry.id, entry))
        except Exception as error:
            # One that cannot be taken must not cost those behind it.
            log.error("end_not_taken", error=type(error).__name__, places=places_of(error))


class _LogConnection(asyncio.Protocol):
    """One of Envoy's connections, which only tells; at its `over` it says which log it was of."""

    transport: asyncio.Transport

    def __init__(
        self, take: Callable[[str, LogEntry], None], connections: set[_LogConnection],
        over: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._take, self._connections, self._over = take, connections, over
        self._name = ""
        self._rest = b""  # of a message that has not come whole

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass.
        self._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        self._over(self._name)

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
            self._take(self._name, entry)
        return True


def end_of(request_id: str, entry: LogEntry) -> StreamEnd:
    """What an entry of the log says."""
    return StreamEnd(
        request_id, entry.status or 0, frozenset((entry.flags or "").split(",")) - {"", "-"},
        entry.sent_bytes or 0, (entry.duration_ms or 0) / 1e3,
        None if entry.first_ms is None else entry.first_ms / 1e3,
        entry.upstream or "", max(entry.attempts or 1, 1), entry.told or "",
        int(entry.events or 0), None if entry.tail is None else entry.tail.encode(),
    )  # fmt: skip
