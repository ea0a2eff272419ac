"""Faults are drawn from the seed, within the cluster; whatever is drawn, every request ends."""

import numpy as np
import pytest

from kappa.cost import StepModel
from kappa_simulator.clusters import KINDS as NODE_KINDS
from kappa_simulator.clusters import SimulatedCluster, numbered
from kappa_simulator.dispatch import FaultyStream
from kappa_simulator.faults import (
    KINDS,
    RESOURCES,
    Faults,
    Misprofile,
    TransientFault,
    announced,
    drawn_failures,
    drawn_stragglers,
    misprofiled_third,
    random_faults,
)
from kappa_simulator.run import SimulationConfig, simulate, traffic_of

STEP = StepModel(1e-4, 1e-9, 5e-3, 1e-7, 1e-3)
TRANSIENTS = [kind for kind in KINDS if kind not in ("killed", "stalled", "misprofiled")]


def test_a_third_of_the_nodes_is_wrong_in_both_directions():
    wrong = misprofiled_third(20, ("link", "compute"), 3.0, seed=0)
    assert len(wrong) == len({fault.node for fault in wrong}) == 6
    assert {fault.factor for fault in wrong} == {3.0, 1 / 3.0}
    assert {fault.resource for fault in wrong} == {"link", "compute"}
    assert wrong == misprofiled_third(20, ("link", "compute"), 3.0, seed=0)
    assert wrong != misprofiled_third(20, ("link", "compute"), 3.0, seed=1)
    assert len(misprofiled_third(2, ("link",), 3.0, seed=0)) == 1


def test_an_announcement_is_wrong_in_the_resource_named_alone():
    profile = NODE_KINDS["h100"].profile
    wrong = (Misprofile(1, "link", 3.0), Misprofile(2, "compute", 0.5))
    assert announced(0, profile, STEP, wrong) == (profile, STEP)
    fast, step = announced(1, profile, STEP, wrong)
    assert fast.h2d_bytes_per_s == 3 * profile.h2d_bytes_per_s and step == STEP
    slow, step = announced(2, profile, STEP, wrong)
    assert slow.flops_per_s == profile.flops_per_s / 2
    assert (step.token_s, step.pair_s) == (2e-4, 2e-9)
    assert step.weights_s == STEP.weights_s


def test_drawn_failures_and_stragglers_are_of_different_nodes():
    failures = drawn_failures(10, 4, 100.0, 20.0, seed=0)
    assert len({f.node for f in failures}) == 4
    assert all(30.0 <= f.at_s <= 80.0 for f in failures)
    slow = drawn_stragglers(10, 4, 100.0, 3.0, seed=0)
    assert len({s.node for s in slow}) == 4
    assert all(s.end_s - s.start_s == pytest.approx(20.0) for s in slow)


def test_more_failures_than_nodes_but_one_are_refused():
    with pytest.raises(ValueError, match="leave at least one"):
        drawn_failures(3, 3, 100.0, 20.0, seed=0)
    with pytest.raises(ValueError, match="at most 3"):
        drawn_stragglers(3, 4, 100.0, 3.0, seed=0)
    assert drawn_failures(1, 0, 100.0, 20.0, seed=0) == ()


@pytest.fixture(scope="module")
def many():
    nodes = [node for kind in ("gh200", "h100", "a100") for node in numbered(NODE_KINDS[kind], 3)]
    return SimulatedCluster("many", tuple(nodes))


def config(cluster, workload, shape, **changes):
    values = {"rate_rps": 30.0, "requests": 200, "warm": True, "policy": "priced"}
    return SimulationConfig(cluster=cluster, workload=workload, shape=shape, **values | changes)


def test_a_seed_decides_a_schedule_of_every_kind():
    faults = random_faults(200, 600.0, 60, seed=1)
    assert faults == random_faults(200, 600.0, 60, seed=1)
    assert faults != random_faults(200, 600.0, 60, seed=2)
    kinds = {fault.kind for fault in faults.transients}
    assert kinds == set(TRANSIENTS) and faults.failures and faults.stragglers and faults.misprofiles
    dead = {failure.node for failure in faults.failures}
    faulty = {t.node for t in faults.transients} | {s.node for s in faults.stragglers}
    assert len(dead) == len(faults.failures) and not dead & faulty
    with pytest.raises(ValueError, match="leave half"):
        random_faults(4, 600.0, 60, seed=1)
    with pytest.raises(ValueError, match="seconds above zero"):
        random_faults(200, 0.0, 60, seed=1)


