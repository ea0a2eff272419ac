"""What the ingress knows of who may send requests: tenants by digests of keys, their limits, sizes.

Where nobody is served without a key, this process makes itself one for its own requests (readiness,
warm-up, what `kappa serve` prints). It lives as long as the process and is written nowhere.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from kappa.keys import digest_of, new_key
from kappa.settings.cluster import ClusterSettings

OWN_TENANT = "kappa-own"

_OWN_KEY = new_key(secrets.token_bytes(32))


def tenants_table(settings: ClusterSettings) -> Any:
    """The tenants' table; of their keys it holds digests only."""
    from router.api.tenants import Tenants

    t = settings.tenants
    own = {digest_of(_OWN_KEY): OWN_TENANT} if t.closed else {}
    table = Tenants(
        refuse=t.closed,
        weights=dict(t.weights),
        # Without keys nobody can be distinguished from an operator.
        operators=frozenset({*t.operators, *own.values()}) if t.by_key else None,
        own_caches=bool(t.by_key) and not t.share_cache,
        blind=secrets.token_bytes(32),
    )
    fixed = t.fixed_digests | own.keys()
    return table.with_digests({**t.digests, **own}, t.default_name, fixed)


def access_of(settings: ClusterSettings) -> Any:
    """What every ingress replica knows of who may ask, how much, and in what size."""
    from router.api.app import Access
    from router.api.tenants import Allowance

    t, a = settings.tenants, settings.access
    return Access(
        tenants=tenants_table(settings),
        # Replicas have working folders of their own.
        keys_file=None if t.keys_file is None else str(Path(t.keys_file).absolute()),
        keys_check_s=t.keys_check_s,
        max_body_bytes=settings.router.max_body_bytes,
        max_headers=a.max_headers,
        max_header_bytes=a.max_header_bytes,
        body_timeout_s=a.body_timeout_s,
        max_outstanding_bodies=2 * settings.router.max_queue,
        open_metrics=a.open_metrics,
        default_allowance=Allowance(**t.default_limits.model_dump()),
        allowances={
            # Its own requests are the cluster's, not a client's.
            OWN_TENANT: Allowance(),
            **{name: Allowance(**limits.model_dump()) for name, limits in t.limits.items()},
        },
        replicas=getattr(settings.http, "replicas", 1),
    )


def own_headers(settings: ClusterSettings) -> dict[str, str]:
    """What our own requests must send where those without a key are refused: this process' key."""
    return {"authorization": f"Bearer {_OWN_KEY}"} if settings.tenants.closed else {}
