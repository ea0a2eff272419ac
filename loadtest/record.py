"""One request of a load test: when it was due, sent and answered, and what the cluster told of it.

All times are seconds since the run began, on one monotonic clock. A record is made when a request
is sent and written to the journal as one JSON line when it has ended; nothing changes it after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgspec

ERROR_KINDS: Mapping[str, str] = {
    "connect": "no connection, or it broke before an answer began",
    "timeout": "no end within the time allowed",
    "401": "the endpoint knows no such key",
    "429": "too many requests",
    "503": "the endpoint says that it cannot serve now",
    "http_NNN": "any other status, NNN being the status",
    "cut": "the stream ended without its end marker",
    "empty": "the stream ended without a token",
    "bad_json": "an event that is not the JSON of OpenAI's protocol",
    "protocol": "an answer that is not HTTP, or not a stream of events",
    "stream_error": "the endpoint reported an error inside the stream",
    "prompt": "the prompt could not be made; nothing was sent",
    "cancelled": "the run was stopped before the answer ended",
}
"""Kinds of errors that `Record.error` may hold besides the empty string, and what they mean."""


@dataclass(slots=True)
class Record:
    """What became of one request. Times in seconds since the run began.

    session, turn (from 0), tenant: whose request it was; attempt: from 0, above it a retry.
    scheduled_s: when it was due, which is its session's arrival, or its predecessor's end plus the
    pause; latency counts from here, also if sending was late (coordinated omission). sent_s: when
    the bytes were handed over (of the last attempt); first_token_s, last_token_s: arrival of the
    first and last chunk with output, None without one; ended_s: end of the answer, or of the
    attempt to get one.
    input_tokens, output_tokens: as asked; generated_tokens: as told by the endpoint's usage, else
    chunks with output; prompt_tokens: as told by usage, else None. cached_tokens, new_tokens: as
    expected with an unlimited cache. gaps_s: between chunks with output.
    status: HTTP status, 0 without an answer; error: one of `ERROR_KINDS` or empty; error_detail:
    for people, at most a line; retried: the errors of the attempts before, in order.
    request_id, node, paced, reason, ratio, crit, predicted_ttft_s: from the response headers of our
    cluster; empty or None elsewhere. predicted, actual: the decision as `GET /v1/decisions` tells
    it, with queue_s, load_s, compute_s, ttft_s and token counts; None where it was not told.
    """

    session: str
    turn: int
    tenant: str = ""
    attempt: int = 0
    scheduled_s: float = 0.0
    sent_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    generated_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    new_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    status: int = 0
    error: str = ""
    error_detail: str = ""
    retried: list[str] = field(default_factory=list)
    request_id: str = ""
    node: str = ""
    paced: bool = False
    reason: str = ""
    ratio: float | None = None
    crit: float | None = None
    predicted_ttft_s: float | None = None
    predicted: dict[str, Any] | None = None
    actual: dict[str, Any] | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What names the request in its run: session and turn."""
        return self.session, self.turn

    @property
    def ttft_s(self) -> float | None:
        """Seconds from when it was due to its first chunk with output; None without one."""
        return None if self.first_token_s is None else self.first_token_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per later token, by tokens and not by chunks; None for one token or none."""
        later = self.generated_tokens - 1
        if self.first_token_s is None or self.last_token_s is None or later < 1:
            return None
        return (self.last_token_s - self.first_token_s) / later

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        """Rebuild from `to_dict`.

        Raises:
            ValueError: an unknown field, one of another kind, or none that names the request.
        """
        unknown = sorted(set(data) - _FIELDS)
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}; a record has {sorted(_FIELDS)}")
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"not a record: {error}") from None


_FIELDS = frozenset(f.name for f in fields(Record))
