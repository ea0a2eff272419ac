"""The cost model: monotone, consistent with the paper where it must be, and solved by hand."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kappa import cost as law
from kappa import paper
from kappa.cost import StepModel, TokenCounts, step_model
from kappa.hardware import CATALOGUE, REACHED, NodeProfile, node_profile
from kappa.model import ModelShape, attention_flops, kv_bytes_per_token, weight_bytes
from kappa.shapes import SHAPES, model_shape

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
STEP = StepModel(token_s=1.0, pair_s=0.1, weights_s=7.0, context_token_s=0.01, fixed_s=0.5)
WORK = st.lists(st.tuples(st.integers(1, 500), st.integers(0, 5000)), max_size=5)


def literal(shape: ModelShape, node: NodeProfile) -> float:
    """Paper 001's κ_crit, Eq. 6."""
    flops_per_byte = 2 * shape.params_active / kv_bytes_per_token(shape)
    return paper.kappa_crit(flops_per_byte, node.h2d_bytes_per_s / node.flops_per_s)


def ttft_s(shape: ModelShape, node: NodeProfile, cached_tokens: float, new_tokens: int) -> float:
    counts = TokenCounts(0, cached_tokens, new_tokens)  # type: ignore[arg-type]  # fractions, too
    return law.idle_cost(counts, shape, node).ttft_s


@given(shapes, nodes, cached, new, st.floats(1.0, 50.0))
def test_ttft_never_rises_with_bandwidth(
    shape: ModelShape, node: NodeProfile, c: int, n: int, factor: float
) -> None:
    faster = dataclasses.replace(node, h2d_bytes_per_s=node.h2d_bytes_per_s * factor)
    assert ttft_s(shape, faster, c, n) <= ttft_s(shape, node, c, n)


@given(shapes, nodes, cached, new, st.integers(0, 10_000), st.integers(0, 4096))
def test_ttft_never_falls_with_cached_or_new_tokens(
    shape: ModelShape, node: NodeProfile, c: int, n: int, more_cached: int, more_new: int
) -> None:
    least_s = ttft_s(shape, node, c, n) * (1 - 1e-12)
    assert ttft_s(shape, node, c + more_cached, n) >= least_s
    assert ttft_s(shape, node, c, n + more_new) >= least_s


@given(shapes, nodes, st.sampled_from([1, 2, 8]), st.integers(0, 10_000), cached, new)
def test_a_label_never_contradicts_its_seconds(
    shape: ModelShape, node: NodeProfile, gpus: int, device: int, c: int, n: int
) -> None:
    counts = TokenCounts(device, c, n)
    found = law.idle_cost(counts, shape, node.times(gpus))
    memory_bound = found.load_s >= found.compute_s
    assert found.bound == ("memory" if memory_bound else "compute")
    if memory_bound:
        assert counts.ratio >= found.kappa_crit
    else:
        assert counts.ratio <= found.kappa_crit
    assert math.isfinite(found.kappa_crit) and found.kappa_crit >= 0


@given(shapes, nodes, cached, new)
def test_loading_at_kappa_crit_takes_as_long_as_computing(
    shape: ModelShape, node: NodeProfile, c: int, n: int
) -> None:
    assume(c > 0)
    found = law.idle_cost(TokenCounts(0, c, n), shape, node)
    load_s = node.load_fixed_s + found.kappa_crit * n * law.load_token_s(shape, node)
    # Where the fixed cost alone takes longer, loading does at every κ.
    assert load_s == pytest.approx(max(found.compute_s, node.load_fixed_s), rel=1e-6)


def test_kappa_crit_of_a_mixture_follows_the_new_tokens() -> None:
    # Few tokens read nearly as many experts as many do. Equation 6 has 4.3 for all of them.
    mixture = model_shape("qwen3-30b-a3b")
    free = dict.fromkeys(("load_fixed_s", "copy_fixed_s"), 0.0)
    h100 = replace(node_profile("h100-pcie5"), h2d_bytes_per_s=63e9, **free)
    few, some, many = (
        law.idle_cost(TokenCounts(0, 0, n), mixture, h100).kappa_crit for n in (256, 512, 4096)
    )
    assert (round(few), round(some), round(many)) == (70, 38, 11)
    assert literal(mixture, h100) == pytest.approx(4.3, abs=0.05)


