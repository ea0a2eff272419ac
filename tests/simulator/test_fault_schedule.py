"""Everything at once: whatever the seed draws, every request ends, and nobody is served twice."""

import numpy as np
import pytest

from simulator.clusters import KINDS as NODE_KINDS
from simulator.clusters import Cluster, numbered
from simulator.event_stream import EventStream
from simulator.fault_schedule import KINDS, random_faults
from simulator.faults import Faults, Trouble
from simulator.run import SimulationConfig, simulate, traffic_of

TROUBLES = [kind for kind in KINDS if kind not in ("killed", "stalled", "poisoned")]


@pytest.fixture(scope="module")
def many():
    nodes = [node for kind in ("gh200", "h100", "a100") for node in numbered(NODE_KINDS[kind], 8)]
    return Cluster("many", tuple(nodes))


def config(cluster, workload, shape, **changes):
    values = {"rate_rps": 80.0, "requests": 500, "warm": True, "policy": "priced"}
    return SimulationConfig(cluster=cluster, workload=workload, shape=shape, **values | changes)


def test_a_schedule_is_its_seeds_and_has_every_kind():
    faults = random_faults(200, 600.0, 60, seed=1)
    assert faults == random_faults(200, 600.0, 60, seed=1)
    assert faults != random_faults(200, 600.0, 60, seed=2)
    kinds = {trouble.kind for trouble in faults.troubles}
    assert kinds == set(TROUBLES) and faults.failures and faults.stragglers and faults.misprofiles
    dead = {failure.node for failure in faults.failures}
    hurt = {t.node for t in faults.troubles} | {s.node for s in faults.stragglers}
    assert len(dead) == len(faults.failures) and not dead & hurt
    with pytest.raises(ValueError, match="leave half"):
        random_faults(4, 600.0, 60, seed=1)
    with pytest.raises(ValueError, match="seconds above zero"):
        random_faults(200, 0.0, 60, seed=1)


@pytest.mark.parametrize("seed", [0, 1])
def test_with_everything_going_wrong_every_request_is_answered(many, documents, shape, seed):
    base = config(many, documents, shape, seed=seed)
    traffic = traffic_of(base)
    horizon_s = float(traffic.planned_s.max())
    faults = random_faults(len(many.nodes), horizon_s, 30, seed)
    assert faults.failures
    outcome = simulate(base.replaced(faults=faults), traffic=traffic)
    records = outcome.records
    assert outcome.retried > 0
    assert not np.isnan(records.e2e_s).any(), "a request was rejected"


@pytest.mark.parametrize("kind", TROUBLES)
def test_each_trouble_alone_loses_nothing_and_is_felt(many, documents, shape, kind):
    base = config(many, documents, shape, requests=100, load=0.6, rate_rps=None)
    traffic = traffic_of(base)
    size = {"slow_link": 10.0}.get(kind, 3600.0)
    troubles = tuple(Trouble(kind, node, 0.0, 1e6, size) for node in range(len(many.nodes)))
    plain = simulate(base.replaced(faults=Faults(0.0)), traffic=traffic)
    hurt = simulate(base.replaced(faults=Faults(0.0, troubles=troubles)), traffic=traffic)
    assert not np.isnan(hurt.records.e2e_s).any()
    if kind == "slow_link":
        assert np.mean(hurt.records.ttft_s) > np.mean(plain.records.ttft_s)
    if kind == "loads_fail":
        new_tokens = hurt.records.new_tokens.sum(), plain.records.new_tokens.sum()
        assert new_tokens[0] > new_tokens[1]
    if kind in ("events_repeated", "worker_clock"):
        # What comes twice is heard once; the router goes by its own clock.
        assert np.array_equal(hurt.records.ttft_s, plain.records.ttft_s)


def test_a_clock_that_goes_back_while_most_nodes_are_idle_stops_nobody(many, documents, shape):
    base = config(many, documents, shape, requests=60, rate_rps=100.0)
    back = Trouble("router_clock", 0, 0.1, 1e6, -36_000.0)
    outcome = simulate(base.replaced(faults=Faults(0.0, troubles=(back,))))
    assert not np.isnan(outcome.records.e2e_s).any()


def arrivals(kind, count):
    resyncs = []
    stream = EventStream(kind, lambda: resyncs.append(len(heard)))
    heard = []
    for _ in range(count):
        heard.append(stream.arrives())
    stream.healed()
    return heard, resyncs


def test_a_lost_batch_is_found_by_the_next_and_the_last_when_it_is_over():
    heard, resyncs = arrivals("events_lost", 6)
    assert heard == [True, *[False] * 5]
    assert resyncs == [2, 4, 6]


def test_a_batch_that_comes_twice_is_heard_once():
    assert arrivals("events_repeated", 5) == ([True] * 5, [])


def test_a_late_batch_is_a_gap_and_then_old_news():
    heard, resyncs = arrivals("events_reordered", 5)
    assert heard[0] and not heard[1] and resyncs
