"""The arguments that make a vLLM engine one of our workers. Pure translation.

Given a node and the endpoints of its replica, `engine_kwargs` returns what Ray Serve LLM passes
to vLLM: our worker class, the host tier, the event publisher, and on a paced node the pace of both
resources. Every vLLM option that we set is named here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kappa.cost import StepModel, step_model
from kappa.hardware import NodeProfile
from kappa.model import ModelShape, kv_bytes_per_token
from workers.vllm.options import CONFIG_KEY, STOCK
from workers.vllm.tier_choice import TierChoice, TierNeeds, transfer_config

# vLLM on a CPU: no thread binding and one thread per engine, so that engines share the cores;
# short queue spins (workers.vllm_plugin); float32, since bf16 fails on short prompts there.
CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "KAPPA_QUEUE_SPIN_S": "0.0005",
    "KAPPA_DIE_WITH_PARENT": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


_CPU_WORKER = "workers.vllm.metered_worker.MeteredCPUWorker"
_GPU_WORKER = "workers.vllm.metered_gpu_worker.MeteredGPUWorker"


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Sizes of one engine: tokens per block, KV blocks on the device, bytes in the host tier."""

    max_context_tokens: int
    block_tokens: int
    device_blocks: int
    host_bytes: int
    max_batch_tokens: int
    max_sequences: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Pace:
    """What a paced node needs to know: the model it emulates and the node it is paced as."""

    shape: ModelShape
    node: NodeProfile

    @property
    def step(self) -> StepModel:
        """Seconds per engine step."""
        return step_model(self.shape, self.node)

    @property
    def link(self) -> dict[str, float]:
        """Real seconds per token on the link, for `workers.vllm.host_tier.LinkPace`."""
        kv_bytes, node = kv_bytes_per_token(self.shape), self.node
        store_bytes_per_s = node.d2h_bytes_per_s or node.h2d_bytes_per_s
        return {
            "token_s": node.dilation * kv_bytes / node.h2d_bytes_per_s,
            "store_token_s": node.dilation * kv_bytes / store_bytes_per_s,
            "fixed_s": node.dilation * node.load_fixed_s,
            "dilation": node.dilation,
        }


@dataclass(frozen=True, slots=True)
class EngineTier:
    """An engine's host tier: which one; the rates that its loads are planned by; the server that
    its worker started for it; how many blocks it holds."""

    choice: TierChoice = field(default_factory=TierChoice)
    rates: Mapping[str, Any] | None = None
    server: str = ""
    host_blocks: int = 0


@dataclass(frozen=True, slots=True)
class EngineScheduler:
    """What an engine schedules by.

    rule: a name of `scheduler.catalogue`, or `STOCK`. config: fields of a `FairConfig`. link: how
    the host tier orders its link, fields of `workers.vllm.link_queue.LinkRules`. log: file for
    JSON lines, one per iteration; each rank writes its own. tenant_required: every request comes
    from an ingress of ours, so one without a tenant is refused.
    """

    rule: str = STOCK
    config: Mapping[str, Any] = field(default_factory=dict)
    link: Mapping[str, Any] = field(default_factory=dict)
    log: str | None = None
    tenant_required: bool = False

    def options(self, stats_endpoint: str, pace: Pace | None, rank: int) -> dict[str, Any]:
        """What `workers.vllm.scheduler` reads."""
        loads = {k: pace.link[k] for k in ("token_s", "fixed_s")} if pace is not None else None
        return {
            "rule": self.rule,
            "config": dict(self.config),
            "link": loads,
            "stats": stats_endpoint,
            "log": self.log_of(rank),
            "tenant_required": self.tenant_required,
        }

    def log_of(self, rank: int) -> str | None:
        """The file of the replica of this rank: each writes its own."""
        path = Path(self.log) if self.log else None
        return str(path.with_name(f"{path.stem}-{rank}{path.suffix}")) if path else None


def engine_kwargs(
    limits: EngineLimits,
    stats_endpoint: str,
    kv_endpoint: str,
    pace: Pace | None,
    scheduler: EngineScheduler = EngineScheduler(),
    rank: int = 0,
    tier: EngineTier = EngineTier(),
    gpus: int = 0,
) -> dict[str, Any]:
    """vLLM's engine arguments for the replica of this rank; `gpus`: of each worker, 0 on a CPU."""
    additional: dict[str, Any] = {"kappa_stats": stats_endpoint}
    if pace is not None:
        additional["kappa_pace"] = pace.step.to_dict()
    arguments: dict[str, Any] = {
        "dtype": limits.dtype,
        "max_model_len": limits.max_context_tokens,
        "block_size": limits.block_tokens,
        "num_gpu_blocks_override": limits.device_blocks,
        "max_num_batched_tokens": limits.max_batch_tokens,
        "max_num_seqs": limits.max_sequences,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "worker_cls": _GPU_WORKER if gpus else _CPU_WORKER,
        "additional_config": additional,
        "kv_events_config": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": kv_endpoint,
            "topic": "kv",
        },
    }
    if scheduler.rule != STOCK:
        arguments["scheduler_cls"] = "workers.vllm.scheduler.FairScheduler"
        additional[CONFIG_KEY] = scheduler.options(stats_endpoint, pace, rank)
    if limits.host_bytes:
        needs = TierNeeds(
            host_bytes=limits.host_bytes,
            stats_endpoint=stats_endpoint,
            link=scheduler.link,
            pace=pace.link if pace is not None else None,
            rates=tier.rates,
            host_blocks=tier.host_blocks,
        )
        arguments["kv_transfer_config"] = transfer_config(tier.choice, needs, tier.server)
    return arguments


def fingerprint(
    model_source: str, chat_template: str, limits: EngineLimits, shape_name: str
) -> str:
    """Hash of what two workers must share for their KV blocks to mean the same."""
    parts = {
        "model": model_source,
        "template": chat_template,
        "dtype": limits.dtype,
        "block_tokens": limits.block_tokens,
        "shape": shape_name,
        "hash": "vllm-0.29",
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
