"""A machine's GPUs and their power, as NVML knows them.

NVML comes in as an argument (the module `pynvml` of nvidia-ml-py), so that it is testable where
there is no GPU. It averages power over about a second on recent GPUs. Nothing here may fail a
report: a GPU that stops answering is a worker without figures.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

import structlog

from kappa.power import PowerReporter
from kappa.protocol import Announcement

log = structlog.get_logger(__name__)

# Longer names of a GPU are no numbers.
_NUMBER = 4


class NoNvmlError(RuntimeError):
    """There is no NVML here, or it knows no GPU."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that NVML knows.

    memory_bytes: of its own; None where it has none.
    """

    index: int
    name: str
    memory_bytes: int | None
    uuid: str


def visible_gpus(gpus: Sequence[Gpu], names: str) -> list[Gpu]:
    """Those that `CUDA_VISIBLE_DEVICES` names by number or UUID, or the beginning of one."""
    wanted = [name for name in names.replace(" ", "").split(",") if name]
    return [
        gpu
        for name in wanted
        for gpu in gpus
        if name == str(gpu.index) or (len(name) > _NUMBER and gpu.uuid.startswith(name))
    ]


class Nvml:
    """Lists all GPUs and reads their power; a context manager that starts NVML and ends it.

    Args:
        nvml: the module `pynvml`, or one shaped like it.
    """

    def __init__(self, nvml: ModuleType | Any) -> None:
        self._nvml = nvml
        self._handles: list[Any] = []
        self.gpus: tuple[Gpu, ...] = ()
        self.driver = ""

    def __enter__(self) -> Nvml:
        nvml = self._nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise NoNvmlError(
                f"no NVML on this machine ({error}): it comes with NVIDIA's driver, as "
                "libnvidia-ml.so.1"
            ) from None
        try:
            self.driver = _text(nvml.nvmlSystemGetDriverVersion())
            count = nvml.nvmlDeviceGetCount()
            self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
            self.gpus = tuple(
                Gpu(
                    index,
                    _text(nvml.nvmlDeviceGetName(handle)),
                    getattr(self._figure("nvmlDeviceGetMemoryInfo", handle), "total", None),
                    _text(nvml.nvmlDeviceGetUUID(handle)),
                )
                for index, handle in enumerate(self._handles)
            )
        except nvml.NVMLError as error:
            self.__exit__()
            raise NoNvmlError(f"NVML does not list its GPUs: {error}") from None
        if not self.gpus:
            self.__exit__()
            raise NoNvmlError("NVML knows no GPU: make one visible to this process")
        return self

    def __exit__(self, *_: object) -> None:
        self._handles = []
        self._nvml.nvmlShutdown()

    def power(self, mine: Sequence[int], count: int) -> tuple[float, float]:
        """(draw, enforced limit) in watts of the GPUs `mine`, together; where that names none, the
        share that `count` GPUs are of all. A GPU without a figure counts as zero."""
        share = 1.0 if mine else min(count / len(self._handles), 1.0)
        wanted = [self._handles[i] for i in mine] or self._handles
        calls = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit")
        draw, limit = (sum(self._figure(call, each) or 0 for each in wanted) for call in calls)
        return draw * share / 1e3, limit * share / 1e3

    def _figure(self, call: str, handle: Any) -> Any:
        """The figure of a call, power in milliwatts; None where the GPU has none."""
        try:
            return getattr(self._nvml, call)(handle)
        except self._nvml.NVMLError:
            return None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


@cache
def gpus_and_driver() -> str:
    """The machine's GPUs by name, and their driver's version; empty where NVML knows none."""
    import pynvml

    try:
        with Nvml(pynvml) as found:
            names = ", ".join(gpu.name for gpu in found.gpus)
            return f"{names}, driver {found.driver}"
    except NoNvmlError:
        return ""


def power_reporter(announced: Announcement, gpus: int) -> PowerReporter:
    """The function that adds power to the reports of a replica with `gpus` GPUs."""
    if not gpus or announced.node.source == "paced":
        return PowerReporter(announced)
    import pynvml

    try:
        found = Nvml(pynvml).__enter__()
    except NoNvmlError as error:
        log.info("power_modelled", reason=str(error))
        return PowerReporter(announced)
    mine = visible_gpus(found.gpus, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return PowerReporter(announced, partial(found.power, [gpu.index for gpu in mine], gpus))
