"""The path between host and device: one server for loads and for write-through stores.

Loads go first, in order. Stores run when no load waits and give way to one that comes; while loads
keep the link busy they still get a share of it, or nothing would ever reach the host tier. A store
that would have to wait too long is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from simulator.cache import Ids
from simulator.job import Job
from simulator.loop import Loop
from simulator.noise import Noise

STORE_SHARE = 0.2
STORE_BACKLOG_S = 10.0


class Link:
    """One node's link.

    Args:
        loop: simulated time.
        noise: of each transfer's duration.
        load_block_s: seconds a block takes to the device; store_block_s: to the host.
        fixed_s: seconds a transfer costs besides.
        loaded: called with a job and its load's seconds when it has landed.
        stored: called with ids, start and stop when the blocks between have been copied.
    """

    __slots__ = (
        "_busy_job", "_busy_store", "_credit_s", "_end_s", "_fixed_s", "_load_block_s", "_loaded",
        "_loads", "_loop", "_noise", "_queued_store_s", "_start_s", "_store_block_s", "_stored",
        "_stores", "_version", "busy_s", "load_blocks", "load_s", "slow", "store_blocks", "store_s",
        "stores_dropped",
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
    ) -> None:
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
        if self._busy_job is None:
            if self._busy_store is not None:
                if self._end_s <= self._start_s + self._credit_s:
                    return
                self._give_way()
            self._next()

    def store(self, ids: Ids, start: int, stop: int) -> bool:
        """Copy `ids[start:stop]` to the host tier when there is time; False if it is dropped."""
        seconds = self._fixed_s + (stop - start) * self._store_block_s
        if self._queued_store_s + seconds > STORE_BACKLOG_S and self._stores:
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
        self._busy_job = self._busy_store = None
        self._queued_store_s = self._credit_s = 0.0

    def _next(self) -> None:
        now_s = self._loop.now_s
        if self._loads and not (self._stores and self._stores[0][3] <= self._credit_s):
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
