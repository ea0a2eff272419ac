"""Paced layers beside a load: together they last what a pipeline of two resources lasts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kappa.cost import StepModel
from kappa.plans.rates import LineFit, PlanRates
from kappa.plans.split import Costs
from workers.vllm.layer_clock import LayerClock


class Time:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now_s = 0.0

    def clock(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


def step_s(layers, load_s, compute_s):
    """One step whose layers arrive evenly over `load_s`."""
    time = Time()
    clock = LayerClock(layers, time.clock, time.sleep)
    clock.begin(compute_s)
    for layer in range(layers):
        clock.reach()
        time.now_s = max(time.now_s, load_s * (layer + 1) / layers)
        clock.enter()
    return time.now_s + (clock.owed_s() or 0.0)


@given(st.integers(1, 40), st.floats(0.0, 5.0), st.floats(0.0, 5.0))
def test_a_step_lasts_as_long_as_the_planner_says_of_a_pipeline(layers, load_s, compute_s):
    line = LineFit("load", 1e-6)
    rates = PlanRates("x", layers, 1.0, 1.0, line, line, StepModel(1e-6, 0.0, 0.0, 0.0))
    expected_s = load_s / layers + (layers - 1) / layers * max(load_s, compute_s)
    expected_s += compute_s / layers
    if load_s > 0:
        assert Costs(rates, 1, 1).ttft_s(load_s, compute_s) == pytest.approx(expected_s)
    assert step_s(layers, load_s, compute_s) == pytest.approx(expected_s)


def test_a_step_that_waited_for_no_layer_owes_nothing():
    time = Time()
    clock = LayerClock(4, time.clock, time.sleep)
    clock.begin(1.0)
    assert clock.owed_s() is None
    clock.enter()
    assert clock.owed_s() == pytest.approx(0.25)
    clock.begin(1.0)  # the next step
    assert clock.owed_s() is None
    clock.reach()
    assert time.now_s == 0.0
