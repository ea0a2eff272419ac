"""Bucket tables against a dictionary, crowded and with many keys at once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.index.tag_table import NameTable, RowTable


class Rows:
    """A row table with the column that it needs."""

    def __init__(self):
        self.keys = np.zeros(40_000, dtype=np.uint64)
        self.table = RowTable(0, self.keys)
        self.next = 1

    def add(self, keys):
        rows = np.arange(self.next, self.next + len(keys), dtype=np.int32)
        self.next += len(keys)
        self.keys[rows] = keys
        return rows, self.table.add(keys, rows)


def play(seed, moves, spread):
    """Random additions and removals; small spreads make keys share buckets and tags."""
    rng, rows, names = np.random.default_rng(seed), Rows(), NameTable(0)
    truth = {}
    for _ in range(moves):
        keys = rng.integers(1, spread, int(rng.integers(1, 80)), dtype=np.uint64)
        if rng.random() < 0.6:
            new = np.array(sorted(set(keys.tolist()) - truth.keys()), dtype=np.uint64)
            if len(new) == 1:
                rows.keys[rows.next] = new[0]
                rows.table.put(int(new[0]), rows.next)
                names.put(int(new[0]), rows.next)
                truth[int(new[0])] = rows.next
                rows.next += 1
            elif len(new):
                given, now = rows.add(new)
                assert now.tolist() == given.tolist()
                assert names.add(new, given).tolist() == given.tolist()
                truth |= dict(zip(new.tolist(), given.tolist(), strict=True))
        else:
            old = np.array(sorted(set(keys.tolist()) & truth.keys()), dtype=np.uint64)
            for table in (rows.table, names):
                lanes = table.lanes_of(old)
                assert (lanes >= 0).all()
                table.clear_lanes(lanes)
            for key in old.tolist():
                rows.keys[truth.pop(key)] = 0
        asked = np.concatenate([keys, rng.integers(1, 2**64, 9, dtype=np.uint64)])
        expected = [truth.get(key, 0) for key in asked.tolist()]
        for table in (rows.table, names):
            assert len(table) == len(truth)
            assert table.values_of(asked).tolist() == expected
            assert [table.get(key) for key in asked.tolist()] == expected
            assert (table.lanes_of(asked) < 0).tolist() == [not row for row in expected]


@given(st.integers(0, 2**32), st.sampled_from([40, 300, 5000, 2**64]))
@settings(max_examples=40, deadline=None)
def test_equals_a_dictionary(seed, spread):
    play(seed, 60, spread)


def test_long_histories_do_not_fill_up_with_what_is_gone():
    play(1, 600, 900)


def test_a_key_twice_in_a_batch_is_one_entry():
    rng, rows = np.random.default_rng(0), Rows()
    keys = rng.integers(1, 2**64, 1000, dtype=np.uint64)
    given, now = rows.add(np.concatenate([keys, keys]))
    assert (now[:1000] == now[1000:]).all() and set(now.tolist()) <= set(given.tolist())
    assert len(rows.table) == 1000
    assert rows.table.values_of(keys).tolist() == now[:1000].tolist()


@pytest.mark.parametrize("table", [NameTable(0), NameTable(30_000)])
def test_tens_of_thousands_at_once(table):
    keys = np.random.default_rng(0).integers(1, 2**64, 40_000, dtype=np.uint64)
    values = np.arange(1, 40_001, dtype=np.int32)
    table.add(keys, values)
    assert (table.values_of(keys) == values).all()
    assert len(table.filled()) == len(table) == 40_000
    assert table.nbytes() < 24 * 40_000


def test_a_full_table_in_which_names_come_and_go_keeps_its_size():
    names, keys = NameTable(64), np.random.default_rng(3).permutation(np.arange(1, 4000))
    keys = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    held, nbytes = list(keys[: names.room]), names.nbytes()
    names.add(np.array(held), np.arange(1, len(held) + 1, dtype=np.int32))
    assert len(names) == names.room and names.nbytes() == nbytes
    for number, key in enumerate(keys[names.room :].tolist(), 1):
        gone = np.array([held.pop(0)], dtype=np.uint64)
        names.clear_lanes(names.lanes_of(gone))
        names.put(key, number)
        held.append(key)
    assert names.nbytes() == nbytes and len(names) == names.room
    assert names.get(held[-1]) == len(keys) - names.room
    names.put(int(keys[0]), 5)
    assert names.nbytes() > nbytes, "one more than it has room for"
