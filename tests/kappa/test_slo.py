"""The service objective: idle figures, the median node, the limits."""

import numpy as np
import pytest

from kappa.cost import StepModel
from kappa.slo import IdleSpeed, idle_tpot_s, idle_ttft_s, limits, median_node

STEP = StepModel(token_s=1e-4, pair_s=1e-8, weights_s=5e-3, context_token_s=1e-7, fixed_s=1e-3)
SPEED = IdleSpeed(STEP, load_token_s=1e-5, load_fixed_s=1e-3, budget_tokens=100)


def test_idle_ttft_is_the_load_plus_steps_of_the_budget():
    got = idle_ttft_s(SPEED, [0, 1000], [250, 10])
    cold_s = sum(STEP.step_s([c]) for c in [(100, 0), (100, 100), (50, 200)])
    assert got == pytest.approx([cold_s, 1e-3 + 1e-2 + STEP.step_s([(10, 1000)])])


def test_a_full_hit_still_computes_a_token():
    assert idle_ttft_s(SPEED, [0], [0]) == pytest.approx([STEP.step_s([(1, 0)])])


def test_idle_time_per_token_is_a_lone_step_at_the_mean_context():
    assert idle_tpot_s(SPEED, [1000], [50]) == pytest.approx([STEP.step_s([(1, 1025)])], rel=1e-4)


def test_dilation_makes_everything_longer():
    slow = IdleSpeed(STEP.scaled(3.0), 1e-5, 1e-3, 100)
    assert idle_ttft_s(slow, [1000], [10]) == pytest.approx(3 * idle_ttft_s(SPEED, [1000], [10]))


def test_median_node_is_an_existing_one_per_request():
    by_node = [np.array([1.0, 9.0]), np.array([2.0, 8.0]), np.array([3.0, 7.0])]
    assert median_node(by_node).tolist() == [2.0, 8.0]
    assert median_node(by_node, [1, 1, 4]).tolist() == [3.0, 7.0]
    assert median_node(by_node[:2]).tolist() == [1.0, 8.0]


def test_limits_are_a_floor_or_a_multiple_of_idle():
    objective = limits(np.array([0.01, 1.0]), np.array([0.01, 0.02]), dilation=2.0)
    assert objective.ttft_s.tolist() == [1.0, 5.0]
    assert objective.tpot_s == pytest.approx([0.03, 0.06])


def test_met_needs_both_limits_and_fails_for_a_rejected_request():
    objective = limits(np.full(5, 0.01), np.full(5, 0.01))
    ttft = [0.4, 0.6, 0.4, 0.4, np.nan]
    tpot = [0.02, 0.02, 0.05, np.nan, np.nan]
    assert objective.met(ttft, tpot).tolist() == [True, False, False, True, False]
