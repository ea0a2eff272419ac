"""Ways to keep and bring back the cache of decoding sequences, by name, and what each should take.

"kv-only" loads keys and values (the baseline). "kvpr-*" keep activations beside them and split each
context: "paper" as paper 000, "ahead" counting the rest of the step; "share-N" a fixed split.
"hybrid-*" keep a block as one or the other (paper 003): by Algorithm 1, "corrected", "planned" by
the predicted step; "hybrid-N" a share; "activations": nothing else. "cpu-*": the CPU attends to
part of each context where it lies (paper 002): "cpu-N" to a share, "paper" by bandwidth, "ahead" by
the predicted step. "device": nothing leaves the device, a bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from benchmarks.offload.cells import DecodeCell
from benchmarks.offload.decoder import (
    ACT_HOST,
    BOTH_HOST,
    KV_DEVICE,
    KV_HOST,
    Decoder,
    Kept,
    Placement,
    always,
)
from benchmarks.offload.rig import LINK, Arm, Rig, Sample
from benchmarks.offload.streaming import model_bytes
from kappa.plans.decoding import (
    attention_refused,
    cpu_share,
    split_ahead,
    split_context,
    split_paper,
    split_s,
)
from kappa.plans.hybridserve import (
    allocate_corrected,
    allocate_paper,
    block_types,
    host_cache,
    next_block_type,
)
from kappa.plans.planners import LEAST_GAIN
from kappa.plans.rates import PlanRates

BASELINE = "kv-only"
_COPY_STEPS = 3

Tokens = Callable[[int], int]
"""Of so many cached tokens of a sequence, all in full blocks, how many are treated otherwise."""


def _none(full: int) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Way:
    """How a cache is kept and brought back.

    activations: the tokens that come from activations; -1 for a cache that stays on the device.
    split: those are the first ones of a context that is stored both ways, anew at every length.
    cpu: the tokens that the CPU attends to; none: it attends to nothing. stored: what goes to host
    memory.
    """

    placement: Placement
    activations: Tokens = _none
    split: bool = False
    cpu: Tokens | None = None
    stored: str = "either"
    note: str = ""


class Policies:
    """The ways of one cell on one machine.

    Args:
        cell: what decodes.
        rates: of model and machine.
        block_tokens: of a block.
        weight_bytes: that are streamed; 0 where they are on the device.
    """

    def __init__(
        self, cell: DecodeCell, rates: PlanRates, block_tokens: int, weight_bytes: float
    ) -> None:
        self.cell, self.rates, self._bt = cell, rates, block_tokens
        self._weight_bytes = weight_bytes

    def way(self, name: str) -> Way:
        """The way of that name.

        Raises:
            ValueError: there is none.
        """
        cell, rates, bt = self.cell, self.rates, self._bt
        kind, _, rest = name.partition("-")
        first = self.full(cell.prompt)
        if name == BASELINE:
            return Way(always(KV_HOST))
        if name == "device":
            return Way(always(KV_DEVICE), lambda full: -1, stored="nothing")
        if name == "activations":
            return Way(always(ACT_HOST), lambda full: full)
        if kind == "hybrid":
            return self._mixed(name)
        plans: dict[str, Tokens] = {
            "kvpr-paper": lambda full: split_paper(rates, cell.batch, full, bt).tokens,
            "kvpr-ahead": lambda full: split_ahead(rates, cell.batch, full, bt).tokens,
            "cpu-paper": lambda full: round(cpu_share(rates) * full / bt) * bt,
            "cpu-ahead": lambda full: split_context(rates, cell.batch, full, bt).tokens,
        }
        if rest.isdigit():
            plans[f"share-{rest}"] = lambda full: int(rest) * full // 100
            plans[f"cpu-{rest}"] = lambda full: int(rest) * full // 100 // bt * bt
        if name not in plans:
            raise ValueError(f"no policy named {name!r}")
        # Planned anew when a context has grown by a block.
        tokens = cache(lambda full: plans[name](full) if full else 0)
        if kind == "cpu":
            note = f"{tokens(first)} of {first} tokens attended to on the CPU at first"
            return Way(always(KV_HOST), cpu=tokens, note=note)
        note = f"{tokens(first)} of {first} tokens from activations at first"
        return Way(always(BOTH_HOST), tokens, split=True, stored="both", note=note)

    def key(self, way: Way) -> tuple[object, ...]:
        """Equal for ways that store and load the same at every step."""
        cell, cpu = self.cell, way.cpu or _none
        lengths = (self.full(length) for length in range(cell.prompt, cell.prompt + cell.gen))
        return way.stored, *((way.activations(full), cpu(full)) for full in lengths)

    def predicted_s(self, way: Way) -> float:
        """Seconds of all decoding steps, by the rates."""
        lengths = range(self.cell.prompt, self.cell.prompt + self.cell.gen - 1)
        return sum(
            self.step_s(length, way.activations(self.full(length)))
            if way.cpu is None
            else self.split_s(length, way.cpu(self.full(length)))
            for length in lengths
        )

    def split_s(self, length: int, cpu_tokens: int) -> float:
        """As `step_s`, the CPU attending to so many tokens of each sequence."""
        full = self.full(length)
        step_s = split_s(self.rates, self.cell.batch, full, cpu_tokens)
        link_s = self.rates.load.seconds(self.cell.batch * (full - cpu_tokens))
        return self.cell.batches * (step_s + self.rates.serial_share * min(link_s, step_s))

    def step_s(self, length: int, activations: int) -> float:
        """Seconds of a step behind `length` tokens a sequence, so many of them from activations.

        Row by row each batch goes through all layers for itself, and of its shorter resource one
        layer's share is not hidden. Column by column the weights serve all batches, and the
        pipeline runs through from batch to batch.
        """
        cell, rates = self.cell, self.rates
        column = cell.order == "column"
        gpu_s = rates.decode_s(cell.batch, length, max(0, activations))[1]
        moved = self.full(length) - activations + rates.activation_ratio * activations
        link_s = rates.load.seconds(cell.batch * moved) if activations >= 0 else 0.0
        weights_s = rates.weights_load_s / (cell.batches if column else 1)
        each_s = max(link_s + (weights_s if self._weight_bytes else 0.0), gpu_s)
        fill_s = rates.serial_share * min(link_s, gpu_s)
        return cell.batches * each_s + (1 if column else cell.batches) * fill_s

    def choice(self) -> str:
        """The policy that the planner would take: the baseline, unless the other is worth it."""
        first = {"row": "kvpr-ahead", "column": "hybrid-planned"}[self.cell.order]
        own = next((n for n in (first, "cpu-ahead") if n in self.cell.policies), "")
        if not own or (own == "cpu-ahead" and attention_refused(self.rates)):
            return BASELINE
        plain_s = self.predicted_s(self.way(BASELINE))
        gain = 1.0 - self.predicted_s(self.way(own)) / plain_s
        return own if gain >= LEAST_GAIN else BASELINE

    def full(self, length: int) -> int:
        """Tokens of a sequence that are in full blocks: those that are in host memory."""
        return length // self._bt * self._bt

    def _mixed(self, name: str) -> Way:
        act, kv = self._target(name)
        if act + kv == 0:
            raise ValueError(f"{name}: the planner found no room for any block")

        def placement(kv_blocks: int, act_blocks: int) -> Kept:
            kind = next_block_type((act, kv), (act_blocks, kv_blocks))
            return ACT_HOST if kind == "act" else KV_HOST

        def activations(full: int) -> int:
            types = block_types((act, kv), full // self._bt)
            return self._bt * sum(kind == "act" for kind in types)

        return Way(placement, activations, note=f"ACT:KV {act}:{kv}")

    def _target(self, name: str) -> tuple[int, int]:
        """(ACT, KV), in any unit."""
        cell, bt, rest = self.cell, self._bt, name.partition("-")[2]
        if rest.isdigit():
            return int(rest), 100 - int(rest)
        if rest == "planned":
            # The split with the shortest predicted step, by trying them all.
            full = self.full(cell.prompt + cell.gen // 2)
            best = min(range(0, full + 1, bt), key=lambda tokens: self.step_s(full, tokens))
            return best // bt, (full - best) // bt
        allocate = {"paper": allocate_paper, "corrected": allocate_corrected}
        if rest not in allocate:
            raise ValueError(f"no policy named {name!r}")
        kv_bytes = cell.sequences * self.full(cell.prompt + cell.gen) * self.rates.kv_bytes
        found = allocate[rest](
            host_cache(
                self.rates, bt, self._weight_bytes + kv_bytes, weight_bytes=self._weight_bytes,
                batch=cell.sequences, context_tokens=cell.prompt,
            )
        )  # fmt: skip
        return found.act_blocks, found.kv_blocks


# Arms ---------------------------------------------------------------------------------------------


def decode_arms(rig: Rig, cell: DecodeCell) -> tuple[list[Arm], dict[str, str]]:
    """An arm per policy and the link alone with the same bytes; and those left out, with why.

    Every run computes its prompts (not timed), then decodes; all policies are exact.
    """
    left_out: dict[str, str] = {}
    weight_bytes = model_bytes(rig.forward.weights) if rig.streamed else 0
    policies = Policies(cell, rig.rates, rig.block_tokens, weight_bytes)
    choice = policies.choice()
    arms = []
    for name in cell.policies:
        if name.startswith("cpu-") and rig.rates.attend is None:
            left_out[name] = attention_refused(rig.rates)
            continue
        way = policies.way(name)
        run, predicted_s = _decoding(rig, policies, way), policies.predicted_s(way)
        arms.append(Arm(name, run, predicted_s, way.note, name == choice, policies.key(way)))
    arms.append(_link_arm(rig, cell))
    return arms, left_out


def _decoding(rig: Rig, policies: Policies, way: Way) -> Callable[[], Sample]:
    cell, full = policies.cell, policies.full
    split = (lambda length: way.activations(full(length))) if way.split else None
    attends = way.cpu
    cpu = (lambda length: attends(full(length))) if attends is not None else None

    def run() -> Sample:
        prompts = rig.prompts(cell.sequences, cell.prompt)
        batches = [prompts[i : i + cell.batch] for i in range(0, cell.sequences, cell.batch)]
        decoder = Decoder(rig.forward, way.placement, order=cell.order, split=split, cpu=cpu)
        try:
            before = rig.timed(lambda: decoder.prefill(batches))
            sample = rig.timed(lambda: [decoder.step() for _ in range(cell.gen - 1)])
            tokens = torch.cat([torch.as_tensor(t) for t in decoder.tokens()])
        finally:
            decoder.close()
        generated = tuple(tokens.flatten().tolist())
        return replace(sample, before_s=before.latency_s, tokens=generated)

    return run


def _link_arm(rig: Rig, cell: DecodeCell) -> Arm:
    """What the first step loads as KV, layer by layer, with nothing else to do."""
    blocks = cell.batch * (cell.prompt // rig.block_tokens)
    host = rig.arena.kv_host
    landing = rig.arena.kv_device.new_empty((2, blocks, *host.shape[2:]))
    copies = _COPY_STEPS * cell.batches

    def copy() -> None:
        for index in range(copies * rig.config.layers):
            source = host[index % rig.config.layers, :blocks]
            # Newer copies come behind older ones.
            rig.mover.h2d([(landing[index % 2], source)])

    predicted_s = copies * rig.rates_alone.load.seconds(blocks * rig.block_tokens)
    return Arm(LINK, lambda: rig.timed(copy), predicted_s)
