"""The pure router in a running cluster: follows workers, keeps time, counts and remembers.

Lives on the ingress' event loop and nowhere else. Ray's router posts announcements on the board
(from another thread); each announced worker gets a feed; what the feeds say goes into `Router`.
Every decision and its outcome is counted and kept in a short memory (`GET /v1/decisions`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from kappa import metrics as m
from kappa.report import Admission, Announcement, Spent, WorkerReport
from router.board import BOARD, Announcements
from router.charges import Charges
from router.core import (
    Decision,
    MismatchError,
    Router,
    RouterConfig,
    RouteRequest,
    without_candidates,
)
from router.feed import WorkerFeed
from router.metrics import ENGINE_STATES, RouterMetrics
from router.recording import RecordedRouter
from router.tenants import Tenants, shares

log = structlog.get_logger(__name__)

_MEMORY = 4096
_NO_WORKER_RETRY_S = 5.0


@dataclass(slots=True)
class Record:
    """A decision and what became of it; seconds are real ones."""

    decision: Decision
    time_s: float
    load: float
    tenant: str = ""
    ttft_s: float | None = None
    admitted: Admission | None = None
    spent: Spent | None = None
    end: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the candidates."""
        decision, chosen = self.decision, self.decision.chosen
        actual, spent = self.admitted, self.spent
        return {
            "request_id": decision.request_id,
            "time_s": self.time_s,
            "tenant": self.tenant,
            "node": chosen.node.name,
            "paced": chosen.node.source == "paced",
            "policy": decision.policy,
            "reason": decision.reason,
            "kind": decision.kind,
            "bound": chosen.bound,
            "ratio": chosen.counts.ratio,
            "kappa_crit": chosen.kappa_crit,
            "predicted": {
                "device_tokens": chosen.counts.device_tokens,
                "cached_tokens": chosen.counts.cached_tokens,
                "new_tokens": chosen.counts.new_tokens,
                "queue_s": chosen.queue_s,
                "load_s": chosen.load_s,
                "compute_s": chosen.compute_s,
                "ttft_s": chosen.ttft_s,
            },
            "actual": {
                "device_tokens": actual.device_tokens if actual else None,
                "cached_tokens": actual.host_tokens if actual else None,
                "new_tokens": actual.new_tokens if actual else None,
                "queue_s": self._queue_s(),
                "load_s": spent.load_s if spent else None,
                "compute_s": spent.compute_s if spent else None,
                "ttft_s": self.ttft_s,
            },
            "load": self.load,
            "end": self.end,
        }

    def _queue_s(self) -> float | None:
        """What neither its own load nor the steps that computed its prompt account for."""
        if self.spent is None or self.ttft_s is None:
            return None
        return max(self.ttft_s - self.spent.load_s - self.spent.compute_s, 0.0)


