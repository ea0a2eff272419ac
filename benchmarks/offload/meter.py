"""Movers that also count how long the computation stood still for a copy, and one with a slow link.

On the CPU that is the time that `wait` blocks. On a GPU, two events around the wait on the
computing stream: what lies between them is the stall. Host code that launches kernels too slowly
is not seen by it. A paced link is emulated: each copy takes at least its bytes over the bandwidth,
and sleeps through what is left, so that the processor is free meanwhile.
"""

from __future__ import annotations

import time

import torch

from engine.transfer import Copies, CpuMover, CudaMover, Direction, Event, Mover


class MeteredCpuMover(CpuMover):
    """Args: link_bytes_per_s of an emulated link, for either direction; 0: as fast as it goes."""

    def __init__(self, link_bytes_per_s: float = 0.0) -> None:
        super().__init__()
        self._pace = link_bytes_per_s
        self._stalled_s = 0.0

    def wait(self, event: Event) -> None:
        """As it is, timed."""
        start_s = time.perf_counter()
        super().wait(event)
        self._stalled_s += time.perf_counter() - start_s

    def stalled_s(self) -> float:
        """Seconds that the computing thread has waited."""
        return self._stalled_s

    def _copy(self, direction: Direction, copies: Copies) -> None:
        start_s = time.perf_counter()
        super()._copy(direction, copies)
        if self._pace:
            due_s = start_s + sum(target.nbytes for target, _ in copies) / self._pace
            time.sleep(max(0.0, due_s - time.perf_counter()))


class MeteredCudaMover(CudaMover):
    """A mover for a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._place = device
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._stalled_s = 0.0

    def wait(self, event: Event) -> None:
        """As it is, between two events."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._place)
        before.record(stream)
        super().wait(event)
        after.record(stream)
        self._waits.append((before, after))

    def stalled_s(self) -> float:
        """Seconds that the computing stream has stood still; waits for what is under way."""
        torch.cuda.synchronize(self._place)
        self._stalled_s += sum(one.elapsed_time(other) for one, other in self._waits) / 1e3
        self._waits.clear()
        return self._stalled_s


Metered = MeteredCpuMover | MeteredCudaMover


def metered_mover(device: torch.device, link_bytes_per_s: float = 0.0) -> Metered:
    """The mover that fits a device; a paced link is for the CPU alone."""
    if device.type == "cuda":
        return MeteredCudaMover(device)
    return MeteredCpuMover(link_bytes_per_s)


def settled(mover: Mover) -> tuple[int, float]:
    """Bytes to the device so far, and seconds in which they were copied."""
    mover.settle()
    counters = mover.counters["h2d"]
    return counters.copied_bytes, counters.busy_s
