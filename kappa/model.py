"""The law as the router uses it: seconds to load a cached prefix and to compute the new tokens.

Beyond paper 001 (see ``kappa.paper``) it counts attention over the context, the floor set by
reading weights and KV from HBM, mixtures of experts, MLA, and KV heads replicated under tensor
parallelism. The router calls these scalars per request per node, so they are plain Python and
cost about a microsecond. All seconds are undilated; ``dilated`` converts for a paced node.

``tp`` is the number of ranks that a ``NodeProfile``'s rates are the sum of.
"""

from __future__ import annotations

import math
from typing import Literal

from kappa.types import ModelShape, NodeProfile, Plan, TokenCounts

Bound = Literal["memory", "compute"]


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
    if shape.attention != "mla":
        pairs = new_tokens * (context_tokens + 0.5 * new_tokens)
        return 4.0 * shape.layers * shape.heads * shape.head_dim * pairs
    return min(
        start + slope * context_tokens for start, slope in _attention_lines(shape, new_tokens)
    )


def _attention_lines(shape: ModelShape, new_tokens: float) -> tuple[tuple[float, float], ...]:
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


def flops_per_token(shape: ModelShape, new_tokens: float, context_tokens: float) -> float:
    """Mean FLOPs of one new token: F(S) = 2P + 4·L·n_q·d·(S + T/2) for S context, T new tokens."""
    tokens = max(1.0, new_tokens)
    return 2.0 * shape.params_active + attention_flops(shape, tokens, context_tokens) / tokens


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


def load_s(shape: ModelShape, node: NodeProfile, cached_tokens: float, tp: int = 1) -> float:
    """Seconds of link time to bring ``cached_tokens`` to the device; none costs nothing."""
    if cached_tokens <= 0:
        return 0.0
    return node.load_fixed_s + kv_bytes(shape, cached_tokens, tp) / node.h2d_bytes_per_s


def compute_s(
    shape: ModelShape, node: NodeProfile, new_tokens: float, context_tokens: float, tp: int = 1
) -> float:
    """Seconds of gpu time for one prefill step of ``new_tokens`` after ``context_tokens``.

    The larger of the FLOP time and the HBM time (weights once, and the KV of all tokens), plus the
    node's fixed step cost. At least one token is always computed.
    """
    tokens = new_tokens if new_tokens > 1 else 1
    linear_s = 2.0 * shape.params_active * tokens / node.flops_per_s
    attention_s = attention_flops(shape, tokens, context_tokens) / (
        node.attention_flops_per_s or node.flops_per_s
    )
    read_bytes = weight_read_bytes(shape, tokens) + kv_bytes(shape, tokens + context_tokens, tp)
    return max(linear_s + attention_s, read_bytes / node.hbm_bytes_per_s) + node.step_fixed_s


def decode_step_s(
    shape: ModelShape, node: NodeProfile, batch: int, context_tokens_total: float, tp: int = 1
) -> float:
    """Seconds of one decode step: a token for each of ``batch`` sequences.

    ``context_tokens_total`` is summed over the sequences. An empty batch takes no step.
    """
    if batch <= 0:
        return 0.0
    pair_flops = min(slope for _, slope in _attention_lines(shape, 1.0))
    flop_s = 2.0 * shape.params_active * batch / node.flops_per_s + (
        pair_flops * context_tokens_total / (node.attention_flops_per_s or node.flops_per_s)
    )
    read_bytes = weight_read_bytes(shape, batch) + kv_bytes(shape, context_tokens_total, tp)
    return max(flop_s, read_bytes / node.hbm_bytes_per_s) + node.step_fixed_s


def kappa_crit(shape: ModelShape, node: NodeProfile, tp: int = 1) -> float:
    """κ_crit = (2P/M)·(B/G), paper 001 Eq. 6: no attention, no floor, no fixed cost."""
    flops_per_byte = 2.0 * shape.params_active / kv_bytes(shape, 1, tp)
    return flops_per_byte * node.h2d_bytes_per_s / node.flops_per_s


def ttft_s(
    shape: ModelShape,
    node: NodeProfile,
    cached_tokens: float,
    new_tokens: float,
    device_tokens: float = 0.0,
    overlap: float = 0.0,
    tp: int = 1,
) -> float:
    """Idle seconds to first token: load then compute, less what overlaps (Eq. 3 and 4).

    Args:
        shape: the model.
        node: where it runs.
        cached_tokens: to load over the link.
        new_tokens: to compute.
        device_tokens: already in VRAM; they lengthen the context and nothing else.
        overlap: share of the shorter of the two that hides behind the longer, 0 to 1.
        tp: tensor-parallel ranks.

    Raises:
        ValueError: ``overlap`` outside [0, 1].
    """
    load = load_s(shape, node, cached_tokens, tp)
    compute = compute_s(shape, node, new_tokens, cached_tokens + device_tokens, tp)
    return _combine_s(load, compute, overlap)


