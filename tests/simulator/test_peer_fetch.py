"""KV from a peer: arrivals and their order, pins, and prefixes that are not moved."""

from types import SimpleNamespace

import numpy as np
import pytest

from kappa_simulator.job import SimulatedJob
from kappa_simulator.loop import Loop
from kappa_simulator.memory import NodeMemory
from kappa_simulator.peer_fetch import PeerFetches

SIZE = 16


class StubNode:
    """A node that only notes submitted jobs and their times: the engine is not under test."""

    def __init__(self, index, loop, host_blocks, rate):
        self.index, self.loop = index, loop
        self.alive, self.submitted = True, []
        self.model = SimpleNamespace(
            block_tokens=SIZE, block_bytes=1.0, network_bytes_per_s=rate, device_blocks=200,
            host_blocks=host_blocks, disk_blocks=0,
        )  # fmt: skip
        self.forget()

    def forget(self):
        self.memory = NodeMemory(self.index, self.model, None)

    def submit(self, job):
        self.submitted.append((self.loop.now_s, job.key))


class Bench:
    """Nodes whose cards send a block a second, unless another rate is given."""

    def __init__(self, host_blocks=100, rates=(1.0,) * 4, fixed_s=0.0):
        self.loop = Loop()
        self.nodes = [StubNode(i, self.loop, host_blocks, r) for i, r in enumerate(rates)]
        self.fetches = PeerFetches(self.loop, self.nodes, fixed_s)

    def hold(self, node, ids, tier="host"):
        memory = self.nodes[node].memory
        if tier == "host":
            memory.put_in_host(ids, len(ids))
        else:
            memory.device.unpin(memory.device.extend(None, ids, len(ids)))

    def held(self, node, ids):
        return self.nodes[node].memory.host.match(ids, len(ids))[1]

    def fetch(self, key, ids, source=0, target=1):
        job = SimulatedJob(key, len(ids) * SIZE + 1, 10, ids, 0.0)
        self.fetches.fetch(job, source, target, len(ids) * SIZE)
        return job

    def submitted(self, node=1):
        return [key for _, key in self.nodes[node].submitted]


def prefix(seed, count):
    return np.random.default_rng(seed).integers(1, 1 << 60, count, dtype=np.uint64)


def send(bench, key, source, target, blocks):
    """A fetch of a prefix that only its source holds."""
    bench.hold(source, prefix(key, blocks))
    bench.fetch(key, prefix(key, blocks), source, target)


def test_a_transfer_occupies_both_cards_at_the_slower_ones_rate():
    bench = Bench(rates=(10.0, 5.0, 10.0), fixed_s=1.0)
    send(bench, 1, 0, 1, 50)
    send(bench, 2, 2, 1, 50)
    bench.loop.at(30.0, lambda _: send(bench, 3, 2, 0, 50))
    bench.loop.run()
    assert bench.nodes[1].submitted == [(11.0, 1), (22.0, 2)]
    assert bench.nodes[0].submitted == [(36.0, 3)]
    assert bench.fetches.busy_s == [17.0, 22.0, 17.0]


def test_nobody_overtakes_on_a_card():
    bench = Bench(rates=(10.0,) * 4, fixed_s=1.0)
    for key, ends in enumerate([(0, 1, 90), (1, 2, 10), (2, 3, 10), (3, 0, 10)]):
        send(bench, key, *ends)
    bench.loop.run()
    ends = sorted((key, at_s) for node in bench.nodes for at_s, key in node.submitted)
    assert ends == [(0, 10.0), (1, 12.0), (2, 14.0), (3, 16.0)]


@pytest.mark.parametrize("tier", ["host", "device"])
def test_fetch_submits_a_job_once_its_prefix_came_from_a_tier(tier):
    bench, ids = Bench(), prefix(1, 10)
    bench.hold(0, ids, tier)
    bench.fetch(1, ids)
    assert bench.submitted() == []
    bench.loop.run()
    assert bench.nodes[1].submitted == [(10.0, 1)] and bench.held(1, ids) == 10


def test_a_fetched_prefix_is_pinned_until_it_was_used():
    bench, ids = Bench(host_blocks=12), prefix(1, 10)
    bench.hold(0, ids)
    job = bench.fetch(1, ids)
    bench.loop.run()
    bench.hold(1, prefix(2, 12))
    assert bench.held(1, ids) == 10
    bench.fetches.used(job)
    bench.hold(1, prefix(2, 12))
    assert bench.held(1, ids) == 0
    bench.fetches.used(job)


def test_a_copy_is_pinned_for_whoever_is_sent_to_it():
    bench, ids = Bench(host_blocks=12), prefix(1, 10)
    bench.hold(0, ids)
    job = bench.fetch(1, ids)
    bench.loop.run()
    other = SimulatedJob(2, len(ids) * SIZE + 1, 10, ids, 0.0)
    bench.fetches.submit(other, 1)
    bench.fetches.used(job)
    bench.hold(1, prefix(2, 12))
    assert bench.held(1, ids) == 10
    bench.fetches.used(other)
    bench.hold(1, prefix(2, 12))
    assert bench.held(1, ids) == 0


def test_a_source_pins_a_prefix_under_way_and_counts_it_as_used():
    bench, ids = Bench(host_blocks=20), prefix(1, 10)
    bench.hold(0, ids)
    bench.hold(0, prefix(2, 10))
    bench.fetch(1, ids)
    bench.hold(0, prefix(3, 10))
    assert (bench.held(0, ids), bench.held(0, prefix(2, 10))) == (10, 0)
    bench.loop.run()
    bench.hold(0, prefix(4, 5))
    assert (bench.held(0, ids), bench.held(0, prefix(3, 10))) == (10, 5)


def test_fetch_moves_nothing_already_held_or_lost_meanwhile():
    bench, ids, gone = Bench(), prefix(1, 10), prefix(3, 10)
    bench.hold(0, ids)
    bench.hold(0, gone)
    for key, wanted in ((1, ids), (2, ids), (3, gone)):
        bench.fetch(key, wanted)
    bench.nodes[0].memory.host.evict(10)
    bench.loop.run()
    # The second finds what the first brought; the third's is not there any more.
    assert bench.nodes[1].submitted == [(10.0, 1), (10.0, 2), (10.0, 3)]
    assert bench.held(1, gone) == 0 and bench.fetches.busy_s[:2] == [10.0, 10.0]


def test_nothing_comes_from_a_source_that_died_on_the_way():
    bench, ids = Bench(), prefix(1, 10)
    bench.hold(0, ids)
    bench.fetch(1, ids)
    bench.loop.at(5.0, lambda _: bench.nodes[0].forget())
    bench.loop.run()
    assert bench.submitted() == [1] and bench.held(1, ids) == 0


def test_lost_target_returns_waiting_jobs_and_forgets_its_pins():
    bench, lost = Bench(), []
    for key in (1, 2):
        bench.hold(0, prefix(key, 5))
    here, waits = (bench.fetch(key, prefix(key, 5)) for key in (1, 2))
    bench.loop.at(7.0, lambda _: lost.extend(bench.fetches.lost(1)))
    bench.loop.at(7.0, lambda _: bench.nodes[1].forget())
    bench.loop.run()
    assert lost == [waits] and bench.submitted() == [1]
    assert bench.held(1, waits.ids) == 0
    bench.fetches.used(here)
