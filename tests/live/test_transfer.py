"""Real vLLM: one engine computes a prompt, another decodes it from the KV that was handed over, or
takes what the other's host tier holds. Less than there is may be loaded, and what host memory lost
comes back from disk.

Both have our host tier, the second with a disk, or both vLLM's own, as on GPUs, whose lowest calls
are emulated.
"""

import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from kappa.protocol import PEER_PARAM
from tests.live.tier_engine import BLOCK, TierEngine, of_kind
from tests.turns import by_turns

pytestmark = [pytest.mark.live, pytest.mark.vllm, by_turns(__file__)]

TOKENS = 700
WHOLE = TOKENS // BLOCK * BLOCK
# 122 blocks of host memory: five prompts.
DISK = {"host_bytes": 2_000_000, "disk_bytes": 1 << 26}
HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def engines():
    """Two engines with peers of each kind of host tier."""
    made = {"own": [], "native": []}
    with tempfile.TemporaryDirectory(prefix="kappa-transfer-") as folder, ExitStack() as stack:
        for kind, more in (("own", {}), ("own", DISK), ("native", {}), ("native", {})):
            place = Path(tempfile.mkdtemp(dir=folder))
            more = {**more, "disk_dir": str(place)} if more else more
            made[kind].append(TierEngine(place, peers=True, kind=kind, **more))
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


@pytest.fixture
def with_disk(engines):
    return engines["own"][1]


def prompt(seed, tokens=TOKENS):
    rng = random.Random(seed)
    return [rng.randrange(100, 4000) for _ in range(tokens)]


def given(engine, tokens):
    """Where the KV of a prompt is, computed by `engine`."""
    params = engine.ask(tokens, params=HAND_OVER, count=1)["params"]
    assert (params[PEER_PARAM]["endpoint"], params[PEER_PARAM]["stop"]) == (engine.peer, WHOLE)
    return params


def test_handed_over_prompt_decodes_the_same_without_recomputing(pair):
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


def warm(engine, tokens, least=None):
    """Ask until the whole prompt comes from the host tier; its first and its last answer."""
    least = len(tokens) // BLOCK * BLOCK if least is None else least
    cold, deadline = engine.ask(tokens), time.monotonic() + 60.0
    while (answer := engine.ask(tokens))["cached"] < least:
        assert time.monotonic() < deadline
    return cold, answer


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
        loads = of_kind(engine.reports(), "load")
        if len(loads) == 1 and loads[0]["tokens"] == WHOLE:
            return loads[0]


def test_native_tier_returns_what_it_stored_and_reports_as_ours(both_kinds):
    """Stored, gone from the device, loaded: the same tokens with the same probability."""
    own, native = both_kinds
    known = prompt(6)
    cold = own.ask(known)
    ours, theirs = (told_of_a_load(engine, known, cold) for engine in (own, native))
    same = ("tokens", "blocks", "bytes")
    assert ours.keys() == theirs.keys()
    assert [ours[key] for key in same] == [theirs[key] for key in same]
    # A GB a second, as the emulated device copies.
    assert theirs["took_s"] == pytest.approx(theirs["bytes"] / 1e9)


def test_less_than_there_is_may_be_loaded_from_vllms_own_tier(both_kinds):
    _, native = both_kinds
    known = prompt(7)
    cold, whole = warm(native, known)
    tail = native.ask(known, plan="tail")
    assert 0 < tail["cached"] < whole["cached"] and tail["cached"] % BLOCK == 0
    assert tail["logprob"] == pytest.approx(cold["logprob"], abs=1e-5)


def from_peer(endpoint, start=0):
    return {PEER_PARAM: {"endpoint": endpoint, "start": start, "stop": WHOLE}}


def test_what_a_peer_holds_is_loaded_and_decodes_the_same(engines):
    giver, taker = engines["own"]
    known = prompt(11)
    _, reference = warm(giver, known)
    taker.reports()
    answer = taker.ask(known, params=from_peer(giver.peer))
    assert answer["cached"] == WHOLE
    assert answer["tokens"] == reference["tokens"]
    assert answer["logprob"] == pytest.approx(reference["logprob"], abs=1e-5)
    found = taker.reports(fetch=1)
    (fetch,) = of_kind(found, "fetch")
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
    failed = of_kind(taker.reports(tier_failed=1), "tier_failed")
    assert [m["why"] for m in failed] == ["fetch"]


def test_a_prompt_of_another_tenant_is_not_to_be_had(pair):
    """Its salt makes other keys of the same tokens."""
    giver, taker = pair
    known = prompt(13)
    warm(giver, known)
    assert taker.ask(known, salt="other", params=from_peer(giver.peer))["cached"] == 0


# -- tails and the disk ----------------------------------------------------------------------------


def test_tail_of_a_hit_is_recomputed_where_that_is_faster(with_disk):
    known = prompt(21)
    cold, whole = warm(with_disk, known)
    with_disk.reports()
    tail = with_disk.ask(known, plan="tail")
    assert 0 < tail["cached"] < whole["cached"]
    assert tail["cached"] % BLOCK == 0
    assert tail["logprob"] == pytest.approx(cold["logprob"], abs=1e-5)
    found = with_disk.reports(admit=1, load=1)
    (load,) = of_kind(found, "load")
    assert load["tokens"] == tail["cached"]
    (admitted,) = of_kind(found, "admit")
    assert admitted["host_tokens"] == tail["cached"]
    assert admitted["new_tokens"] == len(known) - tail["cached"]


def test_what_was_computed_anew_is_still_there_to_load(with_disk):
    known = prompt(22)
    _, whole = warm(with_disk, known)
    for plan in ("tail", "kv", "load=320", "kv"):
        assert (with_disk.ask(known, plan=plan)["cached"] < whole["cached"]) == (plan != "kv")


def test_a_prompt_that_is_there_to_its_last_token_is_answered(with_disk):
    known = prompt(23, 10 * BLOCK)
    cold, whole = warm(with_disk, known, 9 * BLOCK)
    # vLLM counts the last token as cached, too, and computes it all the same.
    assert whole["cached"] <= len(known)
    assert whole["logprob"] == pytest.approx(cold["logprob"], abs=1e-5)


def test_prompt_evicted_to_disk_comes_back_with_the_same_answer(with_disk):
    seeds = range(30, 37)
    with_disk.reports()
    cold = {seed: with_disk.ask(prompt(seed)) for seed in seeds}
    deadline = time.monotonic() + 60.0
    written, blocks = 0, len(seeds) * WHOLE // BLOCK
    while written < blocks:
        assert time.monotonic() < deadline, "nothing more is written"
        events = with_disk.reports()["events"]
        written += sum(len(e["hashes"]) for e in events if e["medium"] == "STORAGE")
    for seed in seeds:
        again = with_disk.ask(prompt(seed))
        assert again["cached"] == WHOLE
        assert again["tokens"] == cold[seed]["tokens"]
        assert again["logprob"] == pytest.approx(cold[seed]["logprob"], abs=1e-5)
    found = with_disk.reports(admit=len(seeds), load=len(seeds))
    admitted, loads = of_kind(found, "admit"), of_kind(found, "load")
    assert [m["host_tokens"] for m in admitted] == [WHOLE] * len(seeds)
    # The first was longest unused: it is on disk whole, and other prompts in part.
    assert admitted[0]["disk_tokens"] > 0
    assert [m.get("disk_tokens", 0) for m in loads] == [m["disk_tokens"] for m in admitted]
    assert not of_kind(found, "store_dropped") + of_kind(found, "tier_failed")
