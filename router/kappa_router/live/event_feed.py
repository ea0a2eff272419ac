"""The events of one publisher, read so that nothing else has to wait for them.

A worker of ours publishes, or a server that others run, which may send as fast as its link carries.
Other tasks get turns while messages come, a frame is bounded, and a large one is decoded on a
thread. Events that come faster than they are followed are dropped: the connection is cut for a
while, and the reader, who gets a `FloodError`, begins again as after a gap.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kappa_router.index.kv_event_types import Batch, CacheGroups, KVEvent, decode, joined

log = structlog.get_logger(__name__)

_MOST_FRAME_BYTES = 64 << 20
# What waits further back waits at the publisher.
_MOST_WAITING = 16
# Other tasks get a turn after these numbers of messages or lots of events, or that time.
_TURN_MESSAGES, _LOT_EVENTS, _TURN_S = 64, 8, 0.005
_LARGE_BYTES = 256 << 10
# An event takes 5 to 40 us of the loop, and as long again for each `_BYTES_PER_EVENT` of tokens.
_EVENTS_PER_S, _BYTES_PER_EVENT = 10_000.0, 2048
_CONNECTION_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
# libzmq connects again by itself, in a tenth of this, but not to a peer that sent no message.
_RECONNECT_S = 1.0
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
# A publisher that was followed for so long is paused as if for the first time.
_CALM_S = 60.0


class FloodError(Exception):
    """A publisher sends more than is followed; what was lost is not known."""


def bounded_socket(kind: int) -> zmq.asyncio.Socket:
    """A socket of the process' context that takes no frame above 64 MB: libzmq closes the
    connection."""
    socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _MOST_FRAME_BYTES)
    return socket


class EventFeed:
    """A subscription to one publisher; `connect` begins it, `close` ends it.

    A message counts as one event, and for more where it has more events, or 2 kB for each.
    """

    def __init__(self, worker: str, endpoint: str, groups: CacheGroups | None = None) -> None:
        """groups: what other streams of the worker told of its cache groups."""
        self._worker, self._endpoint = worker, endpoint
        self.socket = bounded_socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, _MOST_WAITING)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._monitor = self.socket.get_monitor_socket(_CONNECTION_EVENTS)
        self._left, self._at_s = _EVENTS_PER_S, time.monotonic()
        self._taken, self._turn_s = 0, self._at_s
        self._pauses, self._resumed_s = 0, self._at_s
        self._groups = CacheGroups() if groups is None else groups

    def connect(self) -> None:
        self.socket.connect(self._endpoint)

    def close(self) -> None:
        self.socket.disable_monitor()
        # The loop watches it, so that it would never be collected.
        self._monitor.close(linger=0)
        self.socket.close()

    async def watch(self, changed: Callable[[bool], Any]) -> None:
        """Keep it connected until cancelled; `changed` hears whether it is, whenever that may have
        changed."""
        up = True
        while True:
            try:
                async with asyncio.timeout(None if up else _RECONNECT_S):
                    message = await self._monitor.recv_multipart()
            except TimeoutError:
                self._cut()
                self.connect()
                continue
            up = parse_monitor_message(message)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            changed(up)

    async def receive(self) -> list[bytes]:
        """The frames of the next message. Raises FloodError."""
        await self._turn()
        frames: list[bytes] = await self.socket.recv_multipart()
        self._spend(1 + sum(map(len, frames)) // _BYTES_PER_EVENT)
        return frames

    async def batch(self, payload: bytes, counts: Counter[str]) -> Batch:
        """The events of a message just received (`decode`). Raises ValueError, FloodError."""
        batch = await self.decoded(payload, counts)
        self._spend(len(batch.events) - 1 - len(payload) // _BYTES_PER_EVENT)
        return batch

    async def decoded(self, payload: bytes, counts: Counter[str]) -> Batch:
        """Events of a batch that no message of the feed brought. Raises ValueError."""
        if len(payload) <= _LARGE_BYTES:
            return decode(payload, self._worker, counts, self._groups)
        counted = Counter[str]()
        batch = await asyncio.to_thread(decode, payload, self._worker, counted, self._groups)
        counts.update(counted)
        return batch

    async def hand_over(
        self, events: Sequence[KVEvent], heard: Callable[[list[KVEvent]], Any]
    ) -> None:
        """Call `heard` with all events, a lot at a time, removals `joined`."""
        events = joined(events)
        for start in range(0, len(events), _LOT_EVENTS):
            heard(events[start : start + _LOT_EVENTS])
            await self._turn()

    async def pause(self) -> None:
        """After a FloodError: hear nothing for a while. What was sent by then is lost."""
        now_s = time.monotonic()
        if not self._pauses:
            log.error(
                "kv_events_flood", worker=self._worker, endpoint=self._endpoint,
                most_per_s=int(_EVENTS_PER_S), why="more events than are followed; said once",
            )  # fmt: skip
        if now_s - self._resumed_s > _CALM_S:
            self._pauses = 0
        pause_s = _PAUSES_S[min(self._pauses, len(_PAUSES_S) - 1)]
        self._pauses += 1
        self._cut()
        await asyncio.sleep(pause_s)
        self._resumed_s = time.monotonic()
        self.connect()

    def _cut(self) -> None:
        """Disconnect; what waits is discarded with the connection."""
        with contextlib.suppress(zmq.ZMQError):  # It is cut already.
            self.socket.disconnect(self._endpoint)

    async def _turn(self) -> None:
        """Let other tasks run, if it is their turn: a message that waits is received at once."""
        self._taken += 1
        if self._taken < _TURN_MESSAGES and time.monotonic() - self._turn_s < _TURN_S:
            return
        await asyncio.sleep(0)
        self._taken, self._turn_s = 0, time.monotonic()

    def _spend(self, events: int) -> None:
        now_s = time.monotonic()
        gained = (now_s - self._at_s) * _EVENTS_PER_S
        self._left, self._at_s = min(self._left + gained, _EVENTS_PER_S) - max(events, 0), now_s
        if self._left < 0:
            self._left = 0.0
            raise FloodError(f"{self._worker} sends more than {_EVENTS_PER_S:g} events a second")
