"""The thread that serves a link, on real tensors: order, waiting, dropping; events hold time."""

import threading

import numpy as np
import pytest
import torch

from scheduler.link_order import FIFO, LOADS_FIRST
from workers.vllm.link import Link, Route
from workers.vllm.link_queue import LOAD, STORE, LinkRules

pytestmark = pytest.mark.vllm

BLOCKS = 64


class Bench:
    """A link whose paced pieces last until they are let go, one `step()` each."""

    def __init__(self, order, directions=(LOAD, STORE), late_wait_s=0.0, pace_s=None):
        self.host = torch.zeros(BLOCKS, 8, dtype=torch.int8)
        self.device = torch.randint(
            -128, 128, (BLOCKS, 8), dtype=torch.int8, generator=torch.Generator().manual_seed(1)
        )
        routes = {
            LOAD: Route([self.host], [self.device]), STORE: Route([self.device], [self.host]),
        }  # fmt: skip
        self.reports = []
        self._asleep, self._go = threading.Semaphore(0), threading.Semaphore(0)
        self.link = Link(
            {d: routes[d] for d in directions}, LinkRules(order=order, late_wait_s=late_wait_s),
            pace_s or (lambda direction, blocks: 1e6 * blocks),
            self.reports.append, sleep=self._sleep,
        )  # fmt: skip

    def _sleep(self, seconds):
        self._asleep.release()
        assert self._go.acquire(timeout=20)

    def busy(self):
        """Wait until a piece is under way."""
        assert self._asleep.acquire(timeout=20)

    def step(self):
        """Let the piece under way end."""
        self._go.release()

    def submit(self, direction, job_id, ids):
        self.link.submit(direction, job_id, np.array(ids), np.array(ids))

    def close(self):
        for _ in range(1000):
            self._go.release()
        self.link.close()

    def ended(self):
        """Jobs that ended, in order."""
        return [report["blocks"] for report in self.reports if report["kind"] != "wait"]


@pytest.fixture
def make():
    made = []

    def bench(*args, **kwargs):
        made.append(Bench(*args, **kwargs))
        return made[-1]

    yield bench
    for one in made:
        one.close()


def finished_of(bench, count):
    results = []
    while len(results) < count:
        bench.link.wait_change(20.0)
        results += bench.link.take_finished()
    return results


def in_thread(call, *arguments):
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    return thread


def test_a_load_overtakes_queued_stores_on_a_shared_link(make):
    bench = make(LOADS_FIRST)
    bench.submit(STORE, 1, [0])
    bench.busy()
    bench.submit(STORE, 2, [1])
    bench.submit(LOAD, 3, [2])
    for _ in range(2):
        bench.step()
        bench.busy()
    bench.step()
    assert [r.job_id for r in finished_of(bench, 3)] == [1, 3, 2]
    assert [r["kind"] for r in bench.reports] == ["store", "load", "store"]


def test_a_load_waits_for_one_piece_of_a_long_store(make):
    bench = make(LOADS_FIRST)
    bench.submit(STORE, 1, range(6))
    bench.busy()
    bench.submit(LOAD, 2, [9])
    bench.step()
    bench.busy()
    bench.step()
    assert [r.job_id for r in finished_of(bench, 1)] == [2]


def test_first_come_first_served_lets_a_load_wait_behind_stores(make):
    bench = make(FIFO)
    for job, direction in ((1, STORE), (2, STORE), (3, LOAD)):
        bench.submit(direction, job, range(job))
    for _ in range(3):
        bench.busy()
        bench.step()
    assert [r.job_id for r in finished_of(bench, 3)] == [1, 2, 3]


def test_waiting_for_a_queued_store_drops_it_when_there_is_no_time(make):
    bench = make(LOADS_FIRST)
    bench.submit(LOAD, 1, [0])
    bench.busy()
    bench.submit(STORE, 2, [1, 2, 3])
    bench.link.wait({2})  # returns while the link is busy with the load
    (result,) = bench.link.take_finished()
    assert (result.job_id, result.success, result.transfer_size) == (2, True, None)
    assert bench.link.take_dropped() == {2}
    assert bench.link.take_dropped() == set()
    assert bench.reports == [{"kind": "store_dropped", "blocks": 3, "why": "late"}]
    bench.step()
    finished_of(bench, 1)
    assert not bench.host[1:4].any()


