"""Envoy's access log over gRPC: how every request ended, and every attempt at a server that failed.

Envoy sends entries some milliseconds after the fact, many in one message. The log of requests has
the name `REQUESTS`, that of failed attempts `ATTEMPTS`; both hold `TO_ID_HEADER`, without which
no decider saw the request, and it is of no interest here.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Its handlers of forks, which it installs when it is imported, may end a child before its exec.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
import grpc.aio
import structlog

from kappa.protocol import TO_ID_HEADER
from router.api.app import places_of
from router.gateway.access_log import StreamAccessLogsMessage, StreamAccessLogsResponse
from router.gateway.spec import ATTEMPTS, REQUESTS

log = structlog.get_logger(__name__)

_SERVICE, _METHOD = "envoy.service.accesslog.v3.AccessLogService", "StreamAccessLogs"
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
    # Envoy's response flags, by their names in protobuf.
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

    # The last server never saw the request.
    unreached = _Flagged(
        "upstream_connection_failure no_healthy_upstream upstream_overflow dns_resolution_failure"
    )
    # The connection to the server broke after it had some of the request.
    broken = _Flagged(
        "upstream_connection_termination upstream_remote_reset upstream_protocol_error"
    )
    # Nothing came for longer than it may take.
    late = _Flagged(
        "upstream_request_timeout stream_idle_timeout duration_timeout "
        "upstream_max_stream_duration_reached"
    )
    client_gone = _Flagged(
        "downstream_connection_termination downstream_remote_reset downstream_protocol_error"
    )


class Ends:
    """The service; `async with` runs it on a Unix socket.

    Args:
        ended, failed: called with every request's end, and every failed attempt's.
        goes_on: called with the id of a request that Envoy reports to be still in flight.
        cut: called when a stream of requests' ends itself ends, as all do when Envoy is killed.
    """

    def __init__(
        self, socket: Path, ended: Callable[[StreamEnd], None],
        failed: Callable[[StreamEnd], None], goes_on: Callable[[str], None],
        cut: Callable[[], None],
    ) -> None:  # fmt: skip
        self._socket, self._cut = socket, cut
        self._heard = {REQUESTS: ended, ATTEMPTS: failed}
        self._goes_on = goes_on

    async def __aenter__(self) -> Ends:
        size = [("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES)]
        self._server = grpc.aio.server(options=size)
        handler = grpc.stream_unary_rpc_method_handler(
            self._follow,
            StreamAccessLogsMessage.FromString,
            StreamAccessLogsResponse.SerializeToString,
        )
        services = grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler})
        self._server.add_generic_rpc_handlers((services,))
        self._server.add_insecure_port(f"unix:{self._socket}")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    async def _follow(self, messages: AsyncIterator[Any], context: object) -> Any:
        """One of Envoy's streams; its first message says which log it is of."""
        name = ""
        try:
            async for message in messages:
                name = message.identifier.log_name or name
                heard = self._heard.get(name)
                if heard is None:
                    continue
                for entry in message.http_logs.log_entry:
                    try:
                        self._hear(entry, heard)
                    except Exception as error:
                        # One that cannot be taken must not cost those behind it.
                        log.error(
                            "end_not_taken", error=type(error).__name__, places=places_of(error)
                        )  # fmt: skip
        finally:
            if name == REQUESTS:
                self._cut()
        return StreamAccessLogsResponse()

    def _hear(self, entry: Any, heard: Callable[[StreamEnd], None]) -> None:
        request_id = entry.request.request_headers.get(TO_ID_HEADER)
        if not request_id:
            return
        if entry.common_properties.intermediate_log_entry:
            self._goes_on(request_id)
        else:
            heard(end_of(request_id, entry))


def end_of(request_id: str, entry: Any) -> StreamEnd:
    """What an entry of the log says."""
    common, answer = entry.common_properties, entry.response
    first_s = None
    if common.HasField("time_to_first_upstream_rx_byte"):
        first_s = common.time_to_first_upstream_rx_byte.ToMilliseconds() / 1e3
    return StreamEnd(
        request_id, answer.response_code.value,
        frozenset(flag.name for flag, _ in common.response_flags.ListFields()),
        answer.response_body_bytes, common.duration.ToMilliseconds() / 1e3, first_s,
        _address(common), max(common.upstream_request_attempt_count, 1),
    )  # fmt: skip


def _address(common: Any) -> str:
    """The server's, as `ServerEndpoint.address` writes it."""
    socket = common.upstream_remote_address.socket_address
    if not socket.address:
        return ""
    host = f"[{socket.address}]" if ":" in socket.address else socket.address
    return f"{host}:{socket.port_value}"
