"""A Hugging Face ``config.json`` as a ``ModelShape``: of any family, listed here or not.

Head layout, KV entry, dtypes, and parameter counts, total and active, come from the config alone.
Facts about a family that its keys do not give stand in `_FAMILIES`. A family that is not listed is
counted as a Llama-like decoder by the keys that it has, and `unlisted` says so: such a shape is a
prior, which measured steps and the engine's own bytes replace. Layers with a window, or with a
state in place of KV, do not count as KV that grows with the context. Vision towers are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kappa.checks import read_json_object
from kappa.model import Attention, ModelShape


@dataclass(frozen=True, slots=True)
class _Family:
    """Facts that a ``model_type`` implies and its config does not give."""

    tied: bool = False  # embeddings, in and out
    gated: bool = True  # the MLP
    norms_per_layer: int = 2
    qkv_bias: bool = False
    # Norms of queries and keys: one per head, or one over all heads.
    head_norms: Literal["", "each", "all"] = ""
    # The router has a bias per expert, which balances them.
    balanced: bool = False
    # Experts and router have biases, and heads have attention sinks.
    biased_experts: bool = False
    # Besides those that the config counts.
    shared_experts: int = 0
    # Queries come with a gate of their size.
    gated_heads: bool = False


_FAMILIES = {
    **dict.fromkeys(
        ("llama", "mistral", "ministral", "phi3", "granite", "granitemoe", "mixtral",
         "deepseek_v2"), _Family(),
    ),
    "smollm3": _Family(tied=True),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(head_norms="each"),
    "gemma": _Family(tied=True),
    "gemma2": _Family(tied=True, norms_per_layer=4),
    "gemma3": _Family(tied=True, norms_per_layer=4, head_norms="each"),
    "opt": _Family(tied=True, gated=False),
    "qwen2_moe": _Family(qkv_bias=True),
    "qwen3_moe": _Family(head_norms="each"),
    "qwen3_next": _Family(head_norms="each", gated_heads=True),
    "gpt_oss": _Family(biased_experts=True),
    "llama4": _Family(shared_experts=1),
    "glm4_moe": _Family(qkv_bias=True, balanced=True),
    "minimax_m2": _Family(head_norms="all", balanced=True),
    "deepseek_v3": _Family(balanced=True),
}  # fmt: skip

# Other names of the same layers, once "_text" is off.
_ALIASES = {
    "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe",
    "kimi_k2": "deepseek_v3", "deepseek_v32": "deepseek_v3", "mistral3": "mistral",
    "ministral3": "ministral", "glm4v_moe": "glm4_moe",
}  # fmt: skip

# The same key as families call it, the usual name first.
_NAMES = {
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": ("n_positions", "seq_length", "max_sequence_length"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("experts_per_token", "moe_k", "moe_topk", "num_experts_per_token"),
    "full_attention_interval": ("attn_layer_period",),
    "moe_intermediate_size": ("expert_intermediate_size", "ffn_dim_expert"),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts"),
}

_DTYPE_BYTES = {
    **dict.fromkeys(("float32", "float", "fp32"), 4.0),
    **dict.fromkeys(("float16", "fp16", "half", "bfloat16", "bf16"), 2.0),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "int8"), 1.0),
    **dict.fromkeys(("fp4", "nvfp4", "int4"), 0.5),
}

# Of dtypes that come in variants, such as vLLM's "fp8_per_token_head".
_KIND_BYTES = dict(
    fp8_=1.0, int8_=1.0, nvfp4_=0.5, int4_=0.5, turboquant_k8v4=0.75, turboquant_=0.5
)

# Bytes of a weight by methods that do not give them; MXFP4 has a scale of 8 bits for each 32.
_METHOD_BYTES = {"fp8": 1.0, "fbgemm_fp8": 1.0, "mxfp4": 0.53125, "awq": 0.5, "gptq": 0.5}


def dtype_bytes(dtype: str) -> float:
    """Bytes per element of a dtype by name ("bfloat16", "fp8", "torch.float16").

    Raises:
        ValueError: a dtype that is not known.
    """
    name = dtype.removeprefix("torch.").lower()
    of_kind = (size for kind, size in _KIND_BYTES.items() if name.startswith(kind))
    size = _DTYPE_BYTES.get(name) or next(of_kind, None)
    if size is None:
        raise ValueError(f"unknown dtype {dtype!r}: use one of {', '.join(_DTYPE_BYTES)}")
    return size


def _or_auto(dtype: str, auto_bytes: float) -> float:
    """Bytes per element of a dtype, which may be "auto"."""
    return auto_bytes if dtype == "auto" else dtype_bytes(dtype)


def unlisted(config: Mapping[str, Any]) -> str:
    """A warning about a config of a family that is not listed; empty for those that are."""
    name = _text_model(config).get("model_type")
    if _family_of(str(name)) in _FAMILIES:
        return ""
    return f"model_type {name!r} is not listed: its prior counts it as a Llama-like decoder"


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
    return _Reader(_text_model(data), origin).shape(name or origin, kv_dtype, weight_dtype)


def _text_model(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the decoder: a multimodal wrapper keeps it within, its dtype outside."""
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        nested = data.get(key)
        if isinstance(nested, Mapping):
            shared = ("torch_dtype", "dtype", "quantization_config", "tie_word_embeddings")
            outer = {k: data[k] for k in shared if data.get(k) is not None}
            inner = {k: v for k, v in nested.items() if v is not None}
            return _text_model({"model_type": data.get("model_type"), **outer, **inner})
    return data


