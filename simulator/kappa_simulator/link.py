"""The path between a simulated node's host memory and device.

One server for loads and write-through stores (half duplex), or one for each direction. The order is
`scheduler.link_order`'s, as in our host tier; a store under way gives way to a load at once, where
a real one does between pieces of 20 ms. A store that would have to wait too long is dropped, but
not with "fifo", vLLM's own order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kappa_scheduler.link_order import FULL, LOADS_FIRST, LinkOrder
from kappa_simulator.cache import Ids
from kappa_simulator.clusters import NodeModel
from kappa_simulator.job import SimulatedJob
from kappa_simulator.loop import Loop, Noise

STORE_BACKLOG_S = 10.0


@dataclass(slots=True, eq=False)
class _Transfer:
    """A load of `blocks` for a job, or a store of `ids` up to `stop`, and its remaining time."""

    seconds: float
    blocks: int
    job: SimulatedJob | None = None
    ids: Ids | None = None
    stop: int = 0


class LinkServer:
    """Serves one transfer at a time; loaded, stored: as `NodeLink` takes them."""

    def __init__(
        self,
        loop: Loop,
        noise: Noise,
        model: NodeModel,
        loaded: Callable[[SimulatedJob, float], None],
        stored: Callable[[Ids, int, int], None],
    ) -> None:
        self._loop, self._noise, self._model = loop, noise, model
        self._loaded, self._stored = loaded, stored
        self._order = LinkOrder[_Transfer](model.link_order, lambda store: store.seconds)
        self._busy: _Transfer | None = None
        self._start_s = self._end_s = 0.0
        self._queued_store_s = 0.0
        self._version = 0
        self.slow = 1.0
        self.busy_s = self.load_s = self.store_s = 0.0
        self.load_blocks = self.store_blocks = self.stores_dropped = 0

    def load(self, job: SimulatedJob, blocks: int) -> None:
        """Bring a job's blocks to the device."""
        model = self._model
        disk_s = job.disk_blocks * model.disk_block_s
        seconds = model.load_fixed_s + blocks * model.load_block_s + disk_s
        self._order.add(_Transfer(seconds, blocks, job), load=True)
        if self._busy is None:
            self._next()
        elif self._gives_way(self._busy):
            self._suspend(self._busy)
            self._next()

    def store(self, ids: Ids, start: int, stop: int) -> bool:
        """Copy `ids[start:stop]` to the host tier when there is time; False if it is dropped."""
        seconds = self._model.load_fixed_s + (stop - start) * self._model.store_block_s
        if self._order.stores and self._queued_store_s + seconds > STORE_BACKLOG_S:
            self.stores_dropped += stop - start
            return False
        self._queued_store_s += seconds
        self._order.add(_Transfer(seconds, stop - start, ids=ids, stop=stop), load=False)
        if self._busy is None:
            self._next()
        return True

    def reset(self) -> None:
        """The node died: nothing is under way any more."""
        self._version += 1
        self._order.clear()
        self._busy = None
        self._queued_store_s = 0.0

    def _next(self) -> None:
        queue = self._order.next_queue()
        if queue is None:
            return
        self._busy = queue.popleft()
        self._start_s = self._loop.now_s
        self._end_s = self._start_s + self._busy.seconds * self._noise.factor() * self.slow
        self._version += 1
        self._loop.at(self._end_s, self._end, self._version)

    def _gives_way(self, transfer: _Transfer) -> bool:
        """Whether it is a store that has not earned its time."""
        earned = self._end_s <= self._start_s + self._order.credit_s
        return transfer.job is None and self._model.link_order == LOADS_FIRST and not earned

    def _suspend(self, store: _Transfer) -> None:
        passed_s = self._loop.now_s - self._start_s
        left = max(1.0 - passed_s / (self._end_s - self._start_s), 0.0)
        self.busy_s += passed_s
        self.store_s += passed_s
        self._queued_store_s -= store.seconds * (1.0 - left)
        store.seconds *= left
        self._order.stores.appendleft(store)

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        transfer, seconds = self._busy, self._end_s - self._start_s
        assert transfer is not None
        self._busy = None
        self.busy_s += seconds
        self._order.served(seconds, load=transfer.job is not None)
        if transfer.job is not None:
            self.load_s += seconds
            self.load_blocks += transfer.blocks
            self._next()
            self._loaded(transfer.job, seconds)
            return
        assert transfer.ids is not None
        self._queued_store_s -= transfer.seconds
        self.store_s += seconds
        self.store_blocks += transfer.blocks
        self._next()
        self._stored(transfer.ids, transfer.stop - transfer.blocks, transfer.stop)


class NodeLink:
    """One node's link: `up` serves loads and `down` stores, one and the same with half duplex.

    Args:
        loop: simulated time.
        noise: of each transfer's duration.
        model: its speeds, order and duplex.
        loaded: called with a job and its load's seconds when it has landed.
        stored: called with ids, start and stop when the blocks between have been copied.
    """

    __slots__ = ("down", "load", "store", "up")

    def __init__(
        self,
        loop: Loop,
        noise: Noise,
        model: NodeModel,
        loaded: Callable[[SimulatedJob, float], None],
        stored: Callable[[Ids, int, int], None],
    ) -> None:
        self.up = LinkServer(loop, noise, model, loaded, stored)
        self.down = self.up
        if model.duplex == FULL:
            self.down = LinkServer(loop, noise, model, loaded, stored)
        self.load, self.store = self.up.load, self.down.store

    def reset(self) -> None:
        """The node died: nothing is under way any more."""
        self.up.reset()
        self.down.reset()

    def slow_down(self, factor: float) -> None:
        """From now on every transfer takes `factor` times as long."""
        self.up.slow = self.down.slow = factor

    @property
    def busy_s(self) -> float:
        """Seconds that the busier direction was busy."""
        return max(self.up.busy_s, self.down.busy_s)
