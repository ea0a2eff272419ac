"""4-bit KV: how far a value can be off, that it is fewer bytes, and that it is told apart."""

import pytest
import torch

from engine.arena import ArenaTooLarge
from engine.decode import KV_HOST, Decoder, always
from engine.forward import Forward
from engine.prefill import Prompt, prefill
from engine.quantised import LEVELS, QuantisedKv, pack, unpack
from kappa.plan.segments import LoadPlan, layout
from tests.engine.rig import prompt, rig


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_value_comes_back_within_half_a_level(dtype):
    rows = torch.randn(9, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[3] = 2.5
    rows = rows.to(dtype)
    codes, ranges = pack(rows, 16)
    assert codes.shape == (9, 32) and codes.dtype == torch.uint8 and ranges.shape == (9, 4, 2)
    back = torch.empty_like(rows)
    unpack(codes, ranges, back)
    grouped = rows.view(9, 4, 16).double()
    step = (grouped.amax(-1) - grouped.amin(-1)) / LEVELS
    off = (back.double().view(9, 4, 16) - grouped).abs().amax(-1)
    # The range is rounded to the dtype as well: 15 steps of its error, and one of the sum.
    slack = 20 * torch.finfo(dtype).eps * grouped.abs().amax(-1)
    assert (off <= step / 2 + slack).all()
    assert torch.equal(back[3], rows[3])
    again = pack(back, 16)
    if dtype == torch.float64:
        torch.testing.assert_close(again[1], ranges)


def test_logits_from_quantised_keys_are_near_and_marked_as_approximate():
    with rig("opt", torch.float32) as r:
        assert r.forward.host_kv.exact
        tokens = prompt(45)
        exact = r.expected(tokens)[-1:]
        host = QuantisedKv(r.arena, group=16)
        approximate = Forward(r.forward.weights, r.arena, r.mover, host)
        assert not approximate.host_kv.exact and host.bits == 4 + 64 / 16
        pages = r.pages(44, ("kv", "host"))
        prefill(approximate, [Prompt(tokens[:44], pages, store=True)])
        before = r.mover.counters["h2d"].copied_bytes
        got = prefill(approximate, [Prompt(tokens, pages, LoadPlan(layout(44)))])
        moved = r.mover.counters["h2d"].copied_bytes - before
        elements = r.forward.config.layers * 2 * 44 * r.forward.config.kv_width
        assert moved == elements * host.bits / 8
        off = float((got - exact).abs().max())
        # Not exact, or nothing was quantised; near, or something else went wrong.
        assert 1e-3 < off < 0.15 * float(exact.abs().max())
        assert int(got.argmax()) == int(exact.argmax())


def test_decoding_stores_and_loads_full_blocks_in_four_bits():
    with rig("llama", torch.float32) as r:
        host = QuantisedKv(r.arena, group=8)
        decoder = Decoder(Forward(r.forward.weights, r.arena, r.mover, host), always(KV_HOST))
        decoder.prefill([[prompt(13), prompt(6)]])
        for _ in range(9):
            logits = decoder.step()[0]
        generated = decoder.tokens()[0]
        assert logits.isfinite().all() and generated.shape == (2, 10)
        # What it does not quantise, the block being filled, must be there as well.
        for length, tokens, got in zip((13, 6), generated, logits, strict=True):
            whole = torch.cat((torch.as_tensor(prompt(length)), torch.as_tensor(tokens[:-1])))
            exact = r.expected(whole)[-1]
            assert float((got - exact).abs().max()) < 0.25 * float(exact.abs().max())


def test_groups_that_do_not_fit_and_memory_that_is_not_there(monkeypatch):
    with rig("opt") as r:
        for group in (3, 7, 128):
            with pytest.raises(ValueError, match=f"groups of {group} elements do not divide"):
                QuantisedKv(r.arena, group=group)
        monkeypatch.setattr("engine.quantised.free_host_bytes", lambda: 1000)
        with pytest.raises(ArenaTooLarge, match=r"need \d+ bytes, but only 1000 are free"):
            QuantisedKv(r.arena, group=16)
