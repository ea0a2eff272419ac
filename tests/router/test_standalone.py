"""The drop-in: names in order of preference, from nothing but what was routed where."""

from types import SimpleNamespace

import pytest

from kappa_router import standalone
from kappa_router.standalone import StandaloneRouter
from tests.router.building import announcement

NAMES = ["a", "b", "c"]


def of(*names):
    """Replicas without statistics."""
    return {name: {} for name in names}


def announced(worker, node):
    """What a replica on a node of the catalogue says of itself."""
    sizes = {"device_blocks": 4096, "max_batch_tokens": 2048, "max_context_tokens": 8192}
    return announcement(worker, node, model="llama-3.1-8b", **sizes).to_dict()


def count(requests, time_s):
    return {"kappa_load": {"time_s": time_s, "running": requests}}


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
    made.replicas(of(*NAMES))
    return made


@pytest.mark.parametrize("body", [lambda s: chat(s, "and?"), lambda s: completion(s + " and?")])
def test_prefix_returns_to_the_worker_that_saw_it(alone, clock, body):
    first = {}
    for letter in "xyz":
        first[letter] = alone.rank(NAMES, body(document(letter)), letter)[0]
    assert len(set(first.values())) == 3
    for letter in "xyz":
        alone.done(first[letter], letter)
    clock.now_s += 60
    for letter in "zxyyx":
        again = alone.rank(NAMES, body(document(letter)), f"again {letter}")
        assert again[0] == first[letter]
        alone.done(again[0], f"again {letter}")
        clock.now_s += 60


def test_messages_extend_a_conversation(alone, clock):
    first = alone.rank(NAMES, chat(document("x")), "1")[0]
    alone.done(first, "1")
    for i, letter in enumerate("yz"):
        alone.rank(NAMES, chat(document(letter)), f"other {i}")
    clock.now_s += 60
    assert alone.rank(NAMES, chat(document("x"), "sure", "next"), "2")[0] == first


def test_load_spreads(alone):
    firsts = [alone.rank(NAMES, completion(document(chr(65 + i))), f"{i}")[0] for i in range(12)]
    assert [firsts.count(name) for name in NAMES] == [4, 4, 4]


def test_request_that_is_done_no_longer_counts(alone):
    at = alone.rank(NAMES, completion("x"), "r")[0]
    assert alone._router.reservations == 1
    alone.done(at, "unknown")
    alone.done("elsewhere", "r")  # where it was tried in vain
    assert alone._router.reservations == 1
    alone.done(at, "r")
    alone.done(at, "r")
    assert alone._router.reservations == 0 and not alone._sent


def test_asking_twice_for_a_request_reserves_once(alone):
    for _ in range(3):
        alone.rank(NAMES, completion(document("x")), "r")
    assert sum(len(s.queue) for s in alone._router.workers.values()) == 1


def after(alone, clock, seconds):
    """Requests that count when these seconds have gone by; another one is sent and ends."""
    clock.now_s += seconds
    alone.done(alone.rank(NAMES, [], "look")[0], "look")
    return set(alone._sent)


def test_request_of_unknown_end_counts_until_it_should_end(alone, clock):
    alone.rank(NAMES, completion("x"), "short")
    alone.rank(NAMES, completion(document("y", 2_000_000)), "long")
    # 128 tokens at 5 ms each; half a million tokens of prompt before them.
    assert after(alone, clock, 0.9) == {"short", "long"}
    assert after(alone, clock, 2.0) == {"long"}
    assert after(alone, clock, standalone._MOST_S) == set()
    assert alone._router.reservations == 0


def test_answers_bound_says_when_a_request_should_end(alone, clock):
    def ask(request_id, **bounds):
        alone.rank(NAMES, [SimpleNamespace(prompt="x", **bounds)], request_id)
        return alone._sent[request_id].end_s - clock.now_s

    unbound_s = ask("r")
    assert ask("s", max_tokens=1) == ask("t", max_completion_tokens=1, max_tokens=500) < unbound_s
    for nonsense in (-1, 0, "7", 1.5, True, [], 10**400):
        assert ask("u", max_tokens=nonsense) == pytest.approx(unbound_s, rel=0.5)


def test_request_waits_for_an_end_that_ray_reports(alone, clock):
    at = alone.rank(NAMES, completion("x"), "r")[0]
    alone.routed(at, completion("x"), "r")
    alone.routed(at, completion("x"), "unknown")
    assert after(alone, clock, standalone._MOST_S) == {"r"}
    alone.done(at, "r")
    assert after(alone, clock, 0) == set()
    at = alone.rank(NAMES, completion("x"), "lost")[0]
    alone.routed(at, completion("x"), "lost")
    assert after(alone, clock, 601) == set()


def test_request_counts_where_ray_sent_it(alone):
    first, second, _ = alone.rank(NAMES, completion(document("x")), "r")
    alone.routed(second, completion(document("x")), "r")
    assert [alone._router.in_flight_on(name) for name in (first, second)] == [0, 1]
    alone.done(second, "r")
    assert alone._router.reservations == 0


