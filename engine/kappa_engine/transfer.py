"""Copies between host and device beside the computation: one queue per direction, with events.

`LinkMover.h2d` and `d2h` start copies and return an `Event`; `wait` puts the next computation
behind it. All bytes pass `_copy`, the one method to override for a link that fails or is slow.
Bytes and seconds are counted per direction. No wait is without bound. On the CPU each direction has
a thread that copies memory, on CUDA a stream with timed events: what a copy reads or writes must
live until it has ended, so callers keep it, or let the current stream wait for the copy first.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Direction = Literal["h2d", "d2h"]
Copies = Sequence[tuple[Tensor, Tensor]]

# A copy that takes longer than this has failed.
WAIT_S = 60.0
# Ended copies are timed on `settle`, and at the latest when this many are untimed.
_UNTIMED_EVENTS = 256


class TransferFailed(RuntimeError):
    """A copy failed, or did not end in time: the content of its target is undefined."""


@dataclass(slots=True)
class LinkCounters:
    """Totals of one direction."""

    copied_bytes: int = 0
    # In which it copied.
    busy_s: float = 0.0


class Event(ABC):
    """The end of copies, or of computation, that were started together."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended, well or not; does not block."""

    @abstractmethod
    def error(self) -> BaseException | None:
        """Why it failed; None if it has not."""

    @abstractmethod
    def ended(self, timeout_s: float) -> bool:
        """Wait, in this thread, at most `timeout_s`; whether it has ended, well or not."""

    def block(self, timeout_s: float = WAIT_S) -> None:
        """Wait, in this thread, for the end; `TransferFailed` if it failed or came too late."""
        if not self.ended(timeout_s):
            raise TransferFailed(f"a copy did not end within {timeout_s:g} s")
        error = self.error()
        if error is not None:
            raise TransferFailed(f"a copy failed: {error}") from error


class LinkMover(ABC):
    """Copies between host and device.

    Copies of one direction happen in order; an event is done when all before it are. `counters`
    are complete for events that are done.
    """

    def __init__(self) -> None:
        ways: tuple[Direction, Direction] = ("h2d", "d2h")
        self.counters: dict[Direction, LinkCounters] = {way: LinkCounters() for way in ways}

    def h2d(self, copies: Copies, after: Event | None = None) -> Event:
        """Copy to the device: (target, source) pairs of equal shape and dtype.

        after: what must have ended before, such as the last use of the targets; see `mark`.
        """
        return self._start("h2d", copies, after)

    def d2h(self, copies: Copies, after: Event | None = None) -> Event:
        """Copy to the host, behind the computation asked for by now; else like `h2d`."""
        return self._start("d2h", copies, after or self.mark())

    @abstractmethod
    def mark(self) -> Event:
        """The end of what this thread has asked the device to compute until now."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let this thread's next computation come after `event`; `TransferFailed` as `block`."""

    @abstractmethod
    def drain(self, timeout_s: float = WAIT_S) -> None:
        """Wait until no copy is under way; `TransferFailed` if one still is. Failed copies are not
        raised again."""

    def settle(self) -> None:  # noqa: B027 - nothing to do if counters are always right
        """Bring the counters up to date with copies that have ended."""

    @abstractmethod
    def stop(self, timeout_s: float = WAIT_S) -> None:
        """Stop copying; copies that have not begun are dropped and fail."""

    @abstractmethod
    def _start(self, direction: Direction, copies: Copies, after: Event | None) -> Event: ...

    def _copy(self, direction: Direction, copies: Copies) -> None:
        """Copy the bytes, here alone; raise to fail."""
        for target, source in copies:
            target.copy_(source, non_blocking=True)


def mover_for(device: torch.device | str) -> LinkMover:
    """The mover that fits a device."""
    place = torch.device(device)
    return CudaMover(place) if place.type == "cuda" else CpuMover()


def _total_bytes(copies: Copies) -> int:
    """Bytes of the copies; `ValueError` if a pair does not match."""
    for target, source in copies:
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(
                f"cannot copy {tuple(source.shape)} of {source.dtype} "
                f"to {tuple(target.shape)} of {target.dtype}"
            )
    return sum(target.nbytes for target, _ in copies)


