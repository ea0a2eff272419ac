"""A plan made by somebody who may try again: local search over where each request goes.

It starts from what every policy did, changes where a few requests go, plays the whole instance
again, and keeps what is better. It knows the future and the true costs because it has seen them. It
is not the optimum, only a plan that exists: a policy's distance to it is a lower estimate of its
regret. Short instances only, for every trial is a run.

Moves look at the requests that waited longest, since the 99th percentile is made of them: move
one of them, the rest of its session, or all of it; move what was ahead of it on its node; swap
its session with another node's; or unload the node where such requests are most frequent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.outcome import Records

Plan = NDArray[np.int64]
Evaluate = Callable[[Plan], Records]

_WORST_SHARE = 0.03
_EXPLORING_SHARE = 0.4  # of the budget, to develop every start
_WARMEST = 0.01  # worsening that is still accepted at the start, relative


@dataclass(frozen=True, slots=True)
class Point:
    """The best p99 TTFT after so many evaluations."""

    evaluations: int
    p99_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The best plan, its records, the starts' p99 under their own plans, and how it got there."""

    plan: Plan
    records: Records
    p99_s: float
    start: str
    starts: dict[str, float]
    curve: tuple[Point, ...]
    evaluations: int


@dataclass(slots=True, eq=False)
class _State:
    """A plan under improvement."""

    name: str
    plan: Plan
    records: Records
    score: float


