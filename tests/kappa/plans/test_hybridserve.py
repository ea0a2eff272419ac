"""HybridServe: the allocation against brute force, the paper's ratios, and mini-batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from numpy.random import default_rng

from kappa.cost import StepModel
from kappa.hardware import NodeProfile
from kappa.model_config import shape_from_config
from kappa.plans.decoding import activation_share, split_ahead
from kappa.plans.hybridserve import (
    Allocation,
    Blocks,
    HostCache,
    allocate_corrected,
    allocate_paper,
    host_cache,
    imbalance,
    initial_blocks,
    pack,
    planned_share,
    priced,
)
from kappa.plans.rates import ComputeGrid, LineFit, PlanRates, rates_from_law
from tests.kappa.plans.profiles import log_uniform

_RTX4090_TFLOPS = 165.0


_PCIE4_BYTES_PER_S = 25e9


def opt(hidden: int, layers: int) -> dict[str, object]:
    return {
        "model_type": "opt", "num_hidden_layers": layers, "hidden_size": hidden,
        "ffn_dim": 4 * hidden, "num_attention_heads": hidden // 128, "vocab_size": 50272,
        "max_position_embeddings": 2048, "torch_dtype": "float16",
    }  # fmt: skip


def opt_rates(hidden: int, layers: int, flops_per_s: float, bytes_per_s: float) -> PlanRates:
    node = NodeProfile(
        name="node", gpu="gpu", link_name="PCIe", h2d_bytes_per_s=bytes_per_s,
        flops_per_s=flops_per_s, hbm_bytes_per_s=1e12,
    )  # fmt: skip
    return rates_from_law(shape_from_config(opt(hidden, layers), f"opt-{hidden}"), node)


def random_caches(count: int, seed: int) -> list[HostCache]:
    rng = default_rng(seed)
    caches = []
    for _ in range(count):
        a_l = log_uniform(rng, 1e-5, 1e-3)
        a_g = a_l * log_uniform(rng, 0.05, 5.0)
        kv_block_bytes = 1e6
        blocks = int(rng.integers(1, 250))
        caches.append(
            HostCache(
                project=LineFit("KV projection", a_g, a_g * float(rng.choice([0.0, 3.0]))),
                load=LineFit("load", a_l, a_l * float(rng.choice([0.0, 2.0]))),
                host_bytes=kv_block_bytes * blocks,
                kv_block_bytes=kv_block_bytes,
                act_block_bytes=kv_block_bytes * float(rng.choice([0.5, 0.375, 0.875])),
                forward_s=a_l * log_uniform(rng, 0.1, 150.0),
                weights_s=float(rng.choice([0.0, a_l * log_uniform(rng, 1.0, 200.0)])),
                attend_block_s=a_l * float(rng.choice([0.0, 0.2])),
                device_act_blocks=int(rng.choice([0, rng.integers(1, 200)])),
            )
        )
    return caches


def test_the_paper_balances_projecting_and_loading() -> None:
    for cache in random_caches(300, seed=42):
        act_init, kv_init = initial_blocks(cache)
        act = allocate_paper(cache).act_blocks - act_init
        s_act, s_kv = cache.act_block_bytes, cache.kv_block_bytes
        left = max(cache.host_bytes - s_act * act_init - s_kv * kv_init, 0.0)
        project, load = cache.project, cache.load

        def off(n: int) -> float:
            kv = (left - s_act * n) / s_kv  # noqa: B023
            lines = project.per_token_s * n + project.fixed_s, load.per_token_s * kv + load.fixed_s  # noqa: B023
            return abs(lines[0] - lines[1])

        best = min(range(math.floor(left / s_act) + 1), key=off)
        # Both parts are of fractional blocks, and their sum is cut once.
        assert abs(act - best) < 2


@pytest.mark.parametrize(
    ("device", "initial", "link_s"),
    [(2, (3.0, 0.0), 11.0), (8, (0.0, 6.0), 17.0), (5, (0.0, 0.0), 11.0)],
)
def test_algorithm_1_fills_the_weights_time_first(device, initial, link_s) -> None:
    """By hand: T_load_w of 10 s, 2 s to project a block and 1 s to load one; S_KV = 2 S_ACT = 2."""
    room = 2.0 * initial[1] + initial[0] + 2.0
    cache = HostCache(PROJECT, LOAD, room, 2.0, 1.0, weights_s=10.0, device_act_blocks=device)
    assert initial_blocks(cache) == initial
    found = allocate_paper(cache)
    # What remains, of 2 bytes, is shared so that A blocks of 2 s and K of 1 s take equally long.
    assert (found.act_blocks, found.kv_blocks) == (int(initial[0]), int(initial[1]) + 1)
    assert (found.link_s, found.gpu_s) == (link_s, 2.0 * (initial[0] + device))


def test_weights_that_cross_leave_time_to_project() -> None:
    rates = opt_rates(7168, 48, 50e12, 25e9)
    crossing = replace(rates, weights_s=60e9 / 25e9)
    shares = [planned_share(each, 16, 40e9, 64) for each in (rates, crossing)]
    assert 0.0 < shares[0] < shares[1] <= 1.0
    # KVPR's split, planned again at each step, does the same (paper 000, column by column).
    splits = [split_ahead(each, 64, 512).share for each in (rates, crossing)]
    assert splits[0] < splits[1] <= 1.0


@pytest.mark.parametrize(
    ("device", "allocate", "share"),
    [
        (0, allocate_corrected, 10 / 15), (4, allocate_corrected, 10 / 17),
        (10, allocate_corrected, 10 / 20), (12, allocate_corrected, 12 / 22),
        (4, allocate_paper, 8 / 16),
    ],
)  # fmt: skip
def test_planned_share_counts_the_blocks_on_the_device(device, allocate, share) -> None:
    """By hand: 20 bytes of host memory cross in 10 s behind weights of 10 s, in which 10 blocks of
    2 s are projected, wherever they lie. As printed: 1 of them, then 3.8 more beside 7.6."""
    nothing = StepModel(token_s=0.0, pair_s=0.0, weights_s=0.0, context_token_s=0.0, fixed_s=0.0)
    rates = PlanRates("hand", 1, 2.0, 1.0, LOAD, PROJECT, nothing, weights_s=10.0)
    assert planned_share(rates, 1, 20.0, 1, allocate, device) == pytest.approx(share)


@pytest.mark.parametrize("allocate", [allocate_paper, allocate_corrected])
def test_allocations_fill_the_memory_and_no_more(allocate) -> None:  # type: ignore[no-untyped-def]
    for cache in random_caches(300, seed=43):
        found: Allocation = allocate(cache)
        assert min(found.act_blocks, found.kv_blocks) >= 0
        used = found.act_blocks * cache.act_block_bytes + found.kv_blocks * cache.kv_block_bytes
        spare = cache.host_bytes - used
        assert -1e-6 * cache.host_bytes <= spare < 2 * cache.kv_block_bytes


def test_the_corrected_allocation_is_the_best_of_every_one() -> None:
    kinds = {"all KV": 0, "mixed": 0, "all activations": 0}
    for cache in random_caches(300, seed=44):
        found = allocate_corrected(cache)
        most = math.floor(cache.host_bytes / cache.act_block_bytes)
        best_per_s = max(priced(cache, act).blocks_per_s for act in range(most + 1))
        # One block more or less may hold one block more, and take one block's time less.
        longest_s = max(found.link_s, found.gpu_s)
        blocks = found.act_blocks + found.kv_blocks + found.device_blocks
        block_s = max(cache.project.per_token_s, cache.load.per_token_s)
        reach = (blocks + 1) / (longest_s - min(block_s, 0.9 * longest_s))
        assert best_per_s <= max(reach, found.blocks_per_s * (1 + 1e-12))
        kind = "mixed" if 0 < found.act_blocks < most else "all KV"
        kinds["all activations" if found.act_blocks == most else kind] += 1
    assert min(kinds.values()) > 6


@pytest.mark.parametrize(
    ("hidden", "layers", "kv_per_act"), [(4096, 32, 1.0), (7168, 48, 2.0), (9216, 64, 1.78)]
)
def test_the_papers_ratios(hidden: int, layers: int, kv_per_act: float) -> None:
    """Each implies a GEMM rate, 54 to 78 % of an RTX 4090's peak; that rate gives it back."""
    flops_per_s = hidden * _PCIE4_BYTES_PER_S / kv_per_act
    assert 0.5 < flops_per_s / (_RTX4090_TFLOPS * 1e12) < 0.8
    rates = opt_rates(hidden, layers, flops_per_s, _PCIE4_BYTES_PER_S)
    found = allocate_paper(host_cache(rates, 16, 800e9))
    act, kv = found.act_blocks, found.kv_blocks
    assert kv / act == pytest.approx(kv_per_act, rel=0.001)
    # The planner of the other paper makes the same split.
    share = activation_share(rates)
    assert (1 - share) / share == pytest.approx(kv / act, rel=0.001)


