"""Prices of given plans, of decoding steps, and of what is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from numpy.random import default_rng

from kappa.hardware import NodeProfile
from kappa.plans.load_plan import from_runs, layout
from kappa.plans.rates import ComputeGrid, PlanRates, decode_gpu_s, decode_s, rates_from_law, tbt_s
from kappa.plans.split import Costs, Split, plan_of, predict
from kappa.shapes import SHAPES
from tests.kappa.plans.layer_simulator import even, simulate
from tests.kappa.plans.profiles import random_cases, random_rates

NODE = NodeProfile(
    name="h200", gpu="H200", link_name="PCIe 5", h2d_bytes_per_s=50e9, flops_per_s=600e12,
    hbm_bytes_per_s=4.8e12,
)  # fmt: skip


def opt() -> PlanRates:
    return rates_from_law(SHAPES["opt-6.7b"], NODE)


def test_a_planners_plan_and_the_same_one_given_cost_the_same() -> None:
    rng = default_rng(61)
    for case in random_cases(200, seed=61):
        front = int(rng.integers(0, case.cached + 1))
        taken = int(rng.integers(0, case.cached - front + 1))
        for split in (Split(front, taken), Split(front, taken, tail=front < case.cached)):
            planned = plan_of(case.costs, split)
            given = predict(case.costs, planned.segments)
            assert replace(given, why="") == planned


def test_bytes_are_those_that_cross_the_link() -> None:
    costs = Costs(opt(), 100, 10)
    plan = plan_of(costs, Split(20, 30))
    assert plan.load_bytes == 50 * 524_288 + 30 * 262_144
    assert plan.load_s == pytest.approx(plan.load_bytes / 50e9)
    everything = plan_of(costs, Split(100))
    assert (everything.load_bytes, everything.load_s) == (0, 0)
    assert everything.ttft_s == everything.compute_s


def test_typed_blocks_in_any_order_cost_the_same() -> None:
    costs = Costs(opt(), 96, 10)
    mixed = predict(costs, from_runs([("A", 16), ("K", 32), ("A", 16), ("K", 32)]))
    sorted_ = predict(costs, from_runs([("A", 32), ("K", 64)]))
    assert (mixed.ttft_s, mixed.load_bytes) == (sorted_.ttft_s, sorted_.load_bytes)


def test_segments_that_cannot_be_priced_are_refused() -> None:
    costs = Costs(opt(), 96, 10)
    with pytest.raises(ValueError, match="cover 64 tokens of 96"):
        predict(costs, layout(64))
    with pytest.raises(ValueError, match=r"segment S \[0, 96\)"):
        predict(costs, from_runs([("S", 96)]))


def test_decoding_steps_are_a_pipeline_of_layers() -> None:
    rng = default_rng(62)
    for seed in range(100):
        rates = replace(random_rates(default_rng(seed)), overlap=None, weights_load_s=0.1)
        batch, context = int(rng.integers(1, 32)), int(rng.integers(1, 500))
        taken = int(rng.integers(0, context + 1))
        for streamed in (False, True):
            link_s, gpu_s = decode_s(rates, batch, context, taken, streamed=streamed)
            alone = tbt_s(rates, batch, context, taken, streamed=streamed)
            assert alone == pytest.approx(simulate(even(link_s, gpu_s, rates.layers)))
            # Step upon step, loads run ahead, and only the first pays for the fill.
            ahead = tbt_s(rates, batch, context, taken, streamed=streamed, ahead=True)
            many = simulate(even(20 * link_s, 20 * gpu_s, 20 * rates.layers))
            assert 20 * ahead <= many <= 19 * ahead + alone + 1e-9


def test_decoding_loads_what_is_asked() -> None:
    link_s, gpu_s = decode_s(opt(), 4, 1_000, 400)
    assert link_s == pytest.approx(4 * (600 * 524_288 + 400 * 262_144) / 50e9)
    assert gpu_s > decode_s(opt(), 4, 1_000)[1]
    assert decode_s(opt(), 4, 1_000)[1] == pytest.approx(opt().step.step_s([(1, 1_000)] * 4))
    streamed_s, _ = decode_s(opt(), 4, 1_000, 400, streamed=True)
    assert streamed_s - link_s == pytest.approx(2 * SHAPES["opt-6.7b"].params_total / 50e9)


@pytest.mark.parametrize(("batch", "activations"), [(0, 0), (1, 11), (1, -1)])
def test_decoding_steps_that_cannot_be_are_refused(batch: int, activations: int) -> None:
    with pytest.raises(ValueError, match="one sequence or more"):
        decode_s(opt(), batch, 10, activations)


def test_what_stays_in_host_memory_crosses_once_for_the_first_token() -> None:
    costs = Costs(opt(), 96, 10)
    stays, loaded = (predict(costs, from_runs([(kind, 96)])) for kind in ("C", "K"))
    assert replace(stays, segments=()) == replace(loaded, segments=())
    assert stays.kind == "cpu" and stays.crossing_tokens == 96 and stays.exact


def test_measured_decoding_steps_overrule_the_law_inside_their_grid_and_correct_it_beyond() -> None:
    rates = opt()
    sequences, resident = (1.0, 8.0), (0.0, 4_000.0)
    law = [[decode_gpu_s(rates, b, r / b) for r in resident] for b in sequences]
    grid = ComputeGrid(sequences, resident, tuple(tuple(1.3 * s for s in row) for row in law))
    measured = replace(rates, decode=grid)
    for b, row in zip((1, 8), law, strict=True):
        for r, seconds in zip(resident, row, strict=True):
            assert decode_gpu_s(measured, b, r / b) == pytest.approx(1.3 * seconds)
    assert decode_s(measured, 8, 500)[1] == pytest.approx(1.3 * law[1][1])
    assert tbt_s(measured, 8, 500) > tbt_s(rates, 8, 500)
    # Beyond: the law, and what the nearest point lasts longer.
    beyond = decode_gpu_s(rates, 32, 1_000)
    assert decode_gpu_s(measured, 32, 1_000) == pytest.approx(beyond + 0.3 * law[1][1])
