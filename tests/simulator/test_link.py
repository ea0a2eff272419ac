"""One link's orders, and a link with a server per direction."""

import numpy as np
import pytest

from simulator.job import Job
from simulator.link import DuplexLink, Link, link_class
from simulator.loop import Loop
from simulator.noise import Noise

IDS = np.arange(100, dtype=np.uint64)


class Bench:
    """A link alone: a second a block, and what it said, when."""

    def __init__(self, kind=Link, **options):
        self.loop = Loop()
        self.said = []
        self.link = kind(
            self.loop, Noise(np.random.default_rng(0), 0.0), load_block_s=1.0, store_block_s=1.0,
            fixed_s=0.0, loaded=lambda job, _: self.said.append((self.loop.now_s, job.key)),
            stored=lambda ids, start, stop: self.said.append((self.loop.now_s, (start, stop))),
            **options,
        )  # fmt: skip

    def load(self, at_s, key, blocks):
        job = Job(key, 1, 1, IDS, 0, at_s)
        self.loop.at(at_s, lambda _: self.link.load(job, blocks))

    def store(self, at_s, start, stop):
        self.loop.at(at_s, lambda _: self.link.store(IDS, start, stop))

    def run(self):
        self.loop.run()
        return self.said


def test_loads_go_before_stores_and_stores_give_way():
    bench = Bench()
    bench.store(0.0, 0, 4)
    bench.load(1.0, 7, 2)
    assert bench.run() == [(3.0, 7), (6.0, (0, 4))]


def test_first_come_first_served_waits_for_the_store_under_way_and_those_before():
    bench = Bench(order="fifo")
    bench.store(0.0, 0, 4)
    bench.store(0.5, 4, 6)
    bench.load(1.0, 7, 2)
    bench.store(1.5, 6, 7)
    assert bench.run() == [(4.0, (0, 4)), (6.0, (4, 6)), (8.0, 7), (9.0, (6, 7))]


def test_first_come_first_served_drops_nothing():
    fifo, ours = Bench(order="fifo"), Bench()
    for bench in (fifo, ours):
        for start in range(0, 60, 6):
            bench.store(0.0, start, start + 6)
        bench.run()
    assert fifo.link.store_blocks == 60 and fifo.link.stores_dropped == 0
    assert ours.link.stores_dropped > 0


def test_with_full_duplex_loads_and_stores_do_not_meet():
    bench = Bench(DuplexLink)
    bench.store(0.0, 0, 4)
    bench.load(1.0, 7, 2)
    assert bench.run() == [(3.0, 7), (4.0, (0, 4))]
    link = bench.link
    assert (link.load_blocks, link.store_blocks, link.stores_dropped) == (2, 4, 0)
    assert (link.load_s, link.store_s, link.busy_s) == (2.0, 4.0, 4.0)


@pytest.mark.parametrize("kind", [Link, DuplexLink])
@pytest.mark.parametrize("order", ["loads_first", "fifo"])
def test_a_dead_node_forgets_its_transfers_and_starts_anew(kind, order):
    bench = Bench(kind, order=order)
    bench.load(0.0, 1, 5)
    bench.store(0.0, 0, 5)
    bench.loop.at(1.0, lambda _: bench.link.reset())
    bench.load(2.0, 2, 3)
    assert bench.run() == [(5.0, 2)]


def test_a_slow_link_takes_longer():
    bench = Bench(DuplexLink)
    bench.link.slow = 3.0
    bench.load(0.0, 1, 1)
    assert bench.link.slow == 3.0 and bench.run() == [(3.0, 1)]


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="'lifo': choose loads_first or fifo"):
        Bench(order="lifo")
    with pytest.raises(ValueError, match="'simplex': choose half or full"):
        link_class("simplex")
