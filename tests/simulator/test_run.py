"""Whole runs: every request ends once, seeds decide everything, faults lose nothing."""

import gc
from dataclasses import replace

import numpy as np
import pytest

from kappa_router.policy import policy_named
from kappa_scheduler.catalogue import SCHEDULERS
from kappa_simulator.clusters import KINDS, ClusterError, SimulatedCluster, numbered
from kappa_simulator.dispatch import RouterDispatch
from kappa_simulator.faults import Failure, Faults, Straggler, misprofiled_third
from kappa_simulator.run import SimulationConfig, simulate, traffic_of
from kappa_simulator.traffic import Clients
from kappa_workload.shapes import SessionShape, Workload, turn_of


@pytest.fixture
def config(trio, documents, shape):
    return SimulationConfig(
        cluster=trio, workload=documents, shape=shape, rate_rps=6.0, requests=200, policy="ttft"
    )


def ended_once(outcome):
    r = outcome.records
    done = ~np.isnan(r.e2e_s)
    assert not np.isnan(r.arrival_s).any()
    assert ((r.node >= 0) == done).all()
    assert (r.ttft_s[done] > 0).all() and (r.e2e_s[done] >= r.ttft_s[done]).all()
    total = r.device_tokens + r.cached_tokens + r.new_tokens
    assert (total[done] == r.prompt_tokens[done]).all() and (r.new_tokens[done] >= 1).all()
    return int(done.sum())


def same(one, other):
    a, b = one.records, other.records
    for name in ("arrival_s", "ttft_s", "tpot_s", "e2e_s", "node", "cached_tokens", "met"):
        x, y = getattr(a, name), getattr(b, name)
        assert np.array_equal(x, y, equal_nan=x.dtype.kind == "f"), name
    first, second = one.summary(), other.summary()
    assert first.pop("decision_us") is not None and second.pop("decision_us") is not None
    assert first == second


@pytest.mark.parametrize(
    ("policy", "scheduler"), [("priced", "fcfs"), *(("round_robin", name) for name in SCHEDULERS)]
)
def test_every_request_ends_exactly_once(config, policy, scheduler):
    outcome = simulate(config.replaced(policy=policy, scheduler=scheduler))
    assert ended_once(outcome) == 200


@pytest.mark.parametrize("policy", ["priced", "power_of_two"])
def test_a_seed_decides_everything_to_the_last_bit(config, policy):
    config = config.replaced(policy=policy)
    one, again = simulate(config), simulate(config)
    same(one, again)
    other = simulate(config.replaced(seed=1))
    assert not np.array_equal(one.records.ttft_s, other.records.ttft_s)


def test_routers_that_tell_each_other_know_of_all_requests(config, monkeypatch):
    known = []

    def share(self, now_s):
        told(self, now_s)
        known.append([(len(r.flights), r.reservations) for r in self._routers])

    told = RouterDispatch.share
    monkeypatch.setattr(RouterDispatch, "share", share)
    config = config.replaced(policy="priced", routers=3, share_s=0.05)
    one, again = simulate(config), simulate(config)
    same(one, again)
    assert ended_once(one) == 200
    assert all(seen == sum(own for _, own in each) for each in known for seen, _ in each)
    assert any(0 < own < seen for each in known for seen, own in each)


def test_routers_that_tell_nothing_answer_every_request_too(config):
    failures = Faults(failures=(Failure(0, 4.0, 5.0),))
    outcome = simulate(config.replaced(routers=2, rate_rps=30.0, faults=failures))
    assert ended_once(outcome) == 200 and outcome.retried


@pytest.mark.parametrize(
    "wrong", [{"routers": 0}, {"share_s": -1.0}, {"share_s": float("nan")}, {"routers": 2}]
)
def test_impossible_routers_are_refused(config, wrong):
    with pytest.raises(ValueError, match="router"):
        config.replaced(**wrong, policy=policy_named("ttft"))


def test_run_reports_progress_and_leaves_garbage_collection_on(config):
    progress: list[tuple[int, int]] = []
    simulate(config.replaced(policy="priced"), progress=lambda *far: progress.append(far))
    ended = [some for some, _ in progress]
    assert len(progress) > 5 and ended == sorted(ended) and 0 < ended[-1] <= 200
    assert {total for _, total in progress} == {200}
    assert gc.isenabled()


def test_a_plan_of_the_same_choices_gives_the_same_run(config):
    traffic = traffic_of(config)
    routed = simulate(config, traffic=traffic)
    planned = simulate(config, traffic=traffic, assignment=routed.records.node)
    assert planned.policy == "plan"
    assert np.array_equal(routed.records.ttft_s, planned.records.ttft_s)
    assert np.array_equal(routed.records.e2e_s, planned.records.e2e_s)


def test_a_plan_of_another_length_is_refused(config):
    with pytest.raises(ValueError, match="200 requests"):
        simulate(config, assignment=[0, 1])


def test_a_turn_waits_for_its_predecessor_and_its_pause(config, documents):
    outcome = simulate(config)
    r = outcome.records
    follows = r.session[1:] == r.session[:-1]
    ends_s = r.arrival_s[:-1] + r.e2e_s[:-1]
    assert (r.arrival_s[1:] - ends_s)[follows] == pytest.approx(5.0)


