"""The router without its surroundings: events in, decisions out.

It joins what is known of the workers (`router.pool_view`) and a policy. The ingress feeds it what
happens (a worker joins, blocks are stored, a first token comes) and asks it where a request should
go; the simulator and the replay of a recorded log do exactly the same. Pure: each call takes the
time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kappa.protocol import Announcement, WorkerReport
from router.admission import Admission, alone_s, delay_s
from router.decision import Decision, NoWorkerError, OverloadedError, RouteRequest
from router.demand import Asked, Demand
from router.index.kv_events import KVEvent
from router.index.prefix_hash import PrefixHasher
from router.index.prefix_index import PrefixIndex
from router.lateness import Lateness
from router.offers import Candidate
from router.others import OtherRequests
from router.policy import LeastBacklog, Policy
from router.pool_view import PoolView
from router.state import ClusterState


@dataclass(slots=True)
class _Flight:
    chosen: Candidate
    informed: bool
    routed_s: float
    first_token: bool = False
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """index_blocks bounds the prefix index; stale_after_s a worker's silence.

    forecast_workers: pools of at most so many workers are forecast step by step for every
    decision; in larger ones queues are arithmetic (`router.fleet`), which costs microseconds.
    admission: whom to refuse; none: nobody. first: where the order of workers begins, from 0 to
    below 1; ingresses that share workers take different ones, so that ties are broken differently.
    """

    policy: Policy
    secret: int
    index_blocks: int = 1_000_000
    stale_after_s: float = 10.0
    calibrate: bool = True
    calibrate_requests: int | None = None
    forecast_workers: int = 4
    admission: Admission | None = None
    first: float = 0.0


class Router:
    """Decides where requests go, from what it was told."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.state = ClusterState(calibrate=config.calibrate, first=config.first)
        self.view = PoolView(
            config.secret, config.index_blocks, config.forecast_workers, self.state
        )
        self._flights: dict[str, _Flight] = {}
        self._outcomes = 0
        self._lateness = Lateness()
        self._demand = Demand()
        self._others = OtherRequests(self._flights, self.view.reserve_other, self.state.finish)

    # -- what happens -------------------------------------------------------------------------

    def join(self, announcement: Announcement, now_s: float) -> None:
        """A worker joins, or announces itself anew; raises MismatchError as `PoolView.join`."""
        self.view.join(announcement, now_s)

    def leave(self, worker: str) -> list[str]:
        """A worker is gone; returns the requests that were in flight there."""
        self._others.void(worker, 0.0)
        self.view.leave(worker)
        self.config.policy.left(worker)
        self._lateness.left(worker)
        lost = [r for r, flight in self._flights.items() if flight.chosen.worker == worker]
        for request_id in lost:
            del self._flights[request_id]
        return lost

    def blocks(self, events: Iterable[KVEvent]) -> None:
        """KV blocks were stored or removed somewhere; of a worker that is gone, too late to say."""
        self.view.blocks(events)

    def report(self, report: WorkerReport, now_s: float) -> None:
        """A worker measured something, or tells what other ingresses sent it."""
        if report.worker in self.state.workers:
            self._others.arrived(report, now_s)
        self.state.report(report, now_s)
        if report.worker in self.state.workers:
            self._others.left(report, now_s)
        if self.hasher is not None and report.worker in self.state.workers:
            spare_tokens = report.host_spare_blocks * self.hasher.block_tokens
            self.state.fleet.spare(report.worker, spare_tokens)

    def void(self, worker: str, now_s: float) -> None:
        """Nothing that a worker told is true any more: its blocks, and what others sent it.

        What this router sent there itself stays, until its ingress says what became of it.
        """
        self.view.void(worker)
        if self.index is not None and worker in self.state.workers:
            self._others.void(worker, now_s)

    def first_token(self, request_id: str, now_s: float) -> float | None:
        """A request's first token came; returns its TTFT, or None if it is not in flight."""
        flight = self._flights.get(request_id)
        if flight is None or flight.first_token:
            return None
        flight.first_token = True
        self._lateness.first_token(request_id, now_s)
        self._outcomes += 1
        limit = self.config.calibrate_requests
        if limit is not None and self._outcomes > limit:
            self.state.calibrate = False
        ttft_s = now_s - flight.routed_s
        chosen = flight.chosen
        worker = self.state.workers.get(chosen.worker)
        if worker is not None:
            self.state.prefilled(request_id, worker, now_s)
            if flight.informed and chosen.in_flight == 0:
                self.state.outcome(chosen.worker, chosen.compute_s, chosen.load_s, ttft_s)
        return ttft_s

    def tokens(self, request_id: str, count: int) -> None:
        """`count` more output tokens went to the client."""
        flight = self._flights.get(request_id)
        if flight is not None:
            flight.output_tokens += count

    def release(self, request_id: str, now_s: float, *, complete: bool = True) -> bool:
        """A request ended (done, failed, or its client left); False if it was not in flight."""
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return False
        self.state.finish(request_id, flight.chosen.worker, now_s)
        self._lateness.ended(request_id, now_s, flight.output_tokens if complete else 0)
        if complete and flight.output_tokens:
            self.view.outputs.add(flight.output_tokens)
        return True

    # -- what is asked ------------------------------------------------------------------------

    @property
    def index(self) -> PrefixIndex | None:
        """Who holds which prefix; None before a worker has joined."""
        return self.view.index

    @property
    def hasher(self) -> PrefixHasher | None:
        """What hashes prompts; None before a worker has joined."""
        return self.view.hasher

    @property
    def reservations(self) -> int:
        """Requests in flight that this router sent."""
        return len(self._flights)

    @property
    def in_flight(self) -> int:
        """Requests in flight in the cluster, as far as is known: its own, and others'."""
        return len(self._flights) + len(self._others)

    def in_flight_on(self, worker: str) -> int:
        """Requests in flight on one worker that this router sent."""
        return sum(flight.chosen.worker == worker for flight in self._flights.values())

    def others_on(self, worker: str) -> int:
        """Requests in flight on one worker that other ingresses sent."""
        return self._others.on(worker)

    def longest_wait_s(self, worker: str) -> float:
        """The longest predicted TTFT among those that this router has waiting on a worker."""
        return max(
            (
                flight.chosen.ttft_s
                for flight in self._flights.values()
                if flight.chosen.worker == worker and not flight.first_token
            ),
            default=0.0,
        )

    def route(self, request: RouteRequest, now_s: float) -> Decision:
        """Choose a worker and reserve it.

        Raises:
            NoWorkerError: none is known, heard from lately, and not excluded.
            OverloadedError: it would miss its objective (never for one that is tried again).
        """
        # Asked again under the same id: the earlier answer was not taken.
        self.release(request.request_id, now_s, complete=False)
        self._others.drop(request.request_id, now_s)
        decision, index = self._decide(request, now_s)
        offers = decision.offers
        assert offers is not None
        if self.config.admission is not None and request.sized and not request.retry:
            decision, index = self._admitted(self.config.admission, request, decision, index)
            assert decision.offers is not None
            offers = decision.offers
        self.state.fleet.reserve(request.request_id, offers, index)
        if decision.informed:
            self.config.policy.routed(offers, index)
        if self.view.forecasting:
            shadow = self.state.workers[decision.worker].shadow
            shadow.submit(self.view.job(request.request_id, offers, index), now_s)
        self._flights[request.request_id] = _Flight(decision.chosen, decision.informed, now_s)
        if self.config.admission is not None:
            self._lateness.sent(
                request.request_id, decision.worker, now_s, float(offers.ttft_s[index]),
                float(delay_s(offers)[index]), float(alone_s(offers)[index]),
                decision.chosen.node.dilation,
            )  # fmt: skip
        return decision

    def explain(self, request: RouteRequest, now_s: float) -> Decision:
        """What `route` would decide, without reserving anything."""
        return self._decide(request, now_s)[0]

    def backlogs_s(self, now_s: float) -> dict[str, tuple[float, float]]:
        """Seconds of queued work on each worker's (link, gpu)."""
        if self.view.forecasting:
            return {w: state.shadow.backlog_s(now_s) for w, state in self.state.workers.items()}
        return {w: self.state.fleet.backlog_s(w, now_s) for w in self.state.workers}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._flights

    def _decide(self, request: RouteRequest, now_s: float) -> tuple[Decision, int]:
        fleet = self.state.fleet
        slots = fleet.ready(now_s, self.config.stale_after_s, request.exclude)
        if not len(slots):
            raise self._no_worker(request)
        offers = self.view.offers(request, slots, now_s, fetches=self.config.policy.fetches)
        if self.view.forecasting:
            self.view.forecast(offers)
        policy = self.config.policy if request.informed else _FAIL_OPEN
        choice = policy.choose(offers)
        if choice.fetch is not None and offers.fetching is not None:
            offers = offers.fetching
        profiles = fleet.profiles(slots)
        decision = Decision(
            request_id=request.request_id,
            chosen=offers.candidate(choice.index, profiles[choice.index]),
            reason=choice.reason if request.informed else "uninformed_least_backlog",
            policy=policy.name,
            prompt_tokens=request.tokens if request.informed else 0,
            informed=request.informed,
            offers=offers,
            profiles=profiles,
            fetch=choice.fetch,
        )
        return decision, choice.index

    def _admitted(
        self, admission: Admission, request: RouteRequest, decision: Decision, index: int
    ) -> tuple[Decision, int]:
        """The decision if its worker is expected to meet the objective, else one for those that
        are."""
        offers = decision.offers
        assert offers is not None
        judged = admission.judge(
            self.state.fleet, offers, self._lateness, self._demand,
            self._sequences(offers.workers),
        )  # fmt: skip
        refused = judged.refused
        let_in = not refused.all()
        self._demand.judged(Asked(offers.now_s, judged.work_s, judged.slack_s, let_in))
        if not let_in:
            why, retry_after_s = judged.refusal()
            raise OverloadedError(f"the cluster is full: {why}", retry_after_s)
        row = index
        if refused[index]:
            late = frozenset(offers.workers[at] for at in np.flatnonzero(refused))
            again = replace(request, exclude=request.exclude | late)
            decision, index = self._decide(again, offers.now_s)
            row = offers.workers.index(decision.worker)
        if judged.displaces[row]:
            self._demand.lend(float(offers.compute_s[row]))
        return decision, index

    def _sequences(self, workers: list[str]) -> NDArray[np.float64]:
        """How many requests each runs at a time, as it announced; without end if it did not."""
        said = (self.state.workers[worker].announcement.max_sequences for worker in workers)
        return np.array([count or np.inf for count in said])

    def _no_worker(self, request: RouteRequest) -> NoWorkerError:
        known = self.state.workers.keys()
        excluded = len(known & request.exclude)
        return NoWorkerError(
            f"no worker is ready ({len(known)} known, {excluded} excluded, "
            f"{len(known) - excluded} not heard from in the last "
            f"{self.config.stale_after_s:g} s)"
        )


_FAIL_OPEN = LeastBacklog()
