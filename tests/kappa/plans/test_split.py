"""The closed forms of the split against every split there is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.random import default_rng

from kappa.cost import StepModel
from kappa.plans.rates import LineFit
from kappa.plans.split import (
    Costs,
    Split,
    activations_refused,
    balance_tokens,
    best_activations,
    best_mixed,
    best_prefix,
    best_tail,
    real_roots,
)
from tests.kappa.plans.profiles import Case, random_cases, random_rates

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
        rates.token_s + rates.pair_s * context,
    )
    return 2 * tokens * slowest


def test_recomputing_the_front_is_the_best_of_every_front() -> None:
    inside = 0
    for case in random_cases(1_000, seed=1):
        costs = case.costs
        found = best_prefix(costs, case.block)
        assert found.split.recompute in cuts(case)
        assert found.ttft_s == costs.of(found.split)
        assert found.ttft_s <= min(costs.of(Split(x)) for x in cuts(case)) * _ROUNDING
        inside += 0 < found.split.recompute < case.cached
    assert inside > 200  # else the profiles try only the ends


def test_recomputing_the_back_is_the_best_of_every_back() -> None:
    inside = 0
    for case in random_cases(1_000, seed=2):
        costs = case.costs
        found = best_tail(costs, case.block)
        backs = [case.cached - x for x in cuts(case)]
        assert found.split.recompute in backs
        least_s = min(costs.of(Split(x, tail=x > 0)) for x in backs)
        assert found.ttft_s <= least_s * _ROUNDING
        inside += 0 < found.split.recompute < case.cached
    assert inside > 200


@pytest.mark.parametrize("held_share", [None, 0.4])
def test_activations_are_the_best_of_every_number(held_share: float | None) -> None:
    for case in random_cases(1_000, seed=3):
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
    for case in random_cases(3_000, seed=4, most_blocks=24):
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
    assert tried >= 1_000
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


def test_balance_without_attention_is_the_ratio_of_rates() -> None:
    for seed in range(50):
        rates = random_rates(default_rng(seed), plain=True)
        costs = Costs(rates, 10_000, 7)
        phi, mu = rates.token_s, rates.load_token_s
        expected = max(0.0, (10_000 * mu - 7 * phi) / (phi + mu))
        assert balance_tokens(costs) == pytest.approx(expected)
        # Without attention it does not matter at which end tokens are computed.
        assert balance_tokens(costs, tail=True) == pytest.approx(expected)


@pytest.mark.parametrize("tail", [False, True])
def test_balance_is_where_link_and_gpu_take_equally_long(tail: bool) -> None:
    tried = 0
    for case in random_cases(300, seed=6):
        costs = case.costs
        at = balance_tokens(costs, tail=tail)
        split = Split(at, tail=tail)
        if not 0 < at < case.cached:
            continue
        c0, c1, c2 = costs.pieces(tail=tail)[0]
        assert costs.load_s(split) == pytest.approx(c0 + at * (c1 + at * c2))
        tried += 1
    assert tried > 50


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
    # What is recomputed touches the experts that one new token leaves alone.
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


def test_activations_are_refused_with_the_ratio_or_the_exchange_rate() -> None:
    rates = replace(
        random_rates(default_rng(0), plain=True),
        activation_bytes=1.0,
    )
    cheap = replace(rates, project=LineFit("KV projection", 0.4 * rates.token_s))
    dear = replace(rates, project=LineFit("KV projection", 0.6 * rates.token_s))
    assert activations_refused(cheap) == ""
    assert "(1 - ρ)·φ" in activations_refused(dear)
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


def test_a_gpu_that_is_busy_longer_than_the_load_lasts_recomputes_nothing() -> None:
    # 100 cached tokens load in 1 s; the 10 new ones take 2 s: the link is idle before the gpu is.
    rates = replace(
        random_rates(default_rng(0), plain=True), load=LineFit("load", 0.01), overlap=1.0,
        step=StepModel(token_s=0.2, pair_s=0.0, weights_s=0.0, context_token_s=0.0, fixed_s=0.0),
    )  # fmt: skip
    assert balance_tokens(Costs(rates, 100, 10)) == 0.0
    # 100 new ones less: (100·0.01 - 1·0.2) / (0.2 + 0.01) = 0.8 / 0.21.
    assert balance_tokens(Costs(rates, 100, 1)) == pytest.approx(0.8 / 0.21)


def test_loading_all_is_one_plan_at_whichever_end_the_rest_is_computed() -> None:
    rates = replace(random_rates(default_rng(0), plain=True), load=LineFit("load", 1e-12))
    costs = Costs(rates, 640, 64)
    assert best_tail(costs, 16).split == best_prefix(costs, 16).split == Split()
