"""A node's hardware, and nodes by name: data-sheet peaks, what is reached of them, demo nodes.

Catalogue figures are of one GPU; peaks are dense FP16/BF16 and one direction of the link. They are
priors and what-ifs only; the profiler's measured ``NodeProfile`` replaces them in a live cluster.
The demo nodes ``pcie`` and ``c2c`` differ in the link alone, so that what a demo shows is the
link's doing. Called by the command line, the simulator and paced workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from kappa.checks import (
    check_not_negative,
    check_positive,
    read_json_object,
    record_from,
    refusal,
    unknown_name,
)

ProfileSource = Literal["measured", "catalogue", "paced"]


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """A worker's hardware, measured, from a catalogue, or paced.

    Rates are per second of the node's own (emulated) time. ``flops_per_s``, ``hbm_bytes_per_s`` and
    ``link_bytes_per_s`` (one way) are peaks where a node is from the catalogue; what a step's parts
    reach of the first two is ``gemm_flops_per_s``, ``attention_flops_per_s``,
    ``weights_bytes_per_s`` and ``kv_bytes_per_s``. These, ``d2h_bytes_per_s`` and
    ``link_bytes_per_s`` mean the same as their counterparts if zero. ``h2d_bytes_per_s`` and
    ``d2h_bytes_per_s`` are what large copies from and to host memory reach; what a model's copies
    reach, each of which takes ``copy_fixed_s`` of the host, says `kappa.cost.loading_node`. On each
    GPU those below 28 KiB reach ``small_copy_bytes_per_s`` at most (0: no such bound).
    ``exposed`` is as `kappa.cost.StepModel` has it; ``fp8_speedup`` and ``fp4_speedup`` are the
    rates of products in these formats over that in BF16. ``gpus`` work as one, and sum over links
    of ``peer_bytes_per_s`` each (0: at no cost), ``peer_fixed_s`` a sum. Nodes that share a
    switch or a NUMA node's link name the same ``link_group``; their rates are those that each
    reaches while the others load, too.
    ``dilation`` above one belongs to a paced node only: every emulated second lasts that many.
    ``cost_per_hour`` of zero means that no price was given, ``disk_bytes_per_s`` of zero that KV is
    not kept on disk; what is read there still has to cross the link. ``silicon`` names the table of
    real GPUs (`kappa.silicon`) that the steps of an emulated node last by; empty: by its law.
    ``host_weight_bytes`` of its model's weights lie in host memory and cross the link at each step.
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
    disk_bytes_per_s: float = 0.0
    reference: str = ""
    gemm_flops_per_s: float = 0.0
    weights_bytes_per_s: float = 0.0
    kv_bytes_per_s: float = 0.0
    exposed: float = 0.0
    fp8_speedup: float = 1.0
    fp4_speedup: float = 1.0
    gpus: int = 1
    peer_bytes_per_s: float = 0.0
    peer_fixed_s: float = 0.0
    link_bytes_per_s: float = 0.0
    copy_fixed_s: float = 0.0
    small_copy_bytes_per_s: float = 0.0
    silicon: str = ""
    host_weight_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise refusal(self, name, value, "give a number")
        check_positive(self, "h2d_bytes_per_s", "flops_per_s", "hbm_bytes_per_s")
        check_not_negative(
            self, "hbm_bytes", "d2h_bytes_per_s", "load_fixed_s", "step_fixed_s",
            "attention_flops_per_s", "cost_per_hour", "disk_bytes_per_s", *REACHED, "exposed",
            "peer_bytes_per_s", "peer_fixed_s", "link_bytes_per_s", "copy_fixed_s",
            "small_copy_bytes_per_s", "host_weight_bytes",
        )  # fmt: skip
        check_positive(self, "fp8_speedup", "fp4_speedup", "gpus")
        if self.source not in get_args(ProfileSource):
            raise refusal(self, "source", self.source, f"use one of {get_args(ProfileSource)}")
        if not (math.isfinite(self.dilation) and self.dilation >= 1):
            raise refusal(self, "dilation", self.dilation, "give a finite number, 1 or more")
        if self.dilation > 1 and self.source != "paced":
            remedy = f"only a paced node dilates time; source is {self.source!r}"
            raise refusal(self, "dilation", self.dilation, remedy)

    @property
    def store_bytes_per_s(self) -> float:
        """Device-to-host bytes/s; the host-to-device figure where none was given."""
        return self.d2h_bytes_per_s or self.h2d_bytes_per_s

    @property
    def peak_link_bytes_per_s(self) -> float:
        """Bytes/s of the link by its data sheet; what is reached where none was given."""
        return self.link_bytes_per_s or self.h2d_bytes_per_s

    def times(self, gpus: int) -> NodeProfile:
        """So many of these as one worker, whose ranks wait for each other at each step."""
        rates = {n: gpus * getattr(self, n) for n in (*NODE_RATES, "hbm_bytes")}
        waiting_s = _RANKS_S * math.log2(gpus) if self.peer_bytes_per_s else 0.0
        rates["step_fixed_s"] = self.step_fixed_s + waiting_s
        return replace(self, **rates, gpus=gpus * self.gpus)

    def gemm_speedup(self, operand_bytes: float) -> float:
        """How many times as fast products of operands of so many bytes are than in BF16."""
        if operand_bytes > 1:
            return 1.0
        return self.fp8_speedup if operand_bytes > 0.5 else self.fp4_speedup

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NodeProfile:
        """From what `to_dict` gave; ValueError names an unknown, missing or unusable key."""
        return record_from(cls, data, "NodeProfile")


