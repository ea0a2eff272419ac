"""Links under load, and the order of events."""

import numpy as np
import pytest

from simulator.link import STORE_BACKLOG_S, STORE_SHARE, Link
from simulator.loop import Loop
from simulator.noise import Noise

IDS = np.arange(10_000, dtype=np.uint64)


class Bench:
    def __init__(self, load_block_s=1.0, store_block_s=1.0):
        self.loop = Loop()
        self.loads: list[float] = []
        self.stores: list[tuple[int, int, float]] = []
        self.link = Link(
            self.loop, Noise(np.random.default_rng(0), 0.0), load_block_s=load_block_s,
            store_block_s=store_block_s, fixed_s=0.0,
            loaded=lambda job, seconds: self.loads.append(self.loop.now_s),
            stored=lambda ids, a, b: self.stores.append((a, b, self.loop.now_s)),
        )  # fmt: skip

    def load(self, blocks, at_s=0.0):
        self.loop.at(at_s, lambda _: self.link.load(None, blocks))

    def store(self, start, stop, at_s=0.0):
        self.loop.at(at_s, lambda _: self.link.store(IDS, start, stop))


def test_loads_are_served_in_order():
    bench = Bench()
    bench.load(2), bench.load(3), bench.load(1, at_s=1.0)
    bench.loop.run()
    assert bench.loads == [2.0, 5.0, 6.0]


def test_a_store_gives_way_and_goes_on_where_it_was():
    bench = Bench()
    bench.store(0, 4)
    bench.load(2, at_s=1.0)
    bench.loop.run()
    assert bench.loads == [3.0] and bench.stores == [(0, 4, 6.0)]
    assert bench.link.busy_s == pytest.approx(6.0)


def test_stores_get_their_share_of_a_busy_link():
    bench = Bench()
    for _ in range(50):
        bench.load(2)
    bench.store(0, 2, at_s=0.5)
    bench.loop.run()
    # After loads worth the store's 2 s over the share, it has its turn.
    assert bench.stores[0][2] == pytest.approx(2 / STORE_SHARE + 2, abs=2.1)
    assert bench.loads[-1] == pytest.approx(102.0)


def test_a_store_that_would_wait_too_long_is_dropped():
    bench = Bench()
    results = []
    bench.loop.at(0.0, lambda _: results.extend(bench.link.store(IDS, i * 6, i * 6 + 6)
                                                for i in range(3)))  # fmt: skip
    bench.loop.run()
    assert results == [True, True, False] or results == [True, False, False]
    assert bench.link.stores_dropped == 6 * results.count(False)
    assert bench.loop.now_s <= STORE_BACKLOG_S + 6


def test_a_reset_link_forgets_what_was_under_way():
    bench = Bench()
    bench.load(2), bench.store(0, 5)
    bench.loop.at(1.0, lambda _: bench.link.reset())
    bench.load(1, at_s=3.0)
    bench.loop.run()
    assert bench.loads == [4.0] and not bench.stores


def test_events_at_one_time_happen_in_the_order_they_were_asked_for():
    loop, seen = Loop(), []
    for name in "abc":
        loop.at(1.0, seen.append, name)
    loop.at(0.5, lambda _: loop.at(1.0, seen.append, "d"))
    loop.run()
    assert seen == ["a", "b", "c", "d"] and loop.now_s == 1.0


def test_noise_has_median_one_and_is_seeded():
    first, again = (Noise(np.random.default_rng(5), 0.1) for _ in range(2))
    drawn = [first.factor() for _ in range(5000)]
    assert drawn == [again.factor() for _ in range(5000)]
    assert np.median(drawn) == pytest.approx(1.0, abs=0.01)
    assert np.std(np.log(drawn)) == pytest.approx(0.1, rel=0.05)
    assert Noise(np.random.default_rng(5), 0.0).factor() == 1.0
