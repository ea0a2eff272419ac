"""The router without its surroundings: events in, decisions out.

It joins the prefix index, the workers' state and a policy. The ingress feeds it what happens (a
worker joins, blocks are stored, a first token comes) and asks it where a request should go; the
simulator and the replay of a recorded log do exactly the same. Pure: each call takes the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from kappa.report import Announcement, WorkerReport
from kappa.types import TokenCounts
from router.jobs import Job
from router.kv_events import KVEvent, WorkerGone
from router.policy import Candidate, LeastBacklog, Policy
from router.prefix_hash import PrefixHasher
from router.prefix_index import Match, PrefixIndex
from router.state import ClusterState, WorkerState

_OUTPUTS_KEPT = 256
_DEFAULT_OUTPUT_TOKENS = 128


class NoWorkerError(Exception):
    """No worker can take the request now."""


class MismatchError(ValueError):
    """A worker announced another model, block size or fingerprint than the pool's."""


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request as the router sees it.

    token_ids: the prompt (None when it could not be tokenized: routing then fails open);
    salt: isolation of the tenant's cache; exclude: workers that must not be chosen.
    """

    request_id: str
    token_ids: np.ndarray | None
    max_tokens: int
    salt: int = 0
    exclude: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, why, and what is expected of it; seconds are real ones."""

    request_id: str
    chosen: Candidate
    reason: str
    policy: str
    candidates: tuple[Candidate, ...]
    prompt_tokens: int
    informed: bool

    @property
    def worker(self) -> str:
        """The chosen worker."""
        return self.chosen.worker

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
    decision: Decision
    routed_s: float
    first_token: bool = False
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """index_blocks bounds the prefix index; stale_after_s a worker's silence."""

    policy: Policy
    secret: int
    index_blocks: int = 1_000_000
    stale_after_s: float = 10.0
    calibrate: bool = True
    calibrate_requests: int | None = None


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
        self.state = ClusterState(calibrate=config.calibrate)
        self.index: PrefixIndex | None = None
        self.hasher: PrefixHasher | None = None
        self._fingerprint = ""
        self._flights: dict[str, _Flight] = {}
        self._outputs = _Outputs()
        self._outcomes = 0

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
        self.state.join(announcement, now_s)

    def leave(self, worker: str) -> list[str]:
        """A worker is gone; returns the requests that were in flight there."""
        self.state.leave(worker)
        if self.index is not None:
            self.index.handle(WorkerGone(worker))
        lost = [r for r, flight in self._flights.items() if flight.decision.worker == worker]
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
        """A worker measured something."""
        self.state.report(report, now_s)

    def first_token(self, request_id: str, now_s: float) -> float | None:
        """A request's first token came; returns its TTFT, or None if it is not in flight."""
        flight = self._flights.get(request_id)
        if flight is None or flight.first_token:
            return None
        flight.first_token = True
        self._outcomes += 1
        limit = self.config.calibrate_requests
        if limit is not None and self._outcomes > limit:
            self.state.calibrate = False
        ttft_s = now_s - flight.routed_s
        chosen = flight.decision.chosen
        worker = self.state.workers.get(chosen.worker)
        if worker is not None:
            worker.shadow.prefilled(request_id, now_s)
            if flight.decision.informed and chosen.in_flight == 0:
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
        worker = self.state.workers.get(flight.decision.worker)
        if worker is not None:
            worker.shadow.finish(request_id, now_s)
        if complete and flight.output_tokens:
            self._outputs.add(flight.output_tokens)
        return True

    # -- what is asked ------------------------------------------------------------------------

    @property
    def reservations(self) -> int:
        """Requests in flight."""
        return len(self._flights)

    def in_flight_on(self, worker: str) -> int:
        """Requests in flight on one worker."""
        return sum(flight.decision.worker == worker for flight in self._flights.values())

    def route(self, request: RouteRequest, now_s: float) -> Decision:
        """Choose a worker and reserve it.

        Raises:
            NoWorkerError: none is known, heard from lately, and not excluded.
        """
        decision = self._decide(request, now_s)
        chosen = decision.chosen
        # Asked again under the same id: the earlier answer was not taken.
        self.release(request.request_id, now_s, complete=False)
        state = self.state.workers[chosen.worker]
        job = self._job(request, chosen.counts, state, now_s)
        state.shadow.submit(job, now_s)
        self._flights[request.request_id] = _Flight(decision, now_s)
        return decision

    def explain(self, request: RouteRequest, now_s: float) -> Decision:
        """What `route` would decide, without reserving anything."""
        return self._decide(request, now_s)

    def backlogs_s(self, now_s: float) -> dict[str, tuple[float, float]]:
        """Seconds of queued work on each worker's (link, gpu)."""
        return {w: state.shadow.backlog_s(now_s) for w, state in self.state.workers.items()}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._flights

    def _decide(self, request: RouteRequest, now_s: float) -> Decision:
        informed = request.token_ids is not None and self.hasher is not None
        matches: Mapping[str, Match] = {}
        prompt_tokens = 0
        if request.token_ids is not None and self.hasher is not None and self.index is not None:
            prompt_tokens = len(request.token_ids)
            hashes = self.hasher.prefix_hashes(request.token_ids, request.salt)
            matches = self.index.match_all(hashes)
        candidates = tuple(
            self._price(worker, state, request, matches.get(worker, Match(0, 0)), now_s)
            for worker, state in self.state.workers.items()
            if worker not in request.exclude and now_s - state.seen_s <= self.config.stale_after_s
        )
        if not candidates:
            known = self.state.workers.keys()
            excluded = len(known & request.exclude)
            raise NoWorkerError(
                f"no worker is ready ({len(known)} known, {excluded} excluded, "
                f"{len(known) - excluded} not heard from in the last "
                f"{self.config.stale_after_s:g} s)"
            )
        policy = self.config.policy if informed else LeastBacklog()
        choice = policy.choose(candidates)
        return Decision(
            request_id=request.request_id,
            chosen=candidates[choice.index],
            reason=choice.reason if informed else "uninformed_least_backlog",
            policy=policy.name,
            candidates=candidates,
            prompt_tokens=prompt_tokens,
            informed=informed,
        )

    def _counts(self, request: RouteRequest, match: Match) -> TokenCounts:
        assert self.hasher is not None
        total = max(len(request.token_ids), 1) if request.token_ids is not None else 1
        size = self.hasher.block_tokens
        # An engine computes at least the last token, so a full hit gives its last block back.
        usable = (total - 1) // size
        device = min(match.device_blocks, usable) * size
        host = min(match.host_blocks, usable - device // size) * size
        return TokenCounts(device, host, total - device - host)

    def _job(
        self, request: RouteRequest, counts: TokenCounts, state: WorkerState, now_s: float
    ) -> Job:
        # Half of what a request costs besides the engine is spent before it reaches it.
        arrival_s = now_s + state.calibration.overhead_s / 2
        return Job(
            request_id=request.request_id,
            arrival_s=arrival_s,
            host_tokens=counts.cached_tokens,
            context_tokens=counts.device_tokens + counts.cached_tokens,
            new_tokens=counts.new_tokens,
            output_tokens=self._outputs.guess(request.max_tokens),
        )

    def _price(
        self, worker: str, state: WorkerState, request: RouteRequest, match: Match, now_s: float
    ) -> Candidate:
        counts = self._counts(request, match)
        shadow, said = state.shadow, state.announcement
        job = self._job(request, counts, state, now_s)
        context = counts.device_tokens + counts.cached_tokens
        ready_s = shadow.first_token_s(job, now_s) + state.calibration.overhead_s / 2
        ttft_s = ready_s - now_s
        speed = shadow.speed
        load_s = speed.load_s(counts.cached_tokens)
        compute_s = _prefill_s(speed.budget_tokens, counts.new_tokens, context, speed.step.real_s)
        link_s, gpu_s = shadow.backlog_s(now_s)
        return Candidate(
            worker=worker,
            node=said.node,
            counts=counts,
            kappa_crit=said.kappa_crit,
            queue_s=max(ttft_s - load_s - compute_s - state.calibration.overhead_s, 0.0),
            load_s=load_s,
            compute_s=compute_s,
            ttft_s=ttft_s,
            harm_s=shadow.decode_delay_s(counts.new_tokens, context),
            backlog_s=max(link_s, gpu_s),
            in_flight=len(shadow),
        )


def _prefill_s(
    budget: int, new: int, context: int, real_s: Callable[[list[tuple[int, int]]], float]
) -> float:
    """Real seconds to prefill `new` tokens alone, in steps of at most `budget`."""
    total_s = 0.0
    while new > 0:
        chunk = min(new, budget)
        total_s += real_s([(chunk, context)])
        new -= chunk
        context += chunk
    return total_s


def without_candidates(decision: Decision) -> Decision:
    """A copy that keeps only the choice, for logs."""
    return replace(decision, candidates=())