# Each doubling of the GPUs adds this to a step: engines of Llama-3.1-70B on 2 to 8 H100, H200 and
# B200 over the law of their kernels (tests/kappa/test_second_sources.py).
_RANKS_S = 1.5e-3

REACHED = "gemm_flops_per_s", "attention_flops_per_s", "weights_bytes_per_s", "kv_bytes_per_s"
"""What the parts of a step reach of a GPU's peaks."""

_LINK_RATES = "h2d_bytes_per_s", "d2h_bytes_per_s", "link_bytes_per_s"
NODE_RATES = *_LINK_RATES, "hbm_bytes_per_s", "flops_per_s", *REACHED
"""What GPUs that work as one have as many times as there are of them."""

_NUMBERS = tuple(f.name for f in fields(NodeProfile) if f.type == "float")


# Each copy takes this of the host to submit: vllm#48434, H100.
_COPY_FIXED_S = 0.5e-6
# A load takes this besides its bytes: TTFT of hits in host memory over hits on the device, H20
# (docs/silicon.md).
_LOAD_FIXED_S = 13e-3


def _link(name: str, peak: float, load: float, store: float = 0.0) -> dict[str, Any]:
    """A link to the host in GB/s one way: its data sheet's, and what large copies reach in and out.

    Sources of what is reached: docs/silicon.md.
    """
    return {
        "link_name": name,
        "link_bytes_per_s": peak * 1e9,
        "h2d_bytes_per_s": load * 1e9,
        "d2h_bytes_per_s": store * 1e9,
        "load_fixed_s": _LOAD_FIXED_S,
        "copy_fixed_s": _COPY_FIXED_S,
    }


# In: bam#54, nvbandwidth#42, A100. In: agentic-kvc, H20; out: nvbandwidth#24, H100.
_PCIE4 = _link("PCIe-4 x16", 31.5, 25)
_PCIE5 = _link("PCIe-5 x16", 63.0, 54, 52.8)
# nvbandwidth on one GH200: vllm#6496.
_C2C = _link("NVLink-C2C", 450, 342, 295)
# Of GB300 beside a neighbour that loads: Megatron-LM#6491, middle of 169 to 175 and 182 to 184.
_C2C_HALF = _link("NVLink-C2C", 225, 172, 183) | {"link_group": "grace"}
_PCIE4_NOTE = "PCI-SIG PCIe 4.0 x16: 16 GT/s, 128b/130b"
_PCIE5_NOTE = "PCI-SIG PCIe 5.0 x16: 32 GT/s, 128b/130b"
_C2C_NOTE = "NVLink-C2C 900 GB/s counts both directions"
_C2C_HALF_NOTE = f"{_C2C_NOTE} and two GPUs, so both name one link group"