def test_where_projecting_is_cheap_everything_is_activations() -> None:
    """An H200 with OPT-6.7B: half the link's time is not enough to load for the gpu."""
    rates = opt_rates(4096, 32, 600e12, 50e9)
    cache = host_cache(rates, 16, 87e9, batch=64, context_tokens=512)
    assert allocate_corrected(cache).kv_blocks <= 1
    assert allocate_paper(cache).kv_blocks > 10


def test_the_correction_counts_what_the_paper_forgets() -> None:
    rates = opt_rates(7168, 48, 90e12, 25e9)
    cache = host_cache(rates, 16, 340e9, batch=64, context_tokens=512)
    assert cache.forward_s > 0
    paper, corrected = allocate_paper(cache), allocate_corrected(cache)
    really = priced(cache, paper.act_blocks)
    assert really.link_s > paper.link_s
    assert really.gpu_s > paper.gpu_s
    assert corrected.blocks_per_s >= really.blocks_per_s


def test_steps_that_were_measured_are_what_the_cache_counts() -> None:
    rates = opt_rates(4096, 32, 600e12, 50e9)
    axes = (1.0, 64.0), (0.0, 64_000.0, 128_000.0)
    from_kv = ComputeGrid(*axes, ((0.1, 0.3, 0.5), (0.1, 0.3, 0.5)))
    from_acts = ComputeGrid(*axes, ((0.1, 1.1, 2.1), (0.1, 1.1, 2.1)))
    measured = replace(rates, from_kv=from_kv, from_acts=from_acts)
    cache = host_cache(measured, 16, 87e9, batch=64, context_tokens=1_000)
    layer = 1.0 / rates.layers
    assert cache.project.per_token_s == pytest.approx(0.8 / 64_000 * 16 * layer)
    assert cache.attend_block_s == pytest.approx(0.2 / 64_000 * 16 * layer)
    assert cache.forward_s == pytest.approx(0.1 * layer)


