"""Says which requests are in a replica, to the replica's report stream.

Each request is told when it comes, with what its ingress expected of it, and when it is over. Every
router hears it from there, and so knows of the requests that it did not send. One per replica,
called on its event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kappa.report import (
    DEVICE_TOKENS_KEY,
    HOST_TOKENS_KEY,
    PROMPT_TOKENS_KEY,
    REQUEST_ID_KEY,
)

Send = Callable[[dict[str, object]], None]


class InFlight:
    """Requests by how often they are here: an id may be used twice at a time."""

    def __init__(self, send: Send) -> None:
        """`send` takes messages for `workers.report_stream`."""
        self._send = send
        self._here: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._here)

    def arrived(self, body: Any) -> str:
        """A request came; returns the id to end it by, "" if no ingress of ours sent it."""
        words: Mapping[str, Any] = getattr(body, "vllm_xargs", None) or {}
        request_id = str(words.get(REQUEST_ID_KEY, ""))
        if not request_id:
            return ""
        self._here[request_id] = self._here.get(request_id, 0) + 1
        if self._here[request_id] == 1:
            device, host = _count(words, DEVICE_TOKENS_KEY), _count(words, HOST_TOKENS_KEY)
            given = vars(body)
            self._send(
                {
                    "kind": "arrive",
                    "request_id": request_id,
                    "device_tokens": device,
                    "host_tokens": host,
                    "new_tokens": max(_count(words, PROMPT_TOKENS_KEY) - device - host, 0),
                    "max_tokens": _whole(
                        given.get("max_completion_tokens") or given.get("max_tokens")
                    ),
                }
            )
        return request_id

    def ended(self, request_id: str) -> None:
        """A request is over; one that is not here is let be."""
        left = self._here.get(request_id, 0) - 1
        if left > 0:
            self._here[request_id] = left
        elif self._here.pop(request_id, None) is not None:
            self._send({"kind": "finish", "request_id": request_id})


def _count(words: Mapping[str, Any], key: str) -> int:
    return _whole(words.get(key))


def _whole(value: Any) -> int:
    """A count as the ingress or a client wrote it; nonsense counts as none."""
    return int(value) if isinstance(value, int | float) and value == value and value > 0 else 0