class _Reached(NamedTuple):
    """What steps reach of a GPU: shares of its FLOP/s by products and attention, of its memory's
    bytes/s by reads of weights and KV; `NodeProfile.exposed`; and of its link to other GPUs GB/s,
    and microseconds of each sum over them.

    Fitted to the tables of Llama-3.1-8B alone (`kappa.silicon`, docs/silicon.md), the link to all
    tables' sums.
    """

    gemm: float
    attention: float
    weights: float
    kv: float
    exposed: float
    peer_gb_per_s: float
    peer_fixed_us: float


_A100 = _Reached(0.800, 0.575, 0.646, 0.785, 0.624, 160, 5.4)
_H100 = _Reached(0.711, 0.682, 0.692, 0.915, 0.417, 273, 5.2)
_H200 = _Reached(0.717, 0.676, 0.630, 0.888, 0.472, 259, 4.8)
_GB200 = _Reached(0.566, 0.585, 0.547, 0.960, 0.579, 250, 5.6)
_L40S = _Reached(0.574, 0.516, 0.769, 0.792, 0.426, 19, 5.3)


def _reaching(node: NodeProfile, of: _Reached, gpu: str = "") -> NodeProfile:
    """The node with what steps reach; gpu: the one that the figures are of, if it is another."""
    source = f"as {gpu} reaches, assumed" if gpu else "fitted to kernels measured on it"
    return replace(
        node,
        gemm_flops_per_s=of.gemm * node.flops_per_s,
        attention_flops_per_s=of.attention * node.flops_per_s,
        weights_bytes_per_s=of.weights * node.hbm_bytes_per_s,
        kv_bytes_per_s=of.kv * node.hbm_bytes_per_s,
        exposed=of.exposed,
        peer_bytes_per_s=of.peer_gb_per_s * 1e9,
        peer_fixed_s=of.peer_fixed_us * 1e-6,
        reference=f"{node.reference}; reached rates {source} (docs/silicon.md)",
    )


