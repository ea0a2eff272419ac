"""Fits recover the law that samples were made by, and say how well they do."""

from __future__ import annotations

import numpy as np
import pytest

from kappa.cost import StepModel, StepWork, chunk_work, decode_work
from kappa.plans.measured import fit_line, fit_steps, not_negative, rate_steps
from kappa.plans.rates import LEAST_R2

LAW = StepModel(token_s=1e-4, pair_s=2e-8, weights_s=5e-3, context_token_s=4e-7, fixed_s=1e-3)
PREFILLS = [chunk_work(float(n), float(c)) for n in (1, 16, 64, 256, 1024) for c in (0, 512, 4096)]
DECODES = [decode_work(float(b), float(b * c)) for b in (2, 8, 32) for c in (16, 512, 4096)]
WORKS = [*PREFILLS, *DECODES]


def seconds_by(law: StepModel) -> list[float]:
    return [law.parts(work).step_s for work in WORKS]


def test_the_constants_of_steps_come_back() -> None:
    found = fit_steps(WORKS, seconds_by(LAW))
    assert found.step.to_dict() == pytest.approx(LAW.to_dict(), rel=1e-3)
    assert found.r2 == pytest.approx(1.0) and found.steps == len(WORKS)
    assert found.error == pytest.approx(0.0, abs=1e-4)


def test_reads_that_no_step_shows_change_no_step() -> None:
    law = StepModel(1e-4, 0.0, 0.0, 0.0, 2e-3)
    found = fit_steps(WORKS, seconds_by(law)).step
    assert (found.token_s, found.fixed_s) == pytest.approx((1e-4, 2e-3))
    assert [found.parts(w).step_s for w in WORKS] == pytest.approx(seconds_by(law))


def test_fit_steps_barely_moves_with_a_few_disturbed_steps() -> None:
    seconds = seconds_by(LAW)
    for index in (2, 9, 17):
        seconds[index] *= 3.0
    found = fit_steps(WORKS, seconds)
    assert found.step.token_s == pytest.approx(LAW.token_s, rel=0.03)
    assert found.step.weights_s + found.step.fixed_s == pytest.approx(6e-3, rel=0.03)
    # Step 9 is 256 tokens, 33 ms: what was disturbed is in the R² all the same.
    assert found.r2 < 1.0 and found.error < 0.01


def test_a_fit_says_how_much_of_other_physics_it_explains() -> None:
    # Seconds that grow with the square root of the tokens: no constants say that.
    found = fit_steps(WORKS, [float(np.sqrt(work.tokens)) for work in WORKS])
    assert found.r2 < LEAST_R2


def test_how_near_a_model_comes_is_by_hand() -> None:
    works = [StepWork(float(n), 0.0, 0.0) for n in (1, 2, 3)]
    rated = rate_steps(StepModel(1.0, 0.0, 0.0, 0.0), works, [1.0, 2.5, 4.0])
    # Residuals 0, 0.5, 1 about a mean of 2.5: 1.25 of 4.5; relative 0, 0.2, 0.25.
    assert rated.r2 == pytest.approx(1 - 1.25 / 4.5)
    assert rated.error == pytest.approx(0.2) and rated.steps == 3


@pytest.mark.parametrize(
    ("works", "seconds", "why"),
    [
        (WORKS[:4], [1.0] * 4, "4 steps and 4 times"),
        (WORKS[:6], [1.0] * 5, "6 steps and 5 times"),
        (WORKS[:5], [1.0, 1.0, 0.0, 1.0, 1.0], r"shortest 0\.0 s"),
        (WORKS, [2.0] * len(WORKS), "none of 24 steps shows"),
    ],
)
def test_steps_that_say_too_little_are_refused(works, seconds, why) -> None:
    with pytest.raises(ValueError, match=why):
        fit_steps(works, seconds)


def test_fit_line_relative_is_as_near_at_small_sizes_as_at_large() -> None:
    # The largest size is a tenth slower than the line 1 + n of the others.
    sizes, seconds = [1.0, 8.0, 64.0, 256.0, 4096.0], [2.0, 9.0, 65.0, 257.0, 4506.7]
    near, far = (fit_line("load", sizes, seconds, relative=way) for way in (True, False))
    assert near.seconds(1.0) == pytest.approx(2.0, rel=0.05)
    assert near.seconds(4096.0) == pytest.approx(4506.7, rel=0.1)
    assert abs(far.seconds(1.0) - 2.0) > 0.3


def test_a_coefficient_below_zero_is_none() -> None:
    columns = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    # Least squares alone says (3, -1): with the second at zero the first is (3 + 2) / 2.
    assert not_negative(columns, np.array([3.0, -1.0, 2.0])) == pytest.approx([2.5, 0.0])
    twice = np.array([[1.0, 1.0], [2.0, 2.0]])
    assert not_negative(twice, np.array([1.0, 2.0])) == pytest.approx([1.0, 0.0])
