"""The hash table against a dictionary, crowded and with many keys at once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kappa_router.index.hash_table import HashTable


def both_tables(rows):
    """A table that keeps its keys, and one with its keys in a column of `rows` rows."""
    return HashTable(0, 0.68), HashTable(0, 0.4, np.zeros(rows, dtype=np.uint64))


def put(table, keys, values):
    if table._by_value:
        table.keys[values] = keys
    return table.add(keys, values)


@given(st.integers(0, 2**32), st.integers(1, 40), st.sampled_from([60, 300, 2**64 - 1]))
@settings(max_examples=60, deadline=None)
def test_table_equals_a_dictionary_after_any_changes(seed, moves, spread):
    rng, tables, truth, free = np.random.default_rng(seed), both_tables(40_000), {}, 1
    for _ in range(moves):
        keys = rng.integers(1, spread, int(rng.integers(1, 80)), dtype=np.uint64)
        if rng.random() < 0.6:
            new = np.array(sorted(set(keys.tolist()) - truth.keys()), dtype=np.uint64)
            values = np.arange(free, free + len(new), dtype=np.int32)
            free += len(new)
            for table in tables:
                assert put(table, new, values).tolist() == values.tolist()
            truth |= dict(zip(new.tolist(), values.tolist(), strict=True))
        else:
            for table in tables:
                values = table.find(keys)[0]
                table.remove(keys)
                if table._by_value:
                    table.keys[values] = 0
            for key in keys.tolist():
                truth.pop(key, None)
        wanted = np.concatenate([keys, rng.integers(1, 2**64, 9, dtype=np.uint64)])
        expected = [truth.get(key, 0) for key in wanted.tolist()]
        for table in tables:
            assert len(table) == len(truth)
            assert table.find(wanted)[0].tolist() == expected


def test_removal_moves_back_the_keys_behind_it_round_the_end():
    # Keys that all begin their search in the last of eight lanes.
    table = HashTable(4, 0.68)
    keys = np.arange(1, 4000, dtype=np.uint64)
    home = (keys * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)) * np.uint64(8) >> np.uint64(32)
    last = keys[home == 7][:4]
    assert len(table.values) == 8
    table.add(last, np.arange(1, 5, dtype=np.int32))
    assert table.values.tolist() == [2, 3, 4, 0, 0, 0, 0, 1]
    table.remove(last[:2])
    assert table.values.tolist() == [4, 0, 0, 0, 0, 0, 0, 3]
    assert table.find(last)[0].tolist() == [0, 0, 3, 4]


def test_key_twice_in_a_batch_is_one_entry():
    for table in both_tables(4000):
        keys = np.random.default_rng(0).integers(1, 2**64, 1000, dtype=np.uint64)
        now = put(table, np.concatenate([keys, keys]), np.arange(1, 2001, dtype=np.int32))
        assert now.tolist() == 2 * list(range(1, 1001)) and len(table) == 1000
        assert table.find(keys)[0].tolist() == now[:1000].tolist()


@pytest.mark.parametrize("entries", [0, 30_000])
def test_table_takes_tens_of_thousands_at_once(entries):
    table = HashTable(entries, 0.68)
    keys = np.random.default_rng(0).integers(1, 2**64, 40_000, dtype=np.uint64)
    values = np.arange(1, 40_001, dtype=np.int32)
    table.add(keys, values)
    assert (table.find(keys)[0] == values).all()
    assert sorted(table.keys_where(np.ones(len(table.values), dtype=bool))) == sorted(keys)
    assert len(table.values) < 2 * 40_000


def test_full_table_in_which_keys_come_and_go_keeps_its_size():
    table, keys = HashTable(64, 0.68), np.arange(1, 4000, dtype=np.uint64)
    slots = len(table.values)
    room = int(slots * 0.68)
    table.add(keys[:room], np.arange(1, room + 1, dtype=np.int32))
    for number in range(room, len(keys)):
        table.remove(keys[number - room : number - room + 1])
        table.add(keys[number : number + 1], np.array([number], dtype=np.int32))
    assert len(table) == room and len(table.values) == slots
    assert table.find(keys[-1:])[0] == len(keys) - 1
    table.add(keys[:1], np.array([5], dtype=np.int32))
    assert len(table.values) > slots, "one more than it has room for"


def test_read_only_and_strided_keys_are_accepted():
    table, keys = HashTable(0, 0.68), np.arange(1, 21, dtype=np.uint64)
    table.add(keys[::2], np.arange(1, 11, dtype=np.int32))
    keys.setflags(write=False)
    assert table.find(keys)[0].tolist() == [n // 2 + 1 if n % 2 == 0 else 0 for n in range(20)]
