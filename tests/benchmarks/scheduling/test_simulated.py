"""The scheduler bench in simulated time, small."""

import pytest

from kappa_benchmarks.scheduling import mix
from kappa_benchmarks.scheduling import simulated as scheduler_sim

KEYS = {
    "policy", "workload", "backend", "link", "stores", "ttft_s", "makespan_s", "budget_fill",
    "vram_fill", "iterations", "iteration_tokens", "link_use", "max_wait_s", "max_skips",
    "service_gap", "jain",
}  # fmt: skip


@pytest.fixture(scope="module")
def mixed():
    return {
        (row["policy"], row["stores"]): row
        for stores in mix.STORES
        for policy in mix.POLICIES
        for row in scheduler_sim.runs_of(policy, mix.Setting("mixed", "x1", stores), 1)
    }


def test_a_row_for_every_policy_with_the_figures_of_the_contract(mixed):
    assert {policy for policy, _ in mixed} == set(mix.POLICIES)
    for row in mixed.values():
        assert set(row) == KEYS and row["backend"] == "simulator"
        assert set(row["ttft_s"]) == {"fresh", "offloaded"}
        assert 0 < row["budget_fill"] <= 1 and 0 < row["vram_fill"] <= 1
        assert row["service_gap"] is None and row["jain"] is None
        for quantiles in row["ttft_s"].values():
            assert 0 < quantiles["p50"] <= quantiles["p99"] <= row["makespan_s"]


def test_offloaded_requests_hold_up_fresh_ones_in_stock_order(mixed):
    stock, fair = mixed["fcfs", "free"]["ttft_s"], mixed["fair", "free"]["ttft_s"]
    assert fair["fresh"]["p50"] < stock["fresh"]["p50"] / 2
    assert fair["offloaded"]["p50"] < stock["offloaded"]["p50"] * 1.2
    assert mixed["fcfs", "free"]["max_skips"] == 0


def test_stores_that_share_the_link_cost_time():
    shared, free = (
        scheduler_sim.runs_of("greedy", mix.Setting("mixed10", "x1", stores), 1)[0]["makespan_s"]
        for stores in ("shared", "free")
    )
    assert shared > free


def test_runs_are_the_same_each_time_and_differ_by_seed():
    setting = mix.Setting("mixed", "x4", "shared")
    one, again = (scheduler_sim.runs_of("fair", setting, 2) for _ in range(2))
    assert one == again and one[0] != one[1]


def test_tenants_waiting_together_get_a_gap_and_an_index():
    (row,) = scheduler_sim.runs_of("vtc", mix.Setting("heavy_light", "x1", "free"), 1)
    assert row["service_gap"] > 0 and 0.9 < row["jain"] <= 1
