"""Codes, look-ups and gathers, each against what it stands for."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from kappa.plans.clo import CloConfig, SparseSettings
from kappa.plans.head_codes import CodeMaps
from kappa_engine.kv_cache import ArenaTooLarge
from kappa_engine.sparse import gather_kernel as gather_module
from kappa_engine.sparse.cache import alike, cosines, replaced
from kappa_engine.sparse.codes import Hasher, _bits_by_halves, popcount
from kappa_engine.sparse.forward import sparse_forward
from kappa_engine.sparse.gather_kernel import Gather, pairs
from kappa_engine.transfer import CpuMover
from tests.engine.rig import rig

CPU = torch.device("cpu")


def randn(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def test_bits_are_counted_in_every_word():
    rng = np.random.default_rng(0)
    words = [*rng.integers(-(2**63), 2**63 - 1, 500).tolist(), 0, -1, 1, -(2**63), 2**63 - 1]
    want = [bin(word & (2**64 - 1)).count("1") for word in words]
    # As a CPU counts them, and as a device does.
    for count in (popcount, _bits_by_halves):
        assert count(torch.tensor(words)).tolist() == want


def test_codes_are_the_signs_and_are_the_same_every_time():
    made = [Hasher(16, 128, torch.float64, CPU) for _ in range(2)]
    vectors = randn(5, 7, 16)
    codes = made[0].encode(vectors)
    assert codes.shape == (5, 7, 2) and torch.equal(codes, made[1].encode(vectors))
    signs = made[0].unpack(codes, torch.float64)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    # A vector turned round has every bit the other way.
    assert torch.equal(made[0].unpack(made[0].encode(-vectors), torch.float64), -signs)


@pytest.mark.parametrize("queries", [1, 4, 40])
def test_agreement_is_bits_in_common_however_it_is_counted(queries):
    hasher = Hasher(8, 192, torch.float64, CPU)
    q, k = hasher.encode(randn(3, queries, 8, seed=1)), hasher.encode(randn(3, 11, 8, seed=2))
    signs = [hasher.unpack(codes, torch.float64) for codes in (q, k)]
    same = (signs[0][:, :, None] == signs[1][:, None]).sum(-1).sum(1)
    assert torch.equal(hasher.agreement(q, k), same.to(torch.float32))


def test_agreement_orders_keys_by_their_angle():
    hasher = Hasher(32, 4096, torch.float64, CPU)
    q, k = randn(1, 1, 32, seed=1), randn(1, 60, 32, seed=2)
    bits = hasher.agreement(hasher.encode(q), hasher.encode(k))[0] / 4096
    angles = torch.arccos(cosines(k[0], q[0, 0].expand(60, 32)))
    # The share of bits in common falls linearly with the angle; three deviations of 4096 draws.
    assert (bits - (1 - angles / np.pi)).abs().max() < 3 * 0.5 / 4096**0.5


def test_maps_are_applied_by_layer_and_head_before_the_codes():
    rng = np.random.default_rng(2)
    halves = rng.normal(size=(2, 3, 8, 8))
    maps = CodeMaps(rng.normal(size=(2, 3, 8)), halves @ np.swapaxes(halves, -1, -2))
    mapped, plain = (Hasher(8, 128, torch.float64, CPU, each) for each in (maps, None))
    heads, layer = torch.tensor([2, 0]), 1
    queries, keys = randn(2, 4, 8, seed=1), randn(5, 2, 8, seed=2)
    got_queries = mapped.of_queries(layer, heads, queries)
    got_keys = mapped.of_keys(layer, heads, keys)
    for at, head in enumerate(heads.tolist()):
        balance = torch.from_numpy(maps.balance[layer, head])
        centred = keys[:, at] - torch.from_numpy(maps.centre[layer, head])
        assert torch.equal(got_queries[at], plain.encode(queries[at] @ balance))
        # Signs alone count, whatever the inverse is scaled to.
        assert torch.equal(got_keys[:, at], plain.encode(centred @ torch.linalg.inv(balance)))
    assert torch.equal(plain.of_keys(layer, heads, keys), plain.encode(keys))


def test_look_ups_follow_the_plain_formulas():
    rng = np.random.default_rng(4)
    similarity, importance = rng.uniform(-1, 1, (5, 3, 4)), rng.random((3, 4))
    importance[2] = 0.0
    tau = np.array([0.1, -0.2, -1.0])
    got = alike(*(torch.from_numpy(x) for x in (similarity, importance, tau))).numpy()
    # Eq. 10: the harmonic mean by importance, cosines below a thousandth counting as that.
    shares = (importance[:2] / np.maximum(similarity[:, :2], 1e-3)).sum(axis=-1)
    assert (got[:, :2] == (importance[:2].sum(axis=-1) / shares >= tau[:2])).all()
    # A head that does not matter keeps its choice.
    assert got[:, 2].all() and 0 < got[:, :2].sum() < got[:, :2].size


def test_cosines_ignore_length_and_are_zero_for_zero_vectors():
    q = randn(6, 8)
    assert cosines(q, 7 * q) == pytest.approx(np.ones(6))
    assert cosines(q, -q) == pytest.approx(-np.ones(6))
    assert cosines(q, torch.zeros_like(q)).tolist() == [0.0] * 6
    assert cosines(q.half(), q.half()).dtype == torch.float32


def gather_case(seed=0):
    rng = np.random.default_rng(seed)
    source = randn(90, 8, seed=seed)
    store = torch.full((3, 4, 20, 8), -7.0, dtype=torch.float64)
    rows = torch.from_numpy(rng.integers(0, 90, (3, 4, 6)))
    rows[torch.from_numpy(rng.random((3, 4, 6)) < 0.5)] = -1
    want = store.clone()
    for b, h, n in (rows >= 0).nonzero().tolist():
        want[b, h, 5 + n] = source[rows[b, h, n]]
    return store, source, rows, want


def test_a_gather_puts_wanted_rows_in_place_and_leaves_the_rest():
    store, source, rows, want = gather_case()
    mover = CpuMover()
    try:
        gather = Gather(store[:, :, 5:11], source, rows)
        assert gather.nbytes == int((rows >= 0).sum()) * 8 * 8
        mover.h2d(pairs([gather])).block()
        assert torch.equal(store, want)
        assert mover.counters["h2d"].copied_bytes == gather.nbytes
        nothing = Gather(store[:, :, 5:11], source, torch.full_like(rows, -1))
        mover.h2d(pairs([nothing])).block()
        assert torch.equal(store, want) and nothing.nbytes == 0
    finally:
        mover.stop()


def test_without_triton_a_gpu_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(gather_module, "triton", None)
    store, source, rows, _ = gather_case()
    with pytest.raises(RuntimeError, match="triton is not installed"):
        gather_module.gather_rows(store[:, :, 5:11], source, rows, None)


def test_replaced_puts_new_tokens_in_the_places_of_unchosen_ones():
    # Of two slots, the second with two places: heads that keep 4 and 9; have nothing yet; hit.
    held = torch.tensor([[[4, 7, 9, 2], [1, 2, 3, 4]], [[9, 9, 9, 9], [0, 3, 9, 9]]])
    best = torch.tensor([[[8, 5, 4, 6], [5, 6, 7, 8]], [[6, 3, 8, 1], [3, 0, 1, 2]]])
    inside = torch.tensor([[True] * 4, [True, True, False, False]])
    wanted = torch.tensor([[True, False], [True, True]])
    after, moved = replaced(held, best, wanted, inside, 9)
    assert after.tolist() == [[[4, 8, 5, 6], [1, 2, 3, 4]], [[6, 3, 9, 9], [0, 3, 9, 9]]]
    assert moved.tolist() == [
        [[False, True, True, True], [False] * 4],
        [[True, True, False, False], [False] * 4],
    ]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_does_what_the_plain_copy_does():
    # Interpreted, on the CPU: a process of its own, as Triton reads the variable at its import.
    script = Path(__file__).parent / "interpreted_gather.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"equal": True, "rows_counted": True}


def test_slots_that_do_not_fit_are_refused_with_both_numbers(monkeypatch):
    with rig("llama", blocks=40) as r:
        settings = SparseSettings(CloConfig(), slots=3, max_tokens=1000)
        monkeypatch.setattr("kappa_engine.sparse.slots.free_host_bytes", lambda: 10_000)
        with pytest.raises(ArenaTooLarge, match=r"3 sparse slots of 1000 .* only 10000 are free"):
            sparse_forward(r.forward, settings)


@pytest.mark.parametrize("retriever", ["hash", "oracle"])
def test_slots_fit_where_there_is_exactly_what_they_take(retriever, monkeypatch):
    with rig("llama", blocks=40) as r:
        settings = SparseSettings(CloConfig(), slots=3, max_tokens=1000, retriever=retriever)
        made = sparse_forward(r.forward, settings).slots
        tensors = made.store, made.held, made.full, made.labels, made.ages, made.codes
        taken = sum(tensor.nbytes for each in tensors for tensor in each)
        monkeypatch.setattr("kappa_engine.sparse.slots.free_host_bytes", lambda: taken)
        sparse_forward(r.forward, settings)
        monkeypatch.setattr("kappa_engine.sparse.slots.free_host_bytes", lambda: taken - 1)
        with pytest.raises(ArenaTooLarge, match=rf"need {taken} bytes"):
            sparse_forward(r.forward, settings)
