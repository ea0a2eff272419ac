"""The gather on a GPU: one Triton kernel whose loads go to pinned host memory over the link.

A program copies some rows of one head; heads that hit end at once. Rows are of one key or value
(256 bytes at 128 half-precision elements), read whole, so that the link carries full lines. The
kernel runs on the stream that it is launched on and tells the host nothing. Imported only where a
GPU is; refused by name where Triton is not installed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

try:
    # CPU builds of torch have none, so that no type checker finds it there.
    import triton  # type: ignore[import-not-found]
    import triton.language as tl  # type: ignore[import-not-found]
except ImportError:
    triton = None

_ROWS = 16
_KERNEL: Any = None


def available() -> bool:
    """Whether Triton can be imported."""
    return triton is not None


def gather_rows(
    target: Tensor, source: Tensor, rows: Tensor, wanted: Tensor, counted: Tensor | None
) -> None:
    """Copy `source[rows[b, h, j]]` to `target[b, h, j]` for the heads with `wanted[b, h]`.

    Args:
        target: (batch, heads, n, d) on the device, last axis dense.
        source: (rows, d) in pinned host memory (or on the device), contiguous.
        rows: (batch, heads, n) int64 on the device, last axis dense.
        wanted: (batch, heads) bool on the device.
        counted: one int64 on the device, to which the rows that were copied are added; or None.

    Raises:
        RuntimeError: there is no Triton here.
    """
    if triton is None:
        raise RuntimeError(
            "sparse decoding on a GPU gathers with a Triton kernel, and triton is not installed: "
            "install it (it comes with CUDA builds of torch), or set engine.approx to never"
        )
    batch, heads, count, width = target.shape
    if not count or not batch or not heads:
        return
    flags = wanted.contiguous().view(-1)
    grid = (batch * heads, triton.cdiv(count, _ROWS))
    _kernel()[grid](
        target, source, rows, flags, counted if counted is not None else flags,
        heads, count,
        target.stride(0), target.stride(1), target.stride(2),
        rows.stride(0), rows.stride(1),
        WIDTH=width, PADDED=triton.next_power_of_2(width), ROWS=_ROWS,
        COUNT=counted is not None,
    )  # fmt: skip


def _kernel() -> Any:
    """The kernel; made at first use, as its decorator needs Triton."""
    global _KERNEL
    if _KERNEL is None:
        _KERNEL = triton.jit(_gather)
    return _KERNEL


def _gather(
    target, source, rows, flags, counted, heads, count,
    target_batch, target_head, target_row, rows_batch, rows_head,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of one head."""
    which = tl.program_id(0)
    if tl.load(flags + which) == 0:
        return
    batch = (which // heads).to(tl.int64)
    head = (which % heads).to(tl.int64)
    first = tl.program_id(1) * ROWS
    at = first + tl.arange(0, ROWS)
    there = at < count
    row = tl.load(rows + batch * rows_batch + head * rows_head + at, mask=there, other=0)
    column = tl.arange(0, PADDED)
    mask = there[:, None] & (column < WIDTH)[None, :]
    values = tl.load(source + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    place = target + batch * target_batch + head * target_head
    offset = at.to(tl.int64)[:, None] * target_row + column[None, :]
    tl.store(place + offset, values, mask=mask)
    if COUNT:
        tl.atomic_add(counted, tl.sum(there.to(tl.int64)))
