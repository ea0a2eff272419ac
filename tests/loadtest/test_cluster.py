"""What a cluster reports of its decisions afterwards reaches the records it belongs to."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from kappa_loadtest.cluster import Decisions
from kappa_loadtest.run_folder import RequestDecision


class Cluster:
    """Remembers decisions as a cluster does, newest last, and what `decisions` kept of them."""

    def __init__(self, patience_s: float = 1000.0) -> None:
        self.remembered: list[dict[str, Any]] = []
        self.limits: list[int] = []
        self.kept: dict[str, RequestDecision] = {}
        self.decisions = Decisions(self.fetch, self.keep, patience_s)

    def decide(self, request_id: str, new_tokens: int | None = 1) -> int:
        self.remembered.append({
            "request_id": request_id, "predicted": {"load_s": 0.5},
            "actual": {"new_tokens": new_tokens}, "node": "n",
        })  # fmt: skip
        return self.decisions.ticket()

    async def fetch(self, limit: int) -> bytes:
        self.limits.append(limit)
        return json.dumps({"decisions": self.remembered[-limit:]}).encode()

    def keep(self, decision: RequestDecision) -> None:
        self.kept[decision.request_id] = decision


async def test_poll_finds_every_decision_with_the_fewest_fetched() -> None:
    cluster = Cluster()
    for number in range(1000):
        ticket = cluster.decide(f"r{number}")
        if number >= 990:
            cluster.decisions.want(f"r{number}", ticket)
    await cluster.decisions.poll()
    assert sorted(cluster.kept) == [f"r{number}" for number in range(990, 1000)]
    assert cluster.kept["r990"] == RequestDecision("r990", {"load_s": 0.5}, {"new_tokens": 1})
    assert cluster.decisions.lost == 0
    assert cluster.limits[0] < 100


async def test_an_admission_that_is_reported_later_is_waited_for() -> None:
    cluster = Cluster()
    cluster.decisions.want("r", cluster.decide("r", None))
    for reported in ({}, {"new_tokens": 9, "compute_s": None}):
        cluster.remembered[0]["actual"] |= reported
        await cluster.decisions.poll()
        assert cluster.kept == {}
    cluster.remembered[0]["actual"]["compute_s"] = 0.5
    await cluster.decisions.poll()
    assert cluster.kept["r"].actual == {"new_tokens": 9, "compute_s": 0.5}


async def test_what_is_never_admitted_or_never_found_ends_the_waiting() -> None:
    cluster = Cluster(patience_s=0.1)
    cluster.decisions.want("refused", cluster.decide("refused", None))
    cluster.decisions.want("unknown", cluster.decisions.ticket())
    await asyncio.wait_for(cluster.decisions.settle(), 30)
    assert cluster.kept["refused"].actual == {"new_tokens": None}
    assert "unknown" not in cluster.kept
    assert cluster.decisions.lost == 1


async def test_a_cluster_that_answers_nonsense_does_no_harm() -> None:
    async def nonsense(_: int) -> bytes:
        return b"<html>"

    decisions = Decisions(nonsense, lambda *_: None, patience_s=0.1)
    decisions.want("r", decisions.ticket())
    await asyncio.wait_for(decisions.settle(), 30)
    assert decisions.lost == 1


async def test_following_fetches_while_the_run_goes_on() -> None:
    cluster = Cluster()
    follow = asyncio.create_task(cluster.decisions.follow())
    for number in range(300):
        cluster.decisions.want(f"r{number}", cluster.decide(f"r{number}"))
    while len(cluster.kept) < 300:
        await asyncio.sleep(0.01)
    follow.cancel()
    assert await asyncio.gather(follow, return_exceptions=True)


async def test_only_figures_are_kept() -> None:
    cluster = Cluster()
    cluster.decisions.want("a", cluster.decide("a"))
    cluster.remembered[0]["actual"] |= {"ttft_s": "soon", "queue_s": None, "load_s": True}
    await cluster.decisions.poll()
    assert cluster.kept["a"].actual == {"new_tokens": 1, "queue_s": None}
