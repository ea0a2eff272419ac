"""A gather of rows from host memory straight to their places on the device, as a copy of a mover.

On a GPU one Triton kernel reads pinned host memory: only the device knows which rows, so the host
neither waits nor gathers. A program copies some rows of one head, and reads nothing for places that
need none. A row is one key or value (256 bytes at 128 half-precision elements), read whole, so that
the link carries full lines. On the CPU it is one plain copy of the rows that are needed, of all
heads. `Gather` passes through `Mover.h2d` like any other copy: counted, ordered by events, failing
or paced as the mover does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

try:
    # CPU builds of torch have none, so that no type checker finds it there.
    import triton  # type: ignore[import-not-found]
    import triton.language as tl  # type: ignore[import-not-found]
except ImportError:
    triton = None

_ROWS = 16
_KERNEL: Any = None


@dataclass(slots=True)
class Gather:
    """A copy of rows of `source` into `target`.

    It stands for a target in `Mover.h2d` (`shape`, `dtype`, `nbytes`, `copy_`).
    """

    # (batch, heads, n, d), perhaps a view with strides; its last axis is dense.
    target: Tensor
    # (rows, d), in host memory.
    source: Tensor
    # The row of `source` for each place (batch, heads, n) int64; below 0 the place is left alone.
    rows: Tensor
    # One int64 to which the kernel adds the rows that it copies, since only the device knows how
    # many; None on the CPU, where `nbytes` says it.
    counted: Tensor | None = None
    # On the CPU: places that get a row, as indices.
    _picked: tuple[Tensor, ...] | None = field(default=None, repr=False)

    @classmethod
    def whole(cls, source: Tensor, rows: Tensor) -> Gather:
        """A gather of all of these rows, into memory of their own."""
        target = source.new_empty((*rows.shape, source.shape[1]), device=rows.device)
        return cls(target, source, rows)

    def __post_init__(self) -> None:
        if self.target.device.type == "cpu":
            self._picked = (self.rows >= 0).nonzero(as_tuple=True)

    @property
    def shape(self) -> torch.Size:
        """The source's shape, since the mover compares both."""
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        """The target's dtype."""
        return self.target.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that are copied; 0 where only the device knows (`counted`)."""
        if self._picked is None:
            return 0
        return len(self._picked[0]) * self.target.shape[3] * self.target.dtype.itemsize

    def copy_(self, source: Tensor, non_blocking: bool = False) -> None:
        """Copy the rows, on the current stream."""
        if self._picked is None:
            gather_rows(self.target, source, self.rows, self.counted)
        elif len(self._picked[0]):
            self.target[self._picked] = source.index_select(0, self.rows[self._picked])


def pairs(gathers: Sequence[Gather]) -> list[tuple[Tensor, Tensor]]:
    """Copies for `LinkMover.h2d`, with a gather in the place of each target tensor."""
    return [(one, one.source) for one in gathers]


def gather_rows(target: Tensor, source: Tensor, rows: Tensor, counted: Tensor | None) -> None:
    """Copy the rows of a `Gather` by the kernel; `source` may lie on the device as well.

    Raises:
        RuntimeError: there is no Triton here.
    """
    global _KERNEL
    if triton is None:
        raise RuntimeError(
            "sparse decoding on a GPU gathers with a Triton kernel, and triton is not installed: "
            "install it (it comes with CUDA builds of torch), or set engine.approx to never"
        )
    batch, heads, count, width = target.shape
    if not count or not batch or not heads:
        return
    # At first use, as its decorator needs Triton.
    _KERNEL = _KERNEL or triton.jit(_gather)
    _KERNEL[batch * heads, triton.cdiv(count, _ROWS)](
        target, source, rows, counted if counted is not None else rows,
        heads, count,
        target.stride(0), target.stride(1), target.stride(2),
        rows.stride(0), rows.stride(1),
        WIDTH=width, PADDED=triton.next_power_of_2(width), ROWS=_ROWS,
        COUNT=counted is not None,
    )  # fmt: skip


def _gather(  # type: ignore[no-untyped-def]  # Triton reads the annotations
    target, source, rows, counted, heads, count,
    target_batch, target_head, target_row, rows_batch, rows_head,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The kernel: each program copies ROWS rows of one head."""
    which = tl.program_id(0)
    batch = (which // heads).to(tl.int64)
    head = (which % heads).to(tl.int64)
    first = tl.program_id(1) * ROWS
    at = first + tl.arange(0, ROWS)
    there = at < count
    row = tl.load(rows + batch * rows_batch + head * rows_head + at, mask=there, other=-1)
    there = row >= 0
    column = tl.arange(0, PADDED)
    mask = there[:, None] & (column < WIDTH)[None, :]
    values = tl.load(source + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    place = target + batch * target_batch + head * target_head
    offset = at.to(tl.int64)[:, None] * target_row + column[None, :]
    tl.store(place + offset, values, mask=mask)
    if COUNT:
        tl.atomic_add(counted, tl.sum(there.to(tl.int64)))
