"""Decoding gives Hugging Face's tokens: every way to keep a block, both schedules, any split."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from benchmarks.offload.decoder import (
    ACT_HOST,
    BOTH_HOST,
    KV_DEVICE,
    KV_HOST,
    Decoder,
    Kept,
    always,
    held_spans,
)
from benchmarks.offload.streaming import ScheduledForward, model_bytes
from engine.step import Pages, Source, TokenSpan
from tests.benchmarks.offload.streams import over_streamed
from tests.engine import hf
from tests.engine.rig import BLOCK, DEVICES, prompt, rig

COUNT = 16
ACT_DEVICE = Kept(("act",))
# Ragged, one ending with its block, one within the first; two batches.
LENGTHS = [[19, 3], [12, 25]]
WAYS = {
    "kv-device": always(KV_DEVICE),
    "act-device": always(ACT_DEVICE),
    "kv-host": always(KV_HOST),
    "act-host": always(ACT_HOST),
    "both-host": always(BOTH_HOST),
    "mixed": lambda kv, act: (KV_HOST, ACT_HOST, ACT_DEVICE, KV_DEVICE, BOTH_HOST)[(kv + act) % 5],
}


@cache
def expected(family: str, dtype: torch.dtype, length: int) -> tuple[list[int], torch.Tensor]:
    return hf.greedy(hf.reference(family, dtype), prompt(length), COUNT)


def check(r, family, decoder):
    """All of COUNT tokens and their logits, of every sequence."""
    logits = [decoder.prefill([[prompt(n) for n in batch] for batch in LENGTHS])]
    logits += [decoder.step() for _ in range(COUNT - 1)]
    for b, (batch, tokens) in enumerate(zip(LENGTHS, decoder.tokens(), strict=True)):
        for s, length in enumerate(batch):
            want, scores = expected(family, r.dtype, length)
            assert tokens[s].tolist() == want
            assert r.agrees(torch.stack([step[b][s] for step in logits]), scores)
    decoder.close()
    for pool in r.arena.pools.values():
        assert pool.used == 0 and not pool.misused


# OPT every way in all four pairs of schedule and weights; the others the way that mixes all kinds.
CASES = [
    (family, way, order, weights)
    for family in hf.FAMILIES
    for way in (WAYS if family == "opt" else ["mixed"])
    for order in ("row", "column")
    for weights in ("resident", "streamed")
    if family == "opt" or (weights == "streamed") == (order == "column")
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "way", "order", "weights"), CASES)
def test_sixteen_greedy_tokens(family, way, order, weights, device):
    # All in double precision, the hardest in single as well.
    for dtype in [torch.float64, *([torch.float32] if way == "mixed" else [])]:
        made_with = over_streamed if weights == "streamed" else ScheduledForward
        with rig(family, dtype, made_with=made_with, device=device) as r:
            check(r, family, Decoder(r.forward, WAYS[way], order=order))


@pytest.mark.parametrize("family", ["opt", "qwen3"])
@pytest.mark.parametrize(
    "split",
    [lambda s: 0, lambda s: 1, lambda s: BLOCK, lambda s: s // 2, lambda s: s],
    ids=["0", "1", "block", "half", "all"],
)
def test_every_split_between_activations_and_kv(family, split):
    with rig(family, made_with=ScheduledForward) as r:
        check(r, family, Decoder(r.forward, always(BOTH_HOST), split=split))


def test_a_split_moves_fewer_bytes_where_activations_are_half_of_kv():
    moved = []
    for share in (0, 1):
        with rig("opt", made_with=ScheduledForward) as r:
            decoder = Decoder(r.forward, always(BOTH_HOST), split=lambda s, share=share: share * s)
            decoder.prefill([[prompt(24), prompt(24, 1)]])
            decoder.step()
            moved.append(r.mover.counters["h2d"].copied_bytes)
            full = 2 * 24 * r.forward.config.layers * r.dtype.itemsize
            assert moved[-1] == full * (r.forward.config.hidden if share else 2 * 64)
    assert moved[0] == 2 * moved[1]


def test_column_by_column_begins_in_the_order_of_algorithm_1():
    with rig("opt", made_with=over_streamed) as r:
        decoder = Decoder(r.forward, always(BOTH_HOST), order="column", split=lambda s: s // 2)
        decoder.prefill([[prompt(15)], [prompt(19)]])
        r.forward.trace = trace = []
        decoder.step()
    begun = {what: i for i, what in enumerate(trace)}
    layers, batches = r.forward.config.layers, 2
    computed = [(j, k) for what, j, k in trace if what == "compute"]
    assert computed == [(j, k) for j in range(layers) for k in range(batches)]
    for (j, k), (next_j, next_k) in pairwise(computed):
        now = begun["compute", j, k]
        assert begun["load_act", next_j, next_k] < begun["load_cache", next_j, next_k] < now
        if j + 1 < layers:
            assert begun["load_weight", j + 1, k] < begun["load_act", next_j, next_k]
        assert now < begun["store", j, k] < begun["compute", next_j, next_k]


def test_weights_cross_the_link_once_per_layer_whatever_the_number_of_batches():
    moved = {}
    for order in ("row", "column"):
        with rig("llama", made_with=over_streamed) as r:
            decoder = Decoder(r.forward, always(KV_DEVICE), order=order)
            decoder.prefill([[prompt(n)] for n in (9, 10, 11)])
            r.mover.drain()
            before = r.mover.counters["h2d"].copied_bytes
            decoder.step()
            r.mover.drain()
            moved[order] = r.mover.counters["h2d"].copied_bytes - before
    assert moved["column"] == model_bytes(r.forward.weights)
    assert moved["row"] == 3 * moved["column"]


def test_contexts_of_any_length_in_one_batch():
    with rig("llama", made_with=ScheduledForward, blocks=200) as r:
        lengths = [1, 2, 7, 8, 9, 33, 130]
        decoder = Decoder(r.forward, lambda kv, act: (KV_DEVICE, KV_HOST)[(kv + act) % 2])
        first = decoder.prefill([[prompt(n) for n in lengths]])[0].argmax(-1)
        got = decoder.step()[0]
        longer = [np.append(prompt(n), int(t)) for n, t in zip(lengths, first, strict=True)]
        assert r.agrees(got, torch.stack([r.expected(tokens)[-1] for tokens in longer]))


def test_a_block_cannot_leave_as_what_it_never_was():
    with pytest.raises(ValueError, match="goes to host memory as what it was"):
        Kept(("kv",), ("act",))


def test_the_nearest_copy_is_the_source_and_the_split_only_replaces_host_kv():
    pages = Pages()
    pages.put(0, "act", "host", [0, 1, 2, 3])
    pages.put(1, "kv", "host", [5, 6, 7])
    pages.put(2, "act", "device", [8])
    pages.put(3, "kv", "device", [9])
    nearest = [Source.ACT_HOST, Source.KV_HOST, Source.ACT_DEVICE, Source.KV_DEVICE]
    ends = [0, 4, 8, 12, 15]
    spans = [TokenSpan(s, a, b) for s, (a, b) in zip(nearest, pairwise(ends), strict=True)]
    assert held_spans(pages, 15, BLOCK) == tuple(spans)
    split = held_spans(pages, 15, BLOCK, 6)
    assert split[:2] == (TokenSpan(Source.ACT_HOST, 0, 6), TokenSpan(Source.KV_HOST, 6, 8))
    assert split[2:] == tuple(spans[2:])
    left = held_spans(pages, 15, BLOCK, on_cpu=8)
    assert left[1] == TokenSpan(Source.KV_CPU, 4, 8)


@pytest.mark.parametrize("order", ["row", "column"])
def test_the_cpu_attends_beside_blocks_of_every_other_kind(order):
    def mixed(kv: int, act: int):
        return (KV_HOST, ACT_HOST, KV_DEVICE)[(kv + act) % 3]

    made_with = over_streamed if order == "column" else ScheduledForward
    with rig("opt", made_with=made_with, cpu_threads=2) as r:
        check(r, "opt", Decoder(r.forward, mixed, order=order, cpu=lambda length: length))
