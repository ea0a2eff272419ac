"""Which requests are in a replica, and how much work of its worker they ask for.

Each request is reported when it comes, with what its ingress expected of it, and when it is over;
every router learns it from there, and so knows of the requests that it did not send. Those messages
may be dropped, so now and then the report stream corrects itself by `present`. The ingress also
sends the seconds that it predicted: from these the autoscaler learns the backlog, and how much of
the worker's time is asked for by what arrives.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict

from kappa.protocol import (
    DEVICE_TOKENS_KEY,
    GPU_S_KEY,
    HOST_TOKENS_KEY,
    LINK_S_KEY,
    PROMPT_TOKENS_KEY,
    REQUEST_ID_KEY,
    Arrival,
)
from workers.request_metadata import seconds_of, token_count

# What arrived counts less and less: after so many seconds by a factor of e.
_WINDOW_S = 30.0


@dataclass(slots=True)
class _Entry:
    """count: an id may be used twice at a time. link_s, gpu_s: predicted, until it is prefilled."""

    arrival: Arrival
    link_s: float
    gpu_s: float
    count: int = 0


class InFlight:
    """Requests from their arrival to their end. Safe between threads.

    Args:
        send: takes messages for `workers.report_stream`; called where requests arrive and end.
        max_sequences: requests that the engine serves at once.
    """

    def __init__(
        self, send: Callable[[dict[str, object]], None], max_sequences: int, now_s: float
    ) -> None:
        self._send = send
        self._max_sequences = max(max_sequences, 1)
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._start_s = self._seen_s = now_s
        self._link_s = self._gpu_s = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def arrived(self, body: Any, now_s: float) -> str:
        """A request came; returns the id to end it by, "" if no ingress of ours sent it."""
        metadata: Mapping[str, Any] = getattr(body, "vllm_xargs", None) or {}
        request_id = str(metadata.get(REQUEST_ID_KEY, ""))
        if not request_id:
            return ""
        arrival = _expected(request_id, metadata, body)
        link_s, gpu_s = seconds_of(metadata.get(LINK_S_KEY)), seconds_of(metadata.get(GPU_S_KEY))
        with self._lock:
            self._fade(now_s)
            self._link_s += link_s
            self._gpu_s += gpu_s
            entry = self._entries.setdefault(request_id, _Entry(arrival, link_s, gpu_s))
            entry.count += 1
            first = entry.count == 1
        if first:
            self._send({"kind": "arrive", **asdict(arrival)})
        return request_id

    def prefilled(self, request_id: str) -> None:
        """Its prompt is computed; unknown ids are ignored."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is not None:
                entry.link_s = entry.gpu_s = 0.0

    def ended(self, request_id: str) -> None:
        """A request is over, however it ended; unknown ids are ignored."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is None:
                return
            entry.count -= 1
            last = not entry.count
            if last:
                del self._entries[request_id]
        if last:
            self._send({"kind": "finish", "request_id": request_id})

    def present(self) -> dict[str, Arrival]:
        """All that are here, oldest first."""
        with self._lock:
            return {name: entry.arrival for name, entry in self._entries.items()}

    def backlog_s(self) -> tuple[float, float]:
        """Predicted seconds (link, gpu) of the requests that wait for their first token."""
        with self._lock:
            entries = list(self._entries.values())
        return sum(entry.link_s for entry in entries), sum(entry.gpu_s for entry in entries)

    def demand(self, now_s: float) -> float:
        """Share of the worker's time that is asked for: of its link or its gpu by what arrives, or
        of its places by what is open, whichever is most."""
        with self._lock:
            self._fade(now_s)
            # While it has not run for a whole window yet, what came is taken to go on.
            seen_s = max(now_s - self._start_s, 1.0)
            window_s = _WINDOW_S * -math.expm1(-seen_s / _WINDOW_S)
            arriving = max(self._link_s, self._gpu_s) / window_s
            return max(arriving, len(self._entries) / self._max_sequences)

    def _fade(self, now_s: float) -> None:
        factor = math.exp(-max(now_s - self._seen_s, 0.0) / _WINDOW_S)
        self._link_s, self._gpu_s = self._link_s * factor, self._gpu_s * factor
        self._seen_s = max(now_s, self._seen_s)


def _expected(request_id: str, metadata: Mapping[str, Any], body: Any) -> Arrival:
    """What its ingress expects of a request, by its metadata and its body."""
    device = token_count(metadata.get(DEVICE_TOKENS_KEY))
    host = token_count(metadata.get(HOST_TOKENS_KEY))
    fields = vars(body)
    return Arrival(
        request_id,
        device_tokens=device,
        host_tokens=host,
        new_tokens=max(token_count(metadata.get(PROMPT_TOKENS_KEY)) - device - host, 0),
        max_tokens=token_count(fields.get("max_completion_tokens") or fields.get("max_tokens")),
    )
