"""One tenant's queue: order of arrival, those that ran before in front, anyone may leave."""

import pytest

from kappa.protocol import Charge
from scheduler.accounts import Accounts
from scheduler.config import FairConfig
from scheduler.waiting import AHEAD, FAR_AHEAD, IN_TURN, TenantQueue, Waiting
from scheduler.work import Work


@pytest.fixture
def works():
    found = [Work(1, 0.0) for _ in range(6)]
    for seq, work in enumerate(found):
        work.seq = seq
    return found


def test_first_come_first_served(works):
    queue = TenantQueue()
    for work in works:
        queue.append(work)
    assert list(queue) == works and len(queue) == 6


def test_those_that_ran_stand_in_front_oldest_first(works):
    queue = TenantQueue()
    queue.append(works[0])
    for at in (5, 3, 4):
        queue.restore(works[at])
    assert [w.seq for w in queue] == [3, 4, 5, 0]


def test_who_was_not_admitted_after_all_stands_where_it_was(works):
    queue = TenantQueue()
    for at in (0, 1, 4):
        queue.append(works[at])
    for at in (3, 2):
        queue.put_back(works[at])
    queue.restore(works[5])
    assert [w.seq for w in queue] == [5, 0, 1, 2, 3, 4]


def test_anyone_may_leave(works):
    queue = TenantQueue()
    queue.append(works[0]), queue.append(works[1])
    queue.put_back(works[2]), queue.restore(works[3])
    for at in (0, 2, 3):
        queue.remove(works[at])
    assert list(queue) == [works[1]] and len(queue) == 1
    with pytest.raises(KeyError):
        queue.remove(works[0])


def waiting(services_s, **config):
    # As a rule has them: who waits, and what each has been given elsewhere.
    accounts = Accounts({}, 1.0)
    made = Waiting(FairConfig(**config), accounts)
    for seq, tenant in enumerate("".join(sorted(services_s))):
        made.append(arrived(tenant, seq))
    accounts.charged_elsewhere({t: Charge(s, 0.0, 0.0) for t, s in services_s.items()}, {})
    return made, accounts


def arrived(tenant, seq):
    work = Work(1, 0.0, tenant=tenant)
    work.seq = seq
    return work


def test_the_slack_and_what_waiting_can_earn_divide_the_tenants():
    # The least has had nothing: up to 0.25 s are in turn; up to 0.25 + 0.1·30 s are ahead.
    services_s = {"a": 0.0, "b": 0.25, "c": 0.5, "d": 3.25, "e": 3.5}
    made, _ = waiting(services_s, slack_s=0.25, credit=0.1, due_after_s=30.0)
    found = [(work.tenant, tier) for work, tier in made.in_turn(0.0)]
    tiers = (IN_TURN, IN_TURN, AHEAD, AHEAD, FAR_AHEAD)
    assert found == list(zip("abcde", tiers, strict=True))
    assert (len(made), made.tenants) == (5, 5)


def test_each_of_a_tenants_requests_counts_what_those_before_it_will_cost():
    made, accounts = waiting({"a": 0.0, "b": 0.25, "c": 0.5}, slack_s=0.25)
    # The first charge of 1 s teaches a fifth: a's second stands at 0.2 s, its third at 0.4 s.
    accounts.ended("a", 1.0)
    made.append(arrived("a", 7)), made.append(arrived("a", 8))
    found = [(work.tenant, work.seq, tier) for work, tier in made.in_turn(0.0)]
    assert found == [
        ("a", 0, IN_TURN), ("a", 7, IN_TURN), ("b", 1, IN_TURN), ("a", 8, AHEAD), ("c", 2, AHEAD),
    ]  # fmt: skip


@pytest.mark.parametrize("tenants", ["a", "abcdef"])
def test_no_more_are_looked_at_than_the_window(tenants):
    made, _ = waiting(dict.fromkeys(tenants, 0.0), window=3)
    for seq in range(6, 12):
        made.append(arrived(tenants[-1], seq))
    assert len(list(made.in_turn(0.0))) == 3
    made, _ = waiting({"a": 0.0}, window=1)
    assert len(list(made.in_turn(0.0))) == 1


def test_a_tenant_of_which_nothing_waits_any_more_is_forgotten():
    made, _ = waiting({"a": 0.0})
    more = arrived("a", 1)
    made.append(more)
    made.remove(more)
    assert (len(made), made.tenants) == (1, 1)
    (first, _), *rest = made.in_turn(0.0)
    made.remove(first)
    assert (len(made), made.tenants, rest) == (0, 0, [])
    with pytest.raises(KeyError):
        made.remove(first)