# Name, GPU, link; FLOP/s, bytes/s of the device's memory, and its bytes.
_NODES = (
    _reaching(NodeProfile(
        "a100-pcie4", "A100-SXM4-80GB", **_PCIE4, flops_per_s=312e12, hbm_bytes_per_s=2.039e12,
        hbm_bytes=80e9, reference=f"NVIDIA A100 Tensor Core GPU data sheet; {_PCIE4_NOTE}",
    ), _A100),
    _reaching(NodeProfile(
        "h100-pcie5", "H100-SXM5-80GB", **_PCIE5, flops_per_s=989e12, hbm_bytes_per_s=3.35e12,
        hbm_bytes=80e9, fp8_speedup=2.0,
        reference=f"NVIDIA H100 Tensor Core GPU data sheet, half its sparse FP16; {_PCIE5_NOTE}",
    ), _H100),
    _reaching(NodeProfile(
        "h200-pcie5", "H200-SXM-141GB", **_PCIE5, flops_per_s=989e12, hbm_bytes_per_s=4.8e12,
        hbm_bytes=141e9, fp8_speedup=2.0,
        reference=f"NVIDIA H200 Tensor Core GPU data sheet, half its sparse FP16; {_PCIE5_NOTE}",
    ), _H200),
    _reaching(NodeProfile(
        "b200-pcie5", "B200-HGX-180GB", **_PCIE5, flops_per_s=2250e12, hbm_bytes_per_s=8e12,
        hbm_bytes=180e9, fp8_speedup=2.0, fp4_speedup=4.0,
        reference=f"NVIDIA DGX B200 data sheet, an eighth, half its sparse FP16; {_PCIE5_NOTE}",
    ), _GB200, "GB200"),
    _reaching(NodeProfile(
        "b300-pcie5", "B300-HGX-270GB", **_PCIE5, flops_per_s=2250e12, hbm_bytes_per_s=8e12,
        hbm_bytes=270e9, fp8_speedup=2.0, fp4_speedup=6.0,
        reference=f"NVIDIA HGX B300 data sheet, an eighth, half its sparse FP16; {_PCIE5_NOTE}",
    ), _GB200, "GB200"),
    _reaching(NodeProfile(
        "gh200-c2c", "GH200-96GB", **_C2C, flops_per_s=989e12, hbm_bytes_per_s=4e12,
        hbm_bytes=96e9, fp8_speedup=2.0,
        reference=f"NVIDIA GH200 Grace Hopper Superchip data sheet; {_C2C_NOTE}",
    ), _H100, "H100"),
    _reaching(NodeProfile(
        "gb200-c2c", "GB200-186GB", **_C2C_HALF, flops_per_s=2500e12, hbm_bytes_per_s=8e12,
        hbm_bytes=186e9, fp8_speedup=2.0, fp4_speedup=4.0,
        reference="NVIDIA GB200 NVL72 data sheet, one GPU, half its sparse FP16; "
        f"{_C2C_HALF_NOTE}",
    ), _GB200),
    _reaching(NodeProfile(
        "gb300-c2c", "GB300-279GB", **_C2C_HALF, flops_per_s=2500e12, hbm_bytes_per_s=8e12,
        hbm_bytes=279e9, fp8_speedup=2.0, fp4_speedup=6.0,
        reference="NVIDIA GB300 NVL72 data sheet, one GPU, half its sparse FP16; "
        f"{_C2C_HALF_NOTE}",
    ), _GB200, "GB200"),
    _reaching(NodeProfile(
        "l40s-pcie4", "L40S-48GB", **_PCIE4, flops_per_s=362e12, hbm_bytes_per_s=864e9,
        hbm_bytes=48e9, fp8_speedup=2.0,
        reference=f"NVIDIA L40S data sheet, half its sparse FP16; {_PCIE4_NOTE}",
    ), _L40S),
    NodeProfile(
        "l4-pcie4", "L4-24GB", **_PCIE4, flops_per_s=121e12, hbm_bytes_per_s=300e9,
        hbm_bytes=24e9, fp8_speedup=2.0,
        reference=f"NVIDIA L4 data sheet alone, half its sparse FP16; {_PCIE4_NOTE}",
    ),
    NodeProfile(
        "rtx-pro-6000-pcie5", "RTX-PRO-6000-96GB", **_PCIE5, flops_per_s=500e12,
        hbm_bytes_per_s=1.597e12, hbm_bytes=96e9, fp8_speedup=2.0, fp4_speedup=4.0,
        reference="NVIDIA RTX PRO 6000 Blackwell Server Edition data sheet alone, an eighth of its "
        f"sparse FP4; {_PCIE5_NOTE}",
    ),
    # vLLM has no kernel for small copies there: of H100 by its copy engine, vllm#42212.
    NodeProfile(
        "mi300x-pcie5", "MI300X-192GB", **_PCIE5, small_copy_bytes_per_s=6e9,
        flops_per_s=1307e12, hbm_bytes_per_s=5.3e12, hbm_bytes=192e9, fp8_speedup=2.0,
        reference=f"AMD Instinct MI300X data sheet alone, dense FP16; {_PCIE5_NOTE}",
    ),
    NodeProfile(
        "unified-hbm", "B200-class, CPU on package", "unified HBM", 8e12, 2500e12, 8e12, 186e9,
        reference="what-if of paper 001 §7.1: the host tier is the HBM itself, at 8 TB/s",
    ),
    NodeProfile(
        "pcie", "demo GPU", "PCIe-5 x16, sustained", 55e9, 400e12, 3.35e12, 80e9,
        reference="demo: an H100's assumed sustained rates (55 GB/s, 400 TFLOP/s), not measured",
    ),
    NodeProfile(
        "c2c", "demo GPU", "NVLink-C2C, sustained", 375e9, 400e12, 3.35e12, 80e9,
        reference="demo: as pcie but for a GH200's assumed sustained link of 375 GB/s "
        "(342 GB/s is reported in vllm issue 6496)",
    ),
)  # fmt: skip

CATALOGUE: dict[str, NodeProfile] = {node.name: node for node in _NODES}
"""Every built-in node by name."""

DEMO_NODES = ("pcie", "c2c")
"""The unlike pair that demos start with: equal compute, links a factor of 6.8 apart."""


def node_profile(name_or_path: str | Path) -> NodeProfile:
    """A node by catalogue name, or from a JSON file as ``NodeProfile.to_dict`` writes it;
    `ValueError` for an unknown name (the near ones are listed), or a bad file."""
    text = str(name_or_path)
    known = CATALOGUE.get(text.lower())
    if known is not None:
        return known
    path = Path(text)
    if path.suffix == ".json" or path.is_file():
        data = read_json_object(path, "node profile")
        try:
            return NodeProfile.from_dict(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    raise unknown_name("node", text, CATALOGUE, "or give the path of a profile in JSON")
