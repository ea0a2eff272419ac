"""The prefix cache against a plain model: block by block, a list in the order of last use."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kappa_simulator.cache import TierCache, common_blocks


def chain(*path: int) -> np.ndarray:
    """Chained ids of a path of labels: equal exactly where the whole prefix is."""
    ids, at = [], 7
    for label in path:
        at = (at * 1_000_003 + label + 1) % (1 << 61)
        ids.append(at)
    return np.array(ids, dtype=np.uint64)


def add(cache, ids, stop):
    """Hold blocks as if used just now."""
    run, length = cache.match(ids, stop)
    pinned = cache.pin(run, length)
    cache.unpin(cache.extend(pinned, ids, stop) if length < stop else pinned)


def evictable(cache):
    return cache.blocks - cache.pinned


class Plain:
    """One block at a time: who pins it, and the order of last use."""

    def __init__(self):
        self.order: list[int] = []
        self.pins: dict[int, int] = {}

    def match(self, ids, limit):
        held = 0
        while held < limit and ids.item(held) in self.pins:
            held += 1
        return held

    def pin(self, ids, length):
        for block in ids[:length].tolist():
            self.pins[block] += 1
            if block in self.order:
                self.order.remove(block)

    def unpin(self, ids, length):
        for block in reversed(ids[:length].tolist()):
            self.pins[block] -= 1
            if not self.pins[block]:
                self.order.append(block)

    def extend(self, ids, start, stop):
        for block in ids[start:stop].tolist():
            self.pins[block] = 1

    def evict(self, blocks):
        gone, self.order = self.order[:blocks], self.order[blocks:]
        for block in gone:
            del self.pins[block]
        return gone


paths = st.lists(st.integers(0, 1), min_size=1, max_size=7)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("use"), paths),
        st.tuples(st.just("hold"), paths),
        st.tuples(st.just("release"), st.integers(0, 5)),
        st.tuples(st.just("evict"), st.integers(1, 5)),
        st.tuples(st.just("grow"), st.integers(0, 5), paths),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(operations)
def test_it_holds_pins_and_evicts_as_a_list_of_blocks_would(steps):
    cache, plain = TierCache(), Plain()
    held: list[tuple[list[int], np.ndarray, object]] = []

    def hold(path):
        ids = chain(*path)
        run, length = cache.match(ids, len(ids))
        assert length == plain.match(ids, len(ids))
        assert cache.unpinned(run, length) == sum(not plain.pins[b] for b in ids[:length].tolist())
        handle = cache.pin(run, length)
        plain.pin(ids, length)
        if length < len(ids):
            handle = cache.extend(handle, ids, len(ids))
            plain.extend(ids, length, len(ids))
        return path, ids, handle

    def release(entry):
        _, ids, handle = entry
        cache.unpin(handle)
        plain.unpin(ids, len(ids))

    for step in steps:
        match step:
            case ("use", path):
                release(hold(path))
            case ("hold", path):
                held.append(hold(path))
            case ("release", which) if held:
                release(held.pop(which % len(held)))
            case ("evict", count):
                gone = [b for ids in cache.evict(count) for b in ids.tolist()]
                assert sorted(gone) == sorted(plain.evict(count))
            case ("grow", which, path) if held:
                before, ids, handle = held.pop(which % len(held))
                start, ids = len(ids), chain(*before, *path)
                run, at = cache.match(ids, len(ids), handle, start)
                handle = cache.pin(run, at, handle) if at > start else handle
                for block in ids[start:at].tolist():
                    plain.pins[block] += 1
                    if block in plain.order:
                        plain.order.remove(block)
                if at < len(ids):
                    handle = cache.extend(handle, ids, len(ids))
                    plain.extend(ids, at, len(ids))
                held.append(([*before, *path], ids, handle))
        assert cache.blocks == len(plain.pins)
        assert cache.pinned == sum(1 for pins in plain.pins.values() if pins)
        assert evictable(cache) == len(plain.order)


def test_the_tail_of_the_least_recently_used_prefix_goes_first():
    cache = TierCache()
    old, new = chain(1, 2, 3), chain(4, 5)
    add(cache, old, 3)
    add(cache, new, 2)
    assert [ids.tolist() for ids in cache.evict(1)] == [old[2:].tolist()]
    cache.touch(*cache.match(old, 2))
    assert [ids.tolist() for ids in cache.evict(2)] == [new.tolist()]
    assert cache.match(old, 3)[1] == 2


def test_evict_keeps_a_shared_prefix_after_an_unused_branch():
    cache = TierCache()
    left, right = chain(1, 2, 3, 4), chain(1, 2, 5)
    add(cache, left, 4)
    add(cache, right, 3)
    assert cache.blocks == 5
    gone = [block for ids in cache.evict(2) for block in ids.tolist()]
    assert gone == left[2:].tolist()
    assert cache.match(right, 3)[1] == 3


def test_pinned_blocks_stay():
    cache = TierCache()
    ids = chain(1, 2, 3)
    add(cache, ids, 3)
    handle = cache.pin(*cache.match(ids, 2))
    assert cache.pinned == 2
    cache.evict(10)
    assert cache.blocks == 2 and evictable(cache) == 0
    cache.unpin(handle)
    cache.evict(10)
    assert cache.blocks == 0


@pytest.mark.parametrize("shared", [0, 1, 3, 5])
def test_common_blocks_are_found_by_bisection(shared):
    a = chain(1, 2, 3, 4, 5)
    b = chain(*[1, 2, 3, 4, 5][:shared], *([9] * (5 - shared)))
    assert common_blocks(a, b, 0, 5) == shared


def held_copy(cache, ids, start=0):
    run, length = cache.match(ids, start)
    cache.unpin(cache.extend(cache.pin(run, length), ids, len(ids), copy=True))


def test_copies_are_evicted_before_anything_older():
    cache = TierCache()
    old, copied = chain(0, 0, 0), chain(1, 1, 1)
    add(cache, old, 3)
    held_copy(cache, copied)
    assert (cache.blocks, cache.spare) == (6, 3)
    assert np.concatenate(cache.evict(2)).tolist() == copied[1:].tolist()
    assert (cache.blocks, cache.spare) == (4, 1)
    assert [part.tolist() for part in cache.evict(2)] == [[copied[0]], [old[2]]]
    assert (cache.blocks, cache.spare) == (2, 0)


def test_a_pinned_copy_is_not_spare():
    cache = TierCache()
    ids = chain(1, 1, 1)
    held_copy(cache, ids)
    pinned = cache.pin(*cache.match(ids, 2))
    assert (cache.spare, cache.pinned) == (1, 2)
    cache.evict(5)
    assert cache.match(ids, 3)[1] == 2
    cache.unpin(pinned)
    cache.touch(*cache.match(ids, 2))
    assert cache.spare == evictable(cache) == 2


def test_evicting_a_copy_takes_what_follows_not_what_precedes():
    cache = TierCache()
    ids = chain(1, 1, 1, 1, 1, 1)
    add(cache, ids, 2)
    held_copy(cache, ids[:4], 2)
    add(cache, ids, 6)
    assert (cache.blocks, cache.spare) == (6, 4)
    gone = np.concatenate(cache.evict(4)).tolist()
    assert sorted(gone) == sorted(ids[2:].tolist())
    assert (cache.match(ids, 6)[1], cache.spare) == (2, 0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "copy", "evict", "pin", "unpin"]), paths),
                max_size=40))  # fmt: skip
def test_whatever_happens_no_block_outlasts_those_before_it(steps):
    cache, pinned = TierCache(), []
    for kind, path in steps:
        ids = chain(*path)
        found = cache.match(ids, len(ids))[1]
        if kind == "add":
            add(cache, ids, len(ids))
        elif kind == "copy" and found < len(ids):
            held_copy(cache, ids, found)
        elif kind == "evict":
            cache.evict(len(path))
        elif kind == "pin" and found:
            pinned.append(cache.pin(*cache.match(ids, found)))
        elif kind == "unpin" and pinned:
            cache.unpin(pinned.pop())
        assert 0 <= cache.spare <= evictable(cache)
    for handle in pinned:
        cache.unpin(handle)
    cache.evict(cache.blocks)
    assert cache.blocks == cache.spare == cache.pinned == 0
