"""Cached blocks are found, used ones stay, and changes are told as they happen."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kappa_engine.block_pool import BlockPool, OutOfBlocks
from kappa_engine.prefix_cache import (
    BlockKey,
    EventLog,
    PrefixPool,
    RemovedBlocks,
    StoredBlocks,
    extend_keys,
)
from tests.engine.books import check_cache

BLOCK = 2


def keys_of(tokens: list[int], salt: str = "") -> list[BlockKey]:
    keys: list[BlockKey] = []
    extend_keys(keys, tokens, BLOCK, salt)
    return keys


def cache(count: int = 8) -> PrefixPool:
    return PrefixPool(BlockPool("kv", "device", count, BLOCK), EventLog(BLOCK), lambda: None)


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_keys_are_equal_as_far_as_the_tokens_are(one: list[int], other: list[int]) -> None:
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    pairs = list(zip(keys_of(one), keys_of(other), strict=False))
    assert [a.digest == b.digest for a, b in pairs] == [
        (index + 1) * BLOCK <= shared for index in range(len(pairs))
    ]


def test_keys_grow_with_the_tokens_and_differ_by_salt() -> None:
    tokens = [5, 1 << 40, 0, 7, 9]
    keys = keys_of(tokens[:3])
    extend_keys(keys, tokens, BLOCK)
    assert [k.digest for k in keys] == [k.digest for k in keys_of(tokens)]
    assert [k.parent for k in keys] == [None, keys[0].digest]
    assert [k.tokens for k in keys] == [(5, 1 << 40), (0, 7)]
    assert keys_of(tokens, "a")[0].digest != keys_of(tokens, "b")[0].digest


class CacheMachine(RuleBasedStateMachine):
    """Users that take, publish, hold and release in any order; nothing in use is ever evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.log = EventLog(BLOCK)
        self.cache = PrefixPool(BlockPool("kv", "host", 10, BLOCK), self.log, lambda: None)
        self.users: list[list[int]] = []
        self.named: list[list[BlockKey]] = []
        self.told: set[bytes] = set()

    @rule(n=st.integers(0, 11))
    def take(self, n: int) -> None:
        before = self.cache.available()
        if n > before:
            with pytest.raises(OutOfBlocks):
                self.cache.take(n)
        else:
            self.users.append(self.cache.take(n))
            self.named.append([])
        assert self.cache.available() == before - (n if n <= before else 0)

    @precondition(lambda self: self.users)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=20, max_size=20))
    def publish(self, data: st.DataObject, tokens: list[int]) -> None:
        index = data.draw(st.integers(0, len(self.users) - 1))
        keys = keys_of(tokens)[: len(self.users[index])]
        self.cache.publish(keys, self.users[index])
        assert all(self.cache.find(key) is not None for key in keys) or self.named[index]
        self.named[index] = self.named[index] or keys

    @rule(tokens=st.lists(st.integers(0, 1), min_size=8, max_size=8))
    def hold(self, tokens: list[int]) -> None:
        keys = keys_of(tokens)
        found, idle = self.cache.prefix(keys, len(keys))
        before = self.cache.available()
        self.users.append(self.cache.hold(keys[:found]))
        self.named.append(keys[:found])
        assert self.cache.available() == before - idle
        if found < len(keys):
            with pytest.raises(KeyError):
                self.cache.hold(keys[: found + 1])

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.users) - 1))
        self.cache.release(self.users.pop(index))
        self.named.pop(index)

    @invariant()
    def books_are_right(self) -> None:
        check_cache(self.cache)
        used = {block for user in self.users for block in user}
        assert self.cache.available() == 10 - len(used)
        for event in self.log.take():
            if isinstance(event, StoredBlocks):
                assert not self.told & set(event.digests)
                self.told |= set(event.digests)
            else:
                self.told -= set(event.digests)
        assert self.told == set(self.cache._blocks)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)


def test_the_end_of_what_was_used_longest_ago_goes_first() -> None:
    made = cache(6)
    old, new = keys_of([1] * 6), keys_of([2] * 6)
    for keys in (old, new):
        blocks = made.take(3)
        made.publish(keys, blocks)
        made.release(blocks)
    made.take(2)
    assert [made.find(key) is not None for key in (*old, *new)] == [True, False, False] + [True] * 3
    made.touch(old[:1])
    made.take(3)
    assert [made.find(key) is not None for key in (old[0], *new)] == [True, False, False, False]


def test_a_copy_of_what_is_known_stays_private() -> None:
    made = cache()
    keys = keys_of([1, 2])
    first, second = made.take(1), made.take(1)
    made.publish(keys, first)
    made.publish(keys, second)
    assert len(made) == 1
    assert made.find(keys[0]) == first[0]
    made.release(second)
    made.release(first)
    assert (made.available(), made.pool.unused) == (8, 7)


def test_events_say_what_a_publisher_needs() -> None:
    log = EventLog(BLOCK)
    kv = PrefixPool(BlockPool("kv", "host", 4, BLOCK), log, lambda: None)
    act = PrefixPool(BlockPool("act", "host", 4, BLOCK), log, lambda: None)
    keys = keys_of([1, 2, 3, 4, 5, 6])
    digests = tuple(key.digest for key in keys)
    blocks = kv.take(3)
    kv.publish(keys, blocks)
    kv.release(blocks)
    copy = act.take(2)
    act.publish(keys[:2], copy)
    assert log.take() == [StoredBlocks("host", digests, None, (1, 2, 3, 4, 5, 6), BLOCK)]
    kv.take(4)
    # As activations, the first two are still there.
    assert log.take() == [RemovedBlocks("host", digests[2:])]
    act.release(copy)
    act.take(4)
    assert [set(event.digests) for event in log.take()] == [set(digests[:2])]


def test_runs_that_do_not_follow_each_other_are_told_apart() -> None:
    log = EventLog(BLOCK)
    one, other = keys_of([1, 2, 3, 4]), keys_of([9, 9, 8, 8])
    log.stored("device", [one[0], other[0], other[1]])
    assert log.take() == [
        StoredBlocks("device", (one[0].digest,), None, (1, 2), BLOCK),
        StoredBlocks("device", (other[0].digest, other[1].digest), None, (9, 9, 8, 8), BLOCK),
    ]
