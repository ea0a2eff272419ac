"""The running router's log replays to its decisions; its nodes can be measured while they serve."""

from __future__ import annotations

import json

from kappa_router.config import RouterConfig
from kappa_router.load_plans import planner_of
from kappa_router.policy import policy_named
from kappa_router.recording import replay
from kappa_router.router import Router


def entries(path):
    """The whole lines of a log that is still being written."""
    *lines, _ = path.read_text().split("\n")
    return [json.loads(line) for line in lines]


def test_the_live_log_replays_to_identical_decisions(idle):
    for number in range(6):
        idle.openai.chat.completions.create(
            model=idle.model,
            messages=[{"role": "user", "content": f"{number % 3} " + "replay this prompt " * 60}],
            max_tokens=2,
        )
    log = entries(idle.router_log)
    assert {"join", "blocks", "report", "route", "release"} <= {entry["call"] for entry in log}
    # The live router's secret is its own: hashes differ, what they say does not.
    config = RouterConfig(policy=policy_named("priced"), secret=1, planner_of=planner_of)
    router = Router(config)
    pairs = replay(log, router)
    assert len(pairs) >= 6
    assert any(then["counts"]["device_tokens"] for then, _ in pairs)
    for then, now in pairs:
        assert now == then


def test_profiling_on_demand_measures_workers_and_keeps_the_pace(idle):
    before = {row["node"]: row["profile"] for row in idle.all_nodes()}
    answer = idle.http.post("/v1/nodes/profile")
    answer.raise_for_status()
    for row in answer.json()["nodes"]:
        measured = row["measured"]
        assert row["profile"] == before[row["node"]], "a paced node keeps what it is paced by"
        assert row["profile_error"] is None
        assert measured["h2d_bytes_per_s"] > 1e6
        assert measured["flops_per_s"] > 1e6
        sizes = [point["bytes"] for point in measured["h2d"]]
        assert sizes == sorted(sizes) and len(sizes) >= 3
        assert all(point["spread"] >= 0 for point in measured["gemm"])


def test_what_is_shown_is_never_routed(idle):
    decided = len(idle.decisions())
    for path in ("/v1/nodes", "/v1/decisions", "/metrics", "/ready"):
        idle.http.get(path).raise_for_status()
    assert len(idle.decisions()) == decided
