"""Rates of a model on a node, from the cost model; lines and grids that they consist of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from numpy.random import default_rng

from kappa.cost import StepModel, compute_s
from kappa.hardware import NodeProfile
from kappa.model import activation_bytes_per_token, kv_bytes, projection_flops
from kappa.plans.rates import (
    LEAST_R2,
    ComputeGrid,
    LineFit,
    PlanRates,
    rates_from_law,
)
from kappa.shapes import SHAPES, model_shape
from tests.kappa.plans.profiles import opt_rates, random_rates

NODE = NodeProfile(
    name="h200", gpu="H200", link_name="PCIe 5", h2d_bytes_per_s=50e9, flops_per_s=600e12,
    hbm_bytes_per_s=4.8e12, load_fixed_s=1e-4, step_fixed_s=2e-4,
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "ratio"),
    [("opt-6.7b", 0.5), ("opt-13b", 0.5), ("llama-3.1-8b", 2), ("qwen2.5-14b", 2.5),
     ("qwen2.5-7b", 3.5), ("llama-3.1-70b", 4), ("llama-3.1-405b", 8), ("qwen3-30b-a3b", 2),
     ("qwen3-235b-a22b", 4), ("deepseek-v3", 12.4)],
)  # fmt: skip
def test_activations_over_kv_by_model(model: str, ratio: float) -> None:
    assert rates_from_law(SHAPES[model], NODE).activation_ratio == pytest.approx(ratio, rel=0.01)


def test_eight_bit_kv_doubles_the_ratio() -> None:
    plain = rates_from_law(SHAPES["opt-6.7b"], NODE).activation_ratio
    eight = rates_from_law(model_shape("opt-6.7b", kv_dtype="fp8"), NODE).activation_ratio
    assert eight == 2 * plain


@pytest.mark.parametrize("model", ["llama-3.1-8b", "opt-13b", "qwen3-30b-a3b"])
def test_the_law_gives_the_router_its_own_seconds(model: str) -> None:
    shape = SHAPES[model]
    rates = rates_from_law(shape, NODE)
    for new, context in ((1, 0), (7, 100), (64, 8_192), (4_096, 32_768)):
        expected = compute_s(shape, NODE, new, context)
        assert rates.prefill_s(new, context) == pytest.approx(expected)
    assert rates.weights_load_s == 2 * shape.params_total / 50e9
    assert rates.prefill_s(0, 100) == rates.prefill_s(1, 100)


def test_the_law_loads_at_the_nodes_bandwidth() -> None:
    shape = SHAPES["llama-3.1-8b"]
    rates = rates_from_law(shape, NODE)
    assert rates.load.seconds(1_000) == pytest.approx(1e-4 + kv_bytes(shape, 1_000) / 50e9)
    assert rates.h2d_bytes_per_s == pytest.approx(50e9)
    assert rates.serial_share == 1 / 32


def test_projection_is_kvprs_four_h_squared_for_one_kv_head_per_query_head() -> None:
    shape = SHAPES["opt-6.7b"]
    assert projection_flops(shape) == 32 * 4 * 4096**2
    # Projecting costs a sixth of computing a token from its id, more or less.
    assert 5.5 < 2 * shape.params_active / projection_flops(shape) < 6.5
    latent = SHAPES["deepseek-v3"]
    assert projection_flops(latent) == 61 * 2 * 7168 * (512 + 64)


def test_every_rank_needs_all_activations_and_replicated_heads_are_projected_twice() -> None:
    shape = SHAPES["qwen3-235b-a22b"]  # four KV heads
    one, eight = rates_from_law(shape, NODE), rates_from_law(shape, NODE, tp=8)
    assert eight.kv_bytes == 2 * one.kv_bytes
    assert eight.activation_bytes == 8 * one.activation_bytes
    assert eight.project_token_s == 2 * one.project_token_s


def test_activation_dtype_follows_the_kv_unless_that_is_smaller() -> None:
    shape = SHAPES["opt-6.7b"]
    assert activation_bytes_per_token(shape) == 32 * 4096 * 2
    assert activation_bytes_per_token(replace(shape, kv_dtype_bytes=4.0)) == 32 * 4096 * 4


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 0},
        {"overlap": 1.5},
        {"h2d_cpu_busy": 0.0},
        {"weights_load_s": -1.0},
        {"experts_s": 1.0},
    ],
)
def test_rates_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    rates = rates_from_law(SHAPES["opt-6.7b"], NODE)
    with pytest.raises(ValueError, match=f"PlanRates.{next(iter(changes))}"):
        replace(rates, **changes)


def test_a_busy_processor_takes_no_more_of_the_link_by_attending() -> None:
    rates = replace(
        random_rates(default_rng(3)), h2d_cpu_busy=0.5, h2d_attending=0.4,
        attend=LineFit("CPU attention", 1e-6), attend_loading=0.8,
    )  # fmt: skip
    busy = rates.while_cpu_busy()
    assert busy.load_token_s == pytest.approx(2 * rates.load_token_s)
    both = busy.attending()
    assert both.load_token_s == pytest.approx(rates.attending().load_token_s)
    assert both.attend is not None
    assert both.attend.per_token_s == pytest.approx(1e-6 / 0.8)
    assert both.attending() == both


def test_what_was_not_measured_slows_nothing_down() -> None:
    step = StepModel(token_s=1e-3, pair_s=0.0, weights_s=0.0, context_token_s=0.0, fixed_s=0.0)
    rates = PlanRates(
        "bare", 4, 100.0, 50.0, LineFit("load", 1e-6), LineFit("KV projection", 1e-6), step
    )
    assert rates.while_cpu_busy() == rates.attending() == rates
    assert (rates.attend_bytes_per_s, rates.weights_load_s, rates.experts_s) == (0.0, 0.0, 0.0)
    # 100 bytes in 1 us; half of them are activations; one layer of four is not hidden.
    assert rates.h2d_bytes_per_s == pytest.approx(1e8)
    assert (rates.activation_ratio, rates.serial_share) == (0.5, 0.25)
    assert replace(rates, overlap=0.9).serial_share == pytest.approx(0.1)
    # No step computes less than one token: 1 ms; 10 take 10 ms.
    assert rates.prefill_s(0, 500) == 1e-3 and rates.prefill_s(10, 500) == pytest.approx(1e-2)


def test_a_step_lasts_the_longer_of_computing_and_reading_and_the_fixed_cost() -> None:
    step = StepModel(token_s=2.0, pair_s=0.5, weights_s=30.0, context_token_s=0.25, fixed_s=7.0)
    rates = replace(random_rates(default_rng(1)), step=step, experts_s=0.0, grid=None)
    # 4 new behind 8: pairs 4·(8 + 2) = 40, so 4·2 + 40·0.5 = 28; reads 30 + 12·0.25 = 33.
    assert rates.modelled_prefill_s(4, 8) == 33.0 + 7.0
    # 8 new: pairs 8·(8 + 4) = 96: 16 + 48 = 64; reads 34.
    assert rates.modelled_prefill_s(8, 8) == 64.0 + 7.0
    # Of the weights 16 s are experts, each left alone by a token with probability 1/2: 16/4 by two,
    # who compute for 2·2 + 2·(8 + 1)·0.5 = 13 s meanwhile.
    idle = replace(rates, experts_s=16.0, expert_idle=0.5)
    assert idle.modelled_prefill_s(2, 8) == 30.0 - 4.0 + 10 * 0.25 + 7.0


@pytest.mark.parametrize("share", ["h2d_cpu_busy", "h2d_attending", "attend_loading"])
def test_a_share_of_the_link_may_be_all_of_it_and_no_more(share: str) -> None:
    rates = random_rates(default_rng(1))
    assert getattr(replace(rates, **{share: 1.0}), share) == 1.0
    with pytest.raises(ValueError, match=share):
        replace(rates, **{share: 1.01})


def test_nothing_costs_nothing_though_something_has_a_fixed_cost() -> None:
    fit = LineFit("load", 2.0, 5.0)
    assert [fit.seconds(n) for n in (0, 1, 10)] == [0.0, 7.0, 25.0]
    assert fit.scaled(3.0).seconds(10) == 65.0


@pytest.mark.parametrize(("slope", "fixed", "r2"), [(0, 0, 1), (1, -1, 1), (1, 0, 2)])
def test_lines_that_cannot_be_are_refused(slope: float, fixed: float, r2: float) -> None:
    with pytest.raises(ValueError, match="the load fit"):
        LineFit("load", slope, fixed, r2)


def test_a_grid_is_exact_at_its_points_linear_between_and_flat_beyond() -> None:
    grid = ComputeGrid((1.0, 3.0), (0.0, 10.0), ((1.0, 2.0), (3.0, 8.0)))
    assert grid.seconds_at(1, 0) == 1.0
    assert grid.seconds_at(3, 10) == 8.0
    assert grid.seconds_at(2, 0) == 2.0
    assert grid.seconds_at(2, 5) == 3.5
    assert grid.seconds_at(9, 99) == 8.0
    assert grid.seconds_at(0, 0) == 1.0


@pytest.mark.parametrize(
    ("new", "context", "seconds", "problem"),
    [
        ((1.0,), (0.0, 1.0), ((1.0, 1.0),), "new_tokens"),
        ((1.0, 2.0), (1.0, 1.0), ((1.0, 1.0), (1.0, 1.0)), "context_tokens"),
        ((1.0, 2.0), (0.0, 1.0), ((1.0, 1.0),), "give 2 rows of 2"),
        ((1.0, 2.0), (0.0, 1.0), ((1.0, 1.0), (1.0, 0.0)), "above zero"),
    ],
)
def test_grids_that_cannot_be_are_refused(
    new: tuple[float, ...],
    context: tuple[float, ...],
    seconds: tuple[tuple[float, ...], ...],
    problem: str,
) -> None:
    with pytest.raises(ValueError, match=problem):
        ComputeGrid(new, context, seconds)


def test_a_fit_is_planned_with_from_the_least_quality_on() -> None:
    assert LineFit("load", 1.0, r2=LEAST_R2).require() is None
    with pytest.raises(ValueError, match="measure again"):
        LineFit("load", 1.0, r2=LEAST_R2 - 1e-6).require()


def test_a_line_scales_with_its_tokens_and_keeps_its_fixed_cost() -> None:
    line = LineFit("load", 2.0, 5.0, 0.995)
    assert line.seconds(3) == 3 * 2.0 + 5.0
    assert line.scaled(4.0) == LineFit("load", 8.0, 5.0, 0.995)
    # Unless more is known, a line is exact and starts at zero.
    assert LineFit("load", 2.0) == LineFit("load", 2.0, 0.0, 1.0)


def test_decoding_loads_what_is_asked() -> None:
    rates = opt_rates()
    link_s, gpu_s = rates.decode_s(4, 1_000, 400)
    assert link_s == pytest.approx(4 * (600 * 524_288 + 400 * 262_144) / 50e9)
    assert gpu_s > rates.decode_s(4, 1_000)[1]
    assert rates.decode_s(4, 1_000)[1] == pytest.approx(rates.step.step_s([(1, 1_000)] * 4))


@pytest.mark.parametrize(("batch", "activations"), [(0, 0), (1, 11), (1, -1)])
def test_decoding_steps_that_cannot_be_are_refused(batch: int, activations: int) -> None:
    with pytest.raises(ValueError, match="one sequence or more"):
        opt_rates().decode_s(batch, 10, activations)


def test_measured_decoding_steps_overrule_the_law_inside_their_grid_and_correct_it_beyond() -> None:
    rates = opt_rates()
    sequences, resident = (1.0, 8.0), (0.0, 4_000.0)
    law = [[rates.decode_gpu_s(b, r / b) for r in resident] for b in sequences]
    grid = ComputeGrid(sequences, resident, tuple(tuple(1.3 * s for s in row) for row in law))
    measured = replace(rates, decode=grid)
    for b, row in zip((1, 8), law, strict=True):
        for r, seconds in zip(resident, row, strict=True):
            assert measured.decode_gpu_s(b, r / b) == pytest.approx(1.3 * seconds)
    assert measured.decode_s(8, 500)[1] == pytest.approx(1.3 * law[1][1])
    # Beyond: the law, and what the nearest point lasts longer.
    beyond = rates.decode_gpu_s(32, 1_000)
    assert measured.decode_gpu_s(32, 1_000) == pytest.approx(beyond + 0.3 * law[1][1])
