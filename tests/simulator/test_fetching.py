"""KV between nodes: what arrives, what stays pinned for whom, and what is not moved at all."""

import numpy as np
import pytest

from simulator.fetching import Fetching
from simulator.job import Job
from simulator.loop import Loop
from simulator.memory import NodeMemory
from simulator.network import Network

SIZE = 16


class StubNode:
    """A node that only notes what is submitted: the engine is not what is tested."""

    def __init__(self, index, host_blocks=100):
        self.index, self.host_blocks = index, host_blocks
        self.alive, self.submitted = True, []
        self.model = type("Model", (), {"block_tokens": SIZE})
        self.forget()

    def forget(self):
        self.memory = NodeMemory(self.index, SIZE, 200, self.host_blocks, None)

    def submit(self, job):
        self.submitted.append(job.key)


class Bench:
    """Three nodes; a block takes a second on the way."""

    def __init__(self, host_blocks=100):
        self.loop = Loop()
        self.nodes = [StubNode(i, host_blocks) for i in range(3)]
        self.fetching = Fetching(self.nodes, Network(self.loop, [1.0] * 3, fixed_s=0.0), 1.0)

    def hold(self, node, ids, tier="host"):
        memory = self.nodes[node].memory
        if tier == "host":
            memory.put_in_host(ids, len(ids))
        else:
            memory.device.add(ids, len(ids))

    def held(self, node, ids):
        return self.nodes[node].memory.host.match(ids, len(ids))[1]


def prefix(seed, count):
    return np.random.default_rng(seed).integers(1, 1 << 60, count, dtype=np.uint64)


def job_of(key, ids):
    return Job(key, len(ids) * SIZE + 1, 10, ids, len(ids), 0.0)


def fetch(bench, job, source=0, target=1):
    bench.fetching.fetch(job, source, target, len(job.ids) * SIZE)


@pytest.mark.parametrize("tier", ["host", "device"])
def test_a_job_is_submitted_when_its_prefix_has_come_from_either_tier(tier):
    bench, job = Bench(), job_of(1, prefix(1, 10))
    bench.hold(0, job.ids, tier)
    fetch(bench, job)
    assert bench.nodes[1].submitted == []
    bench.loop.run()
    assert bench.loop.now_s == 10.0
    assert bench.nodes[1].submitted == [1] and bench.held(1, job.ids) == 10


def test_what_was_fetched_is_pinned_until_it_was_used():
    bench, job = Bench(host_blocks=12), job_of(1, prefix(1, 10))
    bench.nodes[0].host_blocks = 100
    bench.nodes[0].forget()
    bench.hold(0, job.ids)
    fetch(bench, job)
    bench.loop.run()
    bench.hold(1, prefix(2, 12))
    assert bench.held(1, job.ids) == 10
    bench.fetching.used(job)
    bench.hold(1, prefix(2, 12))
    assert bench.held(1, job.ids) == 0
    bench.fetching.used(job)


def test_a_copy_is_pinned_for_whoever_is_sent_to_it():
    bench, job, other = Bench(host_blocks=12), job_of(1, prefix(1, 10)), job_of(2, prefix(1, 10))
    bench.hold(0, job.ids)
    fetch(bench, job)
    bench.loop.run()
    bench.fetching.submit(other, 1)
    bench.fetching.used(job)
    bench.hold(1, prefix(2, 12))
    assert bench.held(1, job.ids) == 10
    bench.fetching.used(other)
    bench.hold(1, prefix(2, 12))
    assert bench.held(1, job.ids) == 0


def test_a_source_keeps_what_is_under_way_and_counts_it_as_used():
    bench, job = Bench(host_blocks=20), job_of(1, prefix(1, 10))
    bench.hold(0, job.ids)
    bench.hold(0, prefix(2, 10))
    fetch(bench, job)
    bench.hold(0, prefix(3, 10))
    assert (bench.held(0, job.ids), bench.held(0, prefix(2, 10))) == (10, 0)
    bench.loop.run()
    bench.hold(0, prefix(4, 5))
    assert (bench.held(0, job.ids), bench.held(0, prefix(3, 10))) == (10, 5)


def test_what_is_void_when_its_turn_comes_is_not_moved():
    bench = Bench()
    jobs = [job_of(key, prefix(1, 10)) for key in (1, 2)]
    gone = job_of(3, prefix(3, 10))
    bench.hold(0, jobs[0].ids)
    bench.hold(0, gone.ids)
    for job in (*jobs, gone):
        fetch(bench, job)
    memory = bench.nodes[0].memory
    memory.host.evict(10)
    bench.loop.run()
    # The second finds what the first brought; the third's is not there any more.
    assert bench.nodes[1].submitted == [1, 2, 3] and bench.loop.now_s == 10.0
    assert bench.held(1, gone.ids) == 0


def test_nothing_comes_from_a_source_that_died_on_the_way():
    bench, job = Bench(), job_of(1, prefix(1, 10))
    bench.hold(0, job.ids)
    fetch(bench, job)
    bench.loop.at(5.0, lambda _: bench.nodes[0].forget())
    bench.loop.run()
    assert bench.nodes[1].submitted == [1] and bench.held(1, job.ids) == 0


def test_a_target_that_dies_gives_back_who_waited_and_forgets_its_pins():
    bench, here, waits = Bench(), job_of(1, prefix(1, 5)), job_of(2, prefix(2, 5))
    for job in (here, waits):
        bench.hold(0, job.ids)
        fetch(bench, job)
    bench.loop.at(7.0, lambda _: lost.extend(bench.fetching.lost(1)))
    bench.loop.at(7.0, lambda _: bench.nodes[1].forget())
    lost: list[Job] = []
    bench.loop.run()
    assert lost == [waits] and bench.nodes[1].submitted == [1]
    assert bench.held(1, waits.ids) == 0
    bench.fetching.used(here)


def test_a_replica_takes_spare_room_only_and_is_the_first_to_go():
    bench, ids = Bench(host_blocks=20), prefix(1, 10)
    own = prefix(2, 14)
    bench.hold(0, ids)
    bench.hold(1, own)
    bench.fetching.replicate(ids, 0, 1)
    bench.loop.run()
    assert bench.loop.now_s == 6.0
    assert (bench.held(1, ids), bench.held(1, own)) == (6, 14)
    assert bench.nodes[1].memory.spare_host_blocks == 6
    bench.hold(1, prefix(3, 6))
    assert (bench.held(1, ids), bench.held(1, own)) == (0, 14)
