"""Which queries of a step are attended to by one call, and the rows of their keys and values.

A single query (decoding) goes with others of a similar context, padded by less than half; a longer
run (prefill) with those of the same shape, so that causality needs no mask. Used by `engine.index`,
which sends all index arrays to the device at once: what is made here is completed afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.step import Group, Ids, Part

# What is indexed is known when all is sent: a function of the tensors that were.
Later = Callable[[list[Tensor]], Tensor]
LaterGroup = Callable[[list[Tensor]], Group]
LaterPart = Callable[[list[Tensor]], Part]
Send = Callable[[Ids], Later]


@dataclass(slots=True)
class Queries:
    """A run of one sequence's queries: its first new token, and how many.

    pool, buffer: (K rows, V rows) of all tokens up to the last query, in order of position, but
    for those that the CPU attends to; on_cpu: whether there are such.
    """

    first: int
    count: int
    pool: tuple[Ids, Ids]
    buffer: tuple[Ids, Ids]
    on_cpu: bool = False

    @property
    def key(self) -> tuple[int, ...]:
        """Those with the same key are attended to together."""
        pool, buffer = len(self.pool[0]), len(self.buffer[0])
        if self.count == 1:
            return 1, (pool + buffer).bit_length(), self.on_cpu
        return self.count, pool, buffer, self.on_cpu


def grouped(runs: list[Queries], new_tokens: int, send: Send) -> list[LaterGroup]:
    """The groups of all runs of a step with so many new tokens."""
    alike: dict[tuple[int, ...], list[Queries]] = defaultdict(list)
    for run in runs:
        alike[run.key].append(run)
    return [_group(members, new_tokens, send) for _, members in sorted(alike.items())]


def _group(runs: list[Queries], new_tokens: int, send: Send) -> LaterGroup:
    count = runs[0].count
    tokens = (np.array([run.first for run in runs])[:, None] + np.arange(count)).ravel()
    in_order = len(tokens) == new_tokens and is_range(tokens)
    rows = send(tokens)
    both = (
        _part(True, [run.pool for run in runs], send),
        _part(False, [run.buffer for run in runs], send),
    )
    parts = [part for part in both if part is not None]
    on_cpu = runs[0].on_cpu
    return lambda sent: Group(
        in_order, len(runs), count, rows(sent), [part(sent) for part in parts], on_cpu
    )


def _part(pool: bool, rows: list[tuple[Ids, Ids]], send: Send) -> LaterPart | None:
    lengths = np.array([len(k) for k, _ in rows])
    keys = int(lengths.max())
    if not keys:
        return None
    padded = []
    for which in (0, 1):
        # Padding names a row that is there: what nobody wrote may hold no number.
        full = np.full((len(rows), keys), next(r[which][0] for r in rows if len(r[which])))
        for line, row in zip(full, rows, strict=True):
            line[: len(row[which])] = row[which]
        padded.append(send(full))
    k_rows, v_rows = padded
    if not (lengths != keys).any():
        return lambda sent: Part(pool, k_rows(sent), v_rows(sent), keys, None)
    count = send(lengths)

    def part(sent: list[Tensor]) -> Part:
        upto = count(sent)[:, None]
        visible = torch.arange(keys, device=upto.device) < upto
        return Part(pool, k_rows(sent), v_rows(sent), keys, visible)

    return part


def is_range(rows: Ids) -> bool:
    """Whether rows are 0, 1, 2, ..."""
    return bool((rows == np.arange(len(rows))).all())
