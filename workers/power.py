"""Board power of every GPU, sampled through NVML, as paper 001's Table 5 has it.

NVML comes in as an argument (the module `pynvml` of nvidia-ml-py), and so do clock and sleep, so
the arithmetic is testable where there is no GPU. NVML itself averages power over about a second on
recent GPUs: samples at 200 ms overlap, which leaves the mean alone and flattens the peak. Used by
`kappa power`, and by each worker (`workers.power_report`) for its reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

INTERVAL_S = 0.2
"""The paper's sampling interval."""


class NoNvmlError(RuntimeError):
    """There is no NVML here, or it knows no GPU."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that NVML knows; limit_w: its enforced power limit, None where it has none."""

    index: int
    name: str
    limit_w: float | None


@dataclass(frozen=True, slots=True)
class PowerRow:
    """Watts per GPU, `t_s` seconds after sampling began; None where NVML gave none."""

    t_s: float
    watts: tuple[float | None, ...]


class PowerMeter:
    """Reads the power of all GPUs; a context manager that starts NVML and ends it.

    Args:
        nvml: the module `pynvml`, or one shaped like it.
    """

    def __init__(self, nvml: ModuleType | Any) -> None:
        self._nvml = nvml
        self._handles: list[Any] = []
        self.gpus: tuple[Gpu, ...] = ()

    def __enter__(self) -> PowerMeter:
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise NoNvmlError(
                f"no NVML on this machine ({error}): power is measured where NVIDIA's driver is, "
                "which brings libnvidia-ml.so.1"
            ) from None
        try:
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
            self.gpus = tuple(self._gpu(i, handle) for i, handle in enumerate(self._handles))
        except self._nvml.NVMLError as error:
            self.__exit__()
            raise NoNvmlError(f"NVML does not tell its GPUs: {error}") from None
        if not self.gpus:
            self.__exit__()
            raise NoNvmlError("NVML is here, but knows no GPU: make one visible to this process")
        return self

    def __exit__(self, *_: object) -> None:
        self._handles = []
        self._nvml.nvmlShutdown()

    def watts(self) -> tuple[float | None, ...]:
        """Watts of every GPU now; None for one that does not tell."""
        return tuple(self._milliwatts("nvmlDeviceGetPowerUsage", h) for h in self._handles)

    def _gpu(self, index: int, handle: Any) -> Gpu:
        name = self._nvml.nvmlDeviceGetName(handle)
        name = name.decode() if isinstance(name, bytes) else str(name)
        return Gpu(index, name, self._milliwatts("nvmlDeviceGetEnforcedPowerLimit", handle))

    def _milliwatts(self, call: str, handle: Any) -> float | None:
        try:
            return float(getattr(self._nvml, call)(handle)) / 1e3
        except self._nvml.NVMLError:
            return None


def sample_power(
    meter: PowerMeter,
    seconds: float,
    heard: Callable[[PowerRow], None],
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
    # A hair of slack: 0.6 / 0.2 is just under 3.
    slots = int(seconds / interval_s + 1e-9) + 1
    while slot < slots:
        wait_s = start_s + slot * interval_s - now_s()
        if wait_s > 0:
            sleep(wait_s)
        at_s = now_s() - start_s
        heard(PowerRow(at_s, meter.watts()))
        slot = max(slot + 1, int((now_s() - start_s) / interval_s + 1e-9))


def summary(gpus: tuple[Gpu, ...], rows: list[PowerRow]) -> list[dict[str, Any]]:
    """Per GPU: samples, mean and most watts, and the mean as a share of the limit."""
    found = []
    for gpu in gpus:
        told = [watts for row in rows if (watts := row.watts[gpu.index]) is not None]
        mean_w = sum(told) / len(told) if told else None
        share = mean_w / gpu.limit_w if mean_w is not None and gpu.limit_w else None
        found.append(
            {
                "index": gpu.index, "name": gpu.name, "limit_w": gpu.limit_w,
                "samples": len(told), "untold": len(rows) - len(told),
                "mean_w": mean_w, "max_w": max(told, default=None), "share_of_limit": share,
            }
        )  # fmt: skip
    return found
