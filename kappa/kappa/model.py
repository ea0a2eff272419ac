"""A model's shape, and what it takes of a node: bytes of KV and weights, FLOPs of attention.

Beyond paper 001 (see ``kappa.paper``) attention over the context, mixtures of experts, MLA, and KV
heads replicated under tensor parallelism count. ``tp`` is the number of tensor-parallel ranks that
a ``NodeProfile``'s rates are the sum of. ``kappa.cost`` turns all of this into seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from kappa.checks import check_not_negative, check_positive, refusal

Attention = Literal["mha", "gqa", "mla"]

_ACTIVATION_BYTES = 2.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's dimensions, as the cost model uses them."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int  # not used for MLA
    head_dim: int  # for MLA without the rotary part
    params_active: float  # used by one token; fewer than in total for mixtures of experts
    params_total: float
    attention: Attention
    kv_dtype_bytes: float = 2.0
    weight_dtype_bytes: float = 2.0
    # For MLA the KV entry of a layer is a latent of kv_lora_rank + rope_head_dim elements.
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    experts: int = 0
    experts_active: int = 0
    max_context_tokens: int = 0  # 0: not known
    source: str = ""
    # Layers that attend to the whole context, so that their KV grows with it; 0: all. The others
    # see a window or keep a state of constant size.
    attention_layers: int = 0
    # KV bytes that an engine was found to keep per token, over all ranks; 0: as the heads give it.
    kv_token_bytes: float = 0.0
    # Of the active parameters those of the input embedding, of which a token takes a row (0 where
    # the logits' product uses the same table), and those of the logits, which are computed for the
    # last token alone.
    lookup_params: float = 0.0
    head_params: float = 0.0
    # Of an operand of the products: 2 for BF16, 1 for FP8, 0.5 for FP4. Weights that are only kept
    # in fewer are computed in 2.
    gemm_bytes: float = 2.0

    def __post_init__(self) -> None:
        check_positive(
            self, "layers", "hidden", "heads", "kv_heads", "head_dim", "params_active",
            "params_total", "kv_dtype_bytes", "weight_dtype_bytes", "gemm_bytes",
        )  # fmt: skip
        check_not_negative(
            self, "kv_lora_rank", "rope_head_dim", "experts", "experts_active",
            "max_context_tokens", "attention_layers", "kv_token_bytes", "lookup_params",
            "head_params",
        )  # fmt: skip
        if self.attention not in get_args(Attention):
            raise refusal(self, "attention", self.attention, f"use one of {get_args(Attention)}")
        if self.attention == "mla" and self.kv_lora_rank == 0:
            raise refusal(self, "kv_lora_rank", 0, "MLA needs the rank of its KV latent")
        for name, most in (
            ("kv_heads", "heads"), ("params_active", "params_total"),
            ("experts_active", "experts"), ("attention_layers", "layers"),
        ):  # fmt: skip
            value, bound = getattr(self, name), getattr(self, most)
            if value > bound:
                raise refusal(self, name, value, f"at most {most} = {bound}")
        if self.experts and not self.experts_active:
            raise refusal(self, "experts_active", 0, "say how many experts a token uses")

    @property
    def kv_layers(self) -> int:
        """The number of layers with KV that grows with the context."""
        return self.attention_layers or self.layers


def kv_bytes_per_token(shape: ModelShape) -> float:
    """KV bytes of one token over all layers, each KV head once (paper 001, Eq. 1 and 2); or as
    measured at an engine."""
    if shape.kv_token_bytes:
        return shape.kv_token_bytes
    if shape.attention == "mla":
        return shape.kv_layers * (shape.kv_lora_rank + shape.rope_head_dim) * shape.kv_dtype_bytes
    return 2.0 * shape.kv_layers * shape.kv_heads * shape.head_dim * shape.kv_dtype_bytes


def kv_bytes(shape: ModelShape, tokens: float, tp: int = 1) -> float:
    """Bytes that ``tp`` ranks hold, and load, together for ``tokens`` tokens.

    A KV head is never split: with fewer heads than ranks each is replicated, and an MLA latent is
    whole on every rank.

    Raises:
        ValueError: ``tp`` below 1.
    """
    if tp < 1:
        raise ValueError(f"tp is {tp}: give the number of tensor-parallel ranks, 1 or more")
    size_bytes = tokens * kv_bytes_per_token(shape)
    if tp == 1 or shape.kv_token_bytes:
        return size_bytes
    if shape.attention == "mla":
        return size_bytes * tp
    return size_bytes * (math.ceil(shape.kv_heads / tp) * tp / shape.kv_heads)


def attention_flops(shape: ModelShape, new_tokens: float, context_tokens: float) -> float:
    """FLOPs of scores and values for a step, over all layers.

    Each new token meets the ``context_tokens`` before them and, causally, half the new ones:
    4·L·n_q·d per pair. MLA has two exact forms, of which the cheaper counts. Absorbed works in the
    latent, (4r + 2·rope) per head and pair; expanded first rebuilds keys and values of the
    context, 4·r·d per head and token, then pays (4d + 2·rope) per pair. Long prefills expand,
    decoding absorbs.
    """
    heads, square = shape.kv_layers * shape.heads, 0.5 * new_tokens * new_tokens
    rank, rope, dim = shape.kv_lora_rank, shape.rope_head_dim, shape.head_dim

    def form(per_pair: float, per_token: float = 0.0) -> float:
        return per_pair * square + (per_pair * new_tokens + per_token) * context_tokens

    if shape.attention != "mla":
        return form(4.0 * heads * dim)
    absorbed = form(heads * (4.0 * rank + 2.0 * rope))
    return min(absorbed, form(heads * (4.0 * dim + 2.0 * rope), heads * 4.0 * rank * dim))


def expert_params(shape: ModelShape) -> tuple[float, float]:
    """Parameters in experts, and the chance that a token leaves an expert alone; 0, 0 if dense."""
    if shape.experts <= shape.experts_active:
        return 0.0, 0.0
    idle = 1.0 - shape.experts_active / shape.experts
    # total - active is what the E - k idle experts hold, so both parts follow from the two counts.
    return (shape.params_total - shape.params_active) / idle, idle


def gemm_flops(shape: ModelShape) -> float:
    """FLOPs of a step's products per token: twice the active parameters without the look-up, and
    without the logits, which are those of the last token alone."""
    outside = shape.lookup_params + shape.head_params
    return 2.0 * max(shape.params_active - outside, 0.0)


def weight_bytes(shape: ModelShape) -> float:
    """Weight bytes that a step reads if its tokens touch all experts; of a look-up table the rows
    of its tokens are next to nothing."""
    return (shape.params_total - shape.lookup_params) * shape.weight_dtype_bytes


def all_reduce_bytes(shape: ModelShape, gpus: int) -> float:
    """Bytes that each of `gpus` GPUs sends to sum one token's activations over them all, twice a
    layer: 2·(n - 1)/n of what is summed, as a ring does; none for one GPU."""
    return 4.0 * shape.layers * shape.hidden * _ACTIVATION_BYTES * (gpus - 1) / gpus


def activation_bytes_per_token(shape: ModelShape) -> float:
    """Bytes of one token's layer inputs over all layers: L·h·p.

    p is the KV's own, but no less than two: KV in eight bits is made from activations in sixteen.
    """
    return shape.layers * shape.hidden * max(2.0, shape.kv_dtype_bytes)


def projection_flops(shape: ModelShape) -> float:
    """FLOPs to make one token's KV from its layer inputs, over all layers.

    4·h·n_kv·d per layer, which for one KV head per query head is KVPR's 4h² (Eq. 9); for MLA the
    product that gives the latent and its rotary part.
    """
    if shape.attention == "mla":
        width = float(shape.kv_lora_rank + shape.rope_head_dim)
    else:
        width = 2.0 * shape.kv_heads * shape.head_dim
    return 2.0 * shape.layers * shape.hidden * width
