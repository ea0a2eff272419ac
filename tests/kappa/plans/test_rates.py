"""Rates of a model on a node: by formula, and fitted to measurements or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from numpy.random import default_rng

from kappa.cost import StepModel, compute_s
from kappa.hardware import NodeProfile, node_profile
from kappa.model import activation_bytes_per_token, kv_bytes, projection_flops
from kappa.plans.measured import as_measured, fit_grid, fit_line, rates_from_measured
from kappa.plans.planners import Cached, Planning, kappa_eff
from kappa.plans.rates import FORMAT, LEAST_R2, ComputeGrid, LineFit, PlanRates, rates_from_law
from kappa.shapes import SHAPES, model_shape
from tests.kappa.plans.profiles import opt_rates, random_rates

NODE = NodeProfile(
    name="h200", gpu="H200", link_name="PCIe 5", h2d_bytes_per_s=50e9, flops_per_s=600e12,
    hbm_bytes_per_s=4.8e12, load_fixed_s=1e-4, step_fixed_s=2e-4,
)  # fmt: skip
OPT = SHAPES["opt-6.7b"]


# -- by formula --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "ratio"),
    [("opt-6.7b", 0.5), ("opt-13b", 0.5), ("llama-3.1-8b", 2), ("qwen2.5-14b", 2.5),
     ("qwen2.5-7b", 3.5), ("llama-3.1-70b", 4), ("llama-3.1-405b", 8), ("qwen3-30b-a3b", 2),
     ("qwen3-235b-a22b", 4), ("deepseek-v3", 12.4)],
)  # fmt: skip
def test_activations_over_kv_by_model(model: str, ratio: float) -> None:
    assert rates_from_law(SHAPES[model], NODE).activation_ratio == pytest.approx(ratio, rel=0.01)


def test_activation_bytes_follow_the_kv_dtype_unless_smaller() -> None:
    assert activation_bytes_per_token(OPT) == 32 * 4096 * 2
    assert activation_bytes_per_token(replace(OPT, kv_dtype_bytes=4.0)) == 32 * 4096 * 4
    eight_bits = rates_from_law(model_shape("opt-6.7b", kv_dtype="fp8"), NODE)
    assert eight_bits.activation_ratio == 2 * rates_from_law(OPT, NODE).activation_ratio


@pytest.mark.parametrize("model", ["llama-3.1-8b", "opt-13b", "qwen3-30b-a3b"])
def test_the_law_gives_the_router_its_own_seconds(model: str) -> None:
    shape = SHAPES[model]
    rates = rates_from_law(shape, NODE)
    for new, context in ((1, 0), (7, 100), (64, 8_192), (4_096, 32_768)):
        expected = compute_s(shape, NODE, new, context)
        assert rates.prefill_s(new, context) == pytest.approx(expected)
    assert rates.prefill_s(0, 100) == rates.prefill_s(1, 100)
    assert rates.load.seconds(1_000) == pytest.approx(1e-4 + kv_bytes(shape, 1_000) / 50e9)
    assert rates.h2d_bytes_per_s == pytest.approx(50e9)
    assert rates.serial_share == 1 / shape.layers


def test_projection_flops_are_kvprs_4_h_squared_for_mha() -> None:
    assert projection_flops(OPT) == 32 * 4 * 4096**2
    # Projecting costs a sixth of computing a token from its id, more or less.
    assert 5.5 < 2 * OPT.params_active / projection_flops(OPT) < 6.5
    assert projection_flops(SHAPES["deepseek-v3"]) == 61 * 2 * 7168 * (512 + 64)


@pytest.mark.parametrize(
    "changes",
    [{"layers": 0}, {"overlap": 1.5}, {"h2d_attending": 0.0}, {"h2d_attending": 1.01},
     {"attend_loading": 1.01}],
)  # fmt: skip
def test_rates_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"PlanRates.{next(iter(changes))}"):
        replace(rates_from_law(OPT, NODE), **changes)


def test_attending_slows_loads_and_cpu_attention_only_once() -> None:
    rates = replace(
        random_rates(default_rng(3)), h2d_attending=0.4,
        attend=LineFit("CPU attention", 1e-6), attend_loading=0.8,
    )  # fmt: skip
    both = rates.attending()
    assert both.load_token_s == pytest.approx(rates.load_token_s / 0.4)
    assert both.attend is not None
    assert both.attend.per_token_s == pytest.approx(1e-6 / 0.8)
    assert both.attending() == both


def test_what_was_not_measured_slows_nothing_down() -> None:
    step = StepModel(token_s=1e-3, pair_s=0.0, weights_s=0.0, context_token_s=0.0, fixed_s=0.0)
    rates = PlanRates(
        "bare", 4, 100.0, 50.0, LineFit("load", 1e-6), LineFit("KV projection", 1e-6), step
    )
    assert rates.attending() == rates
    assert rates.attend_bytes_per_s == 0.0
    # 100 bytes in 1 us; half of them are activations; one layer of four is not hidden.
    assert rates.h2d_bytes_per_s == pytest.approx(1e8)
    assert (rates.activation_ratio, rates.serial_share) == (0.5, 0.25)
    assert replace(rates, overlap=0.9).serial_share == pytest.approx(0.1)
    # No step computes less than one token: 1 ms; 10 take 10 ms.
    assert rates.prefill_s(0, 500) == 1e-3 and rates.prefill_s(10, 500) == pytest.approx(1e-2)


def test_step_is_the_longer_of_compute_and_read_plus_fixed_cost() -> None:
    step = StepModel(token_s=2.0, pair_s=0.5, weights_s=30.0, context_token_s=0.25, fixed_s=7.0)
    rates = replace(random_rates(default_rng(1)), step=step, grid=None)
    # 4 new behind 8: GEMMs 8 beside 30 of weights; pairs 4·(8 + 2) = 40, 20 beside 12·0.25 = 3.
    assert rates.modelled_prefill_s(4, 8) == 30.0 + 20.0 + 7.0
    # 20 new: GEMMs 40; pairs 20·(8 + 10) = 360: 180.
    assert rates.modelled_prefill_s(20, 8) == 40.0 + 180.0 + 7.0
    # Besides there are 16 s of experts, each left alone by a token with probability 1/2: 16/4 by
    # two, who attend for 2·(8 + 1)·0.5 = 9 s.
    idle = replace(rates, step=replace(step, experts_s=16.0, expert_idle=0.5))
    assert idle.modelled_prefill_s(2, 8) == 30.0 + 12.0 + 9.0 + 7.0


# -- lines and grids ---------------------------------------------------------------------------


def test_line_has_no_fixed_cost_for_zero_tokens() -> None:
    line = LineFit("load", 2.0, 5.0, 0.995)
    assert [line.seconds(n) for n in (0, 1, 10)] == [0.0, 7.0, 25.0]
    assert line.scaled(4.0) == LineFit("load", 8.0, 5.0, 0.995)
    # Unless more is known, a line is exact and starts at zero.
    assert LineFit("load", 2.0) == LineFit("load", 2.0, 0.0, 1.0)


@pytest.mark.parametrize(("slope", "fixed", "r2"), [(0, 0, 1), (1, -1, 1), (1, 0, 2)])
def test_lines_that_cannot_be_are_refused(slope: float, fixed: float, r2: float) -> None:
    with pytest.raises(ValueError, match="the load fit"):
        LineFit("load", slope, fixed, r2)


def test_a_fit_is_planned_with_from_the_least_quality_on() -> None:
    LineFit("load", 1.0, r2=LEAST_R2).require()
    with pytest.raises(ValueError, match=r"the load fit has R² 0\.980, below 0\.98: measure again"):
        LineFit("load", 1.0, r2=LEAST_R2 - 1e-6).require()


def test_grid_is_exact_at_points_linear_between_and_flat_beyond() -> None:
    grid = ComputeGrid((1.0, 3.0), (0.0, 10.0), ((1.0, 2.0), (3.0, 8.0)))
    points = {(1, 0): 1.0, (3, 10): 8.0, (2, 0): 2.0, (2, 5): 3.5, (9, 99): 8.0, (0, 0): 1.0}
    assert {point: grid.seconds_at(*point) for point in points} == points


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
    new: Any, context: Any, seconds: Any, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        ComputeGrid(new, context, seconds)


# -- decoding steps ----------------------------------------------------------------------------


def test_decode_s_loads_only_tokens_not_made_from_activations() -> None:
    rates = opt_rates()
    link_s, gpu_s = rates.decode_s(4, 1_000, 400)
    assert link_s == pytest.approx(4 * (600 * 524_288 + 400 * 262_144) / 50e9)
    assert gpu_s == pytest.approx(rates.decode_s(4, 1_000)[1] + rates.project.seconds(4 * 400))
    assert rates.decode_s(4, 1_000)[1] == pytest.approx(rates.step.step_s([(1, 1_000)] * 4))


def test_decode_grid_replaces_the_law_inside_and_adds_beyond() -> None:
    rates = opt_rates()
    sequences, resident = (1.0, 8.0), (0.0, 4_000.0)
    law = [[rates.decode_gpu_s(b, r / b) for r in resident] for b in (1, 8)]
    grid = ComputeGrid(sequences, resident, tuple(tuple(1.3 * s for s in row) for row in law))
    measured = replace(rates, decode=grid)
    for b, row in zip((1, 8), law, strict=True):
        for r, seconds in zip(resident, row, strict=True):
            assert measured.decode_gpu_s(b, r / b) == pytest.approx(1.3 * seconds)
    # Beyond: the law, and what the nearest point lasts longer.
    beyond = rates.decode_gpu_s(32, 1_000)
    assert measured.decode_gpu_s(32, 1_000) == pytest.approx(beyond + 0.3 * law[1][1])


def test_measured_steps_of_both_kinds_replace_the_projections_line() -> None:
    rates = opt_rates()
    axes = (1.0, 8.0), (0.0, 4_000.0)
    from_kv = ComputeGrid(*axes, ((0.01, 0.05), (0.02, 0.06)))
    from_acts = ComputeGrid(*axes, ((0.01, 0.25), (0.02, 0.46)))
    measured = replace(rates, from_kv=from_kv, from_acts=from_acts)
    gpu_s = [measured.decode_s(8, 500, tokens)[1] for tokens in (0, 250, 500)]
    assert gpu_s == pytest.approx([0.06, 0.26, 0.46])
    # The link's seconds, and steps on the device, are as they were.
    assert measured.decode_s(8, 500, 250)[0] == rates.decode_s(8, 500, 250)[0]
    assert measured.decode_gpu_s(8, 500) == rates.decode_gpu_s(8, 500)


# -- fits --------------------------------------------------------------------------------------


def test_a_line_is_recovered_from_noisy_samples() -> None:
    sizes = [64, 128, 256, 512, 1024, 2048, 4096, 8192]
    noise = 1 + 0.02 * default_rng(0).standard_normal(len(sizes))
    fit = fit_line(
        "load", sizes, [(2e-6 * n + 1e-4) * e for n, e in zip(sizes, noise, strict=True)]
    )
    assert fit.per_token_s == pytest.approx(2e-6, rel=0.05) and fit.r2 > 0.99
    assert fit_line("load", sizes, [1, 9, 2, 8, 3, 9, 4, 12]).r2 < LEAST_R2


def test_least_squares_by_hand() -> None:
    # Means 2 and 4; slope ((-1)(-1) + 0 + 1·2) / 2 = 1.5, start 4 - 3 = 1. It says 2.5, 4, 5.5;
    # errors 0.25 + 1 + 0.25 = 1.5 of a spread of 1 + 1 + 4 = 6.
    with_start = fit_line("load", [1.0, 2.0, 3.0], [3.0, 3.0, 6.0])
    assert (with_start.per_token_s, with_start.fixed_s) == pytest.approx((1.5, 1.0))
    assert with_start.r2 == pytest.approx(1 - 1.5 / 6)
    # Below zero at zero tokens: through the origin instead, (1·1 + 2·4 + 3·7) / (1 + 4 + 9).
    through = fit_line("load", [1.0, 2.0, 3.0], [1.0, 4.0, 7.0])
    assert (through.per_token_s, through.fixed_s) == (pytest.approx(30 / 14), 0.0)


@pytest.mark.parametrize(
    ("sizes", "seconds", "problem"),
    [
        ([1, 2, 3], [3.0, 2.0, 1.0], "time must grow"),
        ([1, 1, 2], [1.0, 1.0, 2.0], "three different sizes"),
        ([1, 2, 3], [1.0], "one time each"),
    ],
)
def test_samples_without_a_line_are_refused(sizes: Any, seconds: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        fit_line("load", sizes, seconds)


@pytest.mark.parametrize(
    "step",
    [
        StepModel(token_s=2e-5, pair_s=1e-9, weights_s=3e-3, context_token_s=2e-8),
        StepModel(2e-5, 1e-9, 3e-3, 2e-8, fixed_s=1e-3),
        StepModel(2e-5, 0.0, 3e-3, 0.0),
    ],
)
def test_the_law_is_recovered_from_its_own_grid(step: StepModel) -> None:
    new, context = (1.0, 16.0, 64.0, 256.0, 1024.0, 4096.0), (0.0, 512.0, 2048.0, 8192.0, 32768.0)
    seconds = tuple(tuple(step.step_s([(int(t), int(s))]) for s in context) for t in new)
    fitted = fit_grid(ComputeGrid(new, context, seconds)).step.to_dict()
    assert fitted == pytest.approx(step.to_dict(), rel=0.02, abs=1e-10)
    assert min(fitted.values()) >= 0.0


def test_fit_grid_reads_compute_seconds_from_compute_bound_steps() -> None:
    # The row of one token waits 8 s for weights, the others compute 0.25 s a token + 1 s; all read
    # their KV after that.
    new, context = (1.0, 100.0, 200.0, 400.0), (0.0, 1000.0)
    seconds = tuple(
        tuple((8.0 if t == 1 else 1.0 + 0.25 * t) + 0.001 * (s + t) for s in context) for t in new
    )
    step = fit_grid(ComputeGrid(new, context, seconds)).step
    assert (step.token_s, step.context_token_s) == pytest.approx((0.25, 0.001), rel=1e-3)
    # Of the fixed second and the weights' seven together GEMMs hide all but one.
    assert step.weights_s + step.fixed_s == pytest.approx(8.0, rel=5e-3)
    assert step.exposed * step.weights_s + step.fixed_s == pytest.approx(1.0, rel=5e-3)


# -- measured ----------------------------------------------------------------------------------


def measured(**changes: Any) -> dict[str, Any]:
    new, context, sizes = [1, 64, 1024], [0, 1024, 8192], [128, 256, 512, 1024]
    return {
        "format": FORMAT,
        "device": "test", "model": "opt-6.7b", "dtype": "float16", "layers": 32,
        "kv_bytes_per_token": 524288, "activation_bytes_per_token": 262144,
        "load": {"tokens": sizes, "seconds": [4e-7 * n + 1e-5 for n in sizes]},
        "project": {"tokens": sizes, "seconds": [1e-7 * n + 5e-6 for n in sizes]},
        "grid": {
            "new_tokens": new,
            "context_tokens": context,
            "seconds": [[4e-3 + 3e-5 * t + 1e-9 * t * s for s in context] for t in new],
        },
        "h2d_bytes_per_s": 40e9,
        **changes,
    }  # fmt: skip


def test_measured_rates_are_those_of_all_layers(tmp_path: Path) -> None:
    rates = rates_from_measured(measured())
    assert rates.name == "opt-6.7b on test"
    assert rates.load_token_s == pytest.approx(32 * 4e-7)
    assert rates.project.fixed_s == pytest.approx(32 * 5e-6)
    assert rates.activation_ratio == 0.5
    assert rates.load.r2 == pytest.approx(1.0)
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(measured()), encoding="utf-8")
    assert rates_from_measured(path) == rates


def test_prefill_grid_overrides_the_law_inside_and_extends_it() -> None:
    rates = rates_from_measured(measured())
    assert rates.prefill_s(64, 1024) == pytest.approx(4e-3 + 3e-5 * 64 + 1e-9 * 64 * 1024)
    inside, edge = rates.prefill_s(1024, 8192), rates.prefill_s(2048, 8192)
    more_pairs = 2048 * (8192 + 1024) - 1024 * (8192 + 512)
    assert edge - inside == pytest.approx(1024 * 3e-5 + 1e-9 * more_pairs, rel=0.1)


NOISY = {"tokens": [1, 2, 3, 4, 5], "seconds": [1.0, 5.0, 2.0, 6.0, 3.0]}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"load": NOISY}, "the load fit has R²"),
        ({"project": NOISY}, "the KV projection fit has R²"),
        ({"format": "other"}, "format is 'other'"),
        ({"grid": {}}, "new_tokens"),
        ({"layers": None}, "profile again"),
        ({"h2d_bytes_per_s": "fast"}, "could not convert"),
        ({"h2d_bytes_per_s": 0.0}, "division by zero: profile again"),
    ],
)
def test_a_garbled_measurement_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        rates_from_measured(measured(**changes))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: cannot read the file of measured rates"):
        rates_from_measured(tmp_path / "none.json")


def test_law_written_as_a_measurement_is_read_back_as_the_law() -> None:
    law = rates_from_law(model_shape("llama-3.1-8b"), NODE)
    again = rates_from_measured(json.loads(json.dumps(as_measured(law, "m", "d"))))
    assert again.load_token_s == pytest.approx(law.load_token_s)
    assert again.project_token_s == pytest.approx(law.project_token_s)
    assert again.activation_ratio == law.activation_ratio
    for new, context in ((1, 0), (128, 8192), (512, 2048)):
        assert again.prefill_s(new, context) == pytest.approx(law.prefill_s(new, context))


def test_a_step_lasts_no_less_than_its_weights_take_to_cross() -> None:
    law = rates_from_law(SHAPES["llama-3.1-70b"], node_profile("h100-pcie5"))
    crossing = replace(law, weights_s=140e9 / 54e9)
    assert crossing.served_step.weights_s == crossing.weights_s > 30 * law.step.weights_s
    assert crossing.decode_s(8, 1000)[0] == law.decode_s(8, 1000)[0] + crossing.weights_s
    plain, streamed = (Planning(16, each).named("kv")(Cached(4096, 32)) for each in (law, crossing))
    assert streamed.load_s == pytest.approx(plain.load_s, rel=1e-9)
    assert streamed.compute_s == crossing.weights_s
    # KV queues behind the weights.
    assert streamed.ttft_s >= crossing.weights_s + plain.load_s
    again = rates_from_measured(as_measured(crossing, "llama", "node"))
    assert again.weights_s == crossing.weights_s


def test_ratio_at_which_loads_bind_moves_with_weights_that_cross() -> None:
    law = rates_from_law(SHAPES["llama-3.1-70b"], node_profile("h100-pcie5"))
    crossing = replace(law, weights_s=140e9 / 54e9)
    ratios = [kappa_eff(rates, "load", 128) for rates in (law, crossing)]
    assert ratios[1] > 10 * ratios[0]
