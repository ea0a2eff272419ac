"""Each baseline's own order, over a memory that only counts blocks."""

import pytest

from kappa_scheduler.batching import Batcher
from kappa_scheduler.catalogue import rule_named
from kappa_scheduler.config import FairConfig
from kappa_scheduler.work import BUDGET, CAP, PENDING, SLOTS, VRAM, Room, Work
from tests.scheduler.counted_blocks import Blocks


def rule_of(name, works, blocks=10_000, **config):
    rule, memory = rule_named(name, FairConfig(**config)), Blocks(blocks)
    for work in works:
        rule.add(work, work.arrival_s)
    return rule, memory


def admitted(rule, memory, now_s=0.0, budget=8192, slots=256):
    plan = rule.plan(Room(memory, budget, slots, 0), now_s)
    return [work for work, _ in plan.admitted]


def test_priority_orders_by_number_and_stops_at_a_misfit():
    works = [Work(n, 0.0, priority=p) for n, p in ((10, 5), (50, 0), (20, 0), (60, 1), (5, 9))]
    rule, memory = rule_of("priority", works, blocks=100)
    assert admitted(rule, memory) == [works[1], works[2]]
    assert rule.victim([works[1], works[0], works[2]]) is works[0]
    assert works[0].skips == 2 and rule.max_skips == 2


def test_vtc_serves_the_lowest_counter_and_charges_cached_tokens():
    heavy = [Work(10, 0.0, tenant="h") for _ in range(3)]
    light = [Work(30, 0.0, tenant="l") for _ in range(2)]
    rule, memory = rule_of("vtc", [*heavy, *light])
    memory.cached[heavy[0]] = (9, 0)
    # 10, then 30 for the other, then two more of 10 before its second.
    assert admitted(rule, memory) == [heavy[0], light[0], heavy[1], heavy[2], light[1]]
    assert rule.balances == {"h": 30.0, "l": 60.0}


def test_vtc_divides_by_weight():
    works = [Work(10, 0.0, tenant=tenant) for tenant in "aaaabbbb"]
    rule, memory = rule_of("vtc", works, weights={"a": 3.0})
    assert [w.tenant for w in admitted(rule, memory)[:5]] == ["a", "b", "a", "a", "a"]


def test_vtc_lifts_a_tenant_that_comes_back_to_the_lowest():
    rule, memory = rule_of("vtc", [Work(100, 0.0, tenant="a") for _ in range(3)])
    admitted(rule, memory, budget=150)
    assert rule.balances["a"] == 200.0 and len(rule) == 1
    rule.add(Work(10, 1.0, tenant="b"), 1.0)
    assert rule.balances["b"] == 200.0


def test_equinox_charges_waiters_less_and_seconds_by_tokens():
    works = [Work(100, 0.0, tenant="a"), Work(100, 3.0, tenant="b")]
    rule, memory = rule_of("equinox", works)
    assert admitted(rule, memory, now_s=3.0) == works
    # Three seconds of waiting leave a fourth of the charge.
    assert rule.balances == {"a": 25.0, "b": 100.0}
    rule.ran(2.0, {"a": 75, "b": 25}, 5.0)
    assert rule.engine_s == {"a": 1.5, "b": 0.5}
    # As by VTC, a is lifted to b's 100 as it comes back: 1 + 1 against 1 + 1/3.
    late = [Work(10, 5.0, tenant=tenant) for tenant in ("b", "a", "c")]
    for work in late:
        rule.add(work, 5.0)
    rule.balances["c"] = 0.0
    assert [w.tenant for w in admitted(rule, memory, now_s=5.0)] == ["c", "b", "a"]


def test_vtc_charges_generated_tokens_twice_as_they_come():
    core = Batcher(Blocks(), rule_named("vtc"), budget_tokens=100)
    core.add(Work(60, 0.0, tenant="a"), 0.0)
    core.step(0.0, 0)
    core.ran(0.1, 1, 0.1)
    assert core.rule.balances["a"] == 60.0
    core.step(0.1, 1)
    core.ran(0.5, 5, 0.6)
    assert core.rule.balances["a"] == 70.0


def test_dlpm_takes_the_longest_prefix_without_deficit():
    works = [Work(n, 0.0, tenant=t) for n, t in ((5000, "a"), (5000, "a"), (3000, "b"))]
    rule, memory = rule_of("dlpm", works)
    memory.cached = {works[0]: (10, 0), works[1]: (400, 300), works[2]: (5, 0)}
    # After its first request tenant a is below zero, so b goes although it has next to no prefix.
    assert admitted(rule, memory) == [works[1], works[2]]
    assert admitted(rule, Blocks()) == [works[0]]


