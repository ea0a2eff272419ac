"""Which queries of a step are attended to by one call, and where their keys and values are.

A single query (decoding) goes with others of a similar context, padded by less than half; a longer
run (prefill) with those of the same shape, so that causality needs no mask.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.blocks import Ids
from engine.step import Decode, Group, PagedPart, Part

T = TypeVar("T")


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


def decode_groups(decodes: list[Decode], blocks: Ids, block_tokens: int) -> list[Group]:
    """The groups of sequences that decode from device blocks, each from so many."""
    alike = _alike((int(n).bit_length(), row) for row, n in enumerate(blocks))
    return [_decode_group(decodes, np.array(rows), blocks[rows], block_tokens) for rows in alike]


def _decode_group(decodes: list[Decode], rows: Ids, blocks: Ids, block_tokens: int) -> Group:
    most = int(blocks.max())
    table = np.empty((len(rows), most), np.int64)
    for line, row, count in zip(table, rows, blocks, strict=True):
        held = decodes[row].blocks
        line[:count] = held[:count]
        # Whoever has fewer blocks than others here has several, and the first of them is full.
        line[count:] = held[0]
    lengths = np.array([decodes[row].length for row in rows])
    keys = int(lengths.max())
    last = np.arange(len(rows)) * most + blocks - 1
    halves = 2 * torch.from_numpy(table.ravel())
    part = PagedPart(
        block_tokens, halves, halves + 1, keys, torch.from_numpy(last), _unlike(lengths, keys)
    )
    return Group(False, len(rows), 1, torch.from_numpy(rows), [part])


def query_groups(runs: list[Queries]) -> list[Group]:
    """The groups of all other queries of a step."""
    return [_query_group(members) for members in _alike((run.key, run) for run in runs)]


def _query_group(runs: list[Queries]) -> Group:
    count = runs[0].count
    tokens = (np.array([run.first for run in runs])[:, None] + np.arange(count)).ravel()
    both = (_part(True, [run.pool for run in runs]), _part(False, [run.buffer for run in runs]))
    parts = [part for part in both if part is not None]
    return Group(False, len(runs), count, torch.from_numpy(tokens), list(parts), runs[0].on_cpu)


def _part(pool: bool, rows: list[tuple[Ids, Ids]]) -> Part | None:
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
        padded.append(torch.from_numpy(full.ravel()))
    return Part(pool, padded[0], padded[1], keys, _unlike(lengths, keys))


def _unlike(lengths: Ids, keys: int) -> Tensor | None:
    return torch.from_numpy(lengths) if (lengths != keys).any() else None


def _alike(pairs: Iterable[tuple[Hashable, T]]) -> list[list[T]]:
    """Values by key, in the order of the keys."""
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return [groups[key] for key in sorted(groups)]  # type: ignore[type-var]


def is_range(rows: Ids) -> bool:
    """Whether rows are 0, 1, 2, ..."""
    return bool((rows == np.arange(len(rows))).all())
