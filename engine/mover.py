"""The seam for copies between host and device beside the computation: movers and their events.

`Mover.h2d` and `d2h` start copies and return an `Event`; `wait` makes what is computed next come
after it. All bytes pass `_copy`, the one method to override for a link that fails or is slow. Bytes
and seconds are counted per direction. No wait is without bound. Movers: `engine.transfer`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Direction = Literal["h2d", "d2h"]
Copies = Sequence[tuple[Tensor, Tensor]]

# A copy that takes longer than this has failed.
WAIT_S = 60.0


class TransferFailed(RuntimeError):
    """A copy did not happen, or not in time: its target holds anything."""


@dataclass(slots=True)
class LinkCounters:
    """What one direction did: bytes copied, seconds in which it copied, copies, and failures."""

    copied_bytes: int = 0
    busy_s: float = 0.0
    copies: int = 0
    failed: int = 0


class Event(ABC):
    """The end of what was started together."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended, well or not; does not block."""

    @abstractmethod
    def error(self) -> BaseException | None:
        """Why it failed; None as long as it has not."""

    @abstractmethod
    def ended(self, timeout_s: float) -> bool:
        """Wait, in this thread, at most so long; whether it has ended, well or not."""

    def block(self, timeout_s: float = WAIT_S) -> None:
        """Wait, in this thread, for the end.

        Raises:
            TransferFailed: it failed, or did not end in time.
        """
        if not self.ended(timeout_s):
            raise TransferFailed(f"a copy did not end within {timeout_s:g} s")
        error = self.error()
        if error is not None:
            raise TransferFailed(f"a copy failed: {error}") from error


class Mover(ABC):
    """Copies between host and device.

    Copies of one direction happen in order; an event is done when all before it are. `counters`
    are complete for events that are done.
    """

    def __init__(self) -> None:
        self.counters: dict[Direction, LinkCounters] = {
            "h2d": LinkCounters(), "d2h": LinkCounters(),
        }  # fmt: skip

    def h2d(self, copies: Copies, after: Event | None = None) -> Event:
        """Copy to the device: (target, source) pairs of equal shape and dtype.

        after: what must have ended before, such as the last use of the targets; see `mark`.
        """
        return self._start("h2d", copies, after)

    def d2h(self, copies: Copies, after: Event | None = None) -> Event:
        """Copy to the host what is computed by now; else like `h2d`."""
        return self._start("d2h", copies, after or self.mark())

    @abstractmethod
    def mark(self) -> Event:
        """The end of what this thread has asked the device to compute until now."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """What this thread computes next comes after `event`.

        Raises:
            TransferFailed: it failed, or did not end in time.
        """

    @abstractmethod
    def drain(self, timeout_s: float = WAIT_S) -> None:
        """Wait until nothing is on its way.

        Raises:
            TransferFailed: something still is, after that time.
        """

    def settle(self) -> None:  # noqa: B027 - a mover whose counters are always right
        """Bring the counters up to what has ended."""

    @abstractmethod
    def stop(self, timeout_s: float = WAIT_S) -> None:
        """End what runs beside the caller; what has not begun is dropped and fails."""

    @abstractmethod
    def _start(self, direction: Direction, copies: Copies, after: Event | None) -> Event: ...

    def _copy(self, direction: Direction, copies: Copies) -> None:
        """Move the bytes. The only place where it happens; raise to fail."""
        for target, source in copies:
            target.copy_(source, non_blocking=True)


def total_bytes(copies: Copies) -> int:
    """Bytes of the copies; `ValueError` if a pair does not match."""
    total = 0
    for target, source in copies:
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(
                f"cannot copy {tuple(source.shape)} of {source.dtype} "
                f"to {tuple(target.shape)} of {target.dtype}"
            )
        total += target.nbytes
    return total
