"""Envoy's log of requests and attempts, as it is written. Pure.

It is Fluentd's forward protocol: messages of msgpack with a tag and entries, one after the other on
a connection. Envoy's gRPC log says the same, and costs its reader four threads' waking for each
message instead of one's.
"""

from __future__ import annotations

import re

import msgspec

from kappa.protocol import TO_ID_HEADER
from kappa_router.gateway.spec import ATTEMPTS, REQUESTS

RECORD: dict[str, str] = {
    "id": f"%REQ({TO_ID_HEADER})%", "status": "%RESPONSE_CODE%", "flags": "%RESPONSE_FLAGS%",
    "sent_bytes": "%BYTES_SENT%", "duration_ms": "%DURATION%",
    "upstream": "%UPSTREAM_REMOTE_ADDRESS%", "log": "%ACCESS_LOG_TYPE%",
}  # fmt: skip
"""What Envoy writes of each, in its own terms; what it does not know is null."""
ANSWER = "kappa.answer"
"""Under this name `answer.lua` keeps what it saw of a foreign server's answer."""
FOREIGN_RECORD = RECORD | {
    name: f"%DYNAMIC_METADATA({ANSWER}:{name})%" for name in ("from", "events", "tail")
}
"""The same before foreign servers, which report nothing."""


class LogEntry(msgspec.Struct, rename={"told": "from"}):
    """An entry as `RECORD` has Envoy write it. flags: its response flags, as it abbreviates them,
    by comma. told, events, tail: of a foreign answer that ended; see `StreamEnd`."""

    id: str | None = None
    status: int | None = None
    flags: str | None = None
    sent_bytes: int | None = None
    duration_ms: int | None = None
    upstream: str | None = None
    log: str | None = None
    told: str | None = None
    events: str | None = None
    tail: str | None = None

    @property
    def goes_on(self) -> bool:
        """Whether it is of a request that has not ended."""
        return self.log == "DownstreamPeriodic"


Message = tuple[str, list[tuple[int, LogEntry]]]
"""A tag, and entries with their times."""
decode = msgspec.msgpack.Decoder(Message).decode
BEGINS = re.compile(rb"(?=\x92[\xa0-\xbf](?:%b|%b))" % (REQUESTS.encode(), ATTEMPTS.encode()))
"""The beginning of a message; nothing within one looks like it, since clients' texts are ASCII."""
