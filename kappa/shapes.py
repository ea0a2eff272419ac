"""Model shapes from a Hugging Face ``config.json``, and a few built in by name.

Reads the Llama, Mistral, Qwen2/3, Phi-3, Gemma, OPT, Mixtral, Qwen-MoE and DeepSeek families:
head layout, KV entry, dtypes, and parameter counts, total and active, worked out from the shape
itself (no weights are opened). Built-ins are such configs cut to the keys that matter, so both
take one path. A sliding window is not modelled: its KV is counted as if it were kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kappa.checks import read_json_object, unknown_name
from kappa.model import Attention, ModelShape


@dataclass(frozen=True, slots=True)
class _Family:
    """What a ``model_type`` implies and its config does not say."""

    tied: bool = False
    gated: bool = True
    norms_per_layer: int = 2
    qkv_bias: bool = False
    head_norms: bool = False


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "phi3": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(head_norms=True),
    "gemma": _Family(tied=True),
    "gemma2": _Family(tied=True, norms_per_layer=4),
    "gemma3_text": _Family(tied=True, norms_per_layer=4, head_norms=True),
    "opt": _Family(tied=True, gated=False),
    "mixtral": _Family(),
    "qwen2_moe": _Family(qkv_bias=True),
    "qwen3_moe": _Family(head_norms=True),
    "deepseek_v2": _Family(),
    "deepseek_v3": _Family(),
}

_DTYPE_BYTES = {
    "float32": 4.0, "fp32": 4.0, "float16": 2.0, "fp16": 2.0, "half": 2.0, "bfloat16": 2.0,
    "bf16": 2.0, "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "int8": 1.0, "fp4": 0.5,
    "nvfp4": 0.5, "int4": 0.5,
}  # fmt: skip


def dtype_bytes(dtype: str) -> float:
    """Bytes per element of a dtype by name ("bfloat16", "fp8", "torch.float16").

    Raises:
        ValueError: a dtype that is not known.
    """
    size = _DTYPE_BYTES.get(dtype.removeprefix("torch.").lower())
    if size is None:
        raise ValueError(f"unknown dtype {dtype!r}: use one of {', '.join(_DTYPE_BYTES)}")
    return size


def shape_from_config(
    config: Mapping[str, Any] | str | Path, name: str = "", kv_dtype: str = "auto",
    weight_dtype: str = "auto",
) -> ModelShape:  # fmt: skip
    """A ``ModelShape`` from a config, given as a mapping, a file, or a folder that holds one.

    Args:
        config: the parsed ``config.json`` or its path.
        name: what to call the shape; else the folder, or the config's own ``_name_or_path``.
        kv_dtype: dtype of the KV cache where it is not the model's ("fp8").
        weight_dtype: dtype of the weights where the config does not tell.

    Raises:
        ValueError: names the file, the key, and the remedy.
    """
    if isinstance(config, Mapping):
        origin, data = str(config.get("_name_or_path") or name or "config"), config
    else:
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        origin, data = str(path), read_json_object(path, "model config")
        name = name or path.absolute().parent.name
    nested = data.get("text_config")
    if isinstance(nested, Mapping) and data.get("model_type") not in _FAMILIES:
        # A multimodal wrapper keeps the dtype and quantisation outside the text model's config.
        outer = {k: data[k] for k in ("torch_dtype", "dtype", "quantization_config") if k in data}
        data = {**outer, **nested}
    return _Reader(data, origin).shape(name or origin, kv_dtype, weight_dtype)


class _Reader:
    """A config's keys, the file to name when one is missing or wrong, and what they add up to."""

    def __init__(self, data: Mapping[str, Any], origin: str) -> None:
        self.data, self.origin = data, origin
        model_type = str(data.get("model_type"))
        if model_type not in _FAMILIES:
            raise self.fail(
                "model_type",
                f"is {model_type!r}, which has no reader: build kappa.model.ModelShape by hand, "
                f"or use one of {', '.join(_FAMILIES)}",
            )
        self.family = _FAMILIES[model_type]
        self.is_opt = model_type == "opt"
        self.heads = self.integer("num_attention_heads")
        self.kv_heads = self.integer("num_key_value_heads", self.heads)
        self.hidden = self.integer("hidden_size")
        self.layers = self.integer("num_hidden_layers")
        self.latent = self.integer("kv_lora_rank", 0)
        if self.latent:
            self.head_dim = self.integer("v_head_dim")
        else:
            self.head_dim = self.integer("head_dim", self.hidden // self.heads)
        self.experts = self.experts_active = 0
        for key in ("num_local_experts", "num_experts", "n_routed_experts"):
            if data.get(key) and not self.experts:
                self.experts = self.integer(key)
                self.experts_active = self.integer("num_experts_per_tok")

    def fail(self, key: str, problem: str) -> ValueError:
        return ValueError(f"{self.origin}: key {key!r} {problem}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing: add it, or give the model's full config.json")
            return default
        least = 1 if default is None else 0
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.fail(key, f"is {value!r}: give a whole number, at least {least}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(default if self.data.get(key) is None else self.data[key])

    def shape(self, name: str, kv_dtype: str, weight_dtype: str) -> ModelShape:
        attention: Attention = "mha" if self.kv_heads == self.heads else "gqa"
        base = self._outside() + self.layers * self._attention()
        every_token, expert, moe_layers = self._mlp()
        base += every_token
        model_bytes = self._model_bytes()
        return ModelShape(
            name=name,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            params_active=float(base + moe_layers * expert * self.experts_active),
            params_total=float(base + moe_layers * expert * self.experts),
            attention="mla" if self.latent else attention,
            kv_dtype_bytes=model_bytes if kv_dtype == "auto" else dtype_bytes(kv_dtype),
            weight_dtype_bytes=self._weight_bytes(model_bytes, weight_dtype),
            kv_lora_rank=self.latent,
            rope_head_dim=self.integer("qk_rope_head_dim") if self.latent else 0,
            experts=self.experts,
            experts_active=self.experts_active,
            max_context_tokens=self.integer("max_position_embeddings", 0),
            source=self.origin,
        )

    def _model_bytes(self) -> float:
        key = "torch_dtype" if "torch_dtype" in self.data else "dtype"
        if self.data.get(key) is None:
            return 2.0
        try:
            return dtype_bytes(str(self.data[key]))
        except ValueError as error:
            raise self.fail(key, f"names an {error}") from None

    def _weight_bytes(self, model_bytes: float, weight_dtype: str) -> float:
        if weight_dtype != "auto":
            return dtype_bytes(weight_dtype)
        quantisation = self.data.get("quantization_config")
        if not isinstance(quantisation, Mapping):
            return model_bytes
        if quantisation.get("load_in_4bit"):
            return 0.5
        if quantisation.get("load_in_8bit") or quantisation.get("quant_method") == "fp8":
            return 1.0
        bits = quantisation.get("bits")
        if isinstance(bits, int) and bits > 0:
            return bits / 8.0
        raise self.fail("quantization_config", "does not tell its bits: pass weight_dtype")

    def _outside(self) -> int:
        """Parameters of embeddings, and of all norms."""
        hidden = self.hidden
        width = self.integer("word_embed_proj_dim", hidden)
        tied = self.flag("tie_word_embeddings", self.family.tied)
        norm = hidden * (2 if self.is_opt else 1)
        params = self.integer("vocab_size") * width * (1 if tied else 2)
        params += norm * (1 + self.layers * self.family.norms_per_layer)
        if self.is_opt:
            # OPT learns its positions, two of them offsets, and may project a narrower embedding.
            params += (self.integer("max_position_embeddings") + 2) * hidden
            params += 2 * width * hidden if width != hidden else 0
        return params

    def _attention(self) -> int:
        """Parameters of a layer's attention."""
        hidden, heads, dim, rank = self.hidden, self.heads, self.head_dim, self.latent
        if rank:
            rope = self.integer("qk_rope_head_dim")
            nope = self.integer("qk_nope_head_dim")
            query_rank, query_width = self.integer("q_lora_rank", 0), heads * (nope + rope)
            query = query_rank * (hidden + 1 + query_width) if query_rank else hidden * query_width
            latent = hidden * (rank + rope) + rank + rank * heads * (nope + dim)
            return query + latent + heads * dim * hidden
        qkv_width = (heads + 2 * self.kv_heads) * dim
        params = hidden * qkv_width + heads * dim * hidden
        with_bias = self.flag("attention_bias", False)
        if self.is_opt or self.family.qkv_bias or with_bias:
            params += qkv_width
        if self.is_opt or (with_bias and not self.family.qkv_bias):
            params += hidden
        return params + (2 * dim if self.family.head_norms else 0)

    def _mlp(self) -> tuple[int, int, int]:
        """Parameters: (that every token passes, over all layers; of one expert; expert layers)."""
        hidden, layers, experts = self.hidden, self.layers, self.experts
        matrices = 3 if self.family.gated else 2
        if not experts:
            inner = self.integer("ffn_dim" if self.is_opt else "intermediate_size")
            bias = inner + hidden if self.is_opt else 0
            return layers * (matrices * hidden * inner + bias), 0, 0
        dense_layers = self.integer("first_k_dense_replace", 0)
        dense_layers += len(self.data.get("mlp_only_layers") or ())
        moe_layers = (layers - dense_layers) // max(1, self.integer("decoder_sparse_step", 1))
        inner = self.integer("intermediate_size", 0)
        expert = matrices * hidden * self.integer("moe_intermediate_size", inner)
        always = self.integer("n_shared_experts", 0) * expert + hidden * experts
        if self.data.get("model_type") == "deepseek_v3":
            always += experts  # the router's balancing bias
        shared_inner = self.integer("shared_expert_intermediate_size", 0)
        always += matrices * hidden * shared_inner + (hidden if shared_inner else 0)
        dense = (layers - moe_layers) * matrices * hidden * inner
        return dense + moe_layers * always, expert, moe_layers


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
_QWEN3_MOE = {
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    "max_position_embeddings": 40960,
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
    "qwen3-30b-a3b": _decoder(
        "qwen3_moe", 48, 2048, 32, 4, moe_intermediate_size=768, **_QWEN3_MOE
    ),
    "qwen3-235b-a22b": _decoder(
        "qwen3_moe", 94, 4096, 64, 4, moe_intermediate_size=1536, **_QWEN3_MOE
    ),
    "deepseek-v3": _decoder("deepseek_v3", 61, 7168, 128, 128, **_DEEPSEEK_V3),
    "opt-6.7b": _decoder("opt", 32, 4096, 32, 32, ffn_dim=16384, **_OPT),
    "opt-13b": _decoder("opt", 40, 5120, 40, 40, ffn_dim=20480, **_OPT),
}

SHAPES: dict[str, ModelShape] = {
    name: shape_from_config(config, name) for name, config in _BUILT_IN.items()
}
"""Every built-in shape by name: paper 001's five, and those the project benchmarks with."""


def model_shape(name_or_path: str | Path, kv_dtype: str = "auto") -> ModelShape:
    """A shape by built-in name or its hub id, or by path of a ``config.json`` or its folder.

    Raises:
        ValueError: an unknown name (the near ones are listed), or a config that cannot be read.
    """
    text = str(name_or_path)
    path = Path(text)
    if path.exists() or path.suffix == ".json":
        return shape_from_config(path, kv_dtype=kv_dtype)
    name = text.rsplit("/", 1)[-1].lower().removesuffix("-instruct")
    if name in SHAPES:
        known = SHAPES[name]
        return known if kv_dtype == "auto" else replace(known, kv_dtype_bytes=dtype_bytes(kv_dtype))
    raise unknown_name("model", text, SHAPES, "or give the path of a config.json")
