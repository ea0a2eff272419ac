"""The pure router in a running cluster: keeps time, counts, and remembers decisions and their
outcomes for a while (`GET /v1/decisions`). Lives on the decider's event loop and nowhere else."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import structlog

from kappa import metrics as m
from kappa.protocol import Announcement, WorkerReport
from kappa_router.config import RouterConfig
from kappa_router.decision import (
    Decision,
    NoWorkerError,
    OverloadedError,
    RouteRequest,
    without_candidates,
)
from kappa_router.live.charges import Charges
from kappa_router.live.circuit_breaker import Blocked
from kappa_router.live.decision_records import SENT_MARK, DecisionRecord, Records
from kappa_router.live.membership import Membership, MembershipRule
from kappa_router.live.metrics import RouterMetrics
from kappa_router.live.record_file import RecordFile
from kappa_router.live.replica_registry import REGISTRY, ReplicaRegistry
from kappa_router.live.suspects import Suspects
from kappa_router.policy import Policy
from kappa_router.recording import RecordedRouter
from kappa_router.rollout import Arm, Present, ShadowDecision
from kappa_router.router import Router

log = structlog.get_logger(__name__)

_NO_WORKER_RETRY_S = 5.0


class Explained(NamedTuple):
    """A decision about a request, as it was asked, and when."""

    request: RouteRequest
    decision: Decision
    # Workers left out.
    avoided: Blocked
    now_s: float


class LiveRouter:
    """The router that a decider talks to."""

    def __init__(
        self,
        config: RouterConfig,
        record: str | None = None,
        rule: MembershipRule | None = None,
        *,
        registry: ReplicaRegistry | None = None,
        counting: bool = True,
        request_log: bool = True,
    ) -> None:
        """Make it on the event loop that it will live on. record: a file for its log. registry:
        knows which workers there are; none: that of this process. counting: keep metrics.
        request_log: a line at each request's end."""
        self.metrics = RouterMetrics(counting)
        dropped = partial(self.metrics.inc, m.RECORD_DROPPED)
        self._record = RecordFile(record, dropped) if record else None
        self._request_log = request_log
        self.router = RecordedRouter(config, self._record) if self._record else Router(config)
        self.charges = Charges()
        self.records = Records()
        self.suspects = Suspects()
        self._nonce, self._sent = secrets.token_hex(8), itertools.count()
        self.changed = asyncio.Event()
        """Set when a worker joins or leaves."""
        self.finished: Callable[[str], None] = lambda request_id: None
        """Called with each request of ours that a worker reports to be over, after its tokens."""
        # By worker: prompt tokens by where they came from, since it joined.
        self.prompt_tokens: dict[str, Counter[str]] = {}
        # The machine's clock may be set while we run; predictions must not jump with it.
        self._epoch_s = time.time() - time.monotonic()
        rule = rule or MembershipRule()
        self.members = Membership(
            self.router, registry or REGISTRY, rule, self.now_s, listener=self
        )

    def now_s(self) -> float:
        """Seconds since the epoch as of the start, and never a jump since."""
        return self._epoch_s + time.monotonic()

    def use_policy(self, policy: Policy) -> None:
        """Decide by another policy from now on. ValueError: decisions are recorded, and the record
        names one."""
        if self._record is not None:
            raise ValueError("router.record is on, whose log replays under one policy: turn it off")
        self.router.config = replace(self.router.config, policy=policy)

    @property
    def recorded(self) -> bool:
        """Whether decisions are written to a log, which replays what it has the tokens of."""
        return self._record is not None

    async def close(self) -> None:
        await self.members.close()
        if self._record is not None:
            self._record.close()

    @property
    def choosable(self) -> int:
        """Workers that could be chosen now: they report, and are neither gone nor finishing."""
        stale_after_s, gone = self.router.config.stale_after_s, self.members.blocked().gone
        return len(self.router.fleet.ready(self.now_s(), stale_after_s, gone))

    # -- requests -----------------------------------------------------------------------------

    def route(
        self,
        request: RouteRequest,
        explained: Explained | None = None,
        present: Present | None = None,
    ) -> Decision:
        """Decide, reserve, count. explained: by `priced`, a moment ago. present: the rule
        that steers instead of ours, which is written down beside it. Raises `NoWorkerError`."""
        if present is not None:
            return self._shadowed(request, explained, present)
        start_s = time.perf_counter()
        if explained is None:
            asked = self._asked(self.router.route, request)
            decision = asked.decision
        else:
            asked = explained
            decision = self.router.route(asked.request, asked.now_s, asked.decision)
        self._noted(asked, decision, "kappa")
        self.metrics.observe(m.DECISION_SECONDS, value=time.perf_counter() - start_s)
        return decision

    def _noted(self, asked: Explained, decision: Decision, steered: Arm) -> None:
        chosen, node = decision.chosen, decision.chosen.node.name
        self.metrics.inc(m.DECISIONS, node, decision.policy, decision.reason, chosen.bound)
        self.metrics.observe(m.RATIO, node, value=chosen.counts.ratio)
        self.metrics.observe(m.PREDICTED_TTFT, node, value=chosen.ttft_s)
        self.metrics.inc(m.ROLLOUT_REQUESTS, steered)
        request_id, avoided = decision.request_id, asked.avoided
        self.members.breakers.sent(decision.worker, request_id, self.now_s())
        record = DecisionRecord(
            without_candidates(decision),
            time.time(),
            self._load(),
            asked.request.tenant,
            attempt=int(asked.request.retry),
            avoided=tuple(sorted(avoided.gone | avoided.failing)),
            steered=steered,
            sent_as=self.sent_as(request_id),
            soonest_other=decision.soonest_other,
        )
        self.records.add(record)

    def sent_as(self, request_id: str) -> str:
        """A new id for a request at its worker. Clients choose their ids, so two deciders may have
        one each of the same; what a worker reports must not be taken for the other's."""
        return f"{request_id}{SENT_MARK}{self._nonce}-{next(self._sent)}"

    def _shadowed(
        self, request: RouteRequest, explained: Explained | None, present: Present
    ) -> Decision:
        asked = explained or self.priced(request)
        ours, estimates = asked.decision, asked.decision.priced
        chosen = estimates.workers[present.choose(estimates).index]
        decision = self.router.route(asked.request, asked.now_s, ours, chosen)
        decision = replace(decision, reason=f"{present.arm}_rule")
        self._noted(asked, decision, present.arm)
        shadow = ShadowDecision(
            ours.worker, ours.chosen.node.name, ours.reason, ours.chosen.ttft_s, decision.worker,
            decision.chosen.node.name, decision.chosen.ttft_s,
        )  # fmt: skip
        self.records[request.request_id].shadow = shadow
        self.metrics.inc(m.SHADOWS, "true" if shadow.agreed else "false")
        self.metrics.inc(m.SHADOW_SAVING, by=max(shadow.saving_s, 0.0))
        return decision

    def moved(self, request: RouteRequest, worker: str) -> Decision:
        """A request that was thought to go elsewhere is on `worker`, as its present balancer says;
        what it took so far counts there. Raises NoWorkerError, and changes nothing."""
        if worker not in self.router.workers or request.request_id not in self.router:
            raise NoWorkerError(f"{worker} is not known, or the request is over")
        record, breakers = self.records[request.request_id], self.members.breakers
        sent_s = self.router.flights[request.request_id].sent_s
        breakers.abandoned(record.decision.worker, request.request_id)
        others = frozenset(self.router.workers) - {worker}
        decision = self.router.route(replace(request, exclude=others, retry=True), self.now_s())
        breakers.sent(worker, request.request_id, self.now_s())
        self.router.flights[request.request_id].sent_s = sent_s
        record.decision = replace(without_candidates(decision), reason=record.decision.reason)
        if record.shadow is not None:
            chosen = decision.chosen
            record.shadow = replace(
                record.shadow, present_worker=worker, present_node=chosen.node.name,
                present_predicted_ttft_s=chosen.ttft_s,
            )  # fmt: skip
        return decision

    def explain(self, request: RouteRequest) -> Decision:
        """The decision that `route` would make without admission; nothing is reserved. Raises
        `NoWorkerError`."""
        asked = self.priced(request)
        return self.router.in_time(asked.request, asked.decision, asked.now_s)

    def priced(self, request: RouteRequest) -> Explained:
        """The cheapest, whatever limit the request asks for, to be routed at once."""
        return self._asked(self.router.explain, request)

    def _asked(
        self, decide: Callable[[RouteRequest, float], Decision], request: RouteRequest
    ) -> Explained:
        """Decide among those that do not fail; where there are none, among all that seem to live.
        Raises `NoWorkerError`."""
        blocked, now_s = self.members.blocked(), self.now_s()
        gone = request.exclude | blocked.gone
        if blocked.failing:
            fit = replace(request, exclude=gone | blocked.failing)
            try:
                return Explained(fit, decide(fit, now_s), blocked, now_s)
            except OverloadedError:
                raise
            except NoWorkerError:
                pass
        asked = replace(request, exclude=gone) if blocked.gone else request
        return Explained(asked, decide(asked, now_s), blocked, now_s)

    def first_token(self, request_id: str, worker: str = "") -> None:
        """A request's first token came, as its stream shows or as `worker` reports, whichever is
        first; what a worker reports of a request that another has by now is too late."""
        record = self.records.get(request_id)
        if record is not None and worker and record.decision.worker != worker:
            return
        ttft_s = self.router.first_token(request_id, self.now_s())
        if ttft_s is None or record is None:
            return
        record.ttft_s = ttft_s
        chosen = record.decision.chosen
        self.metrics.observe(m.TTFT, chosen.node.name, value=ttft_s)
        self.metrics.observe(m.ROLLOUT_TTFT, record.steered, value=ttft_s)
        if self.members.breakers.succeeded(chosen.worker, request_id):
            log.info("breaker_closed", worker=chosen.worker)
        if record.decision.informed and ttft_s > 0:
            error = abs(chosen.ttft_s - ttft_s) / ttft_s
            self.metrics.observe(m.TTFT_ERROR, chosen.node.name, record.decision.kind, value=error)

    def tokens(self, request_id: str, count: int) -> None:
        self.router.tokens(request_id, count)
        record = self.records.get(request_id)
        if record is not None and count:
            self.metrics.inc(m.OUTPUT_TOKENS, record.decision.chosen.node.name, by=count)

    def release(self, request_id: str, end: str) -> None:
        """A request ended: `done`, `refused` by its engine, `error`, `timeout`, `deadline`,
        `client_gone`, `worker_full`, `worker_died`, `unjudged`: it failed, which tells nothing of
        its worker, or `unsent`: no worker saw it. Idempotent."""
        record = self.records.get(request_id)
        if not self.router.release(request_id, self.now_s(), complete=end == "done"):
            return
        if record is None:
            return
        record.end = end
        worker, breakers = record.decision.worker, self.members.breakers
        self.suspects.ended(worker, self.now_s())
        if end in ("done", "refused"):
            breakers.succeeded(worker, request_id)
        elif end in ("error", "worker_died"):
            if breakers.failed(worker, request_id, self.now_s()):
                self.breaker_opened(worker, "errors")
        else:
            breakers.abandoned(worker, request_id)
        self.members.ended(worker)
        if self._request_log:
            log.info("request_done", **record.log_line())

    def retried(self, request_id: str, why: str) -> None:
        record = self.records.get(request_id)
        if record is not None:
            self.metrics.inc(m.RETRIES, record.decision.chosen.node.name, why)

    def answered(self, tenant: str, status: int, code: str | None = None) -> None:
        """A request of `tenant` was answered, with an error of that code if there is one."""
        outcome = "answered" if status < 400 else code or "error"
        self.metrics.inc(m.REQUESTS, str(status))
        self.metrics.inc(m.TENANT_REQUESTS, self.metrics.tenant(tenant), outcome)

    def retry_after_s(self, model: str = "") -> float:
        """Seconds until it makes sense to come back: the least backlog of any worker, of `model` if
        that is given, or its next trial."""
        now_s, gone = self.now_s(), self.members.blocked().gone
        backlogs = self.router.backlogs_s(now_s).items()
        able = {announced.worker for announced in self.announcements(model)}
        waits_s = (max(pair) for worker, pair in backlogs if worker in able - gone)
        soonest_s = min(waits_s, default=_NO_WORKER_RETRY_S)
        return max(soonest_s, self.members.breakers.retry_after_s(now_s))

    def _load(self) -> float:
        """Share of workers that have something to compute or load, as far as is known."""
        workers = self.router.workers.values()
        return sum(bool(s.flights) for s in workers) / max(len(workers), 1)

    # -- workers ------------------------------------------------------------------------------

    def announcements(self, model: str = "") -> list[Announcement]:
        """Announcements of the workers that serve `model`, of all if none is given."""
        known = (state.announcement for state in self.router.workers.values())
        return [announced for announced in known if model in ("", announced.model)]

    def worker_joined(self) -> None:
        self.changed.set()

    def worker_left(self, worker: str, lost: list[str]) -> None:
        self.changed.set()
        self.prompt_tokens.pop(worker, None)
        self.charges.left(worker)
        self.suspects.left(worker)
        self.metrics.left(worker)
        for request_id in lost:
            if request_id in self.records:
                self.records[request_id].end = "worker_died"
        self.node_renamed(worker)

    def node_renamed(self, worker: str) -> None:
        self.metrics.forget("worker", worker)

    def worker_died(self, worker: str) -> None:
        in_flight = sum(1 for _ in self.router.flights_on(worker))
        self.suspects.died(worker, self._node(worker), in_flight, self.now_s())

    def breaker_opened(self, worker: str, why: str) -> None:
        self.metrics.inc(m.BREAKER_OPENED, self._node(worker), why)

    def stream_gap(self, worker: str) -> None:
        self.metrics.inc(m.STREAM_GAPS, self._node(worker))

    def stream_flood(self, worker: str) -> None:
        self.metrics.inc(m.STREAM_FLOODS, self._node(worker))

    def task_restarted(self, task: str) -> None:
        self.metrics.inc(m.TASK_RESTARTS, task)

    def _node(self, worker: str) -> str:
        state = self.router.workers.get(worker)
        return state.announcement.node.name if state is not None else worker

    def others(self, report: WorkerReport) -> None:
        """As `Pool.others`."""
        self.router.others(report, self.now_s())
        if report.finished:
            self.suspects.ended(report.worker, self.now_s())

    def reported(self, report: WorkerReport) -> None:
        """A worker's report: what it says of requests goes by our ids, as far as they are ours."""
        state = self.router.workers.get(report.worker)
        if state is None:
            return
        report, worker = report.renamed(self.records.own), report.worker
        self.router.report(report, self.now_s())
        if any(request_id not in self.router for request_id in report.finished):
            # Others' requests; the ends of ours `release` brings, too.
            self.suspects.ended(worker, self.now_s())
        node = state.announcement.node
        host = "lmcache" if state.announcement.tier == "lmcache" else "host"
        for admission in report.admitted:
            record = self.records.of(admission.request_id, worker)
            if record is not None:
                record.admitted = admission
            loaded = admission.host_tokens - admission.disk_tokens
            came = {"device": admission.device_tokens, host: loaded, "new": admission.new_tokens}
            if admission.disk_tokens:
                came["disk"] = admission.disk_tokens
            self.prompt_tokens.setdefault(worker, Counter()).update(came)
            for source, tokens in came.items():
                self.metrics.inc(m.PROMPT_TOKENS, node.name, source, by=tokens)
        for request_id in report.prefilled:
            self.first_token(request_id, worker)
        for spent in report.spent:
            record = self.records.of(spent.request_id, worker)
            if record is not None:
                record.spent = spent
        for request_id in report.finished:
            record = self.records.of(request_id, worker)
            if record is not None:
                record.engine_failed = request_id in report.failed
                record.generated_tokens = report.generated.get(request_id, 0)
                self.finished(request_id)
        self.metrics.reported(report, node.name, paced=node.source == "paced")
        gained = self.charges.report(worker, report.charges, report.time_s, report.steps_total)
        for tenant, charge in gained.items():
            for resource, seconds in zip(("vram", "gpu", "link"), charge, strict=True):
                self.metrics.inc(m.TENANT_CHARGE, self.metrics.tenant(tenant), resource, by=seconds)
