"""The fair rule as an engine sees it: who is admitted, who is passed, who is first again."""

import pytest

from kappa.protocol import Charge
from kappa_scheduler.batching import Batcher
from kappa_scheduler.config import FairConfig, LinkRates
from kappa_scheduler.fair import Fair
from kappa_scheduler.work import CAP, LINK, PENDING, RESERVED, VRAM, Quote, Room, Work
from tests.scheduler.counted_blocks import Blocks as CountedBlocks
from tests.scheduler.engine import Blocks, Engine, Request


def fair(blocks=100, budget=50, slots=8, load_s=0.01, **config):
    rule = Fair(FairConfig(**config), LinkRates(load_s))
    return rule, Engine(rule, Blocks(blocks), budget, slots, load_s)


def admitted(engine):
    return [work for work, _ in engine.plan.admitted]


# -- paper 001 ---------------------------------------------------------------------------------


class Cached(Blocks):
    """Cached tokens as each request has them, on the device."""

    def quote(self, work):
        return Quote(work.total_tokens, work.cached, 0)


def test_paper_001_figure_8():
    rule, memory = Fair(FairConfig()), Cached(10)
    works = []
    for cached, new in [(3, 2), (3, 1), (4, 2), (2, 3)]:
        work = Request(cached + new)
        work.cached = cached
        works.append(work)
        rule.add(work, 0.0)
    plans = []
    for iteration in range(2):
        plan = rule.plan(Room(memory, 5, 10, 0), float(iteration))
        plans.append([works.index(work) + 1 for work, _ in plan.admitted])
        for work, _ in plan.admitted:
            memory.release(work)
            rule.finished(work, 0, float(iteration))
    assert plans == [[1, 4], [2, 3]] and not len(rule)


def test_paper_001_figure_2():
    batcher = Batcher(CountedBlocks(), Fair(FairConfig()), budget_tokens=10)
    works = [Work(tokens, 0.0) for tokens in (3, 5, 12)]
    for work in works:
        batcher.add(work, 0.0)
    step = batcher.step(0.0, 0)
    assert [(works.index(w), tokens) for w, tokens, _ in step.chunks] == [(0, 3), (1, 5), (2, 2)]
    step = batcher.step(1.0, decoding=2)
    assert [(works.index(w), tokens) for w, tokens, _ in step.chunks] == [(2, 8)]
    assert works[2].total_tokens - works[2].computed_tokens == 2


# -- one tenant --------------------------------------------------------------------------------


def test_what_fits_passes_what_does_not_and_that_is_counted():
    rule, engine = fair()
    engine.add(Request(60, 20))
    engine.iterate()
    large, small = engine.add(Request(80)), [engine.add(Request(5)) for _ in range(3)]
    engine.budget = 500
    engine.iterate()
    engine.iterate()
    assert set(small) <= set(engine.done) and large.skips == rule.max_skips == 3
    assert engine.plan.passed == {VRAM: 1}
    engine.run()
    assert large in engine.done and rule.max_wait_s > 0


def test_loads_start_just_in_time_and_hold_no_blocks_before():
    _, engine = fair(blocks=1000, budget=500, load_s=0.5)
    engine.add(Request(10, 300))
    engine.iterate(0.01)
    loads = [engine.add(Request(50, host_tokens=40)) for _ in range(6)]
    engine.iterate(0.01)
    assert len(engine.loads) == 2 and engine.plan.passed == {LINK: 4}
    assert len(engine.memory.holders) == 3
    for _ in range(300):
        engine.iterate(1.0)
        assert len(engine.loads) <= 3
    assert set(loads) <= set(engine.done)


def test_request_waits_for_a_prefix_that_another_is_loading():
    _, engine = fair(blocks=1000, budget=500, load_s=0.1)
    first = engine.add(Request(50, chain=1, prefix=50, host_tokens=40))
    second = engine.add(Request(50, chain=1, prefix=50, host_tokens=40))
    engine.iterate()
    assert admitted(engine) == [first] and engine.plan.passed == {PENDING: 1}
    engine.run()
    assert second in engine.done


def test_a_remembered_answer_is_forgotten_at_every_event():
    """Nothing fits, nothing happens: the answer is remembered, but no event is missed."""
    for event in ("finish", "abort", "arrive", "starving"):
        rule, engine = fair(due_after_s=50.0)
        holder = engine.add(Request(60, 1000, bound=0))
        engine.iterate()
        large = engine.add(Request(50))
        for _ in range(3):
            engine.iterate(0.1)
            assert engine.plan.passed == {VRAM: 1} and not admitted(engine)
        if event == "finish":
            engine.end(holder)
            engine.iterate()
            assert admitted(engine) == [large]
        elif event == "abort":
            engine.end(large)
            engine.iterate()
            assert not len(rule) and not engine.plan.passed
        elif event == "arrive":
            small = engine.add(Request(2))
            engine.iterate()
            assert admitted(engine) == [small]
        else:
            engine.iterate(60.0)
            engine.iterate()
            assert engine.plan.reserved is large


