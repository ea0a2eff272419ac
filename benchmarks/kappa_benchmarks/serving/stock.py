"""Stock Ray Serve LLM on a Ray of its own, a child of `kappa bench serve`: Ray reads the flags of
its data path before it starts, and ours has none of them.

    python -m kappa_benchmarks.serving.stock PORT [--at-once] < settings.json

It serves until its standard input ends.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from kappa.settings.cluster import ClusterSettings

DIRECT_ENV = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # Its 5 s are too short for a start on a busy machine.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "90",
}
"""Direct streaming behind HAProxy, with the throughput flags."""


def main(
    port: int,
    at_once: Annotated[
        bool, typer.Option(help="Send each token, instead of what came in 50 ms.")
    ] = False,
) -> None:
    """Serve until standard input ends."""
    from kappa_deploy.app.cluster import set_environment
    from kappa_deploy.app.model import prepare_model
    from kappa_deploy.app.ray_cluster import OwnRay

    settings = ClusterSettings.model_validate_json(sys.stdin.readline())
    set_environment(settings.log_level)
    model, own = prepare_model(settings), OwnRay(1)
    own.start(settings.log_level)
    try:
        from ray import serve

        logs = {"log_level": settings.log_level, "enable_access_log": False}
        http = {"host": "127.0.0.1", "port": port}
        serve.start("HeadOnly", http_options=http, logging_config=logs)
        experimental = {"stream_batching_interval_ms": 0} if at_once else {}
        direct = os.environ.get("RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING") == "1"
        serve.run(stock_app(settings, model, experimental, direct=direct), name="stock")
        sys.stdin.read()
    finally:
        own.stop()


def stock_app(
    settings: ClusterSettings, model: Any, experimental: dict[str, Any], *, direct: bool = False
) -> Any:
    """`build_openai_app` in our worker's place, with its engine's limits, and nothing else of
    ours. model: of `prepare_model`; direct: its router has no deployment to configure."""
    from ray.serve.llm import LLMConfig, build_openai_app

    from kappa_deploy.app.plan import pool_config

    (pool,) = settings.all_pools
    ours = pool_config(settings, pool, model)
    eager = {} if pool.placement.gpus else {"enforce_eager": True}
    replica = {"num_replicas": 1, "max_ongoing_requests": 4 * settings.router.max_queue}
    engine = {**engine_limits(settings), **eager, "enable_prefix_caching": True}
    actor = {"ray_actor_options": ours["deployment_config"]["ray_actor_options"]}
    config = LLMConfig(
        **ours
        | {
            "engine_kwargs": {**engine, **ours["engine_kwargs"]},
            "deployment_config": replica | actor,
            "experimental_configs": experimental,
            "log_engine_metrics": False,
        }
    )
    ingress = {**replica, "ray_actor_options": {"num_cpus": 0}}
    return build_openai_app(
        {"llm_configs": [config]} | ({} if direct else {"ingress_deployment_config": ingress})
    )


def engine_limits(settings: ClusterSettings) -> dict[str, Any]:
    """vLLM's arguments for the limits of the one pool's engine."""
    from kappa_workers.vllm.arguments import EngineLimits

    (pool,) = settings.all_pools
    return EngineLimits.of(pool.engine_settings(settings.engine)).arguments()


if __name__ == "__main__":
    typer.run(main)
