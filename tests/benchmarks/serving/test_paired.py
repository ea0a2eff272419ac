"""The cost of something, from paired rounds: found where there is one, else not."""

from operator import attrgetter

import numpy as np
import pytest

from benchmarks.serving.paired import cost
from benchmarks.serving.serve import Answer, Round


def played(rates_with, rates_without, prompt="short", concurrency=4):
    def one(system, rate):
        return Round(system, prompt, concurrency, 10 / rate, (Answer(0.1, 0.1, 0.2),) * 10)

    rounds = []
    for turn, (a, b) in enumerate(zip(rates_with, rates_without, strict=True)):
        pair = [one("with", a), one("without", b)]
        rounds += pair if turn % 2 else pair[::-1]
    return rounds


def test_a_cost_is_found_though_the_machine_slows_down_meanwhile():
    rng = np.random.default_rng(1)
    machine = np.linspace(100, 20, 40)
    noise = np.exp(rng.normal(0, 0.02, 40))
    told = cost([played(machine * 0.9 * noise, machine)], "with", "without")
    assert told["low"] < 0.1 < told["high"] and abs(told["cost"] - 0.1) < 0.02
    assert told["pairs"] == 40


def test_no_cost_is_no_cost():
    rng = np.random.default_rng(2)
    noise = np.exp(rng.normal(0, 0.05, (2, 60)))
    told = cost([played(50 * noise[0], 50 * noise[1])], "with", "without")
    assert told["low"] < 0 < told["high"] and abs(told["cost"]) < 0.03


def test_cells_are_told_apart_and_the_same_seed_gives_the_same_interval():
    rounds = played([9.0] * 4, [10.0] * 4) + played([8.0] * 4, [10.0] * 4, "1k", 32)
    told = cost([rounds], "with", "without")
    assert [(row["prompt"], round(row["cost"], 6)) for row in told["cells"]] == [
        ("short", 0.1), ("1k", 0.2),
    ]  # fmt: skip
    assert told == cost([rounds], "with", "without")


def test_rounds_without_a_partner_are_refused():
    rounds = played([9.0] * 3, [10.0] * 3)
    with pytest.raises(ValueError, match="3 rounds of with, 2 of without: play them in pairs"):
        cost([[r for i, r in enumerate(rounds) if i != 0]], "with", "without")
    with pytest.raises(ValueError, match="play at least one"):
        cost([], "with", "without")


def test_what_a_place_is_worth_is_not_what_the_thing_costs():
    rng = np.random.default_rng(3)
    first = 1.08  # times as fast, whoever stands there
    noise = np.exp(rng.normal(0, 0.01, (2, 2, 30)))
    there = played(50 * first * noise[0][0], 50 * noise[0][1])
    swapped = played(50 * noise[1][0], 50 * first * noise[1][1])
    told = cost([there, swapped], "with", "without")
    assert abs(told["cost"]) < 0.01 and told["low"] < 0 < told["high"] < 0.01
    assert told["by_order"][0] < -0.05 and told["by_order"][1] > 0.05
    assert told["pairs"] == 60


def test_processor_seconds_tell_a_cost_that_the_clock_hides():
    def one(system, seconds, cpu_s):
        return Round(system, "short", 4, seconds, (Answer(0.1, 0.1, 0.2),) * 10, cpu_s)

    noise = np.exp(np.random.default_rng(4).normal(0, 0.3, (2, 20)))
    rounds = []
    for a, b in noise.T.tolist():
        rounds += [one("with", a, 0.5), one("without", b, 0.49)]
    told = cost([rounds], "with", "without", rate=attrgetter("per_cpu_s"))
    assert told["cost"] == pytest.approx(0.02) and told["high"] - told["low"] < 1e-9
    by_clock = cost([rounds], "with", "without")
    assert by_clock["high"] - by_clock["low"] > 0.1
