"""The settings of a decider, and what is made of them: tenants, bounds, its live router.

`DeciderSettings` are plain values, sent with the deployment; `deploy` makes them from a cluster's
settings, of which whole sections stand in them as they are.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kappa.settings.access import TenantSettings
from kappa.settings.engine import TransferSettings
from kappa.settings.routing import ObservingSettings, RouterSettings
from kappa.slo import ServiceObjective
from kappa_router.api.app import Access
from kappa_router.api.request import EndpointModel
from kappa_router.api.tenants import Allowance, Tenants
from kappa_router.config import RouterConfig
from kappa_router.index.prefix_hash import secret_from_seed
from kappa_router.live.circuit_breaker import BreakerRule
from kappa_router.live.live_router import LiveRouter
from kappa_router.live.membership import MembershipRule
from kappa_router.load_plans import planner_of
from kappa_router.policy import policy_named

if TYPE_CHECKING:
    from kappa.settings.cluster import ClusterSettings
    from kappa.settings.front import FrontSettings

_DRAIN_MARGIN_S = 5.0


@dataclass(frozen=True, slots=True)
class DeciderSettings:
    """The settings of a decider."""

    # That it serves, in the cluster file's order.
    models: tuple[EndpointModel, ...]
    # Of its prefix hashes.
    secret: str
    router: RouterSettings = field(default_factory=RouterSettings)
    observing: ObservingSettings = field(default_factory=ObservingSettings)
    transfer: TransferSettings = field(default_factory=TransferSettings)
    log_level: str = "WARNING"
    # The longest that a worker may take to finish its requests when it is taken away.
    drain_s: float = 60.0
    # The number of deciders.
    replicas: int = 1


def tenants_table(t: TenantSettings, own: Mapping[bytes, str] | None = None) -> Tenants:
    """The tenants' table; of their keys it holds digests only. own: of operators besides."""
    own = own or {}
    table = Tenants(
        refuse=t.closed,
        weights=dict(t.weights),
        priorities={name: (one.own, one.may_ask) for name, one in t.priorities.items()},
        # Without keys clients and operators cannot be told apart.
        operators=frozenset({*t.operators, *own.values()}) if t.digests else None,
        own_caches=bool(t.digests or t.speaks_for) and not t.share_cache,
        speaks_for=dict(t.speaks_for),
        blind=secrets.token_bytes(32),
    )
    return table.with_digests({**t.digests, **own}, t.default_name, t.fixed_digests | own.keys())


def access_of(
    settings: ClusterSettings | FrontSettings, own: Mapping[bytes, str] | None = None
) -> Access:
    """Who may send requests, how many, and in what size, for every decider replica."""
    t, a = settings.tenants, settings.access
    allowances = {name: Allowance(**limits.model_dump()) for name, limits in t.limits.items()}
    return Access(
        tenants=tenants_table(t, own),
        # Replicas have working folders of their own.
        keys_file=None if t.keys_file is None else str(Path(t.keys_file).absolute()),
        keys_check_s=t.keys_check_s,
        max_body_bytes=settings.router.max_body_bytes,
        body_timeout_s=a.body_timeout_s,
        max_outstanding_bodies=2 * settings.router.max_queue,
        open_metrics=a.open_metrics,
        default_allowance=Allowance(**t.default_limits.model_dump()),
        # Its own requests are the cluster's, not a client's.
        allowances={**{name: Allowance() for name in (own or {}).values()}, **allowances},
        replicas=settings.http.replicas,
    )


def router_config(settings: DeciderSettings, rank: int = 0) -> RouterConfig:
    """The pure router's part of the settings, for the decider of this rank."""
    given = settings.router
    return RouterConfig(
        policy=policy_named(given.policy),
        secret=secret_from_seed(settings.secret),
        index_blocks=given.index_blocks,
        stale_after_s=given.stale_after_s,
        calibrate=given.calibrate,
        calibrate_requests=given.calibrate_requests,
        forecast_workers=given.forecast_workers,
        admission=given.admission,
        objective=ServiceObjective(**given.objective.model_dump()),
        first=rank % settings.replicas / settings.replicas,
        planner_of=planner_of,
    )


def member_rule(settings: DeciderSettings) -> MembershipRule:
    """The rule by which a worker counts as gone."""
    rule = settings.router.failover
    return MembershipRule(
        stall_after_s=rule.stall_after_s,
        lost_after_s=max(settings.router.stale_after_s, rule.stall_after_s),
        # Ray ends it at its own time; a little later it is gone for us, too.
        drain_s=settings.drain_s + _DRAIN_MARGIN_S,
        breaker=BreakerRule(
            failures=rule.failures, pause_s=rule.pause_s, longest_pause_s=rule.longest_pause_s
        ),
    )


def record_file(settings: DeciderSettings, rank: int) -> str | None:
    """The log file of the decider of this rank: each its own, where there are several."""
    if settings.router.record is None or settings.replicas == 1:
        return settings.router.record
    path = Path(settings.router.record)
    return str(path.with_name(f"{path.stem}-{rank}{path.suffix}"))


def live_router(settings: DeciderSettings, rank: int = 0) -> LiveRouter:
    """The live router of the decider of this rank; make it on the event loop that it lives on."""
    seen = settings.observing
    return LiveRouter(
        router_config(settings, rank), record_file(settings, rank), member_rule(settings),
        counting=seen.metrics, request_log=seen.request_log,
    )  # fmt: skip
