"""What heads are worth, against Hugging Face's model with one head's attention masked."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kappa.plans.clo import CloConfig, gates, group_similarity
from kappa_engine.sparse.heads import HeadPass, measure_heads, pieces
from tests.engine import hf
from tests.engine.rig import prompt, weights
from tests.engine.sparse import sparse_reference

CLO = CloConfig(sink_tokens=2, recent_tokens=5)
TAIL = 8
TOKENS = 40


@dataclass
class OneHeadStreams:
    """Last tokens see few keys in one query head of one layer, and all elsewhere."""

    layer: int
    head: int

    def seen(self, layer, q, k):
        at = torch.arange(q.shape[1])
        mask = (at <= at[:, None]).expand(len(q), -1, -1).clone()
        if layer == self.layer:
            few = (at < CLO.sink_tokens) | (at > at[:, None] - CLO.recent_tokens)
            mask[self.head, -TAIL:] &= few[-TAIL:]
        return mask


def log_shares(family, tokens, choice):
    logits = sparse_reference.logits(family, tokens, choice)
    return logits[-TAIL:].log_softmax(dim=-1).numpy()


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_damage_is_the_divergence_when_one_head_sees_few(family):
    tokens = prompt(TOKENS)
    made = HeadPass(weights(family, torch.float64, "cpu"), CLO, TAIL)
    got = made.measure(tokens, lambda _: True)
    exact = log_shares(family, tokens, OneHeadStreams(-1, 0))
    shape = got.damage.shape
    for layer, head in np.ndindex(shape):
        masked = log_shares(family, tokens, OneHeadStreams(layer, head))
        want = (np.exp(exact) * (exact - masked)).sum() / TAIL
        assert got.damage[layer, head] == pytest.approx(want, rel=1e-6, abs=1e-12)
    assert got.damage.min() > 0 and got.cosines.shape == (TOKENS - 1, *shape)


def test_no_head_matters_where_the_latest_tokens_are_all():
    clo = CloConfig(sink_tokens=2, recent_tokens=TOKENS)
    made = HeadPass(weights("llama", torch.float64, "cpu"), clo, TAIL)
    assert made.measure(prompt(TOKENS), lambda _: True).damage.max() < 1e-12


def test_a_profile_joins_its_texts_and_stops_when_told():
    model, texts = weights("llama", torch.float64, "cpu"), [prompt(96, n) for n in range(3)]
    calls = []

    def goes_on(done, layers):
        calls.append((done, layers))
        return done < 2

    profile, count = measure_heads(model, texts, CLO, goes_on)
    assert count == 2 and calls[-1] == (2, 0) and calls[:3] == [(0, 0), (0, 1), (0, 2)]
    made = HeadPass(model, CLO, 32)
    each = [made.measure(text, lambda _: True) for text in texts[:2]]
    damage = np.mean([one.damage for one in each], axis=0)
    assert np.allclose(profile.importance, gates(damage))
    cosines = np.concatenate([one.cosines for one in each])
    assert np.allclose(profile.similarity, group_similarity(cosines, gates(damage), 2))
    keys = each[0].moments.count + each[1].moments.count
    assert keys == 2 * (96 - CLO.sink_tokens)
    centre = (each[0].moments.sums + each[1].moments.sums) / keys
    assert np.allclose(profile.codes.centre, centre)


def test_no_time_for_one_text_is_an_error():
    with pytest.raises(ValueError, match="time ran out before one text was done"):
        measure_heads(weights("llama", torch.float64, "cpu"), [prompt(96)], CLO, lambda *_: False)


@pytest.mark.parametrize(("family", "tokens"), [("opt", 513), ("llama", TAIL)])
def test_a_text_that_the_model_cannot_take_is_refused(family, tokens):
    made = HeadPass(weights(family, torch.float64, "cpu"), CLO, TAIL)
    with pytest.raises(ValueError, match=f"a text of {tokens} tokens: give more than 8"):
        made.measure(prompt(tokens), lambda _: True)


def test_every_other_piece_hides_the_number_that_it_ends_with():
    made = list(pieces("x" * 1_000, lambda text: [ord(c) for c in text], 4, 200))
    texts = ["".join(map(chr, piece)) for piece in made]
    assert [len(text) for text in texts] == [200] * 4
    assert [text.count("x") for text in texts[1::2]] == [200, 200]
    for text in texts[::2]:
        number = text[-6:-1]
        assert number.isdigit() and text.count(number) == 2
    assert texts[0].index("pass key") < texts[2].index("pass key")
    with pytest.raises(ValueError, match="the text has 10 tokens: 4 pieces of 200 need 800"):
        list(pieces("x" * 10, lambda text: [1] * len(text), 4, 200))
