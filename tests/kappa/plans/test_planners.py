"""The choice of a plan, planners by name, alternatives side by side, and effective ratios."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from numpy.random import default_rng

from kappa.cost import TokenCounts
from kappa.cost import kappa_eff as kappa_eff_loading
from kappa.hardware import NodeProfile, node_profile
from kappa.model import ModelShape, kv_bytes_per_token
from kappa.plans.architecture import architecture_from_config
from kappa.plans.planners import (
    Cached,
    Planning,
    Policy,
    alternatives,
    choose,
    decoding,
    kappa_eff,
    policy_ttft_s,
)
from kappa.plans.rates import LineFit, PlanRates, rates_from_law
from kappa.plans.split import Costs
from kappa.shapes import SHAPES, model_shape
from tests.kappa.plans import profiles
from tests.kappa.plans.profiles import random_cases, random_rates


def node(gigabytes_per_s: float) -> NodeProfile:
    """The node that the predictions of docs/load-plans.md assume."""
    return profiles.node(gigabytes_per_s, attention_flops_per_s=400e12)


def shape_of(model: str) -> ModelShape:
    """The model as theory has it: all its parameters are multiplied with every token."""
    return replace(SHAPES[model], lookup_params=0.0, head_params=0.0)


def law(model: str, gigabytes_per_s: float) -> PlanRates:
    return rates_from_law(shape_of(model), node(gigabytes_per_s), overlap=1.0)


def long_prefix(rates: PlanRates) -> Costs:
    """32,768 cached tokens and 128 new ones."""
    return Costs(rates, 32_768, 128)


def without_attention(rates: PlanRates) -> PlanRates:
    """Nor floors of reads."""
    none = dict.fromkeys(("pair_s", "weights_s", "context_token_s", "experts_s"), 0.0)
    return replace(rates, step=replace(rates.step, **none))


@pytest.mark.parametrize(
    ("model", "gigabytes_per_s", "load", "prefix", "tail"),
    [
        ("llama-3.1-8b", 50, 86, 79.5, 83),
        ("llama-3.1-8b", 15, 286, 226, 255),
        ("qwen2.5-14b", 50, 129, 121, 126),
        ("qwen2.5-14b", 15, 430, 352, 391),
        ("qwen3-30b-a3b", 50, 64, 59.2, 63.4),
        ("qwen3-30b-a3b", 15, 215, 164.8, 198.9),
        ("opt-6.7b", 50, 344, 252, 295),
        ("opt-6.7b", 15, 1145, 562, 714),
    ],
)
def test_predicted_milliseconds_of_the_theory(
    model: str, gigabytes_per_s: float, load: float, prefix: float, tail: float
) -> None:
    rates = law(model, gigabytes_per_s)
    policies: tuple[Policy, ...] = ("load", "recompute", "tail")
    predicted = [1e3 * policy_ttft_s(long_prefix(rates), policy) for policy in policies]
    assert predicted == pytest.approx([load, prefix, tail], rel=1e-3, abs=0.55)


@pytest.mark.parametrize(("gigabytes_per_s", "expected"), [(50, 161), (15, 355)])
def test_predicted_milliseconds_with_activations(gigabytes_per_s: float, expected: float) -> None:
    rates = without_attention(law("opt-6.7b", gigabytes_per_s))
    predicted = 1e3 * policy_ttft_s(long_prefix(rates), "mixed")
    assert predicted == pytest.approx(expected, rel=0.005)


def test_closed_forms_of_the_theory() -> None:
    """The table of policies: recompute, activations, and both, from their rates alone."""
    tried = 0
    for seed in range(400):
        rates = replace(random_rates(default_rng(seed), plain=True), overlap=1.0)
        step = replace(rates.step, weights_s=0.0)
        rates = replace(rates, step=step)
        phi, mu, psi = rates.token_s, rates.load_token_s, rates.project_token_s
        rho, cached, new = rates.activation_ratio, 100_000, 10
        if cached / new < phi / mu or rho >= 1 or psi >= (1 - rho) * phi:
            continue
        tried += 1
        recompute = (cached + new) * phi * mu / (phi + mu)
        assert policy_ttft_s(Costs(rates, cached, new), "recompute") == pytest.approx(recompute)
        share = min(1.0, (mu - new * phi / cached) / (psi + (1 - rho) * mu))
        activations = cached * mu * (1 - (1 - rho) * share)
        assert policy_ttft_s(Costs(rates, cached, new), "activations") == pytest.approx(activations)
        both = activations
        if rho * mu > psi and cached / new > phi / (rho * mu - psi):
            more = (cached * (rho * mu - psi) - new * phi) / (phi + rho * mu - psi)
            both = (cached - more) * rho * mu
        assert policy_ttft_s(Costs(rates, cached, new), "mixed") == pytest.approx(both)
    assert tried > 50


def test_effective_ratio_of_each_policy() -> None:
    for model in ("llama-3.1-8b", "opt-6.7b", "qwen3-30b-a3b"):
        rates = without_attention(law(model, 50))
        shape, slow = shape_of(model), node(50)
        flops_per_byte = 2 * shape.params_active / kv_bytes_per_token(shape)
        crit = flops_per_byte * slow.h2d_bytes_per_s / slow.flops_per_s
        assert rates.token_s / rates.load_token_s == pytest.approx(crit)
        first = replace(rates, overlap=0.0)
        assert kappa_eff(first, "load", 128) == pytest.approx(crit)
        assert kappa_eff(rates, "load", 128) == pytest.approx(2 * crit)
        assert kappa_eff(rates, "recompute", 128) == pytest.approx(2 * crit + 1)
        assert kappa_eff(rates, "tail", 128) == pytest.approx(2 * crit + 1)


@pytest.mark.parametrize("overlap", [0.0, 0.7, 1.0])
def test_effective_ratio_of_loading_is_that_of_the_router(overlap: float) -> None:
    """With attention, floors and fixed costs: `kappa.cost` solves the same crossing exactly.

    It loads first and computes then; with overlap a load may last that much longer.
    """
    for model in ("llama-3.1-8b", "opt-6.7b", "qwen3-30b-a3b"):
        slow = replace(node(15), load_fixed_s=1e-3, step_fixed_s=2e-4)
        hidden = replace(
            slow, load_fixed_s=1e-3 / (1 + overlap), h2d_bytes_per_s=15e9 * (1 + overlap)
        )
        rates = rates_from_law(SHAPES[model], slow, overlap=overlap)
        for new in (1, 64, 4_096):
            expected = kappa_eff_loading(SHAPES[model], hidden, new)
            if math.isfinite(expected):
                assert kappa_eff(rates, "load", new) == pytest.approx(expected, rel=1e-6)


def test_kappa_eff_is_where_ttft_is_twice_the_compute_time() -> None:
    rates = law("llama-3.1-8b", 50)
    loaded = kappa_eff(rates, "load", 128) * 128
    ttft_s = policy_ttft_s(Costs(rates, loaded, 128), "load")
    assert ttft_s == pytest.approx(2 * rates.prefill_s(128, loaded), rel=1e-6)


def test_kappa_eff_is_infinite_when_computing_outgrows_loading() -> None:
    rates = law("qwen3-30b-a3b", 400)
    assert kappa_eff(rates, "load", 100_000) == math.inf


def test_choice_is_the_best_of_all_policies() -> None:
    policies: tuple[Policy, ...] = ("load", "recompute", "auto")
    for case in random_cases(400, seed=21):
        plan = choose(case.costs, block_tokens=case.block, least_gain=0.0)
        best_s = min(policy_ttft_s(case.costs, policy, case.block) for policy in policies)
        assert plan.ttft_s == pytest.approx(best_s, rel=1e-12)
        assert plan.cached_tokens == case.cached


@pytest.mark.parametrize("policy", ["load", "recompute", "tail", "activations", "mixed", "auto"])
def test_a_faster_link_never_delays_the_first_token(policy: Policy) -> None:
    for case in random_cases(150, seed=23):
        last_s = math.inf
        for factor in (4.0, 2.0, 1.0, 0.5, 0.1, 0.01):
            linked = replace(case, rates=replace(case.rates, load=case.rates.load.scaled(factor)))
            ttft_s = policy_ttft_s(linked.costs, policy, case.block)
            assert ttft_s <= last_s * (1 + 1e-12)
            last_s = ttft_s


def test_what_stock_engines_can_do_is_a_tail() -> None:
    plan = choose(long_prefix(law("llama-3.1-8b", 15)), tail_only=True)
    assert [s.kind for s in plan.segments] == ["K", "R"]
    assert plan.segments[0].end_tokens % 16 == 0
    assert plan.ttft_s > choose(long_prefix(law("llama-3.1-8b", 15))).ttft_s


def test_grouped_queries_are_refused_activations_with_the_reason() -> None:
    plan = choose(long_prefix(law("llama-3.1-8b", 15)))
    assert [s.kind for s in plan.segments] == ["R", "K"]
    assert "ρ = 2" in plan.why
    assert plan.exact


def test_held_activations_bound_the_plan() -> None:
    rates = law("opt-6.7b", 50)
    plans = [choose(long_prefix(rates), held_tokens=held) for held in (0, 20_000, None)]
    assert [plan.tokens("A") > 0 for plan in plans] == [False, True, True]
    assert max(s.end_tokens for s in plans[1].segments if s.kind == "A") <= 20_000
    assert plans[0].ttft_s > plans[1].ttft_s > plans[2].ttft_s


def test_kinds_that_an_architecture_lacks_are_not_planned() -> None:
    latent = architecture_from_config({"num_attention_heads": 128, "kv_lora_rank": 512})
    plan = choose(long_prefix(law("deepseek-v3", 15)), kinds=latent.kinds())
    assert plan.tokens("A") == 0
    only = choose(long_prefix(law("opt-6.7b", 15)), kinds={"K"})
    assert [s.kind for s in only.segments] == ["K"] and "the link is the longer" in only.why
    quick = choose(long_prefix(law("opt-6.7b", 15_000)))
    assert "the gpu is the longer" in quick.why


def test_a_gain_too_small_for_its_risk_is_left() -> None:
    rates = law("llama-3.1-8b", 50)  # recomputing gains 7.5 %
    assert choose(long_prefix(rates), least_gain=0.05).kind == "recompute+load"
    left = choose(long_prefix(rates), least_gain=0.10)
    assert left.kind == "load"
    assert "less than 10.0%" in left.why


def test_nothing_cached_is_a_plan_without_segments() -> None:
    plan = choose(Costs(law("opt-6.7b", 50), 0, 128))
    assert plan.segments == ()
    assert plan.load_bytes == 0
    assert plan.ttft_s == Costs(law("opt-6.7b", 50), 0, 128).plain_s


def test_bad_requests_are_refused() -> None:
    rates = law("opt-6.7b", 50)
    with pytest.raises(ValueError, match="policy is 'fast'"):
        policy_ttft_s(Costs(rates, 1, 1), "fast")  # type: ignore[arg-type]


BLOCK = 16


REQUEST = Cached(cached=640, new=20, device=32, held=640)


def kinds(planning: Planning, name: str, request: Cached = REQUEST) -> tuple[int, int, int]:
    plan = planning.named(name)(request)
    assert plan.cached_tokens == request.cached
    return plan.tokens("K"), plan.tokens("A"), plan.tokens("R")


@pytest.fixture(scope="module")
def opt() -> Planning:
    node = replace(node_profile("a100-pcie4"), h2d_bytes_per_s=16e9)
    return Planning(BLOCK, rates_from_law(model_shape("opt-13b"), node))


def test_without_rates_nothing_is_predicted_and_kvpr_is_refused() -> None:
    planning = Planning(BLOCK)
    assert kinds(planning, "auto") == kinds(planning, "kv") == (640, 0, 0)
    assert kinds(planning, "recompute") == (0, 0, 640)
    assert kinds(planning, "hybrid") == (0, 640, 0)
    assert planning.named("kv")(REQUEST).ttft_s == 0
    with pytest.raises(ValueError, match="needs rates: measure this node"):
        planning.named("kvpr")


def test_with_rates_plans_are_priced_and_auto_is_the_best(opt: Planning) -> None:
    plans = {name: opt.named(name)(REQUEST) for name in opt.names}
    assert all(plan.ttft_s > 0 for plan in plans.values())
    assert plans["auto"].ttft_s == min(plan.ttft_s for plan in plans.values())
    assert plans["auto"].ttft_s < 0.98 * plans["kv"].ttft_s
    loaded, activations, _ = kinds(opt, "kvpr")
    assert loaded > 0 and activations > 0 and activations % BLOCK == 0


def test_activations_are_planned_only_as_far_as_they_are_held(opt: Planning) -> None:
    held = REQUEST._replace(held=64)
    assert kinds(opt, "kvpr", held)[1] == 64
    assert kinds(opt, "auto", held)[1] <= 64
    assert kinds(opt, "kvpr", REQUEST._replace(held=0))[1] == 0
    refused = Planning(BLOCK, opt.rates, activations=False)
    assert [kinds(refused, name)[1] for name in refused.names] == [0] * len(refused.names)


def test_planning_offers_cpu_only_if_the_engine_attends_there() -> None:
    plain = ("auto", "kv", "hybrid", "recompute", "tail")
    assert Planning(BLOCK).names == plain and not Planning(BLOCK).cpu
    assert Planning(BLOCK, cpu=True).names == (*plain, "cpu")
    with pytest.raises(ValueError, match="cpu"):
        Planning(BLOCK).named("cpu")


def test_auto_is_the_best_priced_plan_on_random_nodes() -> None:
    rng = default_rng(11)
    for _ in range(200):
        rates = random_rates(rng)
        counts = TokenCounts(0, int(rng.integers(1, 4000)), int(rng.integers(1, 300)))
        found = {one.name: one for one in alternatives(rates, counts, block_tokens=16)}
        priced = [one.plan.ttft_s for one in found.values() if one.plan is not None]
        auto = found["auto"].plan
        assert auto is not None and found["auto"].chosen
        # It leaves plain loading only for a gain of two percent.
        assert auto.ttft_s <= min(priced) / 0.98 + 1e-12
        assert all((one.plan is None) == bool(one.refused) for one in found.values())
        assert "not measured" in found["cpu (stays in host memory)"].refused


def test_room_leaves_the_front_in_host_memory() -> None:
    rates = random_rates(default_rng(1), plain=True)
    rates = replace(rates, attend=LineFit("CPU attention", rates.load_token_s))
    counts = TokenCounts(64, 960, 20)
    found = {one.name: one for one in alternatives(rates, counts, room_tokens=500)}
    auto = found["auto"].plan
    assert auto is not None
    assert [(s.kind, s.tokens) for s in auto.segments] == [("C", 544), ("K", 416)]
    row = found["auto"].to_dict()
    assert row["step_s"] > 0 and row["segments"][0] == ("C", 0, 544)
    none = alternatives(rates, counts, activations=False)
    assert any("none are stored" in one.refused for one in none)


def test_nothing_cached_is_priced_too() -> None:
    rates = random_rates(default_rng(2))
    found = alternatives(rates, TokenCounts(0, 0, 20))
    assert found[-1].plan is not None and found[-1].plan.ttft_s > 0
    step = decoding(rates, 0)
    assert step["device_s"] > 0 and step["load_all_s"] is None


def test_a_decoding_step_is_split_where_the_cpu_may_attend() -> None:
    rates = random_rates(default_rng(1), plain=True)
    assert decoding(rates, 4096)["split_s"] is None
    able = replace(rates, attend=LineFit("CPU attention", rates.load_token_s))
    step = decoding(able, 4096)
    assert step["load_all_s"] == able.load.seconds(4096) > step["device_s"]
    instant = replace(able, load=LineFit("load", 1e-15))
    assert decoding(instant, 4096)["load_all_s"] == step["device_s"], "nothing is faster than that"
    assert step["split_s"] <= min(step["load_all_s"], step["cpu_all_s"])
    assert step["split_s"] == pytest.approx(min(step["split_s"], step["load_all_s"]))
    assert 0 <= step["cpu_share"] <= 1
