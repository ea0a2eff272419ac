"""How KV lies in host memory: as it is, or in another form that is made on the device.

`engine.forward` copies the blocks of a step through one of these. `PlainKv` moves the arena's own
blocks and changes nothing; `engine.quantised` moves fewer bytes and is approximate. All shapes are
of one layer: `rows` (n, kv_width) hold a block as its keys, then its values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from engine.arena import Arena
from engine.step import Run

Pairs = list[tuple[Tensor, Tensor]]  # targets and sources


class HostKv(Protocol):
    """KV in host memory. exact: whether it comes back as it was; bits: per element."""

    exact: bool
    bits: float

    def landing(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Where loaded blocks land, for as many blocks as `rows` hold."""
        ...

    def load(self, layer: int, runs: Iterable[Run], landing: tuple[Tensor, ...]) -> Pairs:
        """Copies that bring blocks (first of the landing, host block, how many)."""
        ...

    def unpack(self, landing: tuple[Tensor, ...], rows: Tensor) -> None:
        """Make the rows of the blocks that have landed."""
        ...

    def store(self, layer: int, runs: Iterable[Run], rows: Tensor) -> tuple[Pairs, list[Tensor]]:
        """Copies of `rows` to host rows (first row, host row, how many); what must stay until then.

        Host row b·2·block_tokens + i is row i of block b.
        """
        ...


class PlainKv:
    """The arena's host blocks, as they are."""

    exact = True

    def __init__(self, arena: Arena) -> None:
        self.bits = 8.0 * arena.dtype.itemsize
        self._host = arena.kv_host
        self._block_shape = arena.kv_block_shape
        self._width = arena.shape.kv_heads * arena.shape.head_dim

    def landing(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The rows themselves."""
        block_rows = self._block_shape[0] * self._block_shape[1]
        whole = len(rows) // block_rows * block_rows
        return (rows[:whole].view(-1, *self._block_shape),)

    def load(self, layer: int, runs: Iterable[Run], landing: tuple[Tensor, ...]) -> Pairs:
        """One copy per run."""
        host = self._host[layer]
        return [(landing[0][t : t + n], host[s : s + n]) for t, s, n in runs]

    def unpack(self, landing: tuple[Tensor, ...], rows: Tensor) -> None:
        """Nothing: they have landed where they belong."""

    def store(self, layer: int, runs: Iterable[Run], rows: Tensor) -> tuple[Pairs, list[Tensor]]:
        """One copy per run."""
        host = self._host[layer].view(-1, self._width)
        return [(host[t : t + n], rows[s : s + n]) for s, t, n in runs], [rows]
