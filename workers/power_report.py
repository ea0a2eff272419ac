"""A worker's power in its reports: measured by NVML where there is one, else the model's figure.

Called with every report of the worker, it looks at most once a second. A paced node reports what
the node that it is paced as would draw and use, in that node's own time. Nothing here may fail a
report: a GPU that stops answering is a worker without figures.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import structlog
from msgspec.structs import replace

from kappa.power import GpuPower, Work, gpu_power, modelled_w
from kappa.protocol import Announcement, WorkerReport
from workers.power import NoNvmlError, PowerMeter

log = structlog.get_logger(__name__)

_EVERY_S = 1.0


class PowerReporter:
    """Adds power and energy to a worker's reports; call `close` at the end."""

    def __init__(
        self,
        announced: Announcement,
        nvml: Any | None = None,
        gpus: Sequence[int] | None = None,
        gpu_count: int = 0,
    ) -> None:
        """announced: node and step model. nvml: the module `pynvml`, or None: the model's figure.
        gpus: indices of this worker's GPUs; None: not known, then its `gpu_count` of all of them.
        """
        self._announced = announced
        self._catalogue: GpuPower | None = gpu_power(announced.node.gpu)
        self._gpus, self._gpu_count = gpus, gpu_count
        self._paced = announced.node.source == "paced"
        self._meter = None if self._paced or nvml is None else _open(nvml)
        self._before: WorkerReport | None = None
        self._energy_j = 0.0
        self._figures: dict[str, Any] = {}

    def __call__(self, report: WorkerReport) -> WorkerReport:
        """The report, with power."""
        before = self._before
        if before is None or report.steps_total < before.steps_total:
            self._before = report
        elif report.time_s - before.time_s >= _EVERY_S:
            self._look(before, report)
            self._before = report
        return replace(report, **self._figures) if self._figures else report

    def close(self) -> None:
        """Let NVML go."""
        if self._meter is not None:
            with contextlib.suppress(Exception):
                self._meter.__exit__()
            self._meter = None

    def _look(self, before: WorkerReport, now: WorkerReport) -> None:
        if self._meter is not None:
            watts, cap_w, source = *self._measured(), "nvml"
            window_s = now.time_s - before.time_s
        elif self._catalogue is not None:
            work = self._work(before, now)
            watts, cap_w = modelled_w(self._catalogue, work), self._catalogue.cap_w
            source, window_s = "paced" if self._paced else "model", work.window_s
        else:
            return
        self._energy_j += watts * window_s
        self._figures = {
            "power_w": watts, "power_cap_w": cap_w, "energy_j_total": self._energy_j,
            "power_source": source,
        }  # fmt: skip

    def _work(self, before: WorkerReport, now: WorkerReport) -> Work:
        step = self._announced.step
        tokens = now.step_tokens_total - before.step_tokens_total
        return Work(
            window_s=(now.time_s - before.time_s) / step.dilation,
            step_s=max(now.step_seconds_total - before.step_seconds_total, 0.0) / step.dilation,
            compute_s=max(tokens, 0) * step.token_s,
        )

    def _measured(self) -> tuple[float, float]:
        """(draw, cap) of this worker's GPUs in watts; zero where NVML tells none."""
        assert self._meter is not None
        watts = [w or 0.0 for w in self._meter.watts()]
        caps = [gpu.limit_w or 0.0 for gpu in self._meter.gpus]
        if self._gpus is not None:
            mine = [i for i in self._gpus if 0 <= i < len(watts)]
            return sum(watts[i] for i in mine), sum(caps[i] for i in mine)
        share = min(self._gpu_count / len(watts), 1.0) if self._gpu_count else 1.0
        return sum(watts) * share, sum(caps) * share


def _open(nvml: Any) -> PowerMeter | None:
    try:
        return PowerMeter(nvml).__enter__()
    except NoNvmlError as error:
        log.info("power_modelled", reason=str(error))
        return None


def power_reporter(announced: Announcement, gpus: int) -> PowerReporter:
    """What adds power to the reports of a replica with so many GPUs."""
    nvml = None
    if gpus:
        import pynvml

        nvml = pynvml
    return PowerReporter(announced, nvml, _visible_gpus(), gpus)


def _visible_gpus() -> list[int] | None:
    """Indices that the process is bound to; None if it is not, or names them by other means."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    parts = [part.strip() for part in listed.split(",") if part.strip()]
    return [int(part) for part in parts] if parts and all(p.isdigit() for p in parts) else None