def _check_overlap(overlap: float) -> None:
    if not 0.0 <= overlap <= 1.0:
        raise ValueError(f"overlap is {overlap}: give a share between 0 (none) and 1 (full)")


def _combine_s(load: float, compute: float, overlap: float) -> float:
    _check_overlap(overlap)
    return load + compute - overlap * min(load, compute)


def kappa_eff(
    shape: ModelShape,
    node: NodeProfile,
    new_tokens: float,
    device_tokens: float = 0.0,
    overlap: float = 0.0,
    tp: int = 1,
) -> float:
    """The least κ at which predicted TTFT is twice the compute time.

    Loading is sequential unless ``overlap`` says otherwise; then TTFT doubles where
    load = (1 + overlap)·compute, so full overlap doubles κ_eff. For a fixed number of new tokens
    FLOP time and HBM time are lines in the cached tokens, and the crossing is solved exactly: no
    iteration, attention included.

    Returns:
        κ, fractional; 0 where the load's fixed cost alone exceeds the compute time; infinity where
        computing grows with the context faster than loading does, so that no κ is memory-bound.

    Raises:
        ValueError: ``overlap`` outside [0, 1].
    """
    _check_overlap(overlap)
    tokens = new_tokens if new_tokens > 1 else 1
    kv_token_bytes = kv_bytes(shape, 1, tp)
    load_line = (node.load_fixed_s, kv_token_bytes / node.h2d_bytes_per_s)
    resident_bytes = weight_read_bytes(shape, tokens) + kv_token_bytes * (tokens + device_tokens)
    read_line = (
        resident_bytes / node.hbm_bytes_per_s + node.step_fixed_s,
        kv_token_bytes / node.hbm_bytes_per_s,
    )
    linear_s = 2.0 * shape.params_active * tokens / node.flops_per_s + node.step_fixed_s
    attention_rate = node.attention_flops_per_s or node.flops_per_s
    # Loading must outlast the reads and, as the engine takes the cheaper form, any one form.
    least_tokens = min(
        _first_crossing(
            load_line,
            (linear_s + (start + slope * device_tokens) / attention_rate, slope / attention_rate),
            read_line,
            weight=1.0 + overlap,
        )
        for start, slope in _attention_lines(shape, tokens)
    )
    return least_tokens / tokens


def _first_crossing(
    load_line: tuple[float, float], *compute_lines: tuple[float, float], weight: float
) -> float:
    """Least x ≥ 0 where the load line reaches ``weight`` times every compute line, or infinity.

    Lines are (at zero, slope).
    """
    least, most = 0.0, math.inf
    for start, slope in compute_lines:
        gain = load_line[1] - weight * slope
        lead = weight * start - load_line[0]
        if gain > 0:
            least = max(least, lead / gain)
        elif lead > 0:
            return math.inf
        elif gain < 0:
            most = min(most, lead / gain)
    return least if least <= most else math.inf


def bound(counts: TokenCounts, shape: ModelShape, node: NodeProfile, tp: int = 1) -> Bound:
    """The paper's label of a request on a node: memory-bound from κ = κ_crit up (Eq. 5)."""
    return "memory" if counts.ratio >= kappa_crit(shape, node, tp) else "compute"


def plan(
    counts: TokenCounts,
    shape: ModelShape,
    node: NodeProfile,
    overlap: float = 0.0,
    tp: int = 1,
) -> Plan:
    """The plain plan: load every cached token, compute the new ones.

    Raises:
        ValueError: ``overlap`` outside [0, 1].
    """
    load = load_s(shape, node, counts.cached_tokens, tp)
    context_tokens = counts.cached_tokens + counts.device_tokens
    compute = compute_s(shape, node, counts.new_tokens, context_tokens, tp)
    return Plan(
        kind="load",
        ttft_s=_combine_s(load, compute, overlap),
        load_s=load,
        compute_s=compute,
        load_bytes=kv_bytes(shape, counts.cached_tokens, tp),
    )


def dilated(seconds: float, node: NodeProfile) -> float:
    """Real seconds that ``seconds`` of the node's own time last."""
    return seconds * node.dilation
