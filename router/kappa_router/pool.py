"""The state of a router: the workers of all models, their caches, and the requests in flight. Pure.

`router.router` decides by it. It joins the prefix index, the fleet, calibration, load plans and the
engine queue models of the workers. Of each model there is an index of its own, so that no prefix of
one is ever counted for another.

Several routers decide over the same workers, and each would send the next request to the worker
that looks idle to it. So every worker reports to all of them what arrived and what left; a request
that this router did not send is reserved as if it had. The worker is the truth: now and then it
lists all its requests, and a reservation that it does not list is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kappa.protocol import Announcement, Arrival, WorkerReport
from kappa_router.admission import Demand, Lateness
from kappa_router.calibration import Calibration, OutputLengths
from kappa_router.config import RouterConfig, RowPlanner
from kappa_router.decision import Estimates, Held, MismatchError, PricedPrompt, Slots
from kappa_router.engine_queue import EngineJob, EngineQueue
from kappa_router.fleet import Fleet, Flight
from kappa_router.index.kv_event_types import KVEvent, WorkerGone, WorkerReset
from kappa_router.index.prefix_hash import PrefixHasher
from kappa_router.index.prefix_index import PrefixIndex


@dataclass(slots=True, eq=False)
class ModelState:
    """The common state of the workers of one model."""

    # The model's, by which `Router` knows the places of its workers.
    number: int
    hasher: PrefixHasher
    index: PrefixIndex
    # Of their blocks; empty while it has no workers.
    fingerprint: str = ""
    # How long its answers were.
    outputs: OutputLengths = field(default_factory=OutputLengths)
    # Its requests as admission evaluated them.
    demand: Demand = field(default_factory=Demand)


@dataclass(slots=True)
class WorkerState:
    """One worker as the router sees it."""

    announcement: Announcement
    model: ModelState
    queue: EngineQueue
    calibration: Calibration
    # The latest; None before the first.
    report: WorkerReport | None = None
    # When it last announced or reported something.
    seen_s: float = 0.0
    # None: it loads prefixes whole.
    planner: RowPlanner | None = None
    # Requests in flight there by id, those of other routers included.
    flights: dict[str, Flight] = field(default_factory=dict)


class Pool:
    """The state of workers and requests, by their reports.

    workers: by name, in the order in which they joined. flights: requests in flight in the cluster,
    as far as is known; reservations: how many of them this router sent. models: by name, in the
    order of their first workers.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.workers: dict[str, WorkerState] = {}
        self.flights: dict[str, Flight] = {}
        self.reservations = 0
        self.fleet = Fleet(config.first, config.objective)
        self.models: dict[str, ModelState] = {}
        self.calibrating = config.calibrate
        self._first_tokens = 0
        self.lateness = Lateness()
        # Of the worker in each place of the fleet: where its model's index answers for it, and the
        # number of its model.
        self.columns: Slots = np.zeros(0, dtype=np.intp)
        self.numbers: Slots = np.zeros(0, dtype=np.intp)
        self._any_planner = self.tiers_shared = False

    # -- workers ------------------------------------------------------------------------------

    def join(self, announcement: Announcement, now_s: float) -> None:
        """A worker joins, or announces itself again after it was measured.

        Raises:
            MismatchError: its blocks would not mean the same as the others'.
            ValueError: its load planner cannot be used.
        """
        worker = announcement.worker
        state = self.workers.get(worker)
        planner = self.config.planner_of(announcement)
        model = self._model_for(announcement, state)
        model.fingerprint = announcement.fingerprint
        if state is None:
            calibration = Calibration(announcement)
            queue = EngineQueue(calibration.speed)
            state = self.workers[worker] = WorkerState(announcement, model, queue, calibration)
        elif any(
            getattr(state.announcement, name) != getattr(announcement, name)
            for name in ("node", "step", "kv_bytes_per_token")
        ):
            # What was learnt corrects the old figures; the overhead has nothing of them.
            state.calibration = Calibration(announcement, state.calibration.overhead_s)
        state.announcement, state.planner, state.seen_s = announcement, planner, now_s
        slot = self.fleet.join(announcement, now_s)
        self._calibrated(state)
        if slot >= len(self.columns):
            more = np.zeros(slot + 1 - len(self.columns), dtype=np.intp)
            self.columns = np.concatenate([self.columns, more])
            self.numbers = np.concatenate([self.numbers, more])
        self.columns[slot], self.numbers[slot] = model.index.column(worker), model.number
        self._note_kinds()

    def _model_for(self, announcement: Announcement, state: WorkerState | None) -> ModelState:
        """The state of its model. Its first worker sets the blocks; MismatchError for others."""
        name, size = announcement.model, announcement.block_tokens
        if state is not None and state.announcement.model != name:
            raise MismatchError(
                f"worker {announcement.worker} announces model {name}, and was of model "
                f"{state.announcement.model}: a worker serves one model for life"
            )
        model = self.models.get(name)
        served = any(each.model is model for each in self.workers.values())
        if model is None or (not served and model.hasher.block_tokens != size):
            hasher = PrefixHasher(size, self.config.secret)
            number = len(self.models) if model is None else model.number
            index = PrefixIndex(hasher, self.config.index_blocks)
            model = self.models[name] = ModelState(number, hasher, index)
        if served and announcement.fingerprint != model.fingerprint:
            raise MismatchError(
                f"worker {announcement.worker} has fingerprint {announcement.fingerprint}, the "
                f"pool {model.fingerprint}: model, dtype, block size or chat template differ; "
                "engine.dtype and engine.block_tokens make vLLM's choice one"
            )
        if size != model.hasher.block_tokens:
            raise MismatchError(
                f"worker {announcement.worker} has blocks of {size} tokens, the pool of "
                f"{model.hasher.block_tokens}: give them one by engine.block_tokens"
            )
        return model

    def leave(self, worker: str) -> list[str]:
        """A worker is gone, with all that it held; returns those of its requests that this router
        sent."""
        self.config.policy.left(worker)
        self.lateness.left(worker)
        state = self.workers.pop(worker, None)
        if state is None:
            return []
        for request_id in state.flights:
            del self.flights[request_id]
        self.fleet.leave(worker)
        self._note_kinds()
        state.model.index.handle(WorkerGone(worker))
        lost = [flight.request_id for flight in state.flights.values() if flight.own]
        self.reservations -= len(lost)
        return lost

    def _note_kinds(self) -> None:
        """Note whether any worker plans loads, or shares a tier."""
        states = self.workers.values()
        self.tiers_shared = any(state.announcement.shared_tier for state in states)
        self._any_planner = any(state.planner is not None for state in states)

    def blocks(self, events: Iterable[KVEvent]) -> None:
        """KV blocks were stored or removed somewhere; those of a worker that is gone are late."""
        for event in events:
            state = self.workers.get(event.worker)
            if state is not None:
                state.model.index.handle(event)

    def invalidate(self, worker: str, now_s: float) -> None:
        """Nothing that a worker reported is true any more: its blocks, and what others sent it.

        What this router sent there itself stays, until its decider releases it.
        """
        state = self.workers.get(worker)
        if state is None:
            return
        state.model.index.handle(WorkerReset(worker))
        for flight in [f for f in state.flights.values() if not f.own]:
            self.finish(flight, now_s)

    def report(self, report: WorkerReport, now_s: float) -> None:
        """A worker measured something, or reports what other deciders sent it."""
        state = self.workers.get(report.worker)
        if state is None:
            return
        # Arrivals come before admissions, which correct them.
        self._reserve_remote(report.worker, report.arrived, now_s)
        if self.calibrating:
            state.calibration.reported(report)
            self._learn(state, now_s)
        state.report, state.seen_s = report, now_s
        spare_tokens = report.host_spare_blocks * state.announcement.block_tokens
        self.fleet.reported(report.worker, now_s, spare_tokens, report.net_tokens_per_s)
        for a in report.admitted:
            state.queue.correct(
                a.request_id, a.device_tokens, a.host_tokens, a.new_tokens, now_s, a.disk_tokens
            )
            flight = state.flights.get(a.request_id)
            if flight is not None:
                self.fleet.correct(flight, a.host_tokens, a.new_tokens, a.disk_tokens)
        for request_id in report.prefilled:
            self._prefilled(state, request_id, now_s)
        self._settle(state, report, now_s)

    def others(self, report: WorkerReport, now_s: float) -> None:
        """Other routers tell what they sent a worker, and what of that is over (`arrived`,
        `finished`, `in_flight`); the worker itself was not heard."""
        state = self.workers.get(report.worker)
        if state is not None:
            self._reserve_remote(report.worker, report.arrived, now_s)
            self._settle(state, report, now_s)

    def _settle(self, state: WorkerState, report: WorkerReport, now_s: float) -> None:
        """Drop what has left, and what is missing where all in flight are listed; take what is
        new there."""
        gone = [state.flights[name] for name in report.finished if name in state.flights]
        if report.in_flight is not None:
            there = {arrival.request_id for arrival in report.in_flight}
            gone += [f for name, f in state.flights.items() if name not in there]
        for flight in gone:
            # Of its own requests the decider knows itself when they are over.
            if not flight.own and flight.request_id in state.flights:
                self.finish(flight, now_s)
        self._reserve_remote(report.worker, report.in_flight or (), now_s)

    def _learn(self, state: WorkerState, now_s: float) -> None:
        if state.calibration.fit(now_s):
            self._calibrated(state)

    def _calibrated(self, state: WorkerState) -> None:
        state.queue.speed = state.calibration.speed
        learnt = state.calibration
        self.fleet.calibrate(
            state.announcement.worker, learnt.speed, learnt.overhead_s, learnt.certainty
        )

    # -- requests in flight -------------------------------------------------------------------

    def first_token(self, request_id: str, now_s: float) -> float | None:
        """A request's first token came; returns its TTFT, or None if it is not in flight."""
        flight = self._own(request_id)
        if flight is None or flight.first_token_s is not None:
            return None
        flight.first_token_s = now_s
        self.lateness.first_token(flight, now_s)
        self._first_tokens += 1
        limit = self.config.calibrate_requests
        if limit is not None and self._first_tokens > limit:
            self.calibrating = False
        state = self.workers[flight.worker]
        self._prefilled(state, request_id, now_s)
        if self.calibrating:
            state.calibration.first_token(flight, now_s)
            self._learn(state, now_s)
        return now_s - flight.sent_s

    def tokens(self, request_id: str, count: int) -> None:
        """`count` more output tokens went to the client."""
        flight = self._own(request_id)
        if flight is not None:
            flight.output_tokens += count

    def release(self, request_id: str, now_s: float, *, complete: bool = True) -> bool:
        """A request ended (done, failed, or its client left); False if it was not in flight."""
        flight = self._own(request_id)
        if flight is None:
            return False
        self.reservations -= 1
        self.finish(flight, now_s, flight.output_tokens if complete else 0)
        self.lateness.ended(flight, now_s, flight.output_tokens if complete else 0)
        if complete and flight.output_tokens:
            self.workers[flight.worker].model.outputs.add(flight.output_tokens)
        return True

    def _own(self, request_id: str) -> Flight | None:
        flight = self.flights.get(request_id)
        return flight if flight is not None and flight.own else None

    def reserve(self, request_id: str, estimates: Estimates, row: int) -> Flight:
        """Put a request on the worker that a row of its estimates is about."""
        flight = self.fleet.reserve(request_id, estimates, row)
        state = self.workers[flight.worker]
        self.flights[request_id] = state.flights[request_id] = flight
        if self.forecasting:
            state.queue.submit(engine_job(request_id, estimates, row), estimates.now_s)
        return flight

    def _prefilled(self, state: WorkerState, request_id: str, now_s: float) -> None:
        state.queue.prefilled(request_id, now_s)
        # A request that was tried elsewhere since may still be reported by the first worker.
        flight = state.flights.get(request_id)
        if flight is not None and not flight.prefilled:
            self.fleet.prefilled(flight, now_s)
            state.calibration.prefilled(flight, now_s)
            self.config.policy.progressed(request_id, now_s, ended=False)

    def finish(self, flight: Flight, now_s: float, tokens: int = 0) -> None:
        state = self.workers[flight.worker]
        if flight.prefilled:
            state.calibration.ended(flight, now_s, tokens if self.calibrating else 0)
        del self.flights[flight.request_id], state.flights[flight.request_id]
        state.queue.finish(flight.request_id, now_s)
        self.fleet.release(flight, now_s)
        self.config.policy.progressed(flight.request_id, now_s, ended=True)

    def sent(self) -> dict[str, tuple[Arrival, ...]]:
        """What this router has in flight itself, by worker, as others are to be told of it."""
        return {
            worker: tuple(flight.told() for flight in state.flights.values() if flight.own)
            for worker, state in self.workers.items()
        }

    def _reserve_remote(self, worker: str, arrivals: Iterable[Arrival], now_s: float) -> None:
        """Put other deciders' requests where they went, priced as if this router had sent them."""
        model = self.workers[worker].model
        for arrival in arrivals:
            # A client may use one id twice; the second is then not seen, and nothing is confused.
            known = self.flights.get(arrival.request_id)
            if known is not None:
                if arrival.prefilled and not known.own and not known.prefilled:
                    self._prefilled(self.workers[worker], arrival.request_id, now_s)
                continue
            device, host = float(arrival.device_tokens), float(arrival.host_tokens)
            tokens = arrival.device_tokens + arrival.host_tokens + max(arrival.new_tokens, 1)
            expected = model.outputs.guess(arrival.max_tokens)
            prompt = PricedPrompt(tokens, expected, model.hasher.block_tokens)
            slots = np.array([self.fleet.slot(worker)], dtype=np.intp)
            tiers = device, host, float(arrival.disk_tokens)
            held = Held(*(np.array([tokens]) for tokens in tiers))
            estimates = self.fleet.estimate(slots, now_s, prompt, held)
            self.plan_loads(estimates)
            self.reserve(arrival.request_id, estimates, 0)
            if arrival.prefilled:
                self._prefilled(self.workers[worker], arrival.request_id, now_s)

    # -- look-ups -----------------------------------------------------------------------------

    @property
    def index(self) -> PrefixIndex | None:
        """The prefix index of the first model; None before a worker has joined."""
        return next((model.index for model in self.models.values()), None)

    def held_blocks(self) -> dict[str, dict[str, int]]:
        """`PrefixIndex.held_blocks` of all models together: a worker serves one."""
        held: dict[str, dict[str, int]] = {}
        for model in self.models.values():
            held |= model.index.held_blocks()
        return held

    def index_stats(self) -> Counter[str]:
        """`PrefixIndex.stats` of all models together."""
        total = Counter[str]()
        for model in self.models.values():
            total.update(model.index.stats())
        return total

    def __contains__(self, request_id: str) -> bool:
        """Whether a request is in flight that this router sent."""
        return self._own(request_id) is not None

    @property
    def in_flight(self) -> int:
        """Requests in flight in the cluster, as far as is known: its own, and others'."""
        return len(self.flights)

    def flights_on(self, worker: str) -> Iterable[Flight]:
        """Requests in flight on a worker, those of other routers included."""
        state = self.workers.get(worker)
        return state.flights.values() if state is not None else ()

    def in_flight_on(self, worker: str) -> int:
        """Requests in flight on one worker that this router sent."""
        return sum(flight.own for flight in self.flights_on(worker))

    def remote_in_flight_on(self, worker: str) -> int:
        """Requests in flight on one worker that other deciders sent."""
        return sum(not flight.own for flight in self.flights_on(worker))

    def longest_wait_s(self, worker: str) -> float:
        """The longest predicted TTFT among those that this router has waiting on a worker."""
        flights = [f for f in self.flights_on(worker) if f.first_token_s is None]
        return max((f.chosen.ttft_s for f in flights if f.chosen is not None), default=0.0)

    def backlogs_s(self, now_s: float) -> dict[str, tuple[float, float]]:
        """Seconds of queued work on each worker's (link, gpu)."""
        if self.forecasting:
            return {w: state.queue.backlog_s(now_s) for w, state in self.workers.items()}
        return {w: self.fleet.backlog_s(w, now_s) for w in self.workers}

    # -- plans and forecasts ------------------------------------------------------------------

    @property
    def forecasting(self) -> bool:
        return len(self.workers) <= self.config.forecast_workers

    def at(self, slot: int | np.intp) -> WorkerState:
        return self.workers[self.fleet.names[slot]]

    def plan_loads(self, estimates: Estimates) -> None:
        if not self._any_planner:
            return
        for row, worker in enumerate(estimates.workers):
            planner = self.workers[worker].planner
            planned = planner(estimates.rows[row]) if planner is not None else None
            if planned is not None:
                estimates.plans[row] = planned


def engine_job(request_id: str, estimates: Estimates, row: int) -> EngineJob:
    """The request as the engine of a row would see it."""
    # Half of what a request costs besides the engine is spent before it reaches it.
    arrival_s = estimates.now_s + float(estimates.fixed_s[row]) / 2
    cached, new = int(estimates.cached_tokens[row]), int(estimates.new_tokens[row])
    plan = estimates.plans.get(row)
    if plan is not None:
        loaded = plan.crossing_tokens
        cached, new = loaded, new + cached - loaded
    context = int(estimates.device_tokens[row]) + cached
    expected, disk = estimates.expected_output_tokens, int(estimates.disk_tokens[row])
    return EngineJob(request_id, arrival_s, cached, context, new, expected, disk)
