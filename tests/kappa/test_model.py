"""The router's arithmetic: monotone, consistent with the paper where it must be, and solved."""

from __future__ import annotations

import dataclasses
import itertools
import math
import timeit

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kappa import model as law
from kappa.hardware import CATALOGUE, node_profile
from kappa.shapes import SHAPES, model_shape
from kappa.types import ModelShape, NodeProfile, TokenCounts

shapes = st.sampled_from(sorted(SHAPES)).map(SHAPES.__getitem__)
nodes = st.builds(
    dataclasses.replace,
    st.sampled_from(sorted(CATALOGUE)).map(CATALOGUE.__getitem__),
    load_fixed_s=st.sampled_from([0.0, 1e-4, 5e-3]),
    step_fixed_s=st.sampled_from([0.0, 2e-3]),
    attention_flops_per_s=st.sampled_from([0.0, 2e14]),
    # Without a read floor the FLOP terms decide everywhere, small prefills too.
    hbm_bytes_per_s=st.sampled_from([3.35e12, 8e12, 1e30]),
)
cached = st.integers(0, 500_000)
new = st.integers(1, 8192)

LLAMA = model_shape("llama-3.1-8b")
PCIE = node_profile("pcie")


@given(shapes, nodes, cached, new, st.floats(1.0, 50.0))
def test_ttft_never_rises_with_bandwidth(
    shape: ModelShape, node: NodeProfile, c: int, n: int, factor: float
) -> None:
    faster = dataclasses.replace(node, h2d_bytes_per_s=node.h2d_bytes_per_s * factor)
    assert law.ttft_s(shape, faster, c, n) <= law.ttft_s(shape, node, c, n)


@given(shapes, nodes, cached, new, st.integers(0, 10_000), st.floats(0.0, 1.0))
def test_ttft_never_falls_with_cached_tokens(
    shape: ModelShape, node: NodeProfile, c: int, n: int, more: int, overlap: float
) -> None:
    less = law.ttft_s(shape, node, c, n, overlap=overlap)
    assert law.ttft_s(shape, node, c + more, n, overlap=overlap) >= less * (1 - 1e-12)


@given(shapes, nodes, cached, new, st.integers(0, 4096))
def test_ttft_never_falls_with_new_tokens(
    shape: ModelShape, node: NodeProfile, c: int, n: int, more: int
) -> None:
    assert law.ttft_s(shape, node, c, n + more) >= law.ttft_s(shape, node, c, n) * (1 - 1e-12)


@given(shapes, nodes)
def test_kappa_crit_equates_load_and_linear_compute(shape: ModelShape, node: NodeProfile) -> None:
    bare = dataclasses.replace(node, load_fixed_s=0.0)
    n = 1000
    load = law.load_s(shape, bare, law.kappa_crit(shape, bare) * n)
    assert load == pytest.approx(2 * shape.params_active * n / bare.flops_per_s)


@given(shapes, nodes, new, st.sampled_from([0, 30_000]), st.sampled_from([0.0, 0.5, 1.0]))
def test_kappa_eff_doubles_the_compute_time(
    shape: ModelShape, node: NodeProfile, n: int, device: int, overlap: float
) -> None:
    kappa = law.kappa_eff(shape, node, n, device, overlap)
    assume(0 < kappa < 1e7)
    c = kappa * n
    compute = law.compute_s(shape, node, n, c + device)
    assert law.ttft_s(shape, node, c, n, device, overlap) == pytest.approx(2 * compute, rel=1e-6)
    # It is the least: a little less context is still compute-bound.
    below = law.ttft_s(shape, node, c * 0.99, n, device, overlap)
    assert below < 2 * law.compute_s(shape, node, n, c * 0.99 + device) * (1 + 1e-9)


@given(shapes, nodes, new)
def test_infinite_kappa_eff_means_never_memory_bound(
    shape: ModelShape, node: NodeProfile, n: int
) -> None:
    assume(law.kappa_eff(shape, node, n) == math.inf)
    for kappa in (1, 10, 100, 1000, 10_000):
        c = kappa * n
        assert law.load_s(shape, node, c) < law.compute_s(shape, node, n, c)


def test_kappa_eff_is_zero_where_the_fixed_load_cost_rules() -> None:
    slow_start = dataclasses.replace(PCIE, load_fixed_s=10.0)
    assert law.kappa_eff(LLAMA, slow_start, 100) == 0


def test_kappa_eff_reduces_to_kappa_crit_without_attention_or_floor() -> None:
    ideal = dataclasses.replace(PCIE, hbm_bytes_per_s=1e30, attention_flops_per_s=1e30)
    critical = law.kappa_crit(LLAMA, ideal)
    assert law.kappa_eff(LLAMA, ideal, 100) == pytest.approx(critical)
    assert law.kappa_eff(LLAMA, ideal, 100, overlap=1.0) == pytest.approx(2 * critical)


def test_small_prefills_are_bound_by_weight_reads() -> None:
    # Two FLOPs and two bytes per parameter: below G/W_hbm tokens, reading the weights is longer.
    h100 = node_profile("h100-pcie5")
    break_even = h100.flops_per_s / h100.hbm_bytes_per_s
    assert break_even == pytest.approx(295, abs=1)
    assert law.compute_s(LLAMA, h100, 20, 0) == pytest.approx(
        law.compute_s(LLAMA, h100, 200, 0), rel=0.01
    )
    assert law.compute_s(LLAMA, h100, 600, 0) > 1.9 * law.compute_s(LLAMA, h100, 20, 0)


