"""Thresholds and difficulty of heads as paper 004 has them; files of importance, good and bad."""

import json
from dataclasses import replace

import numpy as np
import pytest

from kappa.plans.clo import (
    FORMAT,
    HeadProfile,
    aggregate,
    difficulty,
    equal_heads,
    heads_to_dict,
    read_heads,
    thresholds,
)
from kappa.shapes import model_shape

SHAPE = replace(model_shape("llama-3.1-8b"), layers=2, heads=4, kv_heads=2)


def test_thresholds_at_the_papers_eta_and_power():
    got = thresholds(np.array([0.0, 0.5, 0.75, 0.9, 1.0]), 0.8, 3.0)
    assert got == pytest.approx([-1.0, -0.95, -0.49, 0.25, 0.8], abs=0.006)


@pytest.mark.parametrize("seed", range(5))
def test_thresholds_rise_with_importance_and_fall_with_the_power(seed):
    scores = np.sort(np.random.default_rng(seed).random(50))
    for eta in (0.2, 0.8, 0.99):
        lower, upper = thresholds(scores, eta, 3.0), thresholds(scores, eta, 2.0)
        assert (np.diff(lower) >= 0).all() and (lower <= upper + 1e-12).all()
        assert lower.min() >= -1.0 and upper.max() <= eta + 1e-12


@pytest.mark.parametrize(("eta", "power"), [(1.5, 3.0), (-1.1, 3.0), (0.8, 0.0)])
def test_thresholds_refuse_what_is_no_cosine_or_power(eta, power):
    with pytest.raises(ValueError, match="give a cosine"):
        thresholds(np.ones(2), eta, power)


def test_aggregation_is_the_weighted_harmonic_mean():
    similarity = np.array([0.9, 0.3])
    assert aggregate(similarity, np.array([1.0, 1.0])) == pytest.approx(2 / (1 / 0.9 + 1 / 0.3))
    # All alike: the value itself, whatever the weights.
    assert aggregate(np.full(3, 0.7), np.array([0.1, 0.9, 0.4])) == pytest.approx(0.7)
    # The unlike head counts, the more the more it matters.
    assert aggregate(similarity, np.array([0.1, 0.9])) < aggregate(similarity, np.array([0.9, 0.1]))


def test_aggregation_where_the_formula_has_no_value():
    assert aggregate(np.array([0.5, 0.1]), np.zeros(2)) == pytest.approx(0.3)
    # A cosine of zero or less counts as the least one: a miss, not a division by zero.
    for low in (0.0, -0.4):
        got = aggregate(np.array([0.9, low]), np.ones(2))
        assert 0 < got < 0.003


def test_difficulty_is_above_zero_where_queries_are_too_unlike():
    hard = difficulty(np.array([0.8, 0.8]), np.array([0.85, 0.95]), 0.1)
    assert hard == pytest.approx([0.05, -0.05])


def test_a_group_matters_as_its_most_important_head():
    profile = HeadProfile(np.array([[0.1, 0.6, 0.3, 0.2]]))
    assert profile.kv_importance(2).tolist() == [[0.6, 0.3]]


def test_a_file_gives_back_what_was_written(tmp_path):
    rng = np.random.default_rng(1)
    written = HeadProfile(rng.random((2, 4)), rng.random((2, 2)))
    path = tmp_path / "heads.json"
    path.write_text(json.dumps(heads_to_dict(written, "m", "measured")))
    got = read_heads(path, SHAPE)
    assert np.array_equal(got.importance, written.importance)
    assert np.array_equal(got.similarity, written.similarity) and got.source == str(path)
    path.write_text(json.dumps(heads_to_dict(equal_heads(SHAPE), "m")))
    assert read_heads(path, SHAPE).similarity is None


GOOD = {"format": FORMAT, "importance": [[0.5] * 4] * 2}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format": "other"}, "format is 'other'"),
        ({"importance": [[0.5] * 4] * 3}, r"shape \(3, 4\): give 2 layers of 4 numbers"),
        ({"importance": [[0.5] * 2] * 2}, r"shape \(2, 2\): give 2 layers of 4"),
        ({"importance": [[0.5] * 4, [0.5]]}, "no table of numbers"),
        ({"importance": "high"}, "no table of numbers"),
        ({"importance": [[0.5] * 4, [0.1, 0.2, 1.5, 0.1]]}, "layer 1, head 2 is 1.5"),
        ({"importance": [[0.5] * 4, [0.1, -0.2, 0.5, 0.1]]}, "layer 1, head 1 is -0.2"),
        ({"importance": [[0.5] * 4, [0.1, None, 0.5, 0.1]]}, "layer 1, head 1 is nan"),
        ({"similarity": [[0.5] * 4] * 2}, r"similarity has the shape \(2, 4\): give 2 layers of 2"),
        ({"similarity": [[0.5, -1.5]] * 2}, "similarity of layer 0, head 1"),
        ({"scores": 1}, "unknown keys scores"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path, changes, why):
    path = tmp_path / "heads.json"
    path.write_text(json.dumps({**GOOD, **changes}))
    with pytest.raises(ValueError, match=why) as caught:
        read_heads(path, SHAPE)
    assert str(path) in str(caught.value)


def test_what_is_no_file_of_scores_is_refused(tmp_path):
    path = tmp_path / "heads.json"
    path.write_text(json.dumps({"format": FORMAT}))
    with pytest.raises(ValueError, match="'importance' is missing"):
        read_heads(path, SHAPE)
    with pytest.raises(ValueError, match="cannot read the head importance"):
        read_heads(tmp_path / "none.json", SHAPE)
    with pytest.raises(ValueError, match=r"give a score in \[0, 1\]"):
        equal_heads(SHAPE, 1.2)
