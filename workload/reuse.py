"""What an unlimited cache would hold of each prompt, sessions played one after the other.

The expectation that the load test compares an endpoint's cache with, and the engine's view in the
analysis of a workload. Blocks of the cache may be smaller than those of the workload.
"""

from __future__ import annotations

from workload.prompts import prompt_ids
from workload.shapes import BlockIds, SessionShape

ENGINE_BLOCK_TOKENS = 16
"""Tokens in a cache block of vLLM unless told otherwise."""


class Reuse:
    """A cache that keeps everything: how many tokens of a prompt it holds, in full blocks.

    Args:
        source_block_tokens: of the workload, whose block ids tell what is shared.
        block_tokens: of the cache.
        outputs_kept: whether prompts find the blocks of earlier answers.
    """

    def __init__(self, source_block_tokens: int, block_tokens: int, *, outputs_kept: bool) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}: give at least 1")
        self._source_block_tokens = source_block_tokens
        self._block_tokens = block_tokens
        self._outputs_kept = outputs_kept
        self._seen: set[int] = set()
        self._parts: dict[int, int] = {}  # id of a block that a prompt fills in part -> how far

    def cached_tokens(self, session: SessionShape, turn: int) -> int:
        """Tokens held of the turn's prompt; an engine computes the last one in any case."""
        shape = session.turns[turn]
        size = self._source_block_tokens
        blocks = matched_blocks(shape.blocks, self._seen)
        shared = blocks * size
        document = session.document_tokens
        if blocks and blocks == document // size:
            shared = document  # beyond the last full block, ids cannot tell
        elif self._parts:
            shared += self._parts.get(int(prompt_ids(session, turn)[blocks]), 0)
        usable = min(shared, shape.input_tokens - 1)
        return usable // self._block_tokens * self._block_tokens

    def note(self, session: SessionShape, turn: int) -> None:
        """Keep what the turn leaves."""
        shape = session.turns[turn]
        self._seen.update((shape.kept_blocks if self._outputs_kept else shape.blocks).tolist())
        rest = shape.input_tokens % self._source_block_tokens
        if self._outputs_kept or self._source_block_tokens == self._block_tokens:
            return  # what is behind the prompt is not known, or never a full block
        part = int(prompt_ids(session, turn)[-1])
        self._parts[part] = max(rest, self._parts.get(part, 0))


def matched_blocks(blocks: BlockIds, seen: set[int]) -> int:
    """How many blocks from the start are in `seen`, which holds whole prefixes only."""
    least, most = 0, len(blocks)
    while least < most:
        middle = (least + most + 1) // 2
        if int(blocks[middle - 1]) in seen:
            least = middle
        else:
            most = middle - 1
    return least