def test_warm_run_computes_fewer_tokens_than_a_cold_one(config):
    warm, cold = simulate(config), simulate(config.replaced(warm=False))
    assert warm.records.new_tokens.sum() < cold.records.new_tokens.sum()
    # The objective knows: cold first questions may take longer.
    assert warm.limits.ttft_s.sum() <= cold.limits.ttft_s.sum()


def test_disk_tier_saves_computing_and_is_priced_by_the_router(config):
    """Documents that one node's memory holds a quarter of: from disk, or computed again; predicted
    as they came, on an otherwise idle node."""
    (node,) = numbered(KINDS["h100"], 1)
    fast = replace(node.profile, disk_bytes_per_s=8e9)
    lone = config.replaced(rate_rps=0.2, requests=100, policy="priced", faults=Faults(0.0))
    runs = []
    for disk_bytes, profile in ((0.0, node.profile), (64e9, fast)):
        small = replace(node, profile=profile, host_bytes=4e9, disk_bytes=disk_bytes)
        runs.append(simulate(lone.replaced(cluster=SimulatedCluster("one", (small,)))))
    without, behind = runs
    assert behind.records.new_tokens.sum() < 0.7 * without.records.new_tokens.sum()
    off = np.abs(behind.records.predicted_s / behind.records.ttft_s - 1)
    assert np.median(off) < 0.05 and np.quantile(off, 0.9) < 0.25


def test_loads_by_layers_are_sooner_and_as_well_predicted(config):
    """Documents in host memory, on an otherwise idle node; a quiet one, so that all error is of the
    formula."""
    (node,) = numbered(KINDS["a100"], 1)
    lone = config.replaced(rate_rps=0.1, requests=100, policy="priced", faults=Faults(0.0))
    runs = {}
    for load in ("ahead", "layers"):
        cluster = SimulatedCluster("one", (replace(node, load=load),))
        runs[load] = simulate(lone.replaced(cluster=cluster)).records
    ahead, layers = runs["ahead"], runs["layers"]
    loaded = (layers.cached_tokens > 0) & (ahead.cached_tokens == layers.cached_tokens)
    assert loaded.sum() >= 15
    sooner = layers.ttft_s[loaded] / ahead.ttft_s[loaded]
    assert np.median(sooner) < 0.95 and sooner.max() < 1.01
    for records in (ahead, layers):
        off = np.abs(records.predicted_s / records.ttft_s - 1)[loaded]
        assert np.quantile(off, 0.9) < 0.02


def test_an_idle_cluster_meets_the_objective(config):
    summary = simulate(config.replaced(rate_rps=0.5, requests=100)).summary()
    assert summary["slo"]["met"] > 0.95
    assert summary["rejected"] == 0 and summary["requests"] == 80


def test_admission_rejects_what_an_overload_would_serve_late(config):
    flood = config.replaced(rate_rps=200.0, requests=400)
    unguarded = simulate(flood).summary()
    guarded = simulate(flood.replaced(admission=True))
    assert ended_once(guarded) < 400
    summary = guarded.summary()
    assert summary["completed"] + summary["rejected"] == summary["requests"] == 320
    assert summary["ttft_s"]["p99"] < unguarded["ttft_s"]["p99"]


@pytest.mark.parametrize("retry", ["at_once", "backoff", "retry_after"])
def test_refused_clients_come_again_and_a_seed_decides_when(config, retry):
    flood = config.replaced(rate_rps=200.0, requests=250, admission=True, policy="priced")
    refused = simulate(flood)
    again = flood.replaced(clients=Clients(retry))
    one, other = simulate(again), simulate(again)
    same(one, other)
    assert refused.refusals == 250 - ended_once(refused)
    assert ended_once(one) > ended_once(refused) and one.refusals > 250 - ended_once(one)
    # Who came again waited since its first try.
    waits_s = {"at_once": 0.1, "backoff": 0.25, "retry_after": 1.0}
    late = one.records.ttft_s[~np.isnan(one.records.e2e_s)]
    assert late.max() > waits_s[retry]


def test_client_without_patience_leaves_its_queue(config):
    flood = config.replaced(rate_rps=200.0, requests=400)
    stayed = simulate(flood)
    left = simulate(flood.replaced(clients=Clients(patience_s=2.0)))
    done = ended_once(left)
    assert ended_once(stayed) == 400 and 0 < done < 400 and left.refusals == 0
    assert left.end_s < stayed.end_s, "no node computes for a client that is gone"
    # Who was in work already when its patience ended is served.
    assert np.nanmedian(left.records.ttft_s) < np.nanmedian(stayed.records.ttft_s)


def test_a_failure_loses_no_request(config):
    failures = (Failure(0, 4.0, 8.0),)
    outcome = simulate(config.replaced(faults=Faults(failures=failures), rate_rps=16.0))
    assert ended_once(outcome) == 200
    assert outcome.retried > 0
    arrival_s, node = outcome.records.arrival_s, outcome.records.node
    assert not (node[(arrival_s > 4.0) & (arrival_s < 12.0)] == 0).any()
    assert (node[arrival_s > 12.0] == 0).any()