def test_planned_share_is_zero_when_activations_exceed_kv() -> None:
    rates = opt_rates(4096, 32, 600e12, 50e9)
    assert planned_share(rates, 16, 100e9, 64) == pytest.approx(1.0, abs=1e-4)
    assert 0.3 < planned_share(rates, 16, 100e9, 64, allocate_paper) < 0.9
    larger = replace(rates, activation_bytes=2 * rates.kv_bytes)
    assert planned_share(larger, 16, 100e9, 64) == planned_share(rates, 16, 1e3, 64) == 0.0


PROJECT, LOAD = LineFit("KV projection", 2.0), LineFit("load", 1.0)


def add(one: Blocks, other: Blocks) -> Blocks:
    return Blocks(one.act + other.act, one.kv + other.kv)


def fits(blocks: Blocks, most: Blocks) -> bool:
    return blocks.act <= most.act and blocks.kv <= most.kv


def test_imbalance_is_one_where_both_take_equally_long() -> None:
    assert imbalance(Blocks(1, 2), PROJECT, LOAD) == 1.0
    assert imbalance(Blocks(1, 4), PROJECT, LOAD) == imbalance(Blocks(2, 2), PROJECT, LOAD) == 2.0
    assert imbalance(Blocks(0, 2), PROJECT, LOAD) == math.inf
    assert imbalance(Blocks(2, 0), PROJECT, LOAD) == math.inf
    # 3 blocks project in 3 ms, 1 loads in 1 ms: three times as long, as it is with 3 s and 1 s.
    fast = LineFit("KV projection", 1e-3), LineFit("load", 1e-3)
    assert imbalance(Blocks(3, 1), *fast) == imbalance(Blocks(1, 3), *fast) == pytest.approx(3.0)


def test_each_request_is_in_one_batch_that_fits() -> None:
    rng = default_rng(51)
    for _ in range(300):
        requests = [
            Blocks(int(rng.integers(0, 20)), int(rng.integers(0, 20)))
            for _ in range(int(rng.integers(0, 40)))
        ]
        most = Blocks(int(rng.integers(20, 60)), int(rng.integers(20, 60)))
        batches = pack(requests, most, PROJECT, LOAD)
        assert sorted(i for batch in batches for i in batch) == list(range(len(requests)))
        for batch in batches:
            total = Blocks(0, 0)
            worst = math.inf
            for i in batch:
                total = add(total, requests[i])
                assert imbalance(total, PROJECT, LOAD) <= worst
                worst = imbalance(total, PROJECT, LOAD)
            assert fits(total, most)


def test_no_request_of_a_later_batch_could_have_joined() -> None:
    rng = default_rng(52)
    for _ in range(100):
        requests = [Blocks(int(rng.integers(1, 20)), int(rng.integers(1, 20))) for _ in range(20)]
        most = Blocks(40, 40)
        batches = pack(requests, most, PROJECT, LOAD)
        first = Blocks(*map(sum, zip(*(requests[i] for i in batches[0]), strict=True)))
        for i in (i for batch in batches[1:] for i in batch):
            grown = add(first, requests[i])
            worse = imbalance(grown, PROJECT, LOAD) > imbalance(first, PROJECT, LOAD)
            assert worse or not fits(grown, most)


def test_unlike_requests_are_paired() -> None:
    """Two that project much and two that load much: each batch gets one of each."""
    requests = [Blocks(4, 2), Blocks(4, 2), Blocks(1, 8), Blocks(1, 8)]
    batches = pack(requests, Blocks(5, 10), PROJECT, LOAD)
    assert sorted(map(sorted, batches)) == [[0, 2], [1, 3]]


def test_pack_tries_a_passed_request_again_after_others_joined() -> None:
    requests = [Blocks(1, 4), Blocks(6, 0), Blocks(1, 4)]
    assert pack(requests, Blocks(99, 99), PROJECT, LOAD) == [[0, 2, 1]]


def test_requests_without_activations_fill_the_buffers() -> None:
    assert pack([Blocks(0, 4)] * 5, Blocks(0, 10), PROJECT, LOAD) == [[0, 1], [2, 3], [4]]
