import functools
import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.routing.clairvoyant import p99, search
from benchmarks.routing.lower_bound import (
    lower_bound,
    pooled_mean_s,
    pooled_quantile_s,
    reusable_tokens,
)
from benchmarks.routing.regret import regret
from kappa.shapes import model_shape
from simulator.capacity import capacity_rps
from simulator.clusters import cluster_named
from simulator.faults import Faults
from simulator.run import SimulationConfig, idle_speed, simulate, traffic_of
from workload.shapes import SessionShape, TurnShape, Workload

SHAPE = model_shape("llama-3.1-8b")
BLOCK = 64


def documents(count=12, questions=4):
    """Sessions that ask about a document each."""
    rng = np.random.default_rng(7)
    sessions = []
    for number in range(count):
        document = rng.integers(1, 2**63, int(rng.integers(50, 300)), dtype=np.uint64)
        turns = []
        for question in range(questions):
            own = rng.integers(1, 2**63, 2, dtype=np.uint64)
            ids = np.concatenate([document, own])
            after_s = float(rng.exponential(2.0)) if question else 0.0
            turns.append(TurnShape(after_s, len(ids) * BLOCK + 5, 8, ids, ids))
        sessions.append(SessionShape(str(number), tuple(turns)))
    return Workload("documents", BLOCK, tuple(sessions), "made up")


@functools.cache
def bound_rps():
    return capacity_rps(documents(), cluster_named("small").nodes, SHAPE, requests=200)


def instance(load=0.5, warm=False, requests=120):
    return SimulationConfig(
        cluster=cluster_named("small"), workload=documents(), shape=SHAPE, load=load,
        capacity_rps=bound_rps(), requests=requests, warm=warm, faults=Faults(noise_sigma=0.0),
    )  # fmt: skip


# -- pooled bounds ----------------------------------------------------------------------------


def completions(order, arrival, work):
    """Completion times on one machine of speed 1 under preemptive fixed priorities."""
    left = dict(enumerate(work))
    now, done = 0.0, {}
    while left:
        there = [j for j in left if arrival[j] <= now]
        if not there:
            now = min(arrival[j] for j in left)
            continue
        job = min(there, key=order.index)
        later = [arrival[j] for j in left if arrival[j] > now]
        run = min([left[job], *(t - now for t in later)])
        now += run
        left[job] -= run
        if left[job] <= 1e-12:
            del left[job]
            done[job] = now
    return np.array([done[j] for j in range(len(work))])


@pytest.mark.parametrize("seed", range(6))
def test_no_priorities_on_the_pool_undercut_the_bounds(seed):
    rng = np.random.default_rng(seed)
    arrival, work = rng.uniform(0, 3, 5), rng.exponential(1.0, 5)
    mean, p99_s, p50 = [], [], []
    for order in itertools.permutations(range(5)):
        flow = completions(order, arrival, work) - arrival
        mean.append(flow.mean())
        p99_s.append(np.quantile(flow, 0.99))
        p50.append(np.quantile(flow, 0.5))
    assert pooled_mean_s(arrival, work, 1.0) <= min(mean) + 1e-9
    assert pooled_quantile_s(arrival, work, 1.0, 0.99) <= min(p99_s) + 1e-9
    assert pooled_quantile_s(arrival, work, 1.0, 0.5) <= min(p50) + 1e-9


def test_shortest_work_first_is_found():
    assert pooled_mean_s(np.zeros(3), np.array([3.0, 1.0, 2.0]), 1.0) == pytest.approx(10 / 3)
    # The long one is interrupted: (4.5 - 0 + 2 - 1 + 2.5 - 2) / 3.
    found = pooled_mean_s(np.array([0.0, 1.0, 2.0]), np.array([3.0, 1.0, 0.5]), 1.0)
    assert found == pytest.approx((4.5 + 1.0 + 0.5) / 3)
    assert pooled_mean_s(np.zeros(3), np.array([3.0, 1.0, 2.0]), 2.0) == pytest.approx(5 / 3)


def test_a_burst_cannot_all_be_early():
    burst = np.zeros(100)
    bound = pooled_quantile_s(burst, np.full(100, 0.1), 1.0, 0.99)
    assert bound == pytest.approx(9.9)  # 99 of 100 requests
    assert pooled_quantile_s(np.arange(100.0), np.full(100, 0.1), 1.0, 0.99) <= 0.1


