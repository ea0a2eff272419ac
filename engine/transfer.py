"""Copies between host and device beside the computation: one queue per direction, with events.

The seam is `engine.mover`. On CPU each direction has a thread that copies memory (`CpuMover`), on
CUDA a stream (`engine.transfer_cuda`). `stop` ends the threads.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass

import torch

from engine.mover import (
    WAIT_S,
    Copies,
    Direction,
    Event,
    LinkCounters,
    Mover,
    TransferFailed,
    total_bytes,
)
from engine.transfer_cuda import CudaMover

__all__ = [
    "WAIT_S", "Copies", "CpuMover", "CudaMover", "Direction", "Event", "LinkCounters", "Mover",
    "TransferFailed", "mover_for",
]  # fmt: skip


def mover_for(device: torch.device | str) -> Mover:
    """The mover that fits a device."""
    place = torch.device(device)
    return CudaMover(place) if place.type == "cuda" else CpuMover()


class _CpuEvent(Event):
    def __init__(self, done: bool = False) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None
        if done:
            self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def error(self) -> BaseException | None:
        return self._error

    def ended(self, timeout_s: float) -> bool:
        return self._ended.wait(timeout_s)

    def end(self, error: BaseException | None = None) -> None:
        self._error = error
        self._ended.set()


@dataclass(slots=True)
class _Job:
    copies: Copies
    size_bytes: int
    after: Event | None
    event: _CpuEvent


class CpuMover(Mover):
    """One thread per direction; "device" and host blocks are both in ordinary memory."""

    def __init__(self) -> None:
        super().__init__()
        self._stopped = False
        # So that no copy is put behind the end of its queue, where nobody would do or fail it.
        self._gate = threading.Lock()
        self._jobs: dict[Direction, queue.SimpleQueue[_Job | None]] = {
            "h2d": queue.SimpleQueue(), "d2h": queue.SimpleQueue(),
        }  # fmt: skip
        self._newest: dict[Direction, _CpuEvent] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(direction,), name=f"kappa-{direction}")
            for direction in self._jobs
        ]
        for thread in self._threads:
            # Or a process whose main thread fails would wait for threads that nobody stops.
            thread.daemon = True
            thread.start()

    def mark(self) -> Event:
        """On the CPU, what was asked for is computed when the call returns."""
        return _CpuEvent(done=True)

    def wait(self, event: Event) -> None:
        """Blocks the caller until it is done."""
        event.block()

    def drain(self, timeout_s: float = WAIT_S) -> None:
        """Wait until both queues are empty; failures are not raised again."""
        end_s = time.monotonic() + timeout_s
        for event in list(self._newest.values()):
            if not event.ended(max(end_s - time.monotonic(), 0.0)):
                raise TransferFailed(f"copies still under way after {timeout_s:g} s")

    def stop(self, timeout_s: float = WAIT_S) -> None:
        """End both threads."""
        with self._gate:
            self._stopped = True
            for jobs in self._jobs.values():
                jobs.put(None)
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(end_s - time.monotonic(), 0.0))
            if thread.is_alive():
                raise TransferFailed(f"{thread.name} did not end within {timeout_s:g} s")

    def _start(self, direction: Direction, copies: Copies, after: Event | None) -> Event:
        job = _Job(copies, total_bytes(copies), after, _CpuEvent())
        with self._gate:
            if not self._stopped:
                self._newest[direction] = job.event
                self._jobs[direction].put(job)
                return job.event
        job.event.end(TransferFailed("the mover is stopped"))
        return job.event

    def _run(self, direction: Direction) -> None:
        counters = self.counters[direction]
        while (job := self._jobs[direction].get()) is not None:
            error: BaseException | None = None
            try:
                if self._stopped:
                    raise TransferFailed("the mover was stopped before this copy began")
                if job.after is not None:
                    job.after.block()
                begin_s = time.perf_counter()
                self._copy(direction, job.copies)
                counters.busy_s += time.perf_counter() - begin_s
                counters.copied_bytes += job.size_bytes
                counters.copies += len(job.copies)
            except Exception as caught:
                counters.failed += 1
                error = caught
            job.event.end(error)
