"""Shapes read from configs count parameters and KV as the published models do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kappa.model import attention_flops, kv_bytes_per_token
from kappa.model_config import dtype_bytes, shape_from_config, unlisted
from kappa.shapes import SHAPES, model_shape, with_stored_weights

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
        # Of 62 layers 10 see all of the context, of 24 layers 12; the others a window.
        ("gemma-3-27b", 2 * 10 * 16 * 128 * 2, "gqa"),
        ("gpt-oss-20b", 2 * 12 * 8 * 64 * 2, "gqa"),
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
    assert (dtype_bytes("fp8_per_token_head"), dtype_bytes("turboquant_4bit_nc")) == (1, 0.5)


@pytest.mark.parametrize(
    ("quantisation", "size"),
    [
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "awq", "bits": 4}, 0.5),
        ({"load_in_4bit": True}, 0.5),
        ({"load_in_8bit": True}, 1.0),
        ({"quant_method": "gptq"}, 0.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
            },
            1.0,
        ),
    ],
)
def test_weight_dtype_follows_quantisation(quantisation: dict[str, Any], size: float) -> None:
    shape = shape_from_config({**TINY, "quantization_config": quantisation})
    assert (shape.weight_dtype_bytes, shape.kv_dtype_bytes) == (size, 2.0)


def test_shape_keeps_8_bit_weights_whatever_the_dtype() -> None:
    eight = shape_from_config(
        {**TINY, "quantization_config": {"quant_method": "fp8"}}, "", "auto", "bfloat16"
    )
    assert (eight.weight_dtype_bytes, eight.kv_dtype_bytes) == (1.0, 2.0)


def test_a_quantisation_that_nobody_knows_counts_as_the_dtype() -> None:
    config = {**TINY, "quantization_config": {"quant_method": "mystery"}}
    assert shape_from_config(config).weight_dtype_bytes == 2.0
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


# From the models' published hyperparameters (model_configs.json), added up by hand: parameters in
# all, those of experts that a token leaves alone, bytes of KV per token in two bytes, and layers
# with KV that grows with the context, of all layers.
CONFIGS: dict[str, Any] = json.loads((Path(__file__).parent / "model_configs.json").read_text())
FAMILIES = {
    # 24 of 2880 (64 + 16) 64 + 5120 + 4096 * 2880 + 2880 for attention, 64 sinks, 5760 of norms, a
    # router of 2881 * 32, 32 experts of 3 * 2880 ** 2 + 3 * 2880; 2 * 201088 * 2880; 2880. KV: 12
    # layers of 2 * 8 * 64 * 2.
    "gpt-oss-20b": (20_914_757_184, 24 * 28 * (3 * 2880**2 + 3 * 2880), 24_576, 12, 24),
    # 48 of 5120 * 56 * 128 + 5120 ** 2, 17 experts of 3 * 5120 * 8192 with one always, a router of
    # 5120 * 16, 10240 of norms; 2 * 202048 * 5120; 5120. KV: 12 of 2 * 8 * 128 * 2.
    "llama-4-scout": (107_769_861_120, 48 * 15 * 3 * 5120 * 8192, 49_152, 12, 48),
    # 46 of 4096 * 112 * 128 + 14336 + 12288 * 4096 and 8192; one MLP of 3 * 4096 * 10944; 45 of
    # 129 experts of 3 * 4096 * 1408 and 128 * 4097; 2 * 151552 * 4096; 4096.
    "glm-4.5-air": (106_852_251_264, 45 * 120 * 3 * 4096 * 1408, 188_416, 46, 46),
    # 61 of MLA: 1536 (7168 + 1 + 64 * 192), 7168 * 576 + 512 + 512 * 64 * 256, 64 * 128 * 7168 and
    # 14336; one MLP of 3 * 7168 * 18432, 60 of 385 experts of 3 * 7168 * 2048 and 384 * 7169;
    # 2 * 163840 * 7168; 7168. KV: 61 * 576 * 2.
    "kimi-k2": (1_026_408_232_448, 60 * 376 * 3 * 7168 * 2048, 70_272, 61, 61),
    # DeepSeek-V3's 671,026,419,200 and 61 indexers: 1536 * 64 * 128 + 7168 (128 + 64) + 256.
    "deepseek-v3.2": (671_877_944_064, 58 * 248 * 3 * 7168 * 2048, 70_272, 61, 61),
    # 12 of 2048 * (2 * 16 + 4) * 256 + 4096 * 2048 + 512; 36 of 2048 (8192 + 4096 + 64) + 8192 * 4
    # + 64 + 128 + 4096 * 2048; 48 of 513 experts of 3 * 2048 * 512, 2048 * 513 and 4096;
    # 2 * 151936 * 2048; 2048. KV: 12 of 2 * 2 * 256 * 2.
    "qwen3-next-80b-a3b": (79_674_391_296, 48 * 502 * 3 * 2048 * 512, 24_576, 12, 48),
    # 62 of 3072 * 64 * 128 + 6144 * 3072, norms of 56 * 128 and 6144, 256 * 3073, 256 experts of
    # 3 * 3072 * 1536; 2 * 200064 * 3072; 3072.
    "minimax-m2": (228_689_764_864, 62 * 248 * 3 * 3072 * 1536, 253_952, 62, 62),
    # 40 of 4096 * 48 * 128 + 4096 ** 2, 3 * 4096 * 12800, 8192; 49159 * 4096; 4096.
    "granite-3.3-8b": (8_170_864_640, 0, 163_840, 40, 40),
    "qwen2.5-vl-7b": (7_615_616_512, 0, 57_344, 28, 28),
    # 62 of 5376 * 64 * 128 + 4096 * 5376, 256, 3 * 5376 * 21504, 4 * 5376; 262208 * 5376; 5376. KV:
    # 10 of 2 * 16 * 128 * 2.
    "gemma-3-27b": (27_009_346_304, 0, 81_920, 10, 62),
    # 40 of 5120 * 48 * 128 + 4096 * 5120, 3 * 5120 * 32768, 10240; 2 * 131072 * 5120; 5120.
    "mistral-small-3.1-24b": (23_572_403_200, 0, 163_840, 40, 40),
    # As a Llama: 12 of 4 * 768 ** 2, 3 * 768 * 3072, 1536; 50257 * 768; 768.
    "gpt2-like-of-nobody": (151_862_784, 0, 36_864, 12, 12),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_every_kind_are_counted_as_published(name: str) -> None:
    total, idle, kv, growing, layers = FAMILIES[name]
    shape = shape_from_config(CONFIGS[name], name)
    assert (shape.params_total, shape.params_active) == (total, total - idle)
    assert kv_bytes_per_token(shape) == kv
    assert (shape.kv_layers, shape.layers) == (growing, layers)
    assert ("'nobodys' is not listed" in unlisted(CONFIGS[name])) is (name.endswith("nobody"))


def test_every_config_has_its_figures() -> None:
    assert FAMILIES.keys() == CONFIGS.keys()


def test_attention_flops_of_window_layers_ignore_the_context() -> None:
    shape = shape_from_config(CONFIGS["gpt-oss-20b"])
    assert attention_flops(shape, 1, 10_000) == pytest.approx(4 * 12 * 64 * 64 * 10_000.5)


@pytest.mark.parametrize(
    ("change", "growing"),
    [
        ({"layer_types": ["full_attention", "full_attention"]}, 2),
        ({"layer_types": ["sliding_attention", "full_attention"]}, 1),
        ({"layer_types": ["linear_attention", "full_attention"]}, 1),
        ({"layers_block_type": ["mamba", "attention"]}, 1),
        ({"attn_type_list": [0, 1]}, 1),
        ({"attn_layer_period": 2}, 1),
        ({"layer_types": ["sliding_attention", "sliding_attention"]}, 2),  # the whole is a bound
        ({"layer_types": ["full_attention"] * 5}, 2),  # more than there are
    ],
)
def test_layers_whose_kv_grows_are_found_by_whichever_key_tells(
    change: dict[str, Any], growing: int
) -> None:
    assert shape_from_config({**TINY, "model_type": "x", **change}).kv_layers == growing


def test_a_family_without_attention_has_a_prior_too() -> None:
    mamba = {
        "model_type": "mamba2",
        "hidden_size": 2560,
        "num_hidden_layers": 64,
        "vocab_size": 50288,
    }
    shape = shape_from_config(mamba)
    assert 2e9 < shape.params_total < 10e9
    assert "'mamba2' is not listed" in unlisted(mamba) and unlisted(TINY) == ""


def test_experts_in_some_layers_only() -> None:
    moe = {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2, "model_type": "llama4_text"}
    every = shape_from_config({**moe, "interleave_moe_layer_step": 1})
    half = shape_from_config({**moe, "interleave_moe_layer_step": 2})
    listed = shape_from_config({**moe, "moe_layers": [1]})
    assert half.params_total == listed.params_total < every.params_total
    kinds = {
        **TINY,
        "num_experts": 4,
        "model_type": "unheard_of",
        "mlp_layer_types": ["dense", "sparse"],
    }
    assert shape_from_config(kinds).params_total > shape_from_config(TINY).params_total


def stored(folder: Path, **tensors: tuple[str, list[int], int]) -> Path:
    """A safetensors file of headers: by name, with "__" for a dot, dtype, shape and bytes."""
    header, at = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        offsets = [at, at := at + size]
        header[name.replace("__", ".")] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return folder


def test_parameters_are_those_of_the_files_where_there_are_files(tmp_path: Path) -> None:
    moe = {**TINY, "num_local_experts": 4, "num_experts_per_tok": 1, "model_type": "x"}
    shape = shape_from_config(moe)
    folder = stored(
        tmp_path,
        model__layers__0__q=("BF16", [1000, 300], 600_000),
        model__layers__1__experts=("BF16", [70_000], 140_000),
        model__layers__2__ahead=("BF16", [9, 9], 162),  # there are two layers
        vision_tower__x=("BF16", [500, 500], 500_000),
    )
    found = with_stored_weights(shape, folder)
    idle = 2 * 3 * (3 * 64 * 128)
    assert shape.params_total - shape.params_active == idle
    assert (found.params_total, found.params_active) == (370_000, 370_000 - idle)
    assert found.weight_dtype_bytes == shape.weight_dtype_bytes
    assert with_stored_weights(shape, tmp_path.parent) == shape, "no files"


def test_packed_weights_take_config_counts_and_the_files_bytes(
    tmp_path: Path,
) -> None:
    shape = shape_from_config({**TINY, "quantization_config": {"quant_method": "mystery"}})
    folder = stored(
        tmp_path,
        model__layers__0__q__qweight=("I32", [10_000], 40_000),
        model__layers__0__q__weight_scale=("F16", [50], 100),
    )
    found = with_stored_weights(shape, folder)
    assert found.params_total == shape.params_total
    assert found.weight_dtype_bytes == 40_100 / shape.params_total


@pytest.mark.parametrize(
    "content", [b"version https://git-lfs.github.com/spec/v1\n", b"", b"ab" * 9]
)
def test_a_file_that_only_stands_for_weights_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is no safetensors file.*Git LFS"):
        with_stored_weights(shape_from_config(TINY), tmp_path)
