"""Policies choose the worker for a request: a row of the `Estimates`, with a reason.

* `priced`: least predicted TTFT, plus what the choice takes from others; `priced_fetch` may also
  bring KV from a peer first.
* `ttft`: least predicted time to first token, plus the delay it puts on those that decode there.
* `threshold`: paper 001 §7.3 with caches: on each worker the longer of the request's load and its
  computing is compared.
* `threshold_literal`: §7.3 as printed. It looks at one ratio and at links, not at where the cache
  is, nor at the queue (except to break ties): kept as explanation and baseline.
* `least_backlog`: least queued work; used when nothing is known of the request.

What other systems do is in `kappa_benchmarks.baselines.routing`; `policy_named` finds any by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from kappa.compiled import compiled
from kappa.host import ROUTING_POLICIES, installed
from kappa_router.decision import ESTIMATE, Choice, Estimates, Fetch, Floats

# A busy period is not longer than recent use reaches back.
_FULL = 0.95


class Policy(Protocol):
    """Picks a worker; may remember what it routed."""

    name: str
    # It may bring KV from a peer first.
    fetches: bool

    def choose(self, estimates: Estimates) -> Choice:
        """Pick one of `estimates` (at least one)."""

    def routed(self, estimates: Estimates, index: int, request_id: str = "") -> None:
        """The request went to row `index`."""

    def progressed(self, request_id: str, now_s: float, *, ended: bool) -> None:
        """A request's first token came, or it ended; of those that others sent, too."""

    def left(self, worker: str) -> None:
        """A worker is gone."""


class Stateless:
    """The common part of policies without a memory."""

    fetches = False

    def routed(self, estimates: Estimates, index: int, request_id: str = "") -> None:
        """Nothing to remember."""

    def progressed(self, request_id: str, now_s: float, *, ended: bool) -> None:
        """Nothing to learn."""

    def left(self, worker: str) -> None:
        """Nothing to forget."""


class Priced(Stateless):
    """Predicted TTFT, plus a price for the work that the choice makes without need.

    Least predicted TTFT is selfish: rather than wait for the node that holds its cache, a request
    recomputes it elsewhere, and what it burns there is missing when others come, who then do the
    same. The part of its work that it has to bring anyway is not the choice's doing; what it
    computes beyond that, because it goes where less is held, is. A job of s seconds that joins a
    first-come queue of Q seconds delays everybody who comes before that queue next runs empty, each
    by s; in a queue with load rho and r arrivals a second these are r (Q + s) / (1 - rho) on
    average (Haviv and Ritov, externalities in the M/G/1 queue). So s wasted seconds cost
    s r (Q + s) / (1 - rho): seconds of others' waiting, which rise with load by themselves, and no
    constant to tune. r, Q and rho are means over the fleet: a node's own figures mislead where
    sessions wait for their answers before they ask again, since a jammed node gets few requests.

    Decoding is shared work too: the request's prompt holds up all that are in flight beside it, and
    each token that it will generate makes a step longer for them. What that costs is counted in
    what the objective allows: an answer of O tokens may take O times the TPOT limit, and the
    request's prompt and tokens use a share d of that, at most 1. A request with predicted seconds x
    times its limit is late with likelihood L(x) = 1 / (1 + x^-k), so each in flight costs d times
    L's derivative there, and the request itself L of its own first and later tokens, as shares of
    the TTFT limit (docs/adr/0107-the-objective-in-the-price.md, and
    docs/adr/0179-a-place-and-being-late-are-priced.md). And while the node is busy, or has no place
    free among those that run at a time, for longer than the least TTFT objective, who comes to it
    is late: for what the request adds to that time, each arrival of the node's own rate loses a
    TTFT limit (docs/adr/0129).
    """

    def __init__(self, name: str = "priced", *, fetches: bool = False) -> None:
        self.name, self.fetches = name, fetches
        # Compiled now rather than while the first request waits.
        _cheapest(np.ones(1, dtype=ESTIMATE), np.empty(1))

    def choose(self, estimates: Estimates) -> Choice:
        score = np.empty(len(estimates))
        soonest = _choice(*_cheapest(estimates.rows, score))
        index, fetching = soonest.index, estimates.fetching
        if fetching is not None:
            # It must gain the request itself more than the transfer takes of two cards: a fetch
            # that only spreads those that decode, or saves little, fills nodes that others fetch
            # to.
            sooner = fetching.ttft_s + fetching.fetch_s < estimates.ttft_s[index]
            shared_s = fetch_externality_s(fetching) + fetching.interference_s
            cost_s = fetching.ttft_s + shared_s
            fetched = np.where(sooner, cost_s, np.inf)
            best = int(fetched.argmin())
            tokens = fetching.cached_tokens[best] - estimates.cached_tokens[best]
            if tokens > 0 and fetched[best] < score[index]:
                return Choice(best, "peer_fetch", Fetch(fetching.fetch_from, int(tokens)))
        return soonest


