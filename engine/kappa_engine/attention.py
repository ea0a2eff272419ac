"""Attention over keys and values from one place or several, exact either way.

`dense` is torch's fused attention. Where a context lies in several places, `partial` attends to
each and returns the log-sum-exp of its scores beside the output, and `combine` weighs the outputs
by them: the same sum in another order. Shapes: q (batch, heads, queries, d); k, v (batch, kv_heads,
keys, d); the last queries are the last keys' where attention is causal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right

from kappa_engine.config import ModelConfig
from kappa_engine.step import Group, PoolPart

# Scores held at once by `partial`, in elements.
_SCORES = 1 << 26

# Output and the log-sum-exp of its scores.
Partial = tuple[Tensor, Tensor]
Elsewhere = Callable[[], Partial]
"""Attention to part of the contexts that is computed elsewhere, under way; may wait.

Output (tokens, heads, d) and log-sum-exp (tokens, heads), on the device of the queries; zero and
-inf where a token has nothing there.
"""


def attend(
    groups: list[Group], q: Tensor, pool: Tensor, rows: Tensor, config: ModelConfig,
    elsewhere: Elsewhere | None = None,
) -> Tensor:  # fmt: skip
    """Attend from all of a step's queries (tokens, heads, head_dim).

    Args:
        pool, rows: K and V (n, kv_width) of tokens in the device pool, and in the step's buffer.
        elsewhere: is waited for behind all attention here, for groups that have part in it.

    Returns:
        Output (tokens, heads·head_dim).
    """
    whole = len(groups) == 1 and groups[0].in_order
    mine = [q if whole else q.index_select(0, group.rows) for group in groups]
    parts = [_partials(g, own, pool, rows, config) for g, own in zip(groups, mine, strict=True)]
    there = elsewhere() if elsewhere is not None else None
    result = torch.empty((len(q), config.query_width), dtype=q.dtype, device=q.device)
    for group, found in zip(groups, parts, strict=True):
        if there is not None and group.on_cpu:
            shape = (group.batch, group.queries, config.heads)
            out, lse = (x.index_select(0, group.rows) for x in there)
            found.append((out.view(*shape, -1).transpose(1, 2), lse.view(shape).transpose(1, 2)))
        # One part alone came without its log-sum-exp.
        out = found[0][0] if len(found) == 1 else combine(found)[0].to(found[0][0].dtype)
        out = out.transpose(1, 2).reshape(-1, config.query_width)
        if whole:
            return out
        result.index_copy_(0, group.rows, out)
    return result


def _partials(
    group: Group, q: Tensor, pool: Tensor, rows: Tensor, config: ModelConfig
) -> list[Partial]:
    """Attention of a group to each place; where there is only one, without its log-sum-exp."""
    scale = config.head_dim**-0.5
    q = q.view(group.batch, group.queries, config.heads, config.head_dim).transpose(1, 2)
    results: list[Partial] = []
    for part in group.parts:
        if isinstance(part, PoolPart):
            k, v, causal = *_from_blocks(part, group.batch, pool, config), False
        else:
            shape = (group.batch, part.keys, config.kv_heads, config.head_dim)
            k, v = (
                rows.index_select(0, of).view(shape).transpose(1, 2)
                for of in (part.k_rows, part.v_rows)
            )
            # Only this step's own tokens can come after a query, and those are not in the pool.
            causal = group.queries > 1
        if len(group.parts) == 1 and not group.on_cpu:
            out = dense(q, k, v, scale, causal=causal, visible=part.visible)
            return [(out, out)]
        results.append(partial(q, k, v, scale, causal=causal, visible=part.visible))
    return results


def _from_blocks(
    part: PoolPart, batch: int, pool: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor]:
    """Keys and values (batch, kv_heads, keys, d) of whole blocks."""
    halves = pool.view(-1, part.block_tokens, config.kv_heads, config.head_dim)
    found = []
    for rows in (part.k_rows, part.v_rows):
        held = halves.index_select(0, rows)
        if part.inside is not None:
            # Rows that were never written may hold NaN, which would spoil even masked sums.
            ends = held.index_select(0, part.last)
            held.index_copy_(0, part.last, ends.where(part.inside[..., None, None], 0))
        held = held.view(batch, -1, config.kv_heads, config.head_dim)[:, : part.keys]
        found.append(held.transpose(1, 2))
    return found[0], found[1]


def dense(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, visible: Tensor | None = None
) -> Tensor:
    """Output (batch, heads, queries, d).

    causal: key j is visible to query i iff j - keys <= i - queries. visible (batch, keys): False
    where a key is padding; only without `causal`.
    """
    if causal:
        bias = causal_lower_right(q.shape[2], k.shape[2])
        gqa = q.shape[1] != k.shape[1]
        out: Tensor = F.scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=gqa)
        return out
    # The heads of a group share their keys: as more queries of one head, no key is repeated.
    folded = _fold(q, k.shape[1])
    mask = visible
    if mask is not None:
        mask = mask[:, None, None, :].expand(-1, -1, folded.shape[2], -1)
    return F.scaled_dot_product_attention(folded, k, v, mask, scale=scale).reshape(q.shape)


def partial(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, visible: Tensor | None = None
) -> Partial:
    """The output of `dense`, and the log-sum-exp of each query's scores (batch, heads, queries).

    That is in float32 at least. Where all of a query's keys are padding, output is zero and
    log-sum-exp -inf; the flash kernel, which takes no padding, would say inf.
    """
    if visible is None and _flash(q, k, v):
        # Causal means lower right in this operator.
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
        return out, lse
    queries, keys = q.shape[2], k.shape[2]
    step = max(1, _SCORES // max(1, q.shape[0] * q.shape[1] * keys))
    outs, sums = [], []
    for start in range(0, queries, step):
        mask = None if visible is None else visible[:, None, None, :]
        if causal:
            last = torch.arange(start, min(start + step, queries), device=q.device)
            mask = torch.arange(keys, device=q.device) <= (last + keys - queries)[:, None]
        out, lse = _scored(q[:, :, start : start + step], k, v, scale, mask)
        outs.append(out)
        sums.append(lse)
    return torch.cat(outs, dim=2), torch.cat(sums, dim=2)


def _flash(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the flash kernel takes these: half precision, on a GPU that has it."""
    if not q.is_cuda or q.shape[3] % 8:
        return False
    params = SDPAParams(q, k, v, None, 0.0, False, q.shape[1] != k.shape[1])
    return bool(can_use_flash_attention(params))