def test_waiting_for_a_store_under_way_ends_with_its_piece(make):
    bench = make(LOADS_FIRST)
    bench.submit(STORE, 1, range(6))
    bench.busy()
    waiter = in_thread(bench.link.wait, {1})
    waiter.join(0.05)
    assert waiter.is_alive()
    bench.step()
    waiter.join(20)
    assert not waiter.is_alive()
    assert bench.link.take_dropped() == {1}
    assert not bench.host[1:].any()


def test_waiting_for_a_store_for_which_there_is_time_keeps_it_and_puts_it_first(make):
    bench = make(LOADS_FIRST, late_wait_s=1e9)
    bench.submit(LOAD, 1, [0])
    bench.busy()
    bench.submit(LOAD, 2, [5])
    bench.submit(STORE, 3, [1])
    waiter = in_thread(bench.link.wait, {3})
    while not bench.link._queue.order.urgent:
        waiter.join(0.001)
    for _ in range(2):
        bench.step()
        bench.busy()
    waiter.join(20)
    assert not waiter.is_alive()
    assert [r.job_id for r in bench.link.take_finished()] == [1, 3]
    assert bench.link.take_dropped() == set()
    assert torch.equal(bench.host[1], bench.device[1])


def test_stock_order_waits_and_drops_nothing(make):
    bench = make(FIFO)
    bench.submit(STORE, 1, [0])
    bench.submit(STORE, 2, [1])
    waiter = in_thread(bench.link.wait, {2})
    bench.busy()
    bench.step()
    bench.busy()
    assert waiter.is_alive()
    bench.step()
    waiter.join(20)
    assert not waiter.is_alive() and bench.link.take_dropped() == set()
    assert torch.equal(bench.host[:2], bench.device[:2])


def test_sources_and_targets_must_pair_up(make):
    bench = make(LOADS_FIRST)
    with pytest.raises(ValueError, match="load job 1: 2 source blocks, 1 targets"):
        bench.link.submit(LOAD, 1, np.array([0, 1]), np.array([0]))
    assert not bench.link.has_unfinished(LOAD)


def test_a_load_that_cannot_be_made_fails_and_a_store_is_dropped(make):
    bench = make(LOADS_FIRST, pace_s=lambda direction, blocks: 0.0)
    bench.submit(LOAD, 1, [400])
    bench.submit(STORE, 2, [400])
    bench.submit(LOAD, 3, [1])
    results = {r.job_id: r.success for r in finished_of(bench, 3)}
    assert results == {1: False, 2: True, 3: True}
    assert bench.link.take_dropped() == {2}


def test_with_stock_order_a_store_that_cannot_be_made_fails_too(make):
    bench = make(FIFO, pace_s=lambda direction, blocks: 0.0)
    bench.submit(STORE, 1, [400])
    assert [(r.job_id, r.success) for r in finished_of(bench, 1)] == [(1, False)]
    assert bench.link.take_dropped() == set()


def test_seconds_per_block_are_measured(make):
    bench = make(LOADS_FIRST, pace_s=lambda direction, blocks: 0.0)
    assert bench.link.block_s == {LOAD: 0.0, STORE: 0.0}
    bench.submit(STORE, 1, range(4))
    finished_of(bench, 1)
    assert bench.link.block_s[STORE] > 0 == bench.link.block_s[LOAD]


def test_closing_lets_waiters_go_and_drops_what_is_queued(make):
    bench = make(LOADS_FIRST)
    for job in range(50):
        bench.submit(LOAD, job, [0])
    bench.busy()
    waiter = in_thread(bench.link.wait, set(range(50)))
    bench.close()
    waiter.join(20)
    assert not waiter.is_alive()
    assert len(bench.link.take_finished()) < 50
