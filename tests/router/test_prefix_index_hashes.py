"""The prefix index fed with our own hashes: against scans, within its bound, as it grows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kappa_router.index.kv_event_types import WorkerGone
from kappa_router.index.lookup import Match
from kappa_router.index.prefix_index import PrefixIndex
from tests.router.building import match_all, match_worker
from tests.router.test_prefix_index import HASHER, check_rows


class Presence:
    """Who holds which hash in which tier; every lookup is a linear scan."""

    def __init__(self):
        self.held = set()

    def match(self, worker, hashes):
        device = 0
        while device < len(hashes) and (worker, "device", hashes[device]) in self.held:
            device += 1
        total = device
        while total < len(hashes) and (worker, "host", hashes[total]) in self.held:
            total += 1
        return Match(device, total - device)


def tree(rng, sequences, blocks):
    """Hash sequences that share beginnings, as prompts do."""
    made = [rng.integers(1, 2**64, blocks, dtype=np.uint64)]
    for _ in range(sequences - 1):
        shared = int(rng.integers(0, blocks))
        own = rng.integers(1, 2**64, blocks - shared, dtype=np.uint64)
        made.append(np.concatenate([made[int(rng.integers(len(made)))][:shared], own]))
    return made


def walk(seed, index, truth, check, moves=40, blocks=60):
    """Random holds and drops of pieces, of single blocks and of scattered ones."""
    rng = np.random.default_rng(seed)
    prompts = tree(rng, 6, blocks)
    for _ in range(moves):
        worker, tier = f"w{rng.integers(4)}", rng.choice(["device", "host"]).item()
        prompt = prompts[int(rng.integers(len(prompts)))]
        begin, end = sorted(rng.integers(0, blocks + 1, 2).tolist())
        piece = prompt[0 if rng.random() < 0.5 else begin : end]
        if rng.random() < 0.3:
            piece = rng.permutation(prompt)[: int(rng.integers(1, blocks))]
        keys = {(worker, tier, key) for key in piece.tolist()}
        if rng.random() < 0.6:
            index.hold(worker, tier, piece)
            truth.held |= keys
        else:
            index.drop(worker, tier, piece)
            truth.held -= keys
        if rng.random() < 0.05:
            index.handle(WorkerGone(worker))
            truth.held = {key for key in truth.held if key[0] != worker}
        for prompt in prompts:
            check(match_all(index, prompt), prompt.tolist())


@given(st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_hold_and_drop_equal_a_linear_scan(seed):
    index, truth = PrefixIndex(HASHER, 100_000), Presence()

    def check(answers, prompt):
        expected = {w: truth.match(w, prompt) for w in ("w0", "w1", "w2", "w3")}
        assert answers == {w: match for w, match in expected.items() if sum(match)}

    walk(seed, index, truth, check)
    check_rows(index)


@given(st.integers(0, 2**32), st.integers(1, 200))
@settings(max_examples=30, deadline=None)
def test_bounded_index_forgets_but_never_claims_too_much(seed, bound):
    index, truth = PrefixIndex(HASHER, bound), Presence()

    def check(answers, prompt):
        assert index.stats()["blocks"] <= bound
        for worker, (device, host, _) in answers.items():
            blocks = [(worker, "device", key) for key in prompt[:device]]
            blocks += [(worker, "host", key) for key in prompt[device : device + host]]
            assert truth.held.issuperset(blocks)

    walk(seed, index, truth, check)
    check_rows(index)


def test_worker_has_a_column_before_it_holds_anything():
    index = PrefixIndex(HASHER, 10_000)
    column = index.column("stranger")
    assert column == index.column("stranger")
    assert index.match_columns(np.arange(1, 50, dtype=np.uint64))[:, column].tolist() == [0, 0, 0]


def test_prompt_with_ever_new_holders_is_followed_to_its_end():
    # More changes than one walk returns, and more sets than one tally counts.
    index, blocks = PrefixIndex(HASHER, 10_000), 700
    prompt = np.random.default_rng(1).integers(1, 2**64, blocks, dtype=np.uint64)
    for worker in range(1, blocks + 1):
        index.hold(f"w{worker}", "device", prompt[:worker])
    answers = match_all(index, prompt)
    assert all(answers[f"w{n}"] == Match(n, 0) for n in range(1, blocks + 1))
    index.hold("late", "host", prompt)
    assert match_worker(index, prompt, "late") == Match(0, blocks)
    index.drop("late", "host", prompt[300:])
    index.drop("w700", "device", prompt[500:])
    assert match_worker(index, prompt, "late") == Match(0, 300)
    assert match_worker(index, prompt, "w700") == Match(500, 0)
    assert match_worker(index, prompt, "w699") == Match(699, 0)
    check_rows(index)


def test_worker_in_the_place_of_another_inherits_nothing():
    index, prompt = PrefixIndex(HASHER, 100), np.arange(1, 30, dtype=np.uint64)
    index.hold("old", "device", prompt)
    index.handle(WorkerGone("old"))
    index.hold("new", "host", prompt[:2])
    assert match_all(index, prompt) == {"new": Match(0, 2)}


def test_recent_blocks_outlive_old_ones():
    index, rng = PrefixIndex(HASHER, 30_000), np.random.default_rng(0)
    hot = rng.integers(1, 2**64, 300, dtype=np.uint64)
    index.hold("w", "device", hot)
    cold = rng.integers(1, 2**64, 300, dtype=np.uint64)
    index.hold("w", "device", cold)
    for _ in range(200):
        index.hold("w", "device", rng.integers(1, 2**64, 300, dtype=np.uint64))
        assert match_worker(index, hot, "w") == Match(300, 0)
    assert match_worker(index, cold, "w") == Match(0, 0)
    assert index.stats()["evicted"] > 30_000


def test_repeated_hashes_in_one_call_are_one_block():
    index, prompt = PrefixIndex(HASHER, 1000), np.arange(1, 40, dtype=np.uint64)
    index.hold("w", "device", np.concatenate([prompt, prompt]))
    index.hold("w", "host", np.concatenate([prompt, prompt]))
    assert (index.stats()["blocks"], match_worker(index, prompt, "w")) == (39, Match(39, 0))
    index.drop("w", "device", np.concatenate([prompt, prompt]))
    assert match_worker(index, prompt, "w") == Match(0, 39)
    check_rows(index)


def test_blocks_that_came_one_by_one_match_as_well():
    index, rng = PrefixIndex(HASHER, 10_000), np.random.default_rng(0)
    prompt = rng.integers(1, 2**64, 2000, dtype=np.uint64)
    for block in rng.permutation(1990).tolist():
        index.hold("w", "device", prompt[block : block + 1])
    index.hold("v", "host", prompt[:700])
    assert match_all(index, prompt) == {"w": Match(1990, 0), "v": Match(0, 700)}


def test_index_grows_to_its_bound(monkeypatch):
    monkeypatch.setattr("kappa_router.index.block_table._PREPARED", 100)
    index, rng = PrefixIndex(HASHER, 5000), np.random.default_rng(0)
    prompts = [rng.integers(1, 2**64, 90, dtype=np.uint64) for _ in range(55)]
    for prompt in prompts:
        index.hold("w", "device", prompt)
    assert all(match_worker(index, prompt, "w") == Match(90, 0) for prompt in prompts)
    for block in range(60):
        index.hold("w", "device", rng.integers(1, 2**64, 2, dtype=np.uint64))
        assert index.stats()["blocks"] <= min(55 * 90 + 2 * block + 2, 5000)
    check_rows(index)


def test_ticks_that_overflow_keep_the_order_of_blocks():
    index = PrefixIndex(HASHER, 4)
    one, two, three = (np.arange(i, i + 2, dtype=np.uint64) for i in (10, 20, 30))
    index._table.tick = 2**32 - 4
    index.hold("w", "device", one)
    index.hold("w", "device", two)
    assert match_worker(index, one, "w") == Match(2, 0)
    index.hold("w", "device", three)
    assert match_worker(index, one, "w") == match_worker(index, three, "w") == Match(2, 0)
    assert index._table.tick < 2**32 - 4
