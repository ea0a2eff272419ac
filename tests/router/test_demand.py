"""Who goes first when not all can: by cost against what asked of late, and by how much got in."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.demand import Asked, Demand

LEAST = 0.2
_works = st.floats(0.0, 1e3, allow_nan=False)


def demand(works, let_in):
    made = Demand()
    for work_s, inside in zip(works, let_in, strict=True):
        made.judged(Asked(0.0, work_s, 1.0, inside))
    return made


def test_without_news_nobody_is_dear():
    assert Demand().dearness(5.0) == 0.0 and Demand().room(5.0, LEAST) == 1.0


def test_dearness_is_a_rank_in_which_equals_count_half():
    made = demand([1.0, 2.0, 2.0, 9.0], [True] * 4)
    assert [made.dearness(w) for w in (0.5, 1.0, 2.0, 5.0, 99.0)] == [0.0, 0.125, 0.5, 0.75, 1.0]


def test_while_nobody_is_refused_all_but_the_dearest_of_all_have_all_the_room():
    made = demand(range(100), [True] * 100)
    assert made.room(99.0, LEAST) > 0.99
    assert made.room(1e9, LEAST) == pytest.approx(LEAST), "dearer than any that asked"


def test_the_more_are_refused_the_more_the_cheap_are_preferred():
    rooms = []
    for refused in (10, 50, 90):
        made = demand(range(100), [i >= refused for i in range(100)])
        rooms.append([made.room(w, LEAST) for w in (5.0, 50.0, 95.0)])
    assert all(cheap > middle > dear for cheap, middle, dear in rooms)
    assert rooms[0][1] > rooms[1][1] > rooms[2][1]


def test_only_the_last_ones_count():
    made = demand([1.0] * 50, [False] * 50)
    for _ in range(128):
        made.judged(Asked(0.0, 7.0, 1.0, True))
    assert made.dearness(1.0) == 0.0 and made.room(7.0, LEAST) == pytest.approx(1.0)


@given(st.lists(st.tuples(_works, st.booleans()), max_size=200), _works, _works)
def test_room_is_within_its_bounds_and_never_more_for_the_dearer(history, one, other):
    made = demand(*zip(*history, strict=True)) if history else Demand()
    rooms = [made.room(w, LEAST) for w in sorted((one, other))]
    assert LEAST - 1e-9 <= rooms[1] <= rooms[0] <= 1.0


def came(times_s, slack_s):
    made = Demand()
    for at_s in times_s:
        made.judged(Asked(at_s, 1.0, slack_s, True))
    return made


def test_who_comes_while_a_prompt_computes_and_cannot_wait_as_long_is_displaced():
    # One each second; from one that computes 10 s the first 8 s are too long for a slack of 2 s.
    made = came(range(100), slack_s=2.0)
    assert made.displaced(100.0, np.array([10.0])) == pytest.approx([8.0])


def test_what_the_others_wait_for_anyway_displaces_nobody():
    made = came(range(100), slack_s=20.0)
    assert made.displaced(100.0, np.array([10.0, 20.0])).tolist() == [0.0, 0.0]
    assert Demand().displaced(100.0, np.array([10.0])).tolist() == [0.0]


def test_the_displaced_are_spread_over_the_workers():
    made = came(range(100), slack_s=2.0)
    assert made.displaced(100.0, np.array([10.0, 4.0])) == pytest.approx([4.0, 1.0])


def test_a_burst_is_not_taken_for_what_comes_while_it_computes():
    made = came([99.0, 99.001], slack_s=0.0)
    assert made.displaced(99.001, np.array([10.0])) == pytest.approx([2.0])


def test_nobody_is_displaced_by_a_prompt_that_takes_no_time():
    assert came([5.0], slack_s=0.0).displaced(5.0, np.array([0.0])).tolist() == [0.0]


def test_what_was_lent_is_repaid_at_its_rate_and_never_twice():
    made = Demand()
    assert made.repaid_in_s(10.0, 0.5) == 0.0
    made.lend(3.0)
    assert made.repaid_in_s(10.0, 0.5) == 6.0
    assert made.repaid_in_s(14.0, 0.5) == pytest.approx(2.0)
    assert made.repaid_in_s(12.0, 0.5) == pytest.approx(2.0), "a clock set back repays nothing"
    assert made.repaid_in_s(99.0, 0.5) == 0.0


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 9)), max_size=40),
    st.lists(st.floats(0, 20), min_size=1, max_size=5),
)
def test_displacement_is_the_plain_sum(asked, blocks_s):
    asked = sorted(asked)
    made = Demand()
    for at_s, slack_s in asked:
        made.judged(Asked(at_s, 1.0, slack_s, True))
    got = made.displaced(50.0, np.array(blocks_s))
    for block_s, count in zip(blocks_s, got, strict=True):
        window_s = max(block_s, 50.0 - asked[0][0] if asked else 0.0)
        over_s = sum(max(block_s - slack_s, 0.0) for _, slack_s in asked)
        expected = over_s / window_s / len(blocks_s) if window_s else 0.0
        assert count == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("refused", "work_s", "room"),
    [
        # Half of four refused: the power is 2. Dearness of 1, 2, 3, 4 is 1/8, 3/8, 5/8, 7/8.
        (2, 1.0, 1 - 0.8 * 0.125**2),
        (2, 3.0, 1 - 0.8 * 0.625**2),
        # All refused: the power is 1, and the room falls evenly.
        (4, 2.0, 1 - 0.8 * 0.375),
        (4, 9.0, 0.2),
    ],
)
def test_room_by_hand(refused, work_s, room):
    made = demand([1.0, 2.0, 3.0, 4.0], [i >= refused for i in range(4)])
    assert made.room(work_s, LEAST) == pytest.approx(room)


def test_the_last_128_count_and_not_one_more():
    made = demand([1.0] * 128, [True] * 128)
    assert made.dearness(2.0) == 1.0
    for count in range(1, 65):
        made.judged(Asked(0.0, 9.0, 1.0, True))
        assert made.dearness(2.0) == (128 - count) / 128


def test_what_is_lent_adds_up():
    made = Demand()
    made.lend(3.0), made.lend(1.0)
    assert made.repaid_in_s(0.0, 0.5) == 8.0
    # Two seconds at 0.5 repay one of four.
    assert made.repaid_in_s(2.0, 0.5) == 6.0
