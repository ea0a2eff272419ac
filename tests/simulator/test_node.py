"""One node's physics against cases worked out by hand."""

import random

import numpy as np
import pytest

from kappa.cost import StepModel
from kappa_scheduler.catalogue import SCHEDULERS
from kappa_simulator.clusters import NodeModel
from kappa_simulator.job import SimulatedJob
from kappa_simulator.loop import Loop, Noise
from kappa_simulator.node import JobEvents, Node

STEP = StepModel(token_s=1e-4, pair_s=1e-8, weights_s=5e-3, context_token_s=1e-7, fixed_s=1e-3)
SIZE = 16


def model(**changes):
    return NodeModel(
        **{
            "step": STEP, "block_tokens": SIZE, "device_blocks": 100,
            "host_blocks": 1000, "load_block_s": 0.01, "store_block_s": 0.005,
            "load_fixed_s": 0.002, "budget_tokens": 256, **changes,
        }
    )  # fmt: skip


class Bench:
    """A node alone, and when its jobs had their first and last token."""

    def __init__(self, node_class=Node, **changes):
        self.loop = Loop()
        self.first: dict[int, float] = {}
        self.end: dict[int, float] = {}
        quiet = Noise(np.random.default_rng(0), 0.0)
        self.node = node_class(
            0, model(**changes), self.loop, (quiet, quiet),
            JobEvents(lambda job: self.first.setdefault(job.key, self.loop.now_s), self._finished),
        )  # fmt: skip

    def _finished(self, job):
        assert job.key not in self.end
        self.end[job.key] = self.loop.now_s

    def send(self, key, prompt, output, ids, at_s=0.0, **who):
        job = SimulatedJob(key, prompt, output, ids, at_s, **who)
        self.loop.at(at_s, self.node.submit, job)
        return job

    def run(self):
        self.loop.run()
        self.node.close()


def own_ids(key, tokens, shared=0):
    """Ids of a prompt; its first `shared` blocks are everybody's."""
    blocks = tokens // SIZE
    return np.array(
        [(1 << 50) + i if i < shared else (key + 1) * 10_000 + i for i in range(blocks)],
        dtype=np.uint64,
    )


def in_host(bench, ids, blocks):
    bench.node.memory.put_in_host(ids, blocks)


def test_a_cold_prompt_is_prefilled_in_chunks_of_the_budget():
    bench = Bench()
    bench.send(0, 600, 1, own_ids(0, 601))
    bench.run()
    chunks = [(256, 0), (256, 256), (88, 512)]
    assert bench.first[0] == pytest.approx(sum(STEP.step_s([c]) for c in chunks))
    assert bench.end[0] == bench.first[0]


def test_a_load_comes_first_then_the_new_tokens():
    bench = Bench()
    ids = own_ids(0, 330)
    in_host(bench, ids, 20)
    job = bench.send(0, 330, 1, ids)
    bench.run()
    assert (job.device_tokens, job.cached_tokens) == (0, 320)
    assert bench.first[0] == pytest.approx(0.002 + 20 * 0.01 + STEP.step_s([(10, 320)]))


@pytest.mark.parametrize("load_block_s", [0.0001, 0.01])
def test_load_by_layers_takes_the_longer_part_and_a_layer_more(load_block_s):
    """4 layers; a second request comes during the load or the step, and loads ahead."""
    bench = Bench(load_block_s=load_block_s, load_fixed_s=0.0, overlap=3 / 4)
    for key in range(2):
        in_host(bench, own_ids(key, 330), 20)
        bench.send(key, 330, 1, own_ids(key, 330), at_s=key * 1e-4)
    bench.run()
    load_s, compute_s = 20 * load_block_s, STEP.step_s([(10, 320)])
    assert (load_s < compute_s) == (load_block_s == 0.0001)
    first_s = max(load_s, compute_s) + min(load_s, compute_s) / 4
    assert bench.first[0] == pytest.approx(first_s)
    assert bench.first[1] == pytest.approx(max(2 * load_s, first_s) + compute_s)
    loads = bench.node.samples.take()[1]
    assert loads and all(load.seconds == pytest.approx(load_s) for load in loads)


@pytest.mark.parametrize(("others", "from_disk"), [(0, 0), (3, 3), (6, 6), (10, 10)])
def test_node_loads_from_disk_what_host_lost_and_stores_it_again(others, from_disk):
    """Host memory holds ten blocks; those of another prompt pushed the tail of the first out."""
    bench = Bench(host_blocks=10, disk_blocks=30, disk_block_s=0.05)
    ids, memory = own_ids(0, 170), bench.node.memory
    in_host(bench, ids, 10)
    if others:
        in_host(bench, own_ids(1, 16 * others), others)
    assert (memory.host.blocks, memory.disk.blocks) == (10, 10 + others)
    job = bench.send(0, 170, 1, ids)
    bench.run()
    assert (job.cached_tokens, job.disk_blocks) == (160, from_disk)
    load_s = 0.002 + 10 * 0.01 + from_disk * 0.05
    assert bench.first[0] == pytest.approx(load_s + STEP.step_s([(10, 160)]))
    assert memory.host.match(ids, 10)[1] == 10
    ((tokens, seconds, disk_tokens),) = [
        (load.tokens, load.seconds, load.disk_tokens) for load in bench.node.samples.take()[1]
    ]
    assert (tokens, disk_tokens) == (160, from_disk * 16)
    assert seconds == pytest.approx(load_s)


