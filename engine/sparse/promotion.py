"""A sequence moves into a slot: from the device blocks that it was computed in, or from host ones.

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
from engine.sparse.slots import Slots
from engine.sparse.view import to_device
from engine.transfer import Event


def promote_from_device(
    slots: Slots,
    slot: int,
    tokens: int,
    device_blocks: Sequence[int],
    host_blocks: Sequence[int],
    missing: Sequence[int],
) -> Event | None:
    """Move a sequence of so many tokens from its device blocks into a slot.

    Args:
        device_blocks: of all its tokens, in order.
        host_blocks: one for each whole block behind the recent tokens (`Slots.host_part`).
        missing: indices of those host blocks that do not hold its KV yet.

    Returns:
        The end of the copies to host, before which the device blocks must not be written to and
        the slot not be used; None where there is nothing to copy.
    """
    state = slots.prepare(slot, tokens, host_blocks)
    arena, device = slots.arena, slots.arena.device
    block = arena.block_tokens
    mine = to_device(np.array(device_blocks), device)
    resident = slots.resident(state)
    every = torch.arange(tokens, device=device)
    named = to_device(np.array(host_blocks, np.int64), device)
    for layer in range(slots.config.layers):
        pool = arena.kv_device[layer]

        def rows(positions: Tensor, which: int, pool: Tensor = pool) -> Tensor:
            return pool[mine[positions // block], which, positions % block]

        if len(slots.offloaded[layer]):
            slots.fill(slot, layer, resident, rows(resident, 0), rows(resident, 1))
            slots.hash_blocks(layer, named, pool[mine[: len(named)], 0])
        if len(slots.persistent[layer]):
            slots.fill_persistent(slot, layer, rows(every, 0), rows(every, 1))
    if not missing:
        return None
    targets = [host_blocks[index] for index in missing]
    sources = [device_blocks[index] for index in missing]
    return slots.mover.d2h(copies(arena, "kv", "host", targets, sources))


def begin_from_host(slots: Slots, slot: int, blocks: Sequence[int]) -> None:
    """A slot for a prefix of whole blocks that are in host memory, and stay there.

    Raises:
        TransferFailed: what has to be on the device did not arrive; the slot is to be closed.
    """
    size = slots.arena.block_tokens
    tokens = len(blocks) * size
    state = slots.prepare(slot, tokens, blocks[: slots.host_part(tokens) // size])
    device = slots.arena.device
    named = to_device(np.array(blocks), device)
    resident, every = slots.resident(state), torch.arange(tokens, device=device)
    gathers = []
    for layer in range(slots.config.layers):
        for heads, positions in (
            (slots.offloaded[layer], resident), (slots.persistent[layer], every),
        ):  # fmt: skip
            gathers.append(_gather(slots, layer, named, heads, positions))
    wanted = pairs([one for one in gathers if one.rows.numel()])
    # Behind the computation of which rows, and the last use of the memory that they land in.
    slots.mover.wait(slots.mover.h2d(wanted, slots.mover.mark()))
    for layer in range(slots.config.layers):
        near, whole = gathers[2 * layer].target, gathers[2 * layer + 1].target
        if near.numel():
            slots.store[layer][slot][:, :, slots.layout.place(resident)] = near
        if whole.numel():
            slots.full[layer][slot][:, :, :tokens] = whole


def _gather(slots: Slots, layer: int, blocks: Tensor, heads: Tensor, positions: Tensor) -> Gather:
    """Keys and values (2, heads, n, d) of some heads' tokens."""
    size = slots.arena.block_tokens
    keys = slots.key_rows(blocks[positions // size], positions, heads[:, None])
    rows = torch.stack((keys, keys + slots.value_step))
    source = slots.rows(layer)
    target = source.new_empty((*rows.shape, source.shape[1]), device=rows.device)
    wanted = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
    return Gather(target, source, rows, wanted)
