"""Rows gathered from host memory into their last place on the device, as a copy of a mover.

On a GPU one kernel reads pinned host memory (Triton, `engine.sparse.gather_cuda`): which rows, and
whether a head needs any, is known to the device alone, so the host neither waits nor gathers. On
the CPU it is a plain copy of the heads that need one. `Gather` passes through `Mover.h2d` like any
other copy: counted, ordered by events, failing or paced as the mover does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Gather:
    """A copy of rows of `source` into `target`, for those of its heads that are wanted.

    target (batch, heads, n, d), perhaps a view with strides; its last axis is dense. source (rows,
    d): host memory. rows (batch, heads, n) int64: which row of `source` comes where. wanted (batch,
    heads) bool: heads that are left as they are where False. Stands for a target in `Mover.h2d`
    (`shape`, `dtype`, `nbytes`, `copy_`).

    counted: of the bytes that a device alone knows of, as a tensor of one int64 that the kernel
    adds rows to; None on the CPU, where `nbytes` says it.
    """

    target: Tensor
    source: Tensor
    rows: Tensor
    wanted: Tensor
    counted: Tensor | None = None
    # Of the heads that are wanted, on the CPU: (batch index, head index).
    _picked: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        shape = self.target.shape[:3]
        if self.rows.shape != shape or self.wanted.shape != shape[:2]:
            raise ValueError(
                f"cannot gather rows {tuple(self.rows.shape)} of heads {tuple(self.wanted.shape)} "
                f"to {tuple(self.target.shape)}"
            )
        if self.source.shape[1] != self.target.shape[3] or self.target.stride(3) != 1:
            raise ValueError(
                f"cannot gather rows of {self.source.shape[1]} elements to "
                f"{tuple(self.target.shape)} with strides {self.target.stride()}"
            )
        if self.target.device.type == "cpu":
            batch, head = self.wanted.nonzero(as_tuple=True)
            self._picked = batch, head

    @property
    def shape(self) -> torch.Size:
        """Of the source, as the mover compares them."""
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the target."""
        return self.target.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that are copied; 0 where only the device knows (`counted`)."""
        if self._picked is None:
            return 0
        return len(self._picked[0]) * self.rows.shape[2] * self.target.shape[3] * self._item

    @property
    def _item(self) -> int:
        return self.target.dtype.itemsize

    def copy_(self, source: Tensor, non_blocking: bool = False) -> None:
        """Do it, on the current stream."""
        if self._picked is None:
            from engine.sparse.gather_cuda import gather_rows

            gather_rows(self.target, source, self.rows, self.wanted, self.counted)
            return
        batch, head = self._picked
        if not len(batch):
            return
        wanted = self.rows[batch, head]
        moved = source.index_select(0, wanted.reshape(-1))
        self.target[batch, head] = moved.view(*wanted.shape, -1)


def pairs(gathers: Sequence[Gather]) -> list[tuple[Tensor, Tensor]]:
    """As `Mover.h2d` takes them: a gather stands where a target tensor does."""
    return [(one, one.source) for one in gathers]  # type: ignore[misc]
