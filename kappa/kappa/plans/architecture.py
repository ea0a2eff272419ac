"""The kinds of segment that a model's architecture can execute exactly, and why not the others.

Keys are cached after their rotary embedding, so they can be made again only where position alone
decides the rotation, and activations are kept behind the layer's input norm, so there must be one.
Read from a Hugging Face config; used by the planners, and by the engine (`kappa_engine.config`),
which computes only models with layers of one kind and refuses others for the reasons given here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kappa.plans.load_plan import Kind

_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")

# Families that keep a state whether their config lists its layers or not.
_STATE_FAMILIES = ("mamba", "mamba2", "falcon_mamba", "rwkv", "jamba", "bamba", "qwen3_next")

_TOKEN_KV_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")


@dataclass(frozen=True, slots=True)
class Architecture:
    """The properties of a model that decide which segments it can execute."""

    latent: bool = False  # it caches a latent (MLA)
    dynamic_rope: bool = False  # rotations depend on the length
    sliding_window: int = 0  # tokens; 0: no layer has a window
    state_layers: int = 0  # layers with a state in place of keys and values per token

    def refused(self) -> dict[Kind, str]:
        """The kinds among K, A and R that do not work, each with the property in the way."""
        reasons: dict[Kind, str] = {}
        if self.state_layers:
            why = f"{self.state_layers} layers keep a state instead of keys and values per token"
            reasons = {"K": why, "A": why}
        elif self.latent:
            reasons["A"] = "multi-head latent attention caches a latent smaller than activations"
        elif self.sliding_window:
            reasons["A"] = f"sliding-window layers keep {self.sliding_window} tokens, not all"
        if self.dynamic_rope:
            why = "dynamic RoPE rotates a key by the length at the time, not by position alone"
            reasons["A"] = reasons["R"] = why
        return reasons

    def kinds(self) -> frozenset[Kind]:
        """The kinds among K, A and R that this architecture can execute exactly."""
        exact: frozenset[Kind] = frozenset({"K", "A", "R"})
        return exact - self.refused().keys()

    def peculiar(self) -> str:
        """The reasons why not all kinds work, and those that do; empty if all do."""
        reasons = self.refused()
        if not reasons:
            return ""
        would = ", ".join(sorted(self.kinds())) or "none"
        return f"{'; '.join(dict.fromkeys(reasons.values()))}. Load plans that would work: {would}"


def architecture_from_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a parsed Hugging Face `config.json` (of the text model)."""
    layers, model_type = config.get("layer_types"), str(config.get("model_type"))
    if layers:
        state_layers = sum(kind not in _TOKEN_KV_LAYERS for kind in layers)
    else:
        keeps_state = model_type in _STATE_FAMILIES
        state_layers = (config.get("num_hidden_layers") or 1) if keeps_state else 0
    return Architecture(
        latent=bool(config.get("kv_lora_rank")),
        dynamic_rope=model_type != "opt" and rope_type(config) in _LENGTH_DEPENDENT,
        sliding_window=_window(config, model_type),
        state_layers=state_layers,
    )


def rope_type(config: Mapping[str, Any]) -> str:
    """The kind of rotary embedding, as new and old configs write it."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def _window(config: Mapping[str, Any], model_type: str) -> int:
    """Qwen writes a window that is off unless said otherwise; others have it on by naming it."""
    window = config.get("sliding_window") or config.get("attention_chunk_size") or 0
    layers = config.get("layer_types")
    if layers is not None:
        windowed = any("sliding" in kind or "chunked" in kind for kind in layers)
        return int(window or 1) if windowed else 0
    used = config.get("use_sliding_window")
    if used is None:
        used = not model_type.startswith("qwen")
    # Layers before this one attend to all.
    first = config.get("max_window_layers") or 0
    return int(window) if used and first < config.get("num_hidden_layers", first + 1) else 0
