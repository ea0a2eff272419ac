"""What a model takes of a node: bytes of KV and of weights, FLOPs of attention.

Beyond paper 001 (see ``kappa.paper``) attention over the context, mixtures of experts, MLA, and KV
heads replicated under tensor parallelism count. ``tp`` is the number of tensor-parallel ranks that
a ``NodeProfile``'s rates are the sum of. ``kappa.cost`` turns all of this into seconds.
"""

from __future__ import annotations

import math

from kappa.types import ModelShape


def kv_bytes_per_token(shape: ModelShape) -> float:
    """KV bytes of one token over all layers, each KV head once (paper 001, Eq. 1 and 2)."""
    if shape.attention == "mla":
        return shape.layers * (shape.kv_lora_rank + shape.rope_head_dim) * shape.kv_dtype_bytes
    return 2.0 * shape.layers * shape.kv_heads * shape.head_dim * shape.kv_dtype_bytes


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
    if tp == 1:
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
    return min(
        start + slope * context_tokens for start, slope in attention_lines(shape, new_tokens)
    )


def attention_lines(shape: ModelShape, new_tokens: float) -> tuple[tuple[float, float], ...]:
    """Attention FLOPs as lines in the context: (without any, per token of it), one per form."""
    heads = shape.layers * shape.heads
    square = 0.5 * new_tokens * new_tokens
    if shape.attention != "mla":
        per_pair = 4.0 * heads * shape.head_dim
        return ((per_pair * square, per_pair * new_tokens),)
    rank, rope, dim = shape.kv_lora_rank, shape.rope_head_dim, shape.head_dim
    absorbed = heads * (4.0 * rank + 2.0 * rope)
    expanded = heads * (4.0 * dim + 2.0 * rope)
    rebuild = heads * 4.0 * rank * dim
    return (
        (absorbed * square, absorbed * new_tokens),
        (expanded * square, expanded * new_tokens + rebuild),
    )


def weight_read_bytes(shape: ModelShape, tokens: float) -> float:
    """Weight bytes a step of ``tokens`` tokens reads.

    A mixture of experts reads what every token shares and the experts touched: with k of E chosen
    evenly, E·(1 - (1 - k/E)^T) of them are expected.
    """
    if shape.experts <= shape.experts_active:
        return shape.params_total * shape.weight_dtype_bytes
    share = shape.experts_active / shape.experts
    # total - active is what the E - k idle experts hold, so both parts follow from the two counts.
    in_experts = (shape.params_total - shape.params_active) / (1.0 - share)
    touched: float = 1.0 - (1.0 - share) ** max(1.0, tokens)
    return (shape.params_total - in_experts * (1.0 - touched)) * shape.weight_dtype_bytes
