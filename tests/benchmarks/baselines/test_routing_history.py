from random import Random

import pytest

from kappa_benchmarks.baselines.routing.dynamo import ActiveBlocks
from kappa_benchmarks.baselines.routing.history import RouteHistory
from kappa_benchmarks.baselines.routing.run_tree import longest_of_each
from tests.benchmarks.baselines import prompts

WORKERS = [f"w{i}" for i in range(5)]


def offer(labels, in_flight=(0,) * 5):
    return prompts.offer(in_flight, labels)


def random_prompt(rng: Random) -> str:
    return "".join(rng.choice("ab") for _ in range(rng.randrange(13)))


class Linear:
    """The plain version: every prefix of every prompt, and who was sent it."""

    def __init__(self):
        self.sent = {worker: set() for worker in WORKERS}

    def routed(self, prompt, worker):
        self.sent[worker].update(prompt[: i + 1] for i in range(len(prompt)))

    def longest(self, prompt, worker):
        depths = [i + 1 for i in range(len(prompt)) if prompt[: i + 1] in self.sent[worker]]
        return len(depths)


@pytest.mark.parametrize("seed", range(20))
def test_a_history_agrees_with_a_linear_one(seed):
    rng, history, linear = Random(seed), RouteHistory(), Linear()
    for step in range(120):
        prompt = random_prompt(rng)
        estimates = offer(prompt)
        path = history.match(estimates)
        expected = {worker: linear.longest(prompt, worker) for worker in WORKERS}
        assert (path[-1][1] if path else 0) == max(expected.values())
        found = dict.fromkeys(WORKERS, 0)
        for workers, depth in longest_of_each(path, history.roster.mask):
            found |= {WORKERS[row]: depth for row in history.roster.rows(workers)}
        assert found == expected
        row = rng.randrange(len(WORKERS))
        history.routed(estimates, row)
        linear.routed(prompt, WORKERS[row])
        if step % 25 == 24:
            gone = rng.choice(WORKERS)
            history.left(gone)
            linear.sent[gone] = set()
        history.roster.read(estimates)
        sizes = [history.tree.size(bit) for bit in history.roster.bits]
        assert sizes == [len(linear.sent[worker]) for worker in WORKERS]
        assert history.tree.blocks == len(set().union(*linear.sent.values()))


def test_only_the_workers_asked_for_count():
    history = RouteHistory()
    estimates = offer("abcd")
    history.routed(estimates, 0)
    history.routed(offer("ab"), 1)
    path = history.match(estimates)
    assert list(longest_of_each(path, 0b10)) == [(0b10, 2)]
    assert list(longest_of_each(path, 0b11)) == [(0b10, 2), (0b01, 4)]
    assert not list(longest_of_each([], 0b11))


def test_a_conversation_with_one_worker_stays_one_run():
    history = RouteHistory()
    for turns in range(1, 10):
        history.routed(offer("abcdefghij"[:turns]), 2)
    assert len(history.tree.runs) == 1
    assert history.match(offer("abcdefghij"))[-1][1] == 9


def test_trimming_takes_the_least_recent_ends_first():
    history = RouteHistory()
    for prompt in ("aab", "aac", "xyz"):
        history.routed(offer(prompt), 0)
    history.routed(offer("aab"), 0)
    history.routed(offer("aac"), 1)
    history.match(offer("a"))
    history.trim(history.roster.bits[0], 6)
    assert [history.match(offer(p))[-1][0].mask for p in ("aab", "aac", "xyz")] == [1, 2, 1]
    history.trim(history.roster.bits[0], 3)
    assert not history.match(offer("xyz"))
    assert history.match(offer("aab"))[-1][1] == 3


@pytest.mark.parametrize("seed", range(10))
def test_what_trimming_leaves_is_whole_prefixes(seed):
    rng, history = Random(seed), RouteHistory()
    for _ in range(80):
        history.routed(offer(random_prompt(rng)), rng.randrange(3))
    history.match(offer("a"))
    bit = history.roster.bits[0]
    before = history.tree.size(bit)
    history.trim(bit, before // 2)
    assert history.tree.size(bit) <= before // 2
    for run in history.tree.runs.values():
        if bit in run.marks and run.parent is not None:
            assert bit in run.parent.marks


@pytest.mark.parametrize("seed", range(10))
def test_active_blocks_agree_with_a_count_of_each(seed):
    rng, active = Random(seed), ActiveBlocks()
    sent = {worker: [] for worker in WORKERS}
    for number in range(150):
        prompt = random_prompt(rng)
        for queue in sent.values():
            for _ in range(min(rng.randrange(3), len(queue))):
                active.remove(queue.pop(rng.randrange(len(queue)))[0])
        estimates = offer(prompt, in_flight=[len(sent[worker]) for worker in WORKERS])
        expected = [
            len({p[: i + 1] for _, p in [*sent[worker], (0, prompt)] for i in range(len(p))})
            for worker in WORKERS
        ]
        assert active.decode_blocks(estimates).tolist() == expected
        row = rng.randrange(len(WORKERS))
        active.add(estimates, row, f"r{number}")
        sent[WORKERS[row]].append((f"r{number}", prompt))


def test_nothing_is_active_on_a_worker_that_left():
    active = ActiveBlocks()
    active.add(offer("abc", in_flight=[0] * 5), 1, "r")
    active.left("w1")
    active.remove("r")
    assert active.decode_blocks(offer("abc", in_flight=[3] * 5)).tolist() == [3.0] * 5
