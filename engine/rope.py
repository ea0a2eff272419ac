"""Rotary position embedding at absolute positions, for the types whose angles never change.

Angles are computed once per step for the positions it touches, in single precision as checkpoints
were trained, and used by every layer: for queries, new keys, and keys made from activations. Types:
default, linear, llama3, yarn (2309.00071), as in Hugging Face's `modeling_rope_utils`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def frequencies(rope: Mapping[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Angle per position, shape (head_dim / 2,), float32; and the factor on cosine and sine."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope["rope_theta"] ** steps)
    match rope["rope_type"]:
        case "linear":
            return plain / rope["factor"], 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            return _yarn(rope, steps, head_dim)
        case _:
            return plain, 1.0


def angles(
    positions: Tensor, inverse: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine for int64 `positions` (n,), each (n, 1, head_dim)."""
    turn = positions[:, None].float() * inverse
    turn = torch.cat((turn, turn), dim=-1)[:, None, :]
    return (turn.cos() * factor).to(dtype), (turn.sin() * factor).to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn every head of x (n, heads, head_dim) by its token's angles."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cosine + turned * sine


def _llama3(rope: Mapping[str, Any], plain: Tensor) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between interpolated."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    trained = rope["original_max_position_embeddings"]
    wave = 2 * math.pi / plain
    blend = (trained / wave - low) / (high - low)
    between = (1 - blend) * plain / rope["factor"] + blend * plain
    slowed = torch.where(wave > trained / low, plain / rope["factor"], plain)
    medium = (wave >= trained / high) & (wave <= trained / low)
    return torch.where(medium, between, slowed)


def _yarn(rope: Mapping[str, Any], steps: Tensor, head_dim: int) -> tuple[Tensor, float]:
    base, factor = float(rope["rope_theta"]), float(rope["factor"])
    trained = rope["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        """Which dimension turns so often over the trained length."""
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = dimension(rope.get("beta_fast") or 32)
    high = dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    waves = base**steps
    kept = 1 - ramp
    inverse = (1.0 / (factor * waves)) * (1 - kept) + (1.0 / waves) * kept
    return inverse, _yarn_factor(rope, factor)


def _yarn_factor(rope: Mapping[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    one, all_ = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(one) / scale(all_) if one and all_ else scale(1.0)
