"""Watts: what a node draws, paper 001's Table 5, and the cap that its requests would not notice.

NVML's figures are used where it gives some (`workers.nvml`), with the model's beside them.
Elsewhere a model from data-sheet caps, labelled so: idle watts, plus the rest of the cap times a
power of the share of time that computes or, by `MEMORY_SHARE`, waits for memory. An H100's idle
watts and that power are fitted to the four averages of paper 001's Table 5. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from kappa.cost import StepWork, chunk_work, load_s, step_model
from kappa.hardware import CATALOGUE, NodeProfile
from kappa.model import ModelShape
from kappa.paper import MEASURED_LINK_GB_PER_S, TABLE5_POWER_W
from kappa.protocol import Announcement, WorkerReport
from kappa.shapes import model_shape

MEMORY_SHARE = 0.5
"""Share of the watts above idle that a step draws while it waits for memory: assumed. Data sheets
do not say; bandwidth-bound kernels on recent GPUs were measured at about half of GEMMs."""

USE_EXPONENT = 1.22
"""Watts above idle go with the use of a GPU to this power: with an H100's `idle_w` the least
squares of relative errors over Table 5's four averages, for each of the paper's two models, of
which it does not say which drew them (`table5_rows`; `tests/kappa/test_power.py` fits again)."""

CLOCK_EXPONENT = 2.0
"""Watts above idle go with speed to this power when a cap lowers the clock: assumed. Voltage falls
with the clock, which makes it 2 to 3; the lower figure promises less."""

_SLOWEST = 1e3
"""Beyond this slowdown nothing is left above idle."""
_REPORT_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class GpuPower:
    """A GPU's power limits; lowest cap and idle are typical figures, not from data sheets."""

    cap_w: float  # default
    least_cap_w: float
    idle_w: float  # an H100's: of one that serves and only loads, fitted; one without work has 70
    reference: str = ""  # source of `cap_w`


_SXM700 = GpuPower(700.0, 200.0, 153.6, "NVIDIA H100/H200 SXM data sheets: 700 W")
GPUS: dict[str, GpuPower] = {
    "A100-SXM4-80GB": GpuPower(400.0, 100.0, 55.0, "NVIDIA A100 data sheet: 400 W"),
    "H100-SXM5-80GB": _SXM700,
    "H200-SXM-141GB": _SXM700,
    "L4-24GB": GpuPower(72.0, 40.0, 12.0, "NVIDIA L4 data sheet: 72 W"),
    "L40S-48GB": GpuPower(350.0, 100.0, 35.0, "NVIDIA L40S data sheet: 350 W"),
    "B200-HGX-180GB": GpuPower(1000.0, 200.0, 100.0, "NVIDIA HGX B200 data sheet: 1000 W"),
    "B300-HGX-270GB": GpuPower(1100.0, 200.0, 110.0, "NVIDIA HGX B300 data sheet: 1100 W"),
    "B200-class, CPU on package": GpuPower(1000.0, 200.0, 100.0, "as B200"),
    "GH200-96GB": GpuPower(
        900.0, 200.0, 90.0, "NVIDIA GH200 data sheet: 450 to 1000 W for CPU, GPU and memory"
    ),
    "GB200-186GB": GpuPower(1200.0, 200.0, 120.0, "NVIDIA GB200 NVL72 data sheet: 1200 W per GPU"),
    "GB300-279GB": GpuPower(1400.0, 200.0, 140.0, "NVIDIA GB300 NVL72 data sheet: 1400 W per GPU"),
    "RTX-PRO-6000-96GB": GpuPower(600.0, 150.0, 30.0, "NVIDIA RTX PRO 6000 data sheet: 600 W"),
    "MI300X-192GB": GpuPower(750.0, 200.0, 130.0, "AMD Instinct MI300X data sheet: 750 W"),
    "demo GPU": GpuPower(700.0, 200.0, 153.6, "demo: as H100"),
}
"""By the `gpu` of a `NodeProfile`; not all are here."""


def modelled_w(power: GpuPower, window_s: float, step_s: float, compute_s: float) -> float:
    """Mean watts over a window of `window_s` seconds.

    step_s: seconds of all steps in it; compute_s: of these, seconds that compute at full rate. The
    rest of the steps waits for memory.
    """
    busy = min(step_s / window_s, 1.0)
    computing = min(compute_s / window_s, busy)
    waiting = busy - computing
    use = computing + MEMORY_SHARE * waiting
    return power.idle_w + (power.cap_w - power.idle_w) * float(use**USE_EXPONENT)


def prompt_power(
    power: GpuPower, shape: ModelShape, node: NodeProfile, counts: tuple[int, int, int], gpus: int
) -> tuple[float, float]:
    """Watts of each of `gpus` GPUs, and joules of them all for one prompt; no answers.

    counts: tokens of a prompt that are loaded and computed, and prompts in a step. A step's prompts
    are computed while the next ones are loaded, so the longer of the two is its time; links,
    memories and FLOPs are the GPUs' together. Copies draw nothing, which is too little.
    """
    cached, new, prompts = counts
    whole, work = node.times(gpus), chunk_work(new, cached)
    model = step_model(shape, whole, new * prompts, cached)
    batch = StepWork(*(prompts * each for each in work))
    step_s = model.work_s(batch)
    window_s = max(prompts * load_s(shape, whole, cached), step_s)
    watts = modelled_w(power, window_s, step_s, model.parts(batch).compute_s)
    return watts, watts * gpus * window_s / prompts


