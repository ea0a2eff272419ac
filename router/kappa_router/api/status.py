"""Views of the live router: nodes, tenants, a decision explained, and the gauges.

Reads only; each figure is as of the moment of asking.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from itertools import islice
from typing import Any

from kappa import metrics as m
from kappa.protocol import Announcement, Charge
from kappa_router.api.app import Door
from kappa_router.api.tenants import Tenants
from kappa_router.decision import Decision
from kappa_router.engine_fit import critical_ratio
from kappa_router.live.charges import credits_s
from kappa_router.live.decision_records import oldest_waits_s
from kappa_router.live.live_router import LiveRouter

# Of a report: lists of requests, which are anybody's.
_LISTS = (
    "arrived", "finished", "generated", "in_flight", "admitted", "prefilled", "spent", "steps",
    "loads",
)  # fmt: skip
_LIMITS = (
    "block_tokens", "device_blocks", "max_context_tokens", "max_batch_tokens", "max_sequences",
)  # fmt: skip
MOST_DECISIONS = 256
"""That a tenant is shown at once."""
_OPEN = {"closed": 0.0, "half_open": 0.5, "open": 1.0}


def exposition(live: LiveRouter, door: Door) -> bytes:
    """All metrics as they are now."""
    refresh_gauges(live)
    _refresh_tenants(live, door.keyring.tenants)
    _refresh_refusals(live, door)
    return live.metrics.exposition()


def newest_decisions(live: LiveRouter, tenant: str | None, most: int) -> list[dict[str, Any]]:
    """The last decisions for a tenant, for all if it is None; the newest first."""
    newest = reversed(live.records.values())
    wanted = (record for record in newest if tenant is None or record.tenant == tenant)
    # No more than are wanted: a record takes 7 us of this loop.
    return [record.to_dict() for record in islice(wanted, most)]


def refresh_gauges(live: LiveRouter) -> None:
    """Bring the gauges up to date, before they are scraped."""
    now_s, metrics, router = live.now_s(), live.metrics, live.router
    backlogs = router.backlogs_s(now_s)
    held = router.held_blocks()
    paced = {"true": 0, "false": 0}
    for worker, state in router.workers.items():
        announced, calibration = state.announcement, state.calibration
        paced["true" if announced.node.source == "paced" else "false"] += 1
        link_s, gpu_s = backlogs[worker]
        for gauge, value in (
            (m.LINK_BACKLOG, link_s),
            (m.GPU_BACKLOG, gpu_s),
            (m.RESERVATIONS, router.in_flight_on(worker)),
            (m.CRITICAL_RATIO, critical_ratio(calibration.speed)),
            (m.LINK_SCALE, calibration.link_scale),
            (m.COMPUTE_SCALE, calibration.compute_scale),
            (m.OVERHEAD, calibration.overhead_s),
            (m.CALIBRATION_SD, calibration.certainty.ttft_sd),
            (m.CALIBRATION_BELIEVED, float(calibration.believed)),
            (m.BREAKER_OPEN, _OPEN[live.members.breakers.state(worker, now_s).standing]),
        ):
            metrics.set(gauge, announced.node.name, worker, to=value)
        for tier, blocks in held.get(worker, {}).items():
            tokens = blocks * announced.block_tokens
            metrics.set(m.CACHED_TOKENS, announced.node.name, worker, tier, to=tokens)
        _refresh_measured(live, announced)
    for label, count in paced.items():
        metrics.set(m.WORKERS, label, to=count)
    metrics.set(m.OTHERS_RESERVATIONS, to=router.in_flight - router.reservations)
    stats = router.index_stats()
    metrics.set(m.INDEX_BLOCKS, to=stats["blocks"])
    for why in ("orphans", "unjoined", "refused", "evicted", "ambiguous"):
        metrics.total(m.INDEX_LOSSES, why, to=stats[why])


def _refresh_measured(live: LiveRouter, announced: Announcement) -> None:
    """Gauges of a worker's announced bandwidth, and of what its engine measured of itself, which
    a paced one does not."""
    node, measured = announced.node, announced.measured
    labels = node.name, announced.worker
    live.metrics.set(m.ANNOUNCED_BANDWIDTH, *labels, "load", to=node.h2d_bytes_per_s)
    live.metrics.set(m.ANNOUNCED_BANDWIDTH, *labels, "store", to=node.store_bytes_per_s)
    if node.source != "measured":
        return
    if "step" in measured:
        live.metrics.set(m.STEP_FIT, *labels, to=measured["step"]["r2"])
    if (age_s := _age_s(measured)) is not None:
        live.metrics.set(m.PROFILE_AGE, *labels, to=age_s)


def _refresh_tenants(live: LiveRouter, known: Tenants) -> None:
    """Bring the tenants' gauges up to date, before they are scraped."""
    weights = {name: tenant.weight for name, tenant in known.all().items()}
    waits = oldest_waits_s(live.records.values(), time.time())
    credit = credits_s(live.charges.totals(), weights)
    for tenant in sorted({*weights, *waits, *credit}):
        label = live.metrics.tenant(tenant)
        if label == tenant:
            live.metrics.set(m.TENANT_WEIGHT, label, to=weights.get(tenant, known.default.weight))
            live.metrics.set(m.TENANT_OLDEST, label, to=waits.get(tenant, 0.0))
            live.metrics.set(m.TENANT_CREDIT, label, to=credit.get(tenant, 0.0))


