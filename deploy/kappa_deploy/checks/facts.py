"""The facts that checks go by: plain data, read by a command before it runs its checks.

A command gives only the facts that its rows need. A fact that is not known refuses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kappa.hardware import NodeProfile
from kappa.model import kv_bytes, weight_bytes
from kappa.settings.cluster import ClusterSettings
from kappa.settings.engine import EngineSettings, share_bytes
from kappa.settings.pools import PoolSettings
from kappa_deploy.app.machine import Machine
from kappa_deploy.app.model import Model

NOWHERE = Machine("", {})


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt that was sent twice."""

    prompt_tokens: int = 0
    # Of the second prompt, the tokens that the router expected to be cached.
    expected_tokens: int = 0
    # Of the second prompt, the tokens that the engine found cached.
    found_tokens: int = 0
    block_tokens: int = 1
    # Why the prompt could not be sent.
    fault: str = ""


@dataclass(frozen=True, slots=True)
class ReadBack:
    """A prompt sent three times: new, cached on the device, and once others took its place there.
    Each as (seconds, cached tokens, None where it does not say)."""

    prompt_tokens: int = 0
    new: tuple[float, int | None] = (0.0, None)
    on_device: tuple[float, int | None] = (0.0, None)
    evicted: tuple[float, int | None] = (0.0, None)
    # Loads that the server counted at the third; None: it has no such counter.
    loads: int | None = None
    # Why nothing was found out.
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a start, a machine, a running cluster or manifests."""

    settings: ClusterSettings = field(default_factory=ClusterSettings)
    # In the order of `settings.by_model()`; None: not on disk yet.
    models: Sequence[Model | None] = ()
    # Why folders of models cannot be read.
    model_faults: Sequence[str] = ()
    # Where workers may run; empty: not known yet.
    machines: Sequence[Machine] = ()

    # The machine that is examined.
    machine: Machine = NOWHERE
    # Versions by package.
    installed: Mapping[str, str] = field(default_factory=dict)
    # Versions by package, as the lock has them.
    locked: Mapping[str, str] = field(default_factory=dict)
    # What a dry run finds in the cluster file; None: there is no file.
    file_faults: Sequence[str] | None = None

    # Profiles that the cluster file names, by pool.
    priors: Mapping[str, NodeProfile] = field(default_factory=dict)
    # Rows of `/v1/nodes`; None: no running cluster was named.
    nodes: Sequence[Mapping[str, Any]] | None = None
    # Rows of `/v1/decisions`.
    decisions: Sequence[Mapping[str, Any]] = ()
    # Blocks that the index could not place, by cause.
    losses: Mapping[str, float] = field(default_factory=dict)
    # Blocks that the index holds.
    index_blocks: float = 0.0
    probe: Probe | None = None
    # Servers behind `kappa route` of which a tier was tried, by name.
    read_backs: Mapping[str, ReadBack] = field(default_factory=dict)

    # Kubernetes objects of one overlay.
    documents: Sequence[Mapping[str, Any]] = ()

    def workers(self, machine: Machine) -> list[Worker]:
        """One worker of each pool, as if it were on this machine."""
        by_model = zip(self.settings.by_model(), self.models, strict=True)
        return [
            Worker(of_one, pool, machine, model)
            for of_one, model in by_model
            for pool in of_one.all_pools
        ]


@dataclass(frozen=True)
class Worker:
    """One worker of a pool, on a machine that has a place for it."""

    # Of a cluster with one model.
    settings: ClusterSettings
    pool: PoolSettings
    machine: Machine = NOWHERE
    # None: not on disk yet.
    model: Model | None = None

    @cached_property
    def engine(self) -> EngineSettings:
        """The engine's section as this pool changes it."""
        return self.pool.engine_settings(self.settings.engine)

    @property
    def kind(self) -> str:
        return self.settings.engine.kind

    @property
    def gpus(self) -> int:
        return self.pool.placement.gpus

    @property
    def tier(self) -> str:
        """Which host tier it runs."""
        return self.engine.tier_on(self.gpus)

    @property
    def tier_bytes(self) -> int:
        """Host memory of its tier; 0 where another machine has it."""
        engine = self.engine
        if engine.kind == "emulated" or engine.shared_server:
            return 0
        if engine.host_bytes is not None:
            return engine.host_bytes
        gpus = self.machine.offers.get("GPU", 0)
        return share_bytes(self.machine.memory_bytes or 0, gpus, self.gpus)

    @property
    def mapped_bytes(self) -> int:
        """The part of its tier that vLLM maps in /dev/shm."""
        return self.tier_bytes if self.tier in ("native", "stock") else 0

    @property
    def host_weight_bytes(self) -> float:
        """Of the weights of a worker with GPUs, those that are in host memory."""
        if self.model is None or not self.gpus:
            return 0.0
        return self.engine.host_weight_bytes(weight_bytes(self.model.shape), self.gpus)

    @property
    def engine_bytes(self) -> float:
        """Host memory of its engine beside the tier: on a CPU, weights and device cache."""
        if self.model is None or self.kind == "emulated":
            return 0.0
        if self.gpus:
            return self.host_weight_bytes
        shape = self.model.shape
        cache = kv_bytes(shape, (self.engine.device_blocks or 0) * (self.engine.block_tokens or 0))
        return shape.params_total * shape.weight_dtype_bytes + cache
