"""The workers of one model: who they are, what they hold, what is in flight on them.

Joins the prefix index, the fleet, calibration, load plans and the engine queue models. Pure;
`router.router` has it estimate what a request costs, and decides.

Several ingresses decide over the same workers, and each would send the next request to the worker
that looks idle to it. So every worker reports to all of them what arrived and what left; a request
that this router did not send is reserved as if it had. The worker is the truth: now and then it
reports all that is in flight there, and what is not among that is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kappa.protocol import Announcement, Arrival, WorkerReport
from router import pricing
from router.calibration import Calibration, OutputLengths, engine_speed
from router.decision import (
    Estimates,
    Floats,
    MismatchError,
    PlannedLoad,
    RouteRequest,
    Slots,
)
from router.engine_queue import EngineJob, EngineQueue
from router.fleet import Fleet, Flight, PricedPrompt
from router.index.kv_events import KVEvent, WorkerGone, WorkerReset
from router.index.prefix_hash import PrefixHasher
from router.index.prefix_index import PrefixIndex
from router.policy import least


class RowPlanner(Protocol):
    """A worker's load planner."""

    def __call__(self, row: np.void) -> PlannedLoad | None:
        """Change a row of the estimates to what the worker's plan makes of it; None: nothing."""

    def kappa_eff(self) -> float | None:
        """The ratio at which its predicted TTFT is twice the compute time."""


PlannerOf = Callable[[Announcement], RowPlanner | None]


def no_planner(announcement: Announcement) -> RowPlanner | None:
    """Of workers that load prefixes whole and then compute; ValueError for others."""
    if announcement.load_plan:
        raise ValueError(
            f"worker {announcement.worker} plans its loads; make the router with "
            "router.load_plans.planner_of"
        )
    return None


@dataclass(slots=True)
class WorkerState:
    """One worker as the router sees it. flights: what is in flight there, whoever sent it."""

    announcement: Announcement
    queue: EngineQueue
    calibration: Calibration
    report: WorkerReport | None = None
    seen_s: float = 0.0
    planner: RowPlanner | None = None
    flights: dict[str, Flight] = field(default_factory=dict)


def _speeds(announced: Announcement) -> tuple[object, ...]:
    return announced.node, announced.step, announced.kv_bytes_per_token


