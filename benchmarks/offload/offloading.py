"""Decoding with weights and KV in host memory, one arm per share of the CPU (paper 002).

"streamed" is the baseline: every weight crosses, KV stays on the device, the CPU computes nothing.
"mha", "mha-o", "mha-av-o": the CPU computes attention, but for its last product, or its last two;
"alpha-N": all of it and N % of FC1's columns; "planned": what `kappa.plans.cpu_offload` makes of
the measured layer at each length. All are exact; one batch, as in the paper's Table 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import torch

from benchmarks.offload.cpu_offload import CpuOffload, Plan, Share
from benchmarks.offload.cpu_profile import LayerProfile
from benchmarks.offload.decoder import KV_DEVICE, Decoder, always
from benchmarks.offload.decoding import decoded
from benchmarks.offload.policies import Policies
from benchmarks.offload.rig import Rig
from benchmarks.offload.rounds import LINK, Arm, Sample
from benchmarks.offload.settings import DecodeCell, OffloadCell
from kappa.plans.cpu_offload import MODES, LayerPlan, LayerTimes, plan_layer

BASELINE = "streamed"
# FC1's columns go to the CPU in multiples of so many, if there are more than a few of them.
_COLUMNS = 64
_COPY_STEPS = 2


@contextmanager
def offloaded(rig: Rig, cell: OffloadCell) -> Iterator[CpuOffload]:
    """The cell's batch, with memory for it."""
    made = CpuOffload(
        rig.forward, threads=cell.cpu_threads, sequences=cell.batch,
        most_tokens=cell.prompt + cell.gen, plan=lambda length: Share(),
    )  # fmt: skip
    try:
        yield made
    finally:
        made.close()


def offload_arms(rig: Rig, cell: OffloadCell, made: CpuOffload) -> list[Arm]:
    """The cell's arms."""
    made.prefill(rig.prompts(cell.batch, cell.prompt))
    rig.finish()
    profile = LayerProfile(made)
    lengths = range(cell.prompt + 1, cell.prompt + cell.gen)
    inner = rig.config.inner
    planned = planner(profile.at, inner)
    arms = [_streamed(rig, cell)]
    for name in cell.ways:
        plan = planned if name == "planned" else fixed(name, inner)
        shares = [plan(length) for length in lengths]
        predicted_s = rig.config.layers * sum(
            profile.at(length).layer_s(share.mode, share.columns / inner)
            for length, share in zip(lengths, shares, strict=True)
        )
        note = f"{shares[0].mode}, {shares[0].columns} of {inner} columns at first"
        arms.append(
            Arm(name, _run(rig, cell, made, plan), predicted_s, note, name == "planned",
                tuple(shares))
        )  # fmt: skip
    arms.append(_link(rig))
    return arms


def planner(times: Callable[[int], LayerTimes], columns: int) -> Plan:
    """The planned share by length."""

    @cache
    def plan(length: int) -> Share:
        best: LayerPlan = plan_layer(times(length), columns, min(_COLUMNS, columns))
        return Share(best.mode, best.columns)

    return plan


def fixed(name: str, columns: int) -> Plan:
    """The share of that name at every length.

    Raises:
        ValueError: there is none.
    """
    kind, _, percent = name.partition("-")
    if name in MODES:
        share = Share(name)
    elif kind == "alpha" and percent.isdigit() and int(percent) <= 100:
        share = Share("mha", columns * int(percent) // 100)
    else:
        raise ValueError(f"no share named {name!r}: use planned, {', '.join(MODES)}, or alpha-N")
    return lambda length: share


def _run(rig: Rig, cell: OffloadCell, made: CpuOffload, plan: Plan) -> Callable[[], Sample]:
    def run() -> Sample:
        made.plan = plan
        prompts = rig.prompts(cell.batch, cell.prompt)
        before = rig.timed(lambda: made.prefill(prompts))
        sample = rig.timed(lambda: [made.step() for _ in range(cell.gen - 1)])
        tokens = tuple(made.tokens().ravel().tolist())
        return replace(sample, before_s=before.latency_s, tokens=tokens)

    return run


def _streamed(rig: Rig, cell: OffloadCell) -> Arm:
    """The whole layer on the device, weights streamed, as FlexGen does with KV on the device."""
    whole = DecodeCell(cell.batch, cell.prompt, cell.gen, ("device",), order="column")
    weight_bytes = rig.forward.weights.layer_bytes * rig.config.layers
    policies = Policies(whole, rig.rates, rig.block_tokens, weight_bytes)

    def run() -> Sample:
        decoder = Decoder(rig.forward, always(KV_DEVICE), order="column")
        return decoded(rig, decoder, [rig.prompts(cell.batch, cell.prompt)], cell.gen)

    return Arm(BASELINE, run, policies.predicted_s(policies.way("device")))


def _link(rig: Rig) -> Arm:
    """Every layer's weights, with nothing else to do."""
    weights = rig.forward.weights
    landing = torch.empty((2, weights.layers.shape[1]), dtype=weights.dtype, device=weights.device)

    def copy() -> None:
        for index in range(_COPY_STEPS * rig.config.layers):
            rig.mover.h2d([(landing[index % 2], weights.layers[index % rig.config.layers])])

    return Arm(LINK, lambda: rig.timed(copy), _COPY_STEPS * rig.rates_alone.weights_load_s)
