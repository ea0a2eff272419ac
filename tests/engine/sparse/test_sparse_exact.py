"""The exactness hooks of sparse decoding, against Hugging Face's model with a mask."""

from functools import cache

import numpy as np
import pytest
import torch

from kappa.plans.clo import CloConfig, SparseSettings
from kappa_engine.layers import angles, frequencies, rotate
from tests.engine import hf
from tests.engine.rig import BLOCK, DEVICES, prompt, rig
from tests.engine.sparse.sparse_decoder import InjectedHits, SparseDecoder
from tests.engine.sparse.sparse_reference import Choice, logits

LENGTHS = (19, 40, 61)
COUNT = 20
# Above every cosine: each look-up misses.
NEVER = torch.full((3, 4), 2.0)
SMALL = CloConfig(share=0.2, sink_tokens=3, recent_tokens=8, code_bits=64)


def settings(clo=SMALL, **changes):
    values = {"slots": 3, "max_tokens": 128, "retriever": "oracle", "prefetch": False,
              "chunk_tokens": 1}  # fmt: skip
    return SparseSettings(clo, **{**values, **changes})


def decoded(r, decoder, lengths=LENGTHS, count=COUNT):
    """Tokens (prompt and answer) and logits (answer's positions) of each sequence."""
    steps = [decoder.prefill([prompt(n) for n in lengths])]
    steps += [decoder.step() for _ in range(count - 1)]
    got = torch.stack(steps, dim=1).cpu()
    found = []
    for index, length in enumerate(lengths):
        tokens = np.concatenate((prompt(length), decoder.tokens()[index]))
        found.append((tokens, got[index]))
    decoder.close()
    for pool in r.arena.pools.values():
        assert pool.used == 0 and not pool.misused
    return found


def agree(r, family, found, lengths=LENGTHS, **choice):
    for (tokens, got), length in zip(found, lengths, strict=True):
        # The first token is the exact prompt's, the last has not been computed.
        want = logits(family, tokens[:-1], Choice(SMALL, length, **choice))[length - 1 :]
        assert r.agrees(got, want)


@cache
def expected(family, length, count=COUNT):
    return hf.greedy(hf.reference(family), prompt(length), count)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("prefetch", "retriever"), [(True, "hash"), (False, "oracle")])
@pytest.mark.parametrize("family", hf.FAMILIES)
def test_with_all_tokens_chosen_it_is_full_attention(family, prefetch, retriever, device):
    whole = CloConfig(share=1.0, sink_tokens=3, recent_tokens=8, code_bits=64)
    with rig(family, device=device, blocks=200) as r:
        decoder = SparseDecoder(r.forward, settings(whole, prefetch=prefetch, retriever=retriever))
        for (tokens, got), length in zip(decoded(r, decoder), LENGTHS, strict=True):
            want, scores = expected(family, length)
            assert tokens[length:].tolist() == want and r.agrees(got, scores)


def test_all_tokens_chosen_hold_whatever_hits():
    whole = CloConfig(share=1.0, sink_tokens=3, recent_tokens=8, code_bits=64)
    for hits in (0.0, 0.5, 1.0):
        with rig("llama", blocks=200) as r:
            decoder = SparseDecoder(r.forward, settings(whole), injected=hits)
            ((tokens, got),) = decoded(r, decoder, (40,), 30)
            want, scores = expected("llama", 40, 30)
            assert tokens[40:].tolist() == want and r.agrees(got, scores)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", hf.FAMILIES)
def test_always_missing_with_the_actual_query_it_is_plain_top_k(family, device):
    with rig(family, device=device, blocks=200) as r:
        kv_heads = r.forward.config.kv_heads
        decoder = SparseDecoder(r.forward, settings(), tau=NEVER[:, :kv_heads])
        found = decoded(r, decoder)
        assert decoder.cache.counts().hits == 0
        agree(r, family, found)
        # It is not full attention that was compared.
        exact = hf.logits(r.model, found[-1][0][:-1])[LENGTHS[-1] - 1 :]
        assert not r.agrees(found[-1][1], exact)


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_with_all_heads_persistent_it_is_the_full_cache(family):
    with rig(family, blocks=200) as r:
        heads = tuple(range(r.forward.config.kv_heads))
        decoder = SparseDecoder(r.forward, settings(), persistent=(heads,) * 3)
        for (tokens, got), length in zip(decoded(r, decoder), LENGTHS, strict=True):
            want, scores = expected(family, length)
            assert tokens[length:].tolist() == want and r.agrees(got, scores)
        assert decoder.cache.counts().lookups == 0
        assert r.mover.counters["h2d"].copied_bytes == 0


@pytest.mark.parametrize("family", ["opt", "llama", "qwen3"])
def test_a_hit_attends_to_the_stale_set(family):
    with rig(family, blocks=200) as r:
        decoder = SparseDecoder(r.forward, settings(), injected=1.0)
        found = decoded(r, decoder)
        counts = decoder.cache.counts()
        # All but the first look-up of each head and slot, which has nothing yet.
        first = 2 * len(LENGTHS) * r.forward.config.kv_heads
        assert counts.lookups - counts.hits == first
        agree(r, family, found, stale=True)


def test_some_heads_persistent_and_none_of_the_first_layer():
    with rig("llama", blocks=200) as r:
        decoder = SparseDecoder(
            r.forward, settings(), persistent=((), (1,), (0, 1)), tau=NEVER[:, :2]
        )
        ((tokens, got),) = decoded(r, decoder, (50,))

        class Mixed(Choice):
            def seen(self, layer, q, k):
                mask = super().seen(layer, q, k)
                if layer == 1:
                    mask[1] = torch.ones_like(mask[1]).tril()
                return mask

        want = logits("llama", tokens[:-1], Mixed(SMALL, 50, full=(2,)))[49:]
        assert r.agrees(got, want)


