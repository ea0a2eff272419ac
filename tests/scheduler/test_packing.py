"""Which requests fill an iteration: paper 001's example, limits, and the exact optimum."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kappa_scheduler.admission import pack
from tests.scheduler.packing_cases import instance, optimum


def packed(tokens, sizes, budget, room):
    return pack(np.array(tokens, float), np.array(sizes, float), budget, np.array(room, float))


def test_paper_001_figure_8():
    # (cached, new) tokens: (3,2) (3,1) (4,2) (2,3); budget 5, VRAM 10.
    assert packed([2, 1, 2, 3], [[5], [4], [6], [5]], 5, [10]) == [0, 3]
    assert packed([1, 2], [[4], [6]], 5, [10]) == [0, 1]


def test_first_come_first_served_where_all_fits():
    assert packed([5, 5, 5, 5], [[1], [1], [1], [1]], 10, [10]) == [0, 1]


def test_first_come_is_kept_where_the_best_is_hardly_better():
    assert packed([99, 100], [[1], [1]], 100, [1]) == [0]
    assert packed([50, 100], [[1], [1]], 100, [1]) == [1]


@pytest.mark.parametrize("budget", [0, -3])
def test_no_budget_no_choice(budget):
    assert packed([1, 2], [[1], [1]], budget, [10]) == []


def test_nothing_to_choose_from():
    assert pack(np.empty(0), np.empty((0, 1)), 10.0, np.array([5.0])) == []


def test_what_exceeds_the_room_alone_is_left():
    assert packed([9, 1], [[11], [2]], 10, [10]) == [1]


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), resources=st.integers(1, 4))
def test_a_choice_fits_is_in_order_and_has_no_room_for_another(seed, resources):
    tokens, sizes, budget, room = instance(np.random.default_rng(seed), resources)
    chosen = pack(tokens, sizes, budget, room)
    assert chosen == sorted(set(chosen))
    left = room - sizes[chosen].sum(axis=0)
    assert (left >= -1e-6).all()
    if tokens[chosen].sum() < budget:
        rest = [i for i in range(len(tokens)) if i not in chosen]
        assert not any((sizes[i] <= left - 1e-6).all() for i in rest)


def first_come(tokens, sizes, budget, room):
    """Whatever fits, oldest first, until the budget is used."""
    chosen, left, filled = [], room.copy(), 0.0
    for place, size in enumerate(sizes):
        if filled < budget and (size <= left).all():
            chosen.append(place)
            left = left - size
            filled += tokens[place]
    return chosen, min(filled, budget)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), resources=st.integers(1, 4))
def test_pack_keeps_arrival_order_for_gains_under_two_percent(seed, resources):
    tokens, sizes, budget, room = instance(np.random.default_rng(seed), resources)
    chosen = pack(tokens, sizes, budget, room)
    oldest, oldest_tokens = first_come(tokens, sizes, budget, room)
    if chosen != oldest:
        assert oldest_tokens < 0.98 * min(budget, tokens[chosen].sum())


@pytest.mark.parametrize(
    ("tokens", "sizes", "chosen"),
    [
        # By most tokens per block (2 and 3 have 10, 1 has 3.3, 0 has 2.5): 60 + 10 + 10 tokens.
        # Oldest or smallest first gives [0, 1, 3] (30 tokens), most tokens first [0, 2] (70).
        pytest.param([10, 10, 60, 10], [4, 3, 6, 1], [1, 2, 3], id="most-tokens-per-block"),
        # By most tokens: 40 + 30. Oldest first gives [0, 1] (60), the other two orders [1, 2] (50).
        pytest.param([40, 20, 30], [8, 1, 2], [0, 2], id="most-tokens"),
        # By fewest blocks: 40 + 40 in 9 of 10; request 0 has most tokens, also per block (70 in 7).
        pytest.param([70, 40, 40], [7, 5, 4], [1, 2], id="fewest-blocks"),
    ],
)
def test_each_order_of_filling_finds_what_the_others_miss(tokens, sizes, chosen):
    assert packed(tokens, [[size] for size in sizes], 100, [10]) == chosen


@pytest.mark.parametrize("resources", [1, 2])
def test_against_the_exact_optimum(resources):
    """Two and three dimensions, the budget counted."""
    rng = np.random.default_rng(7 + resources)
    shares = []
    for _ in range(150):
        tokens, sizes, budget, room = instance(rng, resources)
        chosen = pack(tokens, sizes, budget, room)
        shares.append(min(budget, tokens[chosen].sum()) / optimum(tokens, sizes, budget, room))
    assert max(shares) <= 1 + 1e-9
    assert np.mean(shares) >= 0.98
    assert np.quantile(shares, 0.01) >= 0.9
