"""The requests of one run: sessions of a workload, cut to fit minutes of real time, with arrivals.

The same seed gives the same sessions at the same times, whatever router is before the nodes. Load
is raised by more sessions; a turn waits for its predecessor and then for its pause. What is cut
is stated: turns a session, and the share of each pause that is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np

from workload.arrivals import poisson
from workload.expansion import expand
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

    def __post_init__(self) -> None:
        """Refuse a cut that leaves nothing."""
        if self.turns < 1:
            raise ValueError(f"turns is {self.turns}: give at least 1")
        if not (math.isfinite(self.pause) and self.pause >= 0):
            raise ValueError(f"pause is {self.pause}: give a share, zero or more")
        if self.scale < 1:
            raise ValueError(f"scale is {self.scale}: give at least 1")

    def apply(self, workload: Workload) -> Workload:
        """The workload, cut.

        Raises:
            ValueError: its blocks have no whole number of tokens at this scale.
        """
        if workload.block_tokens % self.scale:
            raise ValueError(
                f"scale {self.scale} does not divide blocks of {workload.block_tokens} tokens"
            )
        sessions = tuple(replace(s, turns=self._turns(s)) for s in workload.sessions)
        size = workload.block_tokens // self.scale
        return replace(workload, sessions=sessions, block_tokens=size)

    def _turns(self, session: SessionShape) -> tuple[TurnShape, ...]:
        return tuple(self._turn(turn) for turn in session.turns[: self.turns])

    def _turn(self, turn: TurnShape) -> TurnShape:
        return replace(
            turn,
            after_s=turn.after_s * self.pause,
            input_tokens=max(turn.input_tokens // self.scale, 1),
        )

    def __str__(self) -> str:
        return (
            f"sessions cut to {self.turns} turns, pauses to {100 * self.pause:g} %; prompts and "
            f"memory for KV divided by {self.scale}"
        )


@dataclass(frozen=True, slots=True)
class Arrival:
    """A session and when it comes, in emulated seconds from the start."""

    start_s: float
    session: SessionShape


def arrivals(workload: Workload, requests_per_s: float, seconds: float, seed: int) -> list[Arrival]:
    """Sessions that arrive within `seconds`, at a mean rate of `requests_per_s` turns.

    Raises:
        ValueError: the rate or the time is not positive, or the workload is empty.
    """
    if not (requests_per_s > 0 and seconds > 0):
        raise ValueError(f"give a rate and seconds above zero, not {requests_per_s}, {seconds}")
    if not workload.sessions:
        raise ValueError(f"workload {workload.name!r} has no sessions")
    turns = sum(len(session.turns) for session in workload.sessions) / len(workload.sessions)
    times = poisson(requests_per_s / turns, np.random.default_rng((seed, 1)))
    within = takewhile(lambda at_s: at_s < seconds, times)
    return [Arrival(at_s, s) for at_s, s in zip(within, expand(workload, seed), strict=False)]


def longest_tokens(found: Sequence[Arrival]) -> int:
    """The longest prompt with its output."""
    turns = (turn for arrival in found for turn in arrival.session.turns)
    return max((turn.input_tokens + turn.output_tokens for turn in turns), default=0)
