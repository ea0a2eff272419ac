"""Lines and grids: recovered from what they were made of, refused where they explain too little."""

from __future__ import annotations

import pytest
from numpy.random import default_rng

from kappa.cost import StepModel
from kappa.plans.measured import fit_line, fit_step
from kappa.plans.rates import LEAST_R2, ComputeGrid, LineFit, require_fit

SIZES = [64, 128, 256, 512, 1024, 2048, 4096, 8192]


def test_a_line_is_recovered_from_noisy_samples() -> None:
    noise = 1 + 0.02 * default_rng(0).standard_normal(len(SIZES))
    fit = fit_line(
        "load", SIZES, [(2e-6 * n + 1e-4) * e for n, e in zip(SIZES, noise, strict=True)]
    )
    assert fit.per_token_s == pytest.approx(2e-6, rel=0.05)
    assert fit.r2 > 0.99
    assert require_fit(fit) is fit


def test_a_negative_fixed_cost_becomes_none() -> None:
    fit = fit_line("load", [1, 2, 3], [0.9, 2.0, 3.1])
    assert fit.fixed_s == 0.0
    assert fit.per_token_s == pytest.approx(2.0 / 2.0, rel=0.05)
    assert fit.seconds(0) == 0.0


def test_nothing_costs_nothing_though_something_has_a_fixed_cost() -> None:
    fit = LineFit("load", 2.0, 5.0)
    assert [fit.seconds(n) for n in (0, 1, 10)] == [0.0, 7.0, 25.0]
    assert fit.scaled(3.0).seconds(10) == 65.0


def test_a_poor_fit_is_refused_by_name() -> None:
    fit = fit_line("KV projection", SIZES, [1, 9, 2, 8, 3, 9, 4, 12])
    assert fit.r2 < LEAST_R2
    with pytest.raises(ValueError, match=r"the KV projection fit has R² 0\.\d+, below 0.98"):
        require_fit(fit)


def test_times_that_do_not_grow_are_refused() -> None:
    with pytest.raises(ValueError, match="time must grow"):
        fit_line("load", [1, 2, 3], [3.0, 2.0, 1.0])
    with pytest.raises(ValueError, match="three different sizes"):
        fit_line("load", [1, 1, 2], [1.0, 1.0, 2.0])
    with pytest.raises(ValueError, match="one time each"):
        fit_line("load", [1, 2, 3], [1.0])


@pytest.mark.parametrize(("slope", "fixed", "r2"), [(0, 0, 1), (1, -1, 1), (1, 0, 2)])
def test_lines_that_cannot_be_are_refused(slope: float, fixed: float, r2: float) -> None:
    with pytest.raises(ValueError, match="the load fit"):
        LineFit("load", slope, fixed, r2)


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
    assert require_fit(LineFit("load", 1.0, r2=LEAST_R2)).r2 == LEAST_R2
    with pytest.raises(ValueError, match="measure again"):
        require_fit(LineFit("load", 1.0, r2=LEAST_R2 - 1e-6))


def test_a_line_scales_with_its_tokens_and_keeps_its_fixed_cost() -> None:
    line = LineFit("load", 2.0, 5.0, 0.995)
    assert line.seconds(3) == 3 * 2.0 + 5.0
    assert line.scaled(4.0) == LineFit("load", 8.0, 5.0, 0.995)
    # Unless more is known, a line is exact and starts at zero.
    assert LineFit("load", 2.0) == LineFit("load", 2.0, 0.0, 1.0)


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