def _family_of(model_type: str) -> str:
    known = model_type.removesuffix("_text")
    return _ALIASES.get(known, known)


class _Layers(NamedTuple):
    """The number of layers of each kind."""

    full: int  # attend to the whole context
    windowed: int
    state: int  # keep a state in place of KV


class _MlpParams(NamedTuple):
    """Parameters of the feed-forward parts."""

    every_token: int  # used by every token, over all layers
    expert: int = 0  # one expert
    expert_layers: int = 0


class _Reader:
    """A config's keys, read with checks: errors name the file, the key and the remedy."""

    def __init__(self, data: Mapping[str, Any], origin: str) -> None:
        self.data, self.origin = data, origin
        family = _family_of(str(data.get("model_type")))
        self.family = _FAMILIES.get(family, _Family())
        self.is_opt = family == "opt"
        self.hidden = self.integer("hidden_size")
        self.layers = self.integer("num_hidden_layers")
        # Families without attention have no heads.
        usual = None if family in _FAMILIES else max(self.hidden // 64, 1)
        self.heads = self.integer("num_attention_heads", usual) or 1
        self.kv_heads = self.integer("num_key_value_heads", self.heads) or self.heads
        if data.get("multi_query") and not self.has("num_key_value_heads"):
            self.kv_heads = 1
        self.latent = self.integer("kv_lora_rank", 0)
        if self.latent:
            self.head_dim = self.integer("v_head_dim")
        else:
            self.head_dim = self.integer("head_dim", max(self.hidden // self.heads, 1))
        self.experts = self.integer("experts", 0)
        self.experts_active = 0
        if self.experts:
            usual = None if family in _FAMILIES else 1
            self.experts_active = min(self.integer("num_experts_per_tok", usual), self.experts)

    def fail(self, key: str, problem: str) -> ValueError:
        return ValueError(f"{self.origin}: key {key!r} {problem}")

    def key(self, name: str) -> str:
        """The name that this config uses for a key."""
        names = (name, *_NAMES.get(name, ()))
        return next((each for each in names if self.data.get(each) not in (None, [])), names[0])

    def has(self, name: str) -> bool:
        return self.data.get(self.key(name)) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        key = self.key(name)
        value = self.data.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing: add it, or give the model's full config.json")
            return default
        least = 1 if default is None else 0
        if isinstance(value, list) and value and all(type(each) is int for each in value):
            value = -(-sum(value) // len(value))  # of each layer: their mean
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.fail(key, f"is {value!r}: give a whole number, at least {least}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(default if self.data.get(key) is None else self.data[key])

    def shape(self, name: str, kv_dtype: str, weight_dtype: str) -> ModelShape:
        attention: Attention = "mha" if self.kv_heads == self.heads else "gqa"
        kinds, mlp = self._kinds(), self._mlp()
        base = self._outside() + (kinds.full + kinds.windowed) * self._attention()
        base += mlp.every_token + kinds.state * self._state()
        experts = mlp.expert_layers * mlp.expert
        model_bytes = self._model_bytes()
        return ModelShape(
            name=name,
            layers=self.layers,
            hidden=self.hidden,
            heads=max(self.heads, self.kv_heads),
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            params_active=float(base + experts * self.experts_active),
            params_total=float(base + experts * self.experts),
            attention="mla" if self.latent else attention,
            kv_dtype_bytes=_or_auto(kv_dtype, model_bytes),
            weight_dtype_bytes=self._quantised_bytes() or _or_auto(weight_dtype, model_bytes),
            kv_lora_rank=self.latent,
            rope_head_dim=self.integer("qk_rope_head_dim") if self.latent else 0,
            experts=self.experts,
            experts_active=self.experts_active,
            max_context_tokens=self.integer("max_position_embeddings", 0),
            source=self.origin,
            attention_layers=kinds.full if kinds.full < self.layers else 0,
            lookup_params=0.0 if self._tied() else float(self._table()),
            head_params=float(self._table()),
            gemm_bytes=self._gemm_bytes(),
        )

    def _kinds(self) -> _Layers:
        """Layers of each kind, by whichever key tells."""
        data, layers = self.data, self.layers
        listed = data.get("layer_types") or data.get("layers_block_type")
        if isinstance(listed, list):
            windowed = sum("sliding" in str(each) or "chunked" in str(each) for each in listed)
            full = sum(str(each) in ("full_attention", "attention", "global") for each in listed)
        elif data.get("attn_type_list"):
            full, windowed = sum(data["attn_type_list"]), 0
        elif data.get("no_rope_layers"):  # one that rotates sees a chunk
            windowed = sum(data["no_rope_layers"])
            full = layers - windowed
        elif every := self.integer("sliding_window_pattern", 0):
            full = layers // every
            windowed = layers - full
        elif every := self.integer("full_attention_interval", 0):
            full, windowed = layers // every, 0
        else:
            full, windowed = (layers, 0) if self.has("num_attention_heads") else (0, 0)
        full, windowed = min(full, layers), min(windowed, layers - min(full, layers))
        return _Layers(full, windowed, layers - full - windowed)

    def _model_bytes(self) -> float:
        key = "torch_dtype" if self.data.get("torch_dtype") is not None else "dtype"
        if self.data.get(key) is None:
            return 2.0
        try:
            return dtype_bytes(str(self.data[key]))
        except ValueError as error:
            raise self.fail(key, f"names an {error}") from None

    def _quantisation(self, of: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """How the model is quantised, and how in its first group of layers `of`, weights or
        activations, is; empty where nothing is said."""
        quantisation = self.data.get("quantization_config")
        if not isinstance(quantisation, Mapping):
            return {}, {}
        groups: Any = quantisation.get("config_groups")
        first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
        return quantisation, (first.get(of) or {}) if isinstance(first, Mapping) else {}

    def _quantised_bytes(self) -> float | None:
        """Bytes of a quantised weight, whatever dtype is computed in; None if none is quantised."""
        quantisation, weights = self._quantisation("weights")
        if quantisation.get("load_in_4bit"):
            return 0.5
        if quantisation.get("load_in_8bit"):
            return 1.0
        for bits in (quantisation.get("bits"), quantisation.get("w_bit"), weights.get("num_bits")):
            if isinstance(bits, int) and bits > 0:
                return bits / 8.0
        algorithm = str(quantisation.get("quant_algo"))
        named = 0.5 if "FP4" in algorithm else 1.0 if "FP8" in algorithm else None
        return _METHOD_BYTES.get(str(quantisation.get("quant_method")), named)

    def _gemm_bytes(self) -> float:
        """Bytes of an operand of the products: as the activations are quantised, else two."""
        quantisation, inputs = self._quantisation("input_activations")
        if isinstance(bits := inputs.get("num_bits"), int) and bits > 0:
            return bits / 8.0
        method, algorithm = quantisation.get("quant_method"), str(quantisation.get("quant_algo"))
        if method in ("fp8", "fbgemm_fp8") or "FP8" in algorithm:
            return 1.0
        return 0.5 if "FP4" in algorithm else 2.0

    def _tied(self) -> bool:
        """Whether the logits' product uses the input embedding."""
        return self.flag("tie_word_embeddings", self.family.tied)

    def _table(self) -> int:
        """Parameters of one table of the vocabulary."""
        return self.integer("vocab_size") * self.integer("word_embed_proj_dim", self.hidden)

    def _outside(self) -> int:
        """Parameters of embeddings, and of all norms."""
        hidden = self.hidden
        width = self.integer("word_embed_proj_dim", hidden)
        norm = hidden * (2 if self.is_opt else 1)
        params = self._table() * (1 if self._tied() else 2)
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
            return query + latent + heads * dim * hidden + self._indexer(query_rank)
        qkv_width = (heads + 2 * self.kv_heads) * dim
        params = hidden * qkv_width + heads * dim * hidden
        if self.family.gated_heads:
            params += hidden * heads * dim
        with_bias = self.flag("attention_bias", False)
        if self.is_opt or self.family.qkv_bias or with_bias:
            params += qkv_width
        if self.is_opt or (with_bias and not self.family.qkv_bias):
            params += hidden
        if self.family.biased_experts:
            params += heads
        if self.family.head_norms == "all" and self.flag("use_qk_norm", True):
            return params + (heads + self.kv_heads) * dim
        each = self.flag("use_qk_norm", self.family.head_norms == "each")
        return params + (2 * dim if each else 0)

    def _indexer(self, query_rank: int) -> int:
        """Parameters by which a layer of DeepSeek-V3.2 chooses what it attends to."""
        heads, dim = self.integer("index_n_heads", 0), self.integer("index_head_dim", 0)
        if not heads:
            return 0
        return query_rank * heads * dim + self.hidden * (dim + heads) + 2 * dim

    def _state(self) -> int:
        """Parameters of a layer that keeps a state: a gated delta net's, else as of attention."""
        hidden = self.hidden
        heads = self.integer("linear_num_value_heads", 0)
        if not heads:
            return 4 * hidden * hidden
        value = self.integer("linear_value_head_dim")
        keys = self.integer("linear_num_key_heads") * self.integer("linear_key_head_dim")
        mixed = 2 * keys + heads * value
        wide = mixed + heads * value + 2 * heads + heads * value  # in with gates, and out
        kernel = self.integer("linear_conv_kernel_dim", 4)
        return hidden * wide + mixed * kernel + 2 * heads + value

    def _mlp(self) -> _MlpParams:
        hidden, layers, experts = self.hidden, self.layers, self.experts
        matrices = 3 if self.family.gated else 2
        if not experts:
            inner = self.integer("intermediate_size", 4 * hidden)
            bias = inner + hidden if self.is_opt else 0
            return _MlpParams(layers * (matrices * hidden * inner + bias))
        moe_layers = self._moe_layers()
        inner = self.integer("intermediate_size", 0)
        expert_inner = self.integer("moe_intermediate_size", inner)
        expert = matrices * hidden * expert_inner
        shared = self.integer("n_shared_experts", self.family.shared_experts)
        always = shared * expert + hidden * experts
        if self.family.biased_experts:
            expert += 2 * expert_inner + hidden
            always += experts
        if self.family.balanced:
            always += experts
        shared_inner = self.integer("shared_expert_intermediate_size", 0)
        always += matrices * hidden * shared_inner + (hidden if shared_inner else 0)
        wide = self.integer("intermediate_size_mlp", inner)
        dense = (layers - moe_layers) * matrices * hidden * wide
        return _MlpParams(dense + moe_layers * always, expert, moe_layers)

    def _moe_layers(self) -> int:
        """Layers that have experts."""
        data, layers = self.data, self.layers
        for key in ("mlp_layer_types", "moe_layer_freq"):
            if isinstance(data.get(key), list):
                return min(sum(each in (1, "sparse") for each in data[key]), layers)
        if isinstance(data.get("moe_layers"), list) and data["moe_layers"]:
            return min(len(data["moe_layers"]), layers)
        if every := self.integer("interleave_moe_layer_step", 0):
            return layers // every
        dense_layers = self.integer("first_k_dense_replace", 0)
        dense_layers += len(data.get("mlp_only_layers") or ())
        return max(layers - dense_layers, 0) // max(1, self.integer("decoder_sparse_step", 1))
