"""What NVML knows of GPUs, and their power: for `kappa power`, and in a worker's reports.

NVML comes in as an argument (the module `pynvml` of nvidia-ml-py), and so do clock and sleep, so
the arithmetic is testable where there is no GPU. NVML itself averages power over about a second on
recent GPUs: samples at 200 ms overlap, which leaves the mean alone and flattens the peak. A worker
without NVML reports the model's figure; a paced one what the node that it is paced as would draw
and use, in that node's own time. Nothing here may fail a report: a GPU that stops answering is a
worker without figures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import structlog
from msgspec.structs import replace

from kappa.power import GPUS, GpuPower, modelled_w
from kappa.protocol import Announcement, WorkerReport

log = structlog.get_logger(__name__)

INTERVAL_S = 0.2
"""The paper's sampling interval (001, Table 5)."""
_REPORT_EVERY_S = 1.0
_HAIR = 1e-9
"""0.6 / 0.2 is just under 3."""
# Longer names of a GPU are no numbers.
_NUMBER = 4


class NoNvmlError(RuntimeError):
    """There is no NVML here, or it knows no GPU."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that NVML knows.

    limit_w: its enforced power limit; memory_bytes: of its own; None where it has none.
    """

    index: int
    name: str
    limit_w: float | None
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


@dataclass(frozen=True, slots=True)
class PowerRow:
    """Watts per GPU, `t_s` seconds after sampling began; None where NVML gave none."""

    t_s: float
    watts: tuple[float | None, ...]


