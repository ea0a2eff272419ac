"""The traffic of `kappa bench predict`: seeded, in recorded shapes, for the class that lacks."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from benchmarks.serving.traffic import ACT_OF_CLASS, Governor, Traffic, shapes_of
from workload.sessions import demo_sessions_path, read_sessions

SHAPES = shapes_of(read_sessions(demo_sessions_path()))


def test_shapes_are_those_of_the_recorded_sessions_in_their_bounds():
    assert len(SHAPES.prefixes) == 48
    assert min(SHAPES.prefixes) >= 1400
    assert max(SHAPES.prefixes) <= 5000
    assert min(SHAPES.growths) >= 30
    assert max(SHAPES.growths) <= 900


def test_the_same_seed_makes_the_same_traffic_and_another_shares_nothing():
    def acts(seed):
        traffic = Traffic(SHAPES, seed)
        traffic.first_visits(3)
        return [traffic.next_act({}, 50) for _ in range(20)]

    assert acts(1) == acts(1)
    heads = [{ask.prompt[:16] for act in acts(seed) for ask in act.asks} for seed in (1, 2)]
    assert not heads[0] & heads[1]


def test_an_agent_extends_its_prompt_turn_by_turn():
    asks = Traffic(SHAPES, 1).act("agent").asks
    for before, after in itertools.pairwise(asks):
        assert after.prompt[: len(before.prompt)] == before.prompt
        assert after.new_tokens == len(after.prompt) - len(before.prompt)
        assert after.wait_s > 0


def test_documents_are_revisited_in_turn():
    traffic = Traffic(SHAPES, 1)
    with pytest.raises(ValueError, match="no documents"):
        traffic.act("revisit")
    first = traffic.first_visits(4)
    again = [ask for _ in range(3) for ask in traffic.act("revisit").asks]
    for i, ask in enumerate(again):
        read = first[i % 4].asks[0].prompt
        shared = sum(1 for a, b in zip(read, ask.prompt, strict=False) if a == b)
        assert shared >= len(ask.prompt) - ask.new_tokens
        assert 30 <= ask.new_tokens <= 90


def test_a_burst_comes_at_once_and_fresh():
    act = Traffic(SHAPES, 1).act("burst")
    assert not act.chained
    assert 4 <= len(act.asks) <= 6
    assert all(ask.new_tokens == len(ask.prompt) for ask in act.asks)


def test_all_tokens_are_in_the_tiny_models_vocabulary():
    traffic = Traffic(SHAPES, 3)
    for act in (*traffic.first_visits(2), traffic.act("agent"), traffic.act("burst")):
        for ask in act.asks:
            assert 100 <= min(ask.prompt) <= max(ask.prompt) < 3000


def test_a_class_that_lacks_requests_gets_more_acts():
    traffic = Traffic(SHAPES, 1)
    traffic.first_visits(3)
    full = {kind: 50 for kind in ACT_OF_CLASS}
    names = Counter(traffic.next_act({**full, "load": 0}, 50).name for _ in range(400))
    assert names["revisit"] > 2 * max(names["ask"], names["agent"], names["burst"])
    even = Counter(traffic.next_act(full, 50).name for _ in range(400))
    assert set(even) == set(ACT_OF_CLASS.values())


def test_the_governor_follows_the_load_within_a_factor_of_two():
    act = Traffic(SHAPES, 1).act("ask")
    governor = Governor(0.7, 2, 0.001)
    first_s = governor.gap_s(act)
    assert first_s == pytest.approx(act.cost_tokens * 0.001 / 1.4)
    governor.observe(0.7)
    assert governor.gap_s(act) == pytest.approx(first_s)
    for _ in range(100):
        governor.observe(1.0)
    assert governor.gap_s(act) == pytest.approx(2 * first_s)
    for _ in range(200):
        governor.observe(0.0)
    assert governor.gap_s(act) == pytest.approx(first_s / 2)