def test_dlpm_does_not_charge_cached_tokens():
    works = [Work(5000, 0.0, tenant="a"), Work(100, 0.0, tenant="b")]
    rule, memory = rule_of("dlpm", works)
    memory.cached[works[0]] = (4990, 0)
    admitted(rule, memory)
    assert rule.balances == {"a": 4086.0, "b": 3996.0}


def test_hrrn_ages_by_tokens_over_uncached_ones():
    big, small = Work(1000, 0.0), Work(100, 0.0)
    rule, memory = rule_of("hrrn", [big, small])
    memory.cached[big] = (990, 0)
    assert not admitted(rule, memory, slots=0)
    rule.ran(1.0, {"": 500}, 1.0)
    late = Work(1, 1.0)
    rule.add(late, 1.0)
    # 500/10 before 500/100 before 0/1.
    assert admitted(rule, memory, 1.0) == [big, small, late]


def test_hrrn_is_first_come_first_served_above_128_waiting():
    works = [Work(100, 0.0) for _ in range(129)]
    rule, memory = rule_of("hrrn", works)
    memory.cached[works[-1]] = (99, 0)
    assert not admitted(rule, memory, slots=0)
    rule.ran(1.0, {"": 500}, 1.0)
    assert admitted(rule, memory, 1.0, slots=1) == works[:1]
    assert admitted(rule, memory, 1.0, slots=1) == works[-1:]


def test_cap1_passes_misfits_with_one_high_ratio_request():
    loads = [Work(40, 0.0) for _ in range(2)]
    big, small = Work(90, 0.0), Work(10, 0.0)
    rule, memory = rule_of("cap1", [*loads, big, small], blocks=100)
    memory.cached = {work: (0, 20) for work in loads}
    plan = rule.plan(Room(memory, 8192, 256, 0), 0.0)
    assert [work for work, _ in plan.admitted] == [loads[0], small]
    assert plan.passed == {CAP: 1, VRAM: 1}
    assert loads[1].skips == big.skips == 1
    rule.finished(loads[0], 1, 1.0)
    memory.release(loads[0])
    assert admitted(rule, memory, 1.0) == [loads[1]]


def test_greedy_takes_the_smallest_and_starves_the_large():
    works = [Work(n, 0.0) for n in (90, 30, 20, 60)]
    rule, memory = rule_of("greedy", works, blocks=100)
    assert admitted(rule, memory) == [works[2], works[1]]
    for turn in range(1, 20):
        late = Work(40, float(turn))
        rule.add(late, float(turn))
        assert admitted(rule, memory, float(turn)) == [late]
        rule.finished(late, 1, float(turn))
        memory.release(late)
    assert works[0].skips == rule.max_skips == 21


@pytest.mark.parametrize(
    "name", ["fcfs", "priority", "vtc", "dlpm", "equinox", "hrrn", "cap1", "greedy"]
)
class TestAll:
    """What holds for every baseline."""

    def test_nothing_is_admitted_without_budget_or_slots(self, name):
        rule, memory = rule_of(name, [Work(10, 0.0)])
        for budget, slots, why in ((0, 5, BUDGET), (5, 0, SLOTS)):
            plan = rule.plan(Room(memory, budget, slots, 0), 0.0)
            assert not plan.admitted and plan.passed == {why: 1}
        assert len(rule) == 1

    def test_who_waits_for_anothers_load_stands_in_nobodys_way(self, name):
        works = [Work(10, 0.0), Work(11, 0.0)]
        rule, memory = rule_of(name, works)
        memory.awaited.add(works[0])
        plan = rule.plan(Room(memory, 8192, 256, 0), 0.0)
        assert [w for w, _ in plan.admitted] == works[1:] and plan.passed == {PENDING: 1}
        memory.awaited.clear()
        rule.landed(works[1], 1.0)
        assert admitted(rule, memory, 1.0) == works[:1]

    def test_misfit_waits_until_memory_changes_and_is_timed(self, name):
        work = Work(50, 0.0)
        rule, memory = rule_of(name, [work], blocks=40)
        assert not admitted(rule, memory) and not admitted(rule, memory, 1.0)
        memory.free, memory.version = 60, 1
        assert admitted(rule, memory, 3.0) == [work]
        assert rule.max_wait_s == 3.0 and not len(rule)

    def test_what_the_engine_could_not_take_waits_again(self, name):
        works = [Work(10, 0.0) for _ in range(2)]
        rule, memory = rule_of(name, works)
        assert admitted(rule, memory) == works
        for work in reversed(works):
            memory.release(work)
            rule.returned(work, 0.0)
        assert len(rule) == 2
        assert admitted(rule, memory) == works
        assert rule.victim(works) is works[-1]

    def test_an_aborted_one_is_forgotten(self, name):
        works = [Work(10, 0.0) for _ in range(2)]
        rule, memory = rule_of(name, works)
        rule.aborted(works[0], 0.0)
        assert len(rule) == 1 and admitted(rule, memory) == works[1:]
