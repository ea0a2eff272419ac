"""A model's configuration for the engine, from Hugging Face's ``config.json``: frozen, checked.

Families: OPT, Llama, Qwen2, Qwen3. Each differs in norm, positions, biases, head norms and MLP; all
else is one forward pass. An architecture with attention or positions that the engine does not
compute exactly is refused by name, with the load plans that would work
(`kappa.plans.architecture`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kappa.checks import read_json_object
from kappa.model import ModelShape
from kappa.model_config import shape_from_config
from kappa.plans.architecture import architecture_from_config, rope_type

FAMILIES = ("opt", "llama", "qwen2", "qwen3")
_ACTIVATIONS = ("relu", "gelu", "gelu_new", "silu", "swish")
# OPT's table of positions begins with two rows that no token uses.
OPT_POSITION_OFFSET = 2
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


class UnsupportedModel(ValueError):
    """The engine cannot compute this architecture exactly."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    # Width of the token embedding, which OPT may project.
    embed: int
    # Of a sequence, at most.
    max_tokens: int
    norm_eps: float
    activation: str
    pre_norm: bool
    norm_affine: bool
    final_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool
    # The same model for planners.
    shape: ModelShape = field(repr=False, compare=False)
    # The checkpoint's own rope parameters (type, theta, factors); empty: positions are learned.
    rope: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies by a gate (all families but OPT)."""
        return self.family != "opt"

    @property
    def layer_norm(self) -> bool:
        """LayerNorm with mean and bias; else RMSNorm."""
        return self.family == "opt"

    @property
    def head_norms(self) -> bool:
        """Whether each query and key head is normalised before RoPE."""
        return self.family == "qwen3"

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all key heads of a token (as many as of its value heads)."""
        return self.kv_heads * self.head_dim


def read_config(source: Mapping[str, Any] | str | Path, name: str = "") -> ModelConfig:
    """A `ModelConfig` from a parsed ``config.json``, its path, or the folder that holds it.

    Raises:
        UnsupportedModel: an architecture that the engine does not compute exactly, by name.
        ValueError: a file that cannot be read, or a key that is missing or out of range.
    """
    if isinstance(source, Mapping):
        origin, data = name or str(source.get("_name_or_path") or "config"), dict(source)
    else:
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        origin, data = str(path), read_json_object(path, "model config")
    family = str(data.get("model_type"))
    opt = family == "opt"
    _refuse_unknown(data, family, origin)
    shape = _shape(data, name or origin)
    inner = "ffn_dim" if opt else "intermediate_size"
    for key in ("vocab_size", inner):
        if not isinstance(data.get(key), int) or data[key] < 1:
            raise ValueError(f"{origin}: key {key!r} is {data.get(key)!r}: give a whole number")
    if shape.heads % shape.kv_heads:
        raise ValueError(
            f"{origin}: {shape.heads} query heads do not divide among {shape.kv_heads} KV heads"
        )
    activation = data.get("activation_function") or data.get("hidden_act")
    activation = activation or ("relu" if opt else "silu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{origin}: activation {activation!r} is not computed here: "
            f"use one of {', '.join(_ACTIVATIONS)}"
        )

    def flag(key: str, default: bool = False) -> bool:
        return bool(default if data.get(key) is None else data[key])

    pre_norm = not opt or flag("do_layer_norm_before", True)
    bias = flag("enable_bias", True) if opt else flag("attention_bias")
    max_tokens = data.get("max_position_embeddings") or 2048
    return ModelConfig(
        family=family, layers=shape.layers, hidden=shape.hidden, heads=shape.heads,
        kv_heads=shape.kv_heads, head_dim=shape.head_dim, inner=data[inner],
        vocab=data["vocab_size"],
        embed=(data.get("word_embed_proj_dim") if opt else None) or shape.hidden,
        max_tokens=max_tokens,
        norm_eps=1e-5 if opt else float(data.get("rms_norm_eps") or 1e-6),
        activation=activation,
        pre_norm=pre_norm,
        norm_affine=not opt or flag("layer_norm_elementwise_affine", True),
        final_norm=pre_norm and not (opt and flag("_remove_final_layer_norm")),
        qkv_bias=bias or family == "qwen2",
        out_bias=bias and family != "qwen2",
        mlp_bias=bias if opt else family == "llama" and flag("mlp_bias"),
        tied=flag("tie_word_embeddings", opt),
        shape=shape,
        rope={} if opt else _rope(data, max_tokens, origin),
    )  # fmt: skip


def _shape(data: Mapping[str, Any], name: str) -> ModelShape:
    """The shape for planners; also of checkpoints in float64, with which exactness is tested."""
    wide = {key for key in ("dtype", "torch_dtype") if "64" in str(data.get(key))}
    shape = shape_from_config({key: data[key] for key in data if key not in wide}, name)
    return replace(shape, kv_dtype_bytes=8.0, weight_dtype_bytes=8.0) if wide else shape


def _refuse_unknown(data: Mapping[str, Any], family: str, origin: str) -> None:
    known = family in FAMILIES
    why = architecture_from_config(data).peculiar()
    if not (known or why):
        why = "load plans of all kinds (K, A, R) would work, but its layers are not among these"
    if why:
        among = "" if known else f" is not among {', '.join(FAMILIES)}"
        raise UnsupportedModel(
            f"{origin}: model_type {family!r}{among}: {why}. Serve it with engine: vllm"
        )


def _rope(data: Mapping[str, Any], max_tokens: int, origin: str) -> dict[str, Any]:
    """Rope parameters under one set of keys, from any of the forms that checkpoints use."""
    rope = dict(data.get("rope_parameters") or data.get("rope_scaling") or {})
    rope.pop("type", None)
    rope["rope_type"] = rope_type(data)
    rope.setdefault("rope_theta", data.get("rope_theta") or 10000.0)
    trained = data.get("original_max_position_embeddings") or max_tokens
    rope.setdefault("original_max_position_embeddings", trained)
    if rope["rope_type"] not in _STATIC_ROPE:
        raise UnsupportedModel(
            f"{origin}: rope type {rope['rope_type']!r} is not computed here: "
            f"use one of {', '.join(_STATIC_ROPE)}, or engine: vllm"
        )
    if float(rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModel(f"{origin}: partial_rotary_factor below 1 is not computed here")
    return rope