# Drawn so that none is lost twice, which would be rejected.
@pytest.mark.parametrize("seed", [9, 10])
def test_every_request_is_answered_whatever_faults_are_drawn(many, documents, shape, seed):
    base = config(many, documents, shape, seed=seed)
    traffic = traffic_of(base)
    horizon_s = float(traffic.planned_s.max())
    faults = random_faults(len(many.nodes), horizon_s, 30, seed)
    assert faults.failures
    outcome = simulate(base.replaced(faults=faults), traffic=traffic)
    records = outcome.records
    assert outcome.retried > 0
    assert not np.isnan(records.e2e_s).any(), "a request was rejected"


@pytest.mark.parametrize("kind", TRANSIENTS)
def test_each_transient_fault_alone_loses_no_request(many, documents, shape, kind):
    base = config(many, documents, shape, requests=100, rate_rps=20.0)
    traffic = traffic_of(base)
    size = {"slow_link": 10.0}.get(kind, 3600.0)
    transients = tuple(
        TransientFault(kind, node, 0.0, 1e6, size) for node in range(len(many.nodes))
    )
    plain = simulate(base.replaced(faults=Faults(0.0)), traffic=traffic)
    faulty = simulate(base.replaced(faults=Faults(0.0, transients=transients)), traffic=traffic)
    assert not np.isnan(faulty.records.e2e_s).any()
    if kind == "slow_link":
        assert np.mean(faulty.records.ttft_s) > np.mean(plain.records.ttft_s)
    if kind == "loads_fail":
        new_tokens = faulty.records.new_tokens.sum(), plain.records.new_tokens.sum()
        assert new_tokens[0] > new_tokens[1]
    if kind in ("events_repeated", "worker_clock"):
        # What comes twice is applied once; the router goes by its own clock.
        assert np.array_equal(faulty.records.ttft_s, plain.records.ttft_s)


def test_router_clock_going_back_stops_no_request(many, documents, shape):
    base = config(many, documents, shape, requests=60, rate_rps=40.0)
    back = TransientFault("router_clock", 0, 0.1, 1e6, -36_000.0)
    outcome = simulate(base.replaced(faults=Faults(0.0, transients=(back,))))
    assert not np.isnan(outcome.records.e2e_s).any()


def arrivals(kind, count):
    resyncs = []
    stream = FaultyStream(kind, lambda: resyncs.append(len(applied)))
    applied = []
    for _ in range(count):
        applied.append(stream.arrives())
    stream.healed()
    return applied, resyncs


def test_lost_batch_is_found_by_the_next_one_or_at_the_end():
    applied, resyncs = arrivals("events_lost", 6)
    assert applied == [True, *[False] * 5]
    assert resyncs == [2, 4, 6]


def test_a_batch_that_comes_twice_is_received_once():
    assert arrivals("events_repeated", 5) == ([True] * 5, [])


def test_a_late_batch_is_a_gap_and_then_ignored():
    applied, resyncs = arrivals("events_reordered", 5)
    assert applied[0] and not applied[1] and resyncs


def test_router_learns_of_a_node_ten_times_slower_than_announced(many, documents, shape):
    node = 7
    wrong = tuple(Misprofile(node, resource, 10.0) for resource in RESOURCES)
    base = config(many, documents, shape, requests=900, warm=False)
    traffic = traffic_of(base)
    right, found = (
        simulate(
            base.replaced(faults=Faults(0.0, misprofiles=misprofiles)), traffic=traffic
        ).records
        for misprofiles in ((), wrong)
    )
    assert np.isfinite(found.predicted_s).all() and (found.predicted_s >= 0).all()
    assert not np.isnan(found.e2e_s).any(), "a request was rejected"
    # At first the node draws requests; of the last third it gets what it gets as announced.
    assert (found.node[:100] == node).mean() > 1.5 * (right.node[:100] == node).mean()
    assert (found.node[600:] == node).mean() < 1.5 * (right.node[600:] == node).mean()
    p99_s, right_s = (np.quantile(r.ttft_s[600:], 0.99) for r in (found, right))
    assert p99_s < 1.1 * right_s
