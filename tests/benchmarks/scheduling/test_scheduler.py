"""The scheduling benchmark: its workloads are fixed, its figures right, its errors clear."""

import json

import pytest
from typer.testing import CliRunner

from kappa_benchmarks.scheduling import mix, report
from kappa_deploy.cli import app

SETTING = mix.Setting("mixed", "x1", "shared")


def request(tenant="a", kind=mix.FRESH, blocks=1, **more):
    return mix.Request(kind, 0, mix.BLOCK_TOKENS * blocks - 7, tenant=tenant, **more)


def served(one, arrived_s, admitted_s, finished_s, first_s=None):
    first_s = admitted_s if first_s is None else first_s
    return report.Served(one, arrived_s, admitted_s, first_s, finished_s)


def played(requests, iterations=(), blocks=10):
    return report.Played(blocks, list(requests), list(iterations))


# -- workloads ------------------------------------------------------------------------------------


def test_the_mixed_case_is_the_one_that_was_measured_before():
    workload = mix.workload_of("mixed")
    sizes = [(a.prefix_tokens, a.new_tokens) for a in workload.requests]
    assert sizes == [(512, 16)] * 6 + [(0, 96)] * 12
    assert workload.blocks == 39
    assert [a.blocks for a in workload.requests] == [17] * 6 + [4] * 12
    # 5 MB/s and 20 ms, at 1,024 bytes a token.
    assert 512 * SETTING.load_token_s + mix.LINK_FIXED_S == pytest.approx(0.1249, abs=1e-4)
    ten = mix.workload_of("mixed10")
    assert (ten.blocks, len(ten.requests)) == (390, 180)
    assert sum(a.prefix_tokens > 0 for a in ten.requests) == 60


@pytest.mark.parametrize("name", mix.WORKLOADS)
def test_every_workload_can_be_served_and_is_the_same_each_time(name):
    workload = mix.workload_of(name, 3)
    assert workload == mix.workload_of(name, 3)
    assert all(a.blocks <= workload.blocks for a in workload.requests)
    assert all(a.prompt_tokens + a.output_tokens <= 1024 for a in workload.requests)
    assert [a.at_s for a in workload.requests] == sorted(a.at_s for a in workload.requests)


def test_drawn_arrivals_follow_the_seed_and_fixed_ones_do_not():
    assert mix.workload_of("mixed_stream", 1) != mix.workload_of("mixed_stream", 2)
    assert mix.workload_of("mixed", 1) == mix.workload_of("mixed", 2)


def test_prompts_share_nothing_and_differ_from_run_to_run():
    requests = mix.workload_of("mixed").requests
    first, again, other = (mix.prompts(requests, 1, run, (100, 4000)) for run in (0, 0, 1))
    assert first == again != other
    assert [len(p) for p in first] == [a.prompt_tokens for a in requests]
    assert len({tuple(p[: mix.BLOCK_TOKENS]) for p in first + other}) == 2 * len(requests)


# -- figures --------------------------------------------------------------------------------------


def test_a_run_becomes_a_row():
    requests = [
        served(request(kind=mix.OFFLOADED), 0.0, 0.0, 3.0, first_s=2.0),
        served(request(), 0.0, 1.0, 4.0, first_s=1.5),
        served(request(), 0.5, 0.8, 2.0, first_s=1.0),
    ]
    row = report.row_of("fair", SETTING, "vllm", played(requests))
    assert set(row) == {
        "policy", "workload", "backend", "link", "stores", "ttft_s", "makespan_s", "budget_fill",
        "vram_fill", "iterations", "iteration_tokens", "link_use", "max_wait_s", "max_skips",
        "service_gap", "jain",
    }  # fmt: skip
    assert row["ttft_s"]["offloaded"]["p50"] == 2.0
    assert row["ttft_s"]["fresh"]["p50"] == pytest.approx(1.0)
    assert row["ttft_s"]["fresh"]["p99"] == pytest.approx(1.49)
    assert (row["makespan_s"], row["max_wait_s"], row["max_skips"]) == (4.0, 1.0, 1)
    assert row["service_gap"] is row["jain"] is row["budget_fill"] is None