def test_every_gpu_loads_a_whole_latent_and_its_own_heads() -> None:
    # Of 8 KV heads each of 8 GPUs loads one; of 16 GPUs two load the same. MLA's latent is whole
    # on each.
    deepseek = model_shape("deepseek-v3")
    for shape, gpus, share in ((LLAMA, 8, 1 / 8), (LLAMA, 16, 1 / 8), (deepseek, 8, 1.0)):
        one_s, all_s = (law.load_token_s(shape, node) for node in (PCIE, PCIE.times(gpus)))
        assert all_s == pytest.approx(share * one_s)


@given(shapes, nodes, new)
def test_kappa_eff_doubles_the_compute_time(shape: ModelShape, node: NodeProfile, n: int) -> None:
    kappa = law.kappa_eff(shape, node, n)
    assume(0 < kappa < 1e7)
    c = kappa * n
    compute = law.compute_s(shape, node, n, c)
    assert ttft_s(shape, node, c, n) == pytest.approx(2 * compute, rel=1e-6)
    # It is the least: a little less context is still compute-bound.
    below = ttft_s(shape, node, c * 0.99, n)
    assert below < 2 * law.compute_s(shape, node, n, c * 0.99) * (1 + 1e-9)


@given(shapes, nodes, new)
def test_infinite_kappa_eff_means_never_memory_bound(
    shape: ModelShape, node: NodeProfile, n: int
) -> None:
    assume(law.kappa_eff(shape, node, n) == math.inf)
    for kappa in (1, 10, 100, 1000, 10_000):
        c = kappa * n
        assert law.load_s(shape, node, c) < law.compute_s(shape, node, n, c)


def test_the_work_of_a_batch_makes_the_step_that_its_chunks_make() -> None:
    model, chunks = StepModel(1e-5, 1e-9, 1e-3, 1e-7, 1e-4), [(7, 30), (1, 500), (512, 0)]
    work = law.batch_work(chunks)
    assert work == (520, 7 * 33.5 + 500.5 + 512 * 256.0, 37 + 501 + 512)
    assert model.work_s(work) == pytest.approx(model.step_s(chunks))


def test_kappa_eff_is_zero_where_the_fixed_load_cost_rules() -> None:
    slow_start = dataclasses.replace(PCIE, load_fixed_s=10.0)
    assert law.kappa_eff(LLAMA, slow_start, 100) == 0


def test_kappa_crit_is_equation_6_without_attention_or_floor() -> None:
    ideal = dataclasses.replace(PCIE, hbm_bytes_per_s=1e30, attention_flops_per_s=1e30)
    whole = dataclasses.replace(LLAMA, lookup_params=0.0, head_params=0.0)
    critical = literal(whole, ideal)
    assert law.kappa_eff(whole, ideal, 100) == pytest.approx(critical)
    for cached in (0, 100, 10_000):
        found = law.idle_cost(TokenCounts(0, cached, 100), whole, ideal)
        assert found.kappa_crit == pytest.approx(critical)


def test_small_prefills_are_bound_by_weight_reads() -> None:
    # Two FLOPs and two bytes per parameter: below G/W_hbm tokens, reading the weights is longer.
    bare = dict.fromkeys((*REACHED, "exposed"), 0.0)
    h100 = replace(node_profile("h100-pcie5"), **bare)
    break_even = h100.flops_per_s / h100.hbm_bytes_per_s
    assert break_even == pytest.approx(295, abs=1)
    assert law.compute_s(LLAMA, h100, 20, 0) == pytest.approx(
        law.compute_s(LLAMA, h100, 200, 0), rel=0.01
    )
    assert law.compute_s(LLAMA, h100, 600, 0) > 1.9 * law.compute_s(LLAMA, h100, 20, 0)


