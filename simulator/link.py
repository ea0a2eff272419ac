"""The path between host and device: one server for loads and for write-through stores, or two.

Loads go first, in order. Stores run when no load waits and give way to one that comes; while loads
keep the link busy they still get a share of it, or nothing would ever reach the host tier. A store
that would have to wait too long is dropped. That is our host tier's order; vLLM's own, "fifo", is
first come first served, and drops nothing. With a full-duplex link each direction has a server of
its own, and loads and stores do not meet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from simulator.cache import Ids
from simulator.job import Job
from simulator.loop import Loop
from simulator.noise import Noise

STORE_SHARE = 0.05
STORE_BACKLOG_S = 10.0
LOADS_FIRST, FIFO = "loads_first", "fifo"
HALF, FULL = "half", "full"


class Link:
    """One node's link.

    Args:
        loop: simulated time.
        noise: of each transfer's duration.
        load_block_s: seconds a block takes to the device; store_block_s: to the host.
        fixed_s: seconds a transfer costs besides.
        loaded: called with a job and its load's seconds when it has landed.
        stored: called with ids, start and stop when the blocks between have been copied.
        order: "loads_first" or "fifo".
    """

    __slots__ = (
        "_busy_job", "_busy_store", "_credit_s", "_end_s", "_fixed_s", "_load_block_s", "_loaded",
        "_loads", "_loop", "_noise", "_order", "_queued_store_s", "_start_s", "_store_block_s",
        "_stored", "_stores", "_version", "busy_s", "load_blocks", "load_s", "slow", "store_blocks",
        "store_s", "stores_dropped",
    )  # fmt: skip

    def __init__(
        self,
        loop: Loop,
        noise: Noise,
        *,
        load_block_s: float,
        store_block_s: float,
        fixed_s: float,
        loaded: Callable[[Job, float], None],
        stored: Callable[[Ids, int, int], None],
        order: str = LOADS_FIRST,
    ) -> None:
        if order not in (LOADS_FIRST, FIFO):
            raise ValueError(f"unknown link order {order!r}: choose {LOADS_FIRST} or {FIFO}")
        self._loop = loop
        self._noise = noise
        self._load_block_s = load_block_s
        self._store_block_s = store_block_s
        self._fixed_s = fixed_s
        self._loaded = loaded
        self._stored = stored
        self._loads: deque[tuple[Job, int]] = deque()
        # Ids, from which to which, seconds left.
        self._stores: deque[tuple[Ids, int, int, float]] = deque()
        # With "fifo": which of the two the next transfer is in, True for loads.
        self._order: deque[bool] | None = deque() if order == FIFO else None
        self._busy_job: tuple[Job, int] | None = None
        self._busy_store: tuple[Ids, int, int, float] | None = None
        self._start_s = self._end_s = 0.0
        self._credit_s = 0.0
        self._queued_store_s = 0.0
        self._version = 0
        self.slow = 1.0
        self.busy_s = self.load_s = self.store_s = 0.0
        self.load_blocks = self.store_blocks = self.stores_dropped = 0

    def load(self, job: Job, blocks: int) -> None:
        """Bring a job's blocks to the device."""
        self._loads.append((job, blocks))
        if self._order is not None:
            self._order.append(True)
        if self._busy_job is None:
            if self._busy_store is not None:
                if self._order is not None:
                    return
                if self._end_s <= self._start_s + self._credit_s:
                    return
                self._give_way()
            self._next()

    def store(self, ids: Ids, start: int, stop: int) -> bool:
        """Copy `ids[start:stop]` to the host tier when there is time; False if it is dropped."""
        seconds = self._fixed_s + (stop - start) * self._store_block_s
        if self._order is not None:
            self._order.append(False)
        elif self._queued_store_s + seconds > STORE_BACKLOG_S and self._stores:
            self.stores_dropped += stop - start
            return False
        self._queued_store_s += seconds
        self._stores.append((ids, start, stop, seconds))
        if self._busy_job is None and self._busy_store is None:
            self._next()
        return True

    def reset(self) -> None:
        """The node died: nothing is under way any more."""
        self._version += 1
        self._loads.clear()
        self._stores.clear()
        if self._order is not None:
            self._order.clear()
        self._busy_job = self._busy_store = None
        self._queued_store_s = self._credit_s = 0.0

    def _next(self) -> None:
        now_s = self._loop.now_s
        if self._load_next():
            self._busy_job = self._loads.popleft()
            seconds = self._fixed_s + self._busy_job[1] * self._load_block_s
            seconds *= self._noise.factor() * self.slow
        elif self._stores:
            self._busy_store = self._stores.popleft()
            seconds = self._busy_store[3] * self._noise.factor() * self.slow
        else:
            self._credit_s = 0.0
            return
        self._start_s, self._end_s = now_s, now_s + seconds
        self._version += 1
        self._loop.at(self._end_s, self._end, self._version)

    def _load_next(self) -> bool:
        if self._order is not None:
            return bool(self._order) and self._order.popleft()
        credit = self._stores and self._stores[0][3] <= self._credit_s
        return bool(self._loads) and not credit

    def _give_way(self) -> None:
        assert self._busy_store is not None
        ids, start, stop, seconds = self._busy_store
        passed_s = self._loop.now_s - self._start_s
        left = max(1.0 - passed_s / (self._end_s - self._start_s), 0.0)
        self.busy_s += passed_s
        self.store_s += passed_s
        self._queued_store_s -= seconds * (1.0 - left)
        self._stores.appendleft((ids, start, stop, seconds * left))
        self._busy_store = None

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        seconds = self._end_s - self._start_s
        self.busy_s += seconds
        if self._busy_job is not None:
            job, blocks = self._busy_job
            self._busy_job = None
            self.load_s += seconds
            self.load_blocks += blocks
            if self._stores:
                self._credit_s += seconds * STORE_SHARE
            self._next()
            self._loaded(job, seconds)
            return
        assert self._busy_store is not None
        ids, start, stop, planned_s = self._busy_store
        self._busy_store = None
        self._queued_store_s -= planned_s
        self._credit_s = max(self._credit_s - seconds, 0.0)
        self.store_s += seconds
        self.store_blocks += stop - start
        self._next()
        self._stored(ids, start, stop)


