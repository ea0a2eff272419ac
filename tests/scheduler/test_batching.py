"""The batcher alone, over a memory that only counts blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kappa.cost import StepLimit, StepModel
from kappa_scheduler.batching import Batcher
from kappa_scheduler.catalogue import SCHEDULERS, rule_named
from kappa_scheduler.work import Work
from tests.scheduler.counted_blocks import Blocks


def batcher(blocks=10_000, rule="fcfs", **options):
    memory = Blocks(blocks)
    return Batcher(memory, rule_named(rule), **options), memory


def shares(step):
    return [(tokens, context) for _, tokens, context in step.chunks]


def add(core, *works):
    for work in works:
        core.add(work, work.arrival_s)


def test_a_prompt_is_cut_to_the_budget_less_what_decodes():
    core, _ = batcher(budget_tokens=100)
    add(core, Work(150, 0.0))
    assert shares(core.step(0.0, decoding=10)) == [(90, 0)]
    step = core.step(0.1, decoding=10)
    assert shares(step) == [(60, 90)] and len(step.prefilled) == 1


def test_what_is_left_of_the_budget_goes_to_the_next_in_line():
    core, _ = batcher(budget_tokens=100)
    first, second = Work(60, 0.0), Work(70, 0.0)
    add(core, first, second)
    step = core.step(0.0, 0)
    assert shares(step) == [(60, 0), (40, 0)] and step.prefilled == [first]
    assert core.step(0.1, 1).prefilled == [second]


def test_batcher_splits_a_long_prompt_only_while_others_decode():
    # A token 1 ms, one request alone 20 ms and 5: 62.5 ms, of which 57.5 less those that decode.
    limit = StepLimit(StepModel(1e-3, 0.0, 20e-3, 0.0, 5e-3), 2.5)
    core, _ = batcher(budget_tokens=8192, limit=limit)
    long = Work(3000, 0.0)
    add(core, long)
    assert shares(core.step(0.0, decoding=10, context_tokens=100)) == [(118, 0)]
    # It is 2.9 s long, so late after 7.2; then as much more fits as it waited longer.
    assert shares(core.step(0.1, decoding=10, context_tokens=100)) == [(118, 118)]
    (late,) = shares(core.step(30.0, decoding=10, context_tokens=100))
    assert late == (246, 236)
    assert shares(core.step(30.1, decoding=0)) == [(3000 - 482, 482)]


def test_first_come_stops_at_the_first_that_does_not_fit():
    core, memory = batcher(blocks=100)
    big, small = Work(120, 0.0), Work(10, 0.0)
    add(core, big, small)
    assert not core.step(0.0, 0).chunks and core.queued == 2
    memory.free, memory.version = 200, 1
    assert core.step(5.0, 0).prefilled == [big, small]
    assert core.rule.max_wait_s == 5.0 and core.rule.max_skips == 0


def test_batcher_runs_a_request_after_its_load_and_then_first():
    core, memory = batcher(budget_tokens=50)
    loading, other = Work(40, 0.0), Work(200, 0.0)
    memory.cached[loading] = (0, 30)
    add(core, loading, other)
    step = core.step(0.0, 0)
    assert list(core.loading) == [loading] and shares(step) == [(50, 0)]
    core.landed(loading, 1.0)
    step = core.step(1.0, 0)
    # Running ones first: the prompt under way takes the whole budget.
    assert shares(step) == [(50, 50)]
    core.prefilling.clear()
    assert [w for w, _, _ in core.step(2.0, 0).chunks] == [loading]


def test_who_waits_for_anothers_load_blocks_nobody():
    core, memory = batcher()
    first, same, other = Work(40, 0.0), Work(41, 0.0), Work(10, 0.0)
    memory.cached[first] = (0, 30)
    memory.awaited.add(same)
    add(core, first, same, other)
    assert core.step(0.0, 0).prefilled == [other]
    assert len(core.rule) == 1 and core.queued == 0
    memory.awaited.clear()
    memory.cached[same] = (30, 0)
    core.landed(first, 1.0)
    assert core.step(1.0, 0).prefilled == [first, same]


def test_running_requests_are_limited():
    core, _ = batcher(max_running=2)
    works = [Work(10, 0.0) for _ in range(3)]
    add(core, *works)
    assert core.step(0.0, 0).prefilled == works[:2]
    core.finish(works[0], 1, 0.0)
    assert core.step(0.0, 1).prefilled == works[2:]


def test_loaded_request_waits_for_a_place_like_any_other():
    core, memory = batcher(max_running=1)
    loading, other = Work(40, 0.0), Work(10, 0.0)
    memory.cached[loading] = (0, 30)
    add(core, loading, other)
    assert core.step(0.0, 0).prefilled == [other]
    core.landed(loading, 1.0)
    assert core.step(1.0, 1).prefilled == []
    core.finish(other, 1, 1.5)
    assert core.step(2.0, 0).prefilled == [loading]


@pytest.mark.parametrize("rule", ["fcfs", "cap1", "vtc"])
def test_the_latest_is_preempted_and_is_first_in_line_again(rule):
    core, memory = batcher(rule=rule)
    works = [Work(10, 0.0) for _ in range(2)]
    add(core, *works)
    core.step(0.0, 0)
    late = Work(10, 0.5)
    add(core, late)
    assert core.preempt(1.0) is works[1]
    memory.release(works[1])
    assert not core.step(1.0, 1, admit=False).chunks
    assert core.step(1.1, 1).prefilled == [works[1], late]
    assert core.preemptions == 1


def test_preempt_takes_the_named_request_whatever_the_rule_says():
    core, memory = batcher(rule="fcfs")
    works = [Work(10, 0.0) for _ in range(2)]
    add(core, *works)
    core.step(0.0, 0)
    assert core.preempt(1.0, works[0]) is works[0]
    memory.release(works[0])
    assert list(core.running) == [works[1]]
    assert core.step(1.1, 1).prefilled == [works[0]] and core.preemptions == 1


def test_with_nobody_running_there_is_nobody_to_preempt():
    assert batcher()[0].preempt(0.0) is None


@pytest.mark.parametrize("rule", [name for name in SCHEDULERS if name != "fair"])
@pytest.mark.parametrize("place", ["waiting", "running", "loading", "ready"])
def test_an_aborted_request_is_forgotten_wherever_it_is(place, rule):
    core, memory = batcher(budget_tokens=8, rule=rule)
    work = Work(10, 0.0)
    if place in ("loading", "ready"):
        memory.cached[work] = (0, 5)
    add(core, work)
    if place != "waiting":
        core.step(0.0, 0)
    if place == "ready":
        core.landed(work, 0.0)
    core.abort(work, 0, 1.0)
    assert not core.step(1.0, 0).chunks
    assert not core.running and not core.loading and not len(core.rule)
    core.ran(1.0, 1, 2.0)


class Noting:
    """A rule that notes what it is informed of."""

    def __init__(self, rule):
        self._rule, self.ran_tokens, self.iterations = rule, [], []

    def __getattr__(self, name):
        return getattr(self._rule, name)

    def __len__(self):
        return len(self._rule)

    def ran(self, seconds, tokens, now_s, iterations=1):
        self.ran_tokens.append(dict(tokens))
        self.iterations.append(iterations)


def test_the_rule_is_informed_of_what_ran_by_tenant():
    rule = Noting(rule_named("fcfs"))
    core = Batcher(Blocks(1000), rule, budget_tokens=100)
    one, two = Work(60, 0.0, tenant="a"), Work(70, 0.0, tenant="b")
    add(core, one, two)
    core.step(0.0, 0)
    core.ran(0.1, 1, 0.1)
    core.step(0.1, 1)
    core.ran(0.1, 1, 0.2)
    core.step(0.2, 2)
    core.ran(0.5, 5, 0.7)
    core.finish(one, 7, 0.7)
    core.step(0.7, 1)
    core.ran(0.3, 3, 1.0)
    assert rule.ran_tokens == [{"a": 60, "b": 40}, {"a": 1, "b": 30}, {"a": 5, "b": 5}, {"b": 3}]
    assert rule.iterations == [1, 1, 5, 3]


def test_budget_fill_counts_steps_with_work_at_hand_only():
    core, memory = batcher(blocks=100, budget_tokens=100)
    core.step(0.0, 10)
    core.repeat(5, 20)
    assert core.budget_fill == (0.0, 0)
    add(core, Work(40, 0.0), Work(90, 0.0))
    core.step(0.0, 10)
    core.repeat(2, 10)
    fill, steps = core.budget_fill
    assert (fill, steps) == (pytest.approx(0.5 + 2 * 0.1), 3)
    assert core.queued == 1 and memory.free == 60


@settings(max_examples=300, deadline=None)
@given(
    rule=st.sampled_from(SCHEDULERS),
    prompts=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 3)), min_size=1, max_size=20),
    budget=st.integers(1, 64),
    blocks=st.integers(90, 200),
)
def test_every_request_is_computed_once_within_budget_and_memory(rule, prompts, budget, blocks):
    core, memory = batcher(blocks=blocks, rule=rule, budget_tokens=budget)
    works = [Work(tokens, 0.0, tenant=f"t{n % 2}", priority=n) for tokens, n in prompts]
    for work, (tokens, host) in zip(works, prompts, strict=True):
        if 0 < host < tokens:
            memory.cached[work] = (0, host)
    add(core, *works)
    computed = dict.fromkeys(works, 0)
    order = []
    for turn in range(10_000):
        step = core.step(float(turn), 0)
        assert sum(tokens for _, tokens, _ in step.chunks) <= budget
        assert memory.free >= 0
        for work in [w for w, quote in step.admitted if quote.host_tokens]:
            computed[work] = memory.cached[work][1]
            core.landed(work, float(turn))
        for work, tokens, context in step.chunks:
            assert context == computed[work]
            computed[work] += tokens
        core.ran(1.0, 1, float(turn) + 1)
        for work in step.prefilled:
            order.append(work)
            core.finish(work, 1, float(turn) + 1)
            memory.release(work)
        if len(order) == len(works):
            break
    assert computed == {work: work.total_tokens for work in works}
    if rule == "fcfs" and not memory.cached:
        assert order == works and core.rule.max_skips == 0


def test_an_engine_of_which_nothing_is_said_batches_as_vllm_does():
    core, _ = batcher(blocks=20_000)
    add(core, Work(10_000, 0.0))
    assert shares(core.step(0.0, 0)) == [(8192, 0)]
    assert core.max_running == 256


def test_batcher_gives_prompts_only_what_decodes_leave():
    core, _ = batcher(budget_tokens=100)
    work = Work(150, 0.0)
    add(core, work)
    core.step(0.0, 0)
    assert shares(core.step(0.1, decoding=100)) == []
    assert shares(core.step(0.2, decoding=99)) == [(1, 100)]
    step = core.step(0.3, decoding=51)
    assert shares(step) == [(49, 101)] and step.prefilled == [work] and not core.prefilling