class Pool:
    """Workers whose KV blocks mean the same.

    forecast_workers: so many are forecast step by step at most; first: as `Fleet` takes it;
    planner_of: makes the planner of a worker that announces one.
    """

    def __init__(
        self,
        secret: int,
        index_blocks: int,
        forecast_workers: int,
        first: float = 0.0,
        planner_of: PlannerOf = no_planner,
    ) -> None:
        self._secret, self._index_blocks = secret, index_blocks
        self._forecast_workers, self._planner_of = forecast_workers, planner_of
        self.workers: dict[str, WorkerState] = {}
        self.flights: dict[str, Flight] = {}
        self.fleet = Fleet(first)
        self.outputs = OutputLengths()
        self.calibrate = True
        self.index: PrefixIndex | None = None
        self.hasher: PrefixHasher | None = None
        # Where the index answers for the worker in each place of the fleet.
        self._columns: Slots = np.zeros(0, dtype=np.intp)
        self._any_planner = self._tiers_shared = False
        self._fingerprint = ""
        # Compiled now rather than while the first request waits.
        pricing.leading_tokens(np.zeros((2, 0), dtype=np.int64), self._columns, self._columns, 0, 1)

    # -- workers ------------------------------------------------------------------------------

    def join(self, announcement: Announcement, now_s: float) -> None:
        """A worker joins, or announces itself anew (after measuring again).

        Raises:
            MismatchError: its blocks would not mean the same as the pool's.
            ValueError: its load planner cannot be used.
        """
        worker = announcement.worker
        index = self._index_for(announcement)
        planner = self._planner_of(announcement)
        state = self.workers.get(worker)
        if state is None:
            calibration = Calibration()
            queue = EngineQueue(engine_speed(announcement, calibration))
            state = self.workers[worker] = WorkerState(announcement, queue, calibration)
        elif _speeds(state.announcement) != _speeds(announcement):
            # What was learnt corrects the old figures; the overhead has nothing of them.
            state.calibration = Calibration(overhead_s=state.calibration.overhead_s)
        state.announcement, state.planner, state.seen_s = announcement, planner, now_s
        self.fleet.join(announcement, engine_speed(announcement, state.calibration), now_s)
        self._calibrated(state)
        slot = self.fleet.slot(worker)
        if slot >= len(self._columns):
            more = np.zeros(slot + 1 - len(self._columns), dtype=np.intp)
            self._columns = np.concatenate([self._columns, more])
        self._columns[slot] = index.column(worker)
        self._note_kinds()

    def _index_for(self, announcement: Announcement) -> PrefixIndex:
        """The pool's index, which the first worker's blocks set; MismatchError for others."""
        size = announcement.block_tokens
        if not self.workers:
            self._fingerprint = announcement.fingerprint
        if (
            self.index is None
            or self.hasher is None
            or (not self.workers and self.hasher.block_tokens != size)
        ):
            self.hasher = PrefixHasher(size, self._secret)
            self.index = PrefixIndex(self.hasher, self._index_blocks)
        if announcement.fingerprint != self._fingerprint:
            raise MismatchError(
                f"worker {announcement.worker} has fingerprint {announcement.fingerprint}, the "
                f"pool {self._fingerprint}: model, dtype, block size or chat template differ"
            )
        if size != self.hasher.block_tokens:
            raise MismatchError(
                f"worker {announcement.worker} has blocks of {size} tokens, "
                f"the pool of {self.hasher.block_tokens}: give the pool one block size"
            )
        return self.index

    def leave(self, worker: str) -> list[Flight]:
        """A worker is gone, with all that it held; returns what was in flight there."""
        state = self.workers.pop(worker, None)
        if state is None:
            return []
        for request_id in state.flights:
            del self.flights[request_id]
        self.fleet.leave(worker)
        self._note_kinds()
        if self.index is not None:
            self.index.handle(WorkerGone(worker))
        return list(state.flights.values())

    def _note_kinds(self) -> None:
        """What need not be looked for where no worker has it."""
        states = self.workers.values()
        self._tiers_shared = any(state.announcement.shared_tier for state in states)
        self._any_planner = any(state.planner is not None for state in states)

    def blocks(self, events: Iterable[KVEvent]) -> None:
        """KV blocks were stored or removed somewhere; those of a worker that is gone are late."""
        if self.index is not None:
            for event in events:
                if event.worker in self.workers:
                    self.index.handle(event)

    def invalidate(self, worker: str, now_s: float) -> None:
        """What a worker reported of its blocks, and of other ingresses' requests, is invalid."""
        state = self.workers.get(worker)
        if self.index is None or state is None:
            return
        self.index.handle(WorkerReset(worker))
        for flight in [f for f in state.flights.values() if not f.own]:
            self.finish(flight, now_s)

    def report(self, report: WorkerReport, now_s: float) -> None:
        """A worker measured something, or reports what other ingresses sent it."""
        state = self.workers.get(report.worker)
        if state is None:
            return
        # Arrivals come before admissions, which correct them.
        self._reserve_remote(report.worker, report.arrived, now_s)
        if (
            self.calibrate
            and state.report is not None
            and state.calibration.reports(state.announcement, state.report, report)
        ):
            self._calibrated(state)
        state.report, state.seen_s = report, now_s
        self.fleet.seen(report.worker, now_s)
        for a in report.admitted:
            state.queue.correct(a.request_id, a.device_tokens, a.host_tokens, a.new_tokens, now_s)
            flight = state.flights.get(a.request_id)
            if flight is not None:
                self.fleet.correct(flight, a.host_tokens, a.new_tokens)
        for request_id in report.prefilled:
            self.prefilled(state, request_id, now_s)
        self._finish_remote(state, report, now_s)
        if self.hasher is not None:
            spare_tokens = report.host_spare_blocks * self.hasher.block_tokens
            self.fleet.spare(report.worker, spare_tokens)

    def outcome(self, flight: Flight, ttft_s: float) -> None:
        """A request that had met no queue got its first token."""
        state, chosen = self.workers[flight.worker], flight.chosen
        if self.calibrate and chosen is not None:
            state.calibration.outcome(chosen.compute_s, chosen.load_s, ttft_s)
            self._calibrated(state)

    def _calibrated(self, state: WorkerState) -> None:
        state.queue.speed = engine_speed(state.announcement, state.calibration)
        self.fleet.calibrate(
            state.announcement.worker, state.queue.speed, state.calibration.overhead_s
        )

    # -- requests in flight -------------------------------------------------------------------

    @property
    def forecasting(self) -> bool:
        return len(self.workers) <= self._forecast_workers

    def reserve(self, request_id: str, estimates: Estimates, row: int) -> Flight:
        """Put a request on the worker that a row of its estimates is about."""
        flight = self.fleet.reserve(request_id, estimates, row)
        state = self.workers[flight.worker]
        self.flights[request_id] = state.flights[request_id] = flight
        if self.forecasting:
            state.queue.submit(self._job(request_id, estimates, row), estimates.now_s)
        return flight

    def prefilled(self, state: WorkerState, request_id: str, now_s: float) -> None:
        state.queue.prefilled(request_id, now_s)
        # A request that was tried elsewhere since may still be reported by the first worker.
        flight = state.flights.get(request_id)
        if flight is not None:
            self.fleet.prefilled(flight, now_s)

    def finish(self, flight: Flight, now_s: float) -> None:
        state = self.workers[flight.worker]
        del self.flights[flight.request_id], state.flights[flight.request_id]
        state.queue.finish(flight.request_id, now_s)
        self.fleet.release(flight, now_s)

    def _reserve_remote(self, worker: str, arrivals: Iterable[Arrival], now_s: float) -> None:
        """Put other ingresses' requests where they went, priced as if this router had sent them."""
        assert self.hasher is not None
        for arrival in arrivals:
            # A client may use one id twice; the second is then not seen, and nothing is confused.
            if arrival.request_id in self.flights:
                continue
            tokens = arrival.device_tokens + arrival.host_tokens + max(arrival.new_tokens, 1)
            expected = self.outputs.guess(arrival.max_tokens)
            estimates = self.fleet.estimate(
                np.array([self.fleet.slot(worker)], dtype=np.intp),
                now_s,
                PricedPrompt(tokens, expected, self.hasher.block_tokens),
                np.array([float(arrival.device_tokens)]),
                np.array([float(arrival.host_tokens)]),
            )
            self._plan_loads(estimates)
            self.reserve(arrival.request_id, estimates, 0)
            if arrival.prefilled:
                self.prefilled(self.workers[worker], arrival.request_id, now_s)

    def _finish_remote(self, state: WorkerState, report: WorkerReport, now_s: float) -> None:
        """What has left by the report, and what is missing or new where it lists all in flight."""
        gone = [state.flights[name] for name in report.finished if name in state.flights]
        if report.in_flight is not None:
            there = {arrival.request_id for arrival in report.in_flight}
            gone += [f for name, f in state.flights.items() if name not in there]
        for flight in gone:
            # Of its own requests the ingress knows itself when they are over.
            if not flight.own and flight.request_id in state.flights:
                self.finish(flight, now_s)
        self._reserve_remote(report.worker, report.in_flight or (), now_s)

    # -- what a request costs -----------------------------------------------------------------

    def estimate(
        self, request: RouteRequest, slots: Slots, now_s: float, *, fetches: bool = False
    ) -> Estimates:
        """The request priced on `slots`, by what each of them holds as the index has it.

        fetches: also with the longest prefix brought from its holder first.
        """
        assert self.hasher is not None
        hashes = request.prefix_hashes
        if request.token_ids is not None:
            hashes = self.hasher.prefix_hashes(request.token_ids, request.salt)
        prompt = PricedPrompt(
            request.tokens, self.outputs.guess(request.max_tokens), self.hasher.block_tokens,
            hashes, request.session,
        )  # fmt: skip
        device, cached = self._held_tokens(prompt, slots)
        if request.handed_tokens:
            size, most = prompt.block_tokens, prompt.tokens - 1
            handed = float(min(request.handed_tokens, most) // size * size)
            device = np.maximum(device, handed)
            cached = np.minimum(cached, most // size * float(size) - device)
        estimates = self.fleet.estimate(slots, now_s, prompt, device, cached)
        if fetches:
            leading = device + cached
            holder = least(-leading, estimates.net_backlog_s)
            if leading[holder]:
                everywhere = leading[holder] - device
                source = estimates.workers[holder], everywhere - cached
                estimates.fetching = self.fleet.estimate(
                    slots, now_s, prompt, device, everywhere, source
                )
        self._plan_loads(estimates)
        if self.forecasting:
            self._forecast(estimates)
        return estimates

    def _held_tokens(self, prompt: PricedPrompt, slots: Slots) -> tuple[Floats, Floats]:
        """Leading tokens that each worker has on the device, and further ones in its host tier."""
        hashes, size = prompt.prefix_hashes, prompt.block_tokens
        if hashes is None or not len(hashes):
            return np.zeros(len(slots)), np.zeros(len(slots))
        assert self.index is not None
        # An engine computes at least the last token: a full hit gives its last block back.
        usable = (prompt.tokens - 1) // size
        held = self.index.match_columns(hashes)
        device, cached = pricing.leading_tokens(held, self._columns, slots, usable, size)
        if self._tiers_shared:
            self._share_tiers(slots, device, cached)
        return device, cached

    def _share_tiers(self, slots: Slots, device: Floats, cached: Floats) -> None:
        """Raise `cached`, behind each one's own device tokens, to what its server holds.

        Workers that name the same LMCache server announce it. Each reports only what it stored or
        found itself, so what any of them holds, on the device or there, counts as held for all.
        That is an estimate: a prompt's blocks on a device are in the server too, unless their store
        failed or was evicted; the engine's look-up then finds less and computes the rest.
        """
        servers: dict[str, list[int]] = {}
        for row, slot in enumerate(slots):
            server = self.workers[self.fleet.names[slot]].announcement.shared_tier
            if server:
                servers.setdefault(server, []).append(row)
        for rows in servers.values():
            at: NDArray[np.intp] = np.array(rows)
            reach = float((device[at] + cached[at]).max())
            cached[at] = np.maximum(cached[at], reach - device[at])

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
            queue = self.workers[worker].queue
            job = self._job("", estimates, row)
            ready_s = queue.first_token_s(job, now_s) + float(estimates.fixed_s[row]) / 2
            plan = estimates.plans.get(row)
            estimates.ttft_s[row] = ready_s - now_s - (plan.hidden_s if plan else 0.0)
            estimates.tpot_impact_s[row] = queue.decode_delay_s(job.new_tokens, job.context_tokens)
            link_s, gpu_s = queue.backlog_s(now_s)
            estimates.link_backlog_s[row], estimates.gpu_backlog_s[row] = link_s, gpu_s

    def _job(self, request_id: str, estimates: Estimates, row: int) -> EngineJob:
        """What a request would be to the engine of a row."""
        # Half of what a request costs besides the engine is spent before it reaches it.
        arrival_s = estimates.now_s + float(estimates.fixed_s[row]) / 2
        cached, new = int(estimates.cached_tokens[row]), int(estimates.new_tokens[row])
        plan = estimates.plans.get(row)
        if plan is not None:
            loaded = plan.crossing_tokens
            cached, new = loaded, new + cached - loaded
        return EngineJob(
            request_id=request_id,
            arrival_s=arrival_s,
            host_tokens=cached,
            context_tokens=int(estimates.device_tokens[row]) + cached,
            new_tokens=new,
            output_tokens=estimates.expected_output_tokens,
        )
