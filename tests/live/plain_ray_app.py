"""A plain Ray Serve LLM application with two lines of ours: `request_router_class`, `server_cls`.

Run by test_drop_in.py in a process of its own, and shown in docs/drop-in.md; the router's class
also writes down what it knows. Prints its URL and the address of its Ray when it is ready, and
stops when its standard input closes. With `unlike` as its argument the engines are made up, and
their replicas say that they are on unlike nodes (`NODES`).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import ray
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from ray import serve
from ray.llm._internal.serve.core.engine.protocol import LLMEngine
from ray.serve.llm import LLMConfig, build_openai_app

from kappa.hardware import NodeProfile
from kappa.host import free_port
from kappa.settings.cluster import load_settings
from kappa_deploy.app.model import prepare_model
from kappa_router.ray_router import KappaRouter
from kappa_workers.announcing import AnnouncingServer
from kappa_workers.vllm.arguments import CPU_ENV

# What Ray imports it as: `__main__` is another module in its processes, and in those that join.
_HERE = "tests.live.plain_ray_app"
# By rank. Of the first a prompt takes a third of the time that it takes of the second.
NODES = (
    NodeProfile("fast", "", "", 1e10, 3e10, 1e11),
    NodeProfile("slow", "", "", 1e10, 1e10, 1e11),
)
WATCH_ENV = "PLAIN_APP_WATCH"
"""Names the file to which routers write what they know of replicas."""


class Watched(KappaRouter):
    """Writes what it knows of the replicas at each decision, and whenever statistics come."""

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        ranked = await super().choose_replicas(candidate_replicas, pending_request)
        self._write()
        return ranked

    def update_replicas(self, replicas):
        super().update_replicas(replicas)
        self._write()

    def _write(self):
        known = [
            {
                "node": state.announcement.node.name,
                "source": state.announcement.node.source,
                "in_flight": len(state.flights),
            }
            for state in self._kappa_alone._router.workers.values()
        ]
        with Path(os.environ[WATCH_ENV]).open("a") as file:
            file.write(json.dumps({"router": os.getpid(), "replicas": known}) + "\n")


class Sleeper(LLMEngine):
    """Answers with its rank, but not while there is a file like the watched one, with `.hold`."""

    def __init__(self, llm_config):
        self.here, self.config = (
            0,
            json.loads(
                (Path(llm_config.model_loading_config.model_source) / "config.json").read_text()
            ),
        )
        of_vllm = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=self, model=llm_config.model_id),
            parallel_config=SimpleNamespace(world_size=1),
            device_config=SimpleNamespace(device_type="cpu"),
        )
        self._engine_client = SimpleNamespace(output_processor=self, vllm_config=of_vllm)

    def to_dict(self):
        return self.config

    def get_num_unfinished_requests(self):
        return self.here

    async def start(self):
        """There is nothing to start."""

    def routing_stats(self):
        return {}

    async def build_asgi_app(self):
        app = FastAPI()
        app.add_route("/v1/chat/completions", self.answer, methods=["POST"])
        return app

    async def answer(self, request):
        self.here += 1
        try:
            while Path(f"{os.environ[WATCH_ENV]}.hold").exists():
                await asyncio.sleep(0.01)
        finally:
            self.here -= 1
        said = {"role": "assistant", "content": str(serve.get_replica_context().rank.rank)}
        choice = {"index": 0, "message": said, "finish_reason": "stop"}
        answer = {"id": "i", "object": "chat.completion", "created": 0, "model": "plain"}
        return JSONResponse({**answer, "choices": [choice]})

    async def _refused(self, *_, **__):
        raise NotImplementedError

    chat = completions = embeddings = transcriptions = resolve_lora = _refused
    reset_prefix_cache = _refused


class UnlikeServer(AnnouncingServer):
    """On one of `NODES`, with an engine that is made up."""

    async def __init__(self, llm_config):
        await super().__init__(llm_config, engine_cls=Sleeper)

    def kappa_node(self):
        return NODES[self._rank % len(NODES)]


def main() -> None:
    unlike = "unlike" in sys.argv[1:]
    server_cls = f"{_HERE}.UnlikeServer" if unlike else "kappa_workers.announcing.AnnouncingServer"
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
        server_cls=server_cls,
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
                "request_router_class": f"{_HERE}.Watched",
                "request_routing_stats_period_s": 0.5,
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
