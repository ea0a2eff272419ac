"""Real vLLM: one engine computes a prompt, another decodes it from the KV that was handed over.

The one that decodes has vLLM's own host tier, as on a GPU, whose lowest calls are emulated.
"""

import random
import tempfile
import time
from pathlib import Path

import pytest

from tests.live.tier_engine import BLOCK, TierEngine

pytestmark = [pytest.mark.live, pytest.mark.vllm]

TOKENS = 700
HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def pair():
    with tempfile.TemporaryDirectory(prefix="kappa-transfer-") as folder:
        files = Path(folder) / "files"
        made = []
        try:
            for name, tier in (("prefill", "own"), ("decode", "native")):
                place = Path(folder) / name
                place.mkdir()
                made.append(TierEngine(place, transfer=files, kind=tier))
            yield (*made, files)
        finally:
            for engine in made:
                engine.close()


def prompt(seed):
    rng = random.Random(seed)
    return [rng.randrange(100, 4000) for _ in range(TOKENS)]


def given(engine, tokens):
    """Where the KV of a prompt is, computed by `engine`."""
    place = engine.ask(tokens, params=HAND_OVER, count=1)["params"]
    assert place["remote_tokens"] == TOKENS // BLOCK * BLOCK
    return place


def test_what_is_handed_over_is_not_computed_again_and_decodes_the_same(pair):
    prefill, decode, files = pair
    known = prompt(1)
    place = given(prefill, known)
    answer = decode.ask(known, params=place)
    reference = prefill.ask(known)
    assert answer["cached"] == place["remote_tokens"]
    assert answer["tokens"] == reference["tokens"]
    assert answer["logprob"] == pytest.approx(reference["logprob"], abs=1e-5)
    assert list(files.iterdir()) == []


def test_what_was_handed_over_is_the_receiver_s_own_from_then_on(pair):
    prefill, decode, _ = pair
    known = prompt(2)
    decode.ask(known, params=given(prefill, known))
    deadline = time.monotonic() + 60.0
    # Its host tier has stored it like any other prompt; the device cache is emptied by each ask.
    while decode.ask(known)["cached"] < TOKENS // BLOCK * BLOCK:
        assert time.monotonic() < deadline


def test_what_does_not_come_is_computed(pair):
    prefill, decode, _ = pair
    known = prompt(3)
    place = given(prefill, known)
    lost = {**place, "transfer_name": "0" * 32}
    answer = decode.ask(known, params=lost)
    reference = prefill.ask(known)
    assert answer["tokens"] == reference["tokens"]
    assert answer["logprob"] == pytest.approx(reference["logprob"], abs=1e-5)


def test_a_name_from_outside_reads_nothing(pair):
    prefill, decode, _ = pair
    known = prompt(4)
    evil = {"do_remote_prefill": True, "transfer_name": "../../etc/passwd", "remote_tokens": 640}
    assert decode.ask(known, params=evil)["tokens"] == prefill.ask(known)["tokens"]


def test_a_prompt_shorter_than_a_block_is_not_handed_over(pair):
    prefill, _, _ = pair
    assert prefill.ask(prompt(5)[: BLOCK - 1], params=HAND_OVER, count=1)["params"] is None


def told_of_a_load(engine, known, cold):
    """What is reported of the load of a prompt, once all of it comes from the host tier; its
    answers are as where it was computed."""
    deadline = time.monotonic() + 60.0
    while True:
        assert time.monotonic() < deadline
        engine.reports()
        answer = engine.ask(known)
        assert answer["tokens"] == cold["tokens"]
        assert answer["logprob"] == pytest.approx(cold["logprob"], abs=1e-5)
        loads = [m for m in engine.reports()["messages"] if m["kind"] == "load"]
        if len(loads) == 1 and loads[0]["tokens"] == TOKENS // BLOCK * BLOCK:
            return loads[0]


def test_vllms_own_tier_gives_back_what_it_stored_and_reports_it_as_ours_does(pair):
    """Stored, gone from the device, loaded: the same tokens with the same probability."""
    own, native, _ = pair
    known = prompt(6)
    cold = own.ask(known)
    ours, theirs = (told_of_a_load(engine, known, cold) for engine in (own, native))
    same = ("tokens", "blocks", "bytes", "pace_s")
    assert ours.keys() == theirs.keys()
    assert [ours[key] for key in same] == [theirs[key] for key in same]
    # A GB a second, as the emulated device copies.
    assert theirs["took_s"] == pytest.approx(theirs["bytes"] / 1e9)


def test_less_than_there_is_may_be_loaded_from_vllms_own_tier(pair):
    _, native, _ = pair
    known = prompt(7)
    cold, deadline = native.ask(known), time.monotonic() + 60.0
    while (whole := native.ask(known)["cached"]) < TOKENS // BLOCK * BLOCK:
        assert time.monotonic() < deadline
    tail = native.ask(known, plan="tail")
    assert 0 < tail["cached"] < whole and tail["cached"] % BLOCK == 0
    assert tail["logprob"] == pytest.approx(cold["logprob"], abs=1e-5)
