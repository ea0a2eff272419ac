"""Formulas of a step, a load and a limit, by numbers worked out by hand; compiled and as Python."""

import math

import numpy as np
import pytest

from kappa import step_seconds
from kappa.compiled import interpreted
from kappa.cost import StepModel

CONSTANTS = {
    "token_s": 0.01, "pair_s": 0.0001, "weights_s": 0.5, "context_token_s": 0.001, "fixed_s": 0.2,
}  # fmt: skip


def record():
    made = np.zeros(1, dtype=[(name, float) for name in CONSTANTS])
    for name, value in CONSTANTS.items():
        made[name] = value
    return made[0]


@pytest.fixture(params=["compiled", "interpreted"])
def of(request):
    """A formula by its name, either way."""
    turn = interpreted if request.param == "interpreted" else lambda function: function
    return lambda name: turn(getattr(step_seconds, name))


@pytest.fixture
def step(of):
    """A step's constants, as what calls a formula either way has them."""
    compiled = of("limit_s") is step_seconds.limit_s
    return record() if compiled else StepModel(**CONSTANTS)


def test_chunk_pairs_counts_half_of_the_pairs_among_new_tokens(of):
    assert of("chunk_pairs")(10.0, 100.0) == 10 * (100 + 5)


def test_a_step_lasts_the_longer_of_computing_and_reading(of):
    assert of("computing_s")(10.0, 1050.0, 0.01, 0.0001) == pytest.approx(0.1 + 0.105)
    assert of("reading_s")(2.0, 110.0, 0.5, 0.001) == pytest.approx(2 * 0.5 + 0.11)
    assert of("lasting_s")(0.205, 0.61, 0.2) == pytest.approx(0.81)
    assert of("lasting_s")(0.7, 0.61, 0.2) == pytest.approx(0.9)


def test_transfer_s_has_a_fixed_cost_only_where_something_moves(of):
    assert of("transfer_s")(100.0, 0.01, 0.5) == pytest.approx(1.5)
    assert of("transfer_s")(0.0, 0.01, 0.5) == 0.0


@pytest.mark.parametrize("tokens, logarithm", [
    (0, 0.0), (1, 0.0), (2, 0.2), (math.sqrt(8), 0.4), (4, 0.6), (1000, 0.6),
])  # fmt: skip
def test_factor_lies_between_those_of_the_powers_of_two(of, tokens, logarithm):
    found = of("factor")(np.array([0.0, 0.2, 0.6]), tokens)
    assert found == pytest.approx(math.exp(logarithm))


def test_limit_s_is_a_multiple_of_a_step_of_one_that_decodes(of, step):
    # 2.5 x (0.5 to read the weights + 0.8 / 4 its own context + 0.2).
    assert of("limit_s")(step, 2.5, 4.0, 0.8) == pytest.approx(2.25)


@pytest.mark.parametrize("late, tiles", [(1.0, 2), (2.0, 3)])
def test_limited_tokens_are_whole_tiles_within_the_limit(of, step, late, tiles):
    # 4 decode over 800: limit 2.25, beside 0.04 + 0.08 = 0.12, room 2.25 - 0.2 - 0.12 = 1.93.
    # Behind 0: 193 tokens, 197 with the others: 1.54 tiles; late by 2: 390, or 3.05 tiles.
    found = of("limited_tokens")(step, 2.5, 4.0, 800.0, 0.0, late)
    assert found == tiles * step_seconds.TILE_TOKENS


@pytest.mark.parametrize("most, decoding", [(0.0, 4.0), (2.5, 0.0)])
def test_limited_tokens_is_infinite_where_nothing_bounds_a_step(of, step, most, decoding):
    assert of("limited_tokens")(step, most, decoding, 800.0, 0.0, 1.0) == math.inf


def test_interpreted_formulas_take_arrays():
    new = np.array([10.0, 20.0])
    pairs = interpreted(step_seconds.chunk_pairs)(new, np.array([100.0, 0.0]))
    assert pairs.tolist() == [1050.0, 200.0]
    assert interpreted(step_seconds.computing_s)(new, pairs, 0.01, 0.0001) == pytest.approx(
        [0.205, 0.22]
    )