def test_disk_keeps_the_last_used_blocks_and_those_under_load():
    bench = Bench(host_blocks=10, disk_blocks=25, disk_block_s=0.05)
    prompts = [own_ids(key, 170) for key in range(3)]
    for ids in prompts[:2]:
        in_host(bench, ids, 10)
    bench.send(0, 170, 1, prompts[0])
    bench.loop.at(0.1, lambda _: in_host(bench, prompts[2], 10))
    bench.run()
    disk = bench.node.memory.disk
    assert [disk.match(ids, 10)[1] for ids in prompts] == [10, 5, 10]
    assert bench.first[0] == pytest.approx(0.602 + STEP.step_s([(10, 160)]))


def test_two_loads_queue_on_the_link():
    bench = Bench()
    for key in range(2):
        ids = own_ids(key, 330)
        in_host(bench, ids, 20)
        bench.send(key, 330, 1, ids)
    bench.run()
    load_s, compute_s = 0.002 + 20 * 0.01, STEP.step_s([(10, 320)])
    assert bench.first[0] == pytest.approx(load_s + compute_s)
    assert bench.first[1] == pytest.approx(2 * load_s + compute_s)
    assert bench.node.link.up.load_s == pytest.approx(2 * load_s)


def test_what_another_is_loading_is_waited_for_not_loaded_twice():
    bench = Bench()
    ids = own_ids(0, 330)
    in_host(bench, ids, 20)
    bench.send(0, 330, 1, ids)
    second = bench.send(1, 330, 1, ids)
    bench.run()
    assert bench.node.link.up.load_blocks == 20
    assert (second.device_tokens, second.cached_tokens) == (320, 0)


def test_device_hit_costs_no_load_and_computes_its_last_block():
    bench = Bench()
    ids = own_ids(0, 320)
    bench.send(0, 320, 1, ids)
    again = bench.send(1, 320, 1, ids, at_s=10.0)
    bench.run()
    assert (again.device_tokens, again.cached_tokens) == (304, 0)
    assert bench.first[1] == pytest.approx(10.0 + STEP.step_s([(16, 304)]))


def test_decoding_alone_takes_a_step_a_token():
    bench = Bench()
    bench.send(0, 100, 50, own_ids(0, 150))
    bench.run()
    expected_s = STEP.step_s([(100, 0)]) + sum(STEP.step_s([(1, 100 + i)]) for i in range(49))
    assert bench.end[0] == pytest.approx(expected_s)
    assert bench.node.totals.steps == 50


def test_a_prefill_delays_those_that_decode():
    bench = Bench()
    bench.send(0, 100, 3, own_ids(0, 103))
    bench.send(1, 200, 1, own_ids(1, 201), at_s=0.001)
    bench.run()
    first_s = STEP.step_s([(100, 0)])
    both_s = STEP.step_s([(1, 100), (200, 0)])
    assert bench.first[1] == pytest.approx(first_s + both_s)
    assert bench.end[0] == pytest.approx(first_s + both_s + STEP.step_s([(1, 101)]))


def test_an_arrival_is_noticed_at_the_end_of_the_step_under_way():
    bench = Bench()
    bench.send(0, 100, 1000, own_ids(0, 1100))
    start_s = STEP.step_s([(100, 0)])
    ends_s = np.cumsum([start_s] + [STEP.step_s([(1, 100 + i)]) for i in range(20)])
    bench.send(1, 32, 1, own_ids(1, 33), at_s=float(ends_s[10] + ends_s[11]) / 2)
    bench.run()
    assert bench.first[1] == pytest.approx(ends_s[11] + STEP.step_s([(1, 111), (32, 0)]))


def test_node_writes_computed_blocks_through_on_an_idle_link():
    bench = Bench()
    ids = own_ids(0, 320)
    bench.send(0, 320, 1, ids)
    bench.run()
    assert bench.node.memory.host.match(ids, 20)[1] == 20
    assert bench.node.link.down.store_blocks == 20


def test_loads_go_before_stores_that_are_under_way():
    bench = Bench(store_block_s=1.0)
    ids = own_ids(1, 330)
    in_host(bench, ids, 20)
    bench.send(0, 32, 1, own_ids(0, 33))
    bench.send(1, 330, 1, ids, at_s=0.5)
    bench.run()
    assert bench.first[1] == pytest.approx(0.5 + 0.202 + STEP.step_s([(10, 320)]))
    # The store went on where it was: 2 blocks of a second and the fixed cost, in all.
    assert bench.node.link.down.store_s == pytest.approx(2.002)