class _CudaEvent(Event):
    def __init__(self, event: torch.cuda.Event, error: BaseException | None = None) -> None:
        self.event, self._error = event, error

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


class CudaMover(LinkMover):
    """A stream per direction. Host tensors must be pinned, or copies are not asynchronous."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._streams = {way: torch.cuda.Stream(device) for way in self.counters}
        self._untimed: dict[Direction, deque[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
            way: deque() for way in self.counters
        }
        # A caller that copies in one direction counts the ended copies of both.
        self._counting = threading.Lock()

    def mark(self) -> Event:
        return _CudaEvent(torch.cuda.current_stream(self._device).record_event())

    def wait(self, event: Event) -> None:
        """The current stream waits; the caller does not."""
        if event.error() is not None or not isinstance(event, _CudaEvent):
            event.block()
            return
        torch.cuda.current_stream(self._device).wait_event(event.event)

    def drain(self, timeout_s: float = WAIT_S) -> None:
        for stream in self._streams.values():
            _CudaEvent(stream.record_event()).block(timeout_s)
        self.settle()

    def stop(self, timeout_s: float = WAIT_S) -> None:
        """Let the streams end: there are no threads."""
        self.drain(timeout_s)

    def settle(self) -> None:
        with self._counting:
            for direction, pairs in self._untimed.items():
                while pairs and pairs[0][1].query():
                    begin, end = pairs.popleft()
                    self.counters[direction].busy_s += begin.elapsed_time(end) / 1e3

    def _start(self, direction: Direction, copies: Copies, after: Event | None) -> Event:
        size_bytes = _total_bytes(copies)
        stream = self._streams[direction]
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
                self.counters[direction].copied_bytes += size_bytes
            except Exception as caught:
                error = caught
            end.record(stream)
        self._untimed[direction].append((begin, end))
        if len(self._untimed[direction]) >= _UNTIMED_EVENTS:
            self.settle()
        return _CudaEvent(end, error)


class _CpuEvent(Event):
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def error(self) -> BaseException | None:
        if not self._future.done():
            return None
        if self._future.cancelled():
            return TransferFailed("the mover was stopped before this copy began")
        return self._future.exception()

    def ended(self, timeout_s: float) -> bool:
        return self._future.done() or not wait([self._future], timeout_s).not_done


_NOTHING: Future[None] = Future()
_NOTHING.set_result(None)


class CpuMover(LinkMover):
    """One thread per direction; "device" and host blocks are both in ordinary memory."""

    def __init__(self) -> None:
        super().__init__()
        self._threads = {way: ThreadPoolExecutor(1, f"kappa-{way}") for way in self.counters}
        self._newest: dict[Direction, Event] = {}

    def mark(self) -> Event:
        """On the CPU a computation has ended when its call returns."""
        return _CpuEvent(_NOTHING)

    def wait(self, event: Event) -> None:
        event.block()

    def drain(self, timeout_s: float = WAIT_S) -> None:
        end_s = time.monotonic() + timeout_s
        for event in list(self._newest.values()):
            if not event.ended(max(end_s - time.monotonic(), 0.0)):
                raise TransferFailed(f"copies still under way after {timeout_s:g} s")

    def stop(self, timeout_s: float = WAIT_S) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        CpuMover.drain(self, timeout_s)
        for thread in self._threads.values():
            thread.shutdown()

    def _start(self, direction: Direction, copies: Copies, after: Event | None) -> Event:
        size_bytes = _total_bytes(copies)

        def run() -> None:
            counters = self.counters[direction]
            if after is not None:
                after.block()
            begin_s = time.perf_counter()
            self._copy(direction, copies)
            counters.busy_s += time.perf_counter() - begin_s
            counters.copied_bytes += size_bytes

        try:
            event = _CpuEvent(self._threads[direction].submit(run))
        except RuntimeError:
            stopped: Future[None] = Future()
            stopped.set_exception(TransferFailed("the mover is stopped"))
            return _CpuEvent(stopped)
        self._newest[direction] = event
        return event
