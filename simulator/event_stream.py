"""A node's stream of cache events when batches are lost, come twice, or come late.

The live router's cursor judges what arrives; what it calls a gap leads to a resync with what the
node holds, as live. Every second batch is hit, so that each fault is followed by its discovery.
"""

from __future__ import annotations

from collections.abc import Callable

from router.index.kv_stream import StreamCursor


class EventStream:
    """One node's stream while it is in trouble.

    Args:
        kind: `events_lost`, `events_repeated` or `events_reordered`.
        resync: makes the router forget the node's blocks and hear of all that it holds now.
    """

    def __init__(self, kind: str, resync: Callable[[], None]) -> None:
        self._kind, self._resync = kind, resync
        self._cursor = StreamCursor()
        self._number = 0
        self._late: int | None = None

    def arrives(self) -> bool:
        """The next batch is on its way: whether it is to be applied, and not lost, or told already
        by the resync that it led to."""
        number, self._number = self._number, self._number + 1
        hit = number % 2 == 1
        if hit and self._kind == "events_lost":
            return False
        if hit and self._kind == "events_reordered":
            self._late = number
            return False
        applied = self._receive(number)
        if hit and self._kind == "events_repeated":
            self._receive(number)
        if self._late is not None:
            self._receive(self._late)
            self._late = None
        return applied

    def healed(self) -> None:
        """The trouble is over: what is still missing is found with the next number."""
        if self._cursor.expected != self._number:
            self._resync()

    def _receive(self, number: int) -> bool:
        standing = self._cursor.advance(number)
        if standing == "gap":
            self._resync()
            self._cursor.resume(self._number)
        return standing == "ok"
