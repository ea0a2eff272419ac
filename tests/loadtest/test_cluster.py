"""What a cluster reports of its decisions afterwards reaches the records it belongs to."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from loadtest.cluster import Decisions
from loadtest.journal import RequestDecision

Reported = dict[str, tuple[dict[str, Any], dict[str, Any]]]


class Cluster:
    """Remembers decisions as a cluster does: the last so many, newest last."""

    def __init__(self) -> None:
        self.decisions: list[dict[str, Any]] = []
        self.asked: list[int] = []

    def decide(self, request_id: str, new_tokens: int | None = 1) -> None:
        self.decisions.append(
            {
                "request_id": request_id,
                "predicted": {"load_s": 0.5},
                "actual": {"new_tokens": new_tokens},
                "node": "n",
            }
        )

    async def fetch(self, limit: int) -> bytes:
        self.asked.append(limit)
        return json.dumps({"decisions": self.decisions[-limit:]}).encode()


def following(cluster: Cluster, patience_s: float = 1000.0) -> tuple[Decisions, Reported]:
    reported: Reported = {}

    def write(decision: RequestDecision) -> None:
        reported[decision.request_id] = decision.predicted, decision.actual

    return Decisions(cluster.fetch, write, patience_s), reported


async def test_every_decision_is_found_and_no_more_are_asked_for_than_reach_back() -> None:
    cluster = Cluster()
    decisions, reported = following(cluster)
    for number in range(1000):
        cluster.decide(f"r{number}")
        ticket = decisions.ticket()
        if number >= 990:
            decisions.want(f"r{number}", ticket)
    await decisions.poll()
    assert sorted(reported) == [f"r{number}" for number in range(990, 1000)]
    assert reported["r990"] == ({"load_s": 0.5}, {"new_tokens": 1})
    assert (decisions.written, decisions.lost) == (10, 0)
    assert cluster.asked[0] < 100


async def test_an_admission_that_is_reported_later_is_waited_for() -> None:
    cluster = Cluster()
    decisions, reported = following(cluster)
    cluster.decide("r", None)
    decisions.want("r", decisions.ticket())
    await decisions.poll()
    assert reported == {}
    actual = cluster.decisions[0]["actual"]
    actual |= {"new_tokens": 9, "compute_s": None}
    await decisions.poll()
    assert reported == {}
    actual["compute_s"] = 0.5
    await decisions.poll()
    assert reported["r"][1] == {"new_tokens": 9, "compute_s": 0.5}


async def test_what_is_never_admitted_or_never_found_ends_the_waiting() -> None:
    cluster = Cluster()
    decisions, reported = following(cluster, patience_s=0.1)
    cluster.decide("refused", None)
    decisions.want("refused", decisions.ticket())
    decisions.want("unknown", decisions.ticket())
    await asyncio.wait_for(decisions.settle(), 30)
    assert reported["refused"][1] == {"new_tokens": None}
    assert "unknown" not in reported
    assert (decisions.written, decisions.lost) == (1, 1)


async def test_a_cluster_that_answers_nonsense_does_no_harm() -> None:
    async def nonsense(_: int) -> bytes:
        return b"<html>"

    decisions = Decisions(nonsense, lambda *_: None, patience_s=0.1)
    decisions.want("r", decisions.ticket())
    await asyncio.wait_for(decisions.settle(), 30)
    assert decisions.lost == 1


async def test_following_fetches_while_the_run_goes_on() -> None:
    cluster = Cluster()
    decisions, reported = following(cluster)
    follow = asyncio.create_task(decisions.follow())
    for number in range(300):
        cluster.decide(f"r{number}")
        decisions.want(f"r{number}", decisions.ticket())
    while len(reported) < 300:
        await asyncio.sleep(0.01)
    follow.cancel()
    assert await asyncio.gather(follow, return_exceptions=True)


async def test_only_figures_are_kept() -> None:
    cluster = Cluster()
    cluster.decide("a")
    cluster.decisions[0]["actual"] |= {"ttft_s": "soon", "queue_s": None, "load_s": True}
    decisions, reported = following(cluster)
    decisions.want("a", decisions.ticket())
    await decisions.poll()
    assert reported == {"a": ({"load_s": 0.5}, {"new_tokens": 1, "queue_s": None})}
