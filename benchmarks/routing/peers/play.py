"""One run: sessions of a workload, cut to fit minutes of real time, played to emulated nodes.

A router in a helper process is asked where each request goes. The same seed gives the same sessions
at the same times whatever router that is; a turn waits for its predecessor and then for its pause.
All seconds are emulated ones.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from benchmarks.routing.peers.helper import Helper
from benchmarks.routing.peers.nodes import EmulatedNode, PacedLoop
from workload.arrivals import poisson
from workload.replay import expand
from workload.shapes import SessionShape, TurnShape, Workload


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
        sessions = tuple(
            replace(session, turns=tuple(map(self._turn, session.turns[: self.turns])))
            for session in workload.sessions
        )
        size = workload.block_tokens // self.scale
        return replace(workload, sessions=sessions, block_tokens=size)

    def _turn(self, turn: TurnShape) -> TurnShape:
        tokens = max(turn.input_tokens // self.scale, 1)
        return replace(turn, after_s=turn.after_s * self.pause, input_tokens=tokens)

    def __str__(self) -> str:
        return (
            f"sessions cut to {self.turns} turns, pauses to {100 * self.pause:g} %; prompts and "
            f"memory for KV divided by {self.scale}"
        )


@dataclass(frozen=True, slots=True)
class Arrival:
    """A session and when it comes."""

    start_s: float
    session: SessionShape


def arrivals(workload: Workload, requests_per_s: float, seconds: float, seed: int) -> list[Arrival]:
    """Sessions that arrive within `seconds`, at a mean rate of `requests_per_s` turns."""
    turns = sum(len(session.turns) for session in workload.sessions) / len(workload.sessions)
    times = poisson(requests_per_s / turns, np.random.default_rng((seed, 1)))
    within = takewhile(lambda at_s: at_s < seconds, times)
    return [Arrival(at_s, s) for at_s, s in zip(within, expand(workload, seed), strict=False)]


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

    def __init__(self, router: Helper, nodes: Sequence[EmulatedNode], loop: PacedLoop) -> None:
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
        tasks = [asyncio.create_task(self._session(arrival, seconds)) for arrival in found]
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

    async def _session(self, arrival: Arrival, seconds: float) -> None:
        at_s = arrival.start_s
        for number, turn in enumerate(arrival.session.turns):
            wait_s = max(at_s + turn.after_s - self._now_s(), 0.0)
            await asyncio.sleep(wait_s * self._loop.dilation)
            if self._now_s() >= seconds:
                return
            outcome = Outcome(f"{arrival.session.id}#{number}", self._now_s())
            self.outcomes.append(outcome)
            await self._request(outcome, turn, arrival.session.id)
            at_s = self._now_s()

    async def _request(self, outcome: Outcome, turn: TurnShape, session: str) -> None:
        wall_s = time.perf_counter()
        answer = await self._router.ask(
            {
                "op": "route", "request": outcome.request, "session": session,
                "blocks": turn.blocks.tolist(), "tokens": turn.input_tokens,
                "output_tokens": turn.output_tokens,
            }
        )  # fmt: skip
        outcome.route_s = time.perf_counter() - wall_s
        outcome.node = answer["worker"]
        message: dict[str, Any] = {
            "request": outcome.request, "output_tokens": turn.output_tokens,
        }  # fmt: skip
        try:
            ticket = self._nodes[outcome.node].submit(
                outcome.request, turn.kept_blocks.tolist(), turn.input_tokens, turn.output_tokens
            )
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
