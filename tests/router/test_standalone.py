"""The drop-in: names in order of preference, from nothing but what was routed where."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from router import standalone
from router.standalone import StandaloneRouter

NAMES = ["a", "b", "c"]


def chat(*texts):
    return [SimpleNamespace(messages=[{"role": "user", "content": text} for text in texts])]


def completion(prompt):
    return [SimpleNamespace(prompt=prompt)]


def document(letter, size=40_000):
    return letter * size


@pytest.fixture
def clock(monkeypatch):
    """Settable seconds in place of the time."""
    now = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(standalone, "time", SimpleNamespace(time=lambda: now.now_s))
    return now


@pytest.fixture
def alone(clock):
    made = StandaloneRouter()
    made.workers(NAMES)
    return made


@pytest.mark.parametrize("body", [lambda s: chat(s, "and?"), lambda s: completion(s + " and?")])
def test_a_prefix_returns_to_the_worker_that_saw_it(alone, clock, body):
    first = {}
    for letter in "xyz":
        first[letter] = alone.rank(NAMES, body(document(letter)), letter)[0]
    assert len(set(first.values())) == 3
    for letter in "xyz":
        alone.done(letter)
    clock.now_s += 60
    for letter in "zxyyx":
        again = alone.rank(NAMES, body(document(letter)), f"again {letter}")
        assert again[0] == first[letter]
        alone.done(f"again {letter}")
        clock.now_s += 60


def test_more_messages_extend_a_conversation(alone, clock):
    first = alone.rank(NAMES, chat(document("x")), "1")[0]
    alone.done("1")
    for i, letter in enumerate("yz"):
        alone.rank(NAMES, chat(document(letter)), f"other {i}")
    clock.now_s += 60
    assert alone.rank(NAMES, chat(document("x"), "sure", "next"), "2")[0] == first


def test_load_spreads(alone):
    firsts = [alone.rank(NAMES, completion(document(chr(65 + i))), f"{i}")[0] for i in range(12)]
    assert [firsts.count(name) for name in NAMES] == [4, 4, 4]


def test_a_request_that_is_done_no_longer_counts(alone):
    alone.rank(NAMES, completion("x"), "r")
    assert alone._router.reservations == 1
    alone.done("r")
    alone.done("r")
    alone.done("unknown")
    assert alone._router.reservations == 0
    assert not alone._routed


def test_asking_twice_for_a_request_reserves_once(alone):
    for _ in range(3):
        alone.rank(NAMES, completion(document("x")), "r")
    assert sum(len(s.queue) for s in alone._router.workers.values()) == 1


def test_a_reservation_nobody_released_expires(alone, clock):
    alone.rank(NAMES, completion("x"), "lost")
    clock.now_s += 599
    alone.rank(NAMES, completion("y"), "young")
    assert alone._router.reservations == 2
    clock.now_s += 2
    alone.rank(NAMES, completion("z"), "new")
    assert set(alone._routed) == {"young", "new"}
    assert alone._router.reservations == 2


def test_only_the_offered_names_are_reserved(alone, clock):
    seen_by = alone.rank(NAMES, completion(document("x")), "1")[0]
    alone.done("1")
    clock.now_s += 60
    offered = [name for name in NAMES if name != seen_by]
    ranked = alone.rank(offered, completion(document("x")), "2")
    assert sorted(ranked) == offered
    assert alone._router.in_flight_on(ranked[0]) == 1


def test_names_that_are_not_known_yet_come_last(alone):
    assert alone.rank(["new", "a"], completion("x"), "r") == ["a", "new"]
    assert alone.rank(["new", "newer"], completion("x"), "s") == ["new", "newer"]
    assert alone.rank([], completion("x"), "t") == []


def test_replicas_come_and_go(alone):
    alone.rank(NAMES, completion("x"), "r")
    alone.workers(["d"])
    assert alone._router.reservations == 0
    alone.done("r")
    assert alone.rank(["d"], completion("x"), "s") == ["d"]


@pytest.mark.parametrize(
    "args",
    [[], [None], completion(None), completion([1, 2]), completion(""), completion("\ud800"),
     chat(), completion("é" * 5000)],
)  # fmt: skip
def test_any_body_is_ranked(alone, args):
    assert sorted(alone.rank(NAMES, args, "r")) == NAMES


def test_messages_may_be_models(alone):
    message = SimpleNamespace(model_dump=lambda: {"role": "user", "content": "x" * 500})
    assert alone.rank(NAMES, [SimpleNamespace(messages=[message])], "r")


def test_a_longer_prompt_costs_more_than_a_shorter_one():
    made = StandaloneRouter(node="gh200-c2c", model="llama-3.1-70b", policy="least_backlog")
    made.workers(["a", "b"])
    assert made.rank(["a", "b"], completion(document("x", 400_000)), "1")[0] == "a"
    assert made.rank(["a", "b"], completion(document("y", 300)), "2")[0] == "b"
    assert made.rank(["a", "b"], completion(document("z", 300)), "3")[0] == "b"


@pytest.mark.parametrize("name", ["node", "model", "policy"])
def test_an_unknown_value_is_named(name):
    with pytest.raises(ValueError, match="nonesuch"):
        StandaloneRouter(**{name: "nonesuch"})


def test_an_unknown_keyword_is_refused():
    with pytest.raises(TypeError, match="nodes"):
        StandaloneRouter(nodes="h100-pcie5")
