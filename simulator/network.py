"""Network cards: KV brought from one node's tiers into another's host tier.

Each card sends or receives one transfer at a time, first come first served. A transfer occupies the
cards of both ends and runs at the slower one's rate. What it moves is decided when it starts: a
transfer that waited may have nothing left to do, and then takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulator.loop import Loop


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """From one node's card to another's. begin: called as it starts, returns its size in bytes,
    0 if it is void; end: called when it is over, or void.
    """

    source: int
    target: int
    begin: Callable[[], float]
    end: Callable[[], None]


class Network:
    """The cards of all nodes, and the fixed cost of a transfer in seconds."""

    def __init__(self, loop: Loop, bytes_per_s: Sequence[float], fixed_s: float = 1e-3) -> None:
        self._loop = loop
        self._rates = list(bytes_per_s)
        self._fixed_s = fixed_s
        self._busy = [False] * len(self._rates)
        self._waiting: list[Transfer] = []
        self.busy_s = [0.0] * len(self._rates)

    def send(self, transfer: Transfer) -> None:
        """Queue a transfer."""
        self._waiting.append(transfer)
        self._next()

    def _next(self) -> None:
        """Start whatever waits for no card in use and for nobody ahead of it."""
        taken = self._busy.copy()
        waiting, self._waiting = self._waiting, []
        void: list[Transfer] = []
        for transfer in waiting:
            source, target = transfer.source, transfer.target
            if not (taken[source] or taken[target]):
                size_bytes = transfer.begin()
                if size_bytes <= 0:
                    void.append(transfer)
                    continue
                self._start(transfer, size_bytes)
            else:
                self._waiting.append(transfer)
            taken[source] = taken[target] = True
        for transfer in void:
            transfer.end()

    def _start(self, transfer: Transfer, size_bytes: float) -> None:
        source, target = transfer.source, transfer.target
        seconds = self._fixed_s + size_bytes / min(self._rates[source], self._rates[target])
        for card in (source, target):
            self._busy[card] = True
            self.busy_s[card] += seconds
        self._loop.at(self._loop.now_s + seconds, self._end, transfer)

    def _end(self, transfer: Transfer) -> None:
        self._busy[transfer.source] = self._busy[transfer.target] = False
        transfer.end()
        self._next()
