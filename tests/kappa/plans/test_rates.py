"""Rates from the law and from measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from numpy.random import default_rng

from kappa.cost import StepModel, compute_s
from kappa.hardware import NodeProfile
from kappa.model import kv_bytes
from kappa.plans.measured import FORMAT, as_measured, rates_from_measured
from kappa.plans.rates import (
    LineFit,
    PlanRates,
    activation_bytes_per_token,
    projection_flops,
    rates_from_law,
)
from kappa.shapes import SHAPES, model_shape
from tests.kappa.plans.profiles import random_rates

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
    assert activation_bytes_per_token(shape, 1.0) == 32 * 4096


def measured(**changes: Any) -> dict[str, Any]:
    new, context, sizes = [1, 64, 1024], [0, 1024, 8192], [128, 256, 512, 1024]
    return {
        "format": FORMAT,
        "device": "test", "model": "opt-6.7b", "dtype": "float16", "layers": 32,
        "kv_bytes_per_token": 524288, "activation_bytes_per_token": 262144,
        "weight_bytes": 13e9,
        "load": {"tokens": sizes, "seconds": [4e-7 * n + 1e-5 for n in sizes]},
        "project": {"tokens": sizes, "seconds": [1e-7 * n + 5e-6 for n in sizes]},
        "grid": {
            "new_tokens": new,
            "context_tokens": context,
            "seconds": [[4e-3 + 3e-5 * t + 1e-9 * t * s for s in context] for t in new],
        },
        "h2d_bytes_per_s": 40e9,
        "h2d_while_storing_bytes_per_s": 30e9,
        "h2d_cpu_busy_bytes_per_s": 36e9,
        **changes,
    }  # fmt: skip


def test_measured_rates_are_those_of_all_layers() -> None:
    rates = rates_from_measured(measured())
    assert rates.name == "opt-6.7b on test"
    assert rates.load_token_s == pytest.approx(32 * 4e-7)
    assert rates.project.fixed_s == pytest.approx(32 * 5e-6)
    assert rates.activation_ratio == 0.5
    assert rates.weights_load_s == 13e9 / 40e9
    assert rates.load.r2 == pytest.approx(1.0)


def test_the_grid_overrides_the_law_inside_and_carries_on_outside() -> None:
    rates = rates_from_measured(measured())
    assert rates.prefill_s(64, 1024) == pytest.approx(4e-3 + 3e-5 * 64 + 1e-9 * 64 * 1024)
    inside, edge = rates.prefill_s(1024, 8192), rates.prefill_s(2048, 8192)
    more_pairs = 2048 * (8192 + 1024) - 1024 * (8192 + 512)
    assert edge - inside == pytest.approx(1024 * 3e-5 + 1e-9 * more_pairs, rel=0.1)


def test_a_link_that_shares_is_slower() -> None:
    rates = rates_from_measured(measured())
    assert rates.under() is rates
    storing = rates.under(storing=True)
    assert storing.load_token_s == pytest.approx(rates.load_token_s * 40 / 30)
    assert storing.weights_load_s == pytest.approx(rates.weights_load_s * 40 / 30)
    both = rates.under(storing=True, cpu_busy=True)
    assert both.load_token_s == pytest.approx(rates.load_token_s * 40 / 30 * 40 / 36)
    assert storing.under(storing=True) == storing  # never charged twice


def test_rates_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(measured()), encoding="utf-8")
    assert rates_from_measured(path) == rates_from_measured(measured())


@pytest.mark.parametrize("name", ["load", "project"])
def test_a_poor_fit_is_refused_by_name(name: str) -> None:
    noisy = {"tokens": [1, 2, 3, 4, 5], "seconds": [1.0, 5.0, 2.0, 6.0, 3.0]}
    with pytest.raises(ValueError, match=r"the (load|KV projection) fit has R²"):
        rates_from_measured(measured(**{name: noisy}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format": "other"}, "format is 'other'"),
        ({"grid": {}}, "new_tokens"),
        ({"layers": None}, "profile anew"),
        ({"h2d_bytes_per_s": "fast"}, "could not convert"),
        ({"h2d_bytes_per_s": 0.0}, "division by zero: profile anew"),
    ],
)
def test_a_garbled_file_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        rates_from_measured(measured(**changes))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: cannot read"):
        rates_from_measured(tmp_path / "none.json")
    path = tmp_path / "rates.json"
    path.write_text("[1", encoding="utf-8")
    with pytest.raises(ValueError, match="not JSON"):
        rates_from_measured(path)
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(ValueError, match="holds list"):
        rates_from_measured(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 0},
        {"overlap": 1.5},
        {"h2d_while_storing": 0.0},
        {"weights_load_s": -1.0},
        {"experts_s": 1.0},
    ],
)
def test_rates_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    rates = rates_from_law(SHAPES["opt-6.7b"], NODE)
    with pytest.raises(ValueError, match=f"PlanRates.{next(iter(changes))}"):
        replace(rates, **changes)


def test_a_law_in_the_form_of_a_measurement_is_read_back_as_the_law() -> None:
    law = rates_from_law(model_shape("llama-3.1-8b"), NODE)
    again = rates_from_measured(json.loads(json.dumps(as_measured(law, "m", "d"))))
    assert again.load_token_s == pytest.approx(law.load_token_s)
    assert again.project_token_s == pytest.approx(law.project_token_s)
    assert again.activation_ratio == law.activation_ratio
    for new, context in ((1, 0), (128, 8192), (512, 2048)):
        assert again.prefill_s(new, context) == pytest.approx(law.prefill_s(new, context))


def test_a_busy_processor_takes_no_more_of_the_link_by_attending() -> None:
    rates = replace(
        random_rates(default_rng(3)), h2d_cpu_busy=0.5, h2d_attending=0.4,
        attend=LineFit("CPU attention", 1e-6), attend_loading=0.8,
    )  # fmt: skip
    busy = rates.under(cpu_busy=True)
    assert busy.load_token_s == pytest.approx(2 * rates.load_token_s)
    both = busy.attending()
    assert both.load_token_s == pytest.approx(rates.attending().load_token_s)
    assert both.attend is not None
    assert both.attend.per_token_s == pytest.approx(1e-6 / 0.8)
    assert both.attending() == both
    assert rates.under(storing=True).h2d_attending == 0.4


def test_what_was_not_measured_slows_nothing_down() -> None:
    step = StepModel(token_s=1e-3, pair_s=0.0, weights_s=0.0, context_token_s=0.0, fixed_s=0.0)
    rates = PlanRates(
        "bare", 4, 100.0, 50.0, LineFit("load", 1e-6), LineFit("KV projection", 1e-6), step
    )
    assert rates.under(storing=True, cpu_busy=True) is rates
    assert rates.attending() == rates
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
    assert rates.law_s(4, 8) == 33.0 + 7.0
    # 8 new: pairs 8·(8 + 4) = 96: 16 + 48 = 64; reads 34.
    assert rates.law_s(8, 8) == 64.0 + 7.0
    # Of the weights 16 s are experts, each left alone by a token with probability 1/2: 16/4 by two,
    # who compute for 2·2 + 2·(8 + 1)·0.5 = 13 s meanwhile.
    idle = replace(rates, experts_s=16.0, expert_idle=0.5)
    assert idle.law_s(2, 8) == 30.0 - 4.0 + 10 * 0.25 + 7.0


@pytest.mark.parametrize("share", ["h2d_while_storing", "h2d_cpu_busy", "h2d_attending"])
def test_a_share_of_the_link_may_be_all_of_it_and_no_more(share: str) -> None:
    rates = random_rates(default_rng(1))
    assert getattr(replace(rates, **{share: 1.0}), share) == 1.0
    with pytest.raises(ValueError, match=share):
        replace(rates, **{share: 1.01})
