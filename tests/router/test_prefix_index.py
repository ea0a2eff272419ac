"""The prefix index against a model that scans token prefixes one by one."""

import random
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kappa_router.index.kv_event_types import (
    BlocksRemoved,
    BlocksStored,
    TierCleared,
    WorkerGone,
    WorkerReset,
)
from kappa_router.index.lookup import Match
from kappa_router.index.prefix_hash import PrefixHasher, salt_of, secret_from_seed
from kappa_router.index.prefix_index import PrefixIndex
from tests.router.building import match_all, match_worker

SIZE = 2
HASHER = PrefixHasher(SIZE, secret_from_seed("tests"))
DEPTH = 12
SALTS = (0, salt_of("tenant"))


def name(tokens, salt=0):
    """The engine's hash of a prefix: any function of all that is in it."""
    return repr((tuple(tokens), salt)).encode()


def stored(tokens, worker="w", tier="device", start=0, salt=0, sent_salt="auto"):
    """An event for blocks [start, end) of a sequence, as an engine would send it."""
    ends = range((start + 1) * SIZE, len(tokens) + 1, SIZE)
    if sent_salt == "auto":
        sent_salt = salt if tier == "device" and start == 0 else None
    parent = name(tokens[: start * SIZE], salt) if start else None
    hashes = tuple(name(tokens[:end], salt) for end in ends)
    return BlocksStored(
        worker, tier, hashes, parent, tuple(tokens[start * SIZE :]), SIZE, sent_salt
    )


def removed(*prefixes, worker="w", tier="device", salt=0):
    return BlocksRemoved(worker, tier, tuple(name(p, salt) for p in prefixes))


def match(index, tokens, worker="w", salt=0):
    return match_worker(index, HASHER.prefix_hashes(tokens, salt), worker)


class Model:
    """What one worker holds, by token prefix; every lookup is a linear scan."""

    def __init__(self):
        self.known, self.device, self.host, self.disk = set(), {}, set(), set()

    def store(self, tokens, tier, start, salt):
        blind = tier != "device"
        placed = start == 0 and not blind
        if start:
            placed = (tokens[: start * SIZE], salt) in self.known
        for end in range((start + 1) * SIZE, len(tokens) + 1, SIZE):
            key = (tokens[:end], salt)
            placed = placed or key in self.known
            if not placed:
                continue
            self.known.add(key)
            if tier == "device":
                self.device[key] = self.device.get(key, 0) + 1
            else:
                getattr(self, tier).add(key)

    def remove(self, key, tier):
        if tier != "device":
            getattr(self, tier).discard(key)
        elif self.device.get(key):
            self.device[key] -= 1

    def clear(self, tier):
        for name in (tier,) if tier else ("device", "host", "disk"):
            getattr(self, name).clear()
        if tier is None:
            self.known.clear()

    def match(self, tokens, salt):
        keys = [(tokens[:end], salt) for end in range(SIZE, len(tokens) + 1, SIZE)]
        device = 0
        while device < len(keys) and self.device.get(keys[device]):
            device += 1
        host = device
        while host < len(keys) and keys[host] in self.host | self.disk:
            host += 1
        return Match(device, host - device, len(set(keys[device:host]) - self.host))


# Sequences that branch early, midway and late: few blocks, so that operations meet, and long
# enough for a binary search to land beyond a hole.
TRUNK = tuple(range(DEPTH * SIZE))
SEQUENCES = [TRUNK] + [
    TRUNK[: at * SIZE] + tuple(100 * (i + 1) + t for t in range((DEPTH - at) * SIZE))
    for i, at in enumerate((1, 1, 1, 7, 10))
]


TIERS = ("device", "host", "disk")


