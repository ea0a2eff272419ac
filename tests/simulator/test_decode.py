"""Runs of decode steps in closed form against the sum over single steps."""

import random
from dataclasses import replace

import pytest

from kappa.cost import StepModel
from kappa.silicon import silicon_table
from kappa_simulator.decode import DecodeRun, TableRun


def random_step(rng):
    return StepModel(
        token_s=rng.choice([0.0, 10 ** rng.uniform(-6, -3)]),
        pair_s=rng.choice([0.0, 10 ** rng.uniform(-10, -6)]),
        weights_s=10 ** rng.uniform(-4, -1),
        context_token_s=rng.choice([0.0, 10 ** rng.uniform(-9, -6)]),
        fixed_s=10 ** rng.uniform(-4, -2),
        experts_s=rng.choice([0.0, 10 ** rng.uniform(-3, -1)]),
        expert_idle=0.9,
        exposed=rng.choice([0.0, rng.random()]),
        comm_token_s=rng.choice([0.0, 1e-5]),
    )


def one_by_one(step, requests, context, count):
    total_s = []
    now_s = 0.0
    for _ in range(count):
        # Requests of one length each: only the sums enter.
        now_s += step.step_s([(1, 0)] * (requests - 1) + [(1, context)])
        total_s.append(now_s)
        context += requests
    return total_s


def test_a_run_in_closed_form_lasts_as_long_as_its_steps():
    rng = random.Random(1)
    for _ in range(300):
        step, requests = random_step(rng), rng.randint(1, 40)
        context, count = rng.randint(1, 200_000), rng.randint(1, 60)
        run = DecodeRun(step, requests, context)
        ends_s = one_by_one(step, requests, context, count)
        for steps, end_s in enumerate(ends_s, 1):
            assert run.seconds(steps) == pytest.approx(end_s, rel=1e-9)
        for steps, end_s in enumerate(ends_s, 1):
            assert run.steps(end_s * (1 + 1e-7)) == steps
            assert run.steps(end_s * (1 - 1e-7)) == steps - 1


def test_the_longer_of_two_lines_may_change_once_on_the_way():
    # Attention's 1 us a pair overtakes its reads' 0.5 us a token, of which there is one more.
    step = StepModel(token_s=1e-3, pair_s=1e-6, weights_s=2e-3, context_token_s=0.9995e-6)
    run = DecodeRun(step, 1, 0)
    slow = [step.step_s([(1, context)]) for context in range(3000)]
    assert slow[0] == pytest.approx(2e-3, rel=1e-3) and slow[-1] > 3e-3
    assert run.seconds(3000) == pytest.approx(sum(slow))
    assert run.steps(sum(slow[:1500]) + 1e-6) == 1500


def test_no_time_has_no_steps():
    assert DecodeRun(StepModel(1e-3, 0, 1e-3, 0), 1, 1).steps(0.0) == 0


TABLE = silicon_table("h100_sxm/llama-3.1-8b/tp1")


@pytest.mark.parametrize(("requests", "context"), [(1, 50), (7, 3_000), (32, 60_000), (3, 390_000)])
def test_a_run_by_a_table_lasts_as_long_as_its_steps(requests, context):
    table = replace(TABLE, fixed_s=2e-3)
    run = TableRun(table, requests, context)
    ends_s, now_s = [], 0.0
    for step in range(400):
        now_s += table.step_s([], requests, context + step * requests)
        ends_s.append(now_s)
    for steps in (1, 2, 77, 78, 79, 200, 399, 400):
        assert run.seconds(steps) == pytest.approx(ends_s[steps - 1], rel=1e-9)
        assert run.steps(ends_s[steps - 1] * (1 + 1e-9)) == steps
        assert run.steps(ends_s[steps - 1] * (1 - 1e-7)) == steps - 1
    assert run.steps(0.0) == 0
