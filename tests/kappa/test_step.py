"""A step's seconds: the sum over a batch, the floor of the reads, the fixed cost, the dilation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kappa.hardware import node_profile
from kappa.model import compute_s, decode_step_s
from kappa.shapes import model_shape
from kappa.step import StepModel, StepParts, step_model

STEP = StepModel(token_s=1.0, pair_s=0.1, weights_s=7.0, context_token_s=0.01, fixed_s=0.5)
WORK = st.lists(st.tuples(st.integers(1, 500), st.integers(0, 5000)), max_size=5)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        # Computing: 10 tokens, 10 * (20 + 5) pairs.
        ([(10, 20)], 10 + 25 + 0.5),
        # Reading: the weights once, and 1,001 tokens' KV.
        ([(1, 0)], 7 + 0.01 + 0.5),
        ([(10, 20), (1, 100)], 10 + 25 + 1 + 10.05 + 0.5),
        ([(1, 0), (1, 0), (1, 1)], 7 + 0.04 + 0.5),
    ],
)
def test_a_step_lasts_as_reckoned_by_hand(work, seconds):
    assert STEP.step_s(work) == pytest.approx(seconds)
    assert STEP.step_s(iter(work)) == pytest.approx(seconds)
    assert replace(STEP, dilation=30.0).step_s(work) == pytest.approx(seconds)
    assert replace(STEP, dilation=30.0).real_s(work) == pytest.approx(30 * seconds)


@given(WORK, WORK)
def test_more_work_never_takes_less(work, more):
    assert STEP.step_s(work + more) >= STEP.step_s(work)


@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 2000))
def test_a_prompt_in_chunks_computes_as_many_pairs_as_at_once(first, second, context):
    free = replace(STEP, weights_s=0.0, context_token_s=0.0, fixed_s=0.0)
    chunks = free.step_s([(first, context)]) + free.step_s([(second, context + first)])
    assert chunks == pytest.approx(free.step_s([(first + second, context)]))


def test_scaling_slows_all_of_it():
    paced = replace(STEP, dilation=2.0)
    assert paced.scaled(1.5).real_s([(9, 9)]) == pytest.approx(1.5 * paced.real_s([(9, 9)]))
    assert paced.scaled(1.0) is paced
    with pytest.raises(ValueError, match="dilation"):
        paced.scaled(0.0)


@pytest.mark.parametrize("node", ["h100-pcie5", "gh200-c2c"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen2.5-14b"])
def test_a_step_agrees_with_the_law(model, node):
    shape, profile = model_shape(model), node_profile(node)
    step = step_model(shape, profile)
    for new, context in ((1, 0), (1, 30_000), (500, 0), (500, 30_000), (8192, 8192)):
        expected = compute_s(shape, profile, new, context)
        assert step.step_s([(new, context)]) == pytest.approx(expected, rel=1e-3)
    batch = [(1, 1000 * i) for i in range(20)]
    expected = decode_step_s(shape, profile, 20, sum(context for _, context in batch))
    assert step.step_s(batch) == pytest.approx(expected, rel=1e-3)


def test_a_paced_node_dilates_its_steps():
    profile = replace(node_profile("h100-pcie5"), source="paced", dilation=30.0, step_fixed_s=0.01)
    step = step_model(model_shape("llama-3.1-8b"), profile)
    assert (step.dilation, step.fixed_s) == (30.0, 0.01)


@pytest.mark.parametrize("factor", [1 / 3, 1.0, 3.0])
@pytest.mark.parametrize(("computes_s", "reads_s"), [(0.3, 0.1), (0.12, 0.1), (0.1, 0.02)])
def test_a_step_tells_how_far_off_the_announced_flop_rate_is(factor, computes_s, reads_s):
    took_s = max(computes_s, reads_s) + 0.01
    parts = StepParts(computes_s / factor, reads_s, 0.01)
    computed_s = parts.computed_s(took_s)
    # Between reading and a quarter more it does not tell, unless computing was thought longer.
    if computes_s > 1.25 * reads_s or parts.compute_s >= reads_s:
        assert computed_s / parts.compute_s == pytest.approx(factor)
    else:
        assert computed_s == 0.0


def test_a_step_that_only_read_tells_at_most_how_long_it_computed():
    assert StepParts(0.05, 0.1, 0.01).computed_s(0.11) == 0.0
    assert StepParts(0.3, 0.1, 0.01).computed_s(0.11) == pytest.approx(0.1)


@pytest.mark.parametrize("model", ["deepseek-v3", "qwen3-30b-a3b"])
def test_a_mixture_reads_what_one_token_touches(model):
    shape, profile = model_shape(model), node_profile("h200-pcie5")
    whole_s = shape.params_total * shape.weight_dtype_bytes / profile.hbm_bytes_per_s
    assert 0 < step_model(shape, profile).weights_s < whole_s / 2


def test_a_step_survives_the_wire():
    assert StepModel.from_dict(STEP.to_dict()) == STEP


@pytest.mark.parametrize("field", ["token_s", "pair_s", "weights_s", "context_token_s", "fixed_s"])
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
def test_seconds_that_are_none_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"StepModel\.{field} is .*zero or more"):
        replace(STEP, **{field: value})


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_dilation_must_be_above_zero(value):
    with pytest.raises(ValueError, match=r"dilation is .*above zero"):
        replace(STEP, dilation=value)


@pytest.mark.parametrize("data", [{**STEP.to_dict(), "gemm_s": 1.0}, {"token_s": 1.0}])
def test_a_wrong_constant_is_told_the_right_ones(data):
    with pytest.raises(ValueError, match=r"StepModel: .*(gemm_s|pair_s).*token_s.*dilation"):
        StepModel.from_dict(data)
