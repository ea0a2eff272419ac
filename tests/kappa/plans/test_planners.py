"""Plans by name."""

import pytest

from kappa.hardware import node_profile
from kappa.plans.planners import Cached, Planning, fixed
from kappa.plans.rates import rates_from_law
from kappa.shapes import model_shape

BLOCK = 16
ASKED = Cached(cached=640, new=20, device=32, held=640)


def kinds(planning: Planning, name: str, asked: Cached = ASKED) -> tuple[int, int, int]:
    plan = planning.named(name)(asked)
    assert plan.cached_tokens == asked.cached
    return plan.tokens("K"), plan.tokens("A"), plan.tokens("R")


@pytest.fixture(scope="module")
def opt() -> Planning:
    return Planning(BLOCK, rates_from_law(model_shape("opt-13b"), node_profile("a100-pcie4")))


def test_without_rates_nothing_is_predicted_and_kvpr_is_refused() -> None:
    planning = Planning(BLOCK)
    assert kinds(planning, "auto") == kinds(planning, "kv") == (640, 0, 0)
    assert kinds(planning, "recompute") == (0, 0, 640)
    assert kinds(planning, "hybrid") == (0, 640, 0)
    assert planning.named("kv")(ASKED).ttft_s == 0
    with pytest.raises(ValueError, match="needs rates: measure this node"):
        planning.named("kvpr")


def test_with_rates_plans_are_priced_and_auto_is_the_best(opt: Planning) -> None:
    plans = {name: opt.named(name)(ASKED) for name in opt.names}
    assert all(plan.ttft_s > 0 for plan in plans.values())
    assert plans["auto"].ttft_s == min(plan.ttft_s for plan in plans.values())
    assert plans["auto"].ttft_s < 0.98 * plans["kv"].ttft_s
    loaded, activations, _ = kinds(opt, "kvpr")
    assert loaded > 0 and activations > 0 and activations % BLOCK == 0


def test_activations_are_planned_only_as_far_as_they_are_held(opt: Planning) -> None:
    held = ASKED._replace(held=64)
    assert kinds(opt, "kvpr", held)[1] == 64
    assert kinds(opt, "auto", held)[1] <= 64
    assert kinds(opt, "kvpr", ASKED._replace(held=0))[1] == 0
    refused = Planning(BLOCK, opt.rates, activations=False)
    assert [kinds(refused, name)[1] for name in refused.names] == [0] * len(refused.names)


def test_a_fixed_plan_is_cut_to_what_is_cached() -> None:
    plan = fixed(600, 100)(ASKED)
    assert (plan.tokens("R"), plan.tokens("A"), plan.tokens("K")) == (600, 40, 0)
    tail = fixed(32, tail=True)(ASKED).segments
    assert [(s.kind, s.start_tokens) for s in tail] == [("K", 0), ("R", 608)]
    with pytest.raises(ValueError, match="give 0 or more"):
        fixed(-1)


def test_the_cpu_is_planned_for_only_where_the_engine_can_attend_there() -> None:
    plain = ("auto", "kv", "hybrid", "recompute", "tail")
    assert Planning(BLOCK).names == plain and not Planning(BLOCK).cpu
    assert Planning(BLOCK, cpu=True).names == (*plain, "cpu")
    with pytest.raises(ValueError, match="cpu"):
        Planning(BLOCK).named("cpu")
