"""What tenants are charged, how they are ranked, and in which order their requests stand."""

import pytest

from kappa.protocol import Charge
from kappa_scheduler.config import FairConfig
from kappa_scheduler.tenant_charges import AHEAD, FAR_AHEAD, IN_TURN, TenantQueues
from kappa_scheduler.work import Work


def tenants(**weights):
    made = TenantQueues(FairConfig(weights=weights))
    made.settle(0.0, 100)
    return made


def arrived(tenant, seq=0):
    work = Work(1, 0.0, tenant=tenant)
    work.seq = seq
    return work


def entered(made, tenant, seq=0):
    work = arrived(tenant, seq)
    made.enter(work)
    return work


# -- charges -----------------------------------------------------------------------------------


def test_blocks_are_charged_as_long_as_they_are_held():
    made = tenants()
    made.hold("a", 50)
    # A clock that stands or goes back charges nothing twice.
    for now_s in (2.0, 1.0, 2.0, 2.0):
        made.settle(now_s, 100)
    made.hold("a", -50)
    made.settle(9.0, 100)
    assert made.charges() == {"a": Charge(1.0, 0.0, 0.0)}


def test_a_quarter_of_a_million_events_leave_nothing_behind():
    made, third = tenants(), 1 / 3
    for number in range(60_000):
        made.settle(number * 1e-3, 100)
        made.hold("a", 7 * third)
        made.hold("a", 13 * third)
        made.settle((number + 1) * 1e-3, 100)
        made.hold("a", -7 * third)
        made.hold("a", -13 * third)
    before_s = made.charges()["a"].vram_s
    assert before_s == pytest.approx(60 * 20 * third / 100, rel=1e-9)
    made.settle(1e9, 100)
    assert made.charges()["a"].vram_s == before_s


def test_charges_split_iterations_by_tokens_and_loads_by_time():
    made = tenants()
    made.computed(2.0, {"a": 30, "b": 10})
    made.computed(2.0, {})
    made.loaded("b", 3.0)
    assert made.charges() == {"a": Charge(0.0, 1.5, 0.0), "b": Charge(0.0, 0.5, 3.0)}


def test_service_is_the_greatest_of_the_three_over_the_weight():
    made = tenants(a=2.0)
    made.loaded("a", 3.0), made.computed(1.0, {"a": 1})
    made.loaded("z", 3.0)
    assert (made.service_s("a"), made.service_s("z")) == (1.5, 3.0)


def test_reports_of_other_workers_count_once_in_any_order():
    made = tenants()
    for seconds in (2.0, 1.0, 2.0):
        made.charged_elsewhere({"a": Charge(seconds, 0.0, 0.0)}, {})
    made.loaded("a", 0.5)
    assert made.service_s("a") == 2.0
    assert made.charges() == {"a": Charge(0.0, 0.0, 0.5)}
    made.charged_elsewhere({}, {"a": 4.0, "new": 8.0})
    made.loaded("new", 2.0)
    assert (made.service_s("a"), made.service_s("new")) == (0.5, 0.25)


# -- who comes and goes ------------------------------------------------------------------------


def test_who_comes_back_is_lifted_to_the_least_of_those_who_wait():
    made = tenants()
    entered(made, "a"), made.loaded("a", 5.0)
    entered(made, "b"), made.loaded("b", 9.0)
    entered(made, "c")
    assert made.service_s("c") == made.service_s("a") == 5.0
    assert "c" not in made.charges()  # lifted is not charged


def test_who_waits_already_is_not_lifted():
    made = tenants()
    entered(made, "a"), entered(made, "b", 1), made.loaded("b", 9.0)
    entered(made, "a", 2)
    assert made.service_s("a") == 0


def test_a_claim_is_kept_between_two_requests_but_does_not_grow():
    made = tenants()
    first = entered(made, "a")
    entered(made, "b", 1)
    made.loaded("b", 2.0)
    made.leave(first)
    made.loaded("b", 100.0)
    entered(made, "a", 2)
    assert made.service_s("a") == pytest.approx(100.0)


def test_where_nobody_waits_nobody_is_owed_anything():
    made = tenants()
    made.leave(entered(made, "early"))
    made.loaded("early", 1000.0)
    entered(made, "late")
    assert made.service_s("late") == made.service_s("early") == 1000.0


