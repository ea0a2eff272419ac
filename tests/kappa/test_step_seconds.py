"""Formulas of a step, a load and a limit, by numbers worked out by hand; compiled and as Python."""

import math

import numpy as np
import pytest

from kappa import step_seconds
from kappa.compiled import interpreted
from kappa.cost import StepModel

CONSTANTS = {
    "token_s": 0.01, "pair_s": 0.0001, "weights_s": 0.5, "context_token_s": 0.001, "fixed_s": 0.2,
    "experts_s": 0.0, "expert_idle": 0.0, "exposed": 0.0, "comm_token_s": 0.0,
}  # fmt: skip


def record(constants):
    made = np.zeros(1, dtype=[(name, float) for name in constants])
    for name, value in constants.items():
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
    return made(of)


def made(of, **others):
    constants = CONSTANTS | others
    compiled = of("limit_s") is step_seconds.limit_s
    return record(constants) if compiled else StepModel(**constants)


def test_chunk_pairs_counts_half_of_the_pairs_among_new_tokens(of):
    assert of("chunk_pairs")(10.0, 100.0) == 10 * (100 + 5)


def test_computing_is_products_and_attention(of):
    assert of("computing_s")(10.0, 1050.0, 0.01, 0.0001) == pytest.approx(0.1 + 0.105)


@pytest.mark.parametrize("others, seconds", [
    # 60 tokens behind 100: GEMMs 0.6 hide the weights' 0.5; 7,800 pairs take 0.78, 160 reads 0.16.
    ({}, 0.6 + 0.78 + 0.2),
    # A quarter of the weights' 0.5 is not hidden.
    ({"exposed": 0.25}, 0.6 + 0.125 + 0.78 + 0.2),
    # Weights of 0.7 hide three quarters of the GEMMs.
    ({"exposed": 0.25, "weights_s": 0.7}, 0.7 + 0.15 + 0.78 + 0.2),
    # Reads of 1.6 hide attention's computing.
    ({"context_token_s": 0.01}, 0.6 + 1.6 + 0.2),
    # Each token is summed over the GPUs for 2 ms.
    ({"comm_token_s": 0.002}, 0.6 + 0.78 + 0.12 + 0.2),
    # 60 tokens leave next to no expert of 0.8 alone: weights take 1.3.
    ({"experts_s": 0.8, "expert_idle": 0.5}, 1.3 + 0.78 + 0.2),
])  # fmt: skip
def test_a_step_lasts_as_its_constants_say(of, others, seconds):
    found = of("steps_s")(made(of, **others), 1.0, 60.0, 60.0 * (100 + 30), 160.0)
    assert found == pytest.approx(seconds)


def test_steps_alike_share_their_work_but_not_the_weights(of):
    # Two steps of 30 tokens: weights 1.0 before 0.6 of GEMMs; 0.4 fixed.
    assert of("steps_s")(made(of), 2.0, 60.0, 0.0, 160.0) == pytest.approx(1.0 + 0.16 + 0.4)


@pytest.mark.parametrize("tokens, touched", [(1.0, 0.25), (2.0, 0.4375)])
def test_weights_read_s_grows_with_the_experts_touched(of, tokens, touched):
    # Of 8 experts a token uses 2, so leaves each alone with 3/4; two tokens with 9/16.
    mixture = made(of, experts_s=0.8, expert_idle=0.75)
    assert of("weights_read_s")(mixture, 1.0, tokens) == pytest.approx(0.5 + 0.8 * touched)
    assert of("weights_read_s")(mixture, 3.0, 3 * tokens) == pytest.approx(
        3 * (0.5 + 0.8 * touched)
    )


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
    # Of experts of 0.8 s it touches half.
    mixture = made(of, experts_s=0.8, expert_idle=0.5)
    assert of("limit_s")(mixture, 2.5, 4.0, 0.8) == pytest.approx(2.25 + 2.5 * 0.4)


@pytest.mark.parametrize("late, tiles", [(1.0, 1), (2.0, 2)])
def test_limited_tokens_are_whole_tiles_within_the_limit(of, step, late, tiles):
    # 4 decode over 800: limit 2.25, of it 0.8 to read their KV and 0.2 fixed: 1.25 for GEMMs, 1.21
    # beside theirs: 121 tokens, 125 with the others, 0.98 tiles; late by 2: 246, or 1.92 tiles.
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
