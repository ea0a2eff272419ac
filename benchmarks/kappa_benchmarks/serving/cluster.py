"""Our cluster with other ways to serve the same model beside it, for `kappa bench serve`.

Stock Ray Serve LLM as it comes (it holds streamed tokens for 50 ms), set to send each at once, and
with direct streaming behind HAProxy, each on a Ray of its own; and plain `vllm serve`, without Ray.
All engines are vLLM with the same model and the same limits, unpaced; ours has its host tier,
events and meters on top.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kappa.host import die_with_parent, free_port
from kappa.settings.cluster import ClusterSettings
from kappa_benchmarks.serving.processes import until_served
from kappa_benchmarks.serving.stock import DIRECT_ENV, engine_limits
from kappa_deploy.app.cluster import Cluster
from kappa_deploy.app.errors import StartError
from kappa_deploy.app.model import Model, prepare_model

_STOCK: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "stock": ((), {}),
    "stock_no_batching": (("--at-once",), {}),
    "direct": ((), DIRECT_ENV),
}
SYSTEMS = ("kappa", *_STOCK, "vllm")
"""The systems that are compared."""
_START_S = 240.0
_STOP_S = 30.0
# Device blocks beside those of one conversation.
_SPARE_BLOCKS = 128


def one_node(settings: ClusterSettings) -> ClusterSettings:
    """The same settings with one worker, of the first pool, at its machine's own speed."""
    http = settings.http.model_copy(update={"tls": None})
    return settings.first_worker().unpaced().model_copy(update={"http": http})


def with_room(settings: ClusterSettings, tokens: int, folder: Path) -> ClusterSettings:
    """The same with room for prompts of `tokens` tokens, in the engine and in the positions of a
    copy of the model in `folder`. Only time is measured, so the answers' content does not matter.
    """
    engine = settings.engine
    block = engine.block_tokens or 32
    if tokens <= (engine.max_context_tokens or 8192):
        return settings
    room = {"max_context_tokens": tokens, "device_blocks": tokens // block + _SPARE_BLOCKS}
    source = Path(prepare_model(settings).source)
    if source.exists():
        copied = folder / source.name
        shutil.copytree(source, copied, dirs_exist_ok=True)
        config = json.loads((copied / "config.json").read_text())
        config["max_position_embeddings"] = max(config["max_position_embeddings"], tokens)
        (copied / "config.json").write_text(json.dumps(config))
        model = settings.model.model_copy(update={"source": str(copied)})
        settings = settings.model_copy(update={"model": model})
    return settings.model_copy(update={"engine": engine.model_copy(update=room)})


class BenchCluster(Cluster):
    """A cluster of ours with other systems beside it, each below a child of this process."""

    systems: Collection[str] = SYSTEMS
    """Which are started; `kappa` always is."""

    def _start(self) -> None:
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        """The process that all of a system's are below; ours has none."""
        super()._start()
        model = prepare_model(self.settings)
        self.urls = {"kappa": self.url}
        for name in self.systems:
            if name == "kappa":
                continue
            self._progress(f"starting {name}")
            port = free_port("127.0.0.1")
            if name == "vllm":
                self.children[name] = self._start_vllm(model, port)
            else:
                options, environment = _STOCK[name]
                command = ["-m", "kappa_benchmarks.serving.stock", str(port), *options]
                child = self.children[name] = _child(command, environment)
                assert child.stdin is not None
                child.stdin.write(self.settings.model_dump_json().encode() + b"\n")
                child.stdin.flush()
            self.urls[name] = f"http://127.0.0.1:{port}"
            try:
                until_served(f"{self.urls[name]}/v1/models", _START_S, self.children[name])
            except TimeoutError as error:
                raise StartError(f"{name}: {error}") from None

    def _start_vllm(self, model: Model, port: int) -> subprocess.Popen[bytes]:
        """Plain `vllm serve` with the engine's limits."""
        from kappa_workers.vllm.arguments import CPU_ENV

        (pool,) = self.settings.all_pools
        arguments = engine_limits(self.settings) | {"enable_prefix_caching": True}
        if not pool.placement.gpus:
            arguments["enforce_eager"] = True
        flags = [
            flag
            for name, value in arguments.items()
            for flag in ([f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)]))
        ]
        command = [
            "-m", "vllm.entrypoints.openai.api_server", "--model", model.source,
            "--served-model-name", self.settings.model.id, "--host", "127.0.0.1",
            "--port", str(port), "--disable-uvicorn-access-log", *flags,
        ]  # fmt: skip
        return _child(command, ({} if pool.placement.gpus else CPU_ENV) | {"VLLM_PLUGINS": ""})

    def stop(self) -> None:
        """As `Cluster.stop`; the other systems end first."""
        children = getattr(self, "children", {}).values()
        for child in children:
            if child.stdin is not None:
                child.stdin.close()
        if "vllm" in getattr(self, "children", {}):
            self.children["vllm"].terminate()
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_STOP_S)
            child.kill()
            child.wait()
        super().stop()


def _child(command: list[str], environment: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *command], env={**os.environ, **environment}, stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )  # fmt: skip
