"""Splits: costs against a simulated pipeline, the best of every split, and prices of plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.random import default_rng

from kappa.cost import StepModel
from kappa.plans.load_plan import from_runs, layout
from kappa.plans.rates import LineFit, PlanRates
from kappa.plans.split import (
    Costs,
    Split,
    activations_refused,
    best_activations,
    best_mixed,
    best_prefix,
    best_tail,
    plan_of,
    predict,
    real_roots,
)
from tests.kappa.plans.layer_simulator import simulate
from tests.kappa.plans.profiles import Case, opt_rates, random_cases, random_rates


def splits(case: Case, seed: int) -> list[Split]:
    rng = default_rng(seed)
    front = int(rng.integers(0, case.cached + 1))
    taken = int(rng.integers(0, case.cached - front + 1))
    return [Split(), Split(front), Split(front, tail=True), Split(front, taken), Split(0, taken)]


def test_closed_form_is_the_simulated_pipeline() -> None:
    compared = 0
    for seed, case in enumerate(random_cases(400, seed=11)):
        if case.rates.overlap is not None:
            continue  # then the pipeline is not one of layers
        costs = case.costs
        for split in splits(case, seed):
            load_s, compute_s = costs.load_s(split), costs.compute_s(split)
            simulated_s = simulate(load_s, compute_s, case.rates.layers)
            assert costs.of(split) == pytest.approx(simulated_s, rel=1e-9)
            compared += 1
    assert compared > 400


def test_overlap_runs_from_load_first_to_all_hidden() -> None:
    """Eq. 3 and 4 of paper 001: load + compute - overlap · min."""
    for overlap, expected in ((0.0, 5.0), (0.5, 4.0), (1.0, 3.0)):
        rates = simple_rates(overlap=overlap)
        costs = Costs(rates, 20, 3)
        assert (costs.load_s(Split()), costs.compute_s(Split())) == (2.0, 3.0)
        assert costs.of(Split()) == expected


def simple_rates(overlap: float | None = None) -> PlanRates:
    return PlanRates(
        name="simple", layers=4, kv_bytes=8.0, activation_bytes=4.0,
        load=LineFit("load", 0.1), project=LineFit("KV projection", 0.25),
        step=StepModel(token_s=1.0, pair_s=0.0, weights_s=0.0, context_token_s=0.0),
        overlap=overlap,
    )  # fmt: skip


def test_what_each_kind_costs() -> None:
    costs = Costs(simple_rates(), 20, 3)
    assert costs.load_s(Split(4)) == pytest.approx(1.6)
    assert costs.compute_s(Split(4)) == 7.0
    assert costs.load_s(Split(4, 10)) == pytest.approx(1.1)
    assert costs.compute_s(Split(4, 10)) == 9.5


def test_attention_counts_the_pairs_there_are() -> None:
    step = StepModel(token_s=0.0, pair_s=1.0, weights_s=0.0, context_token_s=0.0)
    rates = simple_rates()
    rates = PlanRates(rates.name, 4, 8.0, 4.0, rates.load, rates.project, step, overlap=1.0)
    costs = Costs(rates, cached_tokens=20, new_tokens=4, device_tokens=10)
    new = 4 * (30 + 2)
    assert costs.compute_s(Split()) == new
    assert costs.compute_s(Split(6)) == new + 6 * (10 + 3)  # six behind ten on the device
    assert costs.compute_s(Split(6, tail=True)) == 10 * (24 + 5)  # ten behind 24
    everything = 24 * (10 + 12)
    assert costs.compute_s(Split(20)) == costs.compute_s(Split(20, tail=True)) == everything


def test_a_plan_that_loads_nothing_waits_for_no_link() -> None:
    slow = replace(simple_rates(), load=LineFit("load", 0.1, 1_000.0))
    assert Costs(slow, 20, 3).of(Split(20)) == 23.0
    assert Costs(slow, 20, 3).of(Split(19)) > 1_000.0


_ROUNDING = 1 + 1e-12


def cuts(case: Case) -> list[int]:
    return [*range(0, case.cached, case.block), case.cached]


def block_s(case: Case) -> float:
    """What moving one block from its way to another can cost at most."""
    rates = case.rates
    tokens = case.block
    context = case.cached + case.device + case.new
    slowest = max(
        rates.load_token_s * max(1.0, rates.activation_ratio),
        rates.project_token_s,
        rates.token_s + rates.step.pair_s * context,
    )
    return 2 * tokens * slowest


def test_recomputing_the_front_is_the_best_of_every_front() -> None:
    inside = 0
    for case in random_cases(400, seed=1):
        costs = case.costs
        found = best_prefix(costs, case.block)
        assert found.split.recompute in cuts(case)
        assert found.ttft_s == costs.of(found.split)
        assert found.ttft_s <= min(costs.of(Split(x)) for x in cuts(case)) * _ROUNDING
        inside += 0 < found.split.recompute < case.cached
    assert inside > 80  # else the profiles try only the ends


def test_recomputing_the_back_is_the_best_of_every_back() -> None:
    inside = 0
    for case in random_cases(400, seed=2):
        costs = case.costs
        found = best_tail(costs, case.block)
        backs = [case.cached - x for x in cuts(case)]
        assert found.split.recompute in backs
        least_s = min(costs.of(Split(x, tail=x > 0)) for x in backs)
        assert found.ttft_s <= least_s * _ROUNDING
        inside += 0 < found.split.recompute < case.cached
    assert inside > 80


@pytest.mark.parametrize("held_share", [None, 0.4])
def test_activations_are_the_best_of_every_number(held_share: float | None) -> None:
    for case in random_cases(400, seed=3):
        costs = case.costs
        held = None if held_share is None else int(held_share * case.cached)
        found = best_activations(costs, case.block, held)
        most = case.cached if held is None else held
        choices = [x for x in cuts(case) if x < most] + [most]
        assert found.split.activations in choices
        least_s = min(costs.of(Split(activations=a)) for a in choices)
        assert found.ttft_s <= least_s * _ROUNDING


def test_the_mix_is_within_a_block_of_every_mix() -> None:
    """Where activations pay at all: elsewhere the planner never asks for them."""
    tried = exact = 0
    for case in random_cases(1_000, seed=4, most_blocks=24):
        if activations_refused(case.rates):
            continue
        tried += 1
        costs = case.costs
        found = best_mixed(costs, case.block)
        front, taken = found.split.recompute, found.split.activations
        assert front in cuts(case) and front + taken in cuts(case)
        least_s = min(
            costs.of(Split(at, end - at)) for at in cuts(case) for end in cuts(case) if end >= at
        )
        assert found.ttft_s <= least_s + block_s(case)
        exact += found.ttft_s <= least_s * _ROUNDING
    assert tried >= 300
    assert exact > 0.9 * tried


def test_the_unrounded_mix_is_below_every_mix() -> None:
    for case in random_cases(400, seed=5, most_blocks=12):
        if activations_refused(case.rates):
            continue
        costs = case.costs
        found = best_mixed(costs)
        cut = np.linspace(0, case.cached, 25)
        least_s = min(costs.of(Split(at, end - at)) for at in cut for end in cut if end >= at)
        assert found.ttft_s <= least_s * (1 + 1e-9)


def test_recomputing_is_free_below_the_floor_of_reads() -> None:
    """A step of one new token reads all weights anyway; more tokens ride along."""
    rates = random_rates(default_rng(0), plain=True)
    step = replace(rates.step, weights_s=500 * rates.token_s)
    costs = Costs(replace(rates, step=step, overlap=1.0), 100_000, 1)
    assert best_prefix(costs).split.recompute >= 499


def test_a_few_tokens_of_a_mixture_read_few_experts() -> None:
    rates = random_rates(default_rng(0), plain=True)
    step = replace(rates.step, weights_s=500 * rates.token_s)
    rates = replace(rates, step=step, experts_s=480 * rates.token_s, expert_idle=15 / 16)
    one, some, many = (Costs(rates, 1_000, new).plain_s for new in (1, 10, 400))
    assert one == pytest.approx((500 - 480 * 15 / 16) * rates.token_s)
    assert one < some < many == pytest.approx(500 * rates.token_s)
    # Recomputed tokens touch the experts that one new token leaves alone.
    costs = Costs(rates, 1_000, 1)
    assert costs.compute_s(Split(399)) == many
    best = best_prefix(costs, 16)
    assert best.ttft_s <= min(costs.of(Split(x)) for x in range(0, 1_000, 16)) * _ROUNDING


def test_a_fixed_load_cost_can_make_loading_nothing_best() -> None:
    rates = random_rates(default_rng(0), plain=True)
    rates = replace(
        rates,
        load=LineFit("load", rates.token_s / 100, 50 * rates.token_s),
        overlap=1.0,
    )
    assert best_prefix(Costs(rates, 20, 1), 4).split.recompute == 20


def test_activations_refused_names_the_ratio_or_exchange_rate() -> None:
    rates = replace(
        random_rates(default_rng(0), plain=True),
        activation_bytes=1.0,
    )
    cheap = replace(rates, project=LineFit("KV projection", 0.4 * rates.token_s))
    slow = replace(rates, project=LineFit("KV projection", 0.6 * rates.token_s))
    assert activations_refused(cheap) == ""
    assert "(1 - ρ)·φ" in activations_refused(slow)
    assert "ρ = 1" in activations_refused(replace(cheap, activation_bytes=2.0))


@pytest.mark.parametrize(
    ("poly", "roots"),
    [
        ((-6.0, 1.0, 1.0), [-3.0, 2.0]),
        ((-4.0, 2.0, 0.0), [2.0]),
        ((1.0, 0.0, 0.0), []),
        ((1.0, 0.0, 1.0), []),
        ((0.0, -3.0, 1.0), [0.0, 3.0]),
        ((0.0, 0.0, 1.0), [0.0]),
        ((1e-9, -1e9, 1.0), [1e-18, 1e9]),
    ],
)
def test_roots(poly: tuple[float, float, float], roots: list[float]) -> None:
    assert sorted(set(real_roots(poly))) == pytest.approx(roots, rel=1e-9)


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
    costs = Costs(opt_rates(), 100, 10)
    plan = plan_of(costs, Split(20, 30))
    assert plan.load_bytes == 50 * 524_288 + 30 * 262_144
    assert plan.load_s == pytest.approx(plan.load_bytes / 50e9)
    everything = plan_of(costs, Split(100))
    assert (everything.load_bytes, everything.load_s) == (0, 0)
    assert everything.ttft_s == everything.compute_s


def test_typed_blocks_in_any_order_cost_the_same() -> None:
    costs = Costs(opt_rates(), 96, 10)
    mixed = predict(costs, from_runs([("A", 16), ("K", 32), ("A", 16), ("K", 32)]))
    sorted_ = predict(costs, from_runs([("A", 32), ("K", 64)]))
    assert (mixed.ttft_s, mixed.load_bytes) == (sorted_.ttft_s, sorted_.load_bytes)


def test_segments_that_cannot_be_priced_are_refused() -> None:
    costs = Costs(opt_rates(), 96, 10)
    with pytest.raises(ValueError, match="cover 64 tokens of 96"):
        predict(costs, layout(64))


def test_predict_lets_a_prefix_that_stays_in_host_cross_once() -> None:
    costs = Costs(opt_rates(), 96, 10)
    stays, loaded = (predict(costs, from_runs([(kind, 96)])) for kind in ("C", "K"))
    assert replace(stays, segments=()) == replace(loaded, segments=())
    assert stays.kind == "cpu" and stays.crossing_tokens == 96 and stays.exact
