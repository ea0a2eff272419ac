"""What the engine of one replica must know, as plain data made from its worker's plan.

Given to the engines of this package with the replica's configuration. No torch: plans are made
where the cluster is started, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.sparse.settings import SparseSettings
from kappa.cost import StepModel
from kappa.hardware import NodeProfile
from kappa.model import ModelShape
from kappa.plans.clo import HeadProfile

if TYPE_CHECKING:
    from workers.identity import WorkerPlan


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """How requests that may be answered approximately decode.

    heads: scores of their importance, if any were given: they travel as numbers, since the file
    need not be on the worker's machine. persistent_heads: that keep their KV on the device, at
    most.
    """

    settings: SparseSettings = field(default_factory=SparseSettings)
    heads: HeadProfile | None = None
    persistent_heads: int | None = None


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """What the torch engine of one replica must know.

    source: folder of the model, in safetensors. device_blocks, host_blocks: of KV; act_share of
    the stored ones is kept as activations. rates_dir: where measured rates are kept. node, profile:
    what to take the machine for, and what to ask `workers.profiler.measure`, if they cannot be had.
    cpu_threads: that attend to host memory; cpu_room_share: as in the settings.
    approx: who may get approximate answers; sparse: how, for requests of max_context_tokens.
    """

    source: str
    dtype: str
    block_tokens: int
    device_blocks: int
    host_blocks: int
    max_batch_tokens: int
    max_sequences: int
    planner: str
    act_share: float
    scheduler: str
    fair: Mapping[str, Any]
    rates_dir: str
    node: NodeProfile
    profile: Mapping[str, Any]
    stats_endpoint: str
    kv_endpoint: str
    log: str | None = None
    approx: str = "never"
    sparse: SparsePlan = field(default_factory=SparsePlan)
    max_context_tokens: int = 8192
    cpu_threads: int = 0
    cpu_room_share: float = 1.0


def torch_plan(plan: WorkerPlan, stats_endpoint: str, kv_endpoint: str, rank: int) -> TorchPlan:
    """What the replica of this rank runs, from its worker's plan."""
    limits, scheduler = plan.limits, plan.scheduler
    return TorchPlan(
        source=plan.model_source,
        dtype=limits.dtype,
        block_tokens=limits.block_tokens,
        device_blocks=limits.device_blocks,
        host_blocks=plan.host_blocks,
        max_batch_tokens=limits.max_batch_tokens,
        max_sequences=limits.max_sequences,
        planner=plan.planner,
        act_share=plan.act_share,
        scheduler=scheduler.rule,
        fair=scheduler.config,
        rates_dir=str(Path(plan.cache_dir) / "profiles"),
        node=plan.node(rank),
        profile=plan.profile_request(),
        stats_endpoint=stats_endpoint,
        kv_endpoint=kv_endpoint,
        log=scheduler.for_rank(rank).log,
        approx=plan.approx,
        sparse=plan.sparse,
        max_context_tokens=limits.max_context_tokens,
        cpu_threads=plan.cpu_threads,
        cpu_room_share=plan.cpu_room_share,
    )


def host_blocks(shape: ModelShape, blocks: int, act_share: float) -> tuple[int, int]:
    """Blocks of KV and of activations in the room of so many blocks of KV.

    A share of the stored blocks is kept as activations besides their KV.
    """
    ratio = shape.hidden / (2 * shape.kv_heads * shape.head_dim)
    kv = int(blocks / (1 + act_share * ratio))
    return kv, round(act_share * kv)


@dataclass(frozen=True, slots=True)
class EmulatedPlan:
    """What the emulated engine of one replica must know.

    worker: its name, by which a file of faults may mean it. step, load_token_s, load_fixed_s: how
    fast, in real seconds, dilation included. max_context_tokens: of prompt and answer.
    """

    worker: str
    step: StepModel
    load_token_s: float
    load_fixed_s: float
    max_batch_tokens: int
    max_sequences: int
    block_tokens: int
    device_blocks: int
    host_blocks: int
    max_context_tokens: int
    stats_endpoint: str
    kv_endpoint: str
