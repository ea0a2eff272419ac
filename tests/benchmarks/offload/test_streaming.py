"""Schedules over the engine's model: streamed weights, stores, and passes that fail."""

import numpy as np
import pytest
import torch

from benchmarks.offload.streaming import (
    ScheduledForward,
    Store,
    WeightStream,
    model_bytes,
    streamed,
)
from engine.arena import Arena, ArenaSize
from engine.config import read_config
from engine.step import Pages, prompt_row
from engine.transfer import CpuMover, TransferFailed
from engine.weights import random_weights
from kappa.plans.load_plan import layout
from tests.benchmarks.offload.streams import over_streamed
from tests.engine import hf
from tests.engine.rig import BLOCK, prompt, rig

CACHED = 24
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 50,
}  # fmt: skip


MADE = [ScheduledForward, over_streamed]


@pytest.mark.parametrize("made_with", MADE)
@pytest.mark.parametrize("family", hf.FAMILIES)
def test_every_kind_of_cached_tokens_gives_the_same_logits(family, made_with):
    with rig(family, made_with=made_with) as r:
        tokens = prompt(CACHED + 5)
        pages = r.pages(CACHED, ("kv", "host"), ("act", "host"))
        r.forward.store([Store(prompt_row(tokens[:CACHED], pages), from_token=0)])
        want = r.expected(tokens)[-1:]
        for segments in (layout(CACHED), layout(CACHED, recompute=8, activations=8)):
            assert r.agrees(r.forward.compute([prompt_row(tokens, pages, segments)]), want)


def test_chunks_that_end_within_a_block_are_stored_token_by_token():
    with rig("qwen3", made_with=ScheduledForward) as r:
        tokens = prompt(27)
        pages = r.pages(27, ("kv", "host"), ("act", "host"))
        for start, end in ((0, 5), (5, 6), (6, 18), (18, 26)):
            row = prompt_row(tokens[:end], pages, layout(start, activations=start // 2))
            r.forward.store([Store(row, from_token=start)])
        for activations in (0, 13, 26):
            row = prompt_row(tokens, pages, layout(26, activations=activations))
            assert r.agrees(r.forward.compute([row]), r.expected(tokens)[-1:])


@pytest.mark.parametrize("failing", ["h2d", "d2h"])
@pytest.mark.parametrize("made_with", MADE)
def test_after_a_failed_copy_the_same_pass_succeeds(failing, made_with):
    with rig("llama", made_with=made_with) as r:
        tokens = prompt(29)
        pages = r.stored(tokens, CACHED)
        pages.put(CACHED // BLOCK, "kv", "host", r.blocks("kv", "host", 2))
        store = Store(prompt_row(tokens, pages, layout(CACHED, activations=8)), from_token=CACHED)
        whole, calls = r.mover._copy, []

        def broken(direction, copies):
            calls.append(direction)
            if direction == failing and calls.count(failing) == 2:
                raise OSError("the link is down")
            whole(direction, copies)

        r.mover._copy = broken
        with pytest.raises(TransferFailed, match="the link is down"):
            r.forward.store([store])
        assert r.agrees(r.forward.store([store]), r.expected(tokens)[-1:])
        # What the second one stored is what it should be.
        longer = np.append(tokens, 5)
        got = r.forward.compute([prompt_row(longer, pages, layout(29))])
        assert r.agrees(got, r.expected(longer)[-1:])


def test_streamed_layers_arrive_key_and_value_weights_first():
    with rig("llama", made_with=over_streamed) as r:
        copied = []
        whole = r.mover._copy
        r.mover._copy = lambda direction, copies: (
            copied.append(sum(target.numel() for target, _ in copies)), whole(direction, copies),
        )  # fmt: skip
        r.forward.compute([prompt_row(np.arange(3, 9), Pages(np.array([0, 1])))])
        r.mover.drain()
        layer = r.forward.weights.layers[0].tensors()
        first = sum(x.numel() for name, x in layer.items() if name in ("kv", "kv_bias"))
        rest = sum(x.numel() for x in layer.values()) - first
        # The first layer comes once more behind the last: the next pass begins with it.
        assert copied == [first, rest] * (r.forward.config.layers + 1)


def test_pieces_of_a_streamed_layer_are_all_of_it():
    with rig("llama", made_with=over_streamed) as r:
        stream = WeightStream(r.forward.weights, r.mover)
        for layer, pieces in ((0, 1), (1, 3), (2, 97), (0, 2), (2, 1)):
            stream.load_kv(layer, r.mover.mark())
            for piece in range(pieces):
                stream.load_rest(layer, piece, pieces)
            arrived = stream.wait(layer).tensors()
            for name, want in r.forward.weights.layers[layer].tensors().items():
                assert torch.equal(arrived[name], want)


def test_a_streamed_model_of_one_or_two_layers_is_copied_once():
    for layers in (1, 2):
        config = read_config({**LLAMA, "num_hidden_layers": layers})
        row = prompt_row(np.arange(3, 12), Pages())
        results = []
        here = random_weights(config, seed=0, dtype=torch.float64)
        for made in (here, streamed(here)):
            arena = Arena(config.shape, ArenaSize(4, block_tokens=4), dtype=torch.float64)
            mover = CpuMover()
            forward = ScheduledForward(made, arena, mover)
            results += [forward.compute([row]) for _ in range(3)]
            mover.drain()
            moved = mover.counters["h2d"].copied_bytes
            assert moved == (model_bytes(made) if forward.streamed else 0)
            mover.stop()
        assert all(torch.equal(results[0], other) for other in results)
