"""Shapes read from configs count parameters and KV as the published models do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kappa.model import kv_bytes_per_token
from kappa.shapes import SHAPES, dtype_bytes, model_shape, shape_from_config

TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("deepseek-v3", 671_026_419_200),
        ("opt-6.7b", 6_658_473_984),
        ("opt-13b", 12_853_473_280),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, total: int) -> None:
    assert SHAPES[name].params_total == total


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22), ("deepseek-v3", 37)]
)
def test_active_parameters_of_mixtures(name: str, billions: float) -> None:
    assert SHAPES[name].params_active == pytest.approx(billions * 1e9, rel=0.02)


@pytest.mark.parametrize(
    ("name", "kv", "attention"),
    [
        ("llama-3.1-8b", 131_072, "gqa"),
        ("qwen2.5-7b", 57_344, "gqa"),
        ("deepseek-v3", 70_272, "mla"),
        ("opt-6.7b", 524_288, "mha"),
    ],
)
def test_kv_and_attention_kind(name: str, kv: int, attention: str) -> None:
    assert kv_bytes_per_token(SHAPES[name]) == kv
    assert SHAPES[name].attention == attention


def test_head_dim_is_derived_or_explicit() -> None:
    assert shape_from_config(TINY).head_dim == 16
    assert shape_from_config({**TINY, "head_dim": 32}).head_dim == 32


def test_tiny_llama_counted_by_hand() -> None:
    attention = 64 * (4 + 2 + 2) * 16 + 64 * 64
    layer = attention + 3 * 64 * 128 + 2 * 64
    untied = 2 * 256 * 64 + 64 + 2 * layer
    assert shape_from_config(TINY).params_total == untied
    tied = shape_from_config({**TINY, "tie_word_embeddings": True})
    assert tied.params_total == untied - 256 * 64
    biased = shape_from_config({**TINY, "attention_bias": True})
    assert biased.params_total == untied + 2 * (8 * 16 + 64)


@pytest.mark.parametrize(
    "model_type", ["mistral", "phi3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"]
)
def test_dense_families_read(model_type: str) -> None:
    shape = shape_from_config({**TINY, "model_type": model_type})
    assert shape.params_active == shape.params_total
    assert kv_bytes_per_token(shape) == 2 * 2 * 2 * 16 * 2


def test_mixtral_counts_active_experts() -> None:
    moe = {**TINY, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    shape = shape_from_config(moe)
    assert (shape.experts, shape.experts_active) == (8, 2)
    assert shape.params_total - shape.params_active == 2 * 6 * 3 * 64 * 128


def test_shared_experts_are_always_active() -> None:
    moe = {
        **TINY, "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
    }  # fmt: skip
    shared = shape_from_config({**moe, "shared_expert_intermediate_size": 16})
    plain = shape_from_config(moe)
    extra = 2 * (3 * 64 * 16 + 64)
    assert shared.params_active - plain.params_active == extra
    assert shared.params_total - plain.params_total == extra


def test_kv_dtype_follows_the_model_or_the_override() -> None:
    assert shape_from_config({**TINY, "torch_dtype": "float32"}).kv_dtype_bytes == 4
    assert shape_from_config({**TINY, "dtype": "bfloat16"}).kv_dtype_bytes == 2
    assert shape_from_config(TINY, kv_dtype="fp8").kv_dtype_bytes == 1
    assert model_shape("llama-3.1-8b", kv_dtype="fp8").kv_dtype_bytes == 1
    assert dtype_bytes("torch.float16") == 2


@pytest.mark.parametrize(
    ("quantisation", "size"),
    [
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "awq", "bits": 4}, 0.5),
        ({"load_in_4bit": True}, 0.5),
        ({"load_in_8bit": True}, 1.0),
    ],
)
def test_weight_dtype_follows_quantisation(quantisation: dict[str, Any], size: float) -> None:
    shape = shape_from_config({**TINY, "quantization_config": quantisation})
    assert (shape.weight_dtype_bytes, shape.kv_dtype_bytes) == (size, 2.0)


def test_unclear_quantisation_asks_for_the_dtype() -> None:
    config = {**TINY, "quantization_config": {"quant_method": "mystery"}}
    with pytest.raises(ValueError, match=r"'quantization_config'.*weight_dtype"):
        shape_from_config(config)
    assert shape_from_config(config, weight_dtype="int4").weight_dtype_bytes == 0.5


def test_text_model_inside_a_multimodal_config() -> None:
    nested = {
        "model_type": "gemma3", "torch_dtype": "float32",
        "text_config": {**TINY, "model_type": "gemma3_text"},
    }  # fmt: skip
    assert shape_from_config(nested).kv_dtype_bytes == 4


def test_shape_from_folder_and_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    from_folder = model_shape(tmp_path)
    assert from_folder == model_shape(tmp_path / "config.json")
    assert from_folder.name == tmp_path.name
    assert from_folder.source.endswith("config.json")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "mamba"}, r"key 'model_type' is 'mamba'.*by hand.*llama"),
        ({"hidden_size": None}, r"key 'hidden_size' is missing"),
        ({"num_attention_heads": 0}, r"key 'num_attention_heads' is 0: give"),
        ({"vocab_size": "many"}, r"key 'vocab_size' is 'many': give"),
        ({"torch_dtype": "posit8"}, r"key 'torch_dtype' names an unknown dtype"),
    ],
)
def test_errors_name_file_key_and_remedy(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, **change}), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"config\.json: {complaint}"):
        shape_from_config(path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.json: cannot read the model config"):
        model_shape(tmp_path / "absent.json")


def test_names_are_forgiving_and_unknown_ones_helped() -> None:
    assert model_shape("meta-llama/Llama-3.1-8B-Instruct") is SHAPES["llama-3.1-8b"]
    with pytest.raises(
        ValueError, match=r"'Qwen/Qwen2.5-7'\. Did you mean 'qwen2\.5-7b'\?.*opt-13b"
    ):
        model_shape("Qwen/Qwen2.5-7")
