"""Our cluster and stock Ray Serve LLM side by side, for `kappa bench serve`.

One Ray, one HTTP proxy, one replica each: ours at `/`, stock at `/stock` (as it comes: it holds
streamed tokens for 50 ms) and at `/stock0` (set to send each at once). All engines are vLLM with
the same model and the same limits, unpaced; ours has its host tier, events and meters on top.
"""

from __future__ import annotations

from typing import Any

from deploy.app.cluster import Cluster
from deploy.app.model import Model, prepare_model
from deploy.app.plan import pool_config
from kappa.settings.cluster import ClusterSettings

SYSTEMS = {"kappa": "", "stock": "/stock", "stock_no_batching": "/stock0"}
"""Route prefix of each system."""


def one_node(settings: ClusterSettings) -> ClusterSettings:
    """The same settings with one worker, of the first pool, at its machine's own speed."""
    return settings.first_worker().unpaced()


class BenchCluster(Cluster):
    """A cluster of ours with the stock systems beside it."""

    engines_beside = len(SYSTEMS) - 1

    def _start(self) -> None:
        super()._start()
        from ray import serve

        model = prepare_model(self.settings)
        for name in ("stock", "stock_no_batching"):
            self._progress(f"starting {name}")
            at_once = {"stream_batching_interval_ms": 0} if name != "stock" else {}
            app = _stock_app(self.settings, model, at_once)
            serve.run(app, name=name, route_prefix=SYSTEMS[name])


def _stock_app(settings: ClusterSettings, model: Model, experimental: dict[str, Any]) -> Any:
    """`build_openai_app` in our worker's place, with its engine's limits, and nothing else of
    ours."""
    from ray.serve.llm import LLMConfig, build_openai_app

    from workers.vllm.arguments import EngineLimits

    (pool,) = settings.all_pools
    ours, limits = pool_config(settings, pool, model), pool.engine_settings(settings.engine)
    eager = {} if pool.placement.gpus else {"enforce_eager": True}
    replica = {"num_replicas": 1, "max_ongoing_requests": 4 * settings.router.max_queue}
    engine = {**EngineLimits.of(limits).arguments(), **eager, "enable_prefix_caching": True}
    actor = {"ray_actor_options": ours["deployment_config"]["ray_actor_options"]}
    config = LLMConfig(
        **ours | {
            "engine_kwargs": {**engine, **ours["engine_kwargs"]},
            "deployment_config": replica | actor,
            "experimental_configs": experimental,
            "log_engine_metrics": False,
        }
    )  # fmt: skip
    ingress = {**replica, "ray_actor_options": {"num_cpus": 0}}
    return build_openai_app({"llm_configs": [config], "ingress_deployment_config": ingress})
