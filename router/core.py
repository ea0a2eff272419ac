"""The router without its surroundings: events in, decisions out.

It joins the prefix index, the workers' state and a policy. The ingress feeds it what happens (a
worker joins, blocks are stored, a first token comes) and asks it where a request should go; the
simulator and the replay of a recorded log do exactly the same. Pure: each call takes the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import numpy as np
from numpy.typing import NDArray

from kappa.report import Announcement, Arrival, WorkerReport
from kappa.types import NodeProfile
from router.admission import Admission, delay_s, token_s
from router.jobs import Job
from router.kv_events import KVEvent, WorkerGone, WorkerReset
from router.lateness import Lateness
from router.load_plans import LoadPlans
from router.offers import Candidate, Offers
from router.others import OtherRequests
from router.policy import Fetch, LeastBacklog, Policy, least
from router.prefix_hash import PrefixHasher, UInt64s
from router.prefix_index import PrefixIndex
from router.replication import Replica, ReplicationRule, Replicator
from router.shared_tier import SharedTiers
from router.state import ClusterState

_OUTPUTS_KEPT = 256
_DEFAULT_OUTPUT_TOKENS = 128


class NoWorkerError(Exception):
    """No worker can take the request now."""


class OverloadedError(NoWorkerError):
    """The request would miss its objective; `retry_after_s` is when to come again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class MismatchError(ValueError):
    """A worker announced another model, block size or fingerprint than the pool's."""


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request as the router sees it.

    token_ids: the prompt (None when it could not be tokenized: routing then fails open);
    salt: isolation of the tenant's cache; exclude: workers that must not be chosen. retry: it was
    let in before, and its worker failed it.
    prefix_hashes, prompt_tokens: instead of token_ids, from callers that have hashes already.
    session: what the client calls its conversation, for policies that stick to it.
    handed_tokens: of the prompt, computed already and on their way to whichever worker is chosen.
    """

    request_id: str
    token_ids: np.ndarray | None = None
    max_tokens: int = 0
    salt: int = 0
    exclude: frozenset[str] = frozenset()
    prefix_hashes: UInt64s | None = None
    prompt_tokens: int = 0
    session: str = ""
    retry: bool = False
    handed_tokens: int = 0

    @property
    def informed(self) -> bool:
        """Whether anything is known of the prompt."""
        return self.token_ids is not None or self.prefix_hashes is not None

    @property
    def tokens(self) -> int:
        """Length of the prompt; an engine computes at least one token."""
        if self.token_ids is not None:
            return max(len(self.token_ids), 1)
        return max(self.prompt_tokens, 1)


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, why, and what is expected of it; seconds are real ones.

    offers: what all workers were priced at (None in logs); fetch: what to bring there first.
    """

    request_id: str
    chosen: Candidate
    reason: str
    policy: str
    prompt_tokens: int
    informed: bool
    offers: Offers | None = field(default=None, compare=False, repr=False)
    profiles: tuple[NodeProfile, ...] = field(default=(), compare=False, repr=False)
    fetch: Fetch | None = None

    @property
    def worker(self) -> str:
        """The chosen worker."""
        return self.chosen.worker

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every worker that could have been chosen, priced; none in a log."""
        if self.offers is None:
            return ()
        return tuple(self.offers.candidate(i, profile) for i, profile in enumerate(self.profiles))

    @property
    def kind(self) -> str:
        """What the predicted TTFT is mostly made of: queue, load, compute or device."""
        chosen = self.chosen
        if chosen.queue_s > max(chosen.load_s, chosen.compute_s):
            return "queue"
        if chosen.counts.cached_tokens and chosen.load_s > chosen.compute_s:
            return "load"
        if chosen.counts.device_tokens > chosen.counts.new_tokens:
            return "device"
        return "compute"


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
    admission: whom to refuse; none: nobody. replication: when to copy hot prefixes, for policies
    that want it. first: where the order of workers begins, from 0 to below 1; ingresses that share
    workers take different ones, so that ties are broken differently.
    """

    policy: Policy
    secret: int
    index_blocks: int = 1_000_000
    stale_after_s: float = 10.0
    calibrate: bool = True
    calibrate_requests: int | None = None
    forecast_workers: int = 4
    admission: Admission | None = None
    replication: ReplicationRule = field(default_factory=ReplicationRule)
    first: float = 0.0


