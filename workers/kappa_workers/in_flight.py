"""The requests in a replica, and the work that they ask of its worker. Each is reported
when it comes and when it is over, so every router knows of those that others sent. The decider also
sends the seconds that it predicted: from these the autoscaler learns backlog and demand."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from kappa.protocol import (
    DEVICE_TOKENS_KEY,
    DISK_TOKENS_KEY,
    GPU_S_KEY,
    HOST_TOKENS_KEY,
    LINK_S_KEY,
    PROMPT_TOKENS_KEY,
    REQUEST_ID_KEY,
    Arrival,
)
from kappa_workers.request_metadata import seconds_of, token_count

# Seconds after which an arrival counts less by a factor of e.
_WINDOW_S = 30.0


@dataclass(slots=True)
class _Entry:
    """The requests here with one id."""

    arrival: Arrival
    # Predicted seconds of the link; 0 once its prompt is computed.
    link_s: float
    # Predicted seconds of the GPU; 0 once its prompt is computed.
    gpu_s: float
    # Requests with this id: one may be used twice at a time.
    count: int = 0
    # Tokens of those that ended.
    generated_tokens: int = 0


class InFlightNews(NamedTuple):
    """Requests that came and went since the last news, and all that are here where that was asked
    for."""

    arrived: tuple[Arrival, ...]
    finished: tuple[str, ...]
    generated: dict[str, int]
    failed: tuple[str, ...]
    in_flight: tuple[Arrival, ...] | None


class InFlight:
    """Requests from their arrival to their end. Safe between threads. `changed` is called where
    requests arrive and end; `urgent`: whether there is news."""

    def __init__(self, now_s: float) -> None:
        self.changed: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._arrived: list[str] = []
        self._finished: list[str] = []
        self._generated: dict[str, int] = {}
        self._failed: list[str] = []
        self._start_s = self._seen_s = now_s
        self._link_s = self._gpu_s = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def arrived(self, body: Any, now_s: float) -> str:
        """A request came; returns the id to end it by, "" if no decider of ours sent it."""
        metadata: Mapping[str, Any] = getattr(body, "vllm_xargs", None) or {}
        request_id = str(metadata.get(REQUEST_ID_KEY, ""))
        if not request_id:
            return ""
        device, host, prompt = (
            token_count(metadata.get(key))
            for key in (DEVICE_TOKENS_KEY, HOST_TOKENS_KEY, PROMPT_TOKENS_KEY)
        )
        limit = token_count(getattr(body, "max_tokens", None))
        new, disk = max(prompt - device - host, 0), token_count(metadata.get(DISK_TOKENS_KEY))
        arrival = Arrival(request_id, device, host, new, limit, disk_tokens=min(disk, host))
        link_s, gpu_s = seconds_of(metadata.get(LINK_S_KEY)), seconds_of(metadata.get(GPU_S_KEY))
        with self._lock:
            self._fade(now_s)
            self._link_s += link_s
            self._gpu_s += gpu_s
            entry = self._entries.setdefault(request_id, _Entry(arrival, link_s, gpu_s))
            entry.count += 1
            if entry.count == 1:
                self._arrived.append(request_id)
        self.changed()
        return request_id

    def prefilled(self, request_id: str) -> None:
        """Its prompt is computed; unknown ids are ignored."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is not None:
                entry.arrival = replace(entry.arrival, prefilled=True)
                entry.link_s = entry.gpu_s = 0.0

    def ended(self, request_id: str, generated_tokens: int = 0, *, failed: bool = False) -> None:
        """A request is over, however it ended; unknown ids are ignored. failed: its engine did
        while it answered."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is None:
                return
            entry.count -= 1
            if failed:
                self._failed.append(request_id)
            entry.generated_tokens += generated_tokens
            if not entry.count:
                if entry.generated_tokens:
                    self._generated[request_id] = entry.generated_tokens
                del self._entries[request_id]
                self._finished.append(request_id)
        self.changed()

    @property
    def urgent(self) -> bool:
        return bool(self._arrived or self._finished)

    def news(self, *, everything: bool = False) -> InFlightNews:
        """The news to report; everything: with all requests that are here, oldest first."""
        with self._lock:
            here, finished, generated = self._entries, tuple(self._finished), self._generated
            arrived = tuple(here[name].arrival for name in self._arrived if name in here)
            present = tuple(e.arrival for e in here.values()) if everything else None
            failed = tuple(self._failed)
            self._arrived, self._finished, self._generated, self._failed = [], [], {}, []
        return InFlightNews(arrived, finished, generated, failed, present)

    def last(self, count: int) -> list[str]:
        with self._lock:
            return list(self._entries)[-count:]

    def backlog_s(self) -> tuple[float, float]:
        """Predicted seconds (link, gpu) of the requests that wait for their first token."""
        with self._lock:
            entries = list(self._entries.values())
        return sum(entry.link_s for entry in entries), sum(entry.gpu_s for entry in entries)

    def demand(self, now_s: float, max_sequences: int) -> float:
        """Share of the worker's time that is asked for, the largest of three: of its link and of
        its GPU by arrivals, of its places (requests that the engine serves at once) by open
        requests."""
        with self._lock:
            self._fade(now_s)
            # While it has not run for a whole window yet, what came is taken to go on.
            seen_s = max(now_s - self._start_s, 1.0)
            window_s = _WINDOW_S * -math.expm1(-seen_s / _WINDOW_S)
            arriving = max(self._link_s, self._gpu_s) / window_s
            return max(arriving, len(self._entries) / max(max_sequences, 1))

    def _fade(self, now_s: float) -> None:
        factor = math.exp(-max(now_s - self._seen_s, 0.0) / _WINDOW_S)
        self._link_s, self._gpu_s = self._link_s * factor, self._gpu_s * factor
        self._seen_s = max(now_s, self._seen_s)
