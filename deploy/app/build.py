"""The Ray Serve application: workers' deployment and ingress, bound together from settings.

Settings that cannot go together are refused here, before anything starts.
"""

from __future__ import annotations

import secrets
from typing import Any

from deploy.app.access import access_of, tenants_table
from deploy.app.model import Model, StartError
from deploy.app.pools import pool_config, pool_deployment
from deploy.app.refusals import contradictions
from kappa.settings.cluster import ClusterSettings


def build_app(settings: ClusterSettings, model: Model, stream_host: str = "127.0.0.1") -> Any:
    """The Serve application: `KappaServer` replicas behind a `KappaIngress`.

    `stream_host`: where workers offer their report streams; empty: each on its machine's address.

    Raises:
        StartError: settings that do not go together, and what to change.
    """
    wrong = contradictions(settings)
    if wrong:
        raise StartError("\n".join(wrong))
    from ray import serve
    from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata

    from router.api.endpoints import make_ingress

    model_id, limits = settings.model.id, settings.router
    pools = settings.all_pools
    configs = {pool.name: pool_config(settings, pool, model) for pool in pools}
    workers = {
        pool.name: pool_deployment(settings, pool, model, configs[pool.name], stream_host)
        for pool in pools
    }
    ingress = serve.deployment(
        make_ingress(access_of(settings)),
        name="KappaIngress",
        num_replicas=settings.http.replicas,
        # Room for the requests that are served and the bodies that are awaited, twice `max_queue`,
        # also where tenants below their shares come on top (`router.api.tenants`).
        max_ongoing_requests=8 * limits.max_queue,
        # Bounded, too: beyond it Ray Serve answers 503 at once.
        max_queued_requests=4 * limits.max_queue,
        health_check_period_s=5,
        # One that is taken away ends its streams, which take as long as those of workers.
        graceful_shutdown_timeout_s=max(pool.drain_s for pool in pools),
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(
        pools=workers,
        # Every pool serves the same model: any of their configurations makes its card.
        model_cards={model_id: to_model_metadata(model_id, configs[pools[0].name])},
        kappa=_ingress_settings(settings, model),
    )


def _ingress_settings(settings: ClusterSettings, model: Model) -> Any:
    """What the ingress is told; the secret of its hashes is new at every start."""
    from router.api.start import IngressSettings

    return IngressSettings(
        tokenizer_source=model.source,
        secret=secrets.token_hex(16),
        router=settings.router,
        tenants=tenants_table(settings),
        observing=settings.observing,
        transfer=settings.transfer,
        log_level=settings.log_level,
        drain_s=max(pool.drain_s for pool in settings.all_pools),
        replicas=settings.http.replicas,
    )
