"""Compiled loops: the same results as without a compiler, with a place to keep them or none."""

import math

import numpy as np
import pytest

from kappa import compiled as module
from kappa.compiled import compiled


def _ratio(a: float, b: float) -> float:
    return a / b


def test_a_division_by_zero_is_infinite_as_with_arrays():
    assert compiled(_ratio)(1.0, 0.0) == math.inf
    assert math.isnan(compiled(_ratio)(0.0, 0.0))


def test_where_nothing_may_be_written_it_is_compiled_all_the_same(monkeypatch):
    asked = []

    def njit(cache=False, **options):
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    real = module.njit
    monkeypatch.setattr(module, "njit", njit)
    assert compiled(_ratio)(1.0, 4.0) == 0.25
    assert asked == [True, False]


def test_other_errors_are_not_hidden(monkeypatch):
    def njit(**options):
        raise TypeError("an option that numba does not know")

    monkeypatch.setattr(module, "njit", njit)
    with pytest.raises(TypeError, match="does not know"):
        compiled(_ratio)


def test_loops_give_what_python_gives():
    from router.pricing import prefill_s

    cells = np.random.default_rng(0).uniform(0.5, 2.0, (40, 3))
    for slot in range(3):
        asked = (cells, slot, 1000.0, 400.0, 3.0, 5000.0)
        assert prefill_s(*asked) == pytest.approx(prefill_s.py_func(*asked), rel=1e-12)
