"""The router without its surroundings: events in, decisions out.

The ingress feeds it what happens (a worker joins, blocks are stored, a first token comes) and has
it decide where a request goes; the simulator and the replay of a recorded log do exactly the same.
Pure: each call takes the time. It joins the prefix index, the fleet, calibration, load plans and
the engine queue models of the workers; a policy picks one of those that serve the request's model.
Of each model there is an index of its own, so that no prefix of one is ever counted for another.

Several ingresses decide over the same workers, and each would send the next request to the worker
that looks idle to it. So every worker reports to all of them what arrived and what left; a request
that this router did not send is reserved as if it had. The worker is the truth: now and then it
reports all that is in flight there, and what is not among that is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kappa.protocol import Announcement, Arrival, WorkerReport
from kappa.slo import OBJECTIVE, ServiceObjective
from router import pricing
from router.admission import Demand, Lateness, alone_s, delay_s, evaluate, limits
from router.calibration import Calibration, OutputLengths
from router.decision import (
    NO_HASHES,
    Decision,
    Estimates,
    Held,
    MismatchError,
    NoWorkerError,
    OverloadedError,
    PlannedLoad,
    PricedPrompt,
    RouteRequest,
    Slots,
)
from router.engine_queue import EngineJob, EngineQueue
from router.fleet import Fleet, Flight
from router.index.kv_events import KVEvent, WorkerGone, WorkerReset
from router.index.prefix_hash import PrefixHasher
from router.index.prefix_index import PrefixIndex
from router.policy import LeastBacklog, Policy, least


class RowPlanner(Protocol):
    """A worker's load planner."""

    def __call__(self, row: np.void) -> PlannedLoad | None:
        """Change a row of the estimates to what the worker's plan makes of it; None: nothing."""

    def kappa_eff(self) -> float | None:
        """The ratio at which its predicted TTFT is twice the compute time."""


PlannerOf = Callable[[Announcement], RowPlanner | None]

_FAIL_OPEN = LeastBacklog()


def no_planner(announcement: Announcement) -> RowPlanner | None:
    """Of workers that load prefixes whole and then compute; ValueError for others."""
    if announcement.load_plan:
        raise ValueError(
            f"worker {announcement.worker} plans its loads; make the router with "
            "router.load_plans.planner_of"
        )
    return None


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """index_blocks bounds the prefix index; stale_after_s a worker's silence.

    forecast_workers: up to so many workers are forecast step by step for every decision; of more,
    queues are arithmetic (`router.pricing`), which costs microseconds. calibrate_requests: after so
    many first tokens nothing is learnt any more. admission: reject requests that would miss their
    objective (`router.admission`). objective: that, and what workers are priced by. first: where
    the order of workers begins, from 0 to below 1; ingresses that share workers take different
    ones, so that ties are broken differently.
    planner_of: makes the load planner that a worker announces; without one such workers are
    refused.
    """

    policy: Policy
    secret: int
    index_blocks: int = 1_000_000
    stale_after_s: float = 10.0
    calibrate: bool = True
    calibrate_requests: int | None = None
    forecast_workers: int = 4
    admission: bool = False
    objective: ServiceObjective = OBJECTIVE
    first: float = 0.0
    planner_of: PlannerOf = no_planner


@dataclass(slots=True, eq=False)
class ModelState:
    """What the workers of one model share.

    number: the model's, by which `Router` knows the places of its workers. fingerprint: of their
    blocks; empty while it has no workers. outputs: how long its answers were; demand: what
    admission saw of its requests.
    """

    number: int
    hasher: PrefixHasher
    index: PrefixIndex
    fingerprint: str = ""
    outputs: OutputLengths = field(default_factory=OutputLengths)
    demand: Demand = field(default_factory=Demand)


@dataclass(slots=True)
class WorkerState:
    """One worker as the router sees it. flights: what is in flight there, whoever sent it."""

    announcement: Announcement
    model: ModelState
    queue: EngineQueue
    calibration: Calibration
    report: WorkerReport | None = None
    seen_s: float = 0.0
    planner: RowPlanner | None = None
    flights: dict[str, Flight] = field(default_factory=dict)


