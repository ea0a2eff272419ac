"""Decoding over an offloaded cache, one arm per policy; and the link alone with the same bytes.

Every run computes its prompts (not timed), then decodes; tokens are compared with the baseline's,
since all policies are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.offload.cells import DecodeCell
from benchmarks.offload.decoder import Decoder
from benchmarks.offload.policies import Policies, Way
from benchmarks.offload.rig import LINK, Arm, Rig, Sample
from benchmarks.offload.streaming import model_bytes
from engine.blocks import Ids
from kappa.plans.decoding import attention_refused

_COPY_STEPS = 3


def decode_arms(rig: Rig, cell: DecodeCell) -> tuple[list[Arm], dict[str, str]]:
    """The cell's arms, and those left out by name, with the reason."""
    left_out: dict[str, str] = {}
    weights = rig.forward.weights
    weight_bytes = model_bytes(weights) if rig.streamed else 0
    policies = Policies(cell, rig.rates, rig.block_tokens, weight_bytes)
    choice = policies.choice()
    arms = []
    for name in cell.policies:
        if name.startswith("cpu-") and rig.rates.attend is None:
            left_out[name] = attention_refused(rig.rates)
            continue
        way = policies.way(name)
        run, predicted_s = _run(rig, cell, way), policies.predicted_s(way)
        arms.append(Arm(name, run, predicted_s, way.note, name == choice, policies.key(way)))
    arms.append(_link_arm(rig, cell))
    return arms, left_out


def _run(rig: Rig, cell: DecodeCell, way: Way) -> Callable[[], Sample]:
    def run() -> Sample:
        prompts = rig.prompts(cell.sequences, cell.prompt)
        batches = [prompts[i : i + cell.batch] for i in range(0, cell.sequences, cell.batch)]
        cpu = None
        if way.cpu is not None:
            on_cpu, bt = way.cpu, rig.block_tokens
            cpu = lambda length: on_cpu(length // bt * bt)  # noqa: E731
        decoder = Decoder(rig.forward, way.placement, order=cell.order, split=way.split, cpu=cpu)
        return decoded(rig, decoder, batches, cell.gen)

    return run


def decoded(rig: Rig, decoder: Decoder, batches: list[list[Ids]], gen: int) -> Sample:
    """Prompts, then `gen` - 1 steps, which are what is compared; the decoder is closed."""
    try:
        before = rig.timed(lambda: decoder.prefill(batches))
        sample = rig.timed(lambda: [decoder.step() for _ in range(gen - 1)])
        tokens = torch.cat([torch.as_tensor(t) for t in decoder.tokens()])
    finally:
        decoder.close()
    return replace(sample, before_s=before.latency_s, tokens=tuple(tokens.flatten().tolist()))


def _link_arm(rig: Rig, cell: DecodeCell) -> Arm:
    """What the first step loads as KV, layer by layer, with nothing else to do."""
    per_sequence = cell.prompt // rig.block_tokens
    blocks = cell.batch * per_sequence
    host = rig.arena.kv_host
    landing = torch.empty((2, blocks, *host.shape[2:]), dtype=host.dtype)

    def copy() -> None:
        for index in range(_COPY_STEPS * cell.batches * rig.config.layers):
            source = host[index % rig.config.layers, :blocks]
            # Newer copies come behind older ones.
            rig.mover.h2d([(landing[index % 2], source)])

    tokens = blocks * rig.block_tokens
    predicted_s = _COPY_STEPS * cell.batches * rig.rates_alone.load.seconds(tokens)
    return Arm(LINK, lambda: rig.timed(copy), predicted_s)
