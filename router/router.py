"""The router without its surroundings: events in, decisions out.

The ingress feeds it what happens (a worker joins, blocks are stored, a first token comes) and has
it decide where a request goes; the simulator and the replay of a recorded log do exactly the same.
Pure: each call takes the time. `router.pool` knows the workers, a policy picks one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from kappa.protocol import Announcement, WorkerReport
from router.admission import AdmissionRule, Demand, Evaluation, Lateness, alone_s, delay_s
from router.decision import Decision, NoWorkerError, OverloadedError, RouteRequest
from router.fleet import Flight
from router.index.kv_events import KVEvent
from router.index.prefix_hash import PrefixHasher
from router.index.prefix_index import PrefixIndex
from router.policy import LeastBacklog, Policy
from router.pool import PlannerOf, Pool, WorkerState, no_planner

_FAIL_OPEN = LeastBacklog()


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """index_blocks bounds the prefix index; stale_after_s a worker's silence.

    forecast_workers: pools of at most so many workers are forecast step by step for every
    decision; in larger ones queues are arithmetic (`router.pricing`), which costs microseconds.
    admission: which requests are rejected; none: none. first: where the order of workers begins,
    from 0 to below 1; ingresses that share workers take different ones, so that ties are broken
    differently. planner_of: makes the load planner that a worker announces; without one such
    workers are refused.
    """

    policy: Policy
    secret: int
    index_blocks: int = 1_000_000
    stale_after_s: float = 10.0
    calibrate: bool = True
    calibrate_requests: int | None = None
    forecast_workers: int = 4
    admission: AdmissionRule | None = None
    first: float = 0.0
    planner_of: PlannerOf = no_planner


class Router:
    """Decides where requests go, from what was reported to it."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.pool = Pool(
            config.secret, config.index_blocks, config.forecast_workers, config.first,
            config.planner_of,
        )  # fmt: skip
        self.pool.calibrate = config.calibrate
        self._sent = 0
        self._first_tokens = 0
        self._lateness = Lateness()
        self._demand = Demand()

    # -- what happens -------------------------------------------------------------------------

    def join(self, announcement: Announcement, now_s: float) -> None:
        """A worker joins, or announces itself anew; raises MismatchError as `Pool.join`."""
        self.pool.join(announcement, now_s)

    def leave(self, worker: str) -> list[str]:
        """A worker is gone; returns those of its requests that this router sent."""
        lost = [flight.request_id for flight in self.pool.leave(worker) if flight.own]
        self._sent -= len(lost)
        self.config.policy.left(worker)
        self._lateness.left(worker)
        return lost

    def blocks(self, events: Iterable[KVEvent]) -> None:
        self.pool.blocks(events)

    def report(self, report: WorkerReport, now_s: float) -> None:
        self.pool.report(report, now_s)

    def invalidate(self, worker: str, now_s: float) -> None:
        """Nothing that a worker reported is true any more: its blocks, and what others sent it.

        What this router sent there itself stays, until its ingress releases it.
        """
        self.pool.invalidate(worker, now_s)

    def first_token(self, request_id: str, now_s: float) -> float | None:
        """A request's first token came; returns its TTFT, or None if it is not in flight."""
        flight = self._own(request_id)
        if flight is None or flight.first_token_s is not None:
            return None
        flight.first_token_s = now_s
        self._lateness.first_token(flight, now_s)
        self._first_tokens += 1
        limit = self.config.calibrate_requests
        if limit is not None and self._first_tokens > limit:
            self.pool.calibrate = False
        self.pool.prefilled(self.workers[flight.worker], request_id, now_s)
        ttft_s = now_s - flight.sent_s
        if flight.informed and flight.chosen is not None and flight.chosen.in_flight == 0:
            self.pool.outcome(flight, ttft_s)
        return ttft_s

    def tokens(self, request_id: str, count: int) -> None:
        """`count` more output tokens went to the client."""
        flight = self._own(request_id)
        if flight is not None:
            flight.output_tokens += count

    def release(self, request_id: str, now_s: float, *, complete: bool = True) -> bool:
        """A request ended (done, failed, or its client left); False if it was not in flight."""
        return self._release(request_id, now_s, complete=complete)

    def _release(self, request_id: str, now_s: float, *, complete: bool) -> bool:
        flight = self._own(request_id)
        if flight is None:
            return False
        self._sent -= 1
        self.pool.finish(flight, now_s)
        self._lateness.ended(flight, now_s, flight.output_tokens if complete else 0)
        if complete and flight.output_tokens:
            self.pool.outputs.add(flight.output_tokens)
        return True

    # -- what is known ------------------------------------------------------------------------

    @property
    def workers(self) -> dict[str, WorkerState]:
        """The workers by name, in the order in which they joined."""
        return self.pool.workers

    @property
    def index(self) -> PrefixIndex | None:
        """Who holds which prefix; None before a worker has joined."""
        return self.pool.index

    @property
    def hasher(self) -> PrefixHasher | None:
        """What hashes prompts; None before a worker has joined."""
        return self.pool.hasher

    @property
    def reservations(self) -> int:
        """Requests in flight that this router sent."""
        return self._sent

    @property
    def in_flight(self) -> int:
        """Requests in flight in the cluster, as far as is known: its own, and others'."""
        return len(self.pool.flights)

    def in_flight_on(self, worker: str) -> int:
        """Requests in flight on one worker that this router sent."""
        return sum(flight.own for flight in self._flights_on(worker))

    def remote_in_flight_on(self, worker: str) -> int:
        """Requests in flight on one worker that other ingresses sent."""
        return sum(not flight.own for flight in self._flights_on(worker))

    def longest_wait_s(self, worker: str) -> float:
        """The longest predicted TTFT among those that this router has waiting on a worker."""
        return max(
            (
                flight.chosen.ttft_s
                for flight in self._flights_on(worker)
                if flight.chosen is not None and flight.first_token_s is None
            ),
            default=0.0,
        )

    def backlogs_s(self, now_s: float) -> dict[str, tuple[float, float]]:
        """Seconds of queued work on each worker's (link, gpu)."""
        if self.pool.forecasting:
            return {w: state.queue.backlog_s(now_s) for w, state in self.workers.items()}
        return {w: self.pool.fleet.backlog_s(w, now_s) for w in self.workers}

    def __contains__(self, request_id: str) -> bool:
        return self._own(request_id) is not None

    def _own(self, request_id: str) -> Flight | None:
        flight = self.pool.flights.get(request_id)
        return flight if flight is not None and flight.own else None

    def _flights_on(self, worker: str) -> Iterable[Flight]:
        state = self.workers.get(worker)
        return state.flights.values() if state is not None else ()

    # -- decisions ----------------------------------------------------------------------------

    def route(self, request: RouteRequest, now_s: float) -> Decision:
        """Choose a worker and reserve it.

        Raises:
            NoWorkerError: none is known, has reported recently, and is not excluded.
            OverloadedError: it would miss its objective (never for one that is tried again).
        """
        # Routed again under the same id: the earlier answer was not taken.
        if not self._release(request.request_id, now_s, complete=False):
            remote = self.pool.flights.get(request.request_id)
            if remote is not None:
                self.pool.finish(remote, now_s)
        decision = self._decide(request, now_s)
        if self.config.admission is not None and request.sized and not request.retry:
            decision = self._admitted(self.config.admission, request, decision)
        self._commit(decision)
        return decision

    def explain(self, request: RouteRequest, now_s: float) -> Decision:
        """What `route` would decide, without reserving anything, and without admission."""
        return self._decide(request, now_s)

    def _decide(self, request: RouteRequest, now_s: float) -> Decision:
        slots = self.pool.fleet.ready(now_s, self.config.stale_after_s, request.exclude)
        if not len(slots):
            raise self._no_worker(request)
        policy = self.config.policy if request.informed else _FAIL_OPEN
        estimates = self.pool.estimate(request, slots, now_s, fetches=self.config.policy.fetches)
        choice = policy.choose(estimates)
        if choice.fetch is not None and estimates.fetching is not None:
            estimates = estimates.fetching
        nodes = self.pool.fleet.nodes(slots)
        return Decision(
            request_id=request.request_id,
            chosen=estimates.candidate(choice.index, nodes[choice.index]),
            reason=choice.reason if request.informed else "uninformed_least_backlog",
            policy=policy.name,
            prompt_tokens=request.tokens if request.informed else 0,
            informed=request.informed,
            estimates=estimates,
            index=choice.index,
            nodes=nodes,
            fetch=choice.fetch,
        )

    def _commit(self, decision: Decision) -> None:
        """Reserve what was decided."""
        estimates, index, now_s = decision.priced, decision.index, decision.priced.now_s
        flight = self.pool.reserve(decision.request_id, estimates, index)
        flight.own, flight.sent_s = True, now_s
        flight.chosen, flight.informed = decision.chosen, decision.informed
        self._sent += 1
        if decision.informed:
            self.config.policy.routed(estimates, index)
        if self.config.admission is not None:
            flight.tpot_s = float(alone_s(estimates)[index])
            self._lateness.sent(flight, now_s, float(delay_s(estimates)[index]))

    def _admitted(
        self, admission: AdmissionRule, request: RouteRequest, decision: Decision
    ) -> Decision:
        """The decision if its worker is expected to meet the objective, else one for those that
        are."""
        estimates = decision.priced
        found = admission.evaluate(self.pool.fleet, estimates, self._lateness, self._demand)
        rejected = found.rejected
        self._demand.evaluated(
            estimates.now_s, found.work_s, found.slack_s, admitted=not rejected.all()
        )
        if rejected.all():
            raise _overloaded(found)
        if rejected[decision.index]:
            late = frozenset(estimates.workers[row] for row in np.flatnonzero(rejected))
            others = replace(request, exclude=request.exclude | late)
            decision = self._decide(others, estimates.now_s)
        row = estimates.workers.index(decision.worker)
        if found.blocks[row]:
            self._demand.spend(float(estimates.compute_s[row]))
        return decision

    def _no_worker(self, request: RouteRequest) -> NoWorkerError:
        known = self.workers.keys()
        excluded = len(known & request.exclude)
        return NoWorkerError(
            f"no worker is ready ({len(known)} known, {excluded} excluded, "
            f"{len(known) - excluded} not heard from in the last "
            f"{self.config.stale_after_s:g} s)"
        )


def _overloaded(found: Evaluation) -> OverloadedError:
    why, retry_after_s = found.why()
    return OverloadedError(f"the cluster is full: {why}", retry_after_s)