def test_tensor_parallelism_adds_sums_over_the_link_between_gpus() -> None:
    # Of 32 layers each token's 4,096 numbers of two bytes are summed twice, of four GPUs 2·3/4 of
    # them sent by each: 786,432 bytes at 100 GB/s. 64 sums begin, at 5 us, and four ranks wait for
    # each other twice 1.5 ms.
    node = replace(PCIE, peer_bytes_per_s=100e9, peer_fixed_s=5e-6)
    one, four = (step_model(LLAMA, each) for each in (node, node.times(4)))
    assert (one.comm_token_s, one.fixed_s) == (0.0, 0.0)
    assert four.comm_token_s == pytest.approx(786_432 / 100e9)
    assert four.fixed_s == pytest.approx(64 * 5e-6 + 2 * 1.5e-3)
    assert four.token_s == pytest.approx(one.token_s / 4)


def test_products_in_eight_bits_are_as_fast_as_the_gpu_says() -> None:
    eight = replace(LLAMA, weight_dtype_bytes=1.0, gemm_bytes=1.0)
    kept = replace(LLAMA, weight_dtype_bytes=1.0)
    node = replace(PCIE, fp8_speedup=2.0)
    plain, quick, slow = (step_model(shape, node) for shape in (LLAMA, eight, kept))
    assert quick.token_s == plain.token_s / 2 and slow.token_s == plain.token_s
    assert quick.weights_s == slow.weights_s == plain.weights_s / 2


def test_attention_triples_a_tokens_compute_at_64k_of_context() -> None:
    # Llama-3.1-8B on the H100 of the routers' survey: κ_crit 16.8 becomes 53 at 64K of context.
    linear = 2 * LLAMA.params_active
    growth = (linear + attention_flops(LLAMA, 1, 64_000)) / linear
    assert growth * literal(LLAMA, PCIE) == pytest.approx(53, abs=1)


def copying(node: str, model: str, gpus: int = 1, block_tokens: int = 16) -> float:
    """GB/s of loads that each of a node's GPUs reaches with a model's copies."""
    found = law.loading_node(model_shape(model), node_profile(node).times(gpus), block_tokens)
    return found.h2d_bytes_per_s / gpus / 1e9


def test_copies_of_a_layers_block_reach_what_was_measured() -> None:
    # Llama-3.1-8B has 4,096 bytes a token and layer, so 65,536 a copy of 16 tokens: 1.21363 us at
    # 54 GB/s beside 0.5 us of the host, √(1.21363² + 0.5²) = 1.31258 us, 49.93 GB/s.
    assert copying("h100-pcie5", "llama-3.1-8b") == pytest.approx(49.93, abs=0.01)
    # Measured on H100 (vllm#42212): 51.4 to 51.8 in long batches of these, of 7 tokens' 28 KiB
    # 39.9 to 44.1; of 8 KiB (vllm#48434) 12.5 to 15.2.
    assert copying("h100-pcie5", "llama-3.1-8b", 1, 7) == pytest.approx(39.32, abs=0.01)
    assert copying("h100-pcie5", "llama-3.1-8b", 1, 2) == pytest.approx(15.68, abs=0.01)
    # H20, Qwen3-Coder-30B-A3B (agentic-kvc): a hit of 65,536 tokens in host memory takes 161 ms
    # more than one on the device. 98,304 bytes each, 32 KiB a copy at 41.7 GB/s, and 13 ms.
    loaded_s = law.load_s(model_shape("qwen3-30b-a3b"), node_profile("h100-pcie5"), 65_536)
    assert loaded_s == pytest.approx(0.161, rel=0.05)


def test_copies_shrink_with_the_gpus_that_share_them() -> None:
    # A quarter of Llama-3.1-70B's 65,536 bytes: √(0.30341² + 0.5²) = 0.58486 us for 16,384.
    assert copying("h100-pcie5", "llama-3.1-70b", 4) == pytest.approx(28.01, abs=0.01)
    assert copying("gh200-c2c", "llama-3.1-70b") == pytest.approx(122.4, abs=0.1)
    # An MLA latent is whole on each of them: 64 tokens of 576 numbers of two bytes are 73,728
    # bytes, √(1.36533² + 0.5²) = 1.45400 us.
    one, eight = (copying("h200-pcie5", "deepseek-v3", gpus, 64) for gpus in (1, 8))
    assert one == eight == pytest.approx(50.71, abs=0.01)


