"""What the loop asks the model to compute in one iteration: rows, one per sequence, and the seam.

A row is a run of one sequence's tokens behind those whose KV lies in its blocks already. It is one
token for a request that decodes, a chunk for a prompt. With a load, the cached tokens of the load
are brought back first, as its plan says and layer by layer, into the row's own blocks.
"""

from __future__ import annotations

from collections.abc import Sequence as Run
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from engine.sequence import Kept, Load


@dataclass(slots=True)
class Row:
    """Tokens to compute.

    tokens: of the sequence from its start, up to the last one to compute, cached ones included.
    start: position of the first to compute; KV of those before is in `blocks`, or comes by `load`.
    blocks: device blocks of KV, block i for positions [i·block_tokens, (i+1)·block_tokens); room
    for all of `tokens`. load: covers blocks [load.start, load.stop), and load.stop·block_tokens is
    `start`. act_blocks: device blocks that take the activations of the blocks computed here, by
    block index; a block without one is not captured. kept: what stays in host memory; `blocks` has
    -1 there.
    """

    tokens: list[int]
    start: int
    blocks: list[int]
    load: Load | None = None
    act_blocks: dict[int, int] = field(default_factory=dict)
    kept: Kept | None = None

    @property
    def new_tokens(self) -> int:
        """Tokens to compute."""
        return len(self.tokens) - self.start


class Executor(Protocol):
    """A model with its weights, over one arena and one mover.

    max_tokens: positions that it has; vocab: token ids are below.
    """

    max_tokens: int
    vocab: int

    def run(self, rows: Run[Row]) -> Tensor:
        """Compute all rows, write their KV, return the logits of each one's last token.

        Returns:
            (rows, vocabulary), on the device.

        Raises:
            TransferFailed: a load of one of the rows failed; running the others again is safe.
        """
        ...