def link_class(duplex: str) -> type[Link] | type[DuplexLink]:
    """The link of that kind.

    Raises:
        ValueError: names the kinds.
    """
    if duplex not in (HALF, FULL):
        raise ValueError(f"unknown link duplex {duplex!r}: choose {HALF} or {FULL}")
    return DuplexLink if duplex == FULL else Link


class DuplexLink:
    """A link whose two directions do not share anything: one server for loads, one for stores."""

    __slots__ = ("_down", "_up")

    def __init__(
        self,
        loop: Loop,
        noise: Noise,
        *,
        load_block_s: float,
        store_block_s: float,
        fixed_s: float,
        loaded: Callable[[Job, float], None],
        stored: Callable[[Ids, int, int], None],
        order: str = LOADS_FIRST,
    ) -> None:
        self._up, self._down = (
            Link(
                loop, noise, load_block_s=load_block_s, store_block_s=store_block_s,
                fixed_s=fixed_s, loaded=loaded, stored=stored, order=order,
            )
            for _ in range(2)
        )  # fmt: skip

    def load(self, job: Job, blocks: int) -> None:
        """Bring a job's blocks to the device."""
        self._up.load(job, blocks)

    def store(self, ids: Ids, start: int, stop: int) -> bool:
        """Copy `ids[start:stop]` to the host tier when there is time; False if it is dropped."""
        return self._down.store(ids, start, stop)

    def reset(self) -> None:
        """The node died: nothing is under way any more."""
        self._up.reset()
        self._down.reset()

    @property
    def slow(self) -> float:
        """Factor on all durations."""
        return self._up.slow

    @slow.setter
    def slow(self, factor: float) -> None:
        self._up.slow = self._down.slow = factor

    @property
    def busy_s(self) -> float:
        """Seconds that the busier direction was busy."""
        return max(self._up.busy_s, self._down.busy_s)

    @property
    def load_s(self) -> float:
        """Seconds of loads."""
        return self._up.load_s

    @property
    def store_s(self) -> float:
        """Seconds of stores."""
        return self._down.store_s

    @property
    def load_blocks(self) -> int:
        """Blocks loaded."""
        return self._up.load_blocks

    @property
    def store_blocks(self) -> int:
        """Blocks stored."""
        return self._down.store_blocks

    @property
    def stores_dropped(self) -> int:
        """Blocks of stores that were dropped."""
        return self._down.stores_dropped
