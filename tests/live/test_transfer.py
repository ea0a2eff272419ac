"""Real vLLM: one engine computes a prompt, another decodes it from the KV that was handed over, or
takes what the other's host tier holds.

Both have our host tier, or both vLLM's own, as on GPUs, whose lowest calls are emulated.
"""

import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from kappa.protocol import PEER_PARAM
from tests.live.tier_engine import BLOCK, TierEngine

pytestmark = [pytest.mark.live, pytest.mark.vllm]

TOKENS = 700
WHOLE = TOKENS // BLOCK * BLOCK
HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def engines():
    """Two engines with peers of each kind of host tier."""
    made = {"own": [], "native": []}
    with tempfile.TemporaryDirectory(prefix="kappa-transfer-") as folder, ExitStack() as stack:
        for kind in ("own", "own", "native", "native"):
            place = Path(tempfile.mkdtemp(dir=folder))
            made[kind].append(TierEngine(place, peers=True, kind=kind))
            stack.callback(made[kind][-1].close)
        yield made
        for engine in (*made["own"], *made["native"]):
            engine.end()


@pytest.fixture(params=["own", "native"])
def pair(request, engines):
    return engines[request.param]


@pytest.fixture
def both_kinds(engines):
    return engines["own"][0], engines["native"][0]


def prompt(seed):
    rng = random.Random(seed)
    return [rng.randrange(100, 4000) for _ in range(TOKENS)]


def given(engine, tokens):
    """Where the KV of a prompt is, computed by `engine`."""
    params = engine.ask(tokens, params=HAND_OVER, count=1)["params"]
    assert (params[PEER_PARAM]["endpoint"], params[PEER_PARAM]["stop"]) == (engine.peer, WHOLE)
    return params


def test_what_is_handed_over_is_not_computed_again_and_decodes_the_same(pair):
    prefill, decode = pair
    known = prompt(1)
    answer = decode.ask(known, params=given(prefill, known))
    reference = prefill.ask(known)
    assert answer["cached"] == WHOLE
    assert answer["tokens"] == reference["tokens"]
    assert answer["logprob"] == pytest.approx(reference["logprob"], abs=1e-5)
    # It is the receiver's own from then on; the device cache is emptied by each ask.
    assert decode.ask(known)["cached"] == WHOLE


def test_what_does_not_come_is_computed(pair):
    prefill, decode = pair
    known = prompt(3)
    place = given(prefill, known)[PEER_PARAM]
    stranger = place["endpoint"].replace("secret", "guess")
    answer = decode.ask(known, params={PEER_PARAM: {**place, "endpoint": stranger}})
    reference = prefill.ask(known)
    assert answer["tokens"] == reference["tokens"]
    assert answer["logprob"] == pytest.approx(reference["logprob"], abs=1e-5)


def test_a_prompt_shorter_than_a_block_is_not_handed_over(pair):
    prefill, _ = pair
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
        if len(loads) == 1 and loads[0]["tokens"] == WHOLE:
            return loads[0]


def test_vllms_own_tier_gives_back_what_it_stored_and_reports_it_as_ours_does(both_kinds):
    """Stored, gone from the device, loaded: the same tokens with the same probability."""
    own, native = both_kinds
    known = prompt(6)
    cold = own.ask(known)
    ours, theirs = (told_of_a_load(engine, known, cold) for engine in (own, native))
    same = ("tokens", "blocks", "bytes", "pace_s")
    assert ours.keys() == theirs.keys()
    assert [ours[key] for key in same] == [theirs[key] for key in same]
    # A GB a second, as the emulated device copies.
    assert theirs["took_s"] == pytest.approx(theirs["bytes"] / 1e9)


def test_less_than_there_is_may_be_loaded_from_vllms_own_tier(both_kinds):
    _, native = both_kinds
    known = prompt(7)
    cold, deadline = native.ask(known), time.monotonic() + 60.0
    while (whole := native.ask(known)["cached"]) < WHOLE:
        assert time.monotonic() < deadline
    tail = native.ask(known, plan="tail")
    assert 0 < tail["cached"] < whole and tail["cached"] % BLOCK == 0
    assert tail["logprob"] == pytest.approx(cold["logprob"], abs=1e-5)


def held(engine, tokens):
    """Its answer to a prompt, once all of that is in its host tier."""
    deadline = time.monotonic() + 60.0
    while (answer := engine.ask(tokens))["cached"] < WHOLE:
        assert time.monotonic() < deadline
    return answer


def from_peer(endpoint, start=0):
    return {PEER_PARAM: {"endpoint": endpoint, "start": start, "stop": WHOLE}}


def test_what_a_peer_holds_is_loaded_and_decodes_the_same(engines):
    giver, taker = engines["own"]
    known = prompt(11)
    reference = held(giver, known)
    taker.reports()
    answer = taker.ask(known, params=from_peer(giver.peer))
    assert answer["cached"] == WHOLE
    assert answer["tokens"] == reference["tokens"]
    assert answer["logprob"] == pytest.approx(reference["logprob"], abs=1e-5)
    found = taker.reports()
    (fetch,) = [m for m in found["messages"] if m["kind"] == "fetch"]
    assert fetch["tokens"] == WHOLE and fetch["took_s"] > 0
    stored = {h for e in found["events"] if e["medium"] == "CPU" for h in e["hashes"]}
    assert len(stored) >= WHOLE // BLOCK, "a router must learn that it holds them"
    # From now on it has them without its peer.
    assert taker.ask(known)["cached"] == WHOLE


def test_a_prompt_whose_peer_is_not_there_is_computed(engines):
    giver, taker = engines["own"]
    known = prompt(12)
    reference = giver.ask(known)
    taker.reports()
    answer = taker.ask(known, params=from_peer("127.0.0.1:9/secret"))
    assert answer["cached"] == 0 and answer["tokens"] == reference["tokens"]
    failed = [m for m in taker.reports()["messages"] if m["kind"] == "tier_failed"]
    assert [m["why"] for m in failed] == ["fetch"]


def test_a_prompt_of_another_tenant_is_not_to_be_had(pair):
    """Its salt makes other keys of the same tokens."""
    giver, taker = pair
    known = prompt(13)
    held(giver, known)
    assert taker.ask(known, salt="other", params=from_peer(giver.peer))["cached"] == 0
