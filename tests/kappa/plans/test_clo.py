"""CLO: budgets and seconds of sparse decoding, and files of head importance."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from kappa.hardware import node_profile
from kappa.plans.clo import (
    FORMAT,
    CloConfig,
    HeadProfile,
    SparseSettings,
    equal_heads,
    gates,
    group_similarity,
    head_bytes,
    heads_json,
    layer_seconds,
    persistent_heads,
    persistent_share,
    prefetchable_heads,
    read_heads,
    sparse_plan,
    thresholds,
)
from kappa.plans.head_codes import CodeMaps
from kappa.plans.rates import rates_from_law
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


def test_a_group_matters_as_its_most_important_head():
    profile = HeadProfile(np.array([[0.1, 0.6, 0.3, 0.2]]))
    assert profile.kv_importance(2).tolist() == [[0.6, 0.3]]


def test_gates_are_where_a_squared_loss_and_the_penalty_balance():
    # λ/2 = 2, the quarter of (1, 2, 4, 8, 16): 1 - 2/4 = 0.5, 1 - 2/8, 1 - 2/16.
    damage = np.array([[1.0, 4.0, 16.0, 2.0, 8.0]])
    assert gates(damage).tolist() == [[0.0, 0.5, 0.875, 0.0, 0.75]]
    # Half of the heads spared.
    assert gates(damage, 0.5).tolist() == [[0.0, 0.0, 0.75, 0.0, 0.5]]
    assert gates(np.zeros((2, 2))).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert gates(np.array([0.0, 0.0, 3.0])).tolist() == [0.0, 0.0, 1.0]


def test_group_similarity_is_the_mean_of_eq_10_over_steps():
    # One layer, two groups of two heads: 3 / (1/0.5 + 2/1) = 0.75, 3 / (1/1 + 2/0.5) = 0.6; without
    # importance 2 / (1/0.5 + 1/1) = 2/3, 2 / (1/0.001 + 1/1).
    cosines = np.array([[[0.5, 1.0, 0.5, 1.0]], [[1.0, 0.5, -0.3, 1.0]]])
    got = group_similarity(cosines, np.array([[0.25, 0.5, 0.0, 0.0]]), 2)
    assert got == pytest.approx(np.array([[0.675, (2 / 3 + 2 / 1001) / 2]]))


def test_a_file_gives_back_what_was_written(tmp_path):
    rng = np.random.default_rng(1)
    maps = CodeMaps(np.zeros((2, 2, 128)), np.tile(np.eye(128), (2, 2, 1, 1)))
    written = HeadProfile(rng.random((2, 4)), rng.random((2, 2)), codes=maps)
    path = tmp_path / "heads.json"
    path.write_text(heads_json(written, "m", "measured"))
    got = read_heads(path, SHAPE)
    assert np.allclose(got.importance, written.importance, atol=1e-6)
    assert np.allclose(got.similarity, written.similarity, atol=1e-6) and got.source == str(path)
    assert np.array_equal(got.codes.balance, maps.balance)
    path.write_text(heads_json(equal_heads(SHAPE), "m", ""))
    assert read_heads(path, SHAPE).similarity is None is read_heads(path, SHAPE).codes


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
        ({"codes": {"centre": ""}}, "codes: give centre and balance"),
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


LLAMA = model_shape("llama-3.1-8b")


QWEN = model_shape("qwen2.5-14b")


CLO = CloConfig()
SPARSE = SparseSettings(CLO, chunk_tokens=128)


FIRST = (tuple(range(8)), *[()] * 31)


@pytest.mark.parametrize(
    ("name", "link", "hbm", "expected"),
    [("A40", 25e9, 696e9, 2.3), ("H200", 50e9, 4.8e12, 0.8)],
)
def test_prefetchable_heads_of_llama_at_128k(name, link, hbm, expected):
    # A decoding step of one sequence reads each layer's weights, and the resident tokens.
    weights = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    resident = 8 * head_bytes(LLAMA, CLO.chosen_tokens(131_072) + 68)
    got = prefetchable_heads(LLAMA, CLO, 131_072, (weights + resident) / hbm, link)
    assert got == pytest.approx(expected, rel=0.15)


def profile(rng, shape=LLAMA):
    importance = rng.random((shape.layers, shape.heads))
    return HeadProfile(importance, rng.uniform(-0.2, 1.0, (shape.layers, shape.kv_heads)))


@pytest.mark.parametrize("seed", range(20))
def test_persistent_heads_are_the_hardest_beyond_what_is_hidden(seed):
    rng = np.random.default_rng(seed)
    heads, hidden = profile(rng), float(rng.uniform(0, 8))
    chosen = persistent_heads(LLAMA, CLO, heads, hidden)
    assert chosen[0] == tuple(range(8))
    hard = thresholds(heads.kv_importance(8), 0.8, 3.0) - (heads.similarity - 0.1)
    for layer in range(1, 32):
        wanted = max(int((hard[layer] > 0).sum()) - int(hidden), 0)
        assert len(chosen[layer]) == wanted
        others = [hard[layer, h] for h in range(8) if h not in chosen[layer]]
        kept = [hard[layer, h] for h in chosen[layer]]
        assert not kept or min(kept) > 0
        assert not (kept and others) or min(kept) >= max(others)


def test_with_less_memory_the_first_layer_then_the_hardest_stay():
    heads = profile(np.random.default_rng(3))
    every = persistent_heads(LLAMA, CLO, heads, 0.0)
    total = sum(map(len, every))
    assert persistent_share(LLAMA, every) == pytest.approx(total / 256)
    before = every
    for most in (total, total - 7, 12, 8, 3, 0):
        fewer = persistent_heads(LLAMA, CLO, heads, 0.0, most_heads=most)
        assert sum(map(len, fewer)) == most
        assert all(set(now) <= set(then) for now, then in zip(fewer, before, strict=True))
        assert len(fewer[0]) == min(8, most)
        before = fewer


def test_persistent_heads_are_the_first_without_similarities():
    assert persistent_heads(LLAMA, CLO, equal_heads(LLAMA), 0.0) == FIRST


def test_chosen_tokens_are_a_share_rounded_up_and_bounded():
    assert CLO.chosen_tokens(100) == 10 and CLO.chosen_tokens(101) == 11
    whole = replace(CLO, share=1.0)
    assert whole.chosen_tokens(50) == 46 and whole.chosen_tokens(3) == 0


def test_a_sparse_plan_moves_less_and_is_not_exact():
    rates = rates_from_law(LLAMA, replace(node_profile("h100-pcie5"), load_fixed_s=0.0))
    plan = sparse_plan(rates, SPARSE, persistent_share(LLAMA, FIRST), 32_768, 256)
    assert (plan.kind, plan.exact, plan.cached_tokens) == ("sparse", False, 32_768)
    whole = rates.load.seconds(32_768)
    # Two chunks of a tenth each, and a layer of 32.
    assert plan.load_s == pytest.approx((0.2 * 31 / 32 + 1 / 32) * whole, rel=0.05)
    assert plan.load_bytes == pytest.approx(plan.load_s / whole * 32_768 * 131_072, rel=0.01)
    assert plan.ttft_s < whole
    one = sparse_plan(rates, SPARSE, 0.0, 32_768, 100)
    assert one.load_s < plan.load_s


def test_layer_seconds_grow_with_the_resident_tokens():
    rates = rates_from_law(LLAMA, node_profile("h100-pcie5"))
    short = layer_seconds(rates, CLO, 4, 10_000)
    assert short < layer_seconds(rates, replace(CLO, share=1.0), 4, 10_000)
    assert layer_seconds(rates, CLO, 64, 100_000) > short
