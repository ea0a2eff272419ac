"""The scheduler alone, over a memory that only counts blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core import Quote, Scheduler, Work


class Blocks:
    """So many blocks of one token; hits as told per request."""

    def __init__(self, blocks=10_000):
        self.free = blocks
        self.version = 0
        self.cached: dict[Work, tuple[int, int]] = {}
        self.awaited: set[Work] = set()
        self.taken: dict[Work, int] = {}

    def quote(self, work):
        if work in self.awaited:
            return None
        device, host = self.cached.get(work, (0, 0))
        return Quote(work.total_tokens - device, device, host)

    def available(self):
        return self.free

    def take(self, work, quote):
        assert quote.blocks <= self.free
        self.free -= quote.blocks
        self.taken[work] = quote.blocks

    def release(self, work):
        self.free += self.taken.pop(work)
        self.version += 1


def scheduler(blocks=10_000, **options):
    memory = Blocks(blocks)
    return Scheduler(memory, **options), memory


def shares(step):
    return [(tokens, context) for _, tokens, context in step.chunks]


def test_a_prompt_is_cut_to_the_budget_less_what_decodes():
    core, _ = scheduler(budget_tokens=100)
    core.add(Work(150, 0.0))
    assert shares(core.step(0.0, decoding=10)) == [(90, 0)]
    step = core.step(0.1, decoding=10)
    assert shares(step) == [(60, 90)] and len(step.prefilled) == 1


def test_what_is_left_of_the_budget_goes_to_the_next_in_line():
    core, _ = scheduler(budget_tokens=100)
    first, second = Work(60, 0.0), Work(70, 0.0)
    core.add(first), core.add(second)
    step = core.step(0.0, 0)
    assert shares(step) == [(60, 0), (40, 0)] and step.prefilled == [first]
    assert core.step(0.1, 1).prefilled == [second]


def test_first_come_stops_at_the_first_that_does_not_fit():
    core, memory = scheduler(blocks=100)
    big, small = Work(120, 0.0), Work(10, 0.0)
    core.add(big), core.add(small)
    assert not core.step(0.0, 0).chunks
    memory.free, memory.version = 200, 1
    assert core.step(5.0, 0).prefilled == [big, small]
    assert core.max_wait_s == 5.0 and core.max_skips == 0


def test_packing_goes_past_it_and_counts_how_often():
    core, memory = scheduler(blocks=100, rule="pack")
    big, small = Work(120, 0.0), [Work(10, 0.0) for _ in range(3)]
    for work in (big, *small):
        core.add(work)
    assert core.step(0.0, 0).prefilled == small
    assert big.skips == core.max_skips == 3
    memory.free, memory.version = 200, 1
    assert core.step(1.0, 3).prefilled == [big]


def test_a_late_comer_is_looked_at_though_those_before_it_are_stuck():
    core, _ = scheduler(blocks=100, rule="pack")
    core.add(Work(120, 0.0))
    core.step(0.0, 0)
    late = Work(10, 1.0)
    assert core.add(late)
    assert core.step(1.0, 0).prefilled == [late]


def test_loads_come_before_their_request_runs_and_it_then_goes_first():
    core, memory = scheduler(budget_tokens=50)
    loading, other = Work(40, 0.0), Work(200, 0.0)
    memory.cached[loading] = (0, 30)
    core.add(loading), core.add(other)
    step = core.step(0.0, 0)
    assert step.loads == [loading] and shares(step) == [(50, 0)]
    core.loaded(loading)
    step = core.step(1.0, 0)
    # Running ones first: the prompt under way takes the whole budget.
    assert shares(step) == [(50, 50)]
    core.prefilling.clear()
    assert [w for w, _, _ in core.step(2.0, 0).chunks] == [loading]


def test_who_waits_for_anothers_load_blocks_nobody():
    core, memory = scheduler()
    first, same, other = Work(40, 0.0), Work(41, 0.0), Work(10, 0.0)
    memory.cached[first] = (0, 30)
    memory.awaited.add(same)
    for work in (first, same, other):
        core.add(work)
    assert core.step(0.0, 0).prefilled == [other]
    memory.awaited.clear()
    memory.cached[same] = (30, 0)
    core.loaded(first)
    assert core.step(1.0, 0).prefilled == [first, same]


def test_running_requests_are_limited():
    core, _ = scheduler(max_running=2)
    works = [Work(10, 0.0) for _ in range(3)]
    for work in works:
        core.add(work)
    assert core.step(0.0, 0).prefilled == works[:2]
    core.finish(works[0])
    assert core.step(0.0, 1).prefilled == works[2:]


def test_the_latest_is_preempted_and_is_first_in_line_again():
    core, memory = scheduler()
    works = [Work(10, 0.0) for _ in range(2)]
    for work in works:
        core.add(work)
    core.step(0.0, 0)
    late = Work(10, 0.5)
    core.add(late)
    assert core.preempt(1.0) is works[1]
    memory.release(works[1])
    assert not core.step(1.0, 1, admit=False).chunks
    assert core.step(1.1, 1).prefilled == [works[1], late]
    assert core.preemptions == 1


@pytest.mark.parametrize("place", ["waiting", "running", "loading", "ready"])
def test_an_aborted_request_is_forgotten_wherever_it_is(place):
    core, memory = scheduler(budget_tokens=8)
    work = Work(10, 0.0)
    if place in ("loading", "ready"):
        memory.cached[work] = (0, 5)
    core.add(work)
    if place != "waiting":
        core.step(0.0, 0)
    if place == "ready":
        core.loaded(work)
    core.abort(work)
    assert not core.step(1.0, 0).chunks
    assert not core.running and not core.loading


def test_an_unknown_rule_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="fcfs, pack"):
        scheduler(rule="lifo")


@settings(max_examples=200, deadline=None)
@given(
    rule=st.sampled_from(["fcfs", "pack"]),
    prompts=st.lists(st.integers(1, 90), min_size=1, max_size=20),
    budget=st.integers(1, 64),
    blocks=st.integers(90, 200),
)
def test_every_request_is_computed_once_within_budget_and_memory(rule, prompts, budget, blocks):
    core, memory = scheduler(blocks=blocks, rule=rule, budget_tokens=budget)
    works = [Work(tokens, 0.0) for tokens in prompts]
    for work in works:
        core.add(work)
    computed = dict.fromkeys(works, 0)
    order = []
    for turn in range(10_000):
        step = core.step(float(turn), 0)
        if not step.chunks:
            break
        assert sum(tokens for _, tokens, _ in step.chunks) <= budget
        for work, tokens, context in step.chunks:
            assert context == computed[work]
            computed[work] += tokens
        assert memory.free >= 0
        for work in step.prefilled:
            order.append(work)
            core.finish(work)
            memory.release(work)
    assert computed == {work: work.total_tokens for work in works}
    if rule == "fcfs":
        assert order == works and core.max_skips == 0
