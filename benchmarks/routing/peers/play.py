"""One run: sessions of a workload, cut to fit minutes of real time, played to emulated nodes.

A router in a process of its own decides where each request goes. The same seed gives the same
sessions at the same times whatever router that is; a turn waits for its predecessor and then for
its pause. All seconds are emulated ones, but for `route_s`.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from benchmarks.harness import quantile, spread
from benchmarks.routing.peers.nodes import EmulatedNode, PacedLoop
from benchmarks.routing.peers.routers import RouterProcess
from workload.arrivals import poisson
from workload.replay import expand
from workload.shapes import SessionShape, TurnShape, Workload

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cut:
    """How a workload is fitted to a short run.

    turns: most turns a session; pause: share of every pause that is kept; scale: prompts, and the
    tokens in a block with them, are divided by it, so that the blocks stay as they are.
    """

    turns: int = 12
    pause: float = 0.1
    scale: int = 4

    def apply(self, workload: Workload) -> Workload:
        """The workload, cut.

        Raises:
            ValueError: its blocks have no whole number of tokens at this scale.
        """
        if workload.block_tokens % self.scale:
            raise ValueError(
                f"scale {self.scale} does not divide blocks of {workload.block_tokens} tokens"
            )

        def turn_of(turn: TurnShape) -> TurnShape:
            tokens = max(turn.input_tokens // self.scale, 1)
            return replace(turn, after_s=turn.after_s * self.pause, input_tokens=tokens)

        sessions = tuple(
            replace(session, turns=tuple(map(turn_of, session.turns[: self.turns])))
            for session in workload.sessions
        )
        size = workload.block_tokens // self.scale
        return replace(workload, sessions=sessions, block_tokens=size)

    def __str__(self) -> str:
        return (
            f"sessions cut to {self.turns} turns, pauses to {100 * self.pause:g} %; prompts and "
            f"memory for KV divided by {self.scale}"
        )


Arrival = tuple[float, SessionShape]
"""When a session comes, in seconds."""


def arrivals(workload: Workload, requests_per_s: float, seconds: float, seed: int) -> list[Arrival]:
    """Sessions that arrive within `seconds`, at a mean rate of `requests_per_s` turns."""
    turns = sum(len(session.turns) for session in workload.sessions) / len(workload.sessions)
    times = poisson(requests_per_s / turns, np.random.default_rng((seed, 1)))
    within = takewhile(lambda at_s: at_s < seconds, times)
    return list(zip(within, expand(workload, seed), strict=False))


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it; seconds since the run began, or since it was sent.

    route_s: until it was known where it goes (wall seconds).
    """

    request: str
    start_s: float
    node: str = ""
    ttft_s: float = math.nan
    e2e_s: float = math.nan
    route_s: float = math.nan
    error: str = "unfinished"


