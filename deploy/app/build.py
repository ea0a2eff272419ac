"""The Ray Serve application: workers' deployment and ingress, bound together from settings.

Settings that cannot go together are refused here, before anything starts.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from deploy.app.model import Model, StartError
from deploy.app.plan import worker_plan
from kappa.settings.cluster import ClusterSettings

_REPLICA_CPUS = 1


def build_app(settings: ClusterSettings, model: Model, stream_host: str = "127.0.0.1") -> Any:
    """The Serve application: `KappaServer` replicas behind a `KappaIngress`.

    `stream_host`: where workers offer their report streams; empty: each on its machine's address.

    Raises:
        StartError: settings that do not go together, and what to change.
    """
    _refuse_what_does_not_go_together(settings)
    from ray import serve
    from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata
    from ray.serve.llm import build_llm_deployment

    from router.ingress import make_ingress
    from workers.deployment import KappaServer

    model_id, limits = settings.model.id, settings.router
    config = _llm_config(settings, model)
    plan = worker_plan(settings, model, stream_host)
    workers = build_llm_deployment(config, bind_kwargs={"plan": plan}, deployment_cls=KappaServer)
    ingress = serve.deployment(
        make_ingress(limits.max_body_bytes, tenants_table(settings)),
        name="KappaIngress",
        num_replicas=1,
        max_ongoing_requests=4 * limits.max_queue,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=5,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(
        llm_deployments={model_id: workers},
        model_cards={model_id: to_model_metadata(model_id, config)},
        kappa=_ingress_settings(settings, model),
    )


def _refuse_what_does_not_go_together(settings: ClusterSettings) -> None:
    paced = [node.name for node in settings.nodes if node.paced]
    if settings.engine.kind == "torch" and paced:
        raise StartError(
            f"engine.kind is torch, which cannot be paced, but nodes {', '.join(paced)} are: say "
            "'paced: false' for each, or start with --unpaced"
        )
    unpaced = [node.name for node in settings.nodes if not node.paced]
    if settings.engine.kind == "emulated" and unpaced:
        raise StartError(
            f"engine.kind is emulated, which has no speed but its pace, and nodes "
            f"{', '.join(unpaced)} are not paced: say 'paced: true' for each"
        )
    if settings.engine.kind == "torch" and settings.scheduler.name == "stock":
        raise StartError(
            "scheduler.name is stock, which is vLLM's own: with engine.kind torch name another "
            "rule, such as fair"
        )


def _llm_config(settings: ClusterSettings, model: Model) -> Any:
    """Ray Serve LLM's configuration of the workers' deployment."""
    from ray.serve.llm import LLMConfig

    from workers.vllm_engine import CPU_ENV

    return LLMConfig(
        model_loading_config={"model_id": settings.model.id, "model_source": model.source},
        engine_kwargs={"enable_prompt_tokens_details": True, **settings.engine.extra},
        accelerator_config={"kind": "cpu"},
        placement_group_config={"bundles": [{"CPU": _REPLICA_CPUS}]},
        deployment_config={
            "num_replicas": len(settings.nodes),
            "max_ongoing_requests": 4 * settings.router.max_queue,
            "max_constructor_retry_count": 2,
            "health_check_period_s": 2,
            "health_check_timeout_s": 10,
            "graceful_shutdown_timeout_s": 5,
            "request_router_config": {
                "request_router_class": "router.ray_router.KappaRouter",
                "request_routing_stats_period_s": 1,
                "request_routing_stats_timeout_s": 10,
            },
            "ray_actor_options": {"num_cpus": _REPLICA_CPUS},
        },
        callback_config={"callback_class": "workers.no_download.NoDownload"},
        runtime_env={"env_vars": {**CPU_ENV, "HF_HUB_OFFLINE": _offline(settings)}},
        log_engine_metrics=settings.engine.metrics,
    )


def _ingress_settings(settings: ClusterSettings, model: Model) -> Any:
    """What the ingress is told; the secret of its hashes is new at every start."""
    from router.ingress_settings import IngressSettings

    r = settings.router
    return IngressSettings(
        tokenizer_source=model.source,
        policy=r.policy,
        index_blocks=r.index_blocks,
        max_queue=r.max_queue,
        stale_after_s=r.stale_after_s,
        calibrate=r.calibrate,
        calibrate_requests=r.calibrate_requests,
        request_timeout_s=r.request_timeout_s,
        secret=secrets.token_hex(16),
        record=r.record,
        forecast_workers=r.forecast_workers,
        admission=r.admission,
        tenants=tenants_table(settings),
    )


def tenants_table(settings: ClusterSettings) -> Any:
    """The tenants' table; of their keys it holds digests only."""
    from router.tenants import Tenants

    t = settings.tenants
    return Tenants.of(
        {key.get_secret_value(): name for key, name in t.by_key.items()},
        t.weights,
        t.default_name,
        refuse=t.unknown == "refuse",
    )


def own_headers(settings: ClusterSettings) -> dict[str, str]:
    """What our own requests must send where those without a key are refused: some tenant's."""
    if settings.tenants.unknown != "refuse":
        return {}
    key = next(iter(settings.tenants.by_key))
    return {"authorization": f"Bearer {key.get_secret_value()}"}


def _offline(settings: ClusterSettings) -> str:
    source = settings.model.source
    return "0" if source is not None and not Path(source).exists() else "1"
