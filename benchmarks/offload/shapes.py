"""The models that experiments use, as shapes: their weights are random, from a seed.

Published shapes by name, and small ones that two slow cores can compute. Positions of OPT are as
many as the experiment needs: no trained table of them is read.
"""

from __future__ import annotations

from typing import Any

from engine.config import ModelConfig, read_config

_SMALL_VOCAB = 2_000


def _opt(layers: int, hidden: int, heads: int, vocab: int, positions: int) -> dict[str, Any]:
    return {
        "model_type": "opt", "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": heads, "ffn_dim": 4 * hidden, "vocab_size": vocab,
        "max_position_embeddings": positions, "word_embed_proj_dim": hidden,
        "do_layer_norm_before": True, "activation_function": "relu",
    }  # fmt: skip


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int) -> dict:
    return {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": inner,
        "vocab_size": vocab, "max_position_embeddings": 131_072, "rope_theta": 500_000.0,
        "hidden_act": "silu", "rms_norm_eps": 1e-5,
    }  # fmt: skip


_CONFIGS: dict[str, dict[str, Any]] = {
    "opt-6.7b": _opt(32, 4096, 32, 50_272, 2_048),
    "opt-6.7b-long": _opt(32, 4096, 32, 50_272, 33_000),
    "opt-13b": _opt(40, 5120, 40, 50_272, 2_048),
    "opt-30b-8-layers": _opt(8, 7168, 56, 50_272, 2_048),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14_336, 128_256),
    "opt-small": _opt(6, 256, 4, _SMALL_VOCAB, 2_048),
    "opt-tiny": _opt(3, 64, 4, 96, 1_024),
    "llama-small": _llama(6, 256, 8, 2, 768, _SMALL_VOCAB),
    "llama-tiny": _llama(3, 64, 4, 2, 96, 96),
    "qwen-2.5-14b": {
        **_llama(48, 5120, 40, 8, 13_824, 152_064), "model_type": "qwen2", "rope_theta": 1e6,
    },
}  # fmt: skip


def model(name: str, dtype: str) -> ModelConfig:
    """The model of that name, its KV and weights in `dtype` ("float32", "bfloat16", ...).

    Raises:
        ValueError: there is none; says which there are.
    """
    if name not in _CONFIGS:
        raise ValueError(f"no model named {name!r}: use one of {', '.join(_CONFIGS)}")
    return read_config({**_CONFIGS[name], "dtype": dtype}, name)