def test_plan_notices_a_freed_budget_after_seeing_only_loads():
    rule = Fair(FairConfig(), LinkRates(1.0))
    memory = Blocks(1000)
    for _ in range(20):
        rule.add(Request(20, host_tokens=10), 0.0)
    plain = Request(20)
    rule.add(plain, 0.0)
    for _ in range(2):
        rule.plan(Room(memory, 0, 8, 1), 0.0)
    assert not rule.plan(Room(memory, 0, 8, 1), 0.0).admitted
    assert [w for w, _ in rule.plan(Room(memory, 50, 8, 1), 0.0).admitted] == [plain]


def test_request_that_fits_is_seen_behind_those_barred():
    _, engine = fair(budget=50, max_skips=0)
    engine.add(Request(60, 40, bound=0))
    engine.iterate(), engine.iterate()
    large, medium = engine.add(Request(90)), engine.add(Request(11))
    engine.iterate()
    assert medium in engine.admitted_at and large.skips == 1
    wide, small = engine.add(Request(30)), engine.add(Request(3))
    engine.iterate()
    assert engine.plan.reserved is large
    assert small in engine.admitted_at and wide not in engine.admitted_at
    assert engine.plan.passed[RESERVED] == 1
    engine.run()


def test_a_reservation_is_gone_with_whom_it_was_for():
    _, engine = fair(max_skips=0)
    engine.add(Request(60, 40, bound=0))
    engine.iterate(), engine.iterate()
    large = engine.add(Request(90))
    engine.add(Request(5, 1))
    engine.iterate(), engine.iterate()
    assert engine.plan.reserved is large
    engine.end(large)
    other = engine.add(Request(30))
    engine.iterate()
    assert engine.plan.reserved is None and other in engine.admitted_at


def test_preempted_goes_first_and_a_refused_one_keeps_its_place():
    rule, engine = fair(blocks=1000, budget=30)
    works = [engine.add(Request(30, 5)) for _ in range(4)]
    engine.iterate(), engine.iterate()
    assert list(engine.running) == works[:1] or works[1] in engine.running
    last = list(engine.running)[-1]
    engine.give_back(last)
    order = [work for work, _ in rule._tenants.in_turn(0.0)]
    assert order == sorted(engine.waiting, key=lambda w: w.seq)
    engine.preempt(works[0])
    engine.iterate()
    assert admitted(engine)[0] is works[0]
    engine.run()
    assert set(engine.done) == set(works)


def test_a_request_too_large_for_what_it_declares_runs_alone():
    _, engine = fair(blocks=50, budget=200)
    engine.add(Request(10, 3))
    engine.iterate()
    huge = engine.add(Request(48, 1, bound=10_000))
    engine.run(100)
    assert huge in engine.done


def test_requests_without_a_full_block_share_nothing():
    rule = Fair(FairConfig())
    engine = Engine(rule, Blocks(10, block_tokens=16), 100)
    engine.add(Request(5, 3, chain=1, prefix=5)), engine.add(Request(5, 3, chain=1, prefix=5))
    engine.iterate(1.0)
    assert rule.charges()[""].vram_s == pytest.approx(0.2)
    engine.run()


# -- tenants -----------------------------------------------------------------------------------


def test_who_had_least_goes_first():
    rule, engine = fair(blocks=1000, budget=10, slots=50)
    engine.add(Request(1, tenant="b"))
    engine.iterate(1.0)
    a = [engine.add(Request(10, tenant="a")) for _ in range(2)]
    b = [engine.add(Request(10, tenant="b")) for _ in range(2)]
    rule.charged_elsewhere({"a": Charge(5.0, 0.0, 0.0)}, {}, engine.now_s)
    engine.iterate()
    assert admitted(engine) == b[:1]
    engine.iterate()
    assert admitted(engine) == b[1:]
    engine.run()
    assert engine.order[-2:] == a


def flooded(*tenants):
    """An engine of 160 blocks and 16 slots, after a request of each of `tenants` and then ten
    iterations of a flood of tenant a: requests of 10 blocks that decode for long."""
    _, engine = fair(blocks=160, budget=1000, slots=16)
    for tenant in tenants:
        engine.add(Request(1, tenant=tenant))
        engine.iterate()
    for _ in range(40):
        engine.add(Request(8, output=1000, bound=2, tenant="a"))
    for _ in range(2):
        engine.iterate()
    return engine


def test_tenant_with_nothing_running_gets_the_slot_kept_free():
    engine = flooded("b")
    # A sixteenth stays free: one slot of 16, ten blocks of 160. 15 requests of 10 blocks fit.
    assert len(engine.held) == 15
    b = [engine.add(Request(8, bound=2, tenant="b")) for _ in range(2)]
    engine.iterate()
    assert admitted(engine) == b[:1], "the second one's tenant has something running"


def test_a_tenant_alone_may_use_all_slots_and_blocks():
    assert len(flooded().held) == 16
    assert len(flooded("a").held) == 16


