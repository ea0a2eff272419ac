"""Context that stays in host memory, where the CPU attends to it: which blocks, for which queries.

Made once per step by `engine.index`, used by every layer through `engine.cpu_attention`. Whole
blocks, and of a sequence's last one its front; all of them come before whatever is computed, so
that every query sees every key and no mask is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int64]


@dataclass(slots=True)
class HostContext:
    """Context of one sequence that the CPU attends to, and the queries that see it.

    first, queries: of the new tokens that have any such context, in their order. blocks: of host
    memory, each once, in any order: no query comes before them. last: the one that is not full,
    or -1, and how many tokens it holds.
    """

    first: int
    queries: int
    blocks: Ids
    last: int = -1
    last_tokens: int = 0

    @property
    def full(self) -> Ids:
        """The blocks that are full."""
        return self.blocks[self.blocks != self.last]


@dataclass(slots=True)
class OnCpu:
    """What of a step the CPU attends to. rows: which of the step's tokens its queries are."""

    rows: Tensor
    queries: int
    contexts: list[HostContext]


class NotWhole(ValueError):
    """Tokens that the CPU cannot attend to as they lie. token: the first of them."""

    def __init__(self, token: int) -> None:
        super().__init__(f"token {token}: the CPU attends to whole blocks, and to the front of one")
        self.token = token


def host_context(
    blocks: Ids, offsets: Ids, block_tokens: int, first: int, queries: int
) -> HostContext:
    """The context of one sequence. blocks, offsets (tokens,): where each of its tokens lies.

    Raises:
        NotWhole: tokens that are not the front of their block, or several ragged blocks.
    """
    unique, counts = np.unique(blocks, return_counts=True)
    short = np.flatnonzero(counts < block_tokens)
    if not len(short):
        return HostContext(first, queries, unique)
    last = int(unique[short[0]])
    held = np.flatnonzero(blocks == last)
    if len(short) > 1 or int(offsets[held].max()) >= len(held):
        raise NotWhole(int(held[0]))
    return HostContext(first, queries, unique, last, len(held))
