"""The way measurements leave an engine's processes: one ZeroMQ PUSH/PULL pair on a Unix socket to
the replica that owns the engine. Sending never blocks and never raises: a lost measurement costs a
little accuracy, a blocked engine costs everybody."""

from __future__ import annotations

import time
from contextlib import suppress

import msgspec
import zmq

_HIGH_WATER_MESSAGES = 10_000
# What may wait does so for so long at most while more is sent: each message wakes the replica.
_HOLD_S = 0.05


class StatsSender:
    """Sends small dictionaries from an engine process; drops them where there is no reader."""

    def __init__(self, endpoint: str) -> None:
        """Connect to `endpoint` (``ipc://path``); an empty one makes every send a no-op."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._held: list[bytes] = []
        self._flushed_s = 0.0
        self._socket: zmq.Socket[bytes] | None = None
        if endpoint:
            self._socket = zmq.Context.instance().socket(zmq.PUSH)
            self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MESSAGES)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.connect(endpoint)

    def send(self, message: dict[str, object], *, urgent: bool = True) -> None:
        """Send one measurement, or drop it: also one that cannot be encoded (an int beyond 64
        bits). One that is not urgent leaves with the next that is, with `flush`, or with any that
        comes 50 ms after the last ones left. Call from one thread only."""
        if self._socket is None:
            return
        with suppress(OverflowError, TypeError, ValueError, RecursionError):
            self._held.append(self._encode(message))
        if urgent or time.monotonic() - self._flushed_s > _HOLD_S:
            self.flush()

    def flush(self) -> None:
        if self._socket is None or not self._held:
            return
        self._flushed_s = time.monotonic()
        held, self._held = self._held, []
        with suppress(zmq.ZMQError):
            self._socket.send_multipart(held, zmq.NOBLOCK)