def history(seed, moves):
    """Random moves: mostly stores from the start and single removals; clears are rare."""
    rng, ops = random.Random(seed), []
    for _ in range(moves):
        kind = rng.choices(["store", "remove", "strip", "lose"], [40, 50, 4, 1])[0]
        worker, tier = rng.choice("ab"), rng.choice(TIERS)
        path = rng.choice(SEQUENCES)[: rng.randint(1, DEPTH) * SIZE]
        start = rng.choice([0, 0, rng.randrange(len(path) // SIZE)])
        if kind == "lose":
            kind = rng.choice(["clear", "clear", "reset", "gone"])
            tier = rng.choice([*TIERS, None])
        ops.append((kind, worker, tier, path, start, rng.choice(SALTS)))
    return ops


# A seed and a length shrink to the shortest failing start of one walk; strategies drawn move by
# move stay too short to dig holes and fill them again.
HISTORY = st.builds(history, st.integers(0, 2**32), st.sampled_from(range(0, 160, 8)))
HASHES = {(q, salt): HASHER.prefix_hashes(q, salt) for q in SEQUENCES for salt in SALTS}


def apply(index, models, op):
    kind, worker, tier, path, start, salt = op
    model = models.setdefault(worker, Model())
    if kind == "store":
        start = min(start, len(path) // SIZE - 1)
        index.handle(stored(path, worker, tier, start, salt))
        model.store(path, tier, start, salt)
    elif kind in ("remove", "strip"):
        ends = [len(path)] if kind == "remove" else range(SIZE, len(path) + 1, SIZE)
        index.handle(removed(*(path[:end] for end in ends), worker=worker, tier=tier, salt=salt))
        for end in ends:
            model.remove((path[:end], salt), tier)
    elif kind == "clear":
        index.handle(TierCleared(worker, tier))
        model.clear(tier)
    else:
        index.handle(WorkerReset(worker) if kind == "reset" else WorkerGone(worker))
        model.clear(None)


def check_rows(index):
    """Sets count their blocks, tables and columns name the same rows, and no row is lost."""
    table = index._table
    rows = np.flatnonzero(table.keys)
    assert len(rows) == len(table) == len(table._by_key)
    assert sorted(table._by_key.values[table._by_key.values > 0]) == sorted(rows)
    assert table.find(table.keys[rows])[0].tolist() == rows.tolist()
    assert np.bincount(table.holders[rows], minlength=len(table.sets.blocks)).tolist() == (
        table.sets.blocks
    )
    assert not set(table._free.tolist()) & set(rows.tolist())
    assert index._holders.named == sum(len(holder.names) for holder in index._holders)
    for worker in index._holders:
        named = worker.names.values[worker.names.values > 0]
        assert set(named.tolist()) <= set(rows.tolist()) and len(named) == len(worker.names)
        assert set(worker.copies) <= set(named.tolist())


@given(HISTORY)
@settings(max_examples=30, deadline=None)
def test_index_equals_a_linear_scan_after_any_history(history):
    index, models = PrefixIndex(HASHER, 100_000), {}
    for op in history:
        apply(index, models, op)
        for (tokens, salt), hashes in HASHES.items():
            answers = match_all(index, hashes)
            for worker, model in models.items():
                expected = model.match(tokens, salt)
                assert match_worker(index, hashes, worker) == expected
                assert answers.get(worker, Match(0, 0)) == expected
            assert Match(0, 0) not in answers.values()
        for worker, held in index.held_blocks().items():
            model = models[worker]
            on_device = sum(copies > 0 for copies in model.device.values())
            assert held == {
                "device": on_device, "host": len(model.host), "disk": len(model.disk),
            }  # fmt: skip
    check_rows(index)


@given(HISTORY, st.integers(1, 60))
@settings(max_examples=30, deadline=None)
def test_small_index_knows_less_but_nothing_untrue(history, bound):
    index, truth = PrefixIndex(HASHER, bound), {}
    for op in history:
        apply(index, truth, op)
        assert index.stats()["blocks"] <= bound
        assert index.stats()["unheld"] <= bound // 8
        for (tokens, salt), hashes in HASHES.items():
            for worker, model in truth.items():
                device, host, _ = match_worker(index, hashes, worker)
                for block in range(device + host):
                    key = (tokens[: (block + 1) * SIZE], salt)
                    behind = model.host | model.disk
                    assert model.device.get(key) if block < device else key in behind
    check_rows(index)


A, B, C, D = (1, 2), (3, 4), (5, 6), (7, 8)


def test_host_run_starts_where_the_device_run_ends():
    index = PrefixIndex(HASHER, 100)
    index.handle(stored(A + B + C + D))
    index.handle(stored(A + B + C + D, tier="host"))
    assert match(index, A + B + C + D) == Match(4, 0)
    index.handle(removed(A + B + C, A + B + C + D))
    assert match(index, A + B + C + D) == Match(2, 2)
    index.handle(removed(A, tier="host"))
    assert match(index, A + B + C + D) == Match(2, 2)
    index.handle(removed(A))
    assert match(index, A + B + C + D) == Match(0, 0)


def test_disk_blocks_continue_a_run_and_count_where_alone():
    index = PrefixIndex(HASHER, 100)
    for worker in ("w", "plain"):
        index.handle(stored(A + B + C + D, worker))
        index.handle(stored(A + C, worker, "host"))
    index.handle(stored(A + B + C, tier="disk"))
    index.handle(removed(A, A + B, A + B + C, A + B + C + D))
    # The first block is in host memory and on disk, the next two on disk alone, the last is gone.
    assert match(index, A + B + C + D) == Match(0, 3, 2)
    index.handle(stored(A + B, tier="host"))
    assert match(index, A + B + C + D) == Match(0, 3, 1)
    index.handle(removed(A + B, tier="disk"))
    assert match(index, A + B + C + D) == Match(0, 3, 1), "it is in host memory, too"
    index.handle(TierCleared("w", "disk"))
    assert match(index, A + B + C + D) == Match(0, 2, 0)
    assert match(index, A + B + C + D, "plain") == Match(4, 0)


def test_place_that_a_disks_user_has_left_serves_one_without():
    index = PrefixIndex(HASHER, 100)
    index.hold("w", "disk", HASHER.prefix_hashes(A + B))
    assert match(index, A + B) == Match(0, 2, 2)
    index.handle(WorkerGone("w"))
    index.handle(stored(A + B, "v"))
    assert match(index, A + B, "v") == Match(2, 0, 0)
    assert not index._holders.disk_users


def test_hole_hides_what_follows_until_it_is_filled():
    index = PrefixIndex(HASHER, 100)
    index.handle(stored(A + B + C))
    index.handle(removed(A + B))
    assert match(index, A + B + C) == Match(1, 0)
    index.handle(stored(A + B, start=1))
    assert match(index, A + B + C) == Match(3, 0)


def test_host_block_of_unknown_salt_is_counted_not_guessed():
    index = PrefixIndex(HASHER, 100)
    index.handle(stored(A + B, tier="host"))
    assert match(index, A + B) == Match(0, 0)
    assert index.stats()["unjoined"] == 2
    index.handle(stored(A + B, tier="host", sent_salt=0))
    assert match(index, A + B) == Match(0, 2)


def test_unseen_host_block_follows_a_known_parent():
    index = PrefixIndex(HASHER, 100)
    index.handle(stored(A))
    index.handle(stored(A + B, tier="host"))
    index.handle(stored(A + B + C, tier="host", start=2))
    assert match(index, A + B + C) == Match(1, 2)


def test_blocks_named_without_tokens_join_by_name():
    index = PrefixIndex(HASHER, 100)
    index.handle(stored(A + B))
    names = (name(A), name(A + B), name(C))
    index.handle(BlocksStored("w", "host", names, None, (), 0, None))
    index.handle(removed(A, A + B))
    assert match(index, A + B) == Match(0, 2)
    assert index.stats()["unjoined"] == 1


def test_blocks_of_an_unknown_parent_are_counted_and_not_matched():
    index = PrefixIndex(HASHER, 100)
    index.handle(stored(A + B + C, start=1))
    assert index.stats()["orphans"] == 2
    assert match(index, A + B + C) == Match(0, 0)
    assert index.stats()["blocks"] == 0


def test_reset_forgets_blocks_and_a_gone_worker_is_unlisted():
    index = PrefixIndex(HASHER, 100)
    index.handle(stored(A + B, "a"))
    index.handle(stored(A + B, "b"))
    index.handle(WorkerReset("a"))
    index.handle(WorkerGone("b"))
    assert index.workers() == ("a",)
    assert match_all(index, HASHER.prefix_hashes(A + B)) == {}
    assert index.stats()["blocks"] == 0
    index.handle(removed(A, worker="b"))
    assert index.workers() == ("a",)


def test_second_name_for_one_block_is_ignored():
    index = PrefixIndex(HASHER, 100)
    index.handle(stored(A))
    index.handle(BlocksStored("w", "device", (1,), None, A, SIZE, 0))
    index.handle(BlocksRemoved("w", "device", (1,)))
    assert match(index, A) == Match(1, 0)
    assert index.stats()["ambiguous"] == index.stats()["unknown_removals"] == 1


def test_least_recently_used_leaves_go_first():
    index = PrefixIndex(HASHER, 4)
    index.handle(stored(A + B))
    index.handle(stored(C))
    index.handle(stored(D))
    assert match(index, A + B) == Match(2, 0)
    index.handle(stored((9, 9)))
    assert (match(index, A + B), match(index, C)) == (Match(2, 0), Match(0, 0))
    index.handle(stored((8, 8)))
    assert (match(index, A + B), match(index, D)) == (Match(2, 0), Match(0, 0))
    assert index.stats()["evicted"] == 2


def test_run_longer_than_the_bound_keeps_its_head():
    index = PrefixIndex(HASHER, 3)
    index.handle(stored(A + B + C + D + A))
    assert match(index, A + B + C + D + A) == Match(3, 0)
    assert index.stats()["refused"] == 2


def test_unheld_blocks_go_before_held_ones():
    index = PrefixIndex(HASHER, 8)
    index.handle(stored(A + B + C))
    index.handle(removed(A + B + C))
    assert index.stats()["unheld"] == 1
    for i in range(6):
        index.handle(stored((100 + i, 0)))
    assert match(index, A + B) == Match(2, 0)
    assert index.stats()["unheld"] == 0 and index.stats()["blocks"] == 8


def test_event_of_another_block_size_is_rejected_whole():
    index = PrefixIndex(HASHER, 100)
    event = BlocksStored("w7", "device", (1,), None, (1, 2, 3, 4), 4, 0)
    with pytest.raises(ValueError, match=r"w7 stores blocks of 4 tokens.*blocks of 2"):
        index.handle(event)
    with pytest.raises(ValueError, match="w7 stored 2 blocks of 2 tokens but sent 3"):
        index.handle(BlocksStored("w7", "device", (1, 2), None, (1, 2, 3), 2, 0))
    assert index.stats()["blocks"] == 0
    with pytest.raises(ValueError, match="max_blocks"):
        PrefixIndex(HASHER, 0)


def test_idle_names_are_dropped_first():
    """Names of blocks that their worker lost but another holds cost nothing that is held."""
    index = PrefixIndex(HASHER, 64)
    paths = [tuple(range(100 * i, 100 * i + 2 * 16)) for i in range(2)]
    for path in paths:
        for worker in "ab":
            index.handle(stored(path, worker))
    every = [path[:end] for path in paths for end in range(2, 33, 2)]
    index.handle(removed(*every, worker="a"))
    index.handle(stored(tuple(range(1000, 1008)), "b"))
    assert all(match(index, path, "b") == Match(16, 0) for path in paths)
    assert index.stats()["names"] <= 64 and index.stats()["evicted"] == 0
    check_rows(index)


@pytest.mark.parametrize(("workers", "copies"), [(1, 1), (16, 1), (16, 3)])
def test_block_takes_less_than_64_bytes_in_all(workers, copies):
    """A block counts once for each worker that has it, since each has a name for it."""
    bound, run, rng = 100_000, 250, np.random.default_rng(0)
    HASHER.prefix_hashes(range(run * SIZE))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = PrefixIndex(HASHER, bound)
    for first in range(0, bound - run * copies, run * copies):
        tokens = rng.integers(0, 2**31, run * SIZE)
        for copy, worker in enumerate(rng.permutation(workers)[:copies].tolist()):
            names = tuple(range(first + copy * run, first + (copy + 1) * run))
            index.handle(BlocksStored(f"w{worker}", "device", names, None, tokens, SIZE, 0))
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert index.stats()["names"] >= 0.98 * bound
    assert used < 64 * index.stats()["names"]


def test_blocks_of_thousands_of_salts_stay_apart():
    index = PrefixIndex(HASHER, 500)
    for tenant in range(4000):
        index.handle(stored(A + B, salt=tenant + 1))
    assert match(index, A + B, salt=4000) == Match(2, 0)
    index.handle(stored(A + B + C, start=2, salt=4000))
    assert match(index, A + B + C, salt=4000) == Match(3, 0)
    assert match(index, A + B + C, salt=3999) == Match(2, 0)


def test_blocks_behind_a_second_name_are_skipped_until_a_known():
    # The engine gives block A a new name (1), names A+B as before, and brings C behind it.
    index = PrefixIndex(HASHER, 100)
    index.handle(stored(A + B))
    run = (1, name(A + B), name(A + B + C))
    index.handle(BlocksStored("w", "device", run, None, A + B + C, SIZE, 0))
    assert match(index, A + B + C) == Match(3, 0)
    assert index.stats()["ambiguous"] == 1
    # Of two unknown ones in a row behind a second name, both are left out.
    index.handle(BlocksStored("w", "device", (2, 3), None, A + D, SIZE, 0))
    assert match(index, A + D) == Match(1, 0)
    assert index.stats()["ambiguous"] == 3


def test_device_copies_each_need_their_own_removal():
    index = PrefixIndex(HASHER, 100)
    for _ in range(3):
        index.handle(stored(A + B + C + D))
    prefixes = (A, A + B, A + B + C, A + B + C + D)
    for left in (2, 1, 0):
        index.handle(removed(*prefixes))
        assert match(index, A + B + C + D) == Match(4 if left else 0, 0)
    assert index.stats()["unknown_removals"] == 0
    index.handle(removed(*prefixes))
    assert index.stats()["unknown_removals"] == 4


def test_device_copies_do_not_count_in_host():
    index = PrefixIndex(HASHER, 100)
    for _ in range(2):
        index.handle(stored(A + B))
    index.handle(stored(A + B, tier="host"))
    index.handle(removed(A, A + B, tier="host"))
    assert match(index, A + B) == Match(2, 0)
    index.handle(removed(A, A + B, tier="host"))
    assert index.stats()["unknown_removals"] == 2


def test_events_with_arrays_of_tokens_can_be_compared():
    one, other = (BlocksStored("w", "device", (1, 2), None, np.arange(4), SIZE, 0) for _ in "12")
    # Each is itself alone, as arrays have no single truth value.
    assert one != other and other not in [one] and one in [one]


def group(event, number, last_tokens=1, **more):
    """The same blocks in a further cache group, which only names them."""
    return replace(event, group=number, last_tokens=last_tokens, token_ids=(), **more)


def test_hit_ends_where_all_groups_have_what_they_need():
    index = PrefixIndex(HASHER, 100)
    index.handle(stored(A + B + C + D))
    index.handle(group(stored(A + B), 1))
    index.handle(group(stored(A + B + C + D), 2, last_tokens=3))
    assert match(index, A + B + C + D) == Match(2, 0)
    index.handle(replace(removed(A), group=2))
    assert match(index, A + B + C + D) == Match(0, 0), "a window of two blocks lacks the first"
    index.handle(group(stored(A + B + C + D, start=2), 1))
    assert match(index, A + B + C + D) == Match(4, 0)
    assert match_worker(index, HASHER.prefix_hashes(A + B + C + D), "w", 3) == Match(3, 0)
    index.handle(TierCleared("w", None))
    index.handle(stored(A + B))
    assert match(index, A + B) == Match(2, 0)
    check_rows(index)


def test_hit_in_host_ends_where_all_groups_have_what_they_need():
    index = PrefixIndex(HASHER, 100)
    for tier in ("device", "host"):
        index.handle(stored(A + B + C + D, tier=tier))
        index.handle(group(stored(A + B, tier=tier), 1))
    index.handle(group(stored(A + B + C, start=2, tier="host"), 1))
    index.handle(removed(A + B + C, A + B + C + D))
    assert match(index, A + B + C + D) == Match(2, 1)
    index.handle(replace(removed(A + B + C, tier="host"), group=1))
    assert match(index, A + B + C + D) == Match(2, 0)


def test_ranks_are_caches_of_which_the_best_counts():
    index = PrefixIndex(HASHER, 100)
    index.handle(replace(stored(A + B), rank=1))
    index.handle(stored(A))
    assert match(index, A + B) == Match(2, 0)
    assert index.workers() == ("w",)
    assert index.held_blocks()["w"]["device"] == 3
    index.handle(replace(removed(A), rank=0))
    assert match(index, A + B) == Match(2, 0)
    index.handle(WorkerReset("w", 1))
    assert match(index, A + B) == Match(0, 0)
    index.handle(replace(stored(A + B), rank=1))
    index.handle(WorkerReset("w"))
    assert match(index, A + B) == Match(0, 0)
    index.handle(WorkerGone("w"))
    assert index.workers() == () and not index._holders.ranks
