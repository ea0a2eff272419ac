"""Our cluster and stock Ray Serve LLM side by side, for `kappa bench serve`.

One Ray, one HTTP proxy, one replica each: ours at `/`, stock at `/stock` (as it comes: it holds
streamed tokens for 50 ms) and at `/stock0` (set to send each at once). All engines are vLLM with
the same model and the same limits, unpaced; ours has its host tier, events and meters on top.
"""

from __future__ import annotations

from typing import Any

from deploy.app.cluster import Cluster
from deploy.app.model import Model, prepare_model
from kappa.settings.cluster import ClusterSettings
from kappa.settings.pools import NodeSettings

SYSTEMS = {"kappa": "", "stock": "/stock", "stock_no_batching": "/stock0"}
"""Route prefix of each system."""


def one_node(settings: ClusterSettings) -> ClusterSettings:
    """The same settings with one worker at this machine's own speed."""
    node = NodeSettings(name="local", profile=settings.all_pools[0].profile, paced=False)
    return settings.model_copy(update={"nodes": (node,), "pools": ()})


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
    """`build_openai_app` with our engine limits and nothing else of ours."""
    from ray.serve.llm import LLMConfig, build_openai_app

    from workers.vllm.arguments import CPU_ENV, EngineLimits

    e = settings.engine.on(gpus=0)
    replica = {"num_replicas": 1, "max_ongoing_requests": 4 * settings.router.max_queue}
    config = LLMConfig(
        model_loading_config={"model_id": settings.model.id, "model_source": model.source},
        engine_kwargs={
            **EngineLimits.of(e).arguments(), "enforce_eager": True, "enable_prefix_caching": True,
            "enable_prompt_tokens_details": True, **e.extra,
        },
        accelerator_config={"kind": "cpu"},
        placement_group_config={"bundles": [{"CPU": 1}]},
        deployment_config={**replica, "ray_actor_options": {"num_cpus": 1}},
        experimental_configs=experimental,
        callback_config={"callback_class": "workers.no_download.NoDownload"},
        runtime_env={"env_vars": {**CPU_ENV, "HF_HUB_OFFLINE": "1"}},
        log_engine_metrics=False,
    )  # fmt: skip
    ingress = {**replica, "ray_actor_options": {"num_cpus": 0}}
    return build_openai_app({"llm_configs": [config], "ingress_deployment_config": ingress})
