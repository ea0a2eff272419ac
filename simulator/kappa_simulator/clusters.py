"""Clusters by name or from a file: which nodes there are, and what each can sustain.

Rates are effective, not peaks: link and FLOP/s as assumed in the comparison of the peers' routers
(25 GB/s and 180 TFLOP/s for an A100, 55 and 400 for an H100, 375 and 400 for a GH200; 342 GB/s is
reported for the last); HBM and power are data-sheet figures; host memory and prices are stated
assumptions. A cluster that cannot serve a model is refused here, by the node's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kappa.checks import unknown_name
from kappa.cost import StepModel, batch_work, loading_node, step_model
from kappa.hardware import CATALOGUE, NodeProfile
from kappa.model import ModelShape, kv_bytes_per_token
from kappa.silicon import SiliconTable, silicon_figures, silicon_of
from kappa_scheduler.config import FairConfig, LinkRates
from kappa_simulator.decode import DecodeRun, TableRun, factor_of

_USABLE_HBM = 0.9

Loading = Literal["ahead", "layers"]


class ClusterError(ValueError):
    """A cluster that does not exist, or that cannot serve the model. The message names the node."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node of a simulated cluster: its true speeds, and more than a profile holds."""

    profile: NodeProfile
    # KV capacity of its host tier.
    host_bytes: float
    # Power at full load.
    watts: float = 700.0
    # Of its network card, for KV fetched from a peer's host tier.
    network_bytes_per_s: float = 25e9
    # KV capacity of the disk behind the host tier.
    disk_bytes: float = 0.0
    # As `engine.load` in a cluster file.
    load: Loading = "ahead"

    @property
    def name(self) -> str:
        return self.profile.name


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """Nodes, each of a name of its own."""

    name: str
    nodes: tuple[NodeSpec, ...]


@dataclass(frozen=True, slots=True)
class KVRoom:
    """Blocks of KV that a node holds in each tier, for one model."""

    device_blocks: int
    host_blocks: int
    disk_blocks: int


