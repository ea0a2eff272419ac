"""Blocks never leak, are never freed twice, and tables cannot lie about their length."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockError, BlockPool, OutOfBlocks, SequenceTable, runs

COUNT = 24


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of allocations, shares and frees, against a plain dict of user counts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool("kv", "host", COUNT, 4)
        self.users: dict[int, int] = {}

    @rule(n=st.integers(0, COUNT + 2))
    def allocate(self, n: int) -> None:
        unused = COUNT - len(self.users)
        if n > unused:
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
        right = all(blocks.count(b) <= self.users.get(b, 0) for b in blocks)
        if not right:
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
        self.pool.check()
        assert self.pool.used == len(self.users)
        assert all(self.pool.refs(b) == self.users.get(b, 0) for b in range(COUNT))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_misuse_is_refused_by_name_and_counted() -> None:
    pool = BlockPool("act", "device", 4, 16)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(BlockError, match=r"device pool of act: block 0 is given back 1 times"):
        pool.free([block])
    with pytest.raises(BlockError, match="there is no block 9 among 4"):
        pool.free([9])
    with pytest.raises(BlockError, match="nobody uses it"):
        pool.share([block])
    with pytest.raises(BlockError, match="cannot allocate -1"):
        pool.allocate(-1)
    assert pool.misused == 4
    assert pool.unused == 4
    with pytest.raises(ValueError, match="at least one token"):
        BlockPool("kv", "host", 4, 0)


def test_a_failed_free_changes_nothing() -> None:
    pool = BlockPool("kv", "device", 4, 16)
    taken = pool.allocate(2)
    with pytest.raises(BlockError):
        pool.free([*taken, taken[0]])
    assert pool.used == 2
    pool.check()


def test_blocks_come_in_runs_where_there_are_any() -> None:
    pool = BlockPool("kv", "host", 16, 16)
    first, second, third = (pool.allocate(4) for _ in range(3))
    pool.free(first)
    pool.free(third)
    assert pool.allocate(8) == list(range(8, 16))
    assert pool.allocate(4) == list(range(4))
    pool.free(second)
    pool.check()


def test_a_table_knows_its_length_and_what_is_on_the_device() -> None:
    table = SequenceTable(4)
    table.append([-1])
    table.append([2, 3])
    assert (len(table), table.room_tokens) == (3, 12)
    assert table.blocks(1) == table.on_device() == [2, 3]
    with pytest.raises(BlockError, match="block 0 of the table is in host memory"):
        table.blocks()
    with pytest.raises(BlockError, match="block 0 of the table is in host memory"):
        table.blocks(0, 2)
    table.clear()
    assert len(table) == 0


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20),
    st.none() | st.integers(1, 4),
)
def test_runs_copy_every_pair_once(pairs: list[tuple[int, int]], longest: int | None) -> None:
    to, of = [p[0] for p in pairs], [p[1] for p in pairs]
    copies = runs(to, of, longest)
    assert [(a + i, b + i) for a, b, n in copies for i in range(n)] == pairs
    assert all(n <= (longest or 20) for _, _, n in copies)


def test_runs_are_as_few_as_can_be() -> None:
    assert runs([4, 5, 6, 1], [0, 1, 2, 3]) == [(4, 0, 3), (1, 3, 1)]
    with pytest.raises(BlockError, match="cannot copy 1 blocks to 2"):
        runs([1, 2], [3])