# -- the order of turns ------------------------------------------------------------------------


def order(made):
    return [work.seq for work, _ in made.in_turn(0.0)]


def test_queue_orders_by_arrival_with_preempted_ones_first():
    made = tenants()
    works = [arrived("a", seq) for seq in range(7)]
    for at in (0, 1, 4):
        made.enter(works[at])
    # Two that were not admitted after all stand where they were.
    for at in (3, 2):
        made.enter(works[at])
    for at in (6, 5):
        made.enter(works[at], preempted=True)
    assert order(made) == [5, 6, 0, 1, 2, 3, 4] and len(made) == 7
    for at in (0, 3, 6):
        made.leave(works[at])
    assert order(made) == [5, 1, 2, 4] and (len(made), made.waiting) == (4, 1)
    for at in (0, 6):
        with pytest.raises(KeyError):
            made.leave(works[at])


def test_tenant_with_nothing_waiting_is_known_but_has_no_turn():
    made = tenants()
    only = entered(made, "a")
    made.leave(only)
    assert (len(made), made.waiting, made.known) == (0, 0, 1)
    with pytest.raises(KeyError):
        made.leave(only)


def waiting(services_s, **config):
    """One request of each tenant, and what each has been given elsewhere."""
    made = TenantQueues(FairConfig(**config))
    for seq, tenant in enumerate(sorted(services_s)):
        entered(made, tenant, seq)
    made.charged_elsewhere({t: Charge(s, 0.0, 0.0) for t, s in services_s.items()}, {})
    return made


def test_the_slack_and_what_waiting_can_earn_divide_the_tenants():
    # The least has had nothing: up to 0.25 s are in turn; up to 0.25 + 0.1·30 s are ahead.
    services_s = {"a": 0.0, "b": 0.25, "c": 0.5, "d": 3.25, "e": 3.5}
    made = waiting(services_s, slack_s=0.25, credit=0.1, due_after_s=30.0)
    found = [(work.tenant, tier) for work, tier in made.in_turn(0.0)]
    tiers = (IN_TURN, IN_TURN, AHEAD, AHEAD, FAR_AHEAD)
    assert found == list(zip("abcde", tiers, strict=True))
    assert (len(made), made.waiting) == (5, 5)


def test_waiting_is_worth_the_same_to_tenants_of_any_weight():
    """Both wait alike, so service over the weight decides: 4 s / 4 is behind 1.01 s / 1."""
    services_s = {"a": 4.0, "b": 1.01, "c": 0.99}
    made = waiting(services_s, weights={"a": 4.0}, credit=0.1, due_after_s=30.0)
    assert [work.tenant for work, _ in made.in_turn(20.0)] == ["c", "a", "b"]


def test_tier_of_a_request_counts_the_cost_of_those_before_it():
    made = waiting({"a": 0.0, "b": 0.25, "c": 0.5}, slack_s=0.25)
    # The first charge of 1 s teaches a fifth: a's second stands at 0.2 s, its third at 0.4 s.
    made.ended("a", 1.0)
    entered(made, "a", 7), entered(made, "a", 8)
    found = [(work.tenant, work.seq, tier) for work, tier in made.in_turn(0.0)]
    assert found == [
        ("a", 0, IN_TURN), ("a", 7, IN_TURN), ("b", 1, IN_TURN), ("a", 8, AHEAD), ("c", 2, AHEAD),
    ]  # fmt: skip


def test_mean_cost_follows_what_requests_cost_by_weight():
    made = TenantQueues(FairConfig(weights={"a": 2.0}, slack_s=0.0))
    for _ in range(100):
        made.ended("a", 6.0)
    for seq in range(2):
        entered(made, "a", seq)
    for seq, given_s in ((2, 2.99), (3, 3.01)):
        entered(made, str(seq), seq)
        made.charged_elsewhere({str(seq): Charge(given_s, 0.0, 0.0)}, {})
    assert order(made) == [0, 2, 1, 3]


@pytest.mark.parametrize("names", ["a", "abcdef"])
@pytest.mark.parametrize("window", [1, 3])
def test_no_more_are_looked_at_than_the_window(names, window):
    made = waiting(dict.fromkeys(names, 0.0), window=window)
    for seq in range(6, 12):
        entered(made, names[-1], seq)
    assert len(order(made)) == window
