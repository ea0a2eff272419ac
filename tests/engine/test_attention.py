"""Attention in parts, merged, is attention over all; padding and causality are respected."""

import pytest
import torch

from kappa_engine import attention

SCALE = 0.25


def tensors(batch=2, heads=8, kv_heads=2, queries=5, keys=12, dtype=torch.float64):
    rng = torch.Generator().manual_seed(queries * keys)
    q = torch.randn(batch, heads, queries, 16, generator=rng, dtype=dtype)
    k, v = torch.randn(2, batch, kv_heads, keys, 16, generator=rng, dtype=dtype)
    return q, k, v


def plain(q, k, v, visible):
    """One query at a time."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        seen = [j for j in range(k.shape[2]) if visible(b, i, j)]
        keys, values = k[b, h // group, seen], v[b, h // group, seen]
        out[b, h, i] = torch.softmax(keys @ q[b, h, i] * SCALE, 0) @ values
    return out


@pytest.mark.parametrize("queries", [1, 5, 12])
def test_causal_attention_sees_what_came_before(queries):
    q, k, v = tensors(queries=queries)
    want = plain(q, k, v, lambda b, i, j: j - 12 <= i - queries)
    torch.testing.assert_close(attention.dense(q, k, v, SCALE, causal=True), want)
    torch.testing.assert_close(attention.partial(q, k, v, SCALE, causal=True)[0], want)


def test_padding_is_not_seen():
    q, k, v = tensors(queries=1)
    lengths = [12, 5]
    visible = torch.arange(12) < torch.tensor(lengths)[:, None]
    want = plain(q, k, v, lambda b, i, j: j < lengths[b])
    torch.testing.assert_close(attention.dense(q, k, v, SCALE, causal=False, visible=visible), want)
    torch.testing.assert_close(
        attention.partial(q, k, v, SCALE, causal=False, visible=visible)[0], want
    )


@pytest.mark.parametrize("cut", [1, 6, 11])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_parts_merge_to_the_whole(cut, dtype, monkeypatch):
    # Few scores at a time, so that queries are taken in several turns.
    monkeypatch.setattr(attention, "_SCORES", 64)
    q, k, v = tensors(queries=5, dtype=dtype)
    whole = attention.dense(q, k, v, SCALE, causal=False)
    parts = [
        attention.partial(q, k[:, :, a:b], v[:, :, a:b], SCALE, causal=False)
        for a, b in ((0, cut), (cut, 12))
    ]
    torch.testing.assert_close(attention.combine(parts)[0], whole)


def test_a_part_without_keys_for_a_query_weighs_nothing():
    q, k, v = tensors(queries=1)
    nothing = torch.arange(12) < torch.tensor([[0], [4]])
    empty = attention.partial(q, k, v, SCALE, causal=False, visible=nothing)
    assert empty[1][0].eq(-torch.inf).all() and empty[0][0].eq(0).all()
    whole = attention.partial(q, k, v, SCALE, causal=False)
    merged = attention.combine([empty, whole])[0]
    torch.testing.assert_close(merged[0], whole[0][0])


def test_scores_beyond_the_range_of_half_precision():
    q, k, v = tensors(queries=1)
    q, k = 100 * q, 100 * k
    half = [x.to(torch.float16) for x in (q, k, v)]
    assert (half[0][0, 0] @ half[1][0, 0].T).isinf().any()
    out, lse = attention.partial(*half, SCALE, causal=False)
    assert out.isfinite().all() and lse.isfinite().all()
    want, sums = attention.partial(*(x.double() for x in half), SCALE, causal=False)
    torch.testing.assert_close(out.double(), want, rtol=0.01, atol=0.01)
    torch.testing.assert_close(lse.double(), sums, rtol=0.01, atol=0.01)
