"""Weights and KV in host memory: every mode and every split says what Hugging Face says."""

from __future__ import annotations

import threading
from functools import cache

import pytest
import torch

from benchmarks.offload.cpu_kv import CpuKv
from benchmarks.offload.cpu_offload import CpuOffload, Share
from benchmarks.offload.cpu_profile import LayerProfile
from engine.arena import ArenaTooLarge
from engine.blocks import OutOfBlocks
from engine.transfer import TransferFailed
from kappa.plans.cpu_offload import MODES
from tests.engine import hf
from tests.engine.rig import DEVICES, prompt, rig

COUNT = 16
# Ragged, one within its first block.
LENGTHS = [19, 3, 24]
INNER = 96
SHARES = [*(Share(mode) for mode in MODES), Share("mha", 1), Share("mha", 40), Share("mha", INNER)]


@cache
def expected(family, dtype, length):
    return hf.greedy(hf.reference(family, dtype), prompt(length), COUNT)


def offload(r, plan, *, sequences=len(LENGTHS), most=64):
    return CpuOffload(r.forward, threads=1, sequences=sequences, most_tokens=most, plan=plan)


def check(r, family, made, lengths=LENGTHS):
    logits = [made.prefill([prompt(n) for n in lengths])]
    logits += [made.step() for _ in range(COUNT - 1)]
    for index, length in enumerate(lengths):
        want, scores = expected(family, r.dtype, length)
        assert made.tokens()[index].tolist() == want
        assert r.agrees(torch.stack([step[index] for step in logits]), scores)
    made.close()
    assert all(pool.used == 0 and not pool.counters for pool in r.arena.pools.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", SHARES, ids=lambda s: f"{s.mode}-{s.columns}")
@pytest.mark.parametrize("family", [*hf.FAMILIES, "opt-post-norm"])
def test_sixteen_greedy_tokens_in_every_mode_at_every_split(family, share, device) -> None:
    for dtype in [torch.float64, *([torch.float32] if share.columns != 1 else [])]:
        with rig(family, dtype, streamed=True, device=device) as r:
            check(r, family, offload(r, lambda length: share))


def test_the_share_may_change_from_step_to_step_and_lengths_may_be_equal() -> None:
    with rig("llama", streamed=True) as r:
        made = offload(r, lambda length: SHARES[length % len(SHARES)], sequences=2)
        check(r, "llama", made, [21, 21])


def test_prompts_are_computed_in_turns_where_blocks_are_few() -> None:
    with rig("opt", streamed=True, blocks=7) as r:
        check(r, "opt", offload(r, lambda length: Share("mha", 8)))
    with rig("opt", streamed=True, blocks=5) as r:
        made = offload(r, lambda length: Share(), sequences=1)
        with pytest.raises(OutOfBlocks):
            made.prefill([prompt(24)])
        made.close()
        assert r.arena.pools["kv", "host"].used == 0


def test_what_crosses_the_link_is_what_the_cpu_does_not_compute() -> None:
    with rig("opt", streamed=True) as r:
        weights, moved = r.forward.weights, {}
        hidden, each, layers = 64, r.dtype.itemsize, r.forward.config.layers
        for share in (Share(), Share("mha", 24), Share("mha-o"), Share("mha-av-o")):
            made = offload(r, lambda length, share=share: share, sequences=1)
            made.prefill([prompt(16)])
            r.mover.drain()
            before = r.mover.counters["h2d"].copied_bytes
            made.step()
            r.mover.drain()
            # A step begins with what the one before asked for, and asks for as much.
            moved[share] = (r.mover.counters["h2d"].copied_bytes - before) // each // layers
            made.close()
        ffn = 2 * INNER * hidden
        assert moved[Share()] == ffn
        assert moved[Share("mha", 24)] == ffn - 24 * hidden
        assert moved[Share("mha-o")] == ffn + hidden * hidden
        values = moved[Share("mha-av-o")] - moved[Share("mha-o")]
        # Values of 16 tokens, of the first layer asked for behind the step already of 17.
        assert values == (16 * 2 + 17) * hidden // 3
        assert weights.streamed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_widened_for_the_cpu(dtype) -> None:
    """As near to single precision as the plain streamed pass in that dtype, or nearer."""
    with rig("llama", torch.float32, streamed=True) as r:
        want = made_logits(r, Share("mha", 40))
    with rig("llama", dtype, streamed=True) as r:
        plain = float((made_logits(r, None).float() - want).abs().max())
        for share in SHARES:
            got = float((made_logits(r, share).float() - want).abs().max())
            assert got <= 1.5 * plain + 1e-6


def made_logits(r, share):
    """Of a few given tokens, one after the other, so that a near tie changes nothing."""
    from benchmarks.offload.decoder import KV_HOST, Decoder, always

    ids, logits = prompt(24), []
    decoder = Decoder(r.forward, always(KV_HOST)) if share is None else None
    made = offload(r, lambda length: share, sequences=1) if decoder is None else None
    if decoder is not None:
        decoder.prefill([[ids[:16]]])
    else:
        made.prefill([ids[:16]])
    for token in ids[16:]:
        if decoder is not None:
            decoder._last[0][:] = int(token)
            logits.append(decoder.step()[0][0])
        else:
            made._last[:] = int(token)
            logits.append(made.step()[0])
    (decoder or made).close()
    return torch.stack(logits)


def test_what_cannot_be_is_refused() -> None:
    with rig("opt") as r, pytest.raises(ValueError, match="streamed=True"):
        offload(r, lambda length: Share())
    with rig("opt", streamed=True) as r:
        made = offload(r, lambda length: Share(), most=20)
        with pytest.raises(ValueError, match="20 tokens at most"):
            made.prefill([prompt(20)] * 3)
        with pytest.raises(ValueError, match="2 prompts"):
            made.prefill([prompt(4)] * 2)
        made.close()
        with pytest.raises(ArenaTooLarge, match="fewer or shorter"):
            CpuKv(r.forward.config, 1 << 20, 1 << 20, torch.float32, torch.device("cpu"))


def test_failures_are_told_and_leave_no_thread() -> None:
    running = threading.active_count()
    with rig("opt", streamed=True) as r:
        made = offload(r, lambda length: Share("mha", 8))
        made.prefill([prompt(n) for n in LENGTHS])

        def broken(*args):
            raise MemoryError("none left")

        made.kv.attend = broken
        with pytest.raises(TransferFailed, match="none left"):
            made.step()
        made.close()
    assert threading.active_count() <= running + 1


@pytest.mark.parametrize("share", [Share("mha", 40), Share("mha-o"), Share("mha-av-o")])
def test_a_batch_that_was_measured_goes_on_as_planned(share) -> None:
    with rig("llama", streamed=True) as r:
        made = offload(r, lambda length: share, sequences=2)
        made.prefill([prompt(n) for n in (19, 24)])
        for _ in range(3):
            made.step()
        LayerProfile(made, repeats=1)
        for _ in range(3):
            made.step()
        for index, length in enumerate((19, 24)):
            want, _ = expected("llama", r.dtype, length)
            assert made.tokens()[index].tolist() == want[:7]
        made.close()