def test_headroom_keeps_no_large_request_out_for_good():
    _, engine = fair(blocks=160, budget=1000, slots=16)
    engine.add(Request(1, tenant="b"))
    engine.iterate()
    # 155 of 160 blocks: more than is given beside another request of its tenant.
    small, large = engine.add(Request(4, tenant="a")), engine.add(Request(155, tenant="a"))
    for _ in range(4):
        engine.iterate()
    assert {small, large} <= set(engine.done)


def test_new_tenant_is_looked_at_though_the_window_is_full():
    rule = Fair(FairConfig(window=4))
    for _ in range(4):
        assert rule.add(Request(10, tenant="a"), 0.0)
    assert not rule.add(Request(10, tenant="a"), 0.0)
    assert rule.add(Request(10, tenant="b"), 0.0)


def test_waiting_earns_credit_up_to_when_it_is_due():
    for waited_s, first in ((9.0, "b"), (25.0, "a"), (10**6, "b")):
        rule = Fair(FairConfig(credit=0.1, due_after_s=1000.0 if waited_s < 100 else 20.0))
        rule.add(Request(10, tenant="a"), 0.0)
        b = Request(10, tenant="b")
        rule.add(b, waited_s)
        b.arrival_s = waited_s
        behind_s = 2.0 if waited_s < 100 else 3.0
        rule.charged_elsewhere({"a": Charge(behind_s, 0.0, 0.0)}, {}, waited_s)
        plan = rule.plan(Room(Blocks(100), 10, 8, 0), waited_s)
        assert plan.admitted[0][0].tenant == first


def test_the_victim_is_the_latest_of_the_tenant_that_had_most():
    rule, engine = fair(blocks=1000, budget=500)
    works = [engine.add(Request(10, 50, tenant)) for tenant in "abab"]
    engine.iterate()
    rule.charged_elsewhere({"a": Charge(9.0, 0.0, 0.0)}, {}, engine.now_s)
    assert rule.victim(works) is works[2] and rule.victim(works[3:]) is works[3]


def test_growth_beyond_what_was_declared_is_charged():
    rule, engine = fair(blocks=100, budget=500)
    engine.add(Request(10, 200, "a", bound=1))
    for _ in range(60):
        engine.iterate(1.0)
    exact = sum(10 + n for n in range(60)) / 100
    assert rule.charges()["a"].vram_s == pytest.approx(exact, rel=0.05)


def test_a_load_broken_off_is_charged():
    rule, engine = fair(load_s=0.1)
    load = engine.add(Request(50, host_tokens=40, tenant="a"))
    engine.iterate()
    engine.end(load)
    assert rule.charges()["a"].link_s == pytest.approx(4.0)


def test_the_same_events_give_the_same_plans():
    orders = []
    for _ in range(2):
        _, engine = fair(blocks=120, budget=30, max_skips=3)
        for number in range(60):
            engine.add(Request(number * 7 % 50 + 1, number % 9, "abc"[number % 3]))
            engine.iterate(0.3)
        engine.run()
        orders.append([(work.total_tokens, work.seq) for work in engine.order])
    assert orders[0] == orders[1]


def test_high_ratio_requests_keep_to_their_cap_while_others_wait():
    # 100 blocks for a budget of 10 tokens: 10 blocks a token. A request of 41 cached and 4 new
    # tokens takes 45 blocks, more than 4 x 10: high. One of 5 new takes 5 blocks: not.
    # High ones want 3 x 45 = 135 blocks, the others 9 x 5 = 45: high ones may hold 100 x 135 / 180
    # = 75 blocks, so one of them. First come, first served would be two, and one of the others.
    rule, memory = Fair(FairConfig(), LinkRates(0.01)), Cached(100)
    works = []
    for cached, new in [(41, 4)] * 3 + [(0, 5)] * 9:
        work = Request(cached + new)
        work.cached = cached
        works.append(work)
        rule.add(work, 0.0)
    plan = rule.plan(Room(memory, 10, 20, 0), 0.0)
    assert [works.index(work) for work, _ in plan.admitted] == [0, 3, 4]
    # With the budget spent on others, the next iterations have the same cap.
    plan = rule.plan(Room(memory, 10, 20, 3), 0.1)
    assert [works.index(work) for work, _ in plan.admitted] == [5, 6]
    assert plan.passed[CAP] == 2


def test_request_starving_by_time_alone_gets_a_reservation():
    """No event, and nothing came free, since the answer was remembered."""
    rule, memory = Fair(FairConfig(due_after_s=30.0)), Blocks(100)
    rule.add(Request(60), 0.0)
    assert len(rule.plan(Room(memory, 100, 8, 0), 0.0).admitted) == 1
    large = Request(50)
    rule.add(large, 0.0)
    for now_s in (0.1, 0.2, 29.9):
        plan = rule.plan(Room(memory, 100, 8, 1), now_s)
        assert plan.passed == {VRAM: 1} and plan.reserved is None
    assert rule.plan(Room(memory, 100, 8, 1), 30.0).reserved is large
