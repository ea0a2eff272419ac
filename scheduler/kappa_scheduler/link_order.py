"""The order in which a link between host and device serves transfers, in engines and simulations.

Loads go before stores, as requests wait for them. Stores that wait behind loads earn credit,
`STORE_SHARE` of the loads' seconds, and spend it on transfers of their own, or nothing would ever
reach the host tier. Or first come, first served, as vLLM has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

LOADS_FIRST, FIFO = "loads_first", "fifo"
FULL, HALF = "full", "half"
STORE_SHARE = 0.05

T = TypeVar("T")


class LinkOrder(Generic[T]):
    """Transfers that wait for one link: urgent stores first, then loads, then stores.

    With the order "fifo" all wait in `loads`. store_s: seconds of a store's next piece, which the
    stores' credit must cover.
    """

    __slots__ = ("_fifo", "_store_s", "credit_s", "loads", "stores", "urgent")

    def __init__(self, order: str, store_s: Callable[[T], float]) -> None:
        self._fifo, self._store_s = order == FIFO, store_s
        self.urgent: deque[T] = deque()
        self.loads: deque[T] = deque()
        self.stores: deque[T] = deque()
        self.credit_s = 0.0

    def add(self, transfer: T, *, load: bool) -> None:
        (self.loads if load or self._fifo else self.stores).append(transfer)

    def next_queue(self) -> deque[T] | None:
        """The queue to serve next; if none waits None, and the credit is lost."""
        if self.urgent:
            return self.urgent
        if self.loads and not (self.stores and self._store_s(self.stores[0]) <= self.credit_s):
            return self.loads
        if self.stores:
            return self.stores
        self.credit_s = 0.0
        return None

    def served(self, seconds: float, *, load: bool) -> None:
        """A transfer, or a piece of one, took `seconds` of the link's time."""
        if not load:
            self.credit_s = max(self.credit_s - seconds, 0.0)
        elif self.stores:
            self.credit_s += seconds * STORE_SHARE

    def clear(self) -> None:
        for queue in (self.urgent, self.loads, self.stores):
            queue.clear()
        self.credit_s = 0.0