def test_fills_count_time_while_something_waited():
    def iteration(at_s, tokens, blocks, queued):
        return {"started_s": at_s, "tokens": tokens, "blocks": blocks, "queued": queued}

    iterations = [
        iteration(0.0, mix.BUDGET_TOKENS, 10, True), iteration(1.0, 0, 5, True),
        iteration(4.0, 128, 10, False), iteration(9.0, 0, 0, False),
    ]  # fmt: skip
    assert report.fills(iterations, 10) == pytest.approx((1 / 4, (10 + 3 * 5) / 40))
    assert report.fills(iterations[2:], 10) == (None, None)


def test_skips_are_later_requests_admitted_earlier():
    waits = served(request(), 0.0, 9.0, 10.0)
    others = [served(request(), 0.0, float(i), 10.0) for i in range(5)]
    assert report.max_skips([waits, *others]) == 5
    assert report.max_skips([*others, waits]) == 0
    never = report.Served(request(), 0.0)
    assert report.max_skips([never, *others]) == 5


def test_fairness_compares_tenants_while_both_wait():
    # Both wait until 4; a holds 6 of 10 blocks from 0 to 4, b 2 of them.
    requests = [
        served(request("a", blocks=6), 0.0, 0.0, 4.0),
        served(request("b", blocks=2), 0.0, 0.0, 4.0),
        served(request("a", blocks=6), 0.0, 4.0, 8.0),
        served(request("b", blocks=2), 0.0, 4.0, 8.0),
    ]
    gap, jain = report.fairness(requests, 10)
    assert gap == pytest.approx(4 * (0.6 - 0.2))
    assert jain == pytest.approx((2.4 + 0.8) ** 2 / (2 * (2.4**2 + 0.8**2)))


def test_tenants_that_never_wait_together_are_not_compared():
    requests = [
        served(request("a"), 0.0, 0.0, 4.0), served(request("a"), 0.0, 1.0, 4.0),
        served(request("b"), 5.0, 5.0, 6.0),
    ]  # fmt: skip
    assert report.fairness(requests, 10) == (None, None)
    assert report.fairness(requests[:2], 10) == (None, None)


def rows_of_runs(*makespans, policy="fair"):
    rows = []
    for makespan in makespans:
        requests = [
            served(request(kind=mix.OFFLOADED), 0.0, 0.0, makespan),
            served(request(), 0.0, 0.1 * makespan, makespan),
        ]
        rows.append(report.row_of(policy, SETTING, "vllm", played(requests)))
    return rows


def test_runs_become_medians_with_their_spread():
    rows = rows_of_runs(1.0, 5.0, 2.0) + rows_of_runs(7.0, policy="fcfs")
    middle, spread = report.medians(rows)
    assert [(row["policy"], row["makespan_s"]) for row in middle] == [("fair", 2.0), ("fcfs", 7.0)]
    assert spread[0]["makespan_s"] == [1.0, 5.0, 3]
    assert middle[0]["jain"] is None and middle[0]["workload"] == "mixed"
    assert middle[0]["ttft_s"]["fresh"]["p50"] == pytest.approx(0.2)


# -- the command ----------------------------------------------------------------------------------


def test_the_simulator_prints_one_object(tmp_path):
    answer = CliRunner().invoke(
        app,
        ["bench", "scheduler", "--backend", "simulator", "--policies", "fcfs,fair", "--stores",
         "shared", "--runs", "2", "--json", "--out", str(tmp_path)],
    )  # fmt: skip
    assert answer.exit_code == 0, answer.output
    facts = json.loads(answer.stdout)
    assert [row["policy"] for row in facts["rows"]] == ["fcfs", "fair"]
    assert {row["backend"] for row in facts["rows"]} == {"simulator"}
    assert facts["spread"][0]["makespan_s"][2] == 2
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 4
    assert json.loads((tmp_path / "scheduler.json").read_text()) == facts
