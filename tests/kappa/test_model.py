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


def test_a_step_neither_reads_nor_multiplies_the_look_up() -> None:
    # Llama-3.1-8B's tables are of 128,256 by 4,096: one is looked up, one makes the logits of the
    # last token alone.
    table = 128_256 * 4_096
    assert law.weight_bytes(LLAMA) == 2 * (LLAMA.params_total - table)
    assert law.gemm_flops(LLAMA) == 2 * (LLAMA.params_total - 2 * table)
    # Gemma's one table is both: it is read.
    tied, table = model_shape("gemma-3-27b"), 262_208 * 5_376
    assert law.weight_bytes(tied) == 2 * tied.params_total
    assert law.gemm_flops(tied) == 2 * (tied.params_total - table)


def test_experts_and_what_a_token_leaves_alone() -> None:
    # 48 layers of 128 experts of three matrices of 2,048 by 768, of which a token uses 8.
    mixture = model_shape("qwen3-30b-a3b")
    assert law.expert_params(mixture) == pytest.approx((48 * 128 * 3 * 2_048 * 768, 120 / 128))
    assert law.expert_params(LLAMA) == (0.0, 0.0)


def test_sums_over_gpus_send_a_rings_bytes_twice_a_layer() -> None:
    # 32 layers, twice each 4,096 numbers of two bytes; of four GPUs each sends 2·3/4 of them.
    assert law.all_reduce_bytes(LLAMA, 4) == 32 * 2 * 4_096 * 2 * 1.5
    assert law.all_reduce_bytes(LLAMA, 1) == 0.0


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
