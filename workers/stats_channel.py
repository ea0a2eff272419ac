"""The way measurements leave an engine's processes.

An engine runs in two or three operating-system processes (front end, scheduler core, worker).
What they measure (steps, transfers, admissions) goes over one ZeroMQ PUSH/PULL pair on a Unix
socket to the replica that owns the engine. Sending never blocks and never raises: a lost
measurement costs a little accuracy, a blocked engine costs everybody.
"""

from __future__ import annotations

import msgspec
import zmq

_HIGH_WATER_MESSAGES = 10_000


class StatsSender:
    """Sends small dictionaries from an engine process; drops (and counts) when nobody reads."""

    def __init__(self, endpoint: str) -> None:
        """Connect to `endpoint` (``ipc://path``); an empty one makes every send a no-op."""
        self.dropped = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._socket: zmq.Socket[bytes] | None = None
        if endpoint:
            self._socket = zmq.Context.instance().socket(zmq.PUSH)
            self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MESSAGES)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.connect(endpoint)

    def send(self, message: dict[str, object]) -> None:
        """Send one measurement, or count it as dropped: also one that cannot be encoded (an int
        beyond 64 bits). Call from one thread only."""
        if self._socket is None:
            return
        try:
            self._socket.send(self._encode(message), zmq.NOBLOCK)
        except (zmq.ZMQError, OverflowError, TypeError, ValueError, RecursionError):
            self.dropped += 1
