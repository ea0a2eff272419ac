"""Our cluster and stock Ray Serve LLM side by side, for `kappa bench serve`.

One Ray, one HTTP proxy, one replica each: ours at `/`, stock at `/stock` (as it comes: it holds
streamed tokens for 50 ms) and at `/stock0` (set to send each at once). Beside them ours behind an
Envoy, whose worker answers HTTP itself, and plain `vllm serve`, without Ray. All engines are vLLM
with the same model and the same limits, unpaced; ours has its host tier, events and meters on top.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Collection
from functools import partial
from typing import Any

import httpx

from deploy.app.build import build_app
from deploy.app.cluster import Cluster
from deploy.app.front_door import FrontDoor
from deploy.app.model import Model, StartError, prepare_model
from deploy.app.plan import pool_config
from kappa.host import die_with_parent, free_port
from kappa.settings.cluster import ClusterSettings

_PREFIXES = {"stock": "/stock", "stock_no_batching": "/stock0"}
SYSTEMS = ("kappa", "kappa_envoy", *_PREFIXES, "vllm")
"""What is compared; `kappa` is ours through Ray's proxy and our ingress."""
_VLLM_START_S = 180.0


def one_node(settings: ClusterSettings) -> ClusterSettings:
    """The same settings with one worker, of the first pool, at its machine's own speed."""
    http = settings.http.model_copy(update={"data_plane": "python", "tls": None})
    return settings.first_worker().unpaced().model_copy(update={"http": http})


class BenchCluster(Cluster):
    """A cluster of ours with the stock systems beside it."""

    engines_beside = len(SYSTEMS) - 1
    systems: Collection[str] = SYSTEMS
    """Which are started; `kappa` always is."""
    _second: FrontDoor | None = None
    _vllm: subprocess.Popen[bytes] | None = None

    def _start(self) -> None:
        super()._start()
        from ray import serve

        model = prepare_model(self.settings)
        self.urls = {"kappa": self.url}
        for name, prefix in _PREFIXES.items():
            if name in self.systems:
                self._progress(f"starting {name}")
                at_once = {"stream_batching_interval_ms": 0} if name != "stock" else {}
                app = _stock_app(self.settings, model, at_once)
                serve.run(app, name=name, route_prefix=prefix)
                self.urls[name] = f"{self.url}{prefix}"
        if "kappa_envoy" in self.systems:
            self._progress("starting kappa_envoy")
            http = self.settings.http.model_copy(update={"port": 0, "data_plane": "envoy"})
            self._second = FrontDoor(self.settings.model_copy(update={"http": http}))
            self._second.start()
            app = build_app(self.settings, [model], self._ray.stream_host, self._second.spec)
            serve.run(app, name="envoy", route_prefix=None)
            self.urls["kappa_envoy"] = self._second.spec.url
            _until_answered(self._second.spec.url, "/ready")
        if "vllm" in self.systems:
            self._progress("starting vllm")
            self.urls["vllm"] = self._start_vllm(model)

    def _start_vllm(self, model: Model) -> str:
        """Plain `vllm serve` with the engine's limits; where it listens."""
        from workers.vllm.arguments import CPU_ENV

        (pool,) = self.settings.all_pools
        arguments = _engine_limits(self.settings) | {"enable_prefix_caching": True}
        if not pool.placement.gpus:
            arguments["enforce_eager"] = True
        port = free_port("127.0.0.1")
        flags = [
            flag
            for name, value in arguments.items()
            for flag in ([f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)]))
        ]
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model.source,
            "--served-model-name", self.settings.model.id, "--host", "127.0.0.1",
            "--port", str(port), "--disable-uvicorn-access-log", *flags,
        ]  # fmt: skip
        environment = {**os.environ, **({} if pool.placement.gpus else CPU_ENV), "VLLM_PLUGINS": ""}
        self._vllm = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        _until_answered(url, "/health")
        return url

    def stop(self) -> None:
        """As `Cluster.stop`, with all that stands beside."""
        if self._vllm is not None:
            self._vllm.terminate()
            self._vllm.wait(_VLLM_START_S)
        if self._second is not None:
            self._second.stop(0.0)
        super().stop()


def _until_answered(url: str, path: str) -> None:
    """Wait until `path` is answered with 200; raises StartError."""
    until_s = time.monotonic() + _VLLM_START_S
    while time.monotonic() < until_s:
        try:
            if httpx.get(f"{url}{path}", timeout=10.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise StartError(f"{url}{path} was not answered within {_VLLM_START_S:g} s")


def _engine_limits(settings: ClusterSettings) -> dict[str, Any]:
    from workers.vllm.arguments import EngineLimits

    (pool,) = settings.all_pools
    return EngineLimits.of(pool.engine_settings(settings.engine)).arguments()


def _stock_app(settings: ClusterSettings, model: Model, experimental: dict[str, Any]) -> Any:
    """`build_openai_app` in our worker's place, with its engine's limits, and nothing else of
    ours."""
    from ray.serve.llm import LLMConfig, build_openai_app

    (pool,) = settings.all_pools
    ours = pool_config(settings, pool, model)
    eager = {} if pool.placement.gpus else {"enforce_eager": True}
    replica = {"num_replicas": 1, "max_ongoing_requests": 4 * settings.router.max_queue}
    engine = {**_engine_limits(settings), **eager, "enable_prefix_caching": True}
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
