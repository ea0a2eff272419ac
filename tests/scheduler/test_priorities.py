"""Classes of priority: a head start in line, never a share, and never more than it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kappa_scheduler.catalogue import rule_named
from kappa_scheduler.config import FairConfig
from kappa_scheduler.work import Work, last_in_line
from tests.scheduler.engine import Blocks, Engine, Request

RULES = ("fair", "fcfs")


def engine(rule, class_s=10.0, **config):
    """One request of one token an iteration, which takes a second."""
    made = rule_named(rule, FairConfig(class_s=class_s, **config))
    return Engine(made, Blocks(1000), budget=1, slots=1)


def asked(priority, tenant="a"):
    request = Request(1, tenant=tenant)
    request.priority = priority
    return request


def admitted(made, arrivals):
    """Requests by (second, class, tenant), played until all were admitted."""
    requests, left = [], sorted(arrivals)
    while left or made.waiting:
        while left and left[0][0] <= made.now_s:
            requests.append(made.add(asked(*left.pop(0)[1:])))
        made.iterate()
    return requests


@pytest.mark.parametrize("rule", RULES)
def test_a_class_is_a_head_start_of_so_many_seconds(rule):
    made = engine(rule)
    busy, later_class = made.add(asked(0)), made.add(asked(1))
    made.iterate()
    made.now_s = 9.0
    within = made.add(asked(0))
    made.now_s = 11.0
    beyond, urgent = made.add(asked(0)), made.add(asked(-1))
    for _ in range(6):
        made.iterate()
    # Places 0; 1, 9, 10 and 11.
    assert made.order == [busy, urgent, within, later_class, beyond]


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), min_size=2, max_size=40),
    class_s=st.sampled_from([0.0, 0.5, 3.0, 10.0]),
)
def test_nobody_is_passed_by_who_came_later_than_the_head_start(rule, arrivals, class_s):
    made = engine(rule, class_s)
    requests = admitted(made, arrivals)
    rank = {request: place for place, request in enumerate(made.order)}
    for i, first in enumerate(requests):
        for second in requests[i + 1 :]:
            lead_s = class_s * (first.priority - second.priority)
            came_after_s = second.arrival_s - first.arrival_s
            if second.arrival_s <= made.admitted_at[first] and came_after_s < lead_s:
                assert rank[second] < rank[first], "the head start was not given"
            if came_after_s >= lead_s:
                assert rank[first] < rank[second], "it was passed by more than the head start"


@pytest.mark.parametrize("rule", RULES)
def test_last_class_waits_in_a_flood_as_if_it_had_come_later(rule):
    made = engine(rule)
    last = made.add(asked(9))
    admitted(made, [(float(second), 0, "a") for second in range(200) for _ in range(2)])
    # Of twice what can be served, 180 came in the 90 s that it stands behind.
    assert made.admitted_at[last] == 180


def test_another_tenants_flood_delays_the_last_class_by_its_lead():
    made = engine("fair")
    last = made.add(asked(9))
    admitted(made, [(float(second), 0, "b") for second in range(100) for _ in range(2)])
    # 0.1 * 90 s of service, less what its own waiting earns.
    assert 7 <= made.admitted_at[last] <= 10


def test_among_tenants_a_class_goes_first_once_and_is_no_share():
    # Both want twice what there is. A lead of 3 classes is worth 0.1 * 3 * 10 = 3 s of service.
    made = engine("fair", slack_s=0.0)
    for _ in range(400):
        made.add(asked(3, "b"))
        made.add(asked(0, "a"))
        made.iterate()
    served = [sum(request.tenant == name for request in made.order) for name in "ab"]
    assert 2 <= served[0] - served[1] <= 5
    assert [request.tenant for request in made.order[:4]] == ["a", "a", "a", "b"]


def test_last_in_line_is_of_the_last_class_then_last_admitted():
    works = [Work(1, 0.0, priority=p) for p in (0, 2, 0, 1)]
    for seq, work in enumerate(works):
        work.join(seq, float(seq), 10.0)
    assert last_in_line(works) is works[1]
    # One that has aged keeps its place: it came 21 s before, and is of two classes later.
    old, new = Work(1, 0.0, priority=2), Work(1, 0.0)
    old.join(0, 0.0, 10.0)
    new.join(1, 21.0, 10.0)
    assert last_in_line([new, old]) is new
    same = [works[2], works[0]]
    assert last_in_line(same) is works[0]


@pytest.mark.parametrize("rule", RULES)
def test_victim_is_of_the_last_class_whatever_was_admitted_last(rule):
    made = rule_named(rule)
    works = [Work(1, 0.0, priority=p) for p in (5, 0)]
    for work in works:
        made.add(work, 0.0)
    assert made.victim(works) is works[0]
