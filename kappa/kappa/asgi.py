"""An ASGI request's body: read whole within a bound, then replayed to the application. Pure.

Used by the decider's own paths and by the gate of each worker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


async def body_of(receive: Receive, most_bytes: int, too_large: Exception) -> bytes | None:
    """The whole body; None if the client left. Raises `too_large` if it has more bytes."""
    parts, size_bytes, more = list[bytes](), 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size_bytes += len(parts[-1])
        if size_bytes > most_bytes:
            raise too_large
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body in one piece, then the server's next messages."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return left.pop() if left else await receive()

    return replay
