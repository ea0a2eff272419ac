"""Rates from measurements: lines and grids recovered from what they were made of, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from numpy.random import default_rng

from kappa.cost import StepModel
from kappa.hardware import NodeProfile
from kappa.plans.rates import (
    FORMAT,
    LEAST_R2,
    ComputeGrid,
    as_measured,
    fit_line,
    fit_step,
    rates_from_law,
    rates_from_measured,
)
from kappa.shapes import model_shape

SIZES = [64, 128, 256, 512, 1024, 2048, 4096, 8192]


def test_a_line_is_recovered_from_noisy_samples() -> None:
    noise = 1 + 0.02 * default_rng(0).standard_normal(len(SIZES))
    fit = fit_line(
        "load", SIZES, [(2e-6 * n + 1e-4) * e for n, e in zip(SIZES, noise, strict=True)]
    )
    assert fit.per_token_s == pytest.approx(2e-6, rel=0.05)
    assert fit.r2 > 0.99
    fit.require()


def test_a_negative_fixed_cost_becomes_none() -> None:
    fit = fit_line("load", [1, 2, 3], [0.9, 2.0, 3.1])
    assert fit.fixed_s == 0.0
    assert fit.per_token_s == pytest.approx(2.0 / 2.0, rel=0.05)
    assert fit.seconds(0) == 0.0


def test_a_poor_fit_is_refused_by_name() -> None:
    fit = fit_line("KV projection", SIZES, [1, 9, 2, 8, 3, 9, 4, 12])
    assert fit.r2 < LEAST_R2
    with pytest.raises(ValueError, match=r"the KV projection fit has R² 0\.\d+, below 0.98"):
        fit.require()


def test_times_that_do_not_grow_are_refused() -> None:
    with pytest.raises(ValueError, match="time must grow"):
        fit_line("load", [1, 2, 3], [3.0, 2.0, 1.0])
    with pytest.raises(ValueError, match="three different sizes"):
        fit_line("load", [1, 1, 2], [1.0, 1.0, 2.0])
    with pytest.raises(ValueError, match="one time each"):
        fit_line("load", [1, 2, 3], [1.0])


def grid_of(step: StepModel) -> ComputeGrid:
    new, context = (1, 16, 64, 256, 1024, 4096), (0, 512, 2048, 8192, 32768)
    return ComputeGrid(
        tuple(map(float, new)),
        tuple(map(float, context)),
        tuple(tuple(step.step_s([(t, s)]) for s in context) for t in new),
    )


def test_the_law_is_recovered_from_its_own_grid() -> None:
    step = StepModel(token_s=2e-5, pair_s=1e-9, weights_s=3e-3, context_token_s=2e-8)
    fitted = fit_step(grid_of(step))
    assert fitted.token_s == pytest.approx(step.token_s, rel=0.02)
    assert fitted.pair_s == pytest.approx(step.pair_s, rel=0.02)
    assert fitted.weights_s == pytest.approx(step.weights_s, rel=0.02)
    assert fitted.context_token_s == pytest.approx(step.context_token_s, rel=0.02)


def test_a_fixed_cost_is_told_from_the_reads() -> None:
    fitted = fit_step(grid_of(StepModel(2e-5, 1e-9, 3e-3, 2e-8, fixed_s=1e-3)))
    assert fitted.fixed_s == pytest.approx(1e-3, rel=0.02)
    assert fitted.weights_s == pytest.approx(3e-3, rel=0.02)


def test_a_law_without_attention_has_none_fitted() -> None:
    fitted = fit_step(grid_of(StepModel(2e-5, 0.0, 3e-3, 0.0)))
    assert fitted.pair_s == pytest.approx(0.0, abs=1e-14)
    assert fitted.context_token_s == pytest.approx(0.0, abs=1e-14)
    assert min(fitted.pair_s, fitted.context_token_s) >= 0.0


def test_least_squares_by_hand() -> None:
    # Means 2 and 4; slope ((-1)(-1) + 0 + 1·2) / 2 = 1.5, start 4 - 3 = 1. It says 2.5, 4, 5.5;
    # errors 0.25 + 1 + 0.25 = 1.5 of a spread of 1 + 1 + 4 = 6.
    with_start = fit_line("load", [1.0, 2.0, 3.0], [3.0, 3.0, 6.0])
    assert (with_start.per_token_s, with_start.fixed_s) == pytest.approx((1.5, 1.0))
    assert with_start.r2 == pytest.approx(1 - 1.5 / 6)
    # Below zero at zero tokens: through the origin instead, (1·1 + 2·4 + 3·7) / (1 + 4 + 9).
    through = fit_line("load", [1.0, 2.0, 3.0], [1.0, 4.0, 7.0])
    assert (through.per_token_s, through.fixed_s) == (pytest.approx(30 / 14), 0.0)


def test_the_law_is_in_seconds_of_the_steps_that_compute_longer_than_they_read() -> None:
    # The row of one token reads: 8 + 0.001·(context + 1). The others compute 0.25 s a token + 1 s.
    new, context = (1.0, 100.0, 200.0, 400.0), (0.0, 1000.0)
    reads = tuple(8.0 + 0.001 * (s + 1.0) for s in context)
    computed = tuple(tuple(1.0 + 0.25 * t for _ in context) for t in new[1:])
    step = fit_step(ComputeGrid(new, context, (reads, *computed)))
    assert (step.token_s, step.fixed_s) == pytest.approx((0.25, 1.0))
    # The reads' row has the fixed second inside.
    assert (step.weights_s, step.context_token_s) == pytest.approx((8.0 - 1.0, 0.001))


NODE = NodeProfile(
    name="h200", gpu="H200", link_name="PCIe 5", h2d_bytes_per_s=50e9, flops_per_s=600e12,
    hbm_bytes_per_s=4.8e12, load_fixed_s=1e-4, step_fixed_s=2e-4,
)  # fmt: skip


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
    busy = rates.while_cpu_busy()
    assert busy.load_token_s == pytest.approx(rates.load_token_s * 40 / 36)
    assert busy.weights_load_s == pytest.approx(rates.weights_load_s * 40 / 36)
    assert busy.while_cpu_busy() == busy  # never charged twice


def test_rates_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(measured()), encoding="utf-8")
    assert rates_from_measured(path) == rates_from_measured(measured())


@pytest.mark.parametrize("name", ["load", "project"])
def test_a_file_with_a_poor_fit_is_refused_by_its_name(name: str) -> None:
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


def test_a_law_in_the_form_of_a_measurement_is_read_back_as_the_law() -> None:
    law = rates_from_law(model_shape("llama-3.1-8b"), NODE)
    again = rates_from_measured(json.loads(json.dumps(as_measured(law, "m", "d"))))
    assert again.load_token_s == pytest.approx(law.load_token_s)
    assert again.project_token_s == pytest.approx(law.project_token_s)
    assert again.activation_ratio == law.activation_ratio
    for new, context in ((1, 0), (128, 8192), (512, 2048)):
        assert again.prefill_s(new, context) == pytest.approx(law.prefill_s(new, context))