def search(
    starts: Mapping[str, Plan],
    evaluate: Evaluate,
    nodes: int,
    rng: random.Random,
    *,
    evaluations: int,
    may_go_on: Callable[[], bool] = lambda: True,
    improved: Callable[[Point], None] = lambda point: None,
) -> Found:
    """The plan with the least p99 TTFT found in so many evaluations.

    Args:
        starts: plans to begin with, by name; entries outside the nodes are drawn at random.
        evaluate: what a plan leads to.
        nodes: how many nodes there are.
        rng: for this search alone.
        evaluations: budget; every start takes one.
        may_go_on: asked before each evaluation; false ends the search early.
        improved: told of each new best.

    Raises:
        ValueError: no starts, or a budget that does not cover them.
    """
    if not starts or evaluations < len(starts):
        raise ValueError(
            f"{evaluations} evaluations for {len(starts)} starts: give at least one plan, and "
            "one evaluation for each"
        )
    hunt = _Hunt(evaluate, nodes, rng, evaluations, may_go_on, improved)
    states = [hunt.begin(name, _valid(plan, nodes, rng)) for name, plan in starts.items()]
    first = {state.name: p99(state.records) for state in states}
    states.sort(key=lambda state: state.score)
    share = max(1, int((evaluations - len(states)) * _EXPLORING_SHARE) // len(states))
    for state in states:
        hunt.climb(state, share)
    states.sort(key=lambda state: state.score)
    hunt.climb(states[0], evaluations)
    best = hunt.best
    assert best is not None
    return Found(
        best.plan, best.records, p99(best.records), best.name, first,
        tuple(hunt.curve), hunt.used,
    )  # fmt: skip


def p99(records: Records) -> float:
    """99th percentile of TTFT over the measured requests; infinite if one was never served."""
    ttft_s = records.ttft_s[records.measured]
    if np.isnan(ttft_s).any():
        return float("inf")
    return float(np.quantile(ttft_s, 0.99))


def score(records: Records) -> float:
    """What the search lowers: the p99, and a little of the tail and the mean, to see a slope."""
    ttft_s = records.ttft_s[records.measured]
    if np.isnan(ttft_s).any():
        return float("inf")
    tail_s = np.sort(ttft_s)[-max(1, len(ttft_s) // 25) :]
    return p99(records) + 0.1 * float(tail_s.mean()) + 0.05 * float(ttft_s.mean())


class _Hunt:
    """The budget, the best so far, and the moves."""

    def __init__(
        self,
        evaluate: Evaluate,
        nodes: int,
        rng: random.Random,
        evaluations: int,
        may_go_on: Callable[[], bool],
        improved: Callable[[Point], None],
    ) -> None:
        self._evaluate, self._nodes, self._rng = evaluate, nodes, rng
        self._budget, self._may_go_on, self._improved = evaluations, may_go_on, improved
        self.used = 0
        self.best: _State | None = None
        self.curve: list[Point] = []

    def begin(self, name: str, plan: Plan) -> _State:
        """Play a plan."""
        records = self._evaluate(plan)
        self.used += 1
        state = _State(name, plan, records, score(records))
        self._note(state)
        return state

    def climb(self, state: _State, evaluations: int) -> None:
        """Improve a plan in place, for so many evaluations at most."""
        budget = min(evaluations, self._budget - self.used)
        for trial in range(budget):
            if not self._may_go_on():
                return
            plan = self._moved(state)
            new = self.begin(state.name, plan)
            leeway = _WARMEST * max(0.0, 1.0 - 2.0 * trial / budget)
            if new.score <= state.score * (1.0 + leeway):
                state.plan, state.records, state.score = new.plan, new.records, new.score
        if self.best is not None and self.best.name == state.name:
            state.plan, state.records, state.score = (
                self.best.plan, self.best.records, self.best.score,
            )  # fmt: skip

    def _note(self, state: _State) -> None:
        if self.best is None or p99(state.records) < p99(self.best.records):
            self.best = _State(state.name, state.plan, state.records, state.score)
            self.curve.append(Point(self.used, p99(state.records)))
            self._improved(self.curve[-1])

    def _moved(self, state: _State) -> Plan:
        """A few moves at once, more rarely many."""
        plan = state.plan.copy()
        moves = (self._one, self._rest, self._session, self._ahead, self._swap, self._unload)
        count = 1
        while self._rng.random() < 0.5 and count < 8:
            count += 1
        for _ in range(count):
            self._rng.choice(moves)(plan, state.records)
        return plan

    def _worst(self, records: Records) -> int:
        """One of the requests that waited longest."""
        wait_s = np.where(records.measured, np.nan_to_num(records.ttft_s, nan=np.inf), -np.inf)
        count = max(1, int(records.measured.sum() * _WORST_SHARE))
        return int(np.argpartition(wait_s, -count)[-count:][self._rng.randrange(count)])

    def _node(self, but: int) -> int:
        """Another node, drawn; the same if there is no other."""
        if self._nodes == 1:
            return but
        node = self._rng.randrange(self._nodes - 1)
        return node + (node >= but)

    def _one(self, plan: Plan, records: Records) -> None:
        request = self._worst(records)
        plan[request] = self._node(int(plan[request]))

    def _rest(self, plan: Plan, records: Records) -> None:
        request = self._worst(records)
        mine = np.flatnonzero(records.session == records.session[request])
        plan[mine[mine >= request]] = self._node(int(plan[request]))

    def _session(self, plan: Plan, records: Records) -> None:
        request = self._worst(records)
        plan[records.session == records.session[request]] = self._node(int(plan[request]))

    def _ahead(self, plan: Plan, records: Records) -> None:
        """Some of the requests that came to its node while it, or what it waited for, waited."""
        request = self._worst(records)
        node, at = plan[request], records.arrival_s[request]
        wait_s = np.nan_to_num(records.ttft_s[request], nan=1.0)
        before = (records.arrival_s <= at) & (records.arrival_s >= at - 2 * wait_s)
        blockers = np.flatnonzero(before & (plan == node))
        # The dearest ones block most.
        cost = records.new_tokens[blockers].astype(np.float64) + 1.0
        if not len(blockers):
            return
        picked = self._rng.choices(blockers.tolist(), cost.tolist(), k=self._rng.randint(1, 3))
        for blocker in picked:
            self._put(plan, records, blocker, self._node(int(node)))

    def _swap(self, plan: Plan, records: Records) -> None:
        """Its session goes to another node, and one from there comes instead."""
        request = self._worst(records)
        node = int(plan[request])
        other = self._node(node)
        there = np.flatnonzero(plan == other)
        if len(there):
            back = there[self._rng.randrange(len(there))]
            self._put(plan, records, int(back), node)
        self._put(plan, records, request, other)

    def _unload(self, plan: Plan, records: Records) -> None:
        """A block of sessions leaves the node that has most of the worst requests."""
        worst = [self._worst(records) for _ in range(8)]
        node = int(np.bincount(plan[worst], minlength=self._nodes).argmax())
        at = records.arrival_s[worst[0]]
        near = np.abs(records.arrival_s - at) <= 4 * np.nan_to_num(
            records.ttft_s[worst[0]], nan=1.0
        )
        sessions = np.unique(records.session[(plan == node) & near])
        if not len(sessions):
            return
        target = self._node(node)
        some = self._rng.sample(sessions.tolist(), max(1, len(sessions) // 8))
        plan[np.isin(records.session, some) & (plan == node)] = target

    def _put(self, plan: Plan, records: Records, request: int, node: int) -> None:
        """All turns of its session that are where it is."""
        together = (records.session == records.session[request]) & (plan == plan[request])
        plan[together] = node


def _valid(plan: Plan, nodes: int, rng: random.Random) -> Plan:
    copy = np.array(plan, dtype=np.int64)
    for request in np.flatnonzero((copy < 0) | (copy >= nodes)).tolist():
        copy[request] = rng.randrange(nodes)
    return copy
