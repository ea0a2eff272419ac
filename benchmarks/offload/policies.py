"""Ways to keep and bring back the cache of decoding sequences, by name, and what each should take.

"kv-only" loads keys and values (the baseline). "kvpr-*" keep activations beside them and split each
context: "paper" as paper 000, "ahead" counting the rest of the step;
"share-N" a fixed split. "hybrid-*" keep a block as one or the other (paper 003): by Algorithm 1,
"corrected", "planned" by the predicted step; "hybrid-N" a share; "activations": nothing else.
"cpu-*": the CPU attends to part of each context where it lies (paper 002): "cpu-N" to a share,
"paper" by bandwidth, "ahead" by the predicted step. "device": nothing leaves the device, a bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.offload.cells import DecodeCell
from benchmarks.offload.decoder import (
    ACT_HOST,
    BOTH_HOST,
    KV_DEVICE,
    KV_HOST,
    Kept,
    Placement,
    Split,
    always,
)
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


@dataclass(frozen=True, slots=True)
class Way:
    """placement, split: as `benchmarks.offload.decoder.Decoder` takes them.

    activations: of so many cached tokens of a sequence, all in full blocks, those that come from
    activations; -1 for a cache that stays on the device. stored: what goes to host memory. cpu: of
    the tokens in full blocks, those that the CPU attends to.
    """

    placement: Placement
    split: Split | None
    activations: Callable[[int], int]
    stored: str
    note: str = ""
    cpu: Callable[[int], int] | None = None


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
        kind, _, rest = name.partition("-")
        if name == BASELINE:
            return Way(always(KV_HOST), None, lambda full: 0, "either")
        if name == "device":
            return Way(always(KV_DEVICE), None, lambda full: -1, "nothing")
        if name == "activations":
            return Way(always(ACT_HOST), None, lambda full: full, "either")
        if kind == "share":
            return self._split(lambda full: int(rest) * full // 100)
        if kind == "kvpr":
            return self._split(self._kvpr(rest))
        if kind == "hybrid":
            return self._mixed(rest)
        if kind == "cpu":
            return self._on_cpu(rest)
        raise ValueError(f"no policy named {name!r}")

    def key(self, way: Way) -> tuple[object, ...]:
        """Equal for ways that store and load the same at every step."""
        lengths = range(self.cell.prompt, self.cell.prompt + self.cell.gen)
        on_cpu = way.cpu or (lambda full: 0)
        return way.stored, *(
            (way.activations(self._full(length)), on_cpu(self._full(length))) for length in lengths
        )

    def predicted_s(self, way: Way) -> float:
        """Seconds of all decoding steps, by the rates."""
        lengths = range(self.cell.prompt, self.cell.prompt + self.cell.gen - 1)
        if way.cpu is not None:
            cpu = way.cpu
            return sum(self.split_s(length, cpu(self._full(length))) for length in lengths)
        return sum(self.step_s(length, way.activations(self._full(length))) for length in lengths)

    def split_s(self, length: int, cpu_tokens: int) -> float:
        """As `step_s`, the CPU attending to so many tokens of each sequence."""
        full = self._full(length)
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
        full = self._full(length)
        gpu_s = rates.decode_s(cell.batch, length, max(0, activations))[1]
        moved = full - activations + rates.activation_ratio * activations
        link_s = rates.load.seconds(cell.batch * moved) if activations >= 0 else 0.0
        shares = cell.batches if cell.order == "column" else 1
        link_all_s = link_s + (rates.weights_load_s / shares if self._weight_bytes else 0.0)
        each_s = max(link_all_s, gpu_s)
        fill_s = rates.serial_share * min(link_s, gpu_s)
        if cell.order == "column":
            return cell.batches * each_s + fill_s
        return cell.batches * (each_s + fill_s)

    def choice(self) -> str:
        """The policy that the planner would take: the baseline, unless the other is worth it."""
        first = {"row": "kvpr-ahead", "column": "hybrid-planned"}[self.cell.order]
        own = next((n for n in (first, "cpu-ahead") if n in self.cell.policies), "")
        if not own or (own == "cpu-ahead" and attention_refused(self.rates)):
            return BASELINE
        plain_s = self.predicted_s(self.way(BASELINE))
        gain = 1.0 - self.predicted_s(self.way(own)) / plain_s
        return own if gain >= LEAST_GAIN else BASELINE

    # -- KVPR -----------------------------------------------------------------------------------

    def _kvpr(self, rest: str) -> Callable[[int], int]:
        cell, rates, bt = self.cell, self.rates, self._bt
        plans: dict[str, Callable[[int], int]] = {
            "paper": lambda full: split_paper(rates, cell.batch, full, bt).tokens,
            "ahead": lambda full: split_ahead(rates, cell.batch, full, bt).tokens,
        }
        if rest not in plans:
            raise ValueError(f"no policy named 'kvpr-{rest}'")
        return plans[rest]

    def _split(self, plan: Callable[[int], int]) -> Way:
        """Planned anew when a context has grown by a block."""
        known: dict[int, int] = {0: 0}

        def activations(full: int) -> int:
            if full not in known:
                known[full] = plan(full)
            return known[full]

        first = self._full(self.cell.prompt)
        note = f"{activations(first)} of {first} tokens from activations at first"
        return Way(
            always(BOTH_HOST),
            lambda length: activations(self._full(length)),
            activations,
            "both",
            note,
        )

    def _best(self, full: int) -> int:
        """The split with the shortest predicted step, by trying them all."""
        splits = range(0, full + 1, self._bt)
        return min(splits, key=lambda tokens: self.step_s(full, tokens))

    # -- the CPU ----------------------------------------------------------------------------------

    def _on_cpu(self, rest: str) -> Way:
        cell, rates, bt = self.cell, self.rates, self._bt
        ways: dict[str, Callable[[int], int]] = {
            "paper": lambda full: round(cpu_share(rates) * full / bt) * bt,
            "ahead": lambda full: split_context(rates, cell.batch, full, bt).tokens,
        }
        if rest.isdigit():
            ways[rest] = lambda full: int(rest) * full // 100 // bt * bt
        if rest not in ways:
            raise ValueError(f"no policy named 'cpu-{rest}'")
        tokens, first = ways[rest], self._full(cell.prompt)
        note = f"{tokens(first)} of {first} tokens attended to on the CPU at first"
        return Way(always(KV_HOST), None, lambda full: 0, "either", note, tokens)

    # -- HybridServe ----------------------------------------------------------------------------

    def _mixed(self, rest: str) -> Way:
        act, kv = self._target(rest)
        if act + kv == 0:
            raise ValueError(f"hybrid-{rest}: the planner found no room for any block")

        def placement(kv_blocks: int, act_blocks: int) -> Kept:
            kind = next_block_type((act, kv), (act_blocks, kv_blocks))
            return ACT_HOST if kind == "act" else KV_HOST

        def activations(full: int) -> int:
            types = block_types((act, kv), full // self._bt)
            return self._bt * sum(kind == "act" for kind in types)

        return Way(placement, None, activations, "either", f"ACT:KV {act}:{kv}")

    def _target(self, rest: str) -> tuple[int, int]:
        """(ACT, KV), in any unit."""
        blocks = self._full(self.cell.prompt + self.cell.gen) // self._bt
        if rest == "planned":
            length = self._full(self.cell.prompt + self.cell.gen // 2)
            act = self._best(length) // self._bt
            return act, length // self._bt - act
        if rest.isdigit():
            return int(rest), 100 - int(rest)
        all_blocks = self.cell.sequences * blocks
        cache = host_cache(
            self.rates, self._bt,
            self._weight_bytes + all_blocks * self._bt * self.rates.kv_bytes,
            weight_bytes=self._weight_bytes, batch=self.cell.sequences,
            context_tokens=self.cell.prompt,
        )  # fmt: skip
        allocate = {"paper": allocate_paper, "corrected": allocate_corrected}
        if rest not in allocate:
            raise ValueError(f"no policy named 'hybrid-{rest}'")
        found = allocate[rest](cache)
        return found.act_blocks, found.kv_blocks

    def _full(self, length: int) -> int:
        """Tokens of a sequence that are in full blocks: those that are in host memory."""
        return length // self._bt * self._bt
