"""One iteration's chunks through the model, with the loads that belong to them.

Chunks and loads go through the model together. If a load fails, the chunks that wait for one go
again, each for itself, so that only the prefix that does not arrive is computed from its tokens.
What stays in host memory and does not cross the link is attended to there, all of it.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from engine.forward import ServedModel
from engine.loads import Loads
from engine.sequence import Sequence
from engine.sparse.serving import SparseServing
from engine.step import Pages, Source, StepRow, TokenSpan, joined, plan_spans
from engine.store import HostStore
from engine.transfer import TransferFailed

# More queries of a sequence make attention on a CPU a matter of its FLOPs: what they need of host
# memory crosses the link instead, layer by layer.
_FEW_QUERIES = 4


class Chunk(NamedTuple):
    """Positions [start, stop) of a sequence that an iteration computes; one of them decodes."""

    start: int
    stop: int


Chunks = dict[Sequence, Chunk]
Logits = dict[Sequence, Tensor]


class Computer:
    """Computes chunks: those of requests that have a sparse slot there, all others together.

    `loads` takes note of what arrived and what did not, `store` gives blocks to capture activations
    in; budget_tokens: of a call, where a prefix has to be computed that did not arrive.

    `sparse`: the slots of sparse decoding, if the engine has any. `lost`: requests whose slot
    failed in the last call; some of them have logits all the same.
    """

    def __init__(
        self, model: ServedModel, loads: Loads, store: HostStore, budget_tokens: int
    ) -> None:
        self._model, self._mover = model, model.mover
        self._loads, self._store, self._budget_tokens = loads, store, budget_tokens
        self.sparse: SparseServing | None = None
        self.lost: list[Sequence] = []

    def compute(self, chunks: Chunks) -> Logits:
        """Logits of each chunk's last token, with whatever loads belong to the chunks."""
        self.lost = []
        here = {s: chunk for s, chunk in chunks.items() if s.slot is None}
        logits = self._compute(here) if here else {}
        if self.sparse is not None and len(here) < len(chunks):
            done = self.sparse.compute({s: c for s, c in chunks.items() if s.slot is not None})
            for sequence, (seconds, size_bytes) in done.begun.items():
                self._loads.arrived(sequence, seconds, size_bytes)
            self.lost = done.lost
            logits |= done.logits
        return logits

    def _compute(self, chunks: Chunks) -> Logits:
        loading = [sequence for sequence in chunks if sequence.load is not None]
        if not loading and all(sequence.kept is None for sequence in chunks):
            return self._run(chunks)
        link = self._mover.counters["h2d"]
        self._mover.settle()
        before_s = link.busy_s
        try:
            logits = self._run(chunks)
            self._mover.mark().block()
        except TransferFailed:
            return self._one_by_one(chunks)
        self._mover.settle()
        if loading:
            self._loads.arrived_together(loading, link.busy_s - before_s)
        return logits

    def _one_by_one(self, chunks: Chunks) -> Logits:
        """After a failure: so that only what does not arrive is computed instead."""
        logits: Logits = {}
        for sequence, chunk in list(chunks.items()):
            if sequence.load is None and sequence.kept is None:
                continue
            del chunks[sequence]
            try:
                logits |= self._run({sequence: chunk})
                self._mover.mark().block()
                if sequence.load is not None:
                    self._loads.arrived_together([sequence], 0.0)
            except TransferFailed:
                logits |= self._without_link(sequence, chunk)
        return logits | (self._run(chunks) if chunks else {})

    def _without_link(self, sequence: Sequence, chunk: Chunk) -> Logits:
        """A chunk whose part of the link failed: compute from tokens what its load should have
        brought, then the chunk; the CPU attends to what should have crossed."""
        load, kept = sequence.load, sequence.kept
        if kept is not None and kept.crosses:
            kept.crosses = False
            self._loads.stays(sequence)
        if load is not None:
            self._loads.failed(sequence)
            most = self._budget_tokens
            for start in range(load.start * sequence.block_tokens, chunk.start, most):
                self._run({sequence: Chunk(start, min(start + most, chunk.start))})
        return self._run({sequence: chunk})

    def _run(self, chunks: Chunks) -> Logits:
        rows = [self._row(sequence, *chunk) for sequence, chunk in chunks.items()]
        logits = self._model.compute(rows)
        return {sequence: logits[index] for index, sequence in enumerate(chunks)}

    def _row(self, sequence: Sequence, start: int, stop: int) -> StepRow:
        """A chunk as part of a step, with what is loaded in front of it."""
        size, pages = sequence.block_tokens, Pages(sequence.blocks)
        for index, block in self._store.capture(sequence, start, stop).items():
            pages.put(index, "act", "device", [block])
        spans, end = list[TokenSpan](), 0
        if (kept := sequence.kept) is not None:
            # What the device has before what stays in host memory, and who attends to that.
            pages.put(kept.start, "kv", "host", kept.blocks)
            first, end = kept.start * size, (kept.start + len(kept.blocks)) * size
            few = stop - start <= _FEW_QUERIES
            cut = first + (kept.cpu_tokens if few else 0) if kept.crosses else end
            spans = [
                TokenSpan(Source.KV_DEVICE, 0, first),
                TokenSpan(Source.KV_CPU, first, cut),
                TokenSpan(Source.KV_HOST, cut, end),
            ]
        if (load := sequence.load) is not None:
            pages.put(load.start, "kv", "host", load.kv)
            pages.put(load.start, "act", "host", load.act)
            first = load.start * size
            spans += [TokenSpan(Source.KV_DEVICE, end, first)]
            spans += plan_spans(load.plan.segments, first)
            end = spans[-1].stop
        spans += [TokenSpan(Source.KV_DEVICE, end, start), TokenSpan(Source.NEW, start, stop)]
        together = joined(spans)
        computed = [s for s in together if s.source is Source.NEW]
        tokens = [token for s in computed for token in sequence.tokens[s.start : s.stop]]
        return StepRow(tokens, together, pages)
