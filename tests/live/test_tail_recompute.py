"""Real vLLM with our host tier and a disk behind it: less than there is may be loaded, what host
memory lost comes back from disk, and the answer is the same."""

import random
import tempfile
import time
from pathlib import Path

import pytest

from tests.live.tier_engine import BLOCK, TierEngine

pytestmark = [pytest.mark.live, pytest.mark.vllm]


@pytest.fixture(scope="module")
def engine():
    with tempfile.TemporaryDirectory(prefix="kappa-tail-") as folder:
        # 122 blocks of host memory; all that is asked here are 10 prompts of 21.
        made = TierEngine(Path(folder), host_bytes=2_000_000, disk_dir=folder, disk_bytes=1 << 26)
        try:
            yield made
        finally:
            made.close()


def prompt(seed, tokens=700):
    rng = random.Random(seed)
    return [rng.randrange(100, 4000) for _ in range(tokens)]


def warm(engine, tokens, least=None):
    """Ask until the whole prompt comes from the host tier; its first and its last answer."""
    least = len(tokens) // BLOCK * BLOCK if least is None else least
    cold, deadline = engine.ask(tokens), time.monotonic() + 60.0
    while (answer := engine.ask(tokens))["cached"] < least:
        assert time.monotonic() < deadline
    return cold, answer


def test_the_back_of_a_hit_is_computed_where_that_is_faster_and_nothing_changes(engine):
    known = prompt(1)
    cold, whole = warm(engine, known)
    engine.reports()
    tail = engine.ask(known, plan="tail")
    assert 0 < tail["cached"] < whole["cached"]
    assert tail["cached"] % BLOCK == 0
    assert tail["logprob"] == pytest.approx(cold["logprob"], abs=1e-5)
    messages = engine.reports()["messages"]
    (load,) = (m for m in messages if m["kind"] == "load")
    assert load["tokens"] == tail["cached"]
    (admitted,) = (m for m in messages if m["kind"] == "admit")
    assert admitted["host_tokens"] == tail["cached"]
    assert admitted["new_tokens"] == len(known) - tail["cached"]


def test_what_was_computed_anew_is_still_there_to_load(engine):
    known = prompt(2)
    _, whole = warm(engine, known)
    for plan in ("tail", "kv", "load=320", "kv"):
        assert (engine.ask(known, plan=plan)["cached"] < whole["cached"]) == (plan != "kv")


def test_a_prompt_that_is_there_to_its_last_token_is_answered(engine):
    known = prompt(3, 10 * BLOCK)
    cold, whole = warm(engine, known, 9 * BLOCK)
    # vLLM counts the last token as cached, too, and computes it all the same.
    assert whole["cached"] <= len(known)
    assert whole["logprob"] == pytest.approx(cold["logprob"], abs=1e-5)


def test_prompts_that_host_memory_evicted_come_back_from_disk_with_the_same_answer(engine):
    seeds, each = range(10, 17), 700 // BLOCK * BLOCK
    cold = {seed: engine.ask(prompt(seed)) for seed in seeds}
    deadline, events = time.monotonic() + 60.0, []
    while sum(len(e["hashes"]) for e in events if e["medium"] == "STORAGE") < len(seeds) * 21:
        assert time.monotonic() < deadline, "nothing more is written"
        events += engine.reports()["events"]
    for seed in seeds:
        again = engine.ask(prompt(seed))
        assert again["cached"] == each
        assert again["tokens"] == cold[seed]["tokens"]
        assert again["logprob"] == pytest.approx(cold[seed]["logprob"], abs=1e-5)
    messages = engine.reports()["messages"]
    admitted = [m for m in messages if m["kind"] == "admit"]
    loads = [m for m in messages if m["kind"] == "load"]
    assert [m["host_tokens"] for m in admitted] == [each] * len(seeds)
    # The first was longest unused: it is on disk whole, and other prompts in part.
    assert admitted[0]["disk_tokens"] > 0
    assert [m.get("disk_tokens", 0) for m in loads] == [m["disk_tokens"] for m in admitted]
    assert not [m for m in messages if m["kind"] in ("store_dropped", "tier_failed")]