def test_small_copies_reach_little_without_a_kernel_for_them() -> None:
    assert copying("mi300x-pcie5", "llama-3.1-8b", 1, 6) == 6.0
    assert copying("mi300x-pcie5", "llama-3.1-8b", 1, 7) == pytest.approx(39.32, abs=0.01)
    assert copying("mi300x-pcie5", "llama-3.1-70b", 4) == 6.0


def test_rates_of_copies_are_taken_once() -> None:
    found = law.loading_node(LLAMA, node_profile("gh200-c2c"))
    assert law.loading_node(LLAMA, found) is found and law.loading_node(LLAMA, PCIE) is PCIE
    assert law.load_token_s(LLAMA, found) == law.load_token_s(LLAMA, node_profile("gh200-c2c"))
    # Stores take 295 GB/s: √(0.22216² + 0.5²) = 0.54713 us for 65,536 bytes.
    assert found.store_bytes_per_s == pytest.approx(119.78e9, rel=1e-4)


def test_load_seconds_of_the_survey() -> None:
    # 60,000 tokens of Llama-3.1-8B: 143 ms behind PCIe, 21 ms behind C2C.
    assert law.load_s(LLAMA, PCIE, 60_000) == pytest.approx(0.143, abs=5e-4)
    assert law.load_s(LLAMA, node_profile("c2c"), 60_000) == pytest.approx(0.021, abs=5e-4)
    assert law.load_s(LLAMA, dataclasses.replace(PCIE, load_fixed_s=1.0), 0) == 0


def test_bound_changes_where_loading_takes_as_long_as_computing() -> None:
    level = law.kappa_eff(LLAMA, PCIE, 1000) * 1000
    below, above = TokenCounts(0, int(level) - 1, 1000), TokenCounts(0, int(level) + 1, 1000)
    assert law.idle_cost(below, LLAMA, PCIE).bound == "compute"
    assert law.idle_cost(above, LLAMA, PCIE).bound == "memory"
    # Device tokens cost no transfer, so they do not make a request memory-bound.
    assert law.idle_cost(TokenCounts(10**6, 0, 1), LLAMA, PCIE).bound == "compute"


def test_a_dilated_node_has_the_same_seconds_of_its_own() -> None:
    paced = dataclasses.replace(PCIE, source="paced", dilation=20.0)
    assert ttft_s(LLAMA, paced, 1000, 10) == ttft_s(LLAMA, PCIE, 1000, 10)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        # GEMMs of 10 tokens, then 10 * (20 + 5) pairs.
        ([(10, 20)], 10 + 25 + 0.5),
        # Reading the weights, then half a pair, which takes longer than to read its KV.
        ([(1, 0)], 7 + 0.05 + 0.5),
        ([(10, 20), (1, 100)], 10 + 25 + 1 + 10.05 + 0.5),
        ([(1, 0), (1, 0), (1, 1)], 7 + 0.25 + 0.5),
    ],
)
def test_a_step_lasts_as_worked_out_by_hand(work, seconds):
    assert STEP.step_s(work) == pytest.approx(seconds)
    assert STEP.step_s(iter(work)) == pytest.approx(seconds)
    assert replace(STEP, dilation=30.0).step_s(work) == pytest.approx(seconds)
    assert replace(STEP, dilation=30.0).real_s(work) == pytest.approx(30 * seconds)


@given(WORK, WORK)
def test_more_work_never_takes_less(work, more):
    assert STEP.step_s(work + more) >= STEP.step_s(work)


@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 2000))
def test_a_prompt_in_chunks_computes_as_many_pairs_as_at_once(first, second, context):
    free = replace(STEP, weights_s=0.0, context_token_s=0.0, fixed_s=0.0)
    chunks = free.step_s([(first, context)]) + free.step_s([(second, context + first)])
    assert chunks == pytest.approx(free.step_s([(first + second, context)]))


def test_scaling_slows_all_of_it():
    paced = replace(STEP, dilation=2.0)
    assert paced.scaled(1.5).real_s([(9, 9)]) == pytest.approx(1.5 * paced.real_s([(9, 9)]))
    assert paced.scaled(1.0) is paced
    with pytest.raises(ValueError, match="dilation"):
        paced.scaled(0.0)