def test_replica_is_priced_as_the_node_that_it_announces(alone, clock):
    assert alone.replicas({
        "a": {}, "b": {"kappa": announced("b", "gb200-c2c")},
        "c": {"kappa": announced("c", "a100-pcie4")},
    }) == []  # fmt: skip
    nodes = {name: state.announcement.node.name for name, state in alone._router.workers.items()}
    assert nodes == {"a": "h100-pcie5", "b": "gb200-c2c", "c": "a100-pcie4"}
    assert alone.rank(NAMES, completion(document("x")), "1") == ["b", "a", "c"]
    # What it announced goes on to count where its statistics say nothing for once.
    alone.replicas(of(*NAMES))
    assert alone.rank(NAMES, completion(document("y")), "2")[-1] == "c"
    # It has 16 * 4096 tokens of KV; of the others it is not known.
    blocks = {name: s.announcement.device_blocks for name, s in alone._router.workers.items()}
    assert blocks["b"] == 2048 < blocks["a"]


@pytest.mark.parametrize(
    "bad",
    [{"kappa": {"protocol": 99, "worker": "b"}}, {"kappa": {"worker": "b"}}, {"kappa": [1]},
     {"kappa_load": {"running": -1, "x": 1}}, {"kappa_load": [1]},
     {"kappa_load": {"running": "many", "time_s": 1.0}}],
)  # fmt: skip
def test_statistics_that_cannot_be_read_are_named_once(alone, bad):
    (problem,) = alone.replicas({**of("a", "c"), "b": bad})
    assert "replica b" in problem
    assert alone.replicas({**of("a", "c"), "b": bad}) == []
    assert sorted(alone.rank(NAMES, completion("x"), "r")) == NAMES


def on(alone, name):
    """Requests on a replica: of this router, and of others."""
    return alone._router.in_flight_on(name), alone._router.remote_in_flight_on(name)


def test_count_ends_the_requests_that_should_end_first(alone, clock):
    for name, size in (("short", 400), ("middle", 40_000), ("long", 400_000)):
        alone.rank(["a"], completion(document(name[0], size)), name)
    clock.now_s += 0.5
    alone.rank(["a"], completion("x"), "later")
    alone.replicas({**of("b", "c"), "a": count(1, clock.now_s - 0.1)})
    assert set(alone._sent) == {"long", "later"}  # of the later one the count knew nothing
    alone.replicas({**of("b", "c"), "a": count(0, clock.now_s + 1)})
    assert set(alone._sent) == set() and on(alone, "a") == (0, 0)


def test_counts_above_what_was_sent_are_others_requests(alone, clock):
    alone.rank(["a"], completion(document("x")), "mine")
    clock.now_s += 0.1
    alone.replicas({**of("b", "c"), "a": count(4, clock.now_s)})
    assert on(alone, "a") == (1, 3)
    assert alone.rank(["a", "b"], completion("y"), "r")[0] == "b"
    # An old count says nothing new; one that is not renewed says nothing for long.
    alone.replicas({**of("b", "c"), "a": count(9, clock.now_s - 1)})
    assert on(alone, "a") == (1, 3)
    after(alone, clock, 61)
    assert on(alone, "a") == (0, 0)
    alone.replicas({**of("b", "c"), "a": count(10**9, clock.now_s)})
    assert on(alone, "a") == (0, 1024)
    alone.replicas({**of("b", "c"), "a": count(1, clock.now_s + 1)})
    assert on(alone, "a") == (0, 1)


def test_count_follows_a_burst_down_to_nothing(alone, clock):
    for i in range(300):
        alone.rank(NAMES, completion(document("x", 400)), f"{i}")
    clock.now_s += 0.5
    for left in (200, 100, 10, 0):
        clock.now_s += 0.1
        alone.replicas({name: count(left // 3, clock.now_s) for name in NAMES})
        assert sum(sum(on(alone, name)) for name in NAMES) == 3 * (left // 3)
    assert alone._router.in_flight == 0 and not alone._sent


def test_reservations_are_on_offered_names_alone(alone, clock):
    seen_by = alone.rank(NAMES, completion(document("x")), "1")[0]
    alone.done(seen_by, "1")
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
    alone.replicas(of("d"))
    assert alone._router.reservations == 0 and not alone._sent
    alone.done("a", "r")
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


def test_longer_prompt_costs_more_than_a_shorter_one():
    made = StandaloneRouter(node="gh200-c2c", model="llama-3.1-70b", policy="least_backlog")
    made.replicas(of("a", "b"))
    assert made.rank(["a", "b"], completion(document("x", 400_000)), "1")[0] == "a"
    assert made.rank(["a", "b"], completion(document("y", 300)), "2")[0] == "b"
    assert made.rank(["a", "b"], completion(document("z", 300)), "3")[0] == "b"


@pytest.mark.parametrize("name", ["node", "model", "policy"])
def test_unknown_value_is_named(name):
    with pytest.raises(ValueError, match="nonesuch"):
        StandaloneRouter(**{name: "nonesuch"})


def test_unknown_keyword_is_refused():
    with pytest.raises(TypeError, match="nodes"):
        StandaloneRouter(nodes="h100-pcie5")