@compiled
def _cheapest(rows: Any, score: Floats) -> tuple[int, int]:
    """`_soonest` by own wait, congestion externality and interference, in seconds, which `score`
    is filled in with.

    The externality: others' waiting for computing more than the least that any worker would. The
    interference: what later tokens of those in flight beside it cost.
    """
    workers = len(rows)
    needed_tokens = rows.new_tokens.min()
    use = min(rows.gpu_use.sum() / workers, _FULL)
    price = rows.prefills_per_s.sum() / workers / (1 - use)
    queue_s = rows.gpu_backlog_s.sum() / workers
    for i in range(workers):
        row = rows[i]
        wasted_s = (1 - needed_tokens / row.new_tokens) * row.work_s
        externality_s = wasted_s * (wasted_s + queue_s) * price
        score[i] = row.ttft_s + externality_s + row.interference_s
    return _soonest(rows, score)


def fetch_externality_s(estimates: Estimates) -> Floats:
    """Waiting that fetching and loading add to those who fetch and load after it, in seconds."""
    # Where it would take for ever, its own TTFT says so.
    moved_s = np.where(np.isfinite(estimates.fetch_s), estimates.fetch_s, 0.0)
    loads_per_s = float(estimates.loads_per_s.sum()) / len(estimates)
    cost_s: Floats = moved_s * loads_per_s * (estimates.net_backlog_s + moved_s)
    return cost_s


class Threshold(Stateless):
    """Each worker's bound decides whether its load or its compute is compared.

    Where the request's load takes as long as its computing or longer (`kappa.cost.bound`), the
    worker holds the prefix: of these workers, the one that has it loaded first. Elsewhere computing
    takes longer: of those, the cheapest compute, by price times seconds if all have a price. Of
    these two, the one that is sooner. The queue on the resource compared counts; what the other
    resource takes does not, which is what a threshold leaves out.
    """

    name = "threshold"

    def choose(self, estimates: Estimates) -> Choice:
        memory_bound = estimates.load_s >= estimates.compute_s
        loaded_s = estimates.link_backlog_s + estimates.load_s
        computed_s = estimates.gpu_backlog_s + estimates.compute_s
        price = estimates.cost_per_hour if (estimates.cost_per_hour > 0).all() else 1.0
        # Otherwise equal, the slower link serves as well: keep the fast one free.
        ties = estimates.in_flight, estimates.h2d_bytes_per_s
        load = least(np.where(memory_bound, loaded_s, np.inf), *ties)
        compute = least(np.where(memory_bound, np.inf, computed_s * price), *ties)
        loads_sooner = loaded_s[load] <= computed_s[compute]
        if memory_bound[load] and (memory_bound[compute] or loads_sooner):
            return Choice(load, "memory_bound_soonest_load")
        return Choice(compute, "compute_bound_cheap_compute")


class ThresholdLiteral(Stateless):
    """Paper 001 §7.3: memory-bound requests to the fastest link, others to the cheapest compute.

    The request's ratio is the one at the worker that holds most of its prompt in the host tier,
    and it is memory-bound if it is so there, by that worker's constant (Eq. 6).
    """

    name = "threshold_literal"

    def choose(self, estimates: Estimates) -> Choice:
        backlog_s, speed = estimates.backlog_s, estimates.h2d_bytes_per_s
        holder = least(-estimates.cached_tokens, backlog_s)
        ratio = estimates.cached_tokens[holder] / max(estimates.new_tokens[holder], 1.0)
        if ratio >= estimates.kappa_literal[holder]:
            return Choice(least(-speed, backlog_s, estimates.in_flight), "memory_bound_fast_link")
        # A price is no price unless all have one.
        priced = bool((estimates.cost_per_hour > 0).all())
        cost = estimates.cost_per_hour / estimates.flops_per_s if priced else np.zeros(len(speed))
        # With equal prices the slower link computes as well: keep the fast one free.
        index = least(cost, backlog_s, estimates.in_flight, speed)
        return Choice(index, "compute_bound_cheap_compute")