class PowerMeter:
    """Lists all GPUs and reads their power; a context manager that starts NVML and ends it.

    Args:
        nvml: the module `pynvml`, or one shaped like it.
    """

    def __init__(self, nvml: ModuleType | Any) -> None:
        self._nvml = nvml
        self._handles: list[Any] = []
        self.gpus: tuple[Gpu, ...] = ()
        self.driver = ""

    def __enter__(self) -> PowerMeter:
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
                    index, _text(nvml.nvmlDeviceGetName(handle)),
                    self._watts("nvmlDeviceGetEnforcedPowerLimit", handle),
                    getattr(self._figure("nvmlDeviceGetMemoryInfo", handle), "total", None),
                    _text(nvml.nvmlDeviceGetUUID(handle)),
                )
                for index, handle in enumerate(self._handles)
            )  # fmt: skip
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

    def watts(self) -> tuple[float | None, ...]:
        """Watts of every GPU now; None for one that gives none."""
        return tuple(self._watts("nvmlDeviceGetPowerUsage", handle) for handle in self._handles)

    def _watts(self, call: str, handle: Any) -> float | None:
        milliwatts = self._figure(call, handle)
        return None if milliwatts is None else float(milliwatts) / 1e3

    def _figure(self, call: str, handle: Any) -> Any:
        """What a call gives; None where the GPU has no such figure."""
        try:
            return getattr(self._nvml, call)(handle)
        except self._nvml.NVMLError:
            return None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def sample_power(
    meter: PowerMeter,
    seconds: float,
    record: Callable[[PowerRow], None],
    interval_s: float = INTERVAL_S,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Sample for `seconds`, at multiples of `interval_s`; a slot that was missed stays empty.

    Raises:
        ValueError: no time, or no interval.
    """
    if not (seconds > 0 and interval_s > 0):
        raise ValueError(f"seconds {seconds}, interval {interval_s}: give times above zero")
    start_s, slot = now_s(), 0
    slots = int(seconds / interval_s + _HAIR) + 1
    while slot < slots:
        wait_s = start_s + slot * interval_s - now_s()
        if wait_s > 0:
            sleep(wait_s)
        record(PowerRow(now_s() - start_s, meter.watts()))
        slot = max(slot + 1, int((now_s() - start_s) / interval_s + _HAIR))


def summary(gpus: tuple[Gpu, ...], rows: list[PowerRow]) -> list[dict[str, Any]]:
    """Per GPU: samples, mean and most watts, and the mean as a share of the limit."""
    found = []
    for gpu in gpus:
        known = [watts for row in rows if (watts := row.watts[gpu.index]) is not None]
        mean_w = sum(known) / len(known) if known else None
        share = mean_w / gpu.limit_w if mean_w is not None and gpu.limit_w else None
        found.append(
            {
                "index": gpu.index, "name": gpu.name, "limit_w": gpu.limit_w,
                "samples": len(known), "untold": len(rows) - len(known),
                "mean_w": mean_w, "max_w": max(known, default=None), "share_of_limit": share,
            }
        )  # fmt: skip
    return found


class PowerReporter:
    """Adds power and energy to a worker's reports, as long as its process lives."""

    def __init__(
        self,
        announced: Announcement,
        nvml: Any | None = None,
        visible: str = "",
        gpu_count: int = 0,
    ) -> None:
        """announced: node and step model. nvml: the module `pynvml`, or None: the model's figure.
        visible: this worker's GPUs as `CUDA_VISIBLE_DEVICES` names them; where that names none, its
        `gpu_count` of all of them.
        """
        self._announced = announced
        self._catalogue: GpuPower | None = GPUS.get(announced.node.gpu)
        self._gpus, self._gpu_count = list[int](), gpu_count
        self._paced = announced.node.source == "paced"
        self._meter: PowerMeter | None = None
        if nvml is not None and not self._paced:
            try:
                self._meter = PowerMeter(nvml).__enter__()
                self._gpus = [gpu.index for gpu in visible_gpus(self._meter.gpus, visible)]
            except NoNvmlError as error:
                log.info("power_modelled", reason=str(error))
        self._before: WorkerReport | None = None
        self._energy_j = 0.0
        self._figures: dict[str, Any] = {}

    def __call__(self, report: WorkerReport) -> WorkerReport:
        """The report, with power."""
        before = self._before
        if before is None or report.steps_total < before.steps_total:
            self._before = report
        elif report.time_s - before.time_s >= _REPORT_EVERY_S:
            self._look(before, report)
            self._before = report
        return replace(report, **self._figures) if self._figures else report

    def _look(self, before: WorkerReport, now: WorkerReport) -> None:
        window_s = now.time_s - before.time_s
        if self._meter is not None:
            watts, cap_w = self._measured(self._meter)
            source = "nvml"
        elif self._catalogue is not None:
            step = self._announced.step
            window_s /= step.dilation
            step_s = max(now.step_seconds_total - before.step_seconds_total, 0.0) / step.dilation
            compute_s = max(now.step_tokens_total - before.step_tokens_total, 0) * step.token_s
            watts = modelled_w(self._catalogue, window_s, step_s, compute_s)
            cap_w, source = self._catalogue.cap_w, "paced" if self._paced else "model"
        else:
            return
        self._energy_j += watts * window_s
        self._figures = {
            "power_w": watts, "power_cap_w": cap_w, "energy_j_total": self._energy_j,
            "power_source": source,
        }  # fmt: skip

    def _measured(self, meter: PowerMeter) -> tuple[float, float]:
        """(draw, cap) of this worker's GPUs in watts; zero where NVML gives none."""
        watts, caps = [w or 0.0 for w in meter.watts()], [gpu.limit_w or 0.0 for gpu in meter.gpus]
        if self._gpus:
            return sum(watts[i] for i in self._gpus), sum(caps[i] for i in self._gpus)
        share = min(self._gpu_count / len(watts), 1.0) if self._gpu_count else 1.0
        return sum(watts) * share, sum(caps) * share


@cache
def gpus_and_driver() -> str:
    """The machine's GPUs by name, and their driver's version; empty where NVML knows none."""
    import pynvml

    try:
        with PowerMeter(pynvml) as meter:
            names = ", ".join(gpu.name for gpu in meter.gpus)
            return f"{names}, driver {meter.driver}"
    except NoNvmlError:
        return ""


def power_reporter(announced: Announcement, gpus: int) -> PowerReporter:
    """What adds power to the reports of a replica with so many GPUs."""
    nvml = None
    if gpus:
        import pynvml

        nvml = pynvml
    return PowerReporter(announced, nvml, os.environ.get("CUDA_VISIBLE_DEVICES", ""), gpus)
