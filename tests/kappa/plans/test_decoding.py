"""Splits of a decoding step against every other split; the papers' figures; refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from numpy.random import Generator, default_rng

from kappa.hardware import NodeProfile
from kappa.model import ModelShape, kv_bytes
from kappa.model_config import shape_from_config
from kappa.plans.decoding import (
    LEAST_SHARE,
    MODES,
    LayerTimes,
    activation_share,
    alpha_star,
    attention_refused,
    cpu_share,
    paper_s,
    plan_layer,
    split_ahead,
    split_context,
    split_paper,
    split_s,
)
from kappa.plans.rates import ComputeGrid, LineFit, PlanRates, rates_from_law
from kappa.shapes import SHAPES
from tests.kappa.plans.profiles import log_uniform, maybe, random_rates

OPT_30B = shape_from_config(
    {
        "model_type": "opt", "num_hidden_layers": 48, "hidden_size": 7168, "ffn_dim": 28672,
        "num_attention_heads": 56, "vocab_size": 50272, "max_position_embeddings": 2048,
        "torch_dtype": "float16",
    },
    "opt-30b",
)  # fmt: skip


def node(gigabytes_per_s: float, teraflops: float) -> NodeProfile:
    return NodeProfile(
        name="node", gpu="gpu", link_name="PCIe", h2d_bytes_per_s=gigabytes_per_s * 1e9,
        flops_per_s=teraflops * 1e12, hbm_bytes_per_s=4.8e12,
    )  # fmt: skip


H200 = node(50, 600)
# The paper's stack reached about 14 GB/s of its PCIe 4 link; GEMMs reach about 65 % of 312 TFLOP/s.
A100 = node(14, 0.65 * 312)


def cuts(context: int, block: int) -> list[int]:
    return [*range(0, context, block), context]


def random_decodes(count: int, seed: int) -> list[tuple[PlanRates, int, int, int]]:
    rng = default_rng(seed)
    return [
        (random_rates(rng), int(rng.integers(1, 65)), int(rng.integers(1, 1500)),
         int(rng.choice([1, 16, 64])))
        for _ in range(count)
    ]  # fmt: skip


def test_the_papers_split_is_the_best_of_every_split() -> None:
    inside = 0
    for rates, batch, context, block in random_decodes(400, seed=31):
        found = split_paper(rates, batch, context, block)
        assert found.tokens in cuts(context, block)
        least_s = min(paper_s(rates, batch, context, at) for at in cuts(context, block))
        assert found.step_s <= least_s * (1 + 1e-12)
        inside += 0 < found.tokens < context
    assert inside > 80


def test_the_split_that_loads_ahead_is_the_best_of_every_split() -> None:
    inside = 0
    for rates, batch, context, block in random_decodes(400, seed=32):
        context = min(context, 300)
        found = split_ahead(rates, batch, context, block)
        every = (max(rates.decode_s(batch, context, at)) for at in cuts(context, block))
        assert found.step_s <= min(every) * (1 + 1e-12)
        inside += 0 < found.tokens < context
    assert inside > 20


@pytest.mark.parametrize(
    ("model", "where", "share", "gain"),
    [
        ("opt-6.7b", H200, 0.75, 0.37),
        ("opt-13b", H200, 0.70, 0.35),
        ("opt-6.7b", A100, 0.78, 0.39),
    ],
)
def test_split_and_gain_of_the_papers_models(
    model: str, where: NodeProfile, share: float, gain: float
) -> None:
    rates = rates_from_law(SHAPES[model], where)
    found = split_paper(rates, 64, 10_000)
    assert found.share == pytest.approx(share, abs=0.005)
    assert found.gain == pytest.approx(gain, abs=0.005)
    hidden = SHAPES[model].hidden
    ratio = hidden * where.h2d_bytes_per_s / where.flops_per_s
    assert activation_share(rates) == pytest.approx(1 / (1 + ratio))
    # Eq. 11 at the optimum: the share of the time that is saved is half the share of the split.
    assert found.gain == pytest.approx((1 - rates.activation_ratio) * found.share, abs=1e-3)


def test_loading_ahead_a_fast_gpu_projects_everything() -> None:
    """With h·B/G below 1/2 the link stays the longer though all tokens come from activations."""
    for model in ("opt-6.7b", "opt-13b"):
        rates = rates_from_law(SHAPES[model], H200)
        rates = replace(rates, step=replace(rates.step, weights_s=0.0, context_token_s=0.0))
        found = split_ahead(rates, 64, 1_000)
        assert found.tokens == 1_000
        assert found.gain == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("shape", "mebibytes", "milliseconds"),
    [(SHAPES["opt-6.7b"], 512, 15.6), (SHAPES["opt-13b"], 640, 19.5), (OPT_30B, 896, 27.3)],
)
def test_table_1(shape: ModelShape, mebibytes: int, milliseconds: float) -> None:
    """KV of one layer, 32 sequences of 1,024 tokens, and its time over 32 GiB/s."""
    size_bytes = kv_bytes(shape, 32 * 1_024) / shape.layers
    assert size_bytes == mebibytes * 2**20
    assert 1e3 * size_bytes / (32 * 2**30) == pytest.approx(milliseconds, abs=0.05)


def test_grouped_queries_are_never_split() -> None:
    rates = rates_from_law(SHAPES["llama-3.1-8b"], H200)
    assert activation_share(rates) == 0.0
    for found in (split_paper(rates, 8, 1_000), split_ahead(rates, 8, 1_000)):
        assert found.tokens == 0
        assert found.gain == 0.0


def test_what_is_held_bounds_the_split() -> None:
    rates = rates_from_law(SHAPES["opt-6.7b"], H200)
    assert split_paper(rates, 8, 1_000, held=0).tokens == 0
    assert split_paper(rates, 8, 1_000, held=300).tokens == 300
    assert (
        split_paper(rates, 8, 1_000, 16, held=10_000).tokens
        == split_paper(rates, 8, 1_000, 16).tokens
    )


@pytest.mark.parametrize(("context", "block"), [(0, 16), (16, 0)])
def test_bad_sizes_are_refused(context: int, block: int) -> None:
    rates = rates_from_law(SHAPES["opt-6.7b"], A100)
    with pytest.raises(ValueError, match="give 1 or more"):
        split_paper(rates, 1, context, block)


def random_times(rng: Generator, *, plain: bool = False) -> LayerTimes:
    """From a CPU that hides behind the link to one that is waited for."""
    link, hidden = log_uniform(rng, 1e9, 1e11), log_uniform(rng, 1e3, 2e4)
    crossing_s = 16 * hidden * hidden / link
    cpu = [crossing_s * log_uniform(rng, 1e-3, 3.0) for _ in range(5)]
    square = 2 * hidden * hidden
    return LayerTimes(
        *cpu,
        out_bytes=square,
        fc1_bytes=4 * square,
        fc2_bytes=4 * square,
        values_bytes=hidden * log_uniform(rng, 10.0, 1e5),
        link_bytes_per_s=link,
        gpu_s=0.0 if plain else maybe(rng, crossing_s * log_uniform(rng, 1e-3, 1.0)),
        gpu_fc1_s=0.0 if plain else maybe(rng, crossing_s * log_uniform(rng, 1e-3, 1.0)),
    )


def test_modes_and_columns_are_the_best_of_all_on_1000_nodes() -> None:
    rng = default_rng(2)
    chosen = dict.fromkeys(MODES, 0)
    inside = 0
    for _ in range(1000):
        times = random_times(rng)
        columns, multiple = int(rng.integers(1, 400)), int(rng.choice([1, 8, 64]))
        plan = plan_layer(times, columns, multiple)
        every = [
            times.layer_s("mha", moved / columns)
            for moved in {*range(0, columns + 1, multiple), columns}
        ]
        others = [times.layer_s(mode) for mode in MODES[1:]]
        assert plan.layer_s == pytest.approx(min(every + others), rel=1e-12)
        assert plan.layer_s == times.layer_s(plan.mode, plan.alpha)
        assert plan.columns % multiple == 0 or plan.columns == columns
        chosen[plan.mode] += 1
        inside += 0 < plan.columns < columns
    assert min(chosen.values()) > 20 and inside > 100


def test_alpha_is_where_cpu_and_link_take_equally_long() -> None:
    rng = default_rng(3)
    met = 0
    for _ in range(1000):
        times = random_times(rng, plain=True)
        alpha = alpha_star(times)
        if 0 < alpha < 1:
            met += 1
            assert times.cpu_s("mha", alpha) == pytest.approx(times.link_s("mha", alpha))
            ffn_s = (times.fc1_bytes + times.fc2_bytes) / times.link_bytes_per_s
            each_s = times.fc1_bytes / times.link_bytes_per_s + times.fc1_s
            assert alpha == pytest.approx((ffn_s - times.cpu_s("mha")) / each_s)
        elif alpha == 0:
            assert times.cpu_s("mha") >= times.link_s("mha")
        else:
            assert times.cpu_s("mha", 1.0) <= times.link_s("mha", 1.0)
    assert met > 200


def test_a_slow_cpu_gives_up_its_products_from_the_last_on() -> None:
    base = LayerTimes(1.0, 1.0, 1.0, 1.0, 1.0, 10.0, 40.0, 40.0, 10.0, 20.0)
    assert plan_layer(base, 100).mode == "mha"  # 4 s beside 4 s of FFN
    slower = replace(base, out_s=3.0)
    assert plan_layer(slower, 100).mode == "mha-o"  # 3 s beside 4.5
    slowest = replace(slower, values_s=6.0)
    assert plan_layer(slowest, 100).mode == "mha-av-o"  # 2 s beside 5
    assert slowest.link_s("mha-av-o") == 5.0


def test_nothing_is_gained_without_bandwidth_to_spare_nor_lost_against_streaming() -> None:
    """On a CPU that is free, the plan is never slower than sending every weight."""
    rng = default_rng(4)
    for _ in range(200):
        times = random_times(rng)
        free = replace(times, project_s=0, scores_s=0, values_s=0, out_s=0, fc1_s=0)
        weights = free.out_bytes + free.fc1_bytes + free.fc2_bytes
        streamed_s = max(weights / free.link_bytes_per_s, free.gpu_s + free.gpu_fc1_s)
        assert plan_layer(free, 64).layer_s <= streamed_s


def attending(rng: Generator, *, plain: bool = False) -> PlanRates:
    rates = random_rates(rng, plain=plain)
    mu = rates.load_token_s
    each = mu * log_uniform(rng, 0.05, 20.0)
    some = 0.0 if plain else 1.0
    changed = replace(
        rates,
        attend=LineFit("CPU attention", each, some * maybe(rng, each * log_uniform(rng, 1, 200))),
        h2d_attending=1.0 if plain else float(rng.uniform(0.3, 1.0)),
        attend_loading=1.0 if plain else float(rng.uniform(0.3, 1.0)),
    )
    if plain or rng.random() < 0.5:
        return changed
    batches, contexts = (1.0, 4.0, 32.0), (0.0, 256.0, 4096.0)
    base = rates.step.weights_s + rates.step.fixed_s
    seconds = tuple(
        tuple(base * (1.1 + 0.01 * b + 1e-4 * b * s * rng.random()) for s in contexts)
        for b in batches
    )
    return replace(changed, decode=ComputeGrid(batches, contexts, seconds))


def test_the_context_is_split_as_well_as_by_trying_every_block_on_300_nodes() -> None:
    rng = default_rng(5)
    inside = 0
    for _ in range(300):
        rates = attending(rng)
        batch, block = int(rng.integers(1, 33)), int(rng.choice([1, 8, 16, 64]))
        context = int(rng.integers(1, 64 * block + 1))
        found = split_context(rates, batch, context, block)
        every = {*range(0, context + 1, block), context}
        best = min(split_s(rates, batch, context, tokens) for tokens in every)
        assert found.step_s == pytest.approx(best, rel=1e-9)
        assert found.step_s <= min(found.load_all_s, found.load_none_s) * (1 + 1e-12)
        inside += 0 < found.tokens < context
    assert inside > 45


def test_without_anything_else_the_split_is_by_bandwidth() -> None:
    """c* = B_c / (B_c + B'), and the step takes b·s·m / (B_c + B')."""
    rng = default_rng(6)
    for _ in range(300):
        rates = replace(attending(rng, plain=True))
        free = replace(
            rates, step=replace(rates.step, token_s=0.0, weights_s=0.0, context_token_s=0.0)
        )
        found = split_context(free, 4, 100_000)
        both = free.attend_bytes_per_s + free.h2d_bytes_per_s
        assert cpu_share(free) == pytest.approx(free.attend_bytes_per_s / both)
        assert found.share == pytest.approx(cpu_share(free), abs=1e-4)
        assert found.step_s == pytest.approx(4 * 100_000 * free.kv_bytes / both, rel=1e-4)


def test_the_cpu_is_asked_from_a_share_of_the_links_bandwidth_on() -> None:
    rates = random_rates(default_rng(7), plain=True)
    assert "not measured" in attention_refused(rates)
    for share, refused in ((LEAST_SHARE * 0.99, True), (LEAST_SHARE * 1.01, False)):
        line = LineFit("CPU attention", rates.load_token_s / share)
        assert bool(attention_refused(replace(rates, attend=line))) == refused
    with pytest.raises(ValueError, match="not measured: profile with threads"):
        cpu_share(rates)
    with pytest.raises(ValueError, match="not measured"):
        split_context(rates, 1, 10)


def test_what_cannot_be_is_refused() -> None:
    times = random_times(default_rng(8))
    with pytest.raises(ValueError, match="link_bytes_per_s"):
        replace(times, link_bytes_per_s=0.0)
    with pytest.raises(ValueError, match="fc1_s"):
        replace(times, fc1_s=-1.0)
    with pytest.raises(ValueError, match="columns 0"):
        plan_layer(times, 0)
    rates = attending(default_rng(9))
    with pytest.raises(ValueError, match="11 tokens on the CPU of 10"):
        split_s(rates, 1, 10, 11)
    with pytest.raises(ValueError, match="1 or more"):
        split_context(rates, 1, 0)
    with pytest.raises(ValueError, match="CPU attention fit has R²"):
        replace(rates, attend=LineFit("CPU attention", 1e-6, 0.0, 0.5))


def test_a_layer_by_hand() -> None:
    times = LayerTimes(
        project_s=1.0, scores_s=2.0, values_s=3.0, out_s=4.0, fc1_s=10.0,
        out_bytes=10.0, fc1_bytes=40.0, fc2_bytes=40.0, values_bytes=20.0, link_bytes_per_s=2.0,
    )  # fmt: skip
    # All of attention is 1 + 2 + 3 + 4, and half of FC1's columns 5 more; 20 + 40 bytes then cross.
    assert (times.cpu_s("mha"), times.cpu_s("mha", 0.5)) == (10.0, 15.0)
    assert (times.link_s("mha"), times.link_s("mha", 0.5)) == (40.0, 30.0)
    # The other modes move no columns: 6 s, 40 + 40 + 10 bytes; 3 s, and 20 bytes of values.
    assert (times.cpu_s("mha-o", 0.5), times.link_s("mha-o", 0.5)) == (6.0, 45.0)
    assert (times.cpu_s("mha-av-o", 0.5), times.link_s("mha-av-o", 0.5)) == (3.0, 55.0)
    # (40 - 10) / (20 + 10): all columns; the layer then lasts 20 s either way.
    assert alpha_star(times) == 1.0
    plan = plan_layer(times, columns=8)
    assert (plan.mode, plan.columns, plan.alpha, plan.layer_s) == ("mha", 8, 1.0, 20.0)
    # A CPU of three times the attention: (40 - 30) / 30, 8/3 of 8 columns, by twos 2 (or 4).
    slow = replace(times, out_s=24.0)
    assert alpha_star(slow) == pytest.approx(1 / 3)
    even = plan_layer(slow, columns=8, multiple=2)
    # With 2 columns the link takes (30 + 40) / 2 = 35 s, the CPU 32.5; with 4, 30 and 35.
    assert (even.columns, even.alpha, even.layer_s) == (2, 0.25, 35.0)
    # The device's own part: 6 s, and 8 of FC1, of which a quarter has been taken off.
    device = replace(times, gpu_s=26.0, gpu_fc1_s=8.0)
    assert device.layer_s("mha", 0.25) == 12.5 + 26.0 + 6.0
