"""Real vLLM: an engine takes what another's host tier holds instead of computing it."""

import random
import tempfile
import time
from pathlib import Path

import pytest

from kappa.protocol import PEER_PARAM
from tests.live.tier_engine import BLOCK, TierEngine

pytestmark = [pytest.mark.live, pytest.mark.vllm]

TOKENS = 700
WHOLE = TOKENS // BLOCK * BLOCK


@pytest.fixture(scope="module")
def pair():
    with tempfile.TemporaryDirectory(prefix="kappa-peers-") as folder:
        made = []
        try:
            for name in ("giver", "taker"):
                place = Path(folder) / name
                place.mkdir()
                made.append(TierEngine(place, peers=True))
            yield made
        finally:
            for engine in made:
                engine.close()


def prompt(seed):
    rng = random.Random(seed)
    return [rng.randrange(100, 4000) for _ in range(TOKENS)]


def held(engine, tokens):
    """Its answer to a prompt, once all of that is in its host tier."""
    deadline = time.monotonic() + 60.0
    while (answer := engine.ask(tokens))["cached"] < WHOLE:
        assert time.monotonic() < deadline
    return answer


def from_peer(endpoint, start=0):
    return {PEER_PARAM: {"endpoint": endpoint, "start": start, "stop": WHOLE}}


def test_what_a_peer_holds_is_loaded_and_decodes_the_same(pair):
    giver, taker = pair
    known = prompt(1)
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


def test_a_prompt_whose_peer_is_not_there_is_computed(pair):
    giver, taker = pair
    known = prompt(2)
    reference = giver.ask(known)
    taker.reports()
    answer = taker.ask(known, params=from_peer("127.0.0.1:9/secret"))
    assert answer["cached"] == 0 and answer["tokens"] == reference["tokens"]
    failed = [m for m in taker.reports()["messages"] if m["kind"] == "tier_failed"]
    assert [m["why"] for m in failed] == ["fetch"]


def test_a_prompt_of_another_tenant_is_not_to_be_had(pair):
    """Its salt makes other keys of the same tokens."""
    giver, taker = pair
    known = prompt(3)
    held(giver, known)
    assert taker.ask(known, salt="other", params=from_peer(giver.peer))["cached"] == 0
