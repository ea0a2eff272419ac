"""Rows of tables arrive byte for byte where they are put, and nothing else is written."""

import numpy as np
import pytest

from kappa_workers.paced.rows import copy_rows

# Bytes of no word's size, of one word, of pages.
WIDTHS = (1, 64, 4097, 24_576)
COUNT = 40


def random_tables(seed, gap=0):
    """Tables of `WIDTHS` bytes, each row `gap` bytes behind the one before."""
    rng = np.random.default_rng(seed)
    whole = [rng.integers(-128, 128, (COUNT, width + gap), dtype=np.int8) for width in WIDTHS]
    return [table[:, gap:] for table in whole]


def neighbours(_, count):
    """A run of neighbours, and one backwards."""
    return np.concatenate([np.arange(20, 20 + count // 2), np.arange(count - count // 2)[::-1]])


def strangers(rng, count):
    return rng.permutation(COUNT)[:count]


@pytest.mark.parametrize("gap", [0, 7])
@pytest.mark.parametrize("order", [neighbours, strangers])
@pytest.mark.parametrize("count", [0, 1, 7, 36])
def test_copy_rows_moves_these_bytes_and_no_others(count, order, gap):
    rng, source, target = np.random.default_rng(count), random_tables(1), random_tables(2, gap)
    wanted = [table.copy() for table in target]
    ids, source_ids = order(rng, count), order(rng, count)
    copy_rows(target, ids, source, source_ids)
    for got, table, old in zip(target, source, wanted, strict=True):
        old[ids] = table[source_ids]
        assert np.array_equal(got, old)


def test_copy_rows_moves_neighbours_backwards_and_repeats():
    source, target = random_tables(1), random_tables(2)
    ids, source_ids = np.arange(6, dtype=np.int32), np.array([9, 8, 7, 7, 7, 8])
    copy_rows(target, ids, source, source_ids)
    for got, table in zip(target, source, strict=True):
        assert np.array_equal(got[:6], table[[9, 8, 7, 7, 7, 8]])


@pytest.mark.parametrize("ids", [[-1], [3, COUNT]])
def test_copy_rows_refuses_a_row_that_is_not_there(ids):
    source, target = random_tables(1), [np.zeros_like(table) for table in random_tables(2)]
    good = np.arange(len(ids))
    for to, of in ((np.array(ids), good), (good, np.array(ids))):
        with pytest.raises(IndexError, match=rf"rows -?\d+ to -?\d+ of a table of {COUNT}"):
            copy_rows(target, to, source, of)
    assert not any(table.any() for table in target)


def test_copy_rows_refuses_what_does_not_pair_up():
    source, one = random_tables(1), np.array([1])
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        copy_rows(source, one, source[:2], one)
    with pytest.raises(ValueError, match=r"rows of \(64,\) bytes do not fit \(1,\)"):
        copy_rows(source[:1], one, source[1:2], one)
    with pytest.raises(ValueError, match="cannot copy 2 blocks to 1"):
        copy_rows(source, one, source, np.array([1, 2]))
