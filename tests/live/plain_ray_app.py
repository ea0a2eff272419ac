"""A plain Ray Serve LLM application with one line of ours: the `request_router_class`.

Run by test_drop_in.py in a process of its own, and shown in docs/drop-in.md. Prints its URL and the
address of its Ray when it is ready, and stops when its standard input closes.
"""

from __future__ import annotations

import sys

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

from deploy.app.model import prepare_model
from kappa.host import free_port
from kappa.settings.cluster import load_settings
from workers.vllm.arguments import CPU_ENV


def main() -> None:
    model = prepare_model(load_settings())
    port = free_port("127.0.0.1")
    rays = {"num_cpus": 12, "resources": {"rack-a": 1}, "include_dashboard": False}
    ray.init("local", **rays, log_to_driver=False, logging_level="ERROR")
    serve.start(
        # A proxy for each machine would not do: others that join are this one.
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"},
    )  # fmt: skip
    config = LLMConfig(
        model_loading_config={"model_id": "plain", "model_source": model.source},
        engine_kwargs={
            "dtype": "float32",
            "max_model_len": 4096,
            "block_size": 32,
            "num_gpu_blocks_override": 512,
            "enforce_eager": True,
            "enable_prompt_tokens_details": True,
        },
        accelerator_config={"kind": "cpu"},
        placement_group_config={"bundles": [{"CPU": 1}]},
        deployment_config={
            "num_replicas": 2,
            "max_ongoing_requests": 64,
            "request_router_config": {
                "request_router_class": "router.ray_router.KappaRouter",
            },
        },
        runtime_env={"env_vars": {**CPU_ENV, "HF_HUB_OFFLINE": "1"}},
        log_engine_metrics=False,
    )
    serve.run(build_openai_app({"llm_configs": [config]}), name="plain", route_prefix="/plain")
    print(f"http://127.0.0.1:{port}/plain {ray.get_runtime_context().gcs_address}", flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
