"""Bounds of steps in tokens, step by step over a memory that only counts blocks."""

import pytest

from kappa_benchmarks.baselines.scheduling.step_bounds import LongPrefill
from kappa_scheduler.batching import Batcher
from kappa_scheduler.catalogue import rule_named
from kappa_scheduler.work import StepState, Work
from tests.scheduler.counted_blocks import Blocks


def batcher(rule, *prompts, budget=8192):
    core = Batcher(Blocks(100_000), rule_named(rule), budget_tokens=budget)
    for tokens in prompts:
        core.add(Work(tokens, 0.0), 0.0)
    return core


def shares(core, decoding):
    return [tokens for _, tokens, _ in core.step(0.0, decoding).chunks]


@pytest.mark.parametrize("rule, tokens", [("budget_512", 512), ("budget_2048", 2048)])
def test_a_fixed_budget_holds_prompts_and_answers(rule, tokens):
    core = batcher(rule, 2 * tokens, 100)
    assert shares(core, 0) == [tokens]
    assert shares(core, 12) == [tokens - 12]
    # Twelve are left; the rest of the budget goes to the next in line.
    assert shares(core, 0) == [12, 100]


def test_a_fixed_budget_is_no_more_than_the_nodes_own():
    assert shares(batcher("budget_2048", 3000, budget=1000), 0) == [1000]


def test_p_pas_takes_2048_tokens_of_prompts_under_pressure():
    # Two prompts and three that decode: 2,048 of the first prompt, beside the three.
    core = batcher("p_pas", 5000, 3000)
    assert shares(core, 3) == [2048]
    # One of the two is under way, the other waits: 2,048, and then the 904 left and 1,144.
    assert shares(core, 3) == [2048]
    assert shares(core, 3) == [904, 1144]
    # One prompt is no pressure.
    assert shares(core, 4) == [1856]


def test_p_pas_takes_the_whole_budget_where_nothing_decodes():
    assert shares(batcher("p_pas", 5000, 3000, 3000), 0) == [5000, 3000, 192]
    assert shares(batcher("p_pas", 9000), 7) == [8185]


def test_p_pas_counts_requests_that_load():
    core = batcher("p_pas", 5000, 3000)
    first = next(iter(core.rule._waiting))
    core.memory.cached[first] = (0, 1000)
    assert shares(core, 1) == [2048]
    assert list(core.loading) == [first]
    # 952 are left of the second; the first still loads, and is counted.
    core.add(Work(4000, 0.0), 0.0)
    assert shares(core, 1) == [952, 1096]


def test_long_prefill_leaves_each_request_a_share_of_the_budget():
    # Two prompts and two that decode: a quarter of 8,192 each at the most.
    core = batcher("long_prefill", 5000, 100)
    assert shares(core, 2) == [2048, 100]
    # Fourteen more decode: 8,192 / 17 = 481, and the threshold is 512.
    assert shares(core, 16) == [512]


def test_long_prefill_lets_a_lone_request_take_all():
    assert shares(batcher("long_prefill", 9000), 0) == [8192]
    assert shares(batcher("long_prefill", 9000), 1) == [4096]


def test_long_prefill_admits_by_what_a_step_computes():
    # Forty prompts: 512 tokens of each until the budget is spent, sixteen of them.
    assert shares(batcher("long_prefill", *[600] * 40), 0) == [512] * 16


def test_long_prefill_threshold_yields_to_a_small_budget():
    assert LongPrefill().bound(StepState(256, 3, 1)).prompt_tokens == 512
    assert shares(batcher("long_prefill", 900, budget=256), 3) == [253]
