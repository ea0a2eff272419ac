"""The Ray Serve application: workers' deployments and the decider, bound together from settings.

The decider gets its tenants with the digests of their keys, their limits and sizes. Where every
request needs a key, this process makes one for its own requests (readiness, warm-up, the nodes that
`kappa serve` prints). That key lives as long as the process and is written nowhere.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from kappa.keys import bearer, digest_of, new_key
from kappa.settings.cluster import ClusterSettings
from kappa_deploy.app.errors import PreflightError
from kappa_deploy.app.model import Model
from kappa_deploy.app.plan import Deferred, pool_deployment
from kappa_deploy.checks.settings import contradictions
from kappa_router.gateway.spec import GatewaySpec

if TYPE_CHECKING:
    from kappa_router.api.request import EndpointModel
    from kappa_router.api.start import DeciderSettings

log = structlog.get_logger(__name__)

OWN_TENANT = "kappa-own"
_DECIDER_END_S = 10.0

# Its key in Ray's own store, which can be read with Ray's token.
_SECRET = b"kappa-front-secret"
_OWN_KEY = new_key(secrets.token_bytes(32))


def build_app(
    settings: ClusterSettings,
    models: Sequence[Model],
    door: GatewaySpec,
    stream_host: str = "127.0.0.1",
    place: Mapping[str, float] | None = None,
) -> Any:
    """The Serve application: `KappaServer` replicas, and the `KappaDecider`s of the front `door`,
    which this machine's Envoy serves.

    models: in the order of `settings.by_model()`. `stream_host`: where workers offer their report
    streams; empty: each on its machine's address. place: Ray's resources that a decider demands,
    so that it is beside its Envoy; None: this machine.

    Raises:
        PreflightError: settings that do not go together, and what to change.
    """
    wrong = contradictions(settings)
    if wrong:
        raise PreflightError("\n".join(wrong))
    if settings.tenants.keys_in_clear:
        log.warning(
            "keys_in_clear",
            keys=settings.tenants.keys_in_clear,
            remedy="replace each by what 'kappa keys hash' makes of it",
        )
    from ray import serve

    from kappa_router.api.request import EndpointModel
    from kappa_router.api.start import access_of

    secret = _front_secret()
    workers: dict[str, Any] = {}
    served: list[EndpointModel] = []
    for of_one, model in zip(settings.by_model(), models, strict=True):
        workers |= {
            pool.name: pool_deployment(of_one, pool, model, stream_host, secret)
            for pool in of_one.all_pools
        }
        adapters = tuple(of_one.model.adapters)
        served.append(EndpointModel(of_one.model.id, model.source, adapters))
    here = _this_machine() if place is None else dict(place)
    decider = serve.deployment(
        Deferred("kappa_router.cluster.replica:KappaDecider"),
        name="KappaDecider",
        num_replicas=settings.http.replicas,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=_DECIDER_END_S,
        ray_actor_options={"num_cpus": 0, "resources": here},
    )
    return decider.bind(
        pools=workers,
        kappa=_decider_settings(settings, served),
        access=access_of(settings, own_digests(settings)),
        spec=door,
        secret=secret,
    )


def _decider_settings(
    settings: ClusterSettings, served: Sequence[EndpointModel]
) -> DeciderSettings:
    """What each decider must know."""
    from kappa_router.api.start import DeciderSettings

    return DeciderSettings(
        models=tuple(served),
        secret=secrets.token_hex(16),  # of its hashes: new at every start
        router=settings.router,
        observing=settings.observing,
        transfer=settings.transfer,
        log_level=settings.log_level,
        drain_s=max(pool.drain_s for pool in settings.all_pools),
        replicas=settings.http.replicas,
    )


def _front_secret() -> str:
    """The secret that fronts show to workers. It is kept in the Ray cluster: workers that drain
    while the application is deployed again still accept it."""
    import ray
    from ray.experimental import internal_kv

    made = secrets.token_hex(32)
    if not ray.is_initialized():
        return made
    internal_kv._internal_kv_put(_SECRET, made, overwrite=False)
    kept = internal_kv._internal_kv_get(_SECRET)
    return made if kept is None else str(kept.decode())


def _this_machine() -> dict[str, float]:
    """Ray resources by which a replica is placed on this machine."""
    import ray

    return {f"node:{ray.util.get_node_ip_address()}": 0.001} if ray.is_initialized() else {}


def own_digests(settings: ClusterSettings) -> dict[bytes, str]:
    """The digest of this process' key; empty where requests need no key."""
    return {digest_of(_OWN_KEY): OWN_TENANT} if settings.tenants.closed else {}


def own_headers(settings: ClusterSettings) -> dict[str, str]:
    """The headers of our own requests: this process' key; empty where requests need no key."""
    return bearer(_OWN_KEY) if settings.tenants.closed else {}
