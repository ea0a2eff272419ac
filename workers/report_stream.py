"""A replica's outgoing stream: its engine's KV events and its own measurements, numbered as one.

One thread reads the engine's event publisher and the stats channel, keeps the mirror and the
totals, and publishes. A reader that sees a gap, or comes late, asks the snapshot endpoint and gets
the state with the sequence number it belongs to. Frames: `[kind, seq u64 BE, payload]`, kind one of
`kv` (vLLM's own msgpack batch), `report` (msgpack of `WorkerReport`), `reset` (forget all blocks).
Which requests are in the replica is reported as they come and go, so that several routers agree.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import structlog
import zmq

from kappa.protocol import KV, REPORT, RESET, WorkerReport
from workers.mirror import KvMirror
from workers.report_totals import ReportTotals

log = structlog.get_logger(__name__)

_REPORT_EVERY_S = 0.25
# Reports that change predictions do not wait for that, but go out in lots.
_URGENT_EVERY_S = 0.005
_POLL_MS = 100
_HIGH_WATER_MESSAGES = 100_000


class ReportStream:
    """Owns the replica's sockets and the thread that serves them."""

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
        self.events_endpoint = f"tcp://{host}:{self._out.bind_to_random_port(f'tcp://{host}')}"
        self._snapshots = self._context.socket(zmq.ROUTER)
        port = self._snapshots.bind_to_random_port(f"tcp://{host}")
        self.snapshot_endpoint = f"tcp://{host}:{port}"
        self._mirror = KvMirror()
        self.totals = ReportTotals(worker)
        self.complete: Callable[[WorkerReport], WorkerReport] = lambda report: report
        """Adds what is known besides the engine's measurements; called on the stream's thread."""
        self._seq = 0
        self._kv_seq = -1
        self._last_report_s = float("-inf")
        # The machine's clock may be set while we run; times in reports only rise.
        self._epoch_s = time.time() - time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kappa-report", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and close the sockets."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._kv, self._stats, self._snapshots):
            poller.register(socket, zmq.POLLIN)
        while not self._stop.is_set():
            try:
                urgent_ms = int(1000 * _URGENT_EVERY_S)
                ready = dict(poller.poll(urgent_ms if self.totals.urgent else _POLL_MS))
                if self._kv in ready:
                    self._read_kv()
                if self._stats in ready:
                    self._read_stats()
                if self._snapshots in ready:
                    self._answer_snapshot()
                self._publish_report()
            except zmq.ContextTerminated:
                return
            except Exception:
                log.exception("report_stream_error", worker=self._worker)

    def _publish(self, kind: bytes, payload: bytes) -> None:
        self._seq += 1
        self._out.send_multipart([kind, self._seq.to_bytes(8, "big"), payload])

    def _read_kv(self) -> None:
        while True:
            try:
                _, seq_bytes, payload = self._kv.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            seq = int.from_bytes(seq_bytes, "big")
            # The engine counts from 0: a later first number means that we listened too late.
            if seq != self._kv_seq + 1:
                self._forget("gap", seq)
            self._kv_seq = seq
            try:
                self._mirror.apply(payload)
            except msgspec.DecodeError:
                self._forget("unreadable", seq)
                continue
            self._publish(KV, payload)

    def _forget(self, why: str, seq: int) -> None:
        """The engine's events are incomplete: what is known of its blocks holds no longer."""
        log.warning("engine_events_lost", worker=self._worker, why=why, seq=seq)
        self._mirror.clear()
        self.totals.lost(1)
        self._publish(RESET, b"")

    def _read_stats(self) -> None:
        while True:
            try:
                message = msgspec.msgpack.decode(self._stats.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if message.get("kind") == "kv":
                # Blocks that a predecessor left: the engine publishes events of its own only.
                self._mirror.apply(message["batch"])
                self._publish(KV, message["batch"])
            else:
                self.totals.add(message)

    def _publish_report(self) -> None:
        now_s = self._epoch_s + time.monotonic()
        every_s = _URGENT_EVERY_S if self.totals.urgent else _REPORT_EVERY_S
        if now_s - self._last_report_s >= every_s:
            self._last_report_s = now_s
            report = self.complete(self.totals.take(now_s))
            self._publish(REPORT, msgspec.msgpack.encode(report.to_dict()))

    def _answer_snapshot(self) -> None:
        identity, *_ = self._snapshots.recv_multipart(zmq.NOBLOCK)
        seq = self._seq.to_bytes(8, "big")
        self._snapshots.send_multipart([identity, b"", seq, *self._mirror.snapshot()])
        # What is no part of a snapshot follows it, numbered, for everybody.
        self.totals.report_all()
        self._last_report_s = float("-inf")
