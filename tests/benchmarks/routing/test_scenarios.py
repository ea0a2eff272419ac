import json
from collections import deque

import pytest
from typer.testing import CliRunner

from benchmarks.routing import scenarios
from deploy.cli import app
from simulator.memory import SimulatedJob


def jobs(tenant, count):
    return deque(SimulatedJob(i, 16, 1, [i], 0.0, 1, tenant) for i in range(count))


def test_a_router_sends_four_of_the_heavy_tenant_for_one_of_the_light():
    router = scenarios._DeficitRouter(100, {"premium": jobs("premium", 9), "regular": jobs("r", 9)})
    sent = [router.next().tenant for _ in range(10)]
    assert sent.count("premium") == 8 and sent[:5].count("premium") == 4


def test_a_router_that_sees_one_tenant_sends_it_as_fast_as_its_window_allows():
    router = scenarios._DeficitRouter(3, {"premium": deque(), "regular": jobs("regular", 9)})
    assert [bool(router.next()) for _ in range(4)] == [True, True, True, False]


def test_a_skewed_decider_spoils_shares_kept_in_routers_and_not_those_kept_in_engines(monkeypatch):
    monkeypatch.setattr(scenarios, "_EACH", 400)
    found = {
        arm: figures["ratio (weights: 4)"] for arm, figures in scenarios._two_routers(0).items()
    }
    queues_even, queues_skewed, fair_even, fair_skewed = found.values()
    assert queues_even == pytest.approx(4.0, rel=0.1)
    assert queues_skewed == pytest.approx(1.0, rel=0.1)
    assert fair_even == fair_skewed == pytest.approx(4.0, rel=0.15)


def test_tokens_in_host_memory_are_not_sent_away_to_be_computed():
    found = scenarios._tier_weight(0)
    weighted, whole, priced = found.values()
    assert weighted["sent to prefill"] > whole["sent to prefill"] > priced["sent to prefill"] > 0
    assert priced["mean TTFT s"] == pytest.approx(priced["least possible s"])


def test_loads_hold_up_fresh_requests_in_stock_vllm_only():
    stock, fair = scenarios._convoy(0).values()
    assert fair["fresh TTFT p99 s"] < 0.3 * stock["fresh TTFT p99 s"]


def test_the_command_prints_a_row_for_each_arm_and_the_report_it_plays():
    shown = CliRunner().invoke(app, ["bench", "scenario", "vllm-44294", "--seeds", "1", "--json"])
    given = json.loads(shown.stdout)
    assert [row["arm"] for row in given["rows"]] == ["stock vLLM", "fair"]
    assert given["reports"] == {"vllm-44294": "https://github.com/vllm-project/vllm/issues/44294"}


def test_an_unknown_scenario_is_refused_with_those_there_are():
    shown = CliRunner().invoke(app, ["bench", "scenario", "sglang-1"])
    assert shown.exit_code == 2 and "sglang-39108" in shown.stderr