class LeastTtft(Stateless):
    """Least predicted TTFT plus delay of those that decode there."""

    name = "ttft"

    def __init__(self) -> None:
        # Compiled now, as in `Priced`.
        _soonest(np.ones(1, dtype=ESTIMATE), np.empty(1))

    def choose(self, estimates: Estimates) -> Choice:
        score = estimates.ttft_s + estimates.tpot_impact_s
        return _choice(*_soonest(estimates.rows, score))


class LeastBacklog(Stateless):
    """Least queued work, then fewest in flight."""

    name = "least_backlog"

    def choose(self, estimates: Estimates) -> Choice:
        ties = estimates.in_flight, -estimates.h2d_bytes_per_s
        return Choice(least(estimates.backlog_s, *ties), "least_backlog")


def _choice(index: int, reason: int) -> Choice:
    return Choice(index, _REASONS[reason])


_REASONS = "shorter_queue", "faster_load", "less_compute", "less_harm", "only_worker", "tie"
_ONLY, _TIE = 4, 5


@compiled
def _soonest(rows: Any, score: Floats) -> tuple[int, int]:
    """The row of the least score, as `least` has it by fewest in flight and then by the fastest
    link; and the place in `_REASONS` of what set it apart from the second best: seconds of queue,
    load, compute and delay. No reason names the overhead besides them."""
    index = 0
    for i in range(1, len(rows)):
        row, best = rows[i], rows[index]
        if score[i] != score[index]:
            sooner = score[i] < score[index]
        elif row.in_flight != best.in_flight:
            sooner = row.in_flight < best.in_flight
        else:
            sooner = row.h2d_bytes_per_s > best.h2d_bytes_per_s
        if sooner:
            index = i
    if len(rows) == 1:
        return index, _ONLY
    second, second_s = 0, math.inf
    for i in range(len(rows)):
        if i != index and score[i] < second_s:
            second, second_s = i, score[i]
    if second_s - score[index] <= 1e-9:
        return index, _TIE
    lost, got = _parts_s(rows[second]), _parts_s(rows[index])
    reason = 0
    for part in range(1, len(lost)):
        if lost[part] - got[part] > lost[reason] - got[reason]:
            reason = part
    return index, reason


@compiled
def _parts_s(row: Any) -> tuple[float, float, float, float]:
    queue_s = row.ttft_s - row.load_s - row.compute_s - row.fixed_s
    return queue_s, row.load_s, row.compute_s, row.tpot_impact_s


def least(score: Floats, *ties: Floats) -> int:
    """Index of the least score; equal ones by the least of each of `ties` in turn, then first."""
    index = int(score.argmin())
    equal = score == score[index]
    if np.count_nonzero(equal) == 1:
        return index
    rows = np.flatnonzero(equal)
    for tie in ties:
        among = tie[rows]
        rows = rows[among == among.min()]
    return int(rows[0])


OURS: dict[str, Callable[[], Policy]] = {
    "priced": Priced,
    "priced_fetch": partial(Priced, "priced_fetch", fetches=True),
    "ttft": LeastTtft,
    "threshold": Threshold,
    "threshold_literal": ThresholdLiteral,
    "least_backlog": LeastBacklog,
}
"""Name to a maker of a fresh one."""


def policy_named(spec: str, seed: int = 0) -> Policy:
    """The policy called `spec`, fresh; `name:key=value,...` sets parameters of an installed one.

    An entry point of `kappa.routing_policies` is a function of the spec and the seed.

    Raises:
        ValueError: lists those that exist, or the parameters that the named one takes.
    """
    if spec in OURS:
        return OURS[spec]()
    others = installed(ROUTING_POLICIES)
    entry = others.get(spec.partition(":")[0])
    if entry is None:
        raise ValueError(f"unknown policy {spec!r}: choose one of {sorted([*OURS, *others])}")
    made: Policy = entry.load()(spec, seed)
    return made