def kv_room(node: NodeSpec, shape: ModelShape, block_tokens: int) -> KVRoom:
    """Blocks that the node holds: 90% of HBM less the weights, and its tiers behind.

    Raises:
        ClusterError: the weights, or a single block beside them, do not fit; or of a disk its size
            or its rate is missing.
    """
    if bool(node.disk_bytes) != bool(node.profile.disk_bytes_per_s):
        raise ClusterError(
            f"node {node.name}: disk_bytes is {node.disk_bytes:g} and disk_bytes_per_s "
            f"{node.profile.disk_bytes_per_s:g}: give both, or neither"
        )
    weights = shape.params_total * shape.weight_dtype_bytes
    free = _USABLE_HBM * node.profile.hbm_bytes - weights
    block_bytes = kv_bytes_per_token(shape) * block_tokens
    if free < block_bytes:
        raise ClusterError(
            f"node {node.name}: {shape.name} needs {weights / 1e9:.1f} GB for its weights, of "
            f"{_USABLE_HBM * node.profile.hbm_bytes / 1e9:.1f} GB usable: give it a smaller model, "
            "or the node more memory"
        )
    return KVRoom(*(int(room // block_bytes) for room in (free, node.host_bytes, node.disk_bytes)))


@dataclass(frozen=True, slots=True)
class NodeModel:
    """The true constants of a node."""

    step: StepModel
    block_tokens: int
    device_blocks: int
    host_blocks: int
    # Link seconds of a block, and of each transfer besides.
    load_block_s: float
    store_block_s: float
    load_fixed_s: float
    budget_tokens: int = 8192
    max_running: int = 256
    # By its name in `scheduler.catalogue`; and its settings with the tenants' weights.
    rule: str = "fcfs"
    fair: FairConfig = field(default_factory=FairConfig)
    # As `scheduler.link_order` has them.
    link_order: str = "loads_first"
    duplex: str = "half"
    # For KV fetched from a peer.
    block_bytes: float = 0.0
    network_bytes_per_s: float = 25e9
    # Of its steps, as `kappa_router.engine_fit.EngineSpeed` has them.
    factors: tuple[float, ...] = ()
    disk_blocks: int = 0
    # Seconds that a block of a load takes besides if it comes from disk.
    disk_block_s: float = 0.0
    # The share of the shorter of a lone request's load and prompt that hides behind the longer.
    overlap: float = 0.0
    # What its steps last by instead of the law.
    table: SiliconTable | None = None

    def step_s(
        self, chunks: Sequence[tuple[int, int]], requests: int, context_tokens: int
    ) -> float:
        """Seconds of one step over [(new tokens, context tokens before them)] and requests that
        decode with so much context between them."""
        if self.table is not None:
            return self.table.step_s(chunks, requests, context_tokens)
        work = batch_work(chunks, requests, context_tokens)
        return self.step.work_s(work) * factor_of(self.factors, work.tokens)

    def run(self, requests: int, context_tokens: int) -> DecodeRun | TableRun:
        """Steps in which so many requests decode together."""
        if self.table is not None:
            return TableRun(self.table, requests, context_tokens)
        return DecodeRun(self.step, requests, context_tokens, self.factors)

    @property
    def link_rates(self) -> LinkRates:
        """The link's rates as the node's rule knows them."""
        return LinkRates(self.load_block_s / self.block_tokens, self.load_fixed_s)


def node_model(spec: NodeSpec, shape: ModelShape, block_tokens: int) -> NodeModel:
    """The constants of a node that serves a model.

    Raises:
        ClusterError: the model does not fit, or the node's table is of another.
    """
    profile = loading_node(shape, spec.profile, block_tokens)
    room, table = kv_room(spec, shape, block_tokens), None
    if profile.silicon:
        try:
            table = silicon_of(shape, profile.silicon).on(profile)
        except ValueError as error:
            raise ClusterError(f"node {spec.name}: {error}") from None
    block_bytes = kv_bytes_per_token(shape) * block_tokens
    return NodeModel(
        step=step_model(shape, profile),
        block_tokens=block_tokens,
        device_blocks=room.device_blocks,
        host_blocks=room.host_blocks,
        load_block_s=block_bytes / profile.h2d_bytes_per_s,
        store_block_s=block_bytes / profile.store_bytes_per_s,
        load_fixed_s=profile.load_fixed_s,
        block_bytes=block_bytes,
        network_bytes_per_s=spec.network_bytes_per_s,
        disk_blocks=room.disk_blocks,
        disk_block_s=block_bytes / profile.disk_bytes_per_s if room.disk_blocks else 0.0,
        overlap=1.0 - 1.0 / shape.layers if spec.load == "layers" else 0.0,
        table=table,
    )


def _node(gpu: str, link: str, host_bytes: float, watts: float, **rates: Any) -> NodeSpec:
    profile = NodeProfile(
        name=gpu.lower(),
        gpu=gpu,
        link_name=link,
        load_fixed_s=1e-3,
        step_fixed_s=2e-3,
        reference="effective rates, assumed; HBM and power from data sheets",
        **rates,
    )
    return NodeSpec(profile, host_bytes, watts)


KINDS: dict[str, NodeSpec] = {
    "a100": _node(
        "A100", "PCIe-4 x16", host_bytes=128e9, watts=400.0, h2d_bytes_per_s=25e9,
        flops_per_s=180e12, hbm_bytes_per_s=2.0e12, hbm_bytes=80e9, cost_per_hour=1.8,
    ),
    "h100": _node(
        "H100", "PCIe-5 x16", host_bytes=256e9, watts=700.0, h2d_bytes_per_s=55e9,
        flops_per_s=400e12, hbm_bytes_per_s=3.35e12, hbm_bytes=80e9, cost_per_hour=3.0,
    ),
    "gh200": _node(
        "GH200", "NVLink-C2C", host_bytes=480e9, watts=900.0, h2d_bytes_per_s=375e9,
        flops_per_s=400e12, hbm_bytes_per_s=4.0e12, hbm_bytes=96e9, cost_per_hour=3.3,
    ),
}  # fmt: skip
"""The kinds of node that a cluster file may name."""

_BUILT_IN: dict[str, tuple[tuple[str, int], ...]] = {
    "mixed": (("gh200", 4), ("h100", 8), ("a100", 8)),
    "small": (("gh200", 1), ("h100", 3)),
    "uniform": (("h100", 16),),
}

_GRACE = {n: getattr(CATALOGUE["gb200-c2c"], n) for n in ("h2d_bytes_per_s", "d2h_bytes_per_s")}
# The host of each system's GPUs: that of a kind above, with its watts; a Grace has two GPUs, taken
# to load at once, as the catalogue's do.
_HOSTS: dict[str, tuple[str, float, dict[str, float]]] = {
    "gb200": ("gh200", 1200.0, _GRACE),
    "h200_sxm": ("h100", 700.0, {}),
    "h100_sxm": ("h100", 700.0, {}),
    "a100_sxm": ("a100", 400.0, {}),
    "l40s": ("a100", 350.0, {}),
}

_LLAMA, _MIXTURE = "llama-3.1-8b/tp1", "qwen3-30b-a3b/tp1"
_SILICON: dict[str, tuple[str, dict[str, int]]] = {
    "mixed-silicon": (_LLAMA, dict.fromkeys(_HOSTS, 4)),
    "small-silicon": (_LLAMA, {"gb200": 1, "h100_sxm": 3}),
    "uniform-silicon": (_LLAMA, {"h100_sxm": 16}),
    # Its weights do not fit an L40S.
    "mixture-silicon": (_MIXTURE, dict.fromkeys(("gb200", "h200_sxm", "h100_sxm", "a100_sxm"), 2)),
}
"""Clusters of real GPUs: the model of their tables, and nodes by system."""

MODEL = "llama-3.1-8b"
"""What clusters without a table serve, unless another model is named."""


def numbered(spec: NodeSpec, count: int, first: int = 0) -> list[NodeSpec]:
    """`count` nodes like `spec`, named `h100-0`, `h100-1` and so on."""
    return [
        replace(spec, profile=replace(spec.profile, name=f"{spec.name}-{first + i}"))
        for i in range(count)
    ]


def scaled(cluster: SimulatedCluster, nodes: int) -> SimulatedCluster:
    """A cluster of `nodes` nodes with the same mix of kinds, in turn."""
    specs = [cluster.nodes[i % len(cluster.nodes)] for i in range(nodes)]
    named = (
        replace(spec, profile=replace(spec.profile, name=f"{i}-{spec.name}"))
        for i, spec in enumerate(specs)
    )
    return SimulatedCluster(f"{cluster.name} x{nodes}", tuple(named))


def cluster_named(name_or_path: str) -> SimulatedCluster:
    """A built-in cluster, or one from a YAML or JSON file.

    A file holds a list of nodes (or a mapping with `nodes`), each with a `kind` to start from, or
    all of its own figures, and a `count` (1 if left out).

    Raises:
        ClusterError: an unknown name (a close match and all names are given), or a bad file.
    """
    mix = _BUILT_IN.get(name_or_path.lower())
    if mix is not None:
        nodes = [node for kind, count in mix for node in numbered(KINDS[kind], count)]
        return SimulatedCluster(name_or_path.lower(), tuple(nodes))
    if name_or_path.lower() in _SILICON:
        return _of_silicon(name_or_path.lower())
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml", ".json") or path.is_file():
        return _read(path)
    remedy = "or give the path of a YAML or JSON file"
    names = (*_BUILT_IN, *_SILICON)
    raise ClusterError(str(unknown_name("cluster", name_or_path, names, remedy)))


def _of_silicon(name: str) -> SimulatedCluster:
    table, mix = _SILICON[name]
    nodes: list[NodeSpec] = []
    for system, count in mix.items():
        kind, watts, link = _HOSTS[system]
        silicon, host = f"{system}/{table}", KINDS[kind]
        figures = silicon_figures(silicon) | link | {"name": system.removesuffix("_sxm")}
        profile = replace(host.profile, **figures)
        nodes += numbered(replace(host, profile=profile, watts=watts), count)
    return SimulatedCluster(name, tuple(nodes))


def model_served(cluster: SimulatedCluster) -> str:
    """The model of the nodes' tables; `MODEL` where no node has one."""
    tables = [node.profile.silicon for node in cluster.nodes if node.profile.silicon]
    return tables[0].split("/")[1] if tables else MODEL


def _read(path: Path) -> SimulatedCluster:
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ClusterError(f"{path}: cannot read the cluster: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ClusterError(f"{path}: neither YAML nor JSON ({error})") from None
    rows = data.get("nodes") if isinstance(data, Mapping) else data
    if not isinstance(rows, list) or not rows:
        raise ClusterError(f"{path}: holds no nodes; give a list of nodes, each with a kind")
    nodes: list[NodeSpec] = []
    seen: dict[str, int] = {}
    for number, row in enumerate(rows, 1):
        spec, count = _parse(row, f"{path}: node {number}")
        first = seen.get(spec.name, 0)
        nodes += numbered(spec, count, first)
        seen[spec.name] = first + count
    return SimulatedCluster(path.stem, tuple(nodes))


_Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _ClusterRow(BaseModel):
    """An entry of a cluster file: what a profile does not hold; its other keys are a profile's."""

    model_config = ConfigDict(extra="allow", strict=True)

    kind: str | None = None
    count: Annotated[int, Field(ge=1)] = 1
    host_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    disk_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    watts: _Above0 | None = None
    network_bytes_per_s: _Above0 | None = None
    load: Loading | None = None
    silicon: str | None = None


_OWN_KEYS = ("host_bytes", "disk_bytes", "watts", "network_bytes_per_s", "load")
_KEYS = {*_OWN_KEYS, *(f.name for f in fields(NodeProfile))}


def _parse(data: object, where: str) -> tuple[NodeSpec, int]:
    """A node and its count; ClusterError names the faulty key."""
    if not isinstance(data, Mapping):
        raise ClusterError(f"{where}: expected a mapping, found {type(data).__name__}")
    where = f"{where} ({data.get('name', data.get('kind'))})"
    try:
        row = _ClusterRow.model_validate(dict(data))
    except ValidationError as error:
        first = error.errors()[0]
        key, message = first["loc"][0], first["msg"]
        raise ClusterError(f"{where}: {key} is {first['input']!r}: {message}") from None
    profile: dict[str, Any] = row.model_extra or {}
    unknown = sorted(set(profile) - _KEYS)
    if unknown:
        raise ClusterError(
            f"{where}: no key {', '.join(map(repr, unknown))}: remove it, or use kind, count or "
            f"one of {', '.join(sorted(_KEYS))}"
        )
    base = None if row.kind is None else KINDS.get(row.kind.lower())
    if row.kind is not None and base is None:
        raise ClusterError(f"{where}: {unknown_name('kind', row.kind, KINDS, 'choose one')}")
    start = {"name": "", "gpu": "", "link_name": ""} if base is None else base.profile.to_dict()
    own = {key: getattr(row, key) for key in _OWN_KEYS if getattr(row, key) is not None}
    try:
        start |= silicon_figures(row.silicon) if row.silicon else {}
        made = NodeProfile.from_dict({**start, **profile})
        spec = NodeSpec(made, **own) if base is None else replace(base, profile=made, **own)
    except (TypeError, ValueError) as error:
        raise ClusterError(f"{where}: {error}") from None
    if not spec.name:
        raise ClusterError(f"{where}: has neither a kind nor a name: give one")
    return spec, row.count


def check(cluster: SimulatedCluster, shape: ModelShape, block_tokens: int) -> None:
    """Refuse a cluster without nodes, with two of one name, or with one that cannot hold the model.

    Raises:
        ClusterError: names the node.
    """
    if not cluster.nodes:
        raise ClusterError(f"cluster {cluster.name} has no nodes")
    names: set[str] = set()
    for node in cluster.nodes:
        if node.name in names:
            raise ClusterError(f"node {node.name}: the name is there twice in {cluster.name}")
        names.add(node.name)
        kv_room(node, shape, block_tokens)
