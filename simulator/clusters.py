"""Clusters by name or from a file: which nodes there are, and what each can sustain.

Rates are effective, not peaks: link and FLOP/s as assumed in the comparison of the peers' routers
(25 GB/s and 180 TFLOP/s for an A100, 55 and 400 for an H100, 375 and 400 for a GH200; 342 GB/s is
reported for the last); HBM and power are data-sheet figures; host memory and prices are stated
assumptions. A cluster that cannot serve a model is refused here, by the node's name.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from kappa.hardware import NodeProfile
from kappa.model import ModelShape, kv_bytes_per_token

_USABLE_HBM = 0.9


class ClusterError(ValueError):
    """A cluster that does not exist, or that cannot serve the model. The message names the node."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node of a simulated cluster: its true speeds, and what the profile does not hold.

    host_bytes: KV capacity of its host tier. watts: power at full load. network_bytes_per_s: its
    network card, for KV fetched from a peer's host tier.
    """

    profile: NodeProfile
    host_bytes: float
    watts: float = 700.0
    network_bytes_per_s: float = 25e9

    @property
    def name(self) -> str:
        """The node's name, also its worker's."""
        return self.profile.name


@dataclass(frozen=True, slots=True)
class Cluster:
    """Named nodes."""

    name: str
    nodes: tuple[NodeSpec, ...]


@dataclass(frozen=True, slots=True)
class KVRoom:
    """Blocks of KV that a node holds on the device and in its host tier, for one model."""

    device_blocks: int
    host_blocks: int


def kv_room(node: NodeSpec, shape: ModelShape, block_tokens: int) -> KVRoom:
    """What the node holds: 90% of HBM less the weights, and its host memory, in whole blocks.

    Raises:
        ClusterError: the weights, or a single block beside them, do not fit.
    """
    weights = shape.params_total * shape.weight_dtype_bytes
    free = _USABLE_HBM * node.profile.hbm_bytes - weights
    block_bytes = kv_bytes_per_token(shape) * block_tokens
    if free < block_bytes:
        raise ClusterError(
            f"node {node.name}: {shape.name} needs {weights / 1e9:.1f} GB for its weights, of "
            f"{_USABLE_HBM * node.profile.hbm_bytes / 1e9:.1f} GB usable: give it a smaller model, "
            "or the node more memory"
        )
    return KVRoom(int(free // block_bytes), int(node.host_bytes // block_bytes))


def _node(
    gpu: str,
    link: str,
    *,
    link_bytes_per_s: float,
    flops_per_s: float,
    hbm_bytes_per_s: float,
    hbm_bytes: float,
    host_bytes: float,
    cost_per_hour: float,
    watts: float,
) -> NodeSpec:
    profile = NodeProfile(
        name=gpu.lower(),
        gpu=gpu,
        link_name=link,
        h2d_bytes_per_s=link_bytes_per_s,
        flops_per_s=flops_per_s,
        hbm_bytes_per_s=hbm_bytes_per_s,
        hbm_bytes=hbm_bytes,
        load_fixed_s=1e-3,
        step_fixed_s=2e-3,
        cost_per_hour=cost_per_hour,
        reference="effective rates, assumed; HBM and power from data sheets",
    )
    return NodeSpec(profile, host_bytes, watts)


KINDS: dict[str, NodeSpec] = {
    "a100": _node(
        "A100", "PCIe-4 x16", link_bytes_per_s=25e9, flops_per_s=180e12, hbm_bytes_per_s=2.0e12,
        hbm_bytes=80e9, host_bytes=128e9, cost_per_hour=1.8, watts=400.0,
    ),
    "h100": _node(
        "H100", "PCIe-5 x16", link_bytes_per_s=55e9, flops_per_s=400e12, hbm_bytes_per_s=3.35e12,
        hbm_bytes=80e9, host_bytes=256e9, cost_per_hour=3.0, watts=700.0,
    ),
    "gh200": _node(
        "GH200", "NVLink-C2C", link_bytes_per_s=375e9, flops_per_s=400e12, hbm_bytes_per_s=4.0e12,
        hbm_bytes=96e9, host_bytes=480e9, cost_per_hour=3.3, watts=900.0,
    ),
}  # fmt: skip
"""The kinds of node that a cluster file may name."""

_BUILT_IN: dict[str, tuple[tuple[str, int], ...]] = {
    "mixed": (("gh200", 4), ("h100", 8), ("a100", 8)),
    "small": (("gh200", 1), ("h100", 3)),
    "uniform": (("h100", 16),),
}


def numbered(spec: NodeSpec, count: int, first: int = 0) -> list[NodeSpec]:
    """`count` nodes like `spec`, named `h100-0`, `h100-1` and so on."""
    return [
        replace(spec, profile=replace(spec.profile, name=f"{spec.name}-{first + i}"))
        for i in range(count)
    ]


def scaled(cluster: Cluster, nodes: int) -> Cluster:
    """A cluster of `nodes` nodes with the same mix of kinds, in turn."""
    specs = [cluster.nodes[i % len(cluster.nodes)] for i in range(nodes)]
    named = [replace(s, profile=replace(s.profile, name=f"{i}-{s.name}")) for i, s in
             enumerate(specs)]  # fmt: skip
    return Cluster(f"{cluster.name} x{nodes}", tuple(named))


def cluster_named(name_or_path: str) -> Cluster:
    """A built-in cluster, or one from a YAML or JSON file.

    A file holds a list of nodes (or a mapping with `nodes`), each with a `kind` to start from, or
    all of its own figures, and a `count` (1 if left out).

    Raises:
        ClusterError: an unknown name (a close match and all names are given), or a bad file.
    """
    mix = _BUILT_IN.get(name_or_path.lower())
    if mix is not None:
        nodes = [node for kind, count in mix for node in numbered(KINDS[kind], count)]
        return Cluster(name_or_path.lower(), tuple(nodes))
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml", ".json") or path.is_file():
        return _read(path)
    near = difflib.get_close_matches(name_or_path.lower(), _BUILT_IN, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ClusterError(
        f"no cluster named {name_or_path!r}.{hint} Known: {', '.join(sorted(_BUILT_IN))}; "
        "or give the path of a YAML or JSON file."
    )


def _read(path: Path) -> Cluster:
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
    return Cluster(path.stem, tuple(nodes))


_PROFILE_KEYS = {f.name for f in fields(NodeProfile)}
_SPEC_KEYS = ("host_bytes", "watts", "network_bytes_per_s")


def _parse(row: object, where: str) -> tuple[NodeSpec, int]:
    if not isinstance(row, Mapping):
        raise ClusterError(f"{where}: expected a mapping, found {type(row).__name__}")
    given: dict[str, Any] = dict(row)
    count = given.pop("count", 1)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ClusterError(f"{where}: count is {count!r}: give a whole number, 1 or more")
    kind = given.pop("kind", None)
    where = f"{where} ({given.get('name', kind)})"
    if kind is not None and str(kind).lower() not in KINDS:
        near = difflib.get_close_matches(str(kind).lower(), KINDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ClusterError(f"{where}: no kind {kind!r}.{hint} Known: {', '.join(sorted(KINDS))}")
    unknown = sorted(set(given) - _PROFILE_KEYS - set(_SPEC_KEYS))
    if unknown:
        raise ClusterError(
            f"{where}: no key {', '.join(map(repr, unknown))}: remove it, or use kind, count or "
            f"one of {', '.join(sorted(_PROFILE_KEYS | set(_SPEC_KEYS)))}"
        )
    base = KINDS[str(kind).lower()] if kind is not None else None
    start = base.profile.to_dict() if base is not None else {"name": "", "gpu": "", "link_name": ""}
    extra = {
        key: given.pop(key, getattr(base, key, None) if base is not None else None)
        for key in _SPEC_KEYS
    }
    try:
        profile = NodeProfile.from_dict({**start, **given})
        spec = NodeSpec(profile, **{k: v for k, v in extra.items() if v is not None})
    except (TypeError, ValueError) as error:
        raise ClusterError(f"{where}: {error}") from None
    if not profile.name:
        raise ClusterError(f"{where}: has neither a kind nor a name: give one")
    _check_spec(spec, where)
    return spec, count


def _check_spec(spec: NodeSpec, where: str) -> None:
    for key in _SPEC_KEYS:
        value = getattr(spec, key)
        least = 0.0 if key == "host_bytes" else math.ulp(0.0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ClusterError(f"{where}: {key} is {value!r}: give a number")
        if not (math.isfinite(value) and value >= least):
            raise ClusterError(f"{where}: {key} is {value!r}: give a finite number above zero")


def check(cluster: Cluster, shape: ModelShape, block_tokens: int) -> None:
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
        _check_spec(node, f"node {node.name}")
        kv_room(node, shape, block_tokens)
