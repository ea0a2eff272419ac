"""Emulated engines with steps and loads of microseconds, without Ray."""

from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import zmq
from ray.serve.llm import LLMConfig

from kappa.hardware import node_profile
from kappa.model import ModelShape
from kappa_workers.identity import WorkerPlan
from kappa_workers.no_download import NoDownload
from kappa_workers.own_engine.server import OwnPlan
from kappa_workers.paced.emulated_engine import WORD
from kappa_workers.tiny_model import make_tiny_model
from kappa_workers.vllm.arguments import Endpoints
from tests.workers.plans import EMULATED

# Two bytes of KV and a hundred FLOPs per token.
SHAPE = ModelShape("small", 1, 1, 1, 1, 1, 50.0, 50.0, "mha", 1.0)
PATIENCE_MS = 20_000

_FOLDER = TemporaryDirectory(prefix="kappa-test-")


@cache
def tiny_model():
    """A folder with a model; its tokenizer has a token for the emulated engine's word."""
    return make_tiny_model(Path(_FOLDER.name) / "tiny", [f"hello world{WORD} a b c " * 20])


def emulated_plan(worker, limits, endpoints, step_s=0.0, silicon=""):
    node = replace(
        node_profile("pcie"), source="paced", h2d_bytes_per_s=2e6, flops_per_s=1e8,
        hbm_bytes_per_s=1e6, load_fixed_s=0.0, step_fixed_s=step_s, silicon=silicon,
    )  # fmt: skip
    plan = WorkerPlan((node,), SHAPE, SHAPE, limits, "m", "", "", "", engine=EMULATED)
    return OwnPlan(plan, worker, 0, endpoints)


class Heard:
    """The sockets to which an engine with these `ends` says its stats and its KV events."""

    def __init__(self, folder):
        self.ends = Endpoints(f"ipc://{folder}/stats", f"ipc://{folder}/kv")
        self._context = zmq.Context()
        self.stats = self._context.socket(zmq.PULL)
        self.stats.bind(self.ends.stats)
        self.kv = self._context.socket(zmq.SUB)
        self.kv.setsockopt(zmq.SUBSCRIBE, b"")
        self._connected = self.kv.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.kv.connect(self.ends.kv_events)

    def await_events(self):
        """Wait for the connection to the events: a subscriber hears nothing before it stands."""
        assert self._connected.poll(PATIENCE_MS)

    def close(self):
        self.kv.disable_monitor()
        self._context.destroy(linger=0)


def llm_config(model, folder=None):
    """Ray's of a model, by default the tiny one, in a process without Ray."""
    config = LLMConfig(
        model_loading_config={"model_id": model, "model_source": str(folder or tiny_model())},
        engine_kwargs={"enable_prompt_tokens_details": True},
        accelerator_config={"kind": "cpu"},
    )
    # Ray's own would ask for a placement group.
    config._callback_instance = NoDownload(config)
    return config


@asynccontextmanager
async def asking(engine):
    """A client of a started engine's application."""
    through = httpx.ASGITransport(await engine.build_asgi_app())
    async with httpx.AsyncClient(transport=through, base_url="http://worker") as client:
        yield client
