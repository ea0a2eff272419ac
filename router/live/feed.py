"""One worker's stream, received: snapshot first, then numbered messages, then again after a gap.

Runs as a task on the ingress' event loop. What it decodes it hands to callbacks on the same loop,
so the router needs no locks. A worker that does not answer is asked again, less and less often;
while it is silent the router knows less, and nothing waits for it. A connection that breaks is told
at once: that is how the death of a process is known before anybody asks it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable

import msgspec
import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kappa.protocol import KV, REPORT, RESET, Announcement, WorkerReport
from router.index.kv_events import KVEvent, StreamCursor, WorkerReset, decode_batch
from router.live.supervised import pause_s, supervised

log = structlog.get_logger(__name__)

_SNAPSHOT_TIMEOUT_S = 5.0
_FRAMES = ("kind", "seq", "payload")
_LINE_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class WorkerFeed:
    """Follows one worker until it is closed."""

    def __init__(
        self,
        announcement: Announcement,
        on_blocks: Callable[[list[KVEvent]], None],
        on_report: Callable[[WorkerReport], None],
        on_gap: Callable[[str], None],
        on_line: Callable[[str, bool], None] = lambda _worker, _up: None,
        on_restart: Callable[[str], None] = lambda _task: None,
    ) -> None:
        """`on_line` is called when the connection stands and when it breaks, `on_restart` with
        `feed` or `line` when that task failed and begins anew."""
        self._said = announcement
        self._on_blocks, self._on_report, self._on_gap = on_blocks, on_report, on_gap
        self._on_line = on_line
        self._context = zmq.asyncio.Context.instance()
        self._cursor = StreamCursor()
        self._broken = False
        self.synced = False
        self.connected = False
        self.skipped: Counter[str] = Counter()
        self._tasks: list[asyncio.Task[None]] = []
        self._stream = self._context.socket(zmq.SUB)
        self._stream.setsockopt(zmq.SUBSCRIBE, b"")
        self._stream.setsockopt(zmq.LINGER, 0)
        loop = asyncio.get_running_loop()
        self._line = self._stream.get_monitor_socket(_LINE_EVENTS)
        self._stream.connect(announcement.events_endpoint)
        runs = {"feed": self._run, "line": self._watch_line}
        self._tasks = [
            loop.create_task(supervised(name, run, on_restart, announcement.worker))
            for name, run in runs.items()
        ]

    @property
    def alive(self) -> bool:
        """Whether it still follows its worker; not after `close`."""
        return not any(task.done() for task in self._tasks)

    async def close(self) -> None:
        """Stop following; returns when the sockets are closed."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._stream.disable_monitor()
        # The loop watches it, so that it would never be collected.
        self._line.close(linger=0)
        self._stream.close()

    async def _watch_line(self) -> None:
        while True:
            event = parse_monitor_message(await self._line.recv_multipart())["event"]
            up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if up == self.connected:
                continue
            self.connected = up
            if not up:
                # What was missed meanwhile shows as a gap, unless it was nothing.
                self._broken = True
            self._on_line(self._said.worker, up)

    async def _run(self) -> None:
        stream = self._stream
        try:
            # Subscribed before the snapshot is asked for, so nothing falls between the two.
            await self._resync()
            while True:
                message = await stream.recv_multipart()
                if len(message) != len(_FRAMES):
                    log.warning("worker_message_unreadable", worker=self._said.worker,
                                error=f"{len(message)} frames, not {len(_FRAMES)}")  # fmt: skip
                    continue
                kind, seq, payload = message
                await self._receive(kind, int.from_bytes(seq, "big"), payload)
        finally:
            self.synced = False

    async def _receive(self, kind: bytes, seq: int, payload: bytes) -> None:
        if self._broken:
            # Its blocks were forgotten when the line broke, so that even no gap is one.
            await self._resync()
            return
        standing = self._cursor.advance(seq)
        if standing == "duplicate":
            return
        if standing == "gap":
            log.warning("worker_stream_gap", worker=self._said.worker, seq=seq)
            self._on_gap(self._said.worker)
            await self._resync()
            return
        try:
            self._dispatch(kind, payload)
        except (ValueError, TypeError) as error:
            log.warning("worker_message_unreadable", worker=self._said.worker, error=str(error))
        except Exception as error:
            # A fault of ours must not end the stream; what it left half done is made anew.
            log.error("worker_message_failed", worker=self._said.worker, error=repr(error))
            await self._resync()

    def _dispatch(self, kind: bytes, payload: bytes) -> None:
        if kind == KV:
            self._on_blocks(decode_batch(payload, self._said.worker, self.skipped))
        elif kind == REPORT:
            self._on_report(WorkerReport.from_dict(msgspec.msgpack.decode(payload)))
        elif kind == RESET:
            self._on_blocks([WorkerReset(self._said.worker)])

    async def _resync(self) -> None:
        attempt = 0
        self.synced = self._broken = False
        while True:
            try:
                # Not wait_for: Python 3.11's swallows a cancellation that meets the answer.
                async with asyncio.timeout(_SNAPSHOT_TIMEOUT_S):
                    seq, batches = await self._snapshot()
                # The events begin with a reset: what a failure leaves half done is made anew.
                self._on_blocks(self._rebuilt(batches))
                break
            except Exception as error:
                log.warning(
                    "worker_snapshot_failed",
                    worker=self._said.worker,
                    attempt=attempt,
                    error=repr(error),
                )
                await asyncio.sleep(pause_s(attempt))
                attempt += 1
        self._cursor.resume(seq + 1)
        self.synced = True

    def _rebuilt(self, batches: list[bytes]) -> list[KVEvent]:
        events: list[KVEvent] = [WorkerReset(self._said.worker)]
        for batch in batches:
            events.extend(decode_batch(batch, self._said.worker, self.skipped))
        return events

    async def _snapshot(self) -> tuple[int, list[bytes]]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._said.snapshot_endpoint)
        try:
            await socket.send_multipart([b"", b"snapshot"])
            _, seq, *batches = await socket.recv_multipart()
            return int.from_bytes(seq, "big"), batches
        finally:
            socket.close()
