"""`kappa bench capacity`: the search, its intervals, and a node of known capacity."""

import json
import math

import pytest
from scipy.optimize import brentq
from typer.testing import CliRunner

from kappa.shapes import model_shape
from kappa_benchmarks.routing import capacity, grid
from kappa_deploy.cli import app
from kappa_simulator.clusters import cluster_named, node_model

PROMPT_TOKENS = 8192  # a step's budget: each step computes one prompt


def bench(*options):
    done = CliRunner().invoke(app, ["bench", "capacity", *map(str, options)])
    return done, json.loads(done.stdout) if done.exit_code == 0 else None


@pytest.mark.parametrize("last", [-1, 0, 100, capacity._RUNGS - 1])
def test_eight_runs_find_the_last_rung_that_holds(last):
    search, runs = capacity.Search(), 0
    while (rung := search.rung()) is not None:
        search.tried(rung, rung <= last)
        runs += 1
    assert (search.held, search.failed, runs) == (last, last + 1, 8)


@pytest.mark.parametrize("near", [-1, 3, 100, capacity._RUNGS - 1])
@pytest.mark.parametrize("last", [-1, 0, 97, 100, 140, capacity._RUNGS - 1])
def test_a_search_from_anywhere_ends_at_the_same_rung(near, last):
    search, runs = capacity.Search(near), 0
    while (rung := search.rung()) is not None:
        assert 0 <= rung < capacity._RUNGS and search.held < rung < search.failed
        search.tried(rung, rung <= last)
        runs += 1
    assert (search.held, search.failed) == (last, last + 1)
    assert runs <= (4 if near == last >= 0 else 15)


def test_the_ladder_ends_above_the_bound_in_steps_of_2_percent():
    assert capacity.load_of(capacity._RUNGS - 1) == 1.28
    assert capacity.load_of(8) / capacity.load_of(7) == pytest.approx(1.02)


def run(rate_rps, met=0.9, ttft_met=1.0, tpot_met=1.0):
    return {
        "rate_rps": rate_rps, "slo": {"met": met, "ttft_met": ttft_met, "tpot_met": tpot_met}
    }  # fmt: skip


def test_row_has_rates_around_the_capacity_and_what_misses_next():
    held, failed = [run(10.0), run(10.0, 0.95)], [run(11.0, tpot_met=0.8), run(11.0, ttft_met=0.9)]
    row = capacity.summary(("small", "azure"), "ttft", held, failed)
    assert (row["capacity_rps"], row["high"], row["seeds"]) == (10.0, 11.0, 2)
    assert row["met"] == [0.9, 0.95]
    assert row["missed"] == {"ttft": pytest.approx(0.05), "tpot": pytest.approx(0.1)}


def test_ends_of_the_ladder_are_open():
    assert capacity.summary(("small", "azure"), "ttft", [run(10.0)], [])["high"] is None
    assert capacity.summary(("small", "azure"), "ttft", [], [run(1.0)])["capacity_rps"] == 0.0


class Drawn:
    """Runs of which one seed meets more than the other; of the second policy all meet less."""

    total = 0

    def rows(self, wanted):
        return [
            run(each.cell.load, 1.0 - 0.2 * each.cell.load - (0.1 if each.seed else -0.1)
                - (0.05 if each.policy == "b" else 0.0))
            for each in wanted
        ]  # fmt: skip


def test_the_mean_of_the_seeds_decides():
    # 1 - 0.2 x load is 0.9 at 0.5 of the bound; 0.05 less is at 0.25.
    cell = grid.Cell("small", "azure", 0.1)
    found = capacity.search(Drawn(), [cell], ["a", "b"], [0, 1], 0.9)
    for policy, load in (("a", 0.5), ("b", 0.25)):
        held, failed = found["small", "azure", policy]
        assert len(held) == len(failed) == 2
        assert held[0]["rate_rps"] <= load < failed[0]["rate_rps"] < held[0]["rate_rps"] * 1.021


