import random
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.routing.hindsight import Search, p99_s
from benchmarks.routing.regret import instance
from kappa.shapes import model_shape
from simulator.clusters import cluster_named
from simulator.run import SimulationConfig
from workload.shapes import SessionShape, TurnShape, Workload


def queues(nodes, cost):
    """A toy for the search: a request waits for all earlier ones on its node."""
    count = len(cost)

    def evaluate(plan):
        ttft_s = np.array([cost[: k + 1][plan[: k + 1] == plan[k]].sum() for k in range(count)])
        return SimpleNamespace(
            ttft_s=ttft_s, arrival_s=np.zeros(count), measured=np.ones(count, bool),
            session=np.arange(count), new_tokens=cost,
        )  # fmt: skip

    return evaluate


def search(starts, cost, nodes, budget, seed=0):
    made = Search(queues(nodes, cost), nodes, random.Random(seed), budget)
    return made.run(starts), made


def test_the_search_balances_a_toy():
    cost = np.array([5.0, 4.0, 3.0, 3.0, 3.0, 2.0, 2.0, 2.0])
    best, made = search({"one": np.zeros(8, int), "in turn": np.arange(8) % 2}, cost, 2, 400)
    # 24 of work on two nodes: nothing below 12 for the last.
    assert p99_s(best.records) == pytest.approx(12.0, abs=0.2)
    assert made.used == 400


def test_the_curve_falls_and_ends_at_the_plan_found():
    cost = np.random.default_rng(0).exponential(1.0, 40)
    best, made = search({"one": np.zeros(40, int)}, cost, 3, 200, seed=1)
    heights = [height for _, height in made.curve]
    assert len(heights) > 3 and heights == sorted(heights, reverse=True)
    assert heights[-1] == p99_s(best.records) == p99_s(queues(3, cost)(best.plan))


def test_the_same_seed_finds_the_same_plan():
    cost = np.random.default_rng(0).exponential(1.0, 30)
    plans = [search({"one": np.zeros(30, int)}, cost, 3, 100, seed=5)[0].plan for _ in range(2)]
    assert np.array_equal(*plans)


def test_rejected_requests_of_a_start_are_sent_somewhere():
    best, _ = search({"refusing": np.full(4, -1)}, np.ones(4), 2, 2)
    assert set(best.plan.tolist()) <= {0, 1}


@pytest.mark.parametrize(("starts", "budget"), [({}, 5), ({"a": np.zeros(2), "b": np.ones(2)}, 1)])
def test_a_search_without_starts_or_budget_is_refused(starts, budget):
    with pytest.raises(ValueError, match="one evaluation for each"):
        search(starts, np.ones(2), 2, budget)


def documents(count=12, questions=4):
    """Sessions that ask about a document each."""
    rng = np.random.default_rng(7)
    sessions = []
    for number in range(count):
        ids = rng.integers(1, 2**63, int(rng.integers(50, 300)), dtype=np.uint64)
        turns = tuple(
            TurnShape(2.0 * bool(question), 64 * len(ids) + 5, 8, ids, ids)
            for question in range(questions)
        )
        sessions.append(SessionShape(str(number), turns))
    return Workload("documents", 64, tuple(sessions), "made up")


@pytest.mark.parametrize(("requests", "evaluations"), [(60, 40), (20, 2)])
def test_regret_is_given_only_where_a_plan_beats_every_policy(requests, evaluations):
    config = SimulationConfig(
        cluster=cluster_named("small"), workload=documents(), shape=model_shape("llama-3.1-8b"),
        load=0.9, requests=requests,
    )  # fmt: skip
    found = instance(config, ["ttft", "round_robin"], evaluations)
    plan_s = found["plan"]["ttft_s"]["p99"]
    for row in found["rows"]:
        if found["plan"]["beats_all"]:
            assert row["regret_plan"] == pytest.approx(row["ttft_s"]["p99"] / plan_s)
            assert row["regret_plan"] > 1
        else:
            assert row["regret_plan"] is None
    assert found["plan"]["beats_all"] == (evaluations == 40)
