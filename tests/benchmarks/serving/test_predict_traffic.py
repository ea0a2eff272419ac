"""The traffic of `kappa bench predict`: seeded, in recorded shapes, for the class that lacks."""

import asyncio
import itertools
from collections import Counter
from types import SimpleNamespace

import pytest

from kappa_benchmarks.serving.predict_traffic import (
    ACT_OF_CLASS,
    Governor,
    Player,
    Traffic,
    shapes_of,
)
from kappa_workload.sessions import demo_sessions_path, read_sessions

SHAPES = shapes_of(read_sessions(demo_sessions_path()))


def traffic(seed=1, documents=0):
    made = Traffic(SHAPES, seed)
    made.first_visits(documents)
    return made


def test_shapes_are_the_recorded_sessions_within_bounds():
    assert len(SHAPES.prefixes) == 48
    assert min(SHAPES.prefixes) >= 1400 and max(SHAPES.prefixes) <= 5000
    assert min(SHAPES.growths) >= 30 and max(SHAPES.growths) <= 900


def test_traffic_repeats_for_a_seed_and_shares_nothing_else():
    def acts(seed):
        made = traffic(seed, documents=3)
        return [made.next_act({}, 50) for _ in range(20)]

    assert acts(1) == acts(1)
    heads = [{one.prompt[:16] for act in acts(seed) for one in act.requests} for seed in (1, 2)]
    assert not heads[0] & heads[1]


def test_an_agent_extends_its_prompt_turn_by_turn():
    for before, after in itertools.pairwise(traffic().act("agent").requests):
        assert after.prompt[: len(before.prompt)] == before.prompt
        assert after.new_tokens == len(after.prompt) - len(before.prompt)
        assert after.wait_s > 0


def test_documents_are_revisited_in_turn():
    made = Traffic(SHAPES, 1)
    with pytest.raises(ValueError, match="no documents"):
        made.act("revisit")
    first = made.first_visits(4)
    again = [one for _ in range(3) for one in made.act("revisit").requests]
    for i, one in enumerate(again):
        read = first[i % 4].requests[0].prompt
        shared = sum(a == b for a, b in zip(read, one.prompt, strict=False))
        assert shared >= len(one.prompt) - one.new_tokens
        assert 30 <= one.new_tokens <= 90


def test_a_burst_comes_at_once_and_fresh():
    act = traffic().act("burst")
    assert not act.chained and 4 <= len(act.requests) <= 6
    assert all(one.new_tokens == len(one.prompt) for one in act.requests)


def test_all_tokens_are_in_the_tiny_models_vocabulary():
    made = traffic(3)
    for act in (*made.first_visits(2), made.act("agent"), made.act("burst")):
        for one in act.requests:
            assert 100 <= min(one.prompt) <= max(one.prompt) < 3000


def test_a_scale_divides_every_length():
    def lengths(scale):
        made = Traffic(SHAPES, 5, scale)
        acts = [*made.first_visits(4), made.pair(400), *map(made.act, ACT_OF_CLASS.values())]
        return [(len(one.prompt), one.new_tokens) for act in acts for one in act.requests]

    whole, cut = lengths(1.0), lengths(4.0)
    assert max(prompt for prompt, _ in cut) <= 1250 + 23
    # The first question and the pair: lengths that do not depend on how many numbers were drawn.
    assert cut[0][0] == pytest.approx(whole[0][0] / 4, abs=2)
    assert (100, 100) in cut and (400, 400) in whole
    assert min(new for _, new in lengths(1000.0)) == 8


def test_a_class_that_lacks_requests_gets_more_acts():
    made, full = traffic(documents=3), dict.fromkeys(ACT_OF_CLASS, 50)
    names = Counter(made.next_act({**full, "load": 0}, 50).name for _ in range(400))
    assert names["revisit"] > 2 * max(names["ask"], names["agent"], names["burst"])
    even = Counter(made.next_act(full, 50).name for _ in range(400))
    assert set(even) == set(ACT_OF_CLASS.values())


def test_the_governor_follows_the_load_within_a_factor_of_two():
    act, governor = traffic().act("ask"), Governor(0.7, 2, 0.001)
    first_s = governor.gap_s(act)
    assert first_s == pytest.approx(act.cost_tokens * 0.001 / 1.4)
    for load, times, factor in ((0.7, 1, 1.0), (1.0, 100, 2.0), (0.0, 200, 0.5)):
        for _ in range(times):
            governor.observe(load)
        assert governor.gap_s(act) == pytest.approx(factor * first_s)
    governor.begin(0.004)  # what the warm-up showed
    assert governor.gap_s(act) == pytest.approx(4 * first_s)
    for _ in range(100):
        governor.observe(1.0)
    assert governor.gap_s(act) == pytest.approx(8 * first_s)


async def test_at_a_load_of_none_each_act_waits_for_the_one_before():
    in_flight = []

    class Client:
        prepare = staticmethod(lambda prompt, tokens: prompt)

        async def send(self, prompt):
            in_flight.append(prompt)
            await asyncio.sleep(0.01)
            in_flight.remove(prompt)
            return SimpleNamespace(error="", first_token_s=1.0, sent_s=0.0, request_id="r")

    player = Player(Client(), Governor(0.0, 2, 0.001))
    for act in [traffic().act("ask"), traffic().act("burst")]:
        player._spawn(act)
        await asyncio.sleep(0)
        await player._pause(act)
        assert not in_flight
    player._governor.observe(0.3)
    player._governor.observe(0.0)
