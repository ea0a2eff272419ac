"""A sequence moves into a lane: from the device blocks that it was computed in, or from host ones.

From the device, its resident tokens and persistent heads are copied there, its codes are made, and
the blocks that host memory lacks are sent. From host memory (a cached prefix that is not loaded,
segment S) only the resident tokens and the persistent heads cross the link; the codes of its blocks
were made when those were stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.arena import copies
from engine.sparse.gather import Gather, pairs
from engine.sparse.lanes import Lanes
from engine.sparse.view import to_device
from engine.transfer import Event


def open_from_device(
    lanes: Lanes,
    lane: int,
    tokens: int,
    device_blocks: Sequence[int],
    host_blocks: Sequence[int],
    missing: Sequence[int],
) -> Event | None:
    """Move a sequence of so many tokens from its device blocks into a lane.

    Args:
        device_blocks: of all its tokens, in order.
        host_blocks: one for each whole block behind the recent tokens (`Lanes.host_part`).
        missing: indices of those host blocks that do not hold its KV yet.

    Returns:
        The end of the copies to host, before which the device blocks must not be written to and
        the lane not be used; None where there is nothing to copy.
    """
    state = lanes.prepare(lane, tokens, host_blocks)
    arena, device = lanes.arena, lanes.arena.device
    block = arena.block_tokens
    mine = to_device(np.array(device_blocks), device)
    resident = lanes.resident(state)
    every = torch.arange(tokens, device=device)
    named = to_device(np.array(host_blocks, np.int64), device)
    for layer in range(lanes.config.layers):
        pool = arena.kv_device[layer]

        def rows(positions: Tensor, which: int, pool: Tensor = pool) -> Tensor:
            return pool[mine[positions // block], which, positions % block]

        if len(lanes.offloaded[layer]):
            lanes.fill(lane, layer, resident, rows(resident, 0), rows(resident, 1))
            lanes.hash_blocks(layer, named, pool[mine[: len(named)], 0])
        if len(lanes.persistent[layer]):
            lanes.fill_persistent(lane, layer, rows(every, 0), rows(every, 1))
    if not missing:
        return None
    targets = [host_blocks[index] for index in missing]
    sources = [device_blocks[index] for index in missing]
    return lanes.mover.d2h(copies(arena, "kv", "host", targets, sources))


def open_from_host(lanes: Lanes, lane: int, blocks: Sequence[int]) -> None:
    """A lane for a prefix of whole blocks that are in host memory, and stay there.

    Raises:
        TransferFailed: what has to be on the device did not arrive; the lane is to be closed.
    """
    size = lanes.arena.block_tokens
    tokens = len(blocks) * size
    state = lanes.prepare(lane, tokens, blocks[: lanes.host_part(tokens) // size])
    device = lanes.arena.device
    named = to_device(np.array(blocks), device)
    resident, every = lanes.resident(state), torch.arange(tokens, device=device)
    gathers = []
    for layer in range(lanes.config.layers):
        for heads, positions in (
            (lanes.offloaded[layer], resident), (lanes.persistent[layer], every),
        ):  # fmt: skip
            gathers.append(_gather(lanes, layer, named, heads, positions))
    wanted = pairs([one for one in gathers if one.rows.numel()])
    # Behind the computation of which rows, and the last use of the memory that they land in.
    lanes.mover.wait(lanes.mover.h2d(wanted, lanes.mover.mark()))
    for layer in range(lanes.config.layers):
        near, whole = gathers[2 * layer].target, gathers[2 * layer + 1].target
        if near.numel():
            lanes.store[layer][lane][:, :, lanes.layout.slot(resident)] = near
        if whole.numel():
            lanes.full[layer][lane][:, :, :tokens] = whole


def _gather(lanes: Lanes, layer: int, blocks: Tensor, heads: Tensor, positions: Tensor) -> Gather:
    """Keys and values (2, heads, n, d) of some heads' tokens."""
    size = lanes.arena.block_tokens
    keys = lanes.key_rows(blocks[positions // size], positions, heads[:, None])
    rows = torch.stack((keys, keys + lanes.value_step))
    source = lanes.rows(layer)
    target = source.new_empty((*rows.shape, source.shape[1]), device=rows.device)
    wanted = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
    return Gather(target, source, rows, wanted)
