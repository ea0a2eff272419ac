"""The compiled sums from which engines are learnt, against numpy and the standard library."""

import statistics
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kappa import step_seconds
from kappa.compiled import interpreted
from kappa_router import engine_fit
from kappa_router.engine_fit import GAP, LOAD, STEP, TTFT, Observation, middle, observed, spreads


def table(*rows):
    return np.array([tuple(row) for row in rows], dtype=engine_fit.OBSERVATION)


def steps(seconds, tokens, **more):
    return Observation(STEP, seconds, steps=1.0, tokens=tokens, reads=tokens, **more)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_middle_is_the_median(values):
    assert middle(np.array(values)) == statistics.median(values)


def test_places_without_an_observation_are_left_out():
    nothing, wait = Observation(STEP, 0.0), Observation(TTFT, 1.0, 0.2, number=3)
    rows, later, places = observed(table(nothing, wait, steps(0.1, 8)), np.array([5, 0, 7, 0.0]), 2)
    assert rows["seconds"].tolist() == [1.0, 0.1] and places.tolist() == [-1, 0, 1]
    assert later.tolist() == [4.0, 5.0]
    assert rows["known_s"].tolist() == [0.4, 0.0]


def test_waiting_is_never_all_of_a_first_token():
    rows, _, _ = observed(table(Observation(TTFT, 1.0, 0.5)), np.zeros(4), 3.0)
    assert rows["known_s"][0] == 0.9


def test_spread_is_about_the_middle_since_the_last_change():
    stale = steps(1.0, 8, stale=1.0)
    rows = table(*[steps(1.0, 8)] * 3, stale, Observation(GAP, 1.0), Observation(LOAD, 1.0))
    counts, medians = spreads(rows, np.array([1.0, 1.2, 1.5, 9.0, 4.0, 0.0]))
    assert counts.tolist() == [3, 1, 0, 1]
    assert medians == pytest.approx([0.2, 0.0, 0.0, 0.0])


def test_fit_leaves_nan_for_its_caller_to_check():
    theta, some = np.zeros(23), np.full(len(engine_fit.CONSTANTS), 1e-3)
    prior = engine_fit.Prior(some, some, np.ones(23), np.ones(23))
    engine_fit.fit(table(steps(np.nan, 8)), theta, prior, np.ones(4), np.ones(1))
    assert np.isnan(theta).any()


FIGURES = st.floats(0.0, 1e-2)


@given(
    st.fixed_dictionaries(dict.fromkeys(engine_fit.CONSTANTS, FIGURES)), st.floats(0, 1),
    st.floats(0, 1), st.tuples(st.floats(1.0, 1e5), st.floats(0.0, 1e5), st.floats(0.0, 1e5)),
)  # fmt: skip
def test_expected_step_is_that_of_the_formulas(figures, idle, exposed, work):
    figures |= {"expert_idle": idle, "exposed": exposed}
    values = np.array([figures[name] for name in engine_fit.CONSTANTS])
    tokens, pairs, reads = work
    row = Observation(STEP, 1.0, steps=1.0, tokens=tokens, pairs=pairs, reads=reads)
    theta = np.zeros(engine_fit.PARAMETERS)
    nothing = np.zeros((len(theta), len(theta)))
    found, _ = engine_fit.expected(table(row), theta, nothing, values, np.zeros(len(values)))
    wanted_s = interpreted(step_seconds.steps_s)(SimpleNamespace(**figures), 1.0, *work)
    assert found[0] == pytest.approx(wanted_s, rel=1e-9, abs=1e-8)
