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
    StepSplit,
    activation_share,
    attention_refused,
    cpu_share,
    paper_s,
    split_ahead,
    split_context,
    split_paper,
    split_s,
)
from kappa.plans.rates import ComputeGrid, LineFit, PlanRates, rates_from_law
from kappa.shapes import SHAPES
from tests.kappa.plans.profiles import log_uniform, maybe, node, random_rates

OPT_30B = shape_from_config(
    {
        "model_type": "opt", "num_hidden_layers": 48, "hidden_size": 7168, "ffn_dim": 28672,
        "num_attention_heads": 56, "vocab_size": 50272, "max_position_embeddings": 2048,
        "torch_dtype": "float16",
    },
    "opt-30b",
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
    for index, (rates, batch, context, block) in enumerate(random_decodes(400, seed=32)):
        context = min(context, 300)
        if index % 2:
            # Steps that were measured instead of projections alone.
            axes = (1.0, 64.0), (0.0, 20_000.0)
            least_s, slope = rates.decode_gpu_s(1, 1), 30_000 * rates.project_token_s
            kv, acts = (((least_s,) * 2, (least_s, least_s + s)) for s in (0.1 * slope, slope))
            grids = ComputeGrid(*axes, kv), ComputeGrid(*axes, acts)
            rates = replace(rates, from_kv=grids[0], from_acts=grids[1])
        found = split_ahead(rates, batch, context, block)
        every = (max(rates.decode_s(batch, context, at)) for at in cuts(context, block))
        assert found.step_s <= min(every) * (1 + 1e-12)
        inside += 0 < found.tokens < context
    assert inside > 20


def gain_of(split: StepSplit) -> float:
    """Share of the step's time that the split saves over loading all KV."""
    return 1.0 - split.step_s / split.load_all_s


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
    assert gain_of(found) == pytest.approx(gain, abs=0.005)
    hidden = SHAPES[model].hidden
    ratio = hidden * where.h2d_bytes_per_s / where.flops_per_s
    assert activation_share(rates) == pytest.approx(1 / (1 + ratio))
    # Eq. 11 at the optimum: the share of the time that is saved is half the share of the split.
    assert gain_of(found) == pytest.approx((1 - rates.activation_ratio) * found.share, abs=1e-3)


def test_loading_ahead_a_fast_gpu_projects_everything() -> None:
    """With h·B/G below 1/2 the link stays the longer though all tokens come from activations."""
    for model in ("opt-6.7b", "opt-13b"):
        rates = rates_from_law(SHAPES[model], H200)
        rates = replace(rates, step=replace(rates.step, weights_s=0.0, context_token_s=0.0))
        found = split_ahead(rates, 64, 1_000)
        assert found.tokens == 1_000
        assert gain_of(found) == pytest.approx(0.5)


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
        assert gain_of(found) == 0.0


def test_what_is_held_bounds_the_split() -> None:
    rates = rates_from_law(SHAPES["opt-6.7b"], H200)
    assert split_paper(rates, 8, 1_000, held=0).tokens == 0
    assert split_paper(rates, 8, 1_000, held=300).tokens == 300
    assert (
        split_paper(rates, 8, 1_000, 16, held=10_000).tokens
        == split_paper(rates, 8, 1_000, 16).tokens
    )


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


def test_split_context_equals_trying_every_block_on_300_nodes() -> None:
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
    assert inside > 40


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
    rates = attending(default_rng(9))
    with pytest.raises(ValueError, match="CPU attention fit has R²"):
        replace(rates, attend=LineFit("CPU attention", 1e-6, 0.0, 0.949))
    assert replace(rates, attend=LineFit("CPU attention", 1e-6, 0.0, 0.95)).attend