def compared(rates):
    """What is against what, of policies with these capacities in one place."""
    return capacity.against([
        {"trace": "a", "cluster": "small", "policy": policy, "capacity_rps": rps}
        for policy, rps in rates.items()
    ])  # fmt: skip


def test_ours_is_compared_with_the_best_policy_that_is_not_ours():
    rates = {"priced": 9.0, "priced_fetch": 20.0, "ttft": 12.0, "llm_d": 10.0, "sticky": 8.0}
    (found,) = compared(rates)
    assert found["peer"] == "llm_d" and found["ratio"] == pytest.approx(0.9)


def test_our_rule_is_compared_on_like_nodes_and_on_stock_ones():
    rates = {"priced": 9.0, "llm_d": 10.0, "priced@fair": 14.0, "llm_d@fair": 12.0}
    found = {(one["policy"], one["peer"]): one["ratio"] for one in compared(rates)}
    assert found == {
        ("priced", "llm_d"): pytest.approx(0.9),
        ("priced@fair", "llm_d@fair"): pytest.approx(14 / 12),
        ("priced@fair", "llm_d"): pytest.approx(1.4),
    }


def test_our_rule_is_compared_with_the_best_other_rule():
    rates = {
        "priced": 9.0, "llm_d": 10.0, "priced@fair": 14.0, "priced@p_pas": 20.0,
        "llm_d@budget_512": 16.0, "lmetric@p_pas": 15.0,
    }  # fmt: skip
    found = {(one["policy"], one["peer"]): one["ratio"] for one in compared(rates)}
    assert found == {
        ("priced", "llm_d"): pytest.approx(0.9),
        ("priced@fair", "llm_d@budget_512"): pytest.approx(14 / 16),
        ("priced@p_pas", "lmetric@p_pas"): pytest.approx(20 / 15),
        ("priced@p_pas", "llm_d@budget_512"): pytest.approx(20 / 16),
    }


def share_in_time(use, services=4):
    """P(wait <= `services` services) in a queue with Poisson arrivals and equal service times
    (Erlang 1909), of `use` in service times a unit of time."""
    parts = [
        (-use * (services - k)) ** k / math.factorial(k) * math.exp(use * (services - k))
        for k in range(services + 1)
    ]
    return (1 - use) * sum(parts)


def test_one_node_of_equal_prompts_has_the_capacity_of_its_queue(tmp_path):
    # One token of output, so only TTFT counts: within five services, so a wait of at most four.
    trace, cluster = tmp_path / "equal.jsonl", tmp_path / "one.yaml"
    size = PROMPT_TOKENS // 512
    trace.write_text("".join(
        json.dumps({
            "input_length": PROMPT_TOKENS, "output_length": 1,
            "hash_ids": list(range(number * size, (number + 1) * size)),
        }) + "\n"
        for number in range(2000)
    ))  # fmt: skip
    cluster.write_text("- kind: h100\n  count: 1\n")
    model = node_model(cluster_named(str(cluster)).nodes[0], model_shape("llama-3.1-8b"), 512)
    service_s = model.step.step_s([(PROMPT_TOKENS, 0)])
    assert share_in_time(0.5, 0) == 0.5
    expected_rps = brentq(lambda use: share_in_time(use) - 0.9, 0.1, 0.99) / service_s

    options = [
        "--trace", trace, "--cluster", cluster, "--policies", "ttft", "--cold", "--json",
        "--seeds", 2, "--requests", 1500, "--jobs", 1, "--out", tmp_path / "out",
    ]  # fmt: skip
    _, facts = bench(*options)
    (row,) = facts["rows"]
    assert row["capacity_rps"] == pytest.approx(expected_rps, rel=0.08)
    assert row["capacity_rps"] < row["high"] < row["capacity_rps"] * 1.021
    # Nothing is run again.
    lines = (tmp_path / "out" / "rows.jsonl").read_text()
    again, same = bench(*options)
    assert same["rows"] == facts["rows"] and "left" not in again.stderr
    assert (tmp_path / "out" / "rows.jsonl").read_text() == lines
