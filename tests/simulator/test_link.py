"""One link's orders, and a link with a server per direction."""

from types import SimpleNamespace

import numpy as np
import pytest

from kappa_scheduler.link_order import STORE_SHARE
from kappa_simulator.job import SimulatedJob
from kappa_simulator.link import STORE_BACKLOG_S, NodeLink
from kappa_simulator.loop import Loop, Noise

IDS = np.arange(10_000, dtype=np.uint64)


class Bench:
    """A link alone: a second a block, and what it announced, when."""

    def __init__(self, duplex="half", order="loads_first"):
        self.loop = Loop()
        self.landed = []
        model = SimpleNamespace(
            load_block_s=1.0, store_block_s=1.0, load_fixed_s=0.0, disk_block_s=0.0,
            link_order=order, duplex=duplex,
        )  # fmt: skip
        self.link = NodeLink(
            self.loop, Noise(np.random.default_rng(0), 0.0), model,
            lambda job, _: self.landed.append((self.loop.now_s, job.key)),
            lambda ids, start, stop: self.landed.append((self.loop.now_s, (start, stop))),
        )  # fmt: skip

    def load(self, at_s, key, blocks):
        job = SimulatedJob(key, 1, 1, IDS, at_s)
        self.loop.at(at_s, lambda _: self.link.load(job, blocks))

    def store(self, at_s, start, stop):
        self.loop.at(at_s, lambda _: self.link.store(IDS, start, stop))

    def run(self):
        self.loop.run()
        return self.landed


def test_fifo_link_makes_loads_wait_for_earlier_stores():
    bench = Bench(order="fifo")
    bench.store(0.0, 0, 4)
    bench.store(0.5, 4, 6)
    bench.load(1.0, 7, 2)
    bench.store(1.5, 6, 7)
    bench.load(2.0, 8, 1)
    assert bench.run() == [(4.0, (0, 4)), (6.0, (4, 6)), (8.0, 7), (9.0, (6, 7)), (10.0, 8)]


def test_first_come_first_served_drops_nothing():
    fifo, ours = Bench(order="fifo"), Bench()
    for bench in (fifo, ours):
        for start in range(0, 60, 6):
            bench.store(0.0, start, start + 6)
        bench.run()
    assert fifo.link.down.store_blocks == 60 and fifo.link.down.stores_dropped == 0
    assert ours.link.down.stores_dropped > 0


def test_with_full_duplex_loads_and_stores_do_not_meet():
    bench = Bench("full")
    bench.store(0.0, 0, 4)
    bench.load(1.0, 7, 2)
    assert bench.run() == [(3.0, 7), (4.0, (0, 4))]
    up, down = bench.link.up, bench.link.down
    assert (up.load_blocks, down.store_blocks, down.stores_dropped) == (2, 4, 0)
    assert (up.load_s, down.store_s, bench.link.busy_s) == (2.0, 4.0, 4.0)


@pytest.mark.parametrize("duplex", ["half", "full"])
@pytest.mark.parametrize("order", ["loads_first", "fifo"])
def test_a_dead_node_forgets_its_transfers_and_starts_anew(duplex, order):
    bench = Bench(duplex, order)
    bench.load(0.0, 1, 5)
    bench.store(0.0, 0, 5)
    bench.loop.at(1.0, lambda _: bench.link.reset())
    bench.load(2.0, 2, 3)
    assert bench.run() == [(5.0, 2)]


def test_a_slow_link_takes_longer():
    bench = Bench("full")
    bench.link.slow_down(3.0)
    bench.load(0.0, 1, 1)
    bench.store(0.0, 0, 2)
    assert bench.run() == [(3.0, 1), (6.0, (0, 2))]


def test_link_interrupts_a_store_for_a_load_and_resumes_it():
    bench = Bench()
    bench.store(0.0, 0, 4)
    bench.load(1.0, 7, 2)
    # A second of the store, two of the load, three of the store.
    assert bench.run() == [(3.0, 7), (6.0, (0, 4))]
    assert (bench.link.busy_s, bench.link.up.load_s, bench.link.down.store_s) == (6.0, 2.0, 4.0)


def test_stores_get_their_share_of_a_busy_link():
    bench = Bench()
    for key in range(50):
        bench.load(0.0, key, 2)
    bench.store(0.5, 0, 2)
    landed = bench.run()
    # After loads worth the store's 2 s over the share, it has its turn, and keeps it.
    (stored_s,) = [at_s for at_s, what in landed if what == (0, 2)]
    assert stored_s == pytest.approx(2 / STORE_SHARE + 2, abs=2.1)
    assert landed[-1] == (102.0, 49)


def test_a_store_that_would_wait_too_long_is_dropped():
    bench = Bench()
    kept = []
    bench.loop.at(
        0.0, lambda _: kept.extend(bench.link.store(IDS, i * 6, i * 6 + 6) for i in range(3))
    )
    bench.run()
    # The first is under way; 6 s of the second wait, and 12 s are more than 10.
    assert kept == [True, True, False] and STORE_BACKLOG_S == 10.0
    assert bench.link.down.stores_dropped == 6
    assert bench.loop.now_s == 12.0