class Player:
    """Plays one run. `outcomes` grows."""

    def __init__(
        self, router: RouterProcess, nodes: Sequence[EmulatedNode], loop: PacedLoop
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._router, self._loop = router, loop
        self._nodes = {node.name: node for node in nodes}
        self._begun_s = 0.0

    async def play(self, found: Sequence[Arrival], seconds: float) -> None:
        """Play the sessions for `seconds`, then let what is under way end for as long again.

        Turns that would start after `seconds` are left out; what is under way at the end stays
        "unfinished".
        """
        self._begun_s = self._now_s()
        tasks = [asyncio.create_task(self._session(*arrival, seconds)) for arrival in found]
        if tasks:
            ended, late = await asyncio.wait(tasks, timeout=2 * seconds * self._loop.dilation)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            for task in ended:
                task.result()

    def _now_s(self) -> float:
        self._loop.catch_up()
        return self._loop.now_s - self._begun_s

    async def _session(self, at_s: float, session: SessionShape, seconds: float) -> None:
        for number, turn in enumerate(session.turns):
            wait_s = max(at_s + turn.after_s - self._now_s(), 0.0)
            await asyncio.sleep(wait_s * self._loop.dilation)
            if self._now_s() >= seconds:
                return
            outcome = Outcome(f"{session.id}#{number}", self._now_s())
            self.outcomes.append(outcome)
            await self._request(outcome, turn, session.id)
            at_s = self._now_s()

    async def _request(self, outcome: Outcome, turn: TurnShape, session: str) -> None:
        message = {"request": outcome.request, "output_tokens": turn.output_tokens}
        blocks = {"blocks": turn.blocks.tolist(), "tokens": turn.input_tokens, "session": session}
        wall_s = time.perf_counter()
        outcome.node = (await self._router.ask({"op": "route", **message, **blocks}))["worker"]
        outcome.route_s = time.perf_counter() - wall_s
        try:
            ticket = self._nodes[outcome.node].submit(outcome.request, turn)
        except ValueError as error:
            outcome.error = str(error)
        else:
            sent_s = self._begun_s + outcome.start_s
            await ticket.first.wait()
            self._router.send({"op": "first", **message})
            outcome.ttft_s = ticket.first_s - sent_s
            await ticket.done.wait()
            outcome.e2e_s, outcome.error = ticket.done_s - sent_s, ""
        self._router.send({"op": "done", **message})


# Rows ---------------------------------------------------------------------------------------------


def repeat_row(outcomes: Sequence[Outcome], totals: Mapping[str, Mapping[str, float]]) -> Row:
    """One repeat, of the requests that are to be measured; seconds are emulated ones.

    totals: what each node did in the whole run, warm-up included: tokens of the prompts and where
    they were found.

    A request that was still under way at the end has waited at least until then, but its figure is
    not known: it is counted as unfinished and makes the quantiles too kind.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    shares = Counter(outcome.node for outcome in good)
    prompt_tokens = max(sum(node["prompt_tokens"] for node in totals.values()), 1)
    row: Row = {
        "requests": len(outcomes), "completed": len(good),
        "failed": dict(Counter(o.error.split(":")[0] for o in outcomes if o.error)),
        "node_share": {node: shares[node] / max(len(good), 1) for node in totals},
        "in_flight": 0.0,
        "found": {
            tier: sum(node[f"{tier}_tokens"] for node in totals.values()) / prompt_tokens
            for tier in ("device", "host")
        },
    }  # fmt: skip
    if good:
        ttft_s, e2e_s = [o.ttft_s for o in good], [o.e2e_s for o in good]
        starts_s = [o.start_s for o in outcomes]
        seconds = max(starts_s) - min(starts_s)
        # Little's law, over the time in which requests were being sent.
        row["in_flight"] = sum(e2e_s) / seconds if seconds > 0 else 0.0
        row["ttft_s"] = {
            "mean": statistics.fmean(ttft_s), "p50": quantile(ttft_s, 0.5),
            "p99": quantile(ttft_s, 0.99),
        }  # fmt: skip
        row["e2e_s"] = {"mean": statistics.fmean(e2e_s), "p50": quantile(e2e_s, 0.5)}
        row["route_ms"] = 1e3 * statistics.median(o.route_s for o in good)
    return row


def router_row(repeats: Sequence[Row]) -> Row:
    """The median over repeats of each figure, and its least and most."""
    whole = [row for row in repeats if "ttft_s" in row]
    row: Row = {
        "requests": sum(row["requests"] for row in repeats),
        "completed": sum(row["completed"] for row in repeats),
        "failed": dict(sum((Counter(row["failed"]) for row in repeats), Counter())),
        "repeats": list(repeats),
    }
    if not whole:
        return row
    for name in ("ttft_s", "e2e_s"):
        row[name] = {key: spread([one[name][key] for one in whole]) for key in whole[0][name]}
    for name in ("found", "node_share"):
        row[name] = {
            key: statistics.median(one[name][key] for one in whole) for key in whole[0][name]
        }
    row["in_flight"] = spread([one["in_flight"] for one in whole])
    row["route_ms"] = statistics.median(one["route_ms"] for one in whole)
    return row


def against(rows: Sequence[Row], ours: str) -> list[Row]:
    """Each router's TTFT over ours, repeat by repeat on the same requests."""
    mine = next((row for row in rows if row["router"] == ours), None)
    if mine is None:
        return []
    found = []
    for row in rows:
        pairs = [
            (a["ttft_s"], b["ttft_s"])
            for a, b in zip(row["repeats"], mine["repeats"], strict=True)
            if "ttft_s" in a and "ttft_s" in b
        ]
        if row is not mine and pairs:
            ratios = {
                key: spread([theirs[key] / own[key] for theirs, own in pairs])
                for key in ("mean", "p50", "p99")
            }
            found.append({"router": row["router"], **ratios})
    return found
