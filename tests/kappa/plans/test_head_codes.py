"""Maps before hash codes: products keep their order, and files give back what was written."""

import numpy as np
import pytest

from kappa.plans.head_codes import CodeMaps, Moments, balanced, code_maps, from_json, to_json


def test_balance_of_unequal_directions_by_hand():
    # Queries vary by 1 and 4, keys by 4 and 1: A² is the geometric mean of (1, 1/16) and (16, 1).
    got = balanced(np.diag([1.0, 16.0]), np.diag([16.0, 1.0]))
    assert got == pytest.approx(np.diag([1.0, 0.25]), rel=0.01)


def drawn(seed=0, count=400, size=6):
    rng = np.random.default_rng(seed)
    queries = rng.normal(size=(count, size)) @ rng.normal(size=(size, size))
    keys = rng.normal(size=(count, size)) @ rng.normal(size=(size, size)) + 5 * rng.normal(
        size=size
    )
    return queries, keys


def maps_of(queries, keys):
    moments = Moments(
        (queries.T @ queries)[None, None], (keys.T @ keys)[None, None], keys.sum(0)[None, None],
        len(keys),
    )  # fmt: skip
    return code_maps(moments)


def test_mapped_products_order_keys_as_they_were_and_sides_are_alike():
    queries, keys = drawn()
    maps = maps_of(queries, keys)
    assert maps.centre[0, 0] == pytest.approx(keys.mean(axis=0))
    asked = queries @ maps.balance[0, 0]
    stored = (keys - maps.centre[0, 0]) @ maps.inverse()[0, 0]
    order = np.argsort(queries @ keys.T, axis=1)
    assert (np.argsort(asked @ stored.T, axis=1) == order).all()
    sides = [x.T @ x / np.trace(x.T @ x) for x in (asked, stored)]
    assert np.abs(sides[0] - sides[1]).max() < 0.01


def test_bits_of_mapped_vectors_find_more_of_the_best_keys():
    queries, keys = drawn()
    maps = maps_of(queries, keys)
    planes = np.random.default_rng(1).normal(size=(6, 256))

    def found(asked, stored):
        bits = np.sign(asked @ planes) @ np.sign(stored @ planes).T
        pairs = zip(np.argsort(bits), np.argsort(queries @ keys.T), strict=True)
        return np.mean([len(set(a[-40:]) & set(b[-40:])) / 40 for a, b in pairs])

    plain = found(queries, keys)
    stored = (keys - maps.centre[0, 0]) @ maps.inverse()[0, 0]
    assert found(queries @ maps.balance[0, 0], stored) > plain + 0.05


def test_sums_of_texts_add_up():
    one = Moments(np.ones((1, 1, 2, 2)), np.ones((1, 1, 2, 2)), np.ones((1, 1, 2)), 3)
    both = one + one
    assert both.count == 6 and both.queries.sum() == 8 and both.sums.tolist() == [[[2.0, 2.0]]]


def test_maps_of_heads_that_are_always_zero_are_finite():
    zero = Moments(np.zeros((1, 1, 2, 2)), np.zeros((1, 1, 2, 2)), np.zeros((1, 1, 2)), 3)
    assert np.isfinite(code_maps(zero).inverse()).all()


def test_file_gives_back_maps_in_half_precision():
    maps = maps_of(*drawn(3))
    got = from_json(to_json(maps), 1, 1, 6)
    assert got.centre == pytest.approx(maps.centre, rel=1e-3)
    assert got.balance == pytest.approx(maps.balance, abs=1e-3)
    assert (got.balance == np.swapaxes(got.balance, -1, -2)).all()


GOOD = to_json(CodeMaps(np.zeros((1, 1, 2)), np.eye(2)[None, None]))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("high", "give centre and balance"),
        ({"centre": GOOD["centre"]}, "give centre and balance"),
        ({**GOOD, "centre": "?"}, "centre is no base64 of 2 finite half-precision numbers, 2 for"),
        ({**GOOD, "centre": 5}, "centre is no base64"),
        ({**GOOD, "balance": GOOD["centre"]}, "balance is no base64 of 3"),
        ({**GOOD, "centre": "AHwAfA=="}, "centre is no base64 of 2 finite"),
    ],
)
def test_other_data_is_refused_with_what_belongs_there(data, why):
    with pytest.raises(ValueError, match=why):
        from_json(data, 1, 1, 2)
