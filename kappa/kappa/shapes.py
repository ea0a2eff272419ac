"""Model shapes by name: a few built in, or of a ``config.json`` and the weights beside it.

Built-ins are such configs cut to the keys that matter, so both take one path
(`kappa.model_config`).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from kappa.checks import unknown_name
from kappa.model import ModelShape
from kappa.model_config import dtype_bytes, shape_from_config

# Tensors by name: of which layer; of a vision tower or of layers that predict ahead; scales.
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_BESIDE = re.compile(r"vis(ion|ual)|multi_modal|mm_projector|\bmtp\b")
_SCALE = re.compile(r"_scales?(_inv)?$|\.scales?$|zero(_point|s)$|g_idx$")


def _decoder(
    model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, **more: object
) -> dict[str, object]:
    return {
        "model_type": model_type, "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "torch_dtype": "bfloat16", "_name_or_path": "built in", **more,
    }  # fmt: skip


_LLAMA31 = {"vocab_size": 128256, "max_position_embeddings": 131072}
_QWEN25 = {"vocab_size": 152064, "max_position_embeddings": 32768}
_QWEN3 = {"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
_QWEN3_MOE = {"num_experts": 128, "num_experts_per_tok": 8, **_QWEN3}
_GEMMA3 = {
    "head_dim": 128, "intermediate_size": 21504, "vocab_size": 262208, "sliding_window": 1024,
    "sliding_window_pattern": 6, "max_position_embeddings": 131072,
}  # fmt: skip
_GPT_OSS = {
    "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 2880,
    "vocab_size": 201088, "attention_bias": True, "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128,
    "max_position_embeddings": 131072, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
_OPT = {"vocab_size": 50272, "max_position_embeddings": 2048, "torch_dtype": "float16"}
_DEEPSEEK_V3 = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "vocab_size": 129280, "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip

_BUILT_IN: dict[str, dict[str, object]] = {
    "llama-3.1-8b": _decoder("llama", 32, 4096, 32, 8, intermediate_size=14336, **_LLAMA31),
    "llama-3.1-70b": _decoder("llama", 80, 8192, 64, 8, intermediate_size=28672, **_LLAMA31),
    "llama-3.1-405b": _decoder("llama", 126, 16384, 128, 8, intermediate_size=53248, **_LLAMA31),
    "qwen2.5-7b": _decoder("qwen2", 28, 3584, 28, 4, intermediate_size=18944, **_QWEN25),
    "qwen2.5-14b": _decoder("qwen2", 48, 5120, 40, 8, intermediate_size=13824, **_QWEN25),
    "qwen3-32b": _decoder("qwen3", 64, 5120, 64, 8, intermediate_size=25600, **_QWEN3),
    "qwen3-30b-a3b": _decoder(
        "qwen3_moe", 48, 2048, 32, 4, moe_intermediate_size=768, **_QWEN3_MOE
    ),
    "qwen3-235b-a22b": _decoder(
        "qwen3_moe", 94, 4096, 64, 4, moe_intermediate_size=1536, **_QWEN3_MOE
    ),
    "deepseek-v3": _decoder("deepseek_v3", 61, 7168, 128, 128, **_DEEPSEEK_V3),
    "gemma-3-27b": _decoder("gemma3", 62, 5376, 32, 16, **_GEMMA3),
    "gpt-oss-20b": _decoder("gpt_oss", 24, 2880, 64, 8, **_GPT_OSS),
    "opt-6.7b": _decoder("opt", 32, 4096, 32, 32, ffn_dim=16384, **_OPT),
    "opt-13b": _decoder("opt", 40, 5120, 40, 40, ffn_dim=20480, **_OPT),
}

SHAPES: dict[str, ModelShape] = {
    name: shape_from_config(config, name) for name, config in _BUILT_IN.items()
}
"""Every built-in shape by name: paper 001's five, and those the project benchmarks with."""


def model_shape(name_or_path: str | Path, kv_dtype: str = "auto") -> ModelShape:
    """A shape by built-in name or its hub id, or by path of a ``config.json`` or its folder;
    `ValueError` for an unknown name (the near ones are listed), or a bad file."""
    text = str(name_or_path)
    path = Path(text)
    if path.exists() or path.suffix == ".json":
        shape = shape_from_config(path, kv_dtype=kv_dtype)
        return with_stored_weights(shape, path) if path.is_dir() else shape
    name = text.rsplit("/", 1)[-1].lower().removesuffix("-instruct")
    if name in SHAPES:
        known = SHAPES[name]
        return known if kv_dtype == "auto" else replace(known, kv_dtype_bytes=dtype_bytes(kv_dtype))
    raise unknown_name("model", text, SHAPES, "or give the path of a config.json")


def with_stored_weights(shape: ModelShape, folder: Path) -> ModelShape:
    """The shape with the parameters of a folder's safetensors files, and with their bytes where
    they are packed; unchanged without such files.

    Only headers are read. Vision towers, scales and layers beyond the model's (which only predict
    ahead) are left out; what an expert holds is as the config has it.

    Raises:
        ValueError: a file that is not what it is called.
    """
    params, stored_bytes, is_packed = 0, 0, False
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in _header(path).items():
            layer = _LAYER.search(name)
            beyond = layer is not None and int(layer[1]) >= shape.layers
            if name == "__metadata__" or beyond or _BESIDE.search(name):
                continue
            start, stop = tensor["data_offsets"]
            stored_bytes += stop - start
            if not _SCALE.search(name):
                params += math.prod(tensor["shape"])
                is_packed |= tensor["dtype"] in ("U8", "I32", "U32")
    if not params:
        return shape
    if is_packed:
        return replace(shape, weight_dtype_bytes=stored_bytes / shape.params_total)
    idle = min(shape.params_total - shape.params_active, params - 1)
    return replace(shape, params_total=float(params), params_active=float(params - idle))


def _header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: its length in eight bytes, then JSON."""
    try:
        with path.open("rb") as file:
            header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return header
    except (OSError, ValueError, OverflowError, MemoryError):
        raise ValueError(
            f"{path} is no safetensors file: fetch the model again (of Git LFS, the files "
            "themselves and not what stands for them)"
        ) from None