def test_prefetch_chooses_by_the_previous_layers_predicted_query():
    # W_Q of layer l on the normed input of layer l-1, rotated, on Hugging Face's own modules.
    model = hf.reference("llama")
    inputs: dict[int, torch.Tensor] = {}

    def note(layer):
        def hook(_, args, kwargs):
            inputs[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    hooks = [
        layer.register_forward_pre_hook(note(index), with_kwargs=True)
        for index, layer in enumerate(model.model.layers)
    ]
    try:
        with rig("llama", blocks=200) as r:
            decoder = SparseDecoder(r.forward, settings(prefetch=True), tau=NEVER[:, :2])
            found = decoded(r, decoder)
            config = r.forward.config
            inverse, factor = frequencies(config.rope, config.head_dim)

            def query(layer):
                module = model.model.layers[layer]
                hidden = inputs[layer - 1][0]
                flat = module.self_attn.q_proj(module.input_layernorm(hidden))
                heads = flat.view(len(hidden), config.heads, config.head_dim)
                turn = angles(torch.arange(len(hidden)), inverse, factor, hidden.dtype)
                return rotate(heads, *turn).transpose(0, 1)

            agree(r, "llama", found, query=query)
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("persistent", [None, ((), (0,), ())])
def test_tokens_no_longer_recent_are_in_host_with_their_codes(persistent):
    # At a share of 1 its KV is the model's, as a prefill of the same tokens makes it.
    whole = CloConfig(share=1.0, sink_tokens=3, recent_tokens=8, code_bits=64)
    with rig("llama", blocks=200) as r:
        decoder = SparseDecoder(r.forward, settings(whole, retriever="hash"), persistent=persistent)
        decoder.prefill([prompt(30), prompt(17)])
        for _ in range(30):
            decoder.step()
        r.mover.drain()
        slots = decoder.slots
        for slot, length in enumerate((30, 17)):
            state = slots.states[slot]
            tokens = np.concatenate((prompt(length), decoder.tokens()[slot]))[: state.tokens]
            assert (state.tokens, state.host_tokens) == (length + 30, host_tokens(length + 30))
            pages = r.stored(tokens, state.host_tokens)
            mine, theirs = state.blocks, pages.column("kv", "host").tolist()
            for layer in range(3):
                kept = r.arena.kv_host[layer, mine]
                assert torch.allclose(kept, r.arena.kv_host[layer, theirs], atol=1e-10)
                heads = slots.offloaded[layer]
                codes = slots.hasher.encode(kept[:, 0][:, :, heads]).transpose(1, 2)
                assert torch.equal(slots.codes[layer][mine], codes)
        decoder.close()


def host_tokens(tokens):
    return (tokens - 8) // BLOCK * BLOCK


def test_an_old_choice_is_made_anew_at_its_age():
    with rig("llama", blocks=200) as r:
        decoder = SparseDecoder(r.forward, settings(max_age=3), injected=1.0)
        decoded(r, decoder, (40,), 13)
        counts = decoder.cache.counts()
        # Steps 1, 4, 7 and 10 of the 12 that decode, of two layers with two heads each.
        assert counts.lookups - counts.hits == 4 * 4


def test_only_what_missed_crosses_the_link():
    moved = {}
    for hits in (0.0, 0.75, 1.0):
        with rig("llama", blocks=200) as r:
            # By codes: to ask the keys themselves, all of them would cross.
            decoder = SparseDecoder(r.forward, settings(retriever="hash"), injected=hits)
            decoder.prefill([prompt(60)])
            before = r.mover.counters["h2d"].copied_bytes
            for _ in range(9):
                decoder.step()
            moved[hits] = r.mover.counters["h2d"].copied_bytes - before
            counts = decoder.cache.counts()
            assert counts.gathered_bytes == moved[hits]
            decoder.close()
    # 36 look-ups, of which the first four miss in any case.
    choice = SMALL.chosen_tokens(60) * 2 * 8 * 8
    assert moved[1.0] == 4 * choice
    # A second choice keeps the tokens that it chooses again.
    assert 4 * choice < moved[0.75] < moved[0.0] < 36 * choice


def test_of_what_is_chosen_anew_only_what_was_not_there_crosses():
    with rig("llama", blocks=200) as r:
        decoder = SparseDecoder(r.forward, settings(retriever="hash"), tau=NEVER[:, :2])
        # No block leaves the recent tokens in three steps.
        decoder.prefill([prompt(60), prompt(40)])
        held = decoder.slots.held
        for _ in range(3):
            before = [each.clone() for each in held]
            counted = decoder.cache.counts().gathered_bytes
            decoder.step()
            new = 0
            for old, now in zip(before, held, strict=True):
                heads = (each[:2].flatten(0, 1).tolist() for each in (old, now))
                for one, other in zip(*heads, strict=True):
                    here = [token for token in other if token < 128]
                    assert len(set(here)) == len(here)
                    new += len(set(here) - set(one))
            assert decoder.cache.counts().gathered_bytes - counted == new * 2 * 8 * 8
        decoder.close()


def test_injected_hits_keep_the_requested_rate_and_repeat():
    draws = [InjectedHits(0.79, 5) for _ in range(2)]
    seen = [torch.stack([d.draw(4, 7, torch.device("cpu")) for _ in range(50)]) for d in draws]
    assert torch.equal(*seen)
    assert abs(seen[0].double().mean() - 0.79) < 0.01
