"""KV in host memory in 4 bits per element: a quarter of the bytes of half precision, approximate.

Off unless asked for, and `exact` is False. A row of keys or values is cut into groups; each keeps
its least value and the step between its 16 levels, as in FlexGen's group-wise quantisation. Packed
and unpacked on the device; only what crosses the link is small.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.arena import Arena, ArenaTooLarge, free_host_bytes
from engine.host_kv import Pairs
from engine.step import Run

LEVELS = 15


def pack(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes (n, width / 2) uint8, two to a byte; ranges (n, groups, 2), least value and step."""
    grouped = rows.view(len(rows), -1, group)
    least, most = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    step = (most - least) / LEVELS
    # Equal values all have code zero, whatever the step.
    safe = torch.where(step > 0, step, torch.ones_like(step))
    codes = ((grouped - least) / safe).round().clamp(0, LEVELS).to(torch.uint8)
    pairs = codes.view(len(rows), -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4), torch.cat((least, step), dim=-1)


def unpack(codes: Tensor, ranges: Tensor, out: Tensor) -> None:
    """What `pack` made of rows, into `out` (n, width); each off by half a step at most."""
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1)
    grouped = pairs.view(*ranges.shape[:2], -1).to(out.dtype)
    target = out.view(grouped.shape)
    torch.addcmul(ranges[..., :1], grouped, ranges[..., 1:], out=target)


class QuantisedKv:
    """The host blocks of an arena once more, in 4 bits; the arena's own host KV is not used.

    Args:
        arena: whose blocks' ids and shapes these are; `ArenaSize.kv_host` blocks.
        blocks: how many; the arena's own tensor may be of fewer, or of none.
        group: elements that share a range; divides the width of a row.

    Raises:
        ValueError: a group that does not divide a row, or an odd one.
        ArenaTooLarge: more than free host memory, with both numbers.
    """

    exact = False

    def __init__(self, arena: Arena, *, blocks: int | None = None, group: int = 64) -> None:
        shape = arena.shape
        width = shape.kv_heads * shape.head_dim
        if group < 2 or group % 2 or width % group:
            raise ValueError(
                f"groups of {group} elements do not divide keys of {width}: give an even divisor"
            )
        self.group = group
        self.bits = 4 + 2 * 8 * arena.dtype.itemsize / group
        self._block_rows = 2 * arena.block_tokens
        self._width = width
        rows = (arena.size.kv_host if blocks is None else blocks) * self._block_rows
        wanted = int(shape.layers * rows * width * self.bits / 8)
        free = free_host_bytes()
        if wanted > free:
            raise ArenaTooLarge(
                f"4-bit host blocks need {wanted} bytes, but only {free} are free: "
                "give fewer host blocks"
            )
        self._codes = arena.host_zeros((shape.layers, rows, width // 2), torch.uint8)
        self._ranges = arena.host_zeros((shape.layers, rows, width // group, 2), arena.dtype)

    def landing(self, rows: Tensor) -> tuple[Tensor, ...]:
        """New memory for the codes and ranges of that many rows."""
        return tuple(
            torch.empty((len(rows), *host.shape[2:]), dtype=host.dtype, device=rows.device)
            for host in (self._codes, self._ranges)
        )

    def load(self, layer: int, runs: Iterable[Run], landing: tuple[Tensor, ...]) -> Pairs:
        """Two copies per run."""
        size = self._block_rows
        return [
            (target[t * size : (t + n) * size], host[layer, s * size : (s + n) * size])
            for t, s, n in runs
            for target, host in zip(landing, (self._codes, self._ranges), strict=True)
        ]

    def unpack(self, landing: tuple[Tensor, ...], rows: Tensor) -> None:
        """Rows from codes and ranges."""
        codes, ranges = landing
        unpack(codes[: len(rows)], ranges[: len(rows)], rows)

    def store(self, layer: int, runs: Iterable[Run], rows: Tensor) -> tuple[Pairs, list[Tensor]]:
        """Two copies per run, of what is packed first."""
        packed = pack(rows, self.group)
        copies = [
            (host[layer, t : t + n], source[s : s + n])
            for s, t, n in runs
            for source, host in zip(packed, (self._codes, self._ranges), strict=True)
        ]
        return copies, list(packed)
