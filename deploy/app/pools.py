"""One pool as a Ray Serve deployment: engine, place, number of workers, scaling and drain.

Ray places the workers on machines that offer what the pool demands; Serve's autoscaler calls our
policy (`workers.scaling_policy`) how many there should be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploy.app.model import Model
from deploy.app.plan import worker_plan
from kappa.settings.cluster import ClusterSettings
from kappa.settings.pools import PoolSettings, ScalingSettings

ENGINE_CPUS = 1
"""Ray's CPUs for an engine's worker process, beside those of its replica."""

# The fallback: Ray's own router, which only publishes its replicas.
_ROUTERS = {"on": "router.ray_router.KappaRouter", "ray": "router.ray_own.WatchedRayRouter"}
_SCALING_POLICY = "workers.scaling_policy:BacklogPolicy"
# A domain that cannot exist: vLLM fetches from any where none is named.
_NO_MEDIA_DOMAINS = ["nowhere.invalid"]
# Serve averages what workers report over so long; they report every 10 s.
_LOOK_BACK_S = 20.0


def pool_config(settings: ClusterSettings, pool: PoolSettings, model: Model) -> Any:
    """Ray Serve LLM's configuration of a pool's deployment."""
    from ray.serve.llm import LLMConfig

    engine, gpus = pool.engine_settings(settings.engine), pool.placement.gpus
    bundle = {"CPU": ENGINE_CPUS, **({"GPU": 1} if gpus else {})}
    arguments: dict[str, Any] = {
        "enable_prompt_tokens_details": True,
        "allowed_media_domains": _NO_MEDIA_DOMAINS,
        **engine.extra,
    }
    if gpus > 1:
        arguments.setdefault("tensor_parallel_size", gpus)
    return LLMConfig(
        model_loading_config={"model_id": settings.model.id, "model_source": model.source},
        engine_kwargs=arguments,
        accelerator_config={"kind": "gpu" if gpus else "cpu"},
        placement_group_config={"bundles": [bundle] * max(gpus, 1)},
        deployment_config=_deployment(settings, pool),
        callback_config={"callback_class": "workers.no_download.NoDownload"},
        runtime_env={"env_vars": _environment(settings, on_gpu=bool(gpus))},
        log_engine_metrics=engine.metrics,
    )


def pool_deployment(
    settings: ClusterSettings, pool: PoolSettings, model: Model, config: Any, stream_host: str
) -> Any:
    """The pool's Serve deployment, bound; `config` as `pool_config` makes it."""
    from ray.serve.llm import build_llm_deployment

    from workers.replica import KappaServer

    labels = dict(pool.placement.labels)
    return build_llm_deployment(
        config,
        bind_kwargs={"plan": worker_plan(settings, pool, model, stream_host)},
        override_serve_options={
            "name": f"{KappaServer.__name__}:{pool.name}",
            **({"placement_group_bundle_label_selector": [labels]} if labels else {}),
        },
        deployment_cls=KappaServer,
    )


def worker_demand(pool: PoolSettings) -> dict[str, float]:
    """What one worker of the pool demands of Ray, all its processes together."""
    place = pool.placement
    engines = max(place.gpus, 1)
    return {
        "CPU": place.cpus + ENGINE_CPUS * engines,
        **({"GPU": float(place.gpus)} if place.gpus else {}),
        **place.resources,
    }


def autoscaling(scaling: ScalingSettings) -> dict[str, Any]:
    """Ray Serve's autoscaling of a pool, by our policy."""
    return {
        "min_replicas": scaling.min_replicas,
        "max_replicas": scaling.max_replicas,
        "upscale_delay_s": scaling.up_after_s,
        "downscale_delay_s": scaling.down_after_s,
        "look_back_period_s": _LOOK_BACK_S,
        "policy": {
            "policy_function": _SCALING_POLICY,
            "policy_kwargs": {
                "target_backlog_s": scaling.target_backlog_s,
                "target_utilisation": scaling.target_utilisation,
            },
        },
    }


def _deployment(settings: ClusterSettings, pool: PoolSettings) -> dict[str, Any]:
    number: dict[str, Any] = {"num_replicas": pool.least}
    if pool.autoscaling is not None:
        number = {"autoscaling_config": autoscaling(pool.autoscaling)}
    place = pool.placement
    return {
        **number,
        "max_ongoing_requests": 4 * settings.router.max_queue,
        "max_constructor_retry_count": 2,
        "health_check_period_s": 2,
        "health_check_timeout_s": 10,
        "graceful_shutdown_timeout_s": pool.drain_s,
        "request_router_config": {
            "request_router_class": _ROUTERS.get(settings.router.mode, _ROUTERS["on"]),
            "request_routing_stats_period_s": 1,
            "request_routing_stats_timeout_s": 10,
        },
        "ray_actor_options": {
            "num_cpus": place.cpus,
            **({"resources": dict(place.resources)} if place.resources else {}),
        },
    }


def _environment(settings: ClusterSettings, *, on_gpu: bool) -> dict[str, str]:
    from workers.vllm.arguments import CPU_ENV

    ours = {name: value for name, value in CPU_ENV.items() if not (on_gpu and _of_cpus(name))}
    return {**ours, "HF_HUB_OFFLINE": _offline(settings)}


def _of_cpus(name: str) -> bool:
    return name.startswith(("VLLM_CPU_", "OMP_"))


def _offline(settings: ClusterSettings) -> str:
    source = settings.model.source
    return "0" if source is not None and not Path(source).exists() else "1"