def roofline_s(shape: ModelShape, node: NodeProfile, chunks: list[tuple[int, int]]) -> float:
    """A dense model's step, written out: 2P per token without both vocabulary tables, beside the
    weights without the look-up; then 4·L·n_q·d per pair beside all KV."""
    tokens = sum(new for new, _ in chunks)
    pairs = sum(new * context + new * new / 2 for new, context in chunks)
    table = {"llama-3.1-8b": 128256 * 4096, "qwen2.5-14b": 152064 * 5120}[shape.name]
    gemm_s = 2 * (shape.params_active - 2 * table) * tokens / node.flops_per_s
    weights_s = (shape.params_total - table) * shape.weight_dtype_bytes / node.hbm_bytes_per_s
    attend_s = 4 * shape.layers * shape.heads * shape.head_dim * pairs / node.flops_per_s
    token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.kv_dtype_bytes
    kv_bytes = token_bytes * sum(new + context for new, context in chunks)
    context_s = kv_bytes / node.hbm_bytes_per_s
    return max(gemm_s, weights_s) + max(attend_s, context_s) + node.step_fixed_s


@pytest.mark.parametrize("node", ["h100-pcie5", "gh200-c2c"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen2.5-14b"])
def test_a_step_is_the_longer_side_of_the_roofline(model, node):
    bare = dict.fromkeys(REACHED, 0.0)
    profile = replace(node_profile(node), step_fixed_s=2e-3, exposed=0.0, **bare)
    shape = model_shape(model)
    step = step_model(shape, profile)
    for new, context in ((1, 0), (1, 30_000), (500, 0), (500, 30_000), (8192, 8192)):
        expected = roofline_s(shape, profile, [(new, context)])
        assert step.step_s([(new, context)]) == pytest.approx(expected, rel=1e-12)
        assert law.compute_s(shape, profile, new, context) == pytest.approx(expected, rel=1e-12)
    batch = [(1, 1000 * i) for i in range(20)]
    assert step.step_s(batch) == pytest.approx(roofline_s(shape, profile, batch), rel=1e-12)


@given(WORK, st.integers(0, 20), st.integers(0, 10_000))
def test_chunks_beside_decoding_requests_add_up(chunks, requests, context):
    # Decoding requests are chunks of one token; only the sum of their contexts matters.
    spread = [(1, context // max(requests, 1))] * requests
    total = sum(each for _, each in spread)
    work = law.batch_work(chunks, requests, total)
    assert work == pytest.approx(law.batch_work(chunks + spread))
    # Each chunk adds its own part; the weights are read once.
    each = [STEP.parts(law.chunk_work(new, context), steps=0) for new, context in chunks]
    expected = (sum(p.compute_s for p in each), 7.0 + sum(p.read_s for p in each), 0.5)
    assert STEP.parts(law.batch_work(chunks)) == pytest.approx(expected)


def test_arrays_cost_what_each_of_their_numbers_costs():
    new, context = np.array([1.0, 10.0, 300.0]), np.array([30_000.0, 20.0, 0.0])
    each = [STEP.step_s([(n, c)]) for n, c in zip((1, 10, 300), (30_000, 20, 0), strict=True)]
    assert STEP.work_s(law.chunk_work(new, context)) == pytest.approx(each)
    # 0 tokens cost nothing, 3 cost the fixed 5 s and 2 s each.
    assert law.transfer_s(np.array([0.0, 3.0]), 2.0, 5.0).tolist() == [0.0, 11.0]
    assert [law.transfer_s(tokens, 2.0, 5.0) for tokens in (0, 3)] == [0.0, 11.0]


def test_many_steps_share_their_work_but_each_reads_the_weights():
    # 2·3 tokens, 0.1·40 of pairs; 4 times the weights and the fixed cost, 50 tokens' KV once.
    parts = STEP.parts(law.StepWork(6.0, 40.0, 50.0), steps=4)
    assert parts == pytest.approx((6 + 4, 4 * 7 + 0.5, 4 * 0.5))


def test_a_prompt_is_computed_in_chunks_of_the_budget():
    # 250 tokens behind 40, 100 at a time, and a full hit that computes one token behind 40.
    chunks = [(100, 40), (100, 140), (50, 240)]
    seconds = law.prompt_s(STEP, np.array([250.0, 0.0]), np.array([40.0, 40.0]), 100)
    whole_s = sum(STEP.step_s([chunk]) for chunk in chunks)
    assert seconds == pytest.approx([whole_s, STEP.step_s([(1, 40)])])


def test_slower_flops_leave_the_reads_as_they_are():
    slow = STEP.computing_scaled(3.0)
    assert slow.parts(law.StepWork(2.0, 10.0, 5.0)) == pytest.approx((3 * 3.0, 7.05, 0.5))


def test_a_paced_node_dilates_its_steps():
    profile = replace(node_profile("h100-pcie5"), source="paced", dilation=30.0, step_fixed_s=0.01)
    step = step_model(model_shape("llama-3.1-8b"), profile)
    assert (step.dilation, step.fixed_s) == (30.0, 0.01)


@pytest.mark.parametrize("model", ["deepseek-v3", "qwen3-30b-a3b"])
def test_a_mixture_reads_what_one_token_touches(model):
    shape, profile = model_shape(model), node_profile("h200-pcie5")
    whole_s = shape.params_total * shape.weight_dtype_bytes / profile.hbm_bytes_per_s
    assert 0 < step_model(shape, profile).weights_s < whole_s / 2


def test_a_step_survives_the_wire():
    assert StepModel.from_dict(STEP.to_dict()) == STEP


@pytest.mark.parametrize("field", ["token_s", "pair_s", "weights_s", "context_token_s", "fixed_s"])
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
def test_seconds_that_are_none_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"StepModel\.{field} is .*zero or more"):
        replace(STEP, **{field: value})


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_dilation_must_be_above_zero(value):
    with pytest.raises(ValueError, match=r"dilation is .*above zero"):
        replace(STEP, dilation=value)


@pytest.mark.parametrize("data", [{**STEP.to_dict(), "gemm_s": 1.0}, {"token_s": 1.0}])
def test_a_wrong_constant_is_refused_with_the_right_names(data):
    with pytest.raises(ValueError, match=r"StepModel: .*(gemm_s|pair_s).*token_s.*dilation"):
        StepModel.from_dict(data)


def test_ratio_ignores_device_tokens_and_counts_one_new_at_least() -> None:
    assert TokenCounts(1000, 800, 8).ratio == 100
    assert TokenCounts(0, 800, 0).ratio == 800
    assert TokenCounts(1000, 800, 8).total_tokens == 1808


def test_counts_refuse_negatives() -> None:
    with pytest.raises(ValueError, match=r"TokenCounts\.cached_tokens"):
        TokenCounts(0, -1, 1)


# -- what a step may last for those that decode ---------------------------------------------------

LIMITED = StepModel(1e-4, 0.0, weights_s=10e-3, context_token_s=1e-6, fixed_s=1e-3)


@pytest.mark.parametrize(
    ("requests", "context", "behind", "pair_s", "waited_s", "tokens"),
    [
        # Alone 10 + 1 + 1 ms, so 30 ms; of it 4 ms to read KV and 1 fixed; beside four tokens 24.6
        # ms, 246 tokens: 250, of 128 each 2.
        (4, 4000, 0, 0.0, 0.0, 256),
        # Behind 10,000 tokens each takes 0.2 ms: 24.6 / 0.2 = 123 and 4.
        (4, 4000, 10_000, 1e-8, 0.0, 128),
        # Waited three times as long as it may: 738 and 4.
        (4, 4000, 0, 0.0, 0.75, 768),
        # 300 decode for 30 ms, past the limit of 27.5: a third of that, 92 and 300.
        (300, 0, 0, 0.0, 0.0, 384),
        # 700 decode: 70 ms; a tile more than theirs at the least.
        (700, 0, 0, 0.0, 0.0, 768),
    ],
)
def test_step_limit_is_the_tokens_that_decodes_have_time_for(
    requests, context, behind, pair_s, waited_s, tokens
):
    limit = law.StepLimit(replace(LIMITED, pair_s=pair_s), 2.5)
    assert limit.tokens(requests, context, behind, 0, waited_s) == tokens


def test_step_limit_is_infinite_without_decodes_or_a_factor():
    assert law.StepLimit(LIMITED, 2.5).tokens(0, 0, 0) == math.inf
    assert law.StepLimit(LIMITED, 0.0).tokens(4, 4000, 0) == math.inf
    free = replace(LIMITED, token_s=0.0)
    assert law.StepLimit(free, 2.5).tokens(4, 4000, 0) == math.inf


def test_limit_grants_products_as_long_as_the_weight_reads():
    # Alone 30 + 10 + 1 ms, so 45.1 ms; four contexts of 10,000 tokens and the fixed cost take 41 of
    # them. The weights' 30 ms less 0.4 of those that decode: 296 tokens and 4, of 128 each 2.
    limit = law.StepLimit(replace(LIMITED, weights_s=30e-3), 1.1)
    assert limit.tokens(4, 40_000, 0) == 256


def test_limit_grants_products_worth_the_experts_that_they_read():
    # Four that decode leave 0.9^4 of the experts' 60 ms alone: 39.4 ms that the prompt adds, so
    # 35.4 ms of products at the least, 354 tokens and 4, of 128 each 3; the limit is 22 ms.
    mixture = replace(LIMITED, weights_s=3e-3, experts_s=60e-3, expert_idle=0.9)
    assert law.StepLimit(mixture, 1.1).tokens(4, 40_000, 0) == 384
    # 300 that decode leave nothing alone: 63 ms of reads less their own 30 of GEMMs: 330 and 300.
    assert law.StepLimit(mixture, 1.1).tokens(300, 0, 0) == 640


def test_lateness_is_waiting_over_250_ms_or_2_5_own_durations():
    limit = law.StepLimit(LIMITED, 2.5)
    assert limit.lateness(100, 0.25) == pytest.approx(1.0)  # 10 ms of its own
    assert limit.lateness(10_000, 5.0) == pytest.approx(2.0)  # a second of its own
    slow = law.StepLimit(replace(LIMITED, dilation=10.0), 2.5)
    assert slow.lateness(100, 2.5) == pytest.approx(1.0)


@given(shape=shapes, node=nodes, share=st.floats(0.01, 1.0), tokens=new, context=cached)
def test_a_step_lasts_as_long_as_its_weights_cross(shape, node, share, tokens, context) -> None:
    away = replace(node, host_weight_bytes=share * weight_bytes(shape))
    least_s = away.host_weight_bytes / node.h2d_bytes_per_s
    step = step_model(shape, away)
    assert step.step_s([(tokens, context)]) >= least_s * (1 - 1e-12)
    # Of a mixture, experts that lie there cross whether a token touches them or not.
    if node.weights_bytes_per_s >= node.h2d_bytes_per_s:
        assert step.step_s([(tokens, context)]) >= step_model(shape, node).step_s(
            [(tokens, context)]
        ) * (1 - 1e-12)
    counts = TokenCounts(0, context, tokens)
    assert law.idle_cost(counts, shape, away).kappa_crit >= 0
    assert law.idle_cost(counts, shape, away).load_s == law.idle_cost(counts, shape, node).load_s


def test_kappa_crit_moves_with_weights_in_host_memory() -> None:
    """Llama-3.1-70B: 60 of its 139 GB cross a GH200's link in 175 ms, beside four A100s' 46."""
    counts, shape = TokenCounts(0, 4000, 128), SHAPES["llama-3.1-70b"]
    gh200, a100 = node_profile("gh200-c2c"), node_profile("a100-pcie4").times(4)
    away = law.idle_cost(counts, shape, replace(gh200, host_weight_bytes=60e9))
    here = law.idle_cost(counts, shape, gh200)
    assert away.compute_s > 60e9 / gh200.h2d_bytes_per_s > 0.17
    assert away.kappa_crit > 2 * here.kappa_crit
    assert law.idle_cost(counts, shape, a100).ttft_s < away.ttft_s
