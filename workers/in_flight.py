"""Says which requests are in a replica, to the replica's report stream.

Each request is reported when it comes, with what its ingress expected of it, and when it is over;
every router learns it from there, and so knows of the requests that it did not send. Those messages
may be dropped, so now and then the stream corrects itself by `present`. One per replica, called on
its event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import asdict

from kappa.protocol import (
    DEVICE_TOKENS_KEY,
    HOST_TOKENS_KEY,
    PROMPT_TOKENS_KEY,
    REQUEST_ID_KEY,
    Arrival,
)

Send = Callable[[dict[str, object]], None]

# No prompt and no answer is longer; a client may name any number.
_MOST_TOKENS = 2**31 - 1


class InFlight:
    """Requests by how often they are here: an id may be used twice at a time."""

    def __init__(self, send: Send) -> None:
        """`send` takes messages for `workers.report_stream`."""
        self._send = send
        self._here: dict[str, tuple[int, Arrival]] = {}

    def __len__(self) -> int:
        return len(self._here)

    def arrived(self, body: Any) -> str:
        """A request came; returns the id to end it by, "" if no ingress of ours sent it."""
        words: Mapping[str, Any] = getattr(body, "vllm_xargs", None) or {}
        request_id = str(words.get(REQUEST_ID_KEY, ""))
        if not request_id:
            return ""
        count, arrival = self._here.get(request_id) or (0, _expected(request_id, words, body))
        self._here[request_id] = count + 1, arrival
        if not count:
            self._send({"kind": "arrive", **asdict(arrival)})
        return request_id

    def present(self) -> dict[str, Arrival]:
        """All that are here, oldest first; may be called on another thread."""
        return {name: arrival for name, (_, arrival) in self._here.copy().items()}

    def ended(self, request_id: str) -> None:
        """A request is over; one that is not here is let be."""
        count, arrival = self._here.pop(request_id, (0, None))
        if arrival is not None and count > 1:
            self._here[request_id] = count - 1, arrival
        elif arrival is not None:
            self._send({"kind": "finish", "request_id": request_id})


def _expected(request_id: str, words: Mapping[str, Any], body: Any) -> Arrival:
    """What its ingress expects of a request, by its metadata and its body."""
    device, host = _count(words.get(DEVICE_TOKENS_KEY)), _count(words.get(HOST_TOKENS_KEY))
    given = vars(body)
    return Arrival(
        request_id,
        device_tokens=device,
        host_tokens=host,
        new_tokens=max(_count(words.get(PROMPT_TOKENS_KEY)) - device - host, 0),
        max_tokens=_count(given.get("max_completion_tokens") or given.get("max_tokens")),
    )


def _count(value: Any) -> int:
    """Tokens as the ingress or a client wrote them; what is no count is none."""
    # Before `int`, which refuses infinity; NaN is not above zero.
    return int(min(value, _MOST_TOKENS)) if isinstance(value, int | float) and value > 0 else 0
