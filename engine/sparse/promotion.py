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

from engine.sparse.gather import Gather, pairs
from engine.sparse.slots import Slots, to_device
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
    arena, device, block = slots.arena, slots.arena.device, slots.arena.block_tokens
    mine = to_device(np.array(device_blocks), device)
    named = to_device(np.array(host_blocks, np.int64), device)
    resident, every = slots.resident(state), torch.arange(tokens, device=device)
    for layer in range(slots.config.layers):
        pool = arena.kv_device[layer].transpose(0, 1)
        if len(slots.offloaded[layer]):
            slots.fill(slot, layer, resident, pool[:, mine[resident // block], resident % block])
            slots.hash_blocks(layer, named, pool[0, mine[: len(named)]])
        if len(slots.persistent[layer]):
            slots.fill_persistent(slot, layer, pool[:, mine[every // block], every % block])
    if not missing:
        return None
    targets = [host_blocks[index] for index in missing]
    sources = [device_blocks[index] for index in missing]
    return slots.mover.d2h(arena.copies("kv", "host", targets, sources))


def begin_from_host(slots: Slots, slot: int, blocks: Sequence[int]) -> None:
    """A slot for a prefix of whole blocks that are in host memory, and stay there.

    Raises:
        TransferFailed: what has to be on the device did not arrive; the slot is to be closed.
    """
    size, device = slots.arena.block_tokens, slots.arena.device
    tokens = len(blocks) * size
    state = slots.prepare(slot, tokens, blocks[: slots.host_part(tokens) // size])
    named = to_device(np.array(blocks), device)
    resident, every = slots.resident(state), torch.arange(tokens, device=device)
    places = slots.layout.place(resident)
    gathers, landed = [], []
    for layer in range(slots.config.layers):
        for heads, positions, target, where in (
            (slots.offloaded[layer], resident, slots.store[layer][slot], places),
            (slots.persistent[layer], every, slots.full[layer][slot], every),
        ):
            if len(heads) and len(positions):
                rows = slots.key_rows(named[positions // size], positions, heads[:, None])
                both = torch.stack((rows, rows + slots.value_step))
                gathers.append(Gather.whole(slots.rows(layer), both))
                landed.append((target, where))
    # Behind the computation of which rows, and the last use of the memory that they land in.
    slots.mover.wait(slots.mover.h2d(pairs(gathers), slots.mover.mark()))
    for gather, (target, where) in zip(gathers, landed, strict=True):
        target[:, :, where] = gather.target
