"""Every way side by side: what is chosen is one of them, what cannot be comes with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from numpy.random import default_rng

from kappa.cost import TokenCounts
from kappa.plans.planners import alternatives, decoding
from kappa.plans.rates import LineFit
from tests.kappa.plans.profiles import random_rates


def test_the_chosen_one_is_the_best_of_those_priced_on_random_nodes() -> None:
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
