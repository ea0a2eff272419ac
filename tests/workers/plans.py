"""Plans of workers, without Ray and vLLM: what a worker is to run, and on which node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kappa.hardware import NodeProfile, node_profile
from kappa.settings.engine import EngineSettings
from kappa.shapes import model_shape
from kappa_workers.identity import WorkerPlan
from kappa_workers.vllm.arguments import EngineLimits

EMULATED = EngineSettings(kind="emulated")
LIMITS = EngineLimits(8192, 32, 264, 64 << 20, 1024, 64, "float32")


def paced(name: str, dilation: float = 30.0) -> NodeProfile:
    return replace(node_profile(name), source="paced", dilation=dilation)


def worker_plan(*nodes: NodeProfile, **changes: Any) -> WorkerPlan:
    """A worker that runs Qwen2.5-7B as if it were Llama-3.1-8B; by default on an unpaced node."""
    plan = WorkerPlan(
        nodes or (node_profile("pcie"),), model_shape("qwen2.5-7b"), model_shape("llama-3.1-8b"),
        LIMITS, model_source="/models/x", chat_template="{{ messages }}", cache_dir="/nowhere",
        stream_host="127.0.0.1",
    )  # fmt: skip
    return replace(plan, **changes)