class Router:
    """Decides where requests go, from what was reported to it.

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
        self._lateness = Lateness()
        # Of the worker in each place of the fleet: where its model's index answers for it, and the
        # number of its model.
        self._columns: Slots = np.zeros(0, dtype=np.intp)
        self._numbers: Slots = np.zeros(0, dtype=np.intp)
        self._any_planner = self._tiers_shared = False
        # Compiled now rather than while the first request waits.
        none = np.zeros((3, 0))
        pricing.leading_tokens(none.astype(np.int64), self._columns, self._columns, 0, 1, none)

    # -- workers ------------------------------------------------------------------------------

    def join(self, announcement: Announcement, now_s: float) -> None:
        """A worker joins, or announces itself anew (after measuring again).

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
        if slot >= len(self._columns):
            more = np.zeros(slot + 1 - len(self._columns), dtype=np.intp)
            self._columns = np.concatenate([self._columns, more])
            self._numbers = np.concatenate([self._numbers, more])
        self._columns[slot], self._numbers[slot] = model.index.column(worker), model.number
        self._note_kinds()

    def _model_for(self, announcement: Announcement, state: WorkerState | None) -> ModelState:
        """The state of its model, whose blocks the first worker sets; MismatchError for others."""
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
        self._lateness.left(worker)
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
        """What need not be looked for where no worker has it."""
        states = self.workers.values()
        self._tiers_shared = any(state.announcement.shared_tier for state in states)
        self._any_planner = any(state.planner is not None for state in states)

    def blocks(self, events: Iterable[KVEvent]) -> None:
        """KV blocks were stored or removed somewhere; those of a worker that is gone are late."""
        for event in events:
            state = self.workers.get(event.worker)
            if state is not None:
                state.model.index.handle(event)

    def invalidate(self, worker: str, now_s: float) -> None:
        """Nothing that a worker reported is true any more: its blocks, and what others sent it.

        What this router sent there itself stays, until its ingress releases it.
        """
        state = self.workers.get(worker)
        if state is None:
            return
        state.model.index.handle(WorkerReset(worker))
        for flight in [f for f in state.flights.values() if not f.own]:
            self._finish(flight, now_s)

    def report(self, report: WorkerReport, now_s: float) -> None:
        """A worker measured something, or reports what other ingresses sent it."""
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
        # What has left, and what is missing or new where the worker lists all in flight.
        gone = [state.flights[name] for name in report.finished if name in state.flights]
        if report.in_flight is not None:
            there = {arrival.request_id for arrival in report.in_flight}
            gone += [f for name, f in state.flights.items() if name not in there]
        for flight in gone:
            # Of its own requests the ingress knows itself when they are over.
            if not flight.own and flight.request_id in state.flights:
                self._finish(flight, now_s)
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
        self._lateness.first_token(flight, now_s)
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
        self._finish(flight, now_s, flight.output_tokens if complete else 0)
        self._lateness.ended(flight, now_s, flight.output_tokens if complete else 0)
        if complete and flight.output_tokens:
            self.workers[flight.worker].model.outputs.add(flight.output_tokens)
        return True

    def _own(self, request_id: str) -> Flight | None:
        flight = self.flights.get(request_id)
        return flight if flight is not None and flight.own else None

    def _reserve(self, request_id: str, estimates: Estimates, row: int) -> Flight:
        """Put a request on the worker that a row of its estimates is about."""
        flight = self.fleet.reserve(request_id, estimates, row)
        state = self.workers[flight.worker]
        self.flights[request_id] = state.flights[request_id] = flight
        if self._forecasting:
            state.queue.submit(_job(request_id, estimates, row), estimates.now_s)
        return flight

    def _prefilled(self, state: WorkerState, request_id: str, now_s: float) -> None:
        state.queue.prefilled(request_id, now_s)
        # A request that was tried elsewhere since may still be reported by the first worker.
        flight = state.flights.get(request_id)
        if flight is not None and not flight.prefilled:
            self.fleet.prefilled(flight, now_s)
            state.calibration.prefilled(flight, now_s)
            self.config.policy.progressed(request_id, now_s, ended=False)

    def _finish(self, flight: Flight, now_s: float, tokens: int = 0) -> None:
        state = self.workers[flight.worker]
        if flight.prefilled:
            state.calibration.ended(flight, now_s, tokens if self.calibrating else 0)
        del self.flights[flight.request_id], state.flights[flight.request_id]
        state.queue.finish(flight.request_id, now_s)
        self.fleet.release(flight, now_s)
        self.config.policy.progressed(flight.request_id, now_s, ended=True)

    def _reserve_remote(self, worker: str, arrivals: Iterable[Arrival], now_s: float) -> None:
        """Put other ingresses' requests where they went, priced as if this router had sent them."""
        model = self.workers[worker].model
        for arrival in arrivals:
            # A client may use one id twice; the second is then not seen, and nothing is confused.
            if arrival.request_id in self.flights:
                continue
            device, host = float(arrival.device_tokens), float(arrival.host_tokens)
            tokens = arrival.device_tokens + arrival.host_tokens + max(arrival.new_tokens, 1)
            expected = model.outputs.guess(arrival.max_tokens)
            prompt = PricedPrompt(tokens, expected, model.hasher.block_tokens)
            slots = np.array([self.fleet.slot(worker)], dtype=np.intp)
            known = device, host, float(arrival.disk_tokens)
            held = Held(*(np.array([tokens]) for tokens in known))
            estimates = self.fleet.estimate(slots, now_s, prompt, held)
            self._plan_loads(estimates)
            self._reserve(arrival.request_id, estimates, 0)
            if arrival.prefilled:
                self._prefilled(self.workers[worker], arrival.request_id, now_s)

    # -- what is known ------------------------------------------------------------------------

    @property
    def index(self) -> PrefixIndex | None:
        """Who holds which prefix, of the first model; None before a worker has joined."""
        return next((model.index for model in self.models.values()), None)

    @property
    def hasher(self) -> PrefixHasher | None:
        """What hashes prompts, of the first model; None before a worker has joined."""
        return next((model.hasher for model in self.models.values()), None)

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
        """What is in flight on a worker, whoever sent it."""
        state = self.workers.get(worker)
        return state.flights.values() if state is not None else ()

    def in_flight_on(self, worker: str) -> int:
        """Requests in flight on one worker that this router sent."""
        return sum(flight.own for flight in self.flights_on(worker))

    def remote_in_flight_on(self, worker: str) -> int:
        """Requests in flight on one worker that other ingresses sent."""
        return sum(not flight.own for flight in self.flights_on(worker))

    def longest_wait_s(self, worker: str) -> float:
        """The longest predicted TTFT among those that this router has waiting on a worker."""
        flights = [f for f in self.flights_on(worker) if f.first_token_s is None]
        return max((f.chosen.ttft_s for f in flights if f.chosen is not None), default=0.0)

    def backlogs_s(self, now_s: float) -> dict[str, tuple[float, float]]:
        """Seconds of queued work on each worker's (link, gpu)."""
        if self._forecasting:
            return {w: state.queue.backlog_s(now_s) for w, state in self.workers.items()}
        return {w: self.fleet.backlog_s(w, now_s) for w in self.workers}

    # -- decisions ----------------------------------------------------------------------------

    def route(self, request: RouteRequest, now_s: float) -> Decision:
        """Choose a worker and reserve it.

        Raises:
            NoWorkerError: none is known, has reported recently, and is not excluded.
            OverloadedError: it would miss its objective (never for one that is tried again).
        """
        # Routed again under the same id: the earlier answer was not taken.
        if not self.release(request.request_id, now_s, complete=False):
            remote = self.flights.get(request.request_id)
            if remote is not None:
                self._finish(remote, now_s)
        decision = self._decide(request, now_s)
        if self.config.admission and request.sized and not request.retry:
            decision = self._admitted(request, decision)
        estimates, index = decision.priced, decision.index
        flight = self._reserve(decision.request_id, estimates, index)
        flight.own, flight.sent_s = True, now_s
        flight.chosen, flight.informed = decision.chosen, decision.informed
        self.reservations += 1
        if decision.informed:
            self.config.policy.routed(estimates, index, decision.request_id)
        if self.config.admission:
            row = estimates.row(index)
            flight.tpot_s = alone_s(row)
            flight.bounded_s = self.fleet.bounded_s(estimates.slots[index])
            self._lateness.sent(flight, now_s, delay_s(row))
        return decision

    def explain(self, request: RouteRequest, now_s: float) -> Decision:
        """What `route` would decide, without reserving anything, and without admission."""
        return self._decide(request, now_s)

    def _decide(self, request: RouteRequest, now_s: float) -> Decision:
        slots = self.fleet.ready(now_s, self.config.stale_after_s, request.exclude)
        model = self._model_of(request)
        if model is not None and len(self.models) > 1:
            slots = slots[self._numbers[slots] == model.number]
        if model is None or not len(slots):
            known = {name for name, state in self.workers.items() if state.model is model}
            excluded = len(known & request.exclude)
            of_it = f" of model {request.model}" if request.model else ""
            raise NoWorkerError(
                f"no worker{of_it} is ready ({len(known)} known, {excluded} excluded, "
                f"{len(known) - excluded} not heard from in the last "
                f"{self.config.stale_after_s:g} s)"
            )
        policy = self.config.policy if request.informed else _FAIL_OPEN
        estimates = self._estimate(request, slots, now_s)
        choice = policy.choose(estimates)
        if choice.fetch is not None and estimates.fetching is not None:
            estimates = estimates.fetching
        return Decision(
            request_id=request.request_id,
            chosen=estimates.candidate(choice.index),
            reason=choice.reason if request.informed else "uninformed_least_backlog",
            policy=policy.name,
            prompt_tokens=request.tokens if request.informed else 0,
            informed=request.informed,
            estimates=estimates,
            index=choice.index,
            fetch=choice.fetch,
        )

    def _model_of(self, request: RouteRequest) -> ModelState | None:
        """The model that a request asks for; None: no worker of it has joined, or it asks for none
        where there are several."""
        if request.model or len(self.models) != 1:
            return self.models.get(request.model)
        return next(iter(self.models.values()))

    def _admitted(self, request: RouteRequest, decision: Decision) -> Decision:
        """The decision if its worker is expected to meet the objective, else one for those that
        are."""
        estimates = decision.priced
        now_s, demand = estimates.now_s, self.workers[decision.worker].model.demand
        idle = self.fleet.idle_s(estimates)
        standing = demand.standing(request, idle[-1])
        limit = limits(self.fleet.objective, idle, demand.slack_share(standing))
        known = self._lateness, demand, limit
        at, found = decision.index, evaluate(self.fleet, estimates, decision.index, *known)
        # The others matter where the chosen one would be late.
        if found.rejected:
            each = [evaluate(self.fleet, estimates, i, *known) for i in range(len(estimates))]
            if all(one.rejected for one in each):
                demand.evaluated(now_s, request, standing, limit.slack_s, admitted=False)
                soonest = min(each, key=attrgetter("wait_s"))
                raise OverloadedError(
                    f"the cluster is full: {soonest.why}{standing.words}",
                    demand.come_back_s(now_s, soonest.wait_s),
                )
            late = {w for w, one in zip(estimates.workers, each, strict=True) if one.rejected}
            decision = self._decide(replace(request, exclude=request.exclude | late), now_s)
            at = estimates.workers.index(decision.worker)
            found = each[at]
        demand.evaluated(now_s, request, standing, limit.slack_s, admitted=True)
        if found.blocks:
            demand.spend(float(estimates.compute_s[at]))
        return decision

    # -- what a request costs -----------------------------------------------------------------

    @property
    def _forecasting(self) -> bool:
        return len(self.workers) <= self.config.forecast_workers

    def _estimate(self, request: RouteRequest, slots: Slots, now_s: float) -> Estimates:
        """The request priced on `slots`, by what each of them holds as the index has it; where the
        policy fetches, also with the longest prefix brought from its holder first."""
        model = self._at(slots[0]).model
        expected, size = model.outputs.guess(request.max_tokens), model.hasher.block_tokens
        hashes = request.prefix_hashes
        if request.token_ids is not None:
            hashes = model.hasher.prefix_hashes(request.token_ids, request.salt)
        elif hashes is None:
            hashes = NO_HASHES
        prompt = PricedPrompt(request.tokens, expected, size, hashes, request.session)
        device, cached, disk = held = self._held_tokens(model, prompt, slots)
        if request.handed_tokens:
            # They come into the host tier.
            handed = float(min(request.handed_tokens, prompt.tokens - 1) // size * size)
            disk = np.minimum(disk, np.maximum(device + cached - handed, 0.0))
            cached = np.maximum(cached, handed - device)
            held = Held(device, cached, disk)
        estimates = self.fleet.estimate(slots, now_s, prompt, held)
        if self.config.policy.fetches:
            leading = device + cached
            holder = least(-leading, estimates.net_backlog_s)
            if leading[holder]:
                everywhere = leading[holder] - device
                source = estimates.workers[holder], everywhere - cached
                held = Held(device, everywhere, held.disk)
                estimates.fetching = self.fleet.estimate(slots, now_s, prompt, held, source)
        self._plan_loads(estimates)
        if self._forecasting:
            self._forecast(estimates)
        return estimates

    def _held_tokens(self, model: ModelState, prompt: PricedPrompt, slots: Slots) -> Held:
        """Leading tokens that each worker has on the device, and further ones behind it.

        Workers that name the same LMCache server announce it. Each reports only what it stored or
        found itself, so what any of them holds, on the device or there, counts as held for all,
        behind each one's own device tokens. That is an estimate: a prompt's blocks on a device are
        in the server too, unless their store failed or was evicted; the engine's look-up then finds
        less and computes the rest.
        """
        hashes, size = prompt.prefix_hashes, prompt.block_tokens
        if not len(hashes):
            return Held(np.zeros(len(slots)), np.zeros(len(slots)), np.zeros(len(slots)))
        # An engine computes at least the last token: a full hit gives its last block back.
        usable = (prompt.tokens - 1) // size
        held = model.index.match_columns(hashes, usable)
        tokens = np.empty((3, len(slots)))
        pricing.leading_tokens(held, self._columns, slots, usable, size, tokens)
        device, cached, disk = tokens
        servers: dict[str, list[int]] = {}
        for row, slot in enumerate(slots if self._tiers_shared else ()):
            server = self._at(slot).announcement.shared_tier
            if server:
                servers.setdefault(server, []).append(row)
        for rows in servers.values():
            at: NDArray[np.intp] = np.array(rows)
            reach = float((device[at] + cached[at]).max())
            cached[at] = np.maximum(cached[at], reach - device[at])
        return Held(device, cached, disk)

    def _at(self, slot: int | np.intp) -> WorkerState:
        return self.workers[self.fleet.names[slot]]

    def _plan_loads(self, estimates: Estimates) -> None:
        if not self._any_planner:
            return
        for row, worker in enumerate(estimates.workers):
            planner = self.workers[worker].planner
            planned = planner(estimates.rows[row]) if planner is not None else None
            if planned is not None:
                estimates.plans[row] = planned

    def _forecast(self, estimates: Estimates) -> None:
        """Replace the arithmetic of queues by each engine's forecast."""
        now_s = estimates.now_s
        for row, worker in enumerate(estimates.workers):
            queue, job = self.workers[worker].queue, _job("", estimates, row)
            ready_s = queue.first_token_s(job, now_s) + float(estimates.fixed_s[row]) / 2
            plan = estimates.plans.get(row)
            estimates.ttft_s[row] = ready_s - now_s - (plan.hidden_s if plan else 0.0)
            estimates.tpot_impact_s[row] = queue.decode_delay_s(job.new_tokens, job.context_tokens)
            link_s, gpu_s = queue.backlog_s(now_s)
            estimates.link_backlog_s[row], estimates.gpu_backlog_s[row] = link_s, gpu_s


def _job(request_id: str, estimates: Estimates, row: int) -> EngineJob:
    """What a request would be to the engine of a row."""
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