@dataclass(slots=True)
class _Outputs:
    """Recent output lengths, to guess when a stream ends."""

    lengths: list[int] = field(default_factory=list)
    typical: int = _DEFAULT_OUTPUT_TOKENS

    def add(self, tokens: int) -> None:
        self.lengths.append(tokens)
        del self.lengths[:-_OUTPUTS_KEPT]
        # Here, once per request that ends, not at each guess, once per worker and decision.
        self.typical = int(median(self.lengths))

    def guess(self, max_tokens: int) -> int:
        return max(1, min(self.typical, max_tokens) if max_tokens > 0 else self.typical)


class Router:
    """Decides where requests go, from what it was told."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.state = ClusterState(calibrate=config.calibrate, first=config.first)
        self.plans = LoadPlans()
        self.shared_tiers = SharedTiers()
        self.index: PrefixIndex | None = None
        self.hasher: PrefixHasher | None = None
        self._fingerprint = ""
        self._flights: dict[str, _Flight] = {}
        self._outputs = _Outputs()
        self._columns: NDArray[np.intp] = np.zeros(0, dtype=np.intp)
        self._outcomes = 0
        self._lateness = Lateness()
        self._replicator = Replicator(config.replication)
        self._others = OtherRequests(self._flights, self._reserve_other, self.state.finish)

    # -- what happens -------------------------------------------------------------------------

    def join(self, announcement: Announcement, now_s: float) -> None:
        """A worker joins, or announces itself anew.

        Raises:
            MismatchError: its blocks would not mean the same as the pool's.
        """
        if not self.state.workers:
            self._fingerprint = announcement.fingerprint
            if self.hasher is None or self.hasher.block_tokens != announcement.block_tokens:
                self.hasher = PrefixHasher(announcement.block_tokens, self.config.secret)
                self.index = PrefixIndex(self.hasher, self.config.index_blocks)
        pool_block_tokens = self.hasher.block_tokens if self.hasher is not None else 0
        if announcement.fingerprint != self._fingerprint:
            raise MismatchError(
                f"worker {announcement.worker} has fingerprint {announcement.fingerprint}, the "
                f"pool {self._fingerprint}: model, dtype, block size or chat template differ"
            )
        if announcement.block_tokens != pool_block_tokens:
            raise MismatchError(
                f"worker {announcement.worker} has blocks of {announcement.block_tokens} tokens, "
                f"the pool of {pool_block_tokens}: give the pool one block size"
            )
        self.plans.join(announcement)
        self.shared_tiers.join(announcement.worker, announcement.shared_tier)
        self.state.join(announcement, now_s)
        self._place(announcement.worker)

    def _reserve_other(self, worker: str, arrival: Arrival, now_s: float) -> None:
        """Put another ingress' request where it went, priced as if this router had sent it."""
        assert self.hasher is not None
        new = max(arrival.new_tokens, 1)
        offers = self.state.fleet.price(
            np.array([self.state.fleet.slot(worker)], dtype=np.intp),
            now_s,
            prompt_tokens=arrival.device_tokens + arrival.host_tokens + new,
            device_tokens=np.array([float(arrival.device_tokens)]),
            cached_tokens=np.array([float(arrival.host_tokens)]),
            output_tokens=self._outputs.guess(arrival.max_tokens),
            block_tokens=self.hasher.block_tokens,
        )
        if self.plans:
            self.plans.apply(offers)
        self.state.fleet.reserve(arrival.request_id, offers, 0)
        state = self.state.workers[worker]
        if self._forecasting:
            state.shadow.submit(self._job(arrival.request_id, offers, 0), now_s)
        if arrival.prefilled:
            self.state.prefilled(arrival.request_id, state, now_s)

    def _place(self, worker: str) -> None:
        """Remember where the index answers for a worker's column of the fleet."""
        assert self.index is not None
        slot = self.state.fleet.slot(worker)
        if slot >= len(self._columns):
            more = np.zeros(slot + 1 - len(self._columns), dtype=np.intp)
            self._columns = np.concatenate([self._columns, more])
        self._columns[slot] = self.index.column(worker)

    def leave(self, worker: str) -> list[str]:
        """A worker is gone; returns the requests that were in flight there."""
        self._others.void(worker, 0.0)
        self.state.leave(worker)
        self.plans.leave(worker)
        self.shared_tiers.leave(worker)
        self.config.policy.left(worker)
        self._lateness.left(worker)
        if self.index is not None:
            self.index.handle(WorkerGone(worker))
        lost = [r for r, flight in self._flights.items() if flight.chosen.worker == worker]
        for request_id in lost:
            del self._flights[request_id]
        return lost

    def blocks(self, events: Iterable[KVEvent]) -> None:
        """KV blocks were stored or removed somewhere; of a worker that is gone, too late to say."""
        if self.index is not None:
            for event in events:
                if event.worker in self.state.workers:
                    self.index.handle(event)

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
        if self.index is not None and worker in self.state.workers:
            self.index.handle(WorkerReset(worker))
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
            self._outputs.add(flight.output_tokens)
        return True

    # -- what is asked ------------------------------------------------------------------------

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
        if self.config.admission is not None and request.informed and not request.retry:
            decision, index = self._admitted(self.config.admission, request, decision, index)
            assert decision.offers is not None
            offers = decision.offers
        if self.config.policy.replicates:
            self._replicator.routed(offers, index)
        self.state.fleet.reserve(request.request_id, offers, index)
        if decision.informed:
            self.config.policy.routed(offers, index)
        if self._forecasting:
            shadow = self.state.workers[decision.worker].shadow
            shadow.submit(self._job(request.request_id, offers, index), now_s)
        self._flights[request.request_id] = _Flight(decision.chosen, decision.informed, now_s)
        if self.config.admission is not None:
            self._lateness.sent(
                request.request_id, decision.worker, now_s, float(offers.ttft_s[index]),
                float(delay_s(offers)[index]), self._token_s(offers, index),
                decision.chosen.node.dilation,
            )  # fmt: skip
        return decision

    def replicate(self, now_s: float) -> list[Replica]:
        """Hot prefixes to copy now, to fast links with room; none unless the policy wants it."""
        if not self.config.policy.replicates or self.index is None or self.hasher is None:
            return []
        fleet = self.state.fleet
        slots = fleet.ready(now_s, self.config.stale_after_s, frozenset())
        if not len(slots):
            return []
        return self._replicator.replicas(
            fleet, self.index, slots, self._columns[slots], self.hasher.block_tokens, now_s
        )

    def explain(self, request: RouteRequest, now_s: float) -> Decision:
        """What `route` would decide, without reserving anything."""
        return self._decide(request, now_s)[0]

    def backlogs_s(self, now_s: float) -> dict[str, tuple[float, float]]:
        """Seconds of queued work on each worker's (link, gpu)."""
        if self._forecasting:
            return {w: state.shadow.backlog_s(now_s) for w, state in self.state.workers.items()}
        return {w: self.state.fleet.backlog_s(w, now_s) for w in self.state.workers}

    @property
    def _forecasting(self) -> bool:
        return len(self.state.workers) <= self.config.forecast_workers

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._flights

    def _decide(self, request: RouteRequest, now_s: float) -> tuple[Decision, int]:
        fleet = self.state.fleet
        slots = fleet.ready(now_s, self.config.stale_after_s, request.exclude)
        if not len(slots):
            raise self._no_worker(request)
        offers = self._offers(request, slots, now_s)
        if self._forecasting:
            self._forecast(offers)
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
            self.state.fleet, offers, self._lateness, self._sequences(offers.workers)
        )
        refused = judged.refused
        if not refused[index]:
            return decision, index
        if not refused.all():
            late = frozenset(offers.workers[row] for row in np.flatnonzero(refused))
            again = replace(request, exclude=request.exclude | late)
            return self._decide(again, offers.now_s)
        why, retry_after_s = judged.refusal()
        raise OverloadedError(f"the cluster is full: {why}", retry_after_s)

    def _token_s(self, offers: Offers, index: int) -> float:
        """What admission expects of a request's tokens there, before it has learnt anything."""
        share = self._lateness.share(offers.workers[index], offers.now_s)
        return float(token_s(offers, np.array([share]))[index])

    def _sequences(self, workers: list[str]) -> NDArray[np.float64]:
        """How many requests each runs at a time, as it announced; without end if it did not."""
        said = (self.state.workers[worker].announcement.max_sequences for worker in workers)
        return np.array([count or np.inf for count in said])

    def _offers(self, request: RouteRequest, slots: NDArray[np.intp], now_s: float) -> Offers:
        """The request priced on `slots`, by what the index says each of them holds."""
        assert self.hasher is not None and self.index is not None
        hashes = request.prefix_hashes
        if request.token_ids is not None:
            hashes = self.hasher.prefix_hashes(request.token_ids, request.salt)
        size, total = self.hasher.block_tokens, request.tokens
        device, cached = np.zeros(len(slots)), np.zeros(len(slots))
        if hashes is not None and len(hashes):
            # An engine computes at least the last token: a full hit gives its last block back.
            usable = (total - 1) // size
            columns = self._columns[slots]
            on_device, in_host = self.index.match_columns(hashes)
            blocks = np.minimum(on_device[columns], usable)
            device = blocks * float(size)
            cached = np.minimum(in_host[columns], usable - blocks) * float(size)
            if self.shared_tiers:
                names = [self.state.fleet.workers[slot] for slot in slots]
                self.shared_tiers.widen(names, device, cached)
        if request.handed_tokens:
            handed = float(min(request.handed_tokens, total - 1) // size * size)
            device = np.maximum(device, handed)
            cached = np.minimum(cached, (total - 1) // size * float(size) - device)
        price = partial(
            self.state.fleet.price,
            slots,
            now_s,
            prompt_tokens=total,
            device_tokens=device,
            output_tokens=self._outputs.guess(request.max_tokens),
            block_tokens=size,
            prefix_hashes=hashes,
            session=request.session,
        )
        offers = price(cached_tokens=cached)
        if self.config.policy.fetches:
            held = device + cached
            holder = least(-held, offers.net_backlog_s)
            if held[holder]:
                everywhere = held[holder] - device
                offers.fetching = price(
                    cached_tokens=everywhere,
                    fetch_tokens=everywhere - cached,
                    fetch_from=offers.workers[holder],
                )
        if self.plans:
            self.plans.apply(offers)
        return offers

    def _forecast(self, offers: Offers) -> None:
        """Replace the arithmetic of queues by each engine's forecast."""
        now_s = offers.now_s
        for row, worker in enumerate(offers.workers):
            shadow = self.state.workers[worker].shadow
            job = self._job("", offers, row)
            ready_s = shadow.first_token_s(job, now_s) + float(offers.fixed_s[row]) / 2
            plan = offers.plans.get(row)
            offers.ttft_s[row] = ready_s - now_s - (plan.hidden_s if plan else 0.0)
            offers.harm_s[row] = shadow.decode_delay_s(job.new_tokens, job.context_tokens)
            link_s, gpu_s = shadow.backlog_s(now_s)
            offers.link_backlog_s[row], offers.gpu_backlog_s[row] = link_s, gpu_s

    def _job(self, request_id: str, offers: Offers, row: int) -> Job:
        # Half of what a request costs besides the engine is spent before it reaches it.
        arrival_s = offers.now_s + float(offers.fixed_s[row]) / 2
        cached, new = int(offers.cached_tokens[row]), int(offers.new_tokens[row])
        plan = offers.plans.get(row)
        if plan is not None:
            loaded = plan.crossing_tokens
            cached, new = loaded, new + cached - loaded
        return Job(
            request_id=request_id,
            arrival_s=arrival_s,
            host_tokens=cached,
            context_tokens=int(offers.device_tokens[row]) + cached,
            new_tokens=new,
            output_tokens=offers.expected_output_tokens,
        )

    def _no_worker(self, request: RouteRequest) -> NoWorkerError:
        known = self.state.workers.keys()
        excluded = len(known & request.exclude)
        return NoWorkerError(
            f"no worker is ready ({len(known)} known, {excluded} excluded, "
            f"{len(known) - excluded} not heard from in the last "
            f"{self.config.stale_after_s:g} s)"
        )


_FAIL_OPEN = LeastBacklog()


def without_candidates(decision: Decision) -> Decision:
    """A copy that keeps only the choice, for logs."""
    return replace(decision, offers=None, profiles=())
