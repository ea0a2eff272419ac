"""Nodes by name: a catalogue of data-sheet peaks, and the two nodes of the default demo.

Catalogue figures are vendor peaks: dense FP16/BF16, one direction of the link, one GPU. They are
priors and what-ifs only; the profiler's measured ``NodeProfile`` replaces them in a live cluster.
The demo nodes ``pcie`` and ``c2c`` differ in the link alone, so that what a demo shows is the
link's doing. Called by the command line, the simulator and paced workers.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from kappa.checks import check_not_negative, check_positive, refusal
from kappa.json_file import read_json_object

ProfileSource = Literal["measured", "catalogue", "paced"]

_SOURCES = ("measured", "catalogue", "paced")


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """A worker's hardware, measured, from a catalogue, or paced.

    Rates are per second of the node's own (emulated) time. ``d2h_bytes_per_s`` and
    ``attention_flops_per_s`` of zero mean the same as their counterparts. Nodes that share a
    switch or a NUMA node's link name the same ``link_group``; their backlog is common.
    ``dilation`` above one belongs to a paced node only: every emulated second lasts that many.
    ``cost_per_hour`` of zero means that no price was given.
    """

    name: str
    gpu: str
    link_name: str
    h2d_bytes_per_s: float
    flops_per_s: float
    hbm_bytes_per_s: float
    hbm_bytes: float = 0.0
    d2h_bytes_per_s: float = 0.0
    load_fixed_s: float = 0.0
    step_fixed_s: float = 0.0
    attention_flops_per_s: float = 0.0
    link_group: str = ""
    source: ProfileSource = "catalogue"
    dilation: float = 1.0
    cost_per_hour: float = 0.0
    reference: str = ""

    def __post_init__(self) -> None:
        """Refuse rates that would divide by zero later.

        Raises:
            ValueError: names the field and what to give instead.
        """
        for name in _PROFILE_NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise refusal(self, name, value, "give a number")
        check_positive(self, "h2d_bytes_per_s", "flops_per_s", "hbm_bytes_per_s")
        check_not_negative(
            self, "hbm_bytes", "d2h_bytes_per_s", "load_fixed_s", "step_fixed_s",
            "attention_flops_per_s", "cost_per_hour",
        )  # fmt: skip
        if self.source not in _SOURCES:
            raise refusal(self, "source", self.source, f"use one of {_SOURCES}")
        if not (math.isfinite(self.dilation) and self.dilation >= 1):
            raise refusal(
                "NodeProfile", "dilation", self.dilation, "give a finite number, 1 or more"
            )
        if self.dilation > 1 and self.source != "paced":
            raise refusal(
                "NodeProfile", "dilation", self.dilation,
                f"only a paced node dilates time; source is {self.source!r}",
            )  # fmt: skip

    @property
    def store_bytes_per_s(self) -> float:
        """Device-to-host bytes/s; the host-to-device figure where none was given."""
        return self.d2h_bytes_per_s or self.h2d_bytes_per_s

    def to_dict(self) -> dict[str, Any]:
        """Every field, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NodeProfile:
        """Build from what ``to_dict`` gave, defaults filled in.

        Raises:
            ValueError: an unknown or missing key, named; or a field out of range.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(
                f"NodeProfile has no key {', '.join(map(repr, unknown))}: "
                f"remove it, or use one of {', '.join(sorted(known))}"
            )
        missing = [name for name in _PROFILE_REQUIRED if name not in data]
        if missing:
            raise ValueError(f"NodeProfile lacks {', '.join(missing)}: add it to the profile")
        return cls(**data)


_PROFILE_REQUIRED = (
    "name", "gpu", "link_name", "h2d_bytes_per_s", "flops_per_s", "hbm_bytes_per_s",
)  # fmt: skip

_PROFILE_NUMBERS = tuple(f.name for f in fields(NodeProfile) if f.type == "float")

_PCIE4_BYTES_PER_S = 31.5e9

_PCIE5_BYTES_PER_S = 63.0e9

_C2C_BYTES_PER_S = 450e9

_PCIE4_NOTE = "PCI-SIG PCIe 4.0 x16: 16 GT/s, 128b/130b"

_PCIE5_NOTE = "PCI-SIG PCIe 5.0 x16: 32 GT/s, 128b/130b"

_C2C_NOTE = "NVLink-C2C 900 GB/s counts both directions"

_NODES = (
    NodeProfile(
        name="a100-pcie4",
        gpu="A100-SXM4-80GB",
        link_name="PCIe-4 x16",
        h2d_bytes_per_s=_PCIE4_BYTES_PER_S,
        flops_per_s=312e12,
        hbm_bytes_per_s=2.039e12,
        hbm_bytes=80e9,
        reference=f"NVIDIA A100 Tensor Core GPU data sheet; {_PCIE4_NOTE}",
    ),
    NodeProfile(
        name="h100-pcie5",
        gpu="H100-SXM5-80GB",
        link_name="PCIe-5 x16",
        h2d_bytes_per_s=_PCIE5_BYTES_PER_S,
        flops_per_s=989e12,
        hbm_bytes_per_s=3.35e12,
        hbm_bytes=80e9,
        reference=f"NVIDIA H100 Tensor Core GPU data sheet, half its sparse FP16; {_PCIE5_NOTE}",
    ),
    NodeProfile(
        name="h200-pcie5",
        gpu="H200-SXM-141GB",
        link_name="PCIe-5 x16",
        h2d_bytes_per_s=_PCIE5_BYTES_PER_S,
        flops_per_s=989e12,
        hbm_bytes_per_s=4.8e12,
        hbm_bytes=141e9,
        reference=f"NVIDIA H200 Tensor Core GPU data sheet, half its sparse FP16; {_PCIE5_NOTE}",
    ),
    NodeProfile(
        name="b200-pcie5",
        gpu="B200-HGX-180GB",
        link_name="PCIe-5 x16",
        h2d_bytes_per_s=_PCIE5_BYTES_PER_S,
        flops_per_s=2250e12,
        hbm_bytes_per_s=8e12,
        hbm_bytes=180e9,
        reference=f"NVIDIA DGX B200 data sheet, an eighth, half its sparse FP16; {_PCIE5_NOTE}",
    ),
    NodeProfile(
        name="gh200-c2c",
        gpu="GH200-96GB",
        link_name="NVLink-C2C",
        h2d_bytes_per_s=_C2C_BYTES_PER_S,
        flops_per_s=989e12,
        hbm_bytes_per_s=4e12,
        hbm_bytes=96e9,
        reference=f"NVIDIA GH200 Grace Hopper Superchip data sheet; {_C2C_NOTE}",
    ),
    NodeProfile(
        name="gb200-c2c",
        gpu="GB200-186GB",
        link_name="NVLink-C2C",
        h2d_bytes_per_s=_C2C_BYTES_PER_S,
        flops_per_s=2500e12,
        hbm_bytes_per_s=8e12,
        hbm_bytes=186e9,
        link_group="grace",
        reference="NVIDIA GB200 NVL72 data sheet, one GPU, half its sparse FP16; "
        f"{_C2C_NOTE}; one Grace serves two GPUs, so both name its link group",
    ),
    NodeProfile(
        name="unified-hbm",
        gpu="B200-class, CPU on package",
        link_name="unified HBM",
        h2d_bytes_per_s=8e12,
        flops_per_s=2500e12,
        hbm_bytes_per_s=8e12,
        hbm_bytes=186e9,
        reference="what-if of paper 001 §7.1: the host tier is the HBM itself, at 8 TB/s",
    ),
    NodeProfile(
        name="pcie",
        gpu="demo GPU",
        link_name="PCIe-5 x16, sustained",
        h2d_bytes_per_s=55e9,
        flops_per_s=400e12,
        hbm_bytes_per_s=3.35e12,
        hbm_bytes=80e9,
        reference="demo: an H100's assumed sustained rates (55 GB/s, 400 TFLOP/s), not measured",
    ),
    NodeProfile(
        name="c2c",
        gpu="demo GPU",
        link_name="NVLink-C2C, sustained",
        h2d_bytes_per_s=375e9,
        flops_per_s=400e12,
        hbm_bytes_per_s=3.35e12,
        hbm_bytes=80e9,
        reference="demo: as pcie but for a GH200's assumed sustained link of 375 GB/s "
        "(342 GB/s is reported in vllm issue 6496)",
    ),
)

CATALOGUE: dict[str, NodeProfile] = {node.name: node for node in _NODES}
"""Every built-in node by name."""

DEMO_NODES = ("pcie", "c2c")
"""The unlike pair that demos start with: equal compute, links a factor of 6.8 apart."""


def node_profile(name_or_path: str | Path) -> NodeProfile:
    """A node by catalogue name, or from a JSON file as ``NodeProfile.to_dict`` writes it.

    Raises:
        ValueError: an unknown name (the near ones are listed), a missing file, or a bad profile.
    """
    text = str(name_or_path)
    known = CATALOGUE.get(text.lower())
    if known is not None:
        return known
    path = Path(text)
    if path.suffix == ".json" or path.is_file():
        return _read_profile(path)
    near = difflib.get_close_matches(text.lower(), CATALOGUE, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"no node named {text!r}.{hint} Known: {', '.join(sorted(CATALOGUE))}; "
        "or give the path of a profile in JSON."
    )


def _read_profile(path: Path) -> NodeProfile:
    data = read_json_object(path, "node profile")
    try:
        return NodeProfile.from_dict(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
