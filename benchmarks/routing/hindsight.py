"""Local search over where each request goes, with the whole trace known.

It starts from what every policy did, changes where a few requests go, simulates the whole instance
again, and keeps what is better. The result is a plan that exists, not the optimum: a policy's
distance to it is a lower estimate of its regret. For short instances: every trial is a run.

Moves look at the requests that waited longest, since the 99th percentile is made of them: move one
of them, the rest of its session, what was ahead of it on its node, or swap its session with another
node's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from simulator.outcome import RequestRecords

Plan = NDArray[np.int64]
Evaluate = Callable[[Plan], RequestRecords]

_WORST_SHARE = 0.03
_EXPLORING_SHARE = 0.4  # of the budget, to develop every start
_WARMEST = 0.01  # relative worsening that is still accepted at the start of a climb
_MOST_MOVES = 8


@dataclass(slots=True, eq=False)
class Candidate:
    """A plan, what it leads to, and the policy whose plan it started from."""

    start: str
    plan: Plan
    records: RequestRecords
    score: float


@dataclass(slots=True, eq=False)
class Search:
    """Looks for the plan with the least p99 TTFT.

    Args:
        evaluate: what a plan leads to.
        nodes: how many nodes there are.
        rng: for this search alone.
        budget: evaluations in all; every start takes one.

    `curve` holds (evaluations, best p99 in seconds) of every improvement.
    """

    evaluate: Evaluate
    nodes: int
    rng: random.Random
    budget: int
    used: int = 0
    best: Candidate | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)

    def run(self, starts: Mapping[str, Plan]) -> Candidate:
        """The best plan found from these starts; a request of a start that went nowhere is drawn.

        Raises:
            ValueError: no starts, or a budget that does not cover them.
        """
        if not starts or self.budget < len(starts):
            raise ValueError(
                f"{self.budget} evaluations for {len(starts)} starts: give at least one plan, and "
                "one evaluation for each"
            )
        candidates = [self._evaluated(name, self._valid(plan)) for name, plan in starts.items()]
        share = int((self.budget - len(starts)) * _EXPLORING_SHARE) // len(starts)
        for candidate in sorted(candidates, key=lambda one: one.score):
            self._climb(candidate, max(share, 1))
        assert self.best is not None
        self._climb(replace(self.best), self.budget)
        return self.best

    def _evaluated(self, start: str, plan: Plan) -> Candidate:
        records = self.evaluate(plan)
        self.used += 1
        candidate = Candidate(start, plan, records, score(records))
        if self.best is None or p99_s(records) < p99_s(self.best.records):
            self.best = Candidate(start, plan, records, candidate.score)
            self.curve.append((self.used, p99_s(records)))
        return candidate

    def _climb(self, candidate: Candidate, evaluations: int) -> None:
        """Improve a candidate in place, for so many evaluations at most."""
        trials = min(evaluations, self.budget - self.used)
        for trial in range(trials):
            new = self._evaluated(candidate.start, self._moved(candidate))
            leeway = _WARMEST * max(0.0, 1.0 - 2.0 * trial / trials)
            if new.score <= candidate.score * (1.0 + leeway):
                candidate.plan, candidate.records = new.plan, new.records
                candidate.score = new.score

    def _moved(self, candidate: Candidate) -> Plan:
        """Mostly one move, more rarely several at once."""
        plan = candidate.plan.copy()
        moves = (self._move_one, self._move_rest, self._move_ahead, self._swap)
        for _ in range(_MOST_MOVES):
            self.rng.choice(moves)(plan, candidate.records)
            if self.rng.random() < 0.5:
                break
        return plan

    def _worst(self, records: RequestRecords) -> int:
        """One of the requests that waited longest."""
        wait_s = np.where(records.measured, np.nan_to_num(records.ttft_s, nan=np.inf), -np.inf)
        count = max(1, int(records.measured.sum() * _WORST_SHARE))
        return int(np.argpartition(wait_s, -count)[-count:][self.rng.randrange(count)])

    def _other_node(self, node: int) -> int:
        """Another node, drawn; the same if there is no other."""
        if self.nodes == 1:
            return node
        drawn = self.rng.randrange(self.nodes - 1)
        return drawn + (drawn >= node)

    def _move_one(self, plan: Plan, records: RequestRecords) -> None:
        request = self._worst(records)
        plan[request] = self._other_node(int(plan[request]))

    def _move_rest(self, plan: Plan, records: RequestRecords) -> None:
        """The request and the later turns of its session."""
        request = self._worst(records)
        session = np.flatnonzero(records.session == records.session[request])
        plan[session[session >= request]] = self._other_node(int(plan[request]))

    def _move_ahead(self, plan: Plan, records: RequestRecords) -> None:
        """Some of the requests that came to its node shortly before it, mostly large ones."""
        request = self._worst(records)
        node, arrival_s = plan[request], records.arrival_s[request]
        wait_s = np.nan_to_num(records.ttft_s[request], nan=1.0)
        since = (records.arrival_s <= arrival_s) & (records.arrival_s >= arrival_s - 2 * wait_s)
        ahead = np.flatnonzero(since & (plan == node))
        if not len(ahead):
            return
        weights = records.new_tokens[ahead] + 1.0
        picked = self.rng.choices(ahead.tolist(), weights.tolist(), k=self.rng.randint(1, 3))
        for blocker in picked:
            self._move_session(plan, records, blocker, self._other_node(int(node)))

    def _swap(self, plan: Plan, records: RequestRecords) -> None:
        """Its session goes to another node, and one from there comes instead."""
        request = self._worst(records)
        node = int(plan[request])
        other = self._other_node(node)
        there = np.flatnonzero(plan == other)
        if len(there):
            back = int(there[self.rng.randrange(len(there))])
            self._move_session(plan, records, back, node)
        self._move_session(plan, records, request, other)

    def _move_session(self, plan: Plan, records: RequestRecords, request: int, node: int) -> None:
        """All turns of the request's session that are where it is."""
        together = (records.session == records.session[request]) & (plan == plan[request])
        plan[together] = node

    def _valid(self, plan: Plan) -> Plan:
        copy = np.array(plan, dtype=np.int64)
        for request in np.flatnonzero((copy < 0) | (copy >= self.nodes)).tolist():
            copy[request] = self.rng.randrange(self.nodes)
        return copy


def p99_s(records: RequestRecords) -> float:
    """99th percentile of TTFT over the measured requests; infinite if one was never served."""
    ttft_s = records.ttft_s[records.measured]
    return float("inf") if np.isnan(ttft_s).any() else float(np.quantile(ttft_s, 0.99))


def score(records: RequestRecords) -> float:
    """What the search lowers: the p99, and a little of the tail and the mean, to see a slope."""
    ttft_s = records.ttft_s[records.measured]
    if np.isnan(ttft_s).any():
        return float("inf")
    tail_s = np.sort(ttft_s)[-max(1, len(ttft_s) // 25) :]
    return p99_s(records) + 0.1 * float(tail_s.mean()) + 0.05 * float(ttft_s.mean())