# -- bounds on an instance --------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("load", [0.4, 1.5])
def test_no_policy_undercuts_the_bounds(warm, load):
    config = instance(load, warm)
    traffic = traffic_of(config)
    speeds = [idle_speed(node, SHAPE) for node in config.cluster.nodes]
    idle = lower_bound(traffic, speeds)
    for policy in ("ttft", "round_robin", "least_backlog"):
        records = simulate(replace(config, policy=policy), traffic=traffic).records
        ttft_s = records.ttft_s[records.measured]
        bound = lower_bound(traffic, speeds, records.arrival_s)
        assert bound.mean_s <= ttft_s.mean()
        assert bound.p50_s <= np.quantile(ttft_s, 0.5)
        assert bound.p99_s <= np.quantile(ttft_s, 0.99)
        assert bound.mean_s >= idle.mean_s
        assert np.all(records.new_tokens >= traffic.prompt_tokens - reusable_tokens(traffic))


def test_overload_lifts_the_pooled_bound_above_the_idle_one():
    config = instance(load=3.0)
    traffic = traffic_of(config)
    speeds = [idle_speed(node, SHAPE) for node in config.cluster.nodes]
    records = simulate(config, traffic=traffic).records
    pooled = lower_bound(traffic, speeds, records.arrival_s)
    assert pooled.p99_s > 1.2 * lower_bound(traffic, speeds).p99_s


# -- search -----------------------------------------------------------------------------------


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


def test_the_search_balances_a_toy():
    cost = np.array([5.0, 4.0, 3.0, 3.0, 3.0, 2.0, 2.0, 2.0])
    found = search(
        {"all on one": np.zeros(8, int), "in turn": np.arange(8) % 2},
        queues(2, cost), 2, random.Random(0), evaluations=400,
    )  # fmt: skip
    assert found.starts["all on one"] > found.starts["in turn"] > found.p99_s
    # 24 of work on two nodes: nothing below 12 for the last.
    assert found.p99_s == pytest.approx(12.0, abs=0.2)
    assert found.evaluations == 400


def test_the_curve_falls_and_ends_at_the_plan_found():
    cost = np.random.default_rng(0).exponential(1.0, 40)
    told = []
    found = search(
        {"one": np.zeros(40, int)}, queues(3, cost), 3, random.Random(1),
        evaluations=200, improved=told.append,
    )  # fmt: skip
    heights = [point.p99_s for point in found.curve]
    assert heights == sorted(heights, reverse=True) and heights[-1] == found.p99_s
    assert tuple(told) == found.curve
    assert p99(queues(3, cost)(found.plan)) == found.p99_s


def test_the_search_is_seeded_and_stops_when_told():
    cost = np.random.default_rng(0).exponential(1.0, 30)
    start = {"one": np.zeros(30, int)}

    def run(seed, **how):
        return search(start, queues(3, cost), 3, random.Random(seed), evaluations=100, **how)

    assert np.array_equal(run(5).plan, run(5).plan)
    left = iter([True] * 9)
    assert run(5, may_go_on=lambda: next(left, False)).evaluations == 10


def test_rejected_requests_of_a_start_are_sent_somewhere():
    found = search(
        {"refusing": np.full(4, -1)}, queues(2, np.ones(4)), 2, random.Random(0), evaluations=2
    )
    assert set(found.plan.tolist()) <= {0, 1}


@pytest.mark.parametrize(("starts", "budget"), [({}, 5), ({"a": np.zeros(2), "b": np.ones(2)}, 1)])
def test_a_search_without_starts_or_budget_is_refused(starts, budget):
    with pytest.raises(ValueError, match="one evaluation for each"):
        search(starts, queues(2, np.ones(2)), 2, random.Random(0), evaluations=budget)


# -- both, in the simulator -------------------------------------------------------------------


def test_regret_of_policies_on_an_instance():
    found = regret(instance(load=0.9), ["ttft", "round_robin"], evaluations=80)
    facts = found.summary()
    rows = {row["policy"]: row for row in facts["rows"]}
    assert found.found.p99_s <= min(found.found.starts.values())
    assert all(row["regret_bound"] >= 1.0 for row in rows.values())
    if found.beats_all:
        assert rows["ttft"]["regret_plan"] > 1.0
    else:
        assert rows["ttft"]["regret_plan"] is None


def test_a_plan_that_does_not_win_is_not_used_as_reference():
    found = regret(instance(requests=20), ["ttft"], evaluations=1)
    assert not found.beats_all
    assert found.summary()["rows"][0]["regret_plan"] is None