def test_weight_reads_of_a_mixture_grow_with_tokens() -> None:
    moe = model_shape("qwen3-30b-a3b")
    reads = [law.weight_read_bytes(moe, tokens) for tokens in (1, 8, 64, 4096)]
    assert reads == sorted(reads)
    assert reads[0] == pytest.approx(2 * moe.params_active)
    assert reads[-1] == pytest.approx(2 * moe.params_total)
    assert law.weight_read_bytes(LLAMA, 1) == 2 * LLAMA.params_total


def test_flops_per_token_includes_attention() -> None:
    # Llama-3.1-8B on the H100 of the routers' survey: κ_crit 16.8 becomes 53 at 64K of context.
    growth = law.flops_per_token(LLAMA, 1, 64_000) / (2 * LLAMA.params_active)
    assert growth * law.kappa_crit(LLAMA, PCIE) == pytest.approx(53, abs=1)


def test_mla_takes_the_cheaper_exact_form() -> None:
    shape = model_shape("deepseek-v3")
    heads = shape.layers * shape.heads
    for n, context in itertools.product((1, 100, 170, 171, 1000, 8192), (0, 50_000)):
        pairs = n * (context + n / 2)
        absorbed = heads * (4 * 512 + 2 * 64) * pairs
        expanded = heads * ((4 * 128 + 2 * 64) * pairs + 4 * 512 * 128 * context)
        got = law.attention_flops(shape, n, context)
        assert got == pytest.approx(min(absorbed, expanded))


def test_tensor_parallel_replicates_kv_heads() -> None:
    qwen = model_shape("qwen3-235b-a22b")
    once = law.kv_bytes(qwen, 1000)
    assert law.kv_bytes(qwen, 1000, tp=4) == once
    assert law.kv_bytes(qwen, 1000, tp=8) == 2 * once
    assert law.kappa_crit(qwen, PCIE, tp=8) == pytest.approx(law.kappa_crit(qwen, PCIE) / 2)
    latent = model_shape("deepseek-v3")
    assert law.kv_bytes(latent, 10, tp=8) == 8 * law.kv_bytes(latent, 10)
    with pytest.raises(ValueError, match="tp is 0"):
        law.kv_bytes(qwen, 1, tp=0)


def test_load_seconds_of_the_survey() -> None:
    # 60,000 tokens of Llama-3.1-8B: 143 ms behind PCIe, 21 ms behind C2C.
    assert law.load_s(LLAMA, PCIE, 60_000) == pytest.approx(0.143, abs=5e-4)
    assert law.load_s(LLAMA, node_profile("c2c"), 60_000) == pytest.approx(0.021, abs=5e-4)
    assert law.load_s(LLAMA, dataclasses.replace(PCIE, load_fixed_s=1.0), 0) == 0


def test_bound_follows_the_critical_ratio() -> None:
    critical = law.kappa_crit(LLAMA, PCIE)
    below = TokenCounts(0, int(critical * 1000) - 1, 1000)
    above = TokenCounts(0, int(critical * 1000) + 1, 1000)
    assert law.bound(below, LLAMA, PCIE) == "compute"
    assert law.bound(above, LLAMA, PCIE) == "memory"
    # Device tokens cost no transfer, so they do not make a request memory-bound.
    assert law.bound(TokenCounts(10**6, 0, 1), LLAMA, PCIE) == "compute"


@given(shapes, nodes, cached, new, st.floats(0.0, 1.0))
def test_plan_agrees_with_the_scalars(
    shape: ModelShape, node: NodeProfile, c: int, n: int, overlap: float
) -> None:
    plan = law.plan(TokenCounts(500, c, n), shape, node, overlap)
    assert plan.kind == "load"
    assert plan.exact
    assert plan.ttft_s == law.ttft_s(shape, node, c, n, 500, overlap)
    assert max(plan.load_s, plan.compute_s) <= plan.ttft_s + 1e-12
    assert plan.load_bytes == pytest.approx(c * law.kv_bytes_per_token(shape))


@pytest.mark.parametrize("overlap", [-0.1, 1.1])
def test_overlap_outside_its_range_is_refused(overlap: float) -> None:
    with pytest.raises(ValueError, match="overlap"):
        law.ttft_s(LLAMA, PCIE, 1, 1, overlap=overlap)
    with pytest.raises(ValueError, match="overlap"):
        law.kappa_eff(LLAMA, PCIE, 1, overlap=overlap)


def test_decode_is_bound_by_reads_and_grows_with_context() -> None:
    assert law.decode_step_s(LLAMA, PCIE, 0, 0) == 0
    idle = law.decode_step_s(LLAMA, PCIE, 1, 0)
    assert idle == pytest.approx(2 * LLAMA.params_total / PCIE.hbm_bytes_per_s)
    assert law.decode_step_s(LLAMA, PCIE, 8, 8 * 30_000) > 1.5 * idle


def test_one_sequence_decodes_as_one_token_prefills() -> None:
    for shape in SHAPES.values():
        decode = law.decode_step_s(shape, PCIE, 1, 20_000)
        assert decode == pytest.approx(law.compute_s(shape, PCIE, 1, 20_000), rel=1e-3)


def test_dilation_stretches_only_what_is_dilated() -> None:
    paced = dataclasses.replace(PCIE, source="paced", dilation=20.0)
    assert law.ttft_s(LLAMA, paced, 1000, 10) == law.ttft_s(LLAMA, PCIE, 1000, 10)
    assert law.dilated(0.5, paced) == 10.0
    assert law.dilated(0.5, PCIE) == 0.5


def test_scalars_are_cheap_enough_for_every_request_and_node() -> None:
    shape, runs = model_shape("deepseek-v3"), 500

    def both() -> None:
        law.compute_s(shape, PCIE, 100, 20_000)
        law.load_s(shape, PCIE, 20_000)

    # About 1.5 µs; the bound leaves room for a busy machine. The best of several is the cost.
    assert min(timeit.repeat(both, number=runs, repeat=7)) / runs < 20e-6
