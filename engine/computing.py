"""One iteration's rows through the model, the loads that belong to them, and the next tokens.

Rows and loads go through the model together. If a load fails, the rows that wait for one go again,
each for itself, so that only the prefix that does not arrive is computed from its tokens. What
stays in host memory and does not cross the link is attended to there, all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Run
from dataclasses import replace

import torch
from torch import Tensor

from engine.forward import Forward
from engine.loads import Loads
from engine.prefill import Row, compute_rows
from engine.sampling import sample
from engine.sequence import Load, Sequence
from engine.sparse.serving import SparseServing
from engine.transfer import TransferFailed


class Computer:
    """Computes rows: those of requests that have a lane there, all others together.

    Args:
        forward: the model.
        loads: told which arrived, and which did not.
        row_of: the row of so many tokens of a sequence, from a position on.
        budget_tokens: of a call, where a prefix has to be computed that did not arrive.

    `sparse`: the lanes, if the engine has any. `lost`: requests whose lane failed in the last call;
    some of them have logits all the same.
    """

    def __init__(
        self,
        forward: Forward,
        loads: Loads,
        row_of: Callable[[Sequence, int, int], Row],
        budget_tokens: int,
    ) -> None:
        self._forward = forward
        self._mover = forward.mover
        self._loads = loads
        self._row_of = row_of
        self._budget_tokens = budget_tokens
        self.sparse: SparseServing | None = None
        self.lost: list[Sequence] = []

    def compute(self, rows: dict[Sequence, Row]) -> dict[Sequence, Tensor]:
        """Logits of each row's last token, with whatever loads belong to the rows."""
        self.lost = []
        apart = {s: row for s, row in rows.items() if self.sparse is not None and s in self.sparse}
        here = {s: row for s, row in rows.items() if s not in apart}
        logits = self._compute(here) if here else {}
        return {**logits, **(self._in_lanes(apart) if apart else {})}

    def _in_lanes(self, rows: dict[Sequence, Row]) -> dict[Sequence, Tensor]:
        assert self.sparse is not None
        done = self.sparse.compute({s: (row.start, row.new_tokens) for s, row in rows.items()})
        for sequence, (seconds, size_bytes) in done.begun.items():
            self._loads.arrived(sequence, seconds, size_bytes)
        self.lost = done.lost
        return done.logits

    def _compute(self, rows: dict[Sequence, Row]) -> dict[Sequence, Tensor]:
        loading = [sequence for sequence, row in rows.items() if row.load is not None]
        if not loading and all(row.kept is None for row in rows.values()):
            return self._run(rows)
        link = self._mover.counters["h2d"]
        self._mover.settle()
        before_s = link.busy_s
        try:
            logits = self._run(rows)
            self._mover.mark().block()
        except TransferFailed:
            return self._apart(rows)
        self._mover.settle()
        if loading:
            self._loads.arrived_together(loading, link.busy_s - before_s)
        return logits

    def _apart(self, rows: dict[Sequence, Row]) -> dict[Sequence, Tensor]:
        """After a failure: row by row, so that only what does not arrive is computed instead."""
        logits: dict[Sequence, Tensor] = {}
        for sequence, row in list(rows.items()):
            if row.load is None and row.kept is None:
                continue
            del rows[sequence]
            try:
                logits.update(self._run({sequence: row}))
                self._mover.mark().block()
                if row.load is not None:
                    self._loads.arrived_together([sequence], 0.0)
            except TransferFailed:
                logits.update(self._without(sequence, row))
        return {**logits, **(self._run(rows) if rows else {})}

    def _without(self, sequence: Sequence, row: Row) -> dict[Sequence, Tensor]:
        """A row whose part of the link failed."""
        if row.kept is not None and row.kept.crosses:
            row.kept.crosses = False
            self._loads.stays(sequence)
        if row.load is None:
            return self._run({sequence: row})
        self._loads.failed(sequence)
        return self._instead(sequence, row, row.load)

    def _instead(self, sequence: Sequence, row: Row, load: Load) -> dict[Sequence, Tensor]:
        """Compute from tokens what a row's load should have brought, then the row."""
        most = self._budget_tokens
        for start in range(load.start * load.block_tokens, row.start, most):
            self._run({sequence: self._row_of(sequence, start, min(most, row.start - start))})
        new = row.tokens[row.start - row.first :]
        return self._run({sequence: replace(row, tokens=new, load=None)})

    def _run(self, rows: dict[Sequence, Row]) -> dict[Sequence, Tensor]:
        logits = compute_rows(self._forward, list(rows.values()))
        return {sequence: logits[index] for index, sequence in enumerate(rows)}


def sample_each(logits: Mapping[Sequence, Tensor], sequences: Run[Sequence]) -> list[int]:
    """The next token of each sequence, from its logits."""
    if not sequences:
        return []
    rows = torch.stack([logits[s] for s in sequences])
    return sample(rows, [s.sampling for s in sequences], [s.rng for s in sequences])
