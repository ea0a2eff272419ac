"""One worker's stream, received: snapshot first, then numbered messages, then again after a gap.

Runs as a task on the ingress' event loop. What it decodes it hands to callbacks on the same loop,
so the router needs no locks. A worker that does not answer is asked again, less and less often;
while it is silent the router knows less, and nothing waits for it.
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

from kappa.report import KV, REPORT, RESET, Announcement, WorkerReport
from router.kv_events import KVEvent, WorkerReset
from router.kv_stream import StreamCursor, decode_batch

log = structlog.get_logger(__name__)

_SNAPSHOT_TIMEOUT_S = 5.0
_RETRY_S = (0.2, 1.0, 5.0)


class WorkerFeed:
    """Follows one worker until it is closed."""

    def __init__(
        self,
        announcement: Announcement,
        on_blocks: Callable[[list[KVEvent]], None],
        on_report: Callable[[WorkerReport], None],
        on_gap: Callable[[str], None],
    ) -> None:
        self._said = announcement
        self._on_blocks, self._on_report, self._on_gap = on_blocks, on_report, on_gap
        self._context = zmq.asyncio.Context.instance()
        self._cursor = StreamCursor()
        self.skipped: Counter[str] = Counter()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop following; returns when the sockets are closed."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        stream = self._context.socket(zmq.SUB)
        stream.setsockopt(zmq.SUBSCRIBE, b"")
        stream.setsockopt(zmq.LINGER, 0)
        stream.connect(self._said.events_endpoint)
        try:
            # Subscribed before the snapshot is asked for, so nothing falls between the two.
            await self._resync()
            while True:
                kind, seq, payload = await stream.recv_multipart()
                await self._receive(kind, int.from_bytes(seq, "big"), payload)
        finally:
            stream.close()

    async def _receive(self, kind: bytes, seq: int, payload: bytes) -> None:
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
        except ValueError as error:
            log.warning("worker_message_unreadable", worker=self._said.worker, error=str(error))

    def _dispatch(self, kind: bytes, payload: bytes) -> None:
        if kind == KV:
            self._on_blocks(decode_batch(payload, self._said.worker, self.skipped))
        elif kind == REPORT:
            self._on_report(WorkerReport.from_dict(msgspec.msgpack.decode(payload)))
        elif kind == RESET:
            self._on_blocks([WorkerReset(self._said.worker)])

    async def _resync(self) -> None:
        attempt = 0
        while True:
            try:
                # Not wait_for: Python 3.11's swallows a cancellation that meets the answer.
                async with asyncio.timeout(_SNAPSHOT_TIMEOUT_S):
                    seq, batches = await self._snapshot()
                events = self._rebuilt(batches)
                break
            except (TimeoutError, ValueError) as error:
                pause_s = _RETRY_S[min(attempt, len(_RETRY_S) - 1)]
                log.warning(
                    "worker_snapshot_failed",
                    worker=self._said.worker,
                    attempt=attempt,
                    error=repr(error),
                )
                attempt += 1
                await asyncio.sleep(pause_s)
        self._on_blocks(events)
        self._cursor.resume(seq + 1)

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