@pytest.mark.parametrize("rule", ["cap1", "greedy", "fair"])
def test_fcfs_stops_at_what_does_not_fit_and_others_pass_it(rule):
    def times(rule):
        bench = Bench(device_blocks=50, rule=rule)
        bench.send(0, 400, 200, own_ids(0, 600))
        bench.send(1, 500, 1, own_ids(1, 501), at_s=0.01)
        bench.send(2, 48, 1, own_ids(2, 49), at_s=0.02)
        bench.run()
        return bench

    stock, packed = times("fcfs"), times(rule)
    assert stock.first[2] > stock.end[0]
    assert packed.first[2] < packed.end[0] < packed.first[1]
    assert stock.node.totals.max_skips == 0 and packed.node.totals.max_skips == 1


def test_out_of_blocks_the_latest_is_recomputed_and_both_end():
    bench = Bench(device_blocks=20)
    bench.send(0, 128, 100, own_ids(0, 228))
    bench.send(1, 128, 100, own_ids(1, 228))
    bench.run()
    assert bench.node.totals.preemptions >= 1
    assert bench.end[0] < bench.end[1]
    assert set(bench.end) == {0, 1}


def test_a_slow_node_takes_longer_from_then_on():
    bench = Bench()
    bench.node.set_slow(3.0)
    bench.send(0, 100, 1, own_ids(0, 101))
    bench.run()
    assert bench.first[0] == pytest.approx(3 * STEP.step_s([(100, 0)]))


def test_a_dead_node_gives_back_what_it_had_and_forgets_it():
    bench = Bench()
    ids = own_ids(0, 330)
    in_host(bench, ids, 20)
    jobs = [bench.send(0, 330, 5, ids), bench.send(1, 100, 5, own_ids(1, 105))]
    lost = []
    bench.loop.at(0.01, lambda _: lost.extend(bench.node.fail()))
    bench.run()
    assert lost == jobs and not bench.end
    assert bench.node.memory.host.blocks == 0 and bench.node.memory.held == 0


class OneByOne(Node):
    """The same node, which plans every decode step by itself."""

    def _run_limit(self):
        super()._run_limit()
        return 1


def random_case(rng, rules=SCHEDULERS):
    changes = {
        "device_blocks": rng.randint(12, 60),
        "budget_tokens": rng.choice([64, 256]),
        "max_running": rng.choice([2, 8]),
        "rule": rng.choice(rules),
    }
    requests = []
    for key in range(rng.randint(1, 6)):
        output = rng.randint(1, 80)
        prompt = rng.randint(1, (changes["device_blocks"] - 1) * SIZE - output)
        shared = rng.randint(0, prompt // SIZE)
        requests.append((key, prompt, output, shared, rng.uniform(0, 1.0)))
    return changes, requests


def play(node_class, changes, requests):
    bench = Bench(node_class, **changes)
    for key, prompt, output, shared, at_s in requests:
        bench.send(key, prompt, output, own_ids(key, prompt + output, shared), at_s,
                   tenant="ab"[key % 2], priority=key % 3)  # fmt: skip
    bench.run()
    return bench


def test_runs_of_decode_steps_in_closed_form_equal_step_by_step():
    rng = random.Random(3)
    preemptions = 0
    # Rules that keep accounts round them in every iteration, and may break a tie otherwise.
    exact = [name for name in SCHEDULERS if name not in ("fair", "vtc", "dlpm", "equinox")]
    for _ in range(400):
        changes, requests = random_case(rng, exact)
        closed, stepped = play(Node, changes, requests), play(OneByOne, changes, requests)
        assert len(closed.end) == len(requests)
        assert closed.node.totals.steps == stepped.node.totals.steps
        assert closed.node.totals.preemptions == stepped.node.totals.preemptions
        for key in closed.end:
            assert closed.first[key] == pytest.approx(stepped.first[key], rel=1e-9)
            assert closed.end[key] == pytest.approx(stepped.end[key], rel=1e-9)
        assert closed.node.totals.step_s == pytest.approx(stepped.node.totals.step_s)
        fill, steps = stepped.node.totals.fill, stepped.node.totals.fill_steps
        assert closed.node.totals.fill == pytest.approx(fill)
        assert closed.node.totals.fill_steps == steps
        preemptions += closed.node.totals.preemptions
    assert preemptions > 5


def test_nothing_is_held_when_all_is_done():
    rng = random.Random(4)
    for _ in range(100):
        bench = play(Node, *random_case(rng))
        memory = bench.node.memory
        assert memory.held == 0 and not memory.waited_for and not bench.node.jobs
        assert memory.device.blocks <= memory.capacity_blocks
        assert memory.host.blocks <= memory.host_blocks


def test_what_a_waiting_request_will_load_is_evicted_last():
    bench = Bench(host_blocks=20)
    memory, wanted = bench.node.memory, own_ids(1, 160)
    in_host(bench, wanted, 10)
    in_host(bench, own_ids(2, 160), 10)
    job = SimulatedJob(1, 170, 1, wanted, 0.0)
    memory.arrived(job)
    in_host(bench, own_ids(3, 80), 5)
    assert memory.host.match(wanted, 10)[1] == 10
    assert memory.host.match(own_ids(2, 160), 10)[1] < 10
