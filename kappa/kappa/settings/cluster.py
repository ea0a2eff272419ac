"""Settings of a whole cluster: every section with its defaults, and the reader of its YAML file.

`load_settings` reports each fault with file, key and reason: first all faults of single values,
then all between sections.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from kappa.settings.access import AccessSettings, HttpSettings, TenantSettings, open_door
from kappa.settings.base import Fault, Section, refuse, settings_from
from kappa.settings.engine import EngineSettings, SchedulerSettings, TransferSettings
from kappa.settings.pools import (
    ModelSettings,
    NodeSettings,
    PoolSettings,
    engine_faults,
    pool_faults,
    silicon_faults,
)
from kappa.settings.routing import ObservingSettings, RouterSettings

# The short form is for clusters that are tried out: a Ctrl-C should not take long.
_NODE_DRAIN_S = 5.0


class ClusterSettings(Section):
    """Settings of a cluster. The defaults are the demo: a PCIe and a C2C node, both paced."""

    model: ModelSettings = ModelSettings()
    nodes: tuple[NodeSettings, ...] = Field(
        (NodeSettings(name="pcie", profile="pcie"), NodeSettings(name="c2c", profile="c2c")),
        description="short form of pools: each node is a pool of one worker",
    )
    pools: tuple[PoolSettings, ...] = Field(
        (), description="workers alike, by pool; instead of nodes"
    )
    dilation: float = Field(30.0, ge=1, description="real seconds per emulated one, paced nodes")
    engine: EngineSettings = EngineSettings()
    router: RouterSettings = RouterSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    transfer: TransferSettings = TransferSettings()
    tenants: TenantSettings = TenantSettings()
    access: AccessSettings = AccessSettings()
    http: HttpSettings = HttpSettings()
    observing: ObservingSettings = ObservingSettings()
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"

    @field_validator("engine", mode="before")
    @classmethod
    def _engine_by_its_kind(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _pools_stand_for_nodes(cls, data: Any) -> Any:
        is_given = isinstance(data, dict) and data.get("pools")
        return {"nodes": (), **data} if is_given else data

    @model_validator(mode="after")
    def _sections_agree(self) -> ClusterSettings:
        faults: list[Fault] = []
        names = [node.name for node in self.nodes]
        if self.pools and self.nodes:
            faults.append((("nodes",), "pools are given, too: drop one of the two"))
        if not self.pools and not self.nodes:
            faults.append((("nodes",), "give at least one node, or pools"))
        if len(set(names)) < len(names):
            faults.append((("nodes",), f"two nodes share a name among {names}: names must differ"))
        faults += pool_faults(self.pools, self.model)
        faults += silicon_faults(self.all_pools, self.model, "pools" if self.pools else "nodes")
        faults += engine_faults(self.pools, self.engine)
        door = open_door(self.tenants, self.access, self.http)
        faults += [((), f"http.host {door}")] if door else []
        refuse(faults)
        return self

    @property
    def all_pools(self) -> tuple[PoolSettings, ...]:
        """Every pool; each of `nodes` is a pool of one worker."""
        return self.pools or tuple(
            PoolSettings(**dict(node), drain_s=_NODE_DRAIN_S) for node in self.nodes
        )

    @property
    def workers(self) -> int:
        """The number of workers at start."""
        return sum(pool.least for pool in self.all_pools)

    def by_model(self) -> tuple[ClusterSettings, ...]:
        """The cluster once for each model that it serves, with that model's pools alone."""
        pools: dict[str, list[PoolSettings]] = {}
        models: dict[str, ModelSettings] = {}
        for pool in self.pools:
            model = pool.model or self.model
            models[model.id] = model
            pools.setdefault(model.id, []).append(pool.model_copy(update={"model": None}))
        return tuple(
            self.model_copy(update={"model": model, "pools": tuple(pools[name])})
            for name, model in models.items()
        ) or (self,)

    def first_worker(self) -> ClusterSettings:
        """The same cluster with a single worker, of its first pool."""
        first = self.by_model()[0]
        one = {"replicas": 1, "autoscaling": None, "role": "both"}
        pools = tuple(pool.model_copy(update=one) for pool in first.pools[:1])
        return first.model_copy(update={"nodes": self.nodes[:1], "pools": pools})

    def unpaced(self) -> ClusterSettings:
        """The same cluster without pacing."""
        own = {"paced": False, "silicon": None}
        nodes = tuple(node.model_copy(update=own) for node in self.nodes)
        pools = tuple(pool.model_copy(update=own) for pool in self.pools)
        return self.model_copy(update={"nodes": nodes, "pools": pools})


def load_settings(path: str | Path | None = None, **overrides: Any) -> ClusterSettings:
    """Read a cluster file (`settings_from`)."""
    return settings_from(ClusterSettings, path, **overrides)


def home() -> Path:
    """The folder for made models, cached profiles and sockets."""
    return Path(os.environ.get("KAPPA_HOME", Path.home() / ".cache" / "kappa-serve"))
