"""The mover on CUDA: a stream per direction, events in place of waiting, seconds by timed events.

What a copy reads or writes must live until it has ended: callers keep it, or let the current stream
wait for the copy before they drop it, so that the allocator's order on that stream is enough.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import torch

from engine.mover import (
    WAIT_S,
    Copies,
    Direction,
    Event,
    Mover,
    TransferFailed,
    total_bytes,
)

# Ended copies are counted when somebody asks, and at the latest when so many are not.
_UNTIMED_EVENTS = 256


class _CudaEvent(Event):
    def __init__(self, event: torch.cuda.Event, error: BaseException | None = None) -> None:
        self.event = event
        self._error = error

    def done(self) -> bool:
        # Also after an error: what was begun before it may still be writing.
        return bool(self.event.query())

    def error(self) -> BaseException | None:
        return self._error

    def ended(self, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() > end_s:
                return False
            time.sleep(2e-5)
        return True


class CudaMover(Mover):
    """A stream per direction. Host tensors must be pinned, or copies are not asynchronous."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._streams: dict[Direction, torch.cuda.Stream] = {
            "h2d": torch.cuda.Stream(device), "d2h": torch.cuda.Stream(device),
        }  # fmt: skip
        self._untimed: dict[Direction, deque[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
            "h2d": deque(), "d2h": deque(),
        }  # fmt: skip
        # Whoever copies in one direction counts what has ended in both.
        self._counting = threading.Lock()

    def mark(self) -> Event:
        """An event on the current stream."""
        return _CudaEvent(torch.cuda.current_stream(self._device).record_event())

    def wait(self, event: Event) -> None:
        """The current stream waits; the caller does not."""
        if event.error() is not None or not isinstance(event, _CudaEvent):
            event.block()
            return
        torch.cuda.current_stream(self._device).wait_event(event.event)

    def drain(self, timeout_s: float = WAIT_S) -> None:
        """Wait until both streams are empty."""
        for stream in self._streams.values():
            _CudaEvent(stream.record_event()).block(timeout_s)
        self.settle()

    def stop(self, timeout_s: float = WAIT_S) -> None:
        """Nothing runs beside the caller but streams: let them end."""
        self.drain(timeout_s)

    def settle(self) -> None:
        """Count the seconds of the copies that have ended."""
        with self._counting:
            for direction, pairs in self._untimed.items():
                counters = self.counters[direction]
                while pairs and pairs[0][1].query():
                    begin, end = pairs.popleft()
                    counters.busy_s += begin.elapsed_time(end) / 1e3

    def _start(self, direction: Direction, copies: Copies, after: Event | None) -> Event:
        size_bytes = total_bytes(copies)
        stream, counters = self._streams[direction], self.counters[direction]
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        error: BaseException | None = None
        with torch.cuda.stream(stream):
            if isinstance(after, _CudaEvent):
                stream.wait_event(after.event)
            begin.record(stream)
            try:
                if after is not None and after.error() is not None:
                    raise TransferFailed("what it was to come after failed") from after.error()
                self._copy(direction, copies)
                counters.copied_bytes += size_bytes
                counters.copies += len(copies)
            except Exception as caught:
                counters.failed += 1
                error = caught
            end.record(stream)
        self._untimed[direction].append((begin, end))
        if len(self._untimed[direction]) >= _UNTIMED_EVENTS:
            self.settle()
        return _CudaEvent(end, error)
