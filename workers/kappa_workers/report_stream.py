"""A replica's outgoing stream: its engine's KV events and its own measurements, numbered as one.

A reader that sees a gap, or comes late, gets the state with its sequence number from the snapshot
endpoint. Frames: `[kind, seq u64 BE, payload]`, kind one of `kv` (vLLM's own msgpack batch),
`report` (msgpack of `WorkerReport`), `reset` (forget all blocks)."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import structlog
import zmq

from kappa.protocol import KV, REPORT, RESET, WorkerReport
from kappa_workers.in_flight import InFlight
from kappa_workers.mirror import KvMirror
from kappa_workers.report_totals import ReportTotals

log = structlog.get_logger(__name__)

_REPORT_EVERY_S = 0.25
# What changes predictions does not wait for that, but goes out in lots: to be woken costs a reader
# more than to read. First tokens wait least, since the time of each is when it is heard of.
_URGENT_EVERY_S, _FIRST_TOKENS_EVERY_S = 0.025, 0.01
_POLL_S = 0.1
_HIGH_WATER_MESSAGES = 100_000
_encode = msgspec.msgpack.Encoder().encode


class ReportStream:
    """Owns the replica's sockets and the thread that serves them. `complete` adds to a report what
    the engine does not measure; called on that thread."""

    def __init__(self, worker: str, host: str, stats_endpoint: str, kv_endpoint: str) -> None:
        """Bind the public endpoints on `host` (free ports) and the private ones as given."""
        self._worker = worker
        self._context = zmq.Context()
        self._stats = self._context.socket(zmq.PULL)
        self._stats.bind(stats_endpoint)
        self._kv = self._context.socket(zmq.SUB)
        self._kv.setsockopt(zmq.SUBSCRIBE, b"")
        self._kv.setsockopt(zmq.RCVHWM, _HIGH_WATER_MESSAGES)
        self._kv.connect(kv_endpoint)
        self._out = self._context.socket(zmq.PUB)
        self._out.setsockopt(zmq.SNDHWM, _HIGH_WATER_MESSAGES)
        self._snapshots = self._context.socket(zmq.ROUTER)
        self.events_endpoint, self.snapshot_endpoint = (
            f"tcp://{host}:{socket.bind_to_random_port(f'tcp://{host}')}"
            for socket in (self._out, self._snapshots)
        )
        self._mirror = KvMirror()
        self.in_flight = InFlight(time.monotonic())
        self.totals = ReportTotals(worker, self.in_flight)
        self.complete: Callable[[WorkerReport], WorkerReport] = lambda report: report
        self._seq, self._kv_seq = 0, -1
        self._held: list[bytes] = []  # The engine's batches of the next lot.
        self._last_lot_s = self._last_report_s = float("-inf")
        self._epoch_s = time.time() - time.monotonic()
        self._stop = threading.Event()
        # Requests come and go on other threads: a byte in this pipe wakes ours.
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        self._thread = threading.Thread(target=self._run, name="kappa-report", daemon=True)

    def start(self) -> None:
        self.in_flight.changed = self._wake_up
        self._thread.start()

    def close(self) -> None:
        self.in_flight.changed = lambda: None
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        self._context.destroy(linger=0)
        if self._wake >= 0:
            os.close(self._wake)
            os.close(self._woken)
            self._wake = self._woken = -1

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # It is full, and the thread will wake; or closed.
            os.write(self._wake, b"!")

    def _run(self) -> None:
        poller = zmq.Poller()
        for readable in (self._kv, self._stats, self._snapshots, self._woken):
            poller.register(readable, zmq.POLLIN)
        while not self._stop.is_set():
            try:
                wait_s = max(min(self._due_s() - self._now_s(), _POLL_S), 0.0)
                ready = dict(poller.poll(math.ceil(1000 * wait_s)))
                if self._woken in ready:
                    os.read(self._woken, 4096)
                for _, number, payload in _received(self._kv) if self._kv in ready else ():
                    self._add_events(int.from_bytes(number, "big"), payload)
                for frames in _received(self._stats) if self._stats in ready else ():
                    for frame in frames:
                        self._add_measurement(frame)
                if self._snapshots in ready:
                    self._answer_snapshot()
                self._publish_lot()
            except zmq.ContextTerminated:
                return
            except Exception:
                log.exception("report_stream_error", worker=self._worker)

    def _publish(self, kind: bytes, payload: bytes) -> None:
        self._seq += 1
        self._out.send_multipart([kind, self._seq.to_bytes(8, "big"), payload])

    def _add_measurement(self, encoded: bytes) -> None:
        try:
            self.totals.add(msgspec.msgpack.decode(encoded))
        except Exception:
            log.exception("measurement_unreadable", worker=self._worker)

    def _add_events(self, seq: int, payload: bytes) -> None:
        # The engine counts from 0: a later first number means that we listened too late.
        if seq != self._kv_seq + 1:
            self._forget("gap", seq)
        self._kv_seq = seq
        try:
            self._mirror.apply(payload)
        except msgspec.DecodeError:
            self._forget("unreadable", seq)
        else:
            self._held.append(payload)

    def _forget(self, why: str, seq: int) -> None:
        """The engine's events are incomplete: forget its blocks."""
        log.warning("engine_events_lost", worker=self._worker, why=why, seq=seq)
        self._mirror.clear()
        self._publish_blocks()
        self.totals.lost(1)
        self._publish(RESET, b"")

    def _now_s(self) -> float:
        """The machine's clock may be set while we run; times in reports only rise."""
        return self._epoch_s + time.monotonic()

    def _due_s(self) -> float:
        """When the next lot is due."""
        due_s = self._last_report_s + _REPORT_EVERY_S
        if self.totals.first_tokens:
            return min(due_s, self._last_lot_s + _FIRST_TOKENS_EVERY_S)
        if self.totals.urgent or self._held:
            return min(due_s, self._last_lot_s + _URGENT_EVERY_S)
        return due_s

    def _publish_lot(self) -> None:
        """Publish what waits, if it is due: blocks first, since they are older."""
        now_s = self._now_s()
        if now_s < self._due_s():
            return
        self._last_lot_s = now_s
        self._publish_blocks()
        if self.totals.urgent or now_s - self._last_report_s >= _REPORT_EVERY_S:
            self._last_report_s = now_s
            self._publish(REPORT, _encode(self.complete(self.totals.take(now_s))))

    def _publish_blocks(self) -> None:
        for payload in self._held:
            self._publish(KV, payload)
        self._held.clear()

    def _answer_snapshot(self) -> None:
        identity, *_ = self._snapshots.recv_multipart(zmq.NOBLOCK)
        self._publish_blocks()  # The mirror has them.
        seq = self._seq.to_bytes(8, "big")
        self._snapshots.send_multipart([identity, b"", seq, *self._mirror.snapshot()])
        # The rest follows the snapshot as a numbered report, to all readers.
        self.totals.report_all()
        self._last_report_s = float("-inf")


def _received(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    with contextlib.suppress(zmq.Again):
        while True:
            yield socket.recv_multipart(zmq.NOBLOCK)
