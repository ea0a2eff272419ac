"""The pieces of a decoder layer as plain functions on (tokens, width) tensors.

Every family is the same composition: normalise, project, attend, project back, MLP. `project_kv` is
the one place where keys and values are made, from new tokens and from stored activations alike; a
stored activation is its input, so keys from it equal those that were stored beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kappa_engine.config import OPT_POSITION_OFFSET, ModelConfig
from kappa_engine.weights import Layer, Weights

Angles = tuple[Tensor, Tensor] | None
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""The product of x (n, width), a weight's rows and a bias, as `F.linear` has it."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "silu": F.silu, "swish": F.silu, "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
}  # fmt: skip


def frequencies(rope: Mapping[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Angle per position, shape (head_dim / 2,), float32; and the factor on cosine and sine."""
    if rope["rope_type"] == "default":
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / (rope["rope_theta"] ** steps), 1.0
    # Slow to import, and most models rotate plainly.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SimpleNamespace(
        rope_parameters=rope, head_dim=head_dim, hidden_size=head_dim, num_attention_heads=1,
        standardize_rope_params=lambda: None,
    )  # fmt: skip
    inverse, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return inverse, float(factor)


def angles(
    positions: Tensor, inverse: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine for int64 `positions` (n,), each (n, 1, head_dim)."""
    turn = positions[:, None].float() * inverse
    turn = torch.cat((turn, turn), dim=-1)[:, None, :]
    return (turn.cos() * factor).to(dtype), (turn.sin() * factor).to(dtype)


def rotation(weights: Weights) -> Callable[[Tensor], Angles]:
    """The rotary angles of a model's tokens by their positions; None where these are learned."""
    config, device, dtype = weights.config, weights.device, weights.dtype
    if not config.rope:
        return lambda positions: None
    inverse, factor = frequencies(config.rope, config.head_dim)
    inverse = inverse.to(device)
    return lambda positions: angles(positions, inverse, factor, dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn every head of x (n, heads, head_dim) by its token's angles."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cosine + turned * sine


def embed(weights: Weights, tokens: Tensor, positions: Tensor) -> Tensor:
    """Hidden states (n, hidden) of int64 token ids (n,) at absolute positions (n,)."""
    outer = weights.outer
    x = F.embedding(tokens, outer["embed"])
    if "project_in" in outer:
        x = F.linear(x, outer["project_in"])
    if "positions" in outer:
        x = x + F.embedding(positions + OPT_POSITION_OFFSET, outer["positions"])
    return x


def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, config: ModelConfig) -> Tensor:
    """LayerNorm or RMSNorm over the last axis, as the family has it; at least in float32."""
    if config.layer_norm:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, config.norm_eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + config.norm_eps)
    normal = wide.to(x.dtype)
    return normal if weight is None else weight * normal


def attention_input(x: Tensor, layer: Layer, config: ModelConfig) -> Tensor:
    """A: what queries, keys and values are projected from, and what an activation block stores.

    A post-norm model projects its hidden states as they are.
    """
    return normalise(x, layer.norm, layer.norm_bias, config) if config.pre_norm else x


def project_q(
    a: Tensor, layer: Layer, config: ModelConfig, angles: Angles, linear: Linear = F.linear
) -> Tensor:
    """Queries (n, heads, head_dim)."""
    q = linear(a, layer.q, layer.q_bias).view(-1, config.heads, config.head_dim)
    if layer.q_norm is not None:
        q = normalise(q, layer.q_norm, None, config)
    return q if angles is None else rotate(q, *angles)


def project_kv(
    a: Tensor, layer: Layer, config: ModelConfig, angles: Angles, out: Tensor,
    linear: Linear | None = None,
) -> None:  # fmt: skip
    """Keys, turned to their positions, and values, by one GEMM into `out` (n, 2·kv_width)."""
    if linear is not None:
        out.copy_(linear(a, layer.kv, layer.kv_bias))
    elif layer.kv_bias is None:
        torch.mm(a, layer.kv.t(), out=out)
    else:
        torch.addmm(layer.kv_bias, a, layer.kv.t(), out=out)
    keys = out.view(-1, 2, config.kv_heads, config.head_dim)[:, 0]
    k = keys
    if layer.k_norm is not None:
        k = normalise(k, layer.k_norm, None, config)
    if angles is not None:
        k = rotate(k, *angles)
    if k is not keys:
        keys.copy_(k)


def project_out(
    x: Tensor, attended: Tensor, layer: Layer, config: ModelConfig, linear: Linear = F.linear
) -> Tensor:
    """States behind attention: output projection of attended (n, heads·head_dim), and x."""
    x = x + linear(attended, layer.out, layer.out_bias)
    return x if config.pre_norm else normalise(x, layer.norm, layer.norm_bias, config)


def feed_forward(x: Tensor, layer: Layer, config: ModelConfig, linear: Linear = F.linear) -> Tensor:
    """The rest of the layer: the MLP of x (n, hidden), and x. linear: of FC1."""
    a = normalise(x, layer.norm2, layer.norm2_bias, config) if config.pre_norm else x
    up, activate = linear(a, layer.up, layer.up_bias), ACTIVATIONS[config.activation]
    if config.gated:
        gate, value = up.chunk(2, dim=-1)
        up = activate(gate) * value
    else:
        up = activate(up)
    x = x + F.linear(up, layer.down, layer.down_bias)
    return x if config.pre_norm else normalise(x, layer.norm2, layer.norm2_bias, config)


def logits(x: Tensor, weights: Weights) -> Tensor:
    """Logits (n, vocab) of hidden states behind the last layer."""
    config, outer = weights.config, weights.outer
    if config.final_norm:
        x = normalise(x, outer.get("final_norm"), outer.get("final_norm_bias"), config)
    if "project_out" in outer:
        x = F.linear(x, outer["project_out"])
    return F.linear(x, outer["head"])
