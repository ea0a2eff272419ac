"""The thread that serves a link, on real tensors: order, waiting, dropping; events hold time."""

import threading

import numpy as np
import pytest
import torch

from kappa_scheduler.link_order import FIFO, LOADS_FIRST
from kappa_workers.paced.link import Link, Route
from kappa_workers.vllm.load_sources import LOAD, STORE
from kappa_workers.vllm.options import LinkRules

pytestmark = pytest.mark.vllm

BLOCKS = 64
PATIENCE_S = 20


class Bench:
    """A link with paced pieces that last until they are let go, one `step()` each."""

    def __init__(self, order=LOADS_FIRST, late_wait_s=0.0, paced=True, layers=1):
        generator = torch.Generator().manual_seed(1)
        self.host = torch.zeros(BLOCKS, 8, dtype=torch.int8)
        self.device = torch.randint(-128, 128, (BLOCKS, 8), dtype=torch.int8, generator=generator)
        host, device = [self.host] * layers, [self.device] * layers
        there, back = Route(host, device), Route(device, host)
        self.reports = []
        self._asleep, self._go = threading.Semaphore(0), threading.Semaphore(0)
        self.link = Link(
            {LOAD: there, STORE: back}, LinkRules(order=order, late_wait_s=late_wait_s),
            lambda direction, blocks: 1e6 * blocks if paced else 0.0,
            self.reports.append, sleep=self._sleep,
        )  # fmt: skip

    def _sleep(self, seconds):
        self._asleep.release()
        assert self._go.acquire(timeout=PATIENCE_S)

    def busy(self):
        """Wait until a piece is under way."""
        assert self._asleep.acquire(timeout=PATIENCE_S)

    def step(self, pieces=1):
        """Let the piece under way end; with more, those behind it until the last but one."""
        for _ in range(pieces - 1):
            self._go.release()
            self.busy()
        self._go.release()

    def submit(self, direction, job_id, *ids, by_layer=False):
        self.link.submit(direction, job_id, np.array(ids), np.array(ids), by_layer)

    def finished(self, count):
        """Jobs in the order in which they ended, whether each succeeded."""
        results = []
        while len(results) < count:
            self.link.wait_change(PATIENCE_S)
            results += self.link.take_finished()
        return [(result.job_id, result.success) for result in results]

    def wait_in_thread(self, *job_ids, layer=None):
        wait, for_what = self.link.wait, set(job_ids)
        if layer is not None:
            wait, for_what = self.link.wait_layer, layer
        waiter = threading.Thread(target=wait, args=(for_what,), daemon=True)
        waiter.start()
        return waiter

    def close(self):
        closing = threading.Thread(target=self.link.close)
        closing.start()
        while not self.link._closed:  # else pieces let go would be served
            closing.join(0.001)
        for _ in range(1000):
            self._go.release()
        closing.join(PATIENCE_S)


@pytest.fixture
def make(closing):
    return lambda *args, **options: closing(Bench(*args, **options))


def test_a_load_overtakes_queued_stores_on_a_shared_link(make):
    bench = make()
    bench.submit(STORE, 1, 0)
    bench.busy()
    bench.submit(STORE, 2, 1)
    bench.submit(LOAD, 3, 2)
    bench.step(3)
    assert bench.finished(3) == [(1, True), (3, True), (2, True)]
    assert [r["kind"] for r in bench.reports] == ["store", "load", "store"]


def test_wait_drops_a_queued_store_when_there_is_no_time(make):
    bench = make()
    bench.submit(LOAD, 1, 0)
    bench.busy()
    bench.submit(STORE, 2, 1, 2, 3)
    bench.link.wait({2})  # returns while the link is busy with the load
    (result,) = bench.link.take_finished()
    assert (result.job_id, result.success, result.transfer_size) == (2, True, None)
    assert [bench.link.take_dropped() for _ in range(2)] == [{2}, set()]
    assert bench.reports == [{"kind": "store_dropped", "blocks": 3, "why": "late"}]
    bench.step()
    assert bench.finished(1) == [(1, True)] and not bench.host[1:4].any()


def test_waiting_for_a_store_under_way_ends_with_its_piece(make):
    bench = make()
    bench.submit(STORE, 1, *range(6))
    bench.busy()
    waiter = bench.wait_in_thread(1)
    waiter.join(0.05)
    assert waiter.is_alive()
    bench.step()
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive() and bench.link.take_dropped() == {1}
    assert not bench.host[1:].any()