class LiveRouter:
    """What the ingress talks to."""

    def __init__(self, config: RouterConfig, record: str | None = None) -> None:
        """Make it on the event loop that it will live on; `record` names a file for its log."""
        self.metrics = RouterMetrics()
        self.router = RecordedRouter(config, _writer(record)) if record else Router(config)
        self.charges = Charges()
        self.records: OrderedDict[str, Record] = OrderedDict()
        self._feeds: dict[str, WorkerFeed] = {}
        self._said: dict[str, Mapping[str, Any]] = {}
        self._deployments: dict[str, str] = {}
        self._refused: set[str] = set()
        self._kappa_eff: dict[str, float | None] = {}
        self._loop = asyncio.get_running_loop()
        self._closing: set[asyncio.Task[None]] = set()
        self._board = BOARD
        self._board.listen(self._heard)

    async def close(self) -> None:
        """Follow no worker any more; returns when their sockets are closed."""
        self._board.unlisten(self._heard)
        feeds, self._feeds = list(self._feeds.values()), {}
        for feed in feeds:
            await feed.close()
        if self._closing:
            await asyncio.wait(self._closing)

    # -- requests -----------------------------------------------------------------------------

    def route(self, request: RouteRequest, tenant: str = "") -> Decision:
        """Decide, reserve, count; raises `NoWorkerError`."""
        start_s = time.perf_counter()
        decision = self.router.route(request, time.time())
        self.metrics.observe(m.DECISION_SECONDS, value=time.perf_counter() - start_s)
        chosen, node = decision.chosen, decision.chosen.node.name
        self.metrics.inc(m.DECISIONS, node, decision.policy, decision.reason, chosen.bound)
        self.metrics.observe(m.RATIO, node, value=chosen.counts.ratio)
        self.metrics.observe(m.PREDICTED_TTFT, node, value=chosen.ttft_s)
        self.records[request.request_id] = Record(
            without_candidates(decision), time.time(), self._load(), tenant
        )
        while len(self.records) > _MEMORY:
            self.records.popitem(last=False)
        return decision

    def first_token(self, request_id: str) -> None:
        """A request's first token came, whoever noticed first."""
        ttft_s = self.router.first_token(request_id, time.time())
        record = self.records.get(request_id)
        if ttft_s is None or record is None:
            return
        record.ttft_s = ttft_s
        chosen = record.decision.chosen
        self.metrics.observe(m.TTFT, chosen.node.name, value=ttft_s)
        if record.decision.informed and ttft_s > 0:
            error = abs(chosen.ttft_s - ttft_s) / ttft_s
            self.metrics.observe(m.TTFT_ERROR, chosen.node.name, record.decision.kind, value=error)

    def tokens(self, request_id: str, count: int) -> None:
        """Output tokens went out."""
        self.router.tokens(request_id, count)
        record = self.records.get(request_id)
        if record is not None and count:
            self.metrics.inc(m.OUTPUT_TOKENS, record.decision.chosen.node.name, by=count)

    def release(self, request_id: str, end: str) -> None:
        """A request ended: `done`, `error`, `client_gone` or `worker_died`. Idempotent."""
        if self.router.release(request_id, time.time(), complete=end == "done"):
            record = self.records.get(request_id)
            if record is not None:
                record.end = end
                log.info("request_done", **_log_line(record))

    def answered(self, tenant: str, status: int, code: str | None = None) -> None:
        """A request of `tenant` was answered, with an error of that code if there is one."""
        self.metrics.inc(m.REQUESTS, str(status))
        outcome = "answered" if status < 400 else code or "error"
        self.metrics.inc(m.TENANT_REQUESTS, self.metrics.tenant(tenant), outcome)

    def retry_after_s(self) -> float:
        """When it makes sense to come back: the least backlog of any worker."""
        backlogs = self.router.backlogs_s(time.time())
        return min((max(pair) for pair in backlogs.values()), default=_NO_WORKER_RETRY_S)

    # -- workers ------------------------------------------------------------------------------

    def _heard(self, deployment: str, posted: Announcements) -> None:
        """Called on Ray's thread."""
        self._loop.call_soon_threadsafe(self._posted, deployment, posted)

    def _posted(self, deployment: str, posted: Announcements) -> None:
        for worker, data in posted.items():
            if data and self._said.get(worker) != data:
                self._deployments[worker] = deployment
                self._join(worker, data)
        for worker in [w for w in self._said if w not in posted]:
            if self._deployments.get(worker) == deployment:
                self._leave(worker)

    def _join(self, worker: str, data: Mapping[str, Any]) -> None:
        try:
            announcement = Announcement.from_dict(data)
            self.router.join(announcement, time.time())
        except (MismatchError, ValueError, TypeError) as error:
            if worker not in self._refused:
                self._refused.add(worker)
                log.error("worker_refused", worker=worker, reason=str(error))
            return
        self._kappa_eff[worker] = self.router.plans.kappa_eff(worker)
        first = worker not in self._said
        self._said[worker] = data
        if first:
            self._feeds[worker] = WorkerFeed(
                announcement, self.router.blocks, self._reported, self._gap
            )
            log.info("worker_joined", worker=worker, node=announcement.node.name)
        if announcement.profile_error:
            log.warning("worker_unprofiled", worker=worker, reason=announcement.profile_error)

    def _leave(self, worker: str) -> None:
        self._kappa_eff.pop(worker, None)
        announced = self._said.pop(worker, None)
        feed = self._feeds.pop(worker, None)
        if feed is not None:
            task = self._loop.create_task(feed.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        lost = self.router.leave(worker)
        self.charges.left(worker)
        for request_id in lost:
            if request_id in self.records:
                self.records[request_id].end = "worker_died"
        if announced is not None:
            node = announced["node"]["name"]
            for gauge in (m.RESERVATIONS, m.LINK_BACKLOG, m.GPU_BACKLOG, m.CRITICAL_RATIO):
                self.metrics.forget(gauge, node)
            for engine_state in ENGINE_STATES:
                self.metrics.forget(m.ENGINE_REQUESTS, node, engine_state)
        log.warning("worker_left", worker=worker, requests_lost=len(lost))

    def _gap(self, worker: str) -> None:
        state = self.router.state.workers.get(worker)
        self.metrics.inc(m.STREAM_GAPS, state.announcement.node.name if state else worker)

    def _reported(self, report: WorkerReport) -> None:
        state = self.router.state.workers.get(report.worker)
        if state is None:
            return
        self.router.report(report, time.time())
        node = state.announcement.node.name
        for admission in report.admitted:
            self._admitted(node, admission)
        for request_id in report.prefilled:
            self.first_token(request_id)
        for spent in report.spent:
            record = self.records.get(spent.request_id)
            if record is not None:
                record.spent = spent
        self.metrics.reported(report, node, paced=state.announcement.node.source == "paced")
        self._charged(report)

    def _charged(self, report: WorkerReport) -> None:
        gained = self.charges.report(
            report.worker, report.charges, report.time_s, report.steps_total
        )
        for tenant, charge in gained.items():
            label = self.metrics.tenant(tenant)
            for resource, seconds in zip(("vram", "gpu", "link"), charge, strict=True):
                self.metrics.inc(m.TENANT_CHARGE, label, resource, by=seconds)

    def _admitted(self, node: str, admission: Admission) -> None:
        record = self.records.get(admission.request_id)
        if record is not None:
            record.admitted = admission
        self.metrics.inc(m.PROMPT_TOKENS, node, "device", by=admission.device_tokens)
        self.metrics.inc(m.PROMPT_TOKENS, node, "host", by=admission.host_tokens)
        self.metrics.inc(m.PROMPT_TOKENS, node, "new", by=admission.new_tokens)

    def _load(self) -> float:
        """Share of workers that have something to compute or load, right now."""
        workers = self.router.state.workers.values()
        return sum(len(s.shadow) > 0 for s in workers) / max(len(workers), 1)

    # -- what is shown ------------------------------------------------------------------------

    def refresh_gauges(self) -> None:
        """Bring the gauges up to date, before they are scraped."""
        backlogs = self.router.backlogs_s(time.time())
        paced = {"true": 0, "false": 0}
        for worker, state in self.router.state.workers.items():
            said, calibration = state.announcement, state.calibration
            node = said.node.name
            paced["true" if said.node.source == "paced" else "false"] += 1
            link_s, gpu_s = backlogs[worker]
            self.metrics.set(m.LINK_BACKLOG, node, to=link_s)
            self.metrics.set(m.GPU_BACKLOG, node, to=gpu_s)
            self.metrics.set(m.RESERVATIONS, node, to=self.router.in_flight_on(worker))
            self.metrics.set(m.CRITICAL_RATIO, node, to=said.kappa_crit)
            self.metrics.set(m.LINK_SCALE, node, to=calibration.link_scale)
            self.metrics.set(m.COMPUTE_SCALE, node, to=calibration.compute_scale)
            self.metrics.set(m.OVERHEAD, node, to=calibration.overhead_s)
        for label, count in paced.items():
            self.metrics.set(m.WORKERS, label, to=count)
        stats = self.router.index.stats() if self.router.index else {}
        self.metrics.set(m.INDEX_BLOCKS, to=stats.get("blocks", 0))
        for why in ("orphans", "unjoined", "refused", "evicted", "ambiguous"):
            self.metrics.total(m.INDEX_LOSSES, why, to=stats.get(why, 0))

    def tenants(self, known: Tenants) -> list[dict[str, Any]]:
        """Every tenant: weight, charges, its share of all that was charged."""
        return shares(known, self.charges.totals())

    def pool_of(self, worker: str) -> str:
        """The pool that a worker announced; empty if it is not known."""
        state = self.router.state.workers.get(worker)
        return state.announcement.pool if state is not None else ""

    def nodes(self) -> list[dict[str, Any]]:
        """Every worker: profile, measurements, backlogs, critical ratio, paced or not."""
        now_s = time.time()
        backlogs = self.router.backlogs_s(now_s)
        rows = []
        for worker, state in self.router.state.workers.items():
            said, report = state.announcement, state.report
            link_s, gpu_s = backlogs[worker]
            rows.append(
                {
                    "worker": worker,
                    "node": said.node.name,
                    "paced": said.node.source == "paced",
                    "emulated_model": said.emulated_model or None,
                    "profile": said.node.to_dict(),
                    "profile_error": said.profile_error or None,
                    "measured": dict(said.measured),
                    "kappa_crit": said.kappa_crit,
                    "kappa_eff": self._kappa_eff.get(worker),
                    "engine": said.engine,
                    "pool": said.pool or None,
                    "role": said.role,
                    "cost_per_hour": said.cost_per_hour,
                    "planner": said.load_plan.get("planner"),
                    "in_flight": self.router.in_flight_on(worker),
                    "link_backlog_s": link_s,
                    "gpu_backlog_s": gpu_s,
                    "seen_s_ago": now_s - state.seen_s,
                    "calibration": {
                        "overhead_s": state.calibration.overhead_s,
                        "link_scale": state.calibration.link_scale,
                        "compute_scale": state.calibration.compute_scale,
                    },
                    "totals": report.to_dict() if report else None,
                    "fingerprint": said.fingerprint,
                    "start_s": said.start_s or None,
                }
            )
        return rows


def _writer(path: str) -> Callable[[dict[str, Any]], None]:
    file = open(path, "a", buffering=1)  # noqa: SIM115  # lives as long as the process
    return lambda entry: print(json.dumps(entry), file=file)


def _log_line(record: Record) -> dict[str, Any]:
    chosen = record.decision.chosen
    return {
        "request_id": record.decision.request_id,
        "tenant": record.tenant,
        "node": chosen.node.name,
        "paced": chosen.node.source == "paced",
        "reason": record.decision.reason,
        "ratio": round(chosen.counts.ratio, 2),
        "predicted_ttft_s": round(chosen.ttft_s, 4),
        "ttft_s": round(record.ttft_s, 4) if record.ttft_s is not None else None,
        "end": record.end,
    }
