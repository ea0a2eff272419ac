"""Sparse decoding in an engine: which requests have a slot, and the passes over the slots.

A request that may be answered approximately is computed like any other until its first token; then
it moves into a slot, its device blocks are free for others, and it decodes sparsely. A prefix in
host memory need not be loaded at all (segment S): the request begins in a slot. KV computed in a
slot is never published. Where there is no slot or no host block, or a copy fails, the request is
computed exactly; its account says how many of its tokens were approximate.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kappa.plans.clo import persistent_share, sparse_plan
from kappa.plans.load_plan import LoadPlan, Segment
from kappa_engine.approximate import SlotPass
from kappa_engine.block_manager import BlockManager
from kappa_engine.block_pool import OutOfBlocks
from kappa_engine.host_store import HostStore
from kappa_engine.prefix_cache import BlockKey
from kappa_engine.sequence import Load, Sequence
from kappa_engine.sparse.forward import SparseForward
from kappa_engine.sparse.gather_kernel import Gather, pairs
from kappa_engine.sparse.slots import Slot, Slots, to_device
from kappa_engine.transfer import Event, TransferFailed
from kappa_scheduler.work import Quote, Work

# Unless the request names the plan, its prefix stays in host memory only if that lowers the
# predicted TTFT by this share.
_LEAST_GAIN = 0.1


class SparseServing:
    """A `kappa_engine.approximate.ApproximateDecoder`: the slots of one engine, over its blocks."""

    planner = "sparse"

    def __init__(self, sparse: SparseForward, blocks: BlockManager, store: HostStore) -> None:
        self.slots = slots = sparse.slots
        self._sparse, self._blocks, self._store = sparse, blocks, store
        self._device, self._host = blocks.device, blocks.host["kv"]
        store.copied = self.hash_stored
        self.block_tokens = blocks.block_tokens
        self._free = list(range(slots.settings.slots))
        # Host blocks of the prefixes of requests that begin in a slot, until it is opened.
        self._unopened: dict[Sequence, list[int]] = {}
        # The key that each host block has codes of, by its digest.
        self._coded: dict[int, bytes] = {}
        persistent = tuple(tuple(heads.tolist()) for heads in slots.persistent)
        self._persistent = persistent_share(slots.config.shape, persistent)

    def __len__(self) -> int:
        """Slots in use."""
        return len(self.slots.states) - len(self._free)

    def hash_stored(self, keys: Iterable[BlockKey], device: list[int], host: list[int]) -> None:
        """Make the codes of full blocks that are being copied to host memory from the device."""
        arena = self.slots.arena
        mine, named = (to_device(np.array(blocks), arena.device) for blocks in (device, host))
        for layer in range(self.slots.config.layers):
            self.slots.hash_blocks(layer, named, arena.kv_device[layer][mine, 0])
        self._coded.update(zip(host, (key.digest for key in keys), strict=True))

    # -- the scheduler's view: blocks, or a slot -----------------------------------------------

    @property
    def version(self) -> int:
        """The block manager's version, which also rises when a slot is given back."""
        return self._blocks.version

    @property
    def capacity_blocks(self) -> int:
        return self._blocks.capacity_blocks

    def available(self) -> int:
        return self._blocks.available()

    def quote(self, work: Work) -> Quote | None:
        return self._blocks.quoted(work, self._look)

    def take(self, work: Work, quote: Quote) -> Quote | None:
        assert isinstance(work, Sequence)
        work.host_stop, work.quoted = 0, None
        plan = self._plan(work)
        if plan is None:
            return self._blocks.take(work, quote)
        keys = work.keys[: plan.cached_tokens // self.block_tokens]
        work.blocks, work.published, work.keeps = np.empty(0, np.int64), 0, None
        work.slot = heapq.heappop(self._free)
        self._unopened[work] = self._host.hold(keys)
        work.load = Load(0, len(keys), plan, self._host.hold(keys), [-1] * len(keys))
        return self._quote(work, plan)

    def _look(self, sequence: Sequence) -> Quote | None:
        plan = self._plan(sequence)
        return self._blocks.look(sequence) if plan is None else self._quote(sequence, plan)

    def _quote(self, sequence: Sequence, plan: LoadPlan) -> Quote:
        blocks = -(-sequence.total_tokens // self.block_tokens)
        return Quote(0, 0, plan.cached_tokens, 0, sequence.first_key, blocks)

    def _plan(self, sequence: Sequence) -> LoadPlan | None:
        """The plan that leaves all of a prefix in host memory; None to load it.

        Only where a slot is free, the request will fit it, and host memory has each block as KV
        with its code; and only if it was asked for by name, or is predicted to be faster.
        """
        loading = self._blocks.loading(sequence) if sequence.approx and self._free else None
        if loading is None:
            return None
        slots, planner, rates = self.slots, sequence.request.planner, self._blocks.planning.rates
        named, cached_tokens = planner == self.planner, loading.stop * self.block_tokens
        if not self._fits(sequence, cached_tokens):
            return None
        if not named and (rates is None or planner not in (None, "auto")):
            return None
        for key in sequence.keys[: loading.stop]:
            block = self._host.find(key)
            if block is None or (slots.hasher and self._coded.get(block) != key.digest):
                return None
        if rates is None:
            segments = (Segment("S", 0, cached_tokens),)
            return LoadPlan(segments, exact=False, why="as the request asked")
        new_tokens = sequence.total_tokens - cached_tokens
        plan = sparse_plan(rates, slots.settings, self._persistent, cached_tokens, new_tokens)
        slow = plan.ttft_s > (1.0 - _LEAST_GAIN) * loading.plan.ttft_s
        # Many new tokens would be attended to in part as well.
        short = cached_tokens < new_tokens
        return None if (slow or short) and not named else plan

    # -- after its first token ----------------------------------------------------------------

    def promote(self, sequence: Sequence) -> bool:
        """Move a request that has its first token into a slot, if there is one and it is worth it.

        A request with blocks on their way to host memory is not moved before they have arrived.
        """
        # The CPU attends to a context that stays in host memory.
        if not sequence.approx or sequence.slot is not None or sequence.kept is not None:
            return False
        # Its latest token is not computed yet.
        tokens = len(sequence.tokens) - 1
        host_tokens = self.slots.host_part(tokens)
        short = host_tokens <= self.slots.layout.sinks
        if not self._free or short or not self._fits(sequence, 0):
            return False
        keys = sequence.keys[: host_tokens // self.block_tokens]
        found = [index for index, key in enumerate(keys) if self._host.find(key) is not None]
        missing = sorted(set(range(len(keys))) - set(found))
        if not all(self._store.wants("kv", keys[index]) for index in missing):
            return False
        # A host block for each key, held or taken.
        held = self._host.hold([keys[index] for index in found])
        taken = self._take_blocks(len(missing))
        if taken is None:
            self._host.release(held)
            return False
        blocks = dict(zip((*found, *missing), (*held, *taken), strict=True))
        host = [blocks[index] for index in range(len(keys))]
        mine = sequence.device_blocks()
        sequence.slot = heapq.heappop(self._free)
        copied = promote_from_device(self.slots, sequence.slot, tokens, mine, host, missing)
        if copied is not None:
            try:
                self.slots.mover.wait(copied)
            except TransferFailed:
                self.expel(sequence)
                return False
        self._device.release(mine)
        sequence.blocks = np.empty(0, np.int64)
        return True

    # -- an iteration -------------------------------------------------------------------------

    def compute(self, chunks: Mapping[Sequence, tuple[int, int]]) -> SlotPass:
        """Compute positions [start, stop) of each request; those that decode, together."""
        done = SlotPass()
        single: dict[Sequence, int] = {}
        for sequence, (start, stop) in chunks.items():
            if stop - start == 1 and sequence not in self._unopened:
                single[sequence] = start
            else:
                self._attempt(done, [sequence], partial(self._chunk, sequence, start, stop))
        if single:
            self._attempt(done, list(single), partial(self._single, single))
        done.lost += [s for s in chunks if self._state(s).stuck and s not in done.lost]
        return done

    def expel(self, sequence: Sequence) -> None:
        """Take a request's slot for good: it is computed exactly from now on."""
        sequence.approx = False
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free the slot, if any, of a request that is over, or begins again."""
        slot, sequence.slot = sequence.slot, None
        if slot is None:
            return
        held = self._unopened.pop(sequence, None)
        opened = self.slots.close(slot)
        self._host.release(held if held is not None else opened)
        heapq.heappush(self._free, slot)

    # -- inside -------------------------------------------------------------------------------

    def _state(self, sequence: Sequence) -> Slot:
        assert sequence.slot is not None
        return self.slots.states[sequence.slot]

    def _fits(self, sequence: Sequence, cached_tokens: int) -> bool:
        """Whether a slot holds a request to its end, and its prefix has tokens to choose from."""
        slots, longest = self.slots, sequence.prompt_tokens + sequence.max_tokens
        leaves = not cached_tokens or slots.host_part(cached_tokens) > slots.layout.sinks
        return leaves and longest <= slots.settings.max_tokens

    def _take_blocks(self, count: int) -> list[int] | None:
        """Allocate host blocks without codes, for tokens no longer recent; None: too few."""
        try:
            taken = self._host.take(count)
        except OutOfBlocks:
            return None
        for block in taken:
            self._coded.pop(block, None)
        return taken

    def _attempt(
        self, done: SlotPass, sequences: list[Sequence], run: Callable[[], dict[Sequence, Tensor]]
    ) -> None:
        mover = self.slots.mover
        opening = [one for one in sequences if one in self._unopened]
        link = mover.counters["h2d"]
        mover.settle()
        before_s = link.busy_s
        try:
            done.logits.update(run())
            if opening:
                mover.mark().block()
                mover.settle()
                done.begun.update(dict.fromkeys(opening, link.busy_s - before_s))
        except TransferFailed:
            done.lost += sequences
            # Gathers begun ahead must end before their memory is used for other requests.
            mover.drain()

    def _single(self, at: Mapping[Sequence, int]) -> dict[Sequence, Tensor]:
        """Compute one token of each request, together."""
        slots = {one: one.slot for one in at if one.slot is not None}
        order = sorted(slots, key=slots.__getitem__)
        tokens = [[one.tokens[at[one]]] for one in order]
        logits = self._run([slots[one] for one in order], tokens)
        return {one: logits[index] for index, one in enumerate(order)}

    def _chunk(self, sequence: Sequence, start: int, stop: int) -> dict[Sequence, Tensor]:
        slot, blocks = sequence.slot, self._unopened.get(sequence)
        assert slot is not None
        if blocks is not None:
            begin_from_host(self.slots, slot, blocks)
            # The others are in the slot's own places.
            self._host.release(blocks[len(self.slots.states[slot].blocks) :])
            del self._unopened[sequence]
        most = self.slots.settings.chunk_tokens
        for first in range(start, stop, most):
            logits = self._run([slot], [sequence.tokens[first : min(first + most, stop)]])
        return {sequence: logits[0]}

    def _run(self, slots: list[int], tokens: list[list[int]]) -> Tensor:
        sent = to_device(np.array(tokens, np.int64), self.slots.arena.device)
        return self._sparse.run(slots, sent, self._take_block)

    def _take_block(self) -> int | None:
        taken = self._take_blocks(1)
        return taken[0] if taken else None


# -- into a slot ---------------------------------------------------------------------------------


def promote_from_device(
    slots: Slots, slot: int, tokens: int, device_blocks: list[int], host_blocks: list[int],
    missing: list[int],
) -> Event | None:  # fmt: skip
    """Move a sequence of `tokens` tokens from its device blocks into a slot: copy its resident
    tokens and persistent heads, make its codes, send the blocks that host memory lacks.

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


def begin_from_host(slots: Slots, slot: int, blocks: list[int]) -> None:
    """Open a slot for a prefix of whole blocks that stay in host memory: the resident tokens and
    persistent heads cross the link; codes were made when the blocks were stored.

    Raises:
        TransferFailed: they did not arrive; the slot is to be closed.
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
    # Behind the computation of the rows' indices, and the last use of the memory they land in.
    slots.mover.wait(slots.mover.h2d(pairs(gathers), slots.mover.mark()))
    for gather, (target, where) in zip(gathers, landed, strict=True):
        target[:, :, where] = gather.target