def table5_rows() -> list[dict[str, str | float]]:
    """Paper 001's Table 5, watts of a GPU as it measured them, beside the model's: of prompts of
    its median lengths on its server, eight H100 that load 15 GB/s each, 40 in a step as Table 4 has
    it; how far these are off, as a share; and joules of a prompt. The figures are fitted to these
    eight rows, so they show how well two parameters can do, not how well they would elsewhere."""
    link = MEASURED_LINK_GB_PER_S * 1e9
    node = CATALOGUE["h100-pcie5"]
    node = replace(node, h2d_bytes_per_s=link, copy_fixed_s=0.0, load_fixed_s=0.0)
    rows = list[dict[str, str | float]]()
    for place, (workload, counts) in enumerate((
        ("ShareGPT", (10_000, 100, 40)),
        ("NarrativeQA", (57_000, 12, 40)),
    )):  # fmt: skip
        for model in ("llama-3.1-70b", "qwen3-235b-a22b"):
            watts, joules = prompt_power(_SXM700, model_shape(model), node, counts, gpus=8)
            for rate_rps, measured in TABLE5_POWER_W.items():
                paper_w = measured[place][0]
                rows.append({
                    "workload": workload, "model": model, "rps": rate_rps, "paper_w": paper_w,
                    "modelled_w": watts, "off": watts / paper_w - 1, "modelled_j": joules,
                })  # fmt: skip
    return rows


def node_power(gpu: str, cap_w: float) -> GpuPower | None:
    """A node's GPUs together, as many as its cap in watts holds; None if they are not known."""
    one = GPUS.get(gpu)
    if one is None or cap_w <= 0:
        return None
    count = max(round(cap_w / one.cap_w), 1)
    least_w, idle_w = one.least_cap_w * count, one.idle_w * count
    return None if cap_w < least_w else GpuPower(cap_w, least_w, idle_w, one.reference)


def unnoticed_cap(
    power: GpuPower, waits_s: Sequence[tuple[float, float, float]], tolerance: float
) -> tuple[float, float]:
    """(watts, growth of the mean TTFT as a share) of the lowest cap under which it grows by at most
    `tolerance`, rounded up to tens of watts; never above the present one.

    waits_s: what each request's first token waited for: queue, loads, computing. Queues hold
    others' loads and computing in the proportion in which the node does both.
    """
    queue_s, load_s, compute_s = (sum(parts) for parts in zip(*waits_s, strict=True))
    worked_s = load_s + compute_s
    slowed_s = compute_s + (compute_s / worked_s * queue_s if worked_s > 0 else 0.0)
    slowdown = 1.0 + tolerance * (queue_s + worked_s) / slowed_s if slowed_s > 0 else _SLOWEST
    above_w = power.cap_w - power.idle_w
    wanted_w = power.idle_w + above_w / min(slowdown, _SLOWEST) ** CLOCK_EXPONENT
    cap_w = min(max(-(-wanted_w // 10) * 10, power.least_cap_w), power.cap_w)
    # The lowest cap may stand above what the slowdown would allow.
    reached = (above_w / (cap_w - power.idle_w)) ** (1 / CLOCK_EXPONENT)
    return cap_w, (reached - 1.0) * slowed_s / (queue_s + worked_s) if slowed_s > 0 else 0.0


class PowerReporter:
    """Adds watts and joules to a worker's reports, once a second.

    Figures of a paced node are those of the node that it is paced as, in that node's own time.
    """

    def __init__(
        self, announced: Announcement, measured: Callable[[], tuple[float, float]] | None = None
    ) -> None:
        """announced: the worker, with node and step model. measured: gives (watts drawn, cap in
        watts) of its GPUs; None: modelled, for GPUs of the catalogue."""
        self._announced, self._measured = announced, measured
        self._modelled = GPUS.get(announced.node.gpu)
        self._before: WorkerReport | None = None
        self._energy_j = self._model_j = 0.0
        self._figures: dict[str, Any] = {}

    def __call__(self, report: WorkerReport) -> WorkerReport:
        """The report, with power."""
        before = self._before
        if before is None or report.steps_total < before.steps_total:
            self._before = report
        elif report.time_s - before.time_s >= _REPORT_EVERY_S:
            self._look(before, report)
            self._before = report
        return structs.replace(report, **self._figures) if self._figures else report

    def _look(self, before: WorkerReport, now: WorkerReport) -> None:
        window_s = now.time_s - before.time_s
        step, power = self._announced.step, self._modelled
        step_s = max(now.step_seconds_total - before.step_seconds_total, 0.0)
        model_w = 0.0
        if self._measured is not None:
            watts, cap_w = self._measured()
            source, power = "nvml", node_power(self._announced.node.gpu, cap_w)
        elif power is not None:
            watts, cap_w = 0.0, power.cap_w
            source = "paced" if self._announced.node.source == "paced" else "model"
            window_s, step_s = window_s / step.dilation, step_s / step.dilation
        else:
            return
        if power is not None:
            # `step.token_s` is of all the worker's GPUs together, as are these watts.
            compute_s = max(now.step_tokens_total - before.step_tokens_total, 0) * step.token_s
            model_w = modelled_w(power, window_s, step_s, compute_s)
            watts = watts if source == "nvml" else model_w
        self._energy_j += watts * window_s
        self._model_j += model_w * window_s
        self._figures = dict(
            power_w=watts, power_cap_w=cap_w, energy_j_total=self._energy_j, power_source=source,
            modelled_j_total=self._model_j,
        )  # fmt: skip
