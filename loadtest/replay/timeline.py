"""What happened when, in constant memory: counts in bins of time, and an even sample of requests.

The number of bins is bounded: when a run outgrows them, neighbours are joined and every bin lasts
twice as long. The sample keeps every n-th request, and n doubles in the same way, so that a
picture of it is the picture of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from loadtest.replay.record import Record

_BINS = 240
_FIRST_BIN_S = 0.25
_SERIES = ("due", "sent", "ended", "completed", "failed", "met", "output_tokens")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Point:
    """What a picture shows of one request."""

    scheduled_s: float
    ttft_s: float
    error: str
    node: str
    ratio: float | None
    crit: float | None


class Timeline:
    """Counts of each series per bin of `bin_s` seconds since the run began."""

    def __init__(self, bins: int = _BINS, bin_s: float = _FIRST_BIN_S) -> None:
        self.bin_s = bin_s
        self.last_s = 0.0
        self._counts: dict[str, NDArray[np.float64]] = {name: np.zeros(bins) for name in _SERIES}

    def add(self, series: str, time_s: float, amount: float = 1.0) -> None:
        """Count something that happened at a time."""
        time_s = max(time_s, 0.0)
        self.last_s = max(self.last_s, time_s)
        while time_s >= self.bin_s * len(self._counts[series]):
            self._halve()
        self._counts[series][int(time_s / self.bin_s)] += amount

    def _halve(self) -> None:
        for name, counts in self._counts.items():
            joined = counts.reshape(-1, 2).sum(axis=1)
            self._counts[name] = np.concatenate([joined, np.zeros(len(joined))])
        self.bin_s *= 2

    def used(self) -> int:
        """Bins up to the last event."""
        return int(self.last_s / self.bin_s) + 1

    def times_s(self) -> NDArray[np.float64]:
        """The middle of each used bin."""
        return (np.arange(self.used(), dtype=np.float64) + 0.5) * self.bin_s

    def per_second(self, series: str) -> NDArray[np.float64]:
        """The rate of a series in each used bin."""
        return self._counts[series][: self.used()] / self.bin_s

    def in_flight(self) -> NDArray[np.float64]:
        """Requests sent and not yet ended, at the end of each used bin."""
        gained = self._counts["sent"] - self._counts["ended"]
        return np.cumsum(gained)[: self.used()]

    def waiting(self) -> NDArray[np.float64]:
        """Requests due and not yet sent, at the end of each used bin."""
        gained = self._counts["due"] - self._counts["sent"]
        return np.maximum(np.cumsum(gained)[: self.used()], 0.0)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: one list per series, an entry per bin."""
        used = self.used()
        return {
            "bin_s": self.bin_s,
            **{name: counts[:used].astype(int).tolist() for name, counts in self._counts.items()},
            "in_flight": self.in_flight().astype(int).tolist(),
        }


class Sample(Generic[T]):
    """Every n-th of what is added; n doubles whenever there would be more than `most`."""

    def __init__(self, most: int = 4000) -> None:
        self.items: list[T] = []
        self.seen = 0
        self.stride = 1
        self._most = most

    def add(self, item: T) -> None:
        """Add one."""
        if self.seen % self.stride == 0:
            if len(self.items) >= self._most:
                self.items = self.items[::2]
                self.stride *= 2
            if self.seen % self.stride == 0:
                self.items.append(item)
        self.seen += 1


def point(record: Record, value_s: float) -> Point:
    """A request as a point; value_s: its TTFT, or how long it took to fail."""
    return Point(record.scheduled_s, value_s, record.error, record.node, record.ratio, record.crit)
