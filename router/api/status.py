"""What is shown of the live router: nodes, tenants, a decision explained, and the gauges.

Reads only; each figure is as of the moment of asking.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kappa import metrics as m
from kappa.protocol import Charge, WorkerReport
from router.api.auth import Tenants
from router.decision import Decision
from router.live.fairness import credits_s, oldest_waits_s
from router.live.live_router import LiveRouter

_LISTS = ("arrived", "finished", "in_flight", "admitted", "prefilled", "spent")
_OPEN = {"closed": 0.0, "half_open": 0.5, "open": 1.0}


def refresh_gauges(live: LiveRouter) -> None:
    """Bring the gauges up to date, before they are scraped."""
    now_s = live.now_s()
    backlogs = live.router.backlogs_s(now_s)
    paced = {"true": 0, "false": 0}
    for worker, state in live.router.workers.items():
        announced, calibration = state.announcement, state.calibration
        node = announced.node.name
        paced["true" if announced.node.source == "paced" else "false"] += 1
        link_s, gpu_s = backlogs[worker]
        live.metrics.set(m.LINK_BACKLOG, node, to=link_s)
        live.metrics.set(m.GPU_BACKLOG, node, to=gpu_s)
        live.metrics.set(m.RESERVATIONS, node, to=live.router.in_flight_on(worker))
        live.metrics.set(m.CRITICAL_RATIO, node, to=announced.kappa_crit)
        live.metrics.set(m.LINK_SCALE, node, to=calibration.link_scale)
        live.metrics.set(m.COMPUTE_SCALE, node, to=calibration.compute_scale)
        live.metrics.set(m.OVERHEAD, node, to=calibration.overhead_s)
        standing = live.members.breakers.state(worker, now_s).standing
        live.metrics.set(m.BREAKER_OPEN, node, to=_OPEN[standing])
    for label, count in paced.items():
        live.metrics.set(m.WORKERS, label, to=count)
    live.metrics.set(m.OTHERS_RESERVATIONS, to=live.router.in_flight - live.router.reservations)
    stats = live.router.index.stats() if live.router.index else {}
    live.metrics.set(m.INDEX_BLOCKS, to=stats.get("blocks", 0))
    for why in ("orphans", "unjoined", "refused", "evicted", "ambiguous"):
        live.metrics.total(m.INDEX_LOSSES, why, to=stats.get(why, 0))


def refresh_tenants(live: LiveRouter, known: Tenants) -> None:
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


def refresh_refusals(live: LiveRouter, state: Any) -> None:
    """Bring in what was refused before it was a request, from the application's `state`."""
    live.metrics.total(m.TENANT_REQUESTS, "unknown", "invalid_api_key", to=state.keys_refused)
    for (tenant, code), count in state.refused.items():
        label = live.metrics.tenant(tenant)
        live.metrics.total(m.TENANT_REQUESTS, label, code, to=count, source=f"limit {tenant}")
    keyring = getattr(state, "keyring", None)
    if keyring is None:
        return  # Asked by another ingress before any request came here.
    for outcome, count in (("read", keyring.reloads), ("failed", keyring.faults)):
        live.metrics.total(m.KEY_FILE_READS, outcome, to=count)


def tenants(live: LiveRouter, known: Tenants) -> list[dict[str, Any]]:
    """Every tenant with its weight, what it was charged, and what share of all charges that is."""
    return shares(known, live.charges.totals())


def shares(known: Tenants, charged: Mapping[str, Charge]) -> list[dict[str, Any]]:
    """As `tenants`, of these charges."""
    by_name = known.all()
    total = Charge(*(sum(column) for column in zip(*charged.values(), strict=True)))
    rows = []
    for name in sorted({*by_name, *charged}):
        charge = charged.get(name, Charge())
        parts = zip(Charge._fields, charge, total, strict=True)
        rows.append(
            {
                "tenant": name,
                "weight": by_name.get(name, known.default).weight,
                "charged": charge._asdict(),
                "share": {
                    field.removesuffix("_s"): own / whole if whole else 0.0
                    for field, own, whole in parts
                },
            }
        )
    return rows


def nodes(live: LiveRouter) -> list[dict[str, Any]]:
    """Every worker: profile, measurements, backlogs, critical ratio, paced or not."""
    now_s = live.now_s()
    backlogs = live.router.backlogs_s(now_s)
    rows = []
    for worker, state in live.router.workers.items():
        announced, report = state.announcement, state.report
        link_s, gpu_s = backlogs[worker]
        member = live.members.get(worker)
        breaker = live.members.breakers.state(worker, now_s)
        rows.append(
            {
                "worker": worker,
                "node": announced.node.name,
                "paced": announced.node.source == "paced",
                "emulated_model": announced.emulated_model or None,
                "profile": announced.node.to_dict(),
                "profile_error": announced.profile_error or None,
                "measured": dict(announced.measured),
                "kappa_crit": announced.kappa_crit,
                "kappa_eff": live.kappa_eff.get(worker),
                "engine": announced.engine,
                "pool": announced.pool or None,
                "role": announced.role,
                "cost_per_hour": announced.node.cost_per_hour,
                "planner": announced.load_plan.get("planner"),
                "host_tier": announced.tier,
                "host_tier_contents": "estimated" if announced.shared_tier else "told",
                "in_flight": live.router.in_flight_on(worker),
                "others_in_flight": live.router.remote_in_flight_on(worker),
                "link_backlog_s": link_s,
                "gpu_backlog_s": gpu_s,
                "seen_s_ago": now_s - state.seen_s,
                "start_s": announced.start_s or None,
                "draining": member is not None and member.draining,
                "breaker": {
                    "state": breaker.standing,
                    "why": breaker.why or None,
                    "failures": breaker.failures,
                    "opened": breaker.opened,
                },
                "calibration": {
                    "overhead_s": state.calibration.overhead_s,
                    "link_scale": state.calibration.link_scale,
                    "compute_scale": state.calibration.compute_scale,
                },
                "totals": _totals(report) if report else None,
                "fingerprint": announced.fingerprint,
            }
        )
    return rows


def _totals(report: WorkerReport) -> dict[str, Any]:
    """A report without its lists of requests, which are anybody's."""
    return {name: value for name, value in report.to_dict().items() if name not in _LISTS}


def explanation(decision: Decision) -> dict[str, Any]:
    """A decision with all its candidates, JSON-ready."""
    return {
        "request_id": decision.request_id,
        "prompt_tokens": decision.prompt_tokens,
        "policy": decision.policy,
        "reason": decision.reason,
        "node": decision.chosen.node.name,
        "informed": decision.informed,
        "candidates": [
            {
                "node": c.node.name,
                "worker": c.worker,
                "paced": c.node.source == "paced",
                "device_tokens": c.counts.device_tokens,
                "cached_tokens": c.counts.cached_tokens,
                "new_tokens": c.counts.new_tokens,
                "ratio": c.counts.ratio,
                "kappa_crit": c.kappa_crit,
                "bound": c.bound,
                "queue_s": c.queue_s,
                "load_s": c.load_s,
                "compute_s": c.compute_s,
                "ttft_s": c.ttft_s,
                "harm_s": c.tpot_impact_s,
                "in_flight": c.in_flight,
                "plan": c.plan or None,
            }
            for c in decision.candidates
        ],
    }
