"""Bytes and FLOPs of a model, by numbers worked out by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kappa import model as law
from kappa.hardware import node_profile
from kappa.model import ModelShape
from kappa.shapes import model_shape

LLAMA = model_shape("llama-3.1-8b")
PCIE = node_profile("pcie")


def test_weight_reads_of_a_mixture_grow_with_tokens() -> None:
    moe = model_shape("qwen3-30b-a3b")
    reads = [law.weight_read_bytes(moe, tokens) for tokens in (1, 8, 64, 4096)]
    assert reads == sorted(reads)
    assert reads[0] == pytest.approx(2 * moe.params_active)
    assert reads[-1] == pytest.approx(2 * moe.params_total)
    assert law.weight_read_bytes(LLAMA, 1) == 2 * LLAMA.params_total


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
    latent = model_shape("deepseek-v3")
    assert law.kv_bytes(latent, 10, tp=8) == 8 * law.kv_bytes(latent, 10)
    with pytest.raises(ValueError, match="tp is 0"):
        law.kv_bytes(qwen, 1, tp=0)


SHAPE: dict[str, Any] = {
    "name": "tiny", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16,
    "params_active": 1e6, "params_total": 1e6, "attention": "gqa",
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 0),
        ("head_dim", -1),
        ("params_active", float("nan")),
        ("params_active", 2e6),
        ("kv_heads", 8),
        ("attention", "linear"),
        ("attention", "mla"),
        ("experts_active", 2),
        ("experts", 8),
        ("kv_dtype_bytes", 0.0),
    ],
)
def test_shape_names_the_bad_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"ModelShape\.\w+ is .+: \w+"):
        ModelShape(**{**SHAPE, field: value})
