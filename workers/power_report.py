"""What a worker says of its power: measured by NVML where there is one, else the model's figure.

Called with every report of the worker, it looks at most once a second. A paced node tells what the
node that it is paced as would draw and use, in that node's own time. Nothing here may fail a
report: a GPU that stops telling is a worker without figures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import structlog
from msgspec.structs import replace

from kappa.power import GpuPower, Work, gpu_power, modelled_w
from kappa.protocol import Announcement, WorkerReport
from workers.power import NoNvmlError, PowerMeter

log = structlog.get_logger(__name__)

_EVERY_S = 1.0


class PowerTeller:
    """Adds power and energy to a worker's reports; call `close` at the end."""

    def __init__(
        self,
        said: Announcement,
        nvml: Any | None = None,
        gpus: Sequence[int] | None = None,
        gpu_count: int = 0,
    ) -> None:
        """said: node and step model. nvml: the module `pynvml`, or None: the model's figure.
        gpus: indices of this worker's GPUs; None: not known, then its `gpu_count` of all of them.
        """
        self._said = said
        self._catalogue: GpuPower | None = gpu_power(said.node.gpu)
        self._gpus, self._gpu_count = gpus, gpu_count
        self._paced = said.node.source == "paced"
        self._meter = None if self._paced or nvml is None else _open(nvml)
        self._before: WorkerReport | None = None
        self._energy_j = 0.0
        self._told: dict[str, Any] = {}

    def __call__(self, report: WorkerReport) -> WorkerReport:
        """The report, with power."""
        before = self._before
        if before is None or report.steps_total < before.steps_total:
            self._before = report
        elif report.time_s - before.time_s >= _EVERY_S:
            self._look(before, report)
            self._before = report
        return replace(report, **self._told) if self._told else report

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
        self._told = {
            "power_w": watts, "power_cap_w": cap_w, "energy_j_total": self._energy_j,
            "power_source": source,
        }  # fmt: skip

    def _work(self, before: WorkerReport, now: WorkerReport) -> Work:
        step = self._said.step
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
