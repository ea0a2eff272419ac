"""One worker's stream, received: snapshot first, then numbered messages, then again after a gap. A
worker that does not answer is queried again, less and less often; nothing waits for it. A
connection that breaks is reported at once: that is how the death of a process is known first."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from functools import partial
from typing import Protocol

import msgspec
import structlog
import zmq

from kappa.protocol import KV, REPORT, RESET, Announcement, WorkerReport
from kappa_router.index.kv_event_types import BlocksStored, KVEvent, StreamCursor, WorkerReset
from kappa_router.live.event_feed import EventFeed, FloodError, bounded_socket
from kappa_router.live.supervised import pause_s, supervised

log = structlog.get_logger(__name__)

_SNAPSHOT_TIMEOUT_S = 5.0
_report = msgspec.msgpack.Decoder(WorkerReport).decode


class StreamListener(Protocol):
    """Hears a subscriber, on its event loop. A task is `feed` or `line`."""

    def blocks(self, events: list[KVEvent]) -> None: ...
    def reported(self, report: WorkerReport) -> None: ...
    def stream_gap(self, worker: str) -> None: ...
    def stream_flood(self, worker: str) -> None: ...
    def connection(self, worker: str, up: bool) -> None: ...
    def task_restarted(self, task: str) -> None: ...


class KVSubscriber:
    """Follows one worker until it is closed. synced: its state is known; connected: its stream
    stands; events: blocks announced as stored, by tier, events left out, by why, and cache groups
    that are priced, by kind."""

    def __init__(self, announcement: Announcement, listener: StreamListener) -> None:
        self._worker = announcement.worker
        self._snapshot_endpoint = announcement.snapshot_endpoint
        self._listener = listener
        self._cursor = StreamCursor()
        self._broken = False
        self.synced = self.connected = False
        self.events = Counter[str]()
        self._feed = EventFeed(self._worker, announcement.events_endpoint)
        self._feed.connect()
        watch = partial(self._feed.watch, self._connection)
        self._tasks = [
            asyncio.create_task(supervised(name, run, listener.task_restarted, self._worker))
            for name, run in (("feed", self._receive_all), ("line", watch))
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
        self._feed.close()

    def _connection(self, up: bool) -> None:
        if up != self.connected:
            self.connected = up
            # What was missed meanwhile shows as a gap, unless it was nothing.
            self._broken = self._broken or not up
            self._listener.connection(self._worker, up)

    async def _receive_all(self) -> None:
        try:
            # Subscribed before the snapshot is requested, so nothing falls between the two.
            await self._resync()
            while True:
                try:
                    frames = await self._feed.receive()
                    if len(frames) != 3:
                        self._unreadable(f"{len(frames)} frames, not kind, number and payload")
                        continue
                    kind, number, payload = frames
                    if await self._receive(kind, int.from_bytes(number, "big"), payload):
                        continue
                except FloodError:
                    self.synced = False
                    self._listener.stream_flood(self._worker)
                    self._listener.blocks([WorkerReset(self._worker)])
                    await self._feed.pause()
                await self._resync()
        finally:
            self.synced = False

    async def _receive(self, kind: bytes, seq: int, payload: bytes) -> bool:
        """Pass a message on; whether the worker's known state still holds."""
        if self._broken:
            # Its blocks were forgotten when the connection broke, so that even no gap is one.
            return False
        order = self._cursor.advance(seq)
        if order == "duplicate":
            return True
        if order == "gap":
            log.warning("worker_stream_gap", worker=self._worker, seq=seq)
            self._listener.stream_gap(self._worker)
            return False
        try:
            if kind == KV:
                batch = await self._feed.batch(payload, self.events)
                await self._feed.hand_over(self._counted(batch.events), self._listener.blocks)
            elif kind == REPORT:
                self._listener.reported(_report(payload))
            elif kind == RESET:
                self._listener.blocks([WorkerReset(self._worker)])
        except (ValueError, TypeError, msgspec.DecodeError) as error:
            self._unreadable(str(error))
        except FloodError:
            raise
        except Exception as error:
            # A fault of ours must not end the stream; a resync repairs what it left half done.
            log.error("worker_message_failed", worker=self._worker, error=repr(error))
            return False
        return True

    def _counted(self, events: list[KVEvent]) -> list[KVEvent]:
        for event in events:
            if isinstance(event, BlocksStored) and not event.group:
                self.events[event.tier] += len(event.engine_hashes)
        return events

    def _unreadable(self, error: str) -> None:
        log.warning("worker_message_unreadable", worker=self._worker, error=error)

    async def _resync(self) -> None:
        attempt = 0
        self.synced = self._broken = False
        while not self.synced:
            try:
                # Not wait_for: Python 3.11's swallows a cancellation that meets the answer.
                async with asyncio.timeout(_SNAPSHOT_TIMEOUT_S):
                    seq, batches = await self._snapshot()
                # The events begin with a reset, which repairs what a failure left half done.
                events: list[KVEvent] = [WorkerReset(self._worker)]
                for payload in batches:
                    batch = await self._feed.decoded(payload, self.events)
                    events += self._counted(batch.events)
                await self._feed.hand_over(events, self._listener.blocks)
                self._cursor.resume(seq + 1)
                self.synced = True
            except Exception as error:
                failed = {"worker": self._worker, "attempt": attempt, "error": repr(error)}
                log.warning("worker_snapshot_failed", **failed)
                await asyncio.sleep(pause_s(attempt))
                attempt += 1

    async def _snapshot(self) -> tuple[int, list[bytes]]:
        socket = bounded_socket(zmq.DEALER)
        socket.connect(self._snapshot_endpoint)
        try:
            await socket.send_multipart([b"", b"snapshot"])
            _, seq, *batches = await socket.recv_multipart()
            return int.from_bytes(seq, "big"), batches
        finally:
            socket.close()
