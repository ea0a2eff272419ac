"""Who goes first when not all can: by cost against what asked of late, and by how much got in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.demand import Demand

LEAST = 0.2
_works = st.floats(0.0, 1e3, allow_nan=False)


def demand(works, let_in):
    made = Demand()
    for work_s, inside in zip(works, let_in, strict=True):
        made.judged(work_s, inside)
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
        made.judged(7.0, True)
    assert made.dearness(1.0) == 0.0 and made.room(7.0, LEAST) == pytest.approx(1.0)


@given(st.lists(st.tuples(_works, st.booleans()), max_size=200), _works, _works)
def test_room_is_within_its_bounds_and_never_more_for_the_dearer(history, one, other):
    made = demand(*zip(*history, strict=True)) if history else Demand()
    rooms = [made.room(w, LEAST) for w in sorted((one, other))]
    assert LEAST - 1e-9 <= rooms[1] <= rooms[0] <= 1.0
