"""Emulated engines with steps and loads of microseconds, without Ray."""

from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from ray.serve.llm import LLMConfig

from kappa.hardware import node_profile
from kappa.model import ModelShape
from kappa_workers.identity import WorkerPlan
from kappa_workers.no_download import NoDownload
from kappa_workers.own_engine.server import OwnPlan
from kappa_workers.paced.emulated_engine import WORD
from kappa_workers.tiny_model import make_tiny_model
from tests.workers.plans import EMULATED

# Two bytes of KV and a hundred FLOPs per token.
SHAPE = ModelShape("small", 1, 1, 1, 1, 1, 50.0, 50.0, "mha", 1.0)


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