def test_a_request_lost_twice_is_rejected(config, trio):
    failures = tuple(Failure(node, 5.0 + 1e-3 * node, 3.0) for node in range(3))
    outcome = simulate(config.replaced(faults=Faults(failures=failures), rate_rps=20.0))
    done = ended_once(outcome)
    assert 0 < done < 200


def test_a_straggler_slows_what_runs_there(config):
    lone = config.replaced(cluster=SimulatedCluster("one", config.cluster.nodes[:1]), rate_rps=1.0)
    slow = Faults(noise_sigma=0.0, stragglers=(Straggler(0, 0.0, 1e9, 3.0),))
    quick = simulate(lone.replaced(faults=Faults(noise_sigma=0.0))).summary()
    late = simulate(lone.replaced(faults=slow)).summary()
    assert late["tpot_s"]["p50"] > 2.5 * quick["tpot_s"]["p50"]


def test_misprofiles_change_the_routers_belief_not_the_physics(config):
    traffic = traffic_of(config)
    wrong = Faults(misprofiles=misprofiled_third(3, ("link", "compute"), 3.0, 0))
    plan = np.zeros(traffic.requests, dtype=int)
    honest = simulate(config, traffic=traffic, assignment=plan)
    misled = simulate(config.replaced(faults=wrong), traffic=traffic, assignment=plan)
    assert np.array_equal(honest.records.ttft_s, misled.records.ttft_s)


def test_what_can_never_fit_is_rejected_and_counted(trio, shape, chats):
    ids = np.arange(1, 20_001, dtype=np.uint64)
    giant = SessionShape("giant", (turn_of(0.0, 1_000_000, 10, ids, 64),
                                   turn_of(1.0, 1_000, 10, ids, 64)))  # fmt: skip
    workload = Workload("giants", 64, (giant, *chats.sessions[:5]), "made up")
    outcome = simulate(
        SimulationConfig(cluster=trio, workload=workload, shape=shape, rate_rps=5.0, requests=100)
    )
    r = outcome.records
    giants = r.prompt_tokens == 1_000_000
    assert giants.any() and np.isnan(r.e2e_s[giants]).all() and (r.node[giants] == -1).all()
    assert ended_once(outcome) == 100 - giants.sum()


def test_the_summary_has_every_figure(config):
    outcome = simulate(config, timer=iter(np.arange(0, 100, 1e-4)).__next__)
    summary = outcome.summary()
    for key in ("policy", "scheduler", "trace", "cluster", "load", "capacity_rps", "seed",
                "requests", "completed", "rejected", "ttft_s", "tpot_s", "e2e_s", "goodput_rps",
                "slo", "cost_per_mtok", "energy_j_per_tok", "decision_us", "budget_fill",
                "vram_fill", "max_wait_s", "max_skips", "jain", "nodes"):  # fmt: skip
        assert key in summary
    assert set(summary["ttft_s"]) == {"mean", "p50", "p90", "p99"}
    assert summary["decision_us"]["p50"] == pytest.approx(100.0)
    assert summary["requests"] == 160
    assert 0 < summary["jain"] <= 1 and 0 < summary["vram_fill"] < 1
    assert sum(node["requests"] for node in summary["nodes"]) == 200
    dollars = sum(node.profile.cost_per_hour for node in config.cluster.nodes)
    measured = outcome.records.arrival_s[outcome.records.measured]
    tokens = outcome.records.output_tokens[outcome.records.measured].sum()
    assert summary["cost_per_mtok"] == pytest.approx(
        dollars / 3600 * (measured.max() - measured.min()) / tokens * 1e6
    )


def test_load_is_a_fraction_of_the_bound(config):
    by_load = config.replaced(load=0.5, rate_rps=None, capacity_rps=12.0)
    outcome = simulate(by_load)
    assert outcome.rate_rps == 6.0
    assert outcome.summary()["capacity_rps"] == 12.0
    same_rate = simulate(config)
    assert np.array_equal(outcome.records.ttft_s, same_rate.records.ttft_s)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load": 0.5}, "either load"),
        ({"rate_rps": None}, "either load"),
        ({"rate_rps": 0.0}, "rate_rps is 0.0"),
        ({"rate_rps": float("nan")}, "rate_rps is nan"),
        ({"requests": 0}, "requests is 0"),
        ({"scheduler": "lifo"}, "fair, fcfs, .*cap1"),
        ({"policy": "magic"}, "magic"),
    ],
)
def test_what_cannot_be_run_is_refused_before_any_work(config, changes, message):
    with pytest.raises(ValueError, match=message):
        simulate(config.replaced(**changes))


def test_a_model_larger_than_a_node_is_refused_by_the_nodes_name(config, shape):
    giant = replace(shape, name="giant", params_total=60e9, params_active=8e9)
    with pytest.raises(ClusterError, match=r"node gh200-0: giant needs 120\.0 GB"):
        config.replaced(shape=giant)
