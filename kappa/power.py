"""Watts: what a node draws, which cap its requests would not notice, and what that frees. Pure.

Where NVML measures, its figures are used; elsewhere a model from data-sheet caps, labelled so: idle
watts, plus the rest of the cap in proportion to computing, plus `MEMORY_SHARE` of it in proportion
to time that waits for memory. Paper 001's Table 5 measures the effect: memory-bound serving draws
150 to 350 W of a 700 W cap. Called by workers (reports), `kappa power` and its tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kappa.cost import StepWork, chunk_work, load_s, step_model
from kappa.hardware import CATALOGUE, NodeProfile
from kappa.model import ModelShape
from kappa.paper import MEASURED_LINK_GB_PER_S, TABLE5_POWER_W
from kappa.shapes import model_shape

MEMORY_SHARE = 0.5
"""Of the watts above idle, what a step that waits for memory draws: assumed. Data sheets do not
tell; measured bandwidth-bound kernels on recent GPUs draw about half of what GEMMs draw."""

CLOCK_EXPONENT = 2.0
"""Watts above idle go with speed to this power when a cap lowers the clock: assumed. Voltage falls
with the clock, which makes it 2 to 3; the lower figure promises less."""

MARGIN = 1.05
"""A cap stands this much above the highest draw seen, so that it never bites."""


# Beyond this slowdown nothing is left above idle.
_SLOWEST = 1e3


@dataclass(frozen=True, slots=True)
class GpuPower:
    """What a GPU may draw, in watts: its default cap, the lowest cap that it takes, and idle.

    reference: where the cap is from; idle and lowest are typical, not from data sheets.
    """

    cap_w: float
    least_cap_w: float
    idle_w: float
    reference: str = ""


_SXM700 = GpuPower(700.0, 200.0, 70.0, "NVIDIA H100/H200 SXM data sheets: 700 W")
GPUS: dict[str, GpuPower] = {
    "A100-SXM4-80GB": GpuPower(400.0, 100.0, 55.0, "NVIDIA A100 data sheet: 400 W"),
    "H100-SXM5-80GB": _SXM700,
    "H200-SXM-141GB": _SXM700,
    "B200-HGX-180GB": GpuPower(1000.0, 200.0, 100.0, "NVIDIA HGX B200 data sheet: 1000 W"),
    "B200-class, CPU on package": GpuPower(1000.0, 200.0, 100.0, "as B200"),
    "GH200-96GB": GpuPower(
        900.0, 200.0, 90.0, "NVIDIA GH200 data sheet: 450 to 1000 W for CPU, GPU and memory"
    ),
    "GB200-186GB": GpuPower(1200.0, 200.0, 120.0, "NVIDIA GB200 NVL72 data sheet: 1200 W per GPU"),
    "demo GPU": GpuPower(700.0, 200.0, 70.0, "demo: as H100"),
}
"""By the `gpu` of a `NodeProfile`; not all are here."""


def modelled_w(power: GpuPower, window_s: float, step_s: float, compute_s: float) -> float:
    """Mean watts over a window, from the seconds of all its steps, and of what they computed at
    full rate; the rest of the steps waited for memory."""
    busy = min(step_s / window_s, 1.0)
    computing = min(compute_s / window_s, busy)
    waiting = busy - computing
    return power.idle_w + (power.cap_w - power.idle_w) * (computing + MEMORY_SHARE * waiting)


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
    step = model.parts(StepWork(*(prompts * each for each in work)))
    window_s = max(prompts * load_s(shape, whole, cached), step.step_s)
    watts = modelled_w(power, window_s, step.step_s, step.compute_s)
    return watts, watts * gpus * window_s / prompts


def table5_rows() -> list[dict[str, str | float]]:
    """Paper 001's Table 5, watts of a GPU as it measured them, beside the model's: of prompts of
    its median lengths on its server, eight H100 that load 15 GB/s each, 40 in a step as Table 4 has
    it; and joules of a prompt."""
    link = MEASURED_LINK_GB_PER_S * 1e9
    node = replace(CATALOGUE["h100-pcie5"], h2d_bytes_per_s=link)
    (sharegpt, narrativeqa), rows = TABLE5_POWER_W[70], list[dict[str, str | float]]()
    for workload, paper, counts in (
        ("ShareGPT", sharegpt[0], (10_000, 100, 40)),
        ("NarrativeQA", narrativeqa[0], (57_000, 12, 40)),
    ):  # fmt: skip
        for model in ("llama-3.1-70b", "qwen3-235b-a22b"):
            watts, joules = prompt_power(_SXM700, model_shape(model), node, counts, gpus=8)
            rows.append({
                "workload": workload, "model": model, "cached": counts[0], "new": counts[1],
                "paper_w": paper, "modelled_w": watts, "modelled_j_per_prompt": joules,
            })  # fmt: skip
    return rows


@dataclass(frozen=True, slots=True)
class Waited:
    """What a request's first token waited for, in seconds: predicted or measured."""

    queue_s: float
    load_s: float
    compute_s: float

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.load_s + self.compute_s


@dataclass(frozen=True, slots=True)
class Advice:
    """A cap for a node, and what it is worth. Watts; freed_w is below the present cap.

    slowdown: how much longer computing may take under it. basis: `measured` (it stands above the
    highest draw, nothing changes) or `model` (predicted TTFT grows by `ttft_growth`).
    """

    cap_w: float
    freed_w: float
    slowdown: float
    ttft_growth: float
    basis: str


def tolerated_slowdown(requests: Iterable[Waited], tolerance: float) -> float:
    """How much longer computing may take while the mean TTFT grows by `tolerance` at most.

    Queues hold others' loads and computation in the proportion in which the node does both.
    Infinite if nothing is computed.
    """
    found = list(requests)
    load_s, compute_s = sum(r.load_s for r in found), sum(r.compute_s for r in found)
    worked_s = load_s + compute_s
    computing = compute_s / worked_s if worked_s > 0 else 0.0
    slowed_s = compute_s + computing * sum(r.queue_s for r in found)
    if slowed_s <= 0:
        return float("inf")
    return 1.0 + tolerance * sum(r.ttft_s for r in found) / slowed_s


def advise(
    power: GpuPower,
    cap_w: float,
    requests: Iterable[Waited],
    tolerance: float,
    highest_draw_w: float | None = None,
) -> Advice:
    """The lowest cap that the node's requests would not notice.

    cap_w: the present one. highest_draw_w: measured, where it is; a cap above it changes nothing.
    """
    slowdown = tolerated_slowdown(requests, tolerance)
    # What was measured was measured under the present cap.
    active_w = (cap_w - power.idle_w) / min(slowdown, _SLOWEST) ** CLOCK_EXPONENT
    modelled = _within(power, power.idle_w + active_w, cap_w)
    if highest_draw_w is not None:
        unnoticed = _within(power, highest_draw_w * MARGIN, cap_w)
        if unnoticed <= modelled:
            return Advice(unnoticed, cap_w - unnoticed, 1.0, 0.0, "measured")
    # The lowest cap may stand above what the slowdown would allow.
    reached = ((cap_w - power.idle_w) / (modelled - power.idle_w)) ** (1 / CLOCK_EXPONENT)
    growth = tolerance * (reached - 1) / (slowdown - 1) if 1 < slowdown < float("inf") else 0.0
    return Advice(modelled, cap_w - modelled, reached, growth, "model")


def _within(power: GpuPower, watts: float, cap_w: float) -> float:
    """Watts rounded up to tens, within what the GPU takes and what it has."""
    rounded = -(-watts // 10) * 10
    return min(max(rounded, power.least_cap_w), cap_w)