def combine(parts: Sequence[Partial]) -> Partial:
    """Merge outputs by their log-sum-exp, in its precision; parts that saw no key weigh nothing."""
    sums = torch.stack([lse for _, lse in parts])
    weights = torch.softmax(sums, dim=0)[..., None]
    merged = sum(w * out.to(w.dtype) for w, (out, _) in zip(weights, parts, strict=True))
    assert isinstance(merged, Tensor)
    return merged, torch.logsumexp(sums, dim=0)


def _scored(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, heads, queries, width = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    folded = _fold(q, k.shape[1])
    # Scores in half precision would overflow, or be rounded to more than softmax can bear.
    scores = torch.matmul(folded.to(wide), k.transpose(2, 3).to(wide)) * scale
    if mask is not None:
        apart = scores.view(batch, k.shape[1], -1, queries, k.shape[2])
        apart = apart.masked_fill(~(mask[:, None] if mask.dim() == 4 else mask), -torch.inf)
        scores = apart.view(scores.shape)
    lse = torch.logsumexp(scores, dim=-1)
    # A row of -inf alone would make weights of nan.
    chances = torch.exp(scores - lse.clamp_min(torch.finfo(wide).min)[..., None])
    out = torch.matmul(chances.to(q.dtype), v)
    return out.view(batch, heads, queries, width), lse.view(batch, heads, queries)


def _fold(q: Tensor, kv_heads: int) -> Tensor:
    """Heads that share keys as queries of one head: (batch, kv_heads, group·queries, d)."""
    batch, heads, queries, width = q.shape
    return q.reshape(batch, kv_heads, heads // kv_heads * queries, width)
