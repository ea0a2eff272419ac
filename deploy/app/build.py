"""The Ray Serve application: workers' deployments and ingress, bound together from settings.

Of who may send requests the ingress knows tenants by digests of keys, their limits, sizes. Where
nobody is served without a key, this process makes itself one for its own requests (readiness,
warm-up, what `kappa serve` prints). It lives as long as the process and is written nowhere.
"""

from __future__ import annotations

import secrets
from typing import Any

import structlog

from deploy.app.fits import contradictions
from deploy.app.model import Model, PreflightError
from deploy.app.plan import pool_config, pool_deployment
from kappa.keys import digest_of, new_key
from kappa.settings.cluster import ClusterSettings

log = structlog.get_logger(__name__)

OWN_TENANT = "kappa-own"

_OWN_KEY = new_key(secrets.token_bytes(32))


def build_app(settings: ClusterSettings, model: Model, stream_host: str = "127.0.0.1") -> Any:
    """The Serve application: `KappaServer` replicas behind a `KappaIngress`.

    `stream_host`: where workers offer their report streams; empty: each on its machine's address.

    Raises:
        PreflightError: settings that do not go together, and what to change.
    """
    wrong = contradictions(settings)
    if wrong:
        raise PreflightError("\n".join(wrong))
    if settings.tenants.keys_in_clear:
        log.warning(
            "keys_in_clear", keys=settings.tenants.keys_in_clear,
            remedy="replace each by what 'kappa keys hash' makes of it",
        )  # fmt: skip
    from ray import serve
    from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata

    from router.api.endpoints import make_ingress
    from router.api.start import IngressSettings, access_of, tenants_table

    pools, limits, replicas = settings.all_pools, settings.router, settings.http.replicas
    configs = {pool.name: pool_config(settings, pool, model.source) for pool in pools}
    workers = {
        pool.name: pool_deployment(settings, pool, model, configs[pool.name], stream_host)
        for pool in pools
    }
    # One that is taken away ends its streams, which take as long as those of workers.
    drain_s = max(pool.drain_s for pool in pools)
    ingress = serve.deployment(
        make_ingress(access_of(settings, own_digests(settings))),
        name="KappaIngress",
        num_replicas=replicas,
        # Enough for the requests that are served and the bodies that are awaited, twice
        # `max_queue`, also where tenants below their shares come on top (`router.api.tenants`).
        max_ongoing_requests=8 * limits.max_queue,
        # Bounded, too: beyond it Ray Serve answers 503 at once.
        max_queued_requests=4 * limits.max_queue,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=drain_s,
        ray_actor_options={"num_cpus": 0},
    )
    # Every pool serves the same model: any of their configurations makes its card.
    card = to_model_metadata(settings.model.id, configs[pools[0].name])
    return ingress.bind(
        pools=workers,
        model_cards={settings.model.id: card},
        kappa=IngressSettings(
            tokenizer_source=model.source,
            secret=secrets.token_hex(16),  # of its hashes: new at every start
            router=limits,
            tenants=tenants_table(settings.tenants, own_digests(settings)),
            observing=settings.observing,
            transfer=settings.transfer,
            log_level=settings.log_level,
            drain_s=drain_s,
            replicas=replicas,
        ),
    )


def own_digests(settings: ClusterSettings) -> dict[bytes, str]:
    """The digest of this process' key, where those without one are refused."""
    return {digest_of(_OWN_KEY): OWN_TENANT} if settings.tenants.closed else {}


def own_headers(settings: ClusterSettings) -> dict[str, str]:
    """What our own requests must send where those without a key are refused: this process' key."""
    return {"authorization": f"Bearer {_OWN_KEY}"} if settings.tenants.closed else {}
