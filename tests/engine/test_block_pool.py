"""Blocks never leak, are never freed twice, and are copied in as few runs as can be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kappa_engine.block_pool import BlockError, BlockPool, OutOfBlocks, runs
from kappa_engine.sequence import EngineRequest, Sequence
from tests.engine.books import check_pool

COUNT = 24


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of allocations, shares and frees, against a plain dict of user counts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool("kv", "host", COUNT, 4)
        self.users: dict[int, int] = {}

    @rule(n=st.integers(0, COUNT + 2))
    def allocate(self, n: int) -> None:
        if n > COUNT - len(self.users):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(n)
            return
        taken = self.pool.allocate(n)
        assert len(set(taken)) == n and not set(taken) & set(self.users)
        self.users.update(dict.fromkeys(taken, 1))

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.users)))
        self.pool.share([block])
        self.users[block] += 1

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.integers(-1, COUNT), max_size=6))
        if any(blocks.count(b) > self.users.get(b, 0) for b in blocks):
            before = self.pool.misused
            with pytest.raises(BlockError):
                self.pool.free(blocks)
            assert self.pool.misused == before + 1
            return
        self.pool.free(blocks)
        for block in blocks:
            self.users[block] -= 1
        self.users = {block: n for block, n in self.users.items() if n}

    @invariant()
    def books_are_right(self) -> None:
        check_pool(self.pool)
        assert self.pool.used == len(self.users)
        assert all(self.pool.refs(b) == self.users.get(b, 0) for b in range(COUNT))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_misuse_is_refused_by_name_counted_and_changes_nothing() -> None:
    pool = BlockPool("act", "device", 4, 16)
    first, second = pool.allocate(2)
    pool.free([first])
    with pytest.raises(BlockError, match=r"device pool of act: block 0 is given back 1 times"):
        pool.free([second, first])
    with pytest.raises(BlockError, match="there is no block 9 among 4"):
        pool.free([9])
    with pytest.raises(BlockError, match="has no user"):
        pool.share([first])
    with pytest.raises(BlockError, match="cannot allocate -1"):
        pool.allocate(-1)
    assert (pool.misused, pool.unused, pool.used) == (4, 3, 1)
    check_pool(pool)


def test_blocks_come_in_runs_where_there_are_any() -> None:
    pool = BlockPool("kv", "host", 16, 16)
    first, second, third = (pool.allocate(4) for _ in range(3))
    pool.free(first)
    pool.free(third)
    assert pool.allocate(8) == list(range(8, 16))
    assert pool.allocate(4) == list(range(4))
    pool.free(second)
    check_pool(pool)


def test_device_blocks_refuses_blocks_that_are_in_host_memory() -> None:
    sequence = Sequence(0, EngineRequest([1], 1), 0.0, 1, 4)
    sequence.blocks = np.array([-1, 2, 3])
    assert sequence.room_tokens == 12 and sequence.device_blocks(1) == [2, 3]
    for stop in (None, 2):
        with pytest.raises(BlockError, match="block 0 of a sequence is in host memory"):
            sequence.device_blocks(0, stop)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_runs_copy_every_pair_once(pairs: list[tuple[int, int]]) -> None:
    copies = runs([p[0] for p in pairs], [p[1] for p in pairs])
    assert [(a + i, b + i) for a, b, n in copies for i in range(n)] == pairs


def test_runs_are_as_few_as_can_be() -> None:
    assert runs([4, 5, 6, 1], [0, 1, 2, 3]) == [(4, 0, 3), (1, 3, 1)]
    with pytest.raises(BlockError, match="cannot copy 1 blocks to 2"):
        runs([1, 2], [3])
