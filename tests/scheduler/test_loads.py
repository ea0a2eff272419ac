"""When the next load may start."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kappa_scheduler.config import LinkRates
from kappa_scheduler.loads import JustInTime
from kappa_scheduler.work import Work


def link(token_s=0.01, iteration_s=0.1):
    found = JustInTime(LinkRates(token_s))
    for _ in range(200):
        found.ran(iteration_s)
    return found


def test_an_empty_link_is_open():
    assert link().open(0.0) and link().backlog_s(5.0) == 0


def test_another_load_starts_when_the_link_is_about_to_run_empty():
    found = link()
    found.start(Work(1, 0.0), 100, 0.0)
    assert not found.open(0.5) and found.backlog_s(0.5) == pytest.approx(0.5)
    assert found.open(0.85)  # two iterations before it runs empty


def test_loads_queue_one_behind_the_other():
    found = link()
    for _ in range(3):
        found.start(Work(1, 0.0), 100, 0.0)
    assert len(found) == 3 and found.backlog_s(0.0) == pytest.approx(3.0)


def test_a_landed_load_says_what_it_took_and_leaves_the_others():
    found, first, second = link(), Work(1, 0.0), Work(1, 0.0)
    found.start(first, 100, 0.0), found.start(second, 50, 0.0)
    assert found.landed(first, 1.0) == pytest.approx(1.0)
    assert found.backlog_s(1.0) == pytest.approx(0.5) and len(found) == 1


def test_a_load_broken_off_frees_the_link():
    found, first, second = link(), Work(1, 0.0), Work(1, 0.0)
    found.start(first, 1000, 0.0), found.start(second, 100, 0.0)
    assert found.forget(first, 0.0) == pytest.approx(10.0)
    assert found.backlog_s(0.0) == pytest.approx(1.0)
    assert found.forget(second, 0.0) == pytest.approx(1.0)
    assert found.open(0.0) and found.forget(second, 0.0) == 0


@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0])
def test_the_announced_rate_is_corrected_by_what_is_seen(factor):
    found, now_s = link(iteration_s=0.001), 0.0
    for _ in range(200):
        work = Work(1, now_s)
        found.start(work, 100, now_s)
        now_s += factor
        found.landed(work, now_s)
    assert found.load_s(100) == pytest.approx(factor, rel=0.05)


def test_nothing_known_two_loads_at_a_time():
    found = JustInTime(None)
    works = [Work(1, 0.0) for _ in range(2)]
    found.start(works[0], 10**6, 0.0)
    assert found.open(0.0)
    found.start(works[1], 10**6, 0.0)
    assert not found.open(1e9)
    assert found.landed(works[0], 3.0) == pytest.approx(3.0)
    assert found.open(3.0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["start", "land", "forget", "wait"]), st.integers(1, 200)),
        max_size=40,
    )
)
def test_the_link_opens_again_whatever_happens(events):
    found, now_s, loads = link(), 0.0, []
    for event, number in events:
        now_s += 0.01
        if event == "start":
            loads.append(Work(1, now_s))
            found.start(loads[-1], number, now_s)
        elif event == "wait":
            now_s += number / 100
        elif loads:
            work = loads.pop(number % len(loads))
            assert (found.landed if event == "land" else found.forget)(work, now_s) >= 0
    assert len(found) == len(loads)
    assert found.open(now_s + found.backlog_s(now_s) + 0.01)


@pytest.mark.parametrize("name", ["token_s", "fixed_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_rates_that_are_none_are_refused(name, value):
    with pytest.raises(ValueError, match=f"LinkRates.{name}"):
        LinkRates(**{"token_s": 0.0, name: value})


def test_load_of_nothing_costs_what_it_took_and_teaches_no_rate():
    found, work = link(), Work(1, 0.0)
    for turn in range(50):
        found.start(work, 100, float(turn))
        assert found.landed(work, turn + 0.01) == pytest.approx(0.01)
    assert found.load_s(100) == pytest.approx(1.0)


def test_two_loads_reported_at_once_are_both_charged():
    found, first, second = link(), Work(1, 0.0), Work(1, 0.0)
    found.start(first, 100, 0.0), found.start(second, 50, 0.0)
    assert found.landed(first, 1.6) == pytest.approx(1.0)
    assert found.landed(second, 1.6) == pytest.approx(0.5, rel=0.1)
