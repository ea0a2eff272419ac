"""What tenants are charged, and how those who come and go are ranked."""

import math

import pytest

from kappa.protocol import Charge
from scheduler.accounts import Accounts


def accounts(**weights):
    found = Accounts(weights, 1.0)
    found.settle(0.0, 100)
    return found


def test_blocks_are_charged_as_long_as_they_are_held():
    found = accounts()
    found.hold("a", 50)
    found.settle(2.0, 100)
    found.hold("a", -50)
    found.settle(9.0, 100)
    assert found.charges() == {"a": Charge(1.0, 0.0, 0.0)}


def test_iterations_are_charged_by_tokens_and_loads_by_their_time():
    found = accounts()
    found.computed(2.0, {"a": 30, "b": 10})
    found.computed(2.0, {})
    found.loaded("b", 3.0)
    assert found.charges() == {"a": Charge(0.0, 1.5, 0.0), "b": Charge(0.0, 0.5, 3.0)}


def test_service_is_the_greatest_of_the_three_over_the_weight():
    found = accounts(a=2.0)
    found.loaded("a", 3.0), found.computed(1.0, {"a": 1})
    assert found.service_s("a") == 1.5 and found.weight("a") == 2.0 and found.weight("z") == 1.0


def test_who_comes_back_is_lifted_to_the_least_of_those_who_wait():
    found = accounts()
    found.came("a"), found.loaded("a", 5.0)
    found.came("b"), found.loaded("b", 9.0)
    found.came("c")
    assert found.service_s("c") == found.service_s("a") == 5.0
    assert "c" not in found.charges()  # lifted is not charged


def test_who_waits_already_is_not_lifted():
    found = accounts()
    found.came("a"), found.came("b"), found.loaded("b", 9.0)
    found.came("a")
    assert found.service_s("a") == 0


def test_a_claim_is_kept_between_two_requests_but_does_not_grow():
    found = accounts()
    found.came("a"), found.came("b")
    found.loaded("b", 2.0)
    found.left("a")
    found.loaded("b", 100.0)
    found.came("a")
    assert found.service_s("a") == pytest.approx(100.0)


def test_where_nobody_waits_nobody_is_owed_anything():
    found = accounts()
    found.came("early"), found.left("early"), found.loaded("early", 1000.0)
    found.came("late")
    assert found.service_s("late") == found.service_s("early") == 1000.0


def test_news_of_other_workers_count_once_in_any_order():
    found = accounts()
    found.charged_elsewhere({"a": Charge(2.0, 0.0, 0.0)}, {})
    found.charged_elsewhere({"a": Charge(1.0, 0.0, 0.0)}, {})
    found.charged_elsewhere({"a": Charge(2.0, 0.0, 0.0)}, {})
    found.loaded("a", 0.5)
    assert found.service_s("a") == 2.0
    assert found.charges() == {"a": Charge(0.0, 0.0, 0.5)}


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_news_that_make_no_sense_are_ignored(wrong):
    found = accounts()
    found.loaded("a", 3.0)
    found.charged_elsewhere({"a": Charge(math.inf, math.nan, 1.0)}, {"a": wrong})
    assert found.service_s("a") == 4.0 and found.weight("a") == 1.0


def test_a_clock_that_stands_or_goes_back_charges_nothing_twice():
    found = accounts()
    found.hold("a", 100)
    for now_s in (1.0, 0.5, 1.0, 1.0):
        found.settle(now_s, 100)
    assert found.charges()["a"].vram_s == 1.0


def test_the_mean_cost_follows_what_requests_cost():
    found = accounts(a=2.0)
    assert found.mean_s("a") == 0
    for _ in range(100):
        found.ended("a", 6.0)
    assert found.mean_s("a") == pytest.approx(3.0)


def test_a_million_events_leave_nothing_behind():
    found, third = accounts(), 1 / 3
    for number in range(250_000):
        found.settle(number * 1e-3, 100)
        found.hold("a", 7 * third)
        found.hold("a", 13 * third)
        found.settle((number + 1) * 1e-3, 100)
        found.hold("a", -7 * third)
        found.hold("a", -13 * third)
    before_s = found.charges()["a"].vram_s
    assert before_s == pytest.approx(250 * 20 * third / 100, rel=1e-9)
    found.settle(1e9, 100)
    assert found.charges()["a"].vram_s == before_s
