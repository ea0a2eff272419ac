"""The model runner: one iteration's chunks through the model, with the loads that belong to them.

Chunks and loads go through the model together. If a load fails, the chunks that wait for one run
again one by one, so that only the prefix that does not arrive is computed from its tokens. If a
context in host memory cannot cross the link, the CPU attends to the whole context, or it is
computed from its tokens for that step. Contexts that cross at every step go in mini-batches that
the two buffers of a layer hold.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from kappa.plans.cpu_offload import Division
from kappa.plans.hybridserve import Blocks, pack
from kappa.plans.planners import Planning
from kappa_engine.host_store import HostStore
from kappa_engine.prefix_loads import PrefixLoads
from kappa_engine.sequence import HostResident, Sequence
from kappa_engine.settings import EngineOptions
from kappa_engine.step import (
    Pages,
    ServedModel,
    Source,
    StepRow,
    TokenSpan,
    held_spans,
    joined,
    plan_spans,
)
from kappa_engine.transfer import TransferFailed

# With more queries of a sequence, attention on a CPU is bound by its FLOPs: the KV that they need
# crosses the link instead, layer by layer.
_FEW_QUERIES = 4


class Chunk(NamedTuple):
    """Positions [start, stop) of a sequence that an iteration computes; decoding computes one."""

    start: int
    stop: int


Chunks = dict[Sequence, Chunk]
Logits = dict[Sequence, Tensor]


class ModelRunner:
    """Computes the chunks of an iteration together.

    Args:
        loads: is told which prefixes arrived and which did not.
        store: gives blocks to capture activations in.
        planning: says how much of a context comes from activations.
        settings: the token budget, for prefixes that did not arrive, and the blocks of a pass.
    """

    def __init__(
        self, model: ServedModel, loads: PrefixLoads, store: HostStore, planning: Planning,
        settings: EngineOptions,
    ) -> None:  # fmt: skip
        self._model, self._mover = model, model.mover
        self._loads, self._store = loads, store
        self._planning, self._settings = planning, settings
        # The share of contexts that cross at every step that comes from activations.
        self._share = 0.0

    def compute(self, chunks: Chunks) -> Logits:
        """Logits of each chunk's last token, with whatever loads belong to the chunks."""
        loading = [sequence for sequence in chunks if sequence.load is not None]
        if not loading and all(sequence.kept is None for sequence in chunks):
            return self._run(chunks)
        link = self._mover.counters["h2d"]
        self._mover.settle()
        before_s = link.busy_s
        crossing = [len(s.kept.kv) for s in chunks if s.kept is not None and s.kept.split]
        if any(crossing):
            mean_tokens = sum(crossing) * next(iter(chunks)).block_tokens // len(crossing)
            self._share = self._planning.split_share(len(crossing), mean_tokens)
        try:
            logits = self._run(*self._mini_batches(chunks), division=self._division(chunks))
            self._mover.mark().block()
        except TransferFailed:
            return self._one_by_one(chunks)
        self._mover.settle()
        if loading:
            self._loads.arrived_together(loading, link.busy_s - before_s)
        return logits

    def _one_by_one(self, chunks: Chunks) -> Logits:
        """Compute again after a failure, so that only what does not arrive is recomputed."""
        logits, others = Logits(), dict(chunks)
        for sequence, chunk in chunks.items():
            if sequence.load is None and sequence.kept is None:
                continue
            del others[sequence]
            try:
                logits |= self._run({sequence: chunk})
                self._mover.mark().block()
                if sequence.load is not None:
                    self._loads.arrived_together([sequence], 0.0)
            except TransferFailed:
                logits |= self._without_link(sequence, chunk)
        return logits | (self._run(others) if others else {})

    def _without_link(self, sequence: Sequence, chunk: Chunk) -> Logits:
        """Compute a chunk after its transfers failed: the tokens of its load first; the CPU attends
        to the context that should have crossed."""
        load, kept = sequence.load, sequence.kept
        if kept is not None and kept.crosses:
            self._loads.failed_loads += 1
            if kept.grows:
                # Host memory still has it, and the link may work for the next token.
                row = self._row(sequence, *chunk, recompute=True)
                return {sequence: self._model.compute([row])[0]}
            kept.crosses = False
        if load is not None:
            self._loads.failed(sequence)
            most = self._settings.budget_tokens
            for start in range(load.start * sequence.block_tokens, chunk.start, most):
                self._run({sequence: Chunk(start, min(start + most, chunk.start))})
        return self._run({sequence: chunk})

    def _run(self, *batches: Chunks, division: Division | None = None) -> Logits:
        rows = ([self._row(s, *chunk) for s, chunk in chunks.items()] for chunks in batches)
        logits = self._model.compute(*rows, division=division)
        return dict(zip((s for chunks in batches for s in chunks), logits, strict=True))

    def _division(self, chunks: Chunks) -> Division | None:
        """What the CPU computes of a step in which all requests leave it their attention and have
        few queries (paper 002); None: no more than that."""
        few = all(chunk.stop - chunk.start <= _FEW_QUERIES for chunk in chunks.values())
        if not few or any(sequence.resides != "host-cpu" for sequence in chunks):
            return None
        tokens = sum(len(s.kept.kv) * s.block_tokens for s in chunks if s.kept is not None)
        return self._planning.division(len(chunks), tokens // len(chunks))

    def _mini_batches(self, chunks: Chunks) -> list[Chunks]:
        """Mini-batches of chunks: the contexts that cross in each fit the buffers of a layer, and
        take as long to project as to load (paper 003, Section 4.3.3)."""
        most, rates = self._settings.pass_blocks, self._planning.rates
        kept = {s: s.kept for s in chunks if s.kept is not None and s.kept.grows}
        blocks = {s: self._crossing(one) for s, one in kept.items() if not one.cpu_tokens}
        if sum(each.act + each.kv for each in blocks.values()) <= most or rates is None:
            return [chunks]
        caps = Blocks(*(max(most, *each) for each in zip(*blocks.values(), strict=True)))
        sequences = list(blocks)
        size = sequences[0].block_tokens
        project, load = (line.scaled(size) for line in (rates.project, rates.load))
        batches = [
            {sequences[i]: chunks[sequences[i]] for i in batch}
            for batch in pack(list(blocks.values()), caps, project, load, rates.weights_s)
        ]
        # Chunks with all their context on the device go with the first.
        batches[0] |= {s: chunk for s, chunk in chunks.items() if s not in blocks}
        return batches

    def _crossing(self, kept: HostResident) -> Blocks:
        """Blocks of a context that come as activations and as KV."""
        kv, act, here = kept.kv >= 0, kept.act >= 0, kept.here >= 0
        split = round(self._share * len(kv)) if kept.split else 0
        first = np.arange(len(kv)) < split
        # Those on the device do not cross, but their KV takes a buffer's room, too.
        projected = here | (act & (first | ~kv))
        return Blocks(int(projected.sum()), int((kv & ~projected).sum()))

    def _row(
        self, sequence: Sequence, start: int, stop: int, *, recompute: bool = False
    ) -> StepRow:
        """A chunk as a row of a step, behind the prefix that is loaded.

        recompute: compute all tokens before it instead, for this step alone.
        """
        size, pages = sequence.block_tokens, Pages(sequence.blocks)
        if recompute:
            # Other sequences may hold the blocks before it: write to none of them.
            own = sequence.blocks.copy()
            own[: start // size] = -1
            pages = Pages(own)
        for index, block in self._store.capture(sequence, start, stop).items():
            pages.put(index, "act", "device", [block])
        spans, end = list[TokenSpan](), 0
        if (kept := sequence.kept) is not None:
            pages.put(0, "kv", "host", kept.kv)
            pages.put(0, "act", "host", kept.act)
            if not recompute:
                pages.put(0, "act", "device", kept.here)
            end = len(kept.kv) * size
            few = stop - start <= _FEW_QUERIES
            on_cpu = (kept.cpu_tokens if few else 0) if kept.crosses else end
            split = round(self._share * len(kept.kv)) * size if kept.split else 0
            spans = [*held_spans(pages, end, size, split, on_cpu)]
        if (load := sequence.load) is not None:
            pages.put(load.start, "kv", "host", load.kv)
            pages.put(load.start, "act", "host", load.act)
            first = load.start * size
            spans += [TokenSpan(Source.KV_DEVICE, end, first)]
            spans += plan_spans(load.plan.segments, first)
            end = spans[-1].stop
        spans += [TokenSpan(Source.KV_DEVICE, end, start), TokenSpan(Source.NEW, start, stop)]
        together = joined([TokenSpan(Source.NEW, 0, stop)] if recompute else spans)
        computed = [s for s in together if s.source is Source.NEW]
        tokens = [token for s in computed for token in sequence.tokens[s.start : s.stop]]
        return StepRow(tokens, together, pages)