def test_wait_puts_a_queued_store_first_when_there_is_time(make):
    bench = make(late_wait_s=1e9)
    bench.submit(LOAD, 1, 0)
    bench.busy()
    bench.submit(LOAD, 2, 5)
    bench.submit(STORE, 3, 1)
    waiter = bench.wait_in_thread(3)
    while not bench.link._queue.order.urgent:
        waiter.join(0.001)
    bench.step(3)
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive() and bench.link.take_dropped() == set()
    assert [job for job, _ in bench.finished(2)][:2] == [1, 3]
    assert torch.equal(bench.host[1], bench.device[1])


def test_stock_order_waits_and_drops_nothing(make):
    bench = make(FIFO)
    bench.submit(STORE, 1, 0)
    bench.submit(STORE, 2, 1)
    waiter = bench.wait_in_thread(2)
    bench.busy()
    bench.step()
    bench.busy()
    assert waiter.is_alive()
    bench.step()
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive() and bench.link.take_dropped() == set()
    assert torch.equal(bench.host[:2], bench.device[:2])


def test_sources_and_targets_must_pair_up(make):
    bench = make()
    with pytest.raises(ValueError, match="load job 1: 2 source blocks, 1 targets"):
        bench.link.submit(LOAD, 1, np.array([0, 1]), np.array([0]))
    assert not bench.link.has_unfinished(LOAD)


def test_wait_layer_returns_before_later_layers_have_landed(make):
    bench = make(layers=3)
    bench.submit(LOAD, 1, 0, 1, by_layer=True)
    bench.busy()
    waiter = bench.wait_in_thread(layer=1)
    bench.step()
    bench.busy()  # the first is there, the second under way
    assert waiter.is_alive() and not bench.link.take_finished()
    bench.step()
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive() and not bench.link.take_finished()
    assert bench.link.take_layered() == [], "it has not ended"
    whole = bench.wait_in_thread(layer=3)
    bench.busy()
    bench.step()
    whole.join(PATIENCE_S)
    assert bench.finished(1) == [(1, True)]
    ((*landed_s,),) = bench.link.take_layered()
    assert len(landed_s) == 3 and bench.link.take_layered() == []


def test_wait_layer_returns_and_reports_when_the_load_fails(make):
    bench = make(paced=False, layers=2)
    bench.submit(LOAD, 1, 0, 400, by_layer=True)
    bench.link.wait_layer(1)
    assert bench.finished(1) == [(1, True)]
    assert bench.link.take_lost() == {0, 400} and bench.link.take_lost() == set()
    assert [r["kind"] for r in bench.reports] == ["tier_failed"]


def test_nobody_waits_for_a_layer_for_ever(make, monkeypatch):
    monkeypatch.setattr("kappa_workers.paced.link._STUCK_S", 0.01)
    bench = make()
    bench.submit(LOAD, 1, 0, by_layer=True)
    with pytest.raises(TimeoutError, match="no layer came from the host tier"):
        bench.link.wait_layer(0)


@pytest.mark.parametrize(("order", "dropped"), [(LOADS_FIRST, {2}), (FIFO, set())])
def test_link_reports_failed_loads_as_lost_and_stores_as_dropped(make, order, dropped):
    bench = make(order, paced=False)
    bench.submit(LOAD, 1, 400)
    bench.submit(STORE, 2, 400)
    bench.submit(LOAD, 3, 1)
    assert dict(bench.finished(3)) == {1: True, 2: bool(dropped), 3: True}
    assert bench.link.take_lost() == {400}
    assert bench.link.take_dropped() == dropped


def test_seconds_per_block_are_measured(make):
    bench = make(paced=False)
    assert bench.link.block_s == {LOAD: 0.0, STORE: 0.0}
    bench.submit(STORE, 1, *range(4))
    bench.finished(1)
    assert bench.link.block_s[STORE] > 0 == bench.link.block_s[LOAD]


def test_closing_lets_waiters_go_and_drops_what_is_queued(make):
    bench = make()
    for job in range(50):
        bench.submit(LOAD, job, 0)
    bench.busy()
    waiter = bench.wait_in_thread(*range(50))
    bench.close()
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive() and len(bench.link.take_finished()) < 50
