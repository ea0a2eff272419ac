"""Prefill by load plan gives Hugging Face's logits: every split, source and place of blocks."""

import math

import numpy as np
import pytest
import torch

from kappa.plans.load_plan import LoadPlan, Segment, layout
from kappa_engine.step import NoSuchBlock, Pages, PlanRefused, prompt_row
from kappa_engine.transfer import TransferFailed
from tests.engine import hf
from tests.engine.rig import BLOCK, DEVICES, prompt, rig

CACHED = 24
SPLITS = [0, 1, BLOCK, CACHED // 2, CACHED]
DTYPES = [torch.float64, torch.float32]


def plans(cached: int = CACHED) -> list[LoadPlan]:
    """Every split of the cached tokens between K and A, K and R at either end, and all three."""
    two = [layout(cached, activations=n) for n in SPLITS]
    two += [layout(cached, recompute=n, tail=tail) for n in SPLITS for tail in (False, True)]
    three = [
        layout(cached, recompute=r, activations=a, tail=tail)
        for r in SPLITS[1:4]
        for a in SPLITS[1:4]
        for tail in (False, True)
    ]
    return [LoadPlan(segments) for segments in dict.fromkeys(two + three)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", [*hf.FAMILIES, "opt-post-norm", "llama3-rope"])
def test_every_split_of_the_cached_tokens_gives_the_same_logits(family, dtype, device):
    with rig(family, dtype, device=device) as r:
        tokens = prompt(CACHED + 5)
        pages = r.stored(tokens, CACHED)
        want = r.expected(tokens)
        for plan in plans():
            target = Pages()
            target.put(0, "kv", "host", pages.column("kv", "host"))
            target.put(0, "act", "host", pages.column("act", "host"))
            row = prompt_row(tokens, target, plan.segments, wanted="all")
            got = r.forward.compute([row])
            computed = want[-len(got) :]
            if plan.segments[0].kind == "R" and len(plan.segments) > 1:
                computed = torch.cat((want[: plan.tokens("R")], want[CACHED:]))
            assert r.agrees(got, computed), plan.segments


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_ragged_batch_of_plans_is_exact_and_reusable_on_device(family):
    with rig(family) as r:
        cached = [24, 0, 9, 16]
        lengths = [31, 6, 10, 23]
        chosen = [
            layout(24, recompute=7, activations=6), (), layout(9, activations=9),
            layout(16, recompute=16),
        ]  # fmt: skip
        prompts = []
        for n, c, segments in zip(lengths, cached, chosen, strict=True):
            pages = r.stored(prompt(n), c)
            pages.put(0, "kv", "device", r.blocks("kv", "device", -(-(n + 9) // BLOCK)))
            prompts.append(prompt_row(prompt(n), pages, segments))
        got = r.forward.compute(prompts)
        want = torch.stack([r.expected(prompt(n))[-1] for n in lengths])
        assert r.agrees(got, want)
        # The next chunks, of one and of several tokens, read nothing but the device's blocks.
        r.arena.kv_host.fill_(torch.nan)
        r.arena.act_host.fill_(torch.nan)
        more = [9, 1, 1, 4]
        longer = [
            np.concatenate((prompt(n), prompt(k, 3))) for n, k in zip(lengths, more, strict=True)
        ]
        got = r.forward.compute(
            [
                prompt_row(tokens, before.pages, start=n)
                for tokens, before, n in zip(longer, prompts, lengths, strict=True)
            ]
        )
        assert r.agrees(got, torch.stack([r.expected(tokens)[-1] for tokens in longer]))


@pytest.mark.parametrize("family", hf.FAMILIES)
@pytest.mark.parametrize("start", [1, 10, 20, 24])
def test_a_prefix_on_the_device_goes_before_the_plan(family, start):
    with rig(family) as r:
        tokens = prompt(33)
        pages = r.stored(tokens, 28)
        pages.put(0, "kv", "device", r.blocks("kv", "device", -(-33 // BLOCK)))
        r.forward.compute([prompt_row(tokens[:start], pages)])
        for segments in (
            layout(28 - start, activations=3),
            layout(28 - start, recompute=2, activations=1),
            layout(28 - start, recompute=2, activations=1, tail=True),
        ):
            got = r.forward.compute([prompt_row(tokens, pages, segments, start)])
            assert r.agrees(got, r.expected(tokens)[-1:])


def test_compute_writes_activations_to_their_device_blocks():
    with rig("opt") as r:
        tokens = prompt(30)
        kept, pages = r.pages(30, ("act", "device")), r.pages(30, ("kv", "device"))
        blocks = kept.column("act", "device")
        pages.put(0, "act", "device", blocks)
        for start, stop in ((0, 21), (21, 29), (29, 30)):
            r.forward.compute([prompt_row(tokens[:stop], pages, start=start)])
        host = r.pages(30, ("act", "host"))
        copied = r.arena.act_device[:, blocks].to("cpu")
        r.arena.act_host[:, host.column("act", "host")] = copied
        whole = np.array([*tokens, 5])
        row = prompt_row(whole, host, layout(28, activations=28))
        assert r.agrees(r.forward.compute([row]), r.expected(whole)[-1:])


def test_bytes_on_the_link_are_those_of_the_plan():
    with rig("opt") as r:
        tokens = prompt(CACHED + 3)
        pages = r.stored(tokens, CACHED)
        layers, width = r.forward.config.layers, r.forward.config.kv_width
        for activations in (0, BLOCK, CACHED):
            plan = LoadPlan(layout(CACHED, activations=activations))
            before = r.mover.counters["h2d"].copied_bytes
            r.forward.compute([prompt_row(tokens, pages, plan.segments)])
            moved = r.mover.counters["h2d"].copied_bytes - before
            elements = 2 * width * (CACHED - activations) + r.forward.config.hidden * activations
            assert moved == layers * elements * r.dtype.itemsize


def test_what_cannot_be_executed_is_refused_by_name():
    with rig("opt") as r:
        tokens = prompt(20)
        pages = r.stored(tokens, 16)
        with pytest.raises(PlanRefused, match=r"segment C \[4, 16\).*K, A and R"):
            prompt_row(tokens, pages, (Segment("K", 0, 4), Segment("C", 4, 16)))
        with pytest.raises(PlanRefused, match="16 tokens behind 0, but the prompt has 16"):
            prompt_row(tokens[:16], pages, layout(16))
        with pytest.raises(NoSuchBlock, match=r"token 16 of sequence 0 .* from host kv"):
            r.forward.compute([prompt_row(tokens, pages, layout(17))])
        with pytest.raises(ValueError, match="513 tokens: this model has 512 positions"):
            r.forward.compute([prompt_row(prompt(513), Pages())])


def test_after_a_failed_load_the_same_pass_succeeds():
    with rig("llama") as r:
        tokens = prompt(29)
        pages = r.stored(tokens, CACHED)
        row = prompt_row(tokens, pages, layout(CACHED, activations=8))
        whole, calls = r.mover._copy, []

        def broken(direction, copies):
            calls.append(direction)
            if len(calls) == 2:
                raise OSError("the link is down")
            whole(direction, copies)

        r.mover._copy = broken
        with pytest.raises(TransferFailed, match="the link is down"):
            r.forward.compute([row])
        assert r.agrees(r.forward.compute([row]), r.expected(tokens)[-1:])


def rounded(layers, dtype):
    """Relative error (root mean square) of logits that were rounded to `dtype` all along.

    What a layer adds to its input was rounded about 16 times: norms, weights and products of some
    six projections, the sum over values, the activation, both sums with the input; three more
    before and behind the layers. n roundings of relative error at most u, as often up as down, add
    up to less than lambda sqrt(n) u nearly always (Higham and Mary, 2019; lambda of 3). Which
    instructions a CPU sums with, decides which way single values go, not how many are rounded.
    """
    return 3 * math.sqrt(16 * layers + 3) * torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", hf.FAMILIES)
def test_half_precision_is_within_its_rounding_of_single(family, dtype):
    tokens = prompt(CACHED + 5)
    want = hf.logits(hf.reference(family, torch.float32), tokens)[CACHED:]
    with rig(family, dtype) as r:
        bound = rounded(r.forward.config.layers, dtype) * rms(want)
        assert rms(hf.logits(r.model, tokens)[CACHED:].float() - want) <= bound, "theirs"
        pages = r.stored(tokens, CACHED)
        for segments in (
            layout(CACHED), layout(CACHED, activations=13), layout(CACHED, recompute=9),
        ):  # fmt: skip
            pages_now = Pages()
            pages_now.put(0, "kv", "host", pages.column("kv", "host"))
            pages_now.put(0, "act", "host", pages.column("act", "host"))
            row = prompt_row(tokens, pages_now, segments, wanted="all")
            got = r.forward.compute([row])
            assert rms(got[-5:].float() - want) <= bound, segments


def rms(x):
    return float(x.float().pow(2).mean().sqrt())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", hf.FAMILIES)
def test_decodes_from_device_are_exact_also_beside_a_prompt(family, device):
    # Context lengths around the ends of blocks of 4, and alike; nothing behind them was written.
    for lengths in ([1, 3, 4, 5, 7, 8, 21, 30], [12, 12], [9]):
        with rig(family, device=device, blocks=60) as r:
            prompts = []
            for seed, length in enumerate(lengths):
                tokens = prompt(length + 1, seed)
                pages = r.pages(len(tokens), ("kv", "device"))
                r.forward.compute([prompt_row(tokens[:length], pages)])
                prompts.append((tokens, prompt_row(tokens, pages, start=length)))
            fresh = prompt_row(prompt(11, 50), r.pages(11, ("kv", "device")))
            rows = [row for _, row in prompts]
            want = torch.cat([r.expected(tokens)[-1:] for tokens, _ in prompts])
            assert r.agrees(r.forward.compute(rows), want)
            both = torch.cat((want[:1], r.expected(prompt(11, 50))[-1:], want[1:]))
            assert r.agrees(r.forward.compute([rows[0], fresh, *rows[1:]]), both)