def _refresh_refusals(live: LiveRouter, door: Door) -> None:
    """Bring in what the door refused before it was a request."""
    live.metrics.total(m.TENANT_REQUESTS, "unknown", "invalid_api_key", to=door.keys_refused)
    for (tenant, code), count in door.refused.items():
        label = live.metrics.tenant(tenant)
        live.metrics.total(m.TENANT_REQUESTS, label, code, to=count, source=f"limit {tenant}")
    live.metrics.total(m.KEY_FILE_READS, "read", to=door.keyring.reloads)
    live.metrics.total(m.KEY_FILE_READS, "failed", to=door.keyring.faults)


def shares(known: Tenants, charged: Mapping[str, Charge]) -> list[dict[str, Any]]:
    """Every tenant with weight and class, what it was charged, and what share of all that is."""
    by_name = known.all()
    totals = {name: sum(getattr(c, name) for c in charged.values()) for name in Charge._fields}
    rows = []
    for name in sorted({*by_name, *charged}):
        own = charged.get(name, Charge())._asdict()
        share = {
            field.removesuffix("_s"): own[field] / total if total else 0.0
            for field, total in totals.items()
        }
        tenant = by_name.get(name, known.default)
        row = {"tenant": name, "weight": tenant.weight, "priority": tenant.priority}
        rows.append({**row, "charged": own, "share": share})
    return rows


def nodes(live: LiveRouter) -> list[dict[str, Any]]:
    """Every worker: profile, measurements, backlogs, caches, critical ratio, paced or not."""
    now_s, held = live.now_s(), live.router.held_blocks()
    backlogs = live.router.backlogs_s(now_s)
    rows = []
    for worker, state in live.router.workers.items():
        announced, calibration = state.announcement, state.calibration
        report = state.report.to_dict() if state.report else {}
        kappa_crit = critical_ratio(calibration.speed)
        link_s, gpu_s = backlogs[worker]
        member = live.members.get(worker)
        breaker = live.members.breakers.state(worker, now_s)
        rows.append({
            "worker": worker,
            "node": announced.node.name,
            "model": announced.model or None,
            "paced": announced.node.source == "paced",
            "emulated_model": announced.emulated_model or None,
            "profile": announced.node.to_dict(),
            "profile_error": announced.profile_error or None,
            "measured": dict(announced.measured),
            "measured_s_ago": _age_s(announced.measured),
            "kappa_crit": kappa_crit if math.isfinite(kappa_crit) else None,
            "kappa_eff": state.planner.kappa_eff if state.planner is not None else None,
            "engine": announced.engine,
            "graphs": announced.graphs or None,
            "pool": announced.pool or None,
            "role": announced.role,
            "cost_per_hour": announced.node.cost_per_hour,
            "planner": announced.load_plan.get("planner"),
            "host_tier": announced.tier,
            "tiers": tiers(announced),
            "host_tier_contents": "estimated" if announced.shared_tier else "told",
            "held_blocks": held.get(worker),
            "prompt_tokens": dict(live.prompt_tokens.get(worker, {})),
            "in_flight": live.router.in_flight_on(worker),
            "others_in_flight": live.router.remote_in_flight_on(worker),
            "link_backlog_s": link_s,
            "gpu_backlog_s": gpu_s,
            "seen_s_ago": now_s - state.seen_s,
            "start_s": announced.start_s or None,
            "draining": member is not None and member.draining,
            "breaker": {
                "state": breaker.standing, "why": breaker.why or None,
                "failures": breaker.failures, "opened": breaker.opened,
            },
            "calibration": {
                "overhead_s": calibration.overhead_s, "link_scale": calibration.link_scale,
                "compute_scale": calibration.compute_scale,
                **calibration.certainty._asdict(), "believed": calibration.believed,
            },
            "totals": {k: value for k, value in report.items() if k not in _LISTS} or None,
            "fingerprint": announced.fingerprint,
            "limits": {name: getattr(announced, name) for name in _LIMITS},
            "kv_events": dict(member.subscriber.events) if member is not None else {},
            # Reports are seconds apart, and so far off this may be.
            "clock_skew_s": state.report.time_s - state.seen_s if state.report else None,
        })  # fmt: skip
    return rows


def tiers(announced: Announcement) -> list[dict[str, Any]]:
    """The tiers behind a worker's device: blocks, and the bytes/s at which KV is read."""
    node = announced.node
    host = {"tier": "host", "blocks": announced.host_blocks, "bytes_per_s": node.h2d_bytes_per_s}
    disk = {"tier": "disk", "blocks": announced.disk_blocks, "bytes_per_s": node.disk_bytes_per_s}
    return [tier for tier in (host, disk) if tier["blocks"]]


def _age_s(measured: Mapping[str, Any]) -> float | None:
    """Seconds since a worker's machine was measured, by the clocks of both; None: not known."""
    at_s = measured.get("at_s")
    return None if at_s is None else max(time.time() - at_s, 0.0)


def explanation(decision: Decision, *, operator: bool) -> dict[str, Any]:
    """A decision with all its candidates, JSON-ready; what these do for others is for operators
    only, as in /v1/nodes."""
    candidates = []
    for c in decision.candidates:
        shown = {
            "node": c.node.name,
            "worker": c.worker,
            "paced": c.node.source == "paced",
            **c.predicted,
            "ratio": c.counts.ratio,
            "kappa_crit": c.kappa_crit,
            "bound": c.bound,
            "harm_s": c.tpot_impact_s,
            "in_flight": c.in_flight,
            "plan": c.plan or None,
        }
        if not operator:
            for name in ("worker", "in_flight", "queue_s", "harm_s"):
                del shown[name]
        candidates.append(shown)
    return {
        "request_id": decision.request_id,
        "prompt_tokens": decision.prompt_tokens,
        "policy": decision.policy,
        "reason": decision.reason,
        "node": decision.chosen.node.name,
        "informed": decision.informed,
        "fetched_tokens": decision.fetch.tokens if decision.fetch else 0,
        "candidates": candidates,
    }
