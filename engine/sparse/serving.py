"""Requests of an engine that may be answered approximately, and the slots that they decode in.

Such a request is computed like any other until its first token; then it moves into a slot, its
device blocks are free for others, and it decodes sparsely. A prefix that is in host memory need not
be loaded at all (segment S): the request begins in a slot. KV computed so is nobody else's and is
never published. Where there is no slot or no host block, or a copy fails, the request is computed
exactly; how many of its tokens were approximate is in its account.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.block_pool import OutOfBlocks
from engine.prefix_cache import BlockKey, PrefixPool
from engine.sequence import Load, Sequence
from engine.sparse.forward import SparseForward
from engine.sparse.gather_kernel import Gather, pairs
from engine.sparse.slots import Slot, Slots, to_device
from engine.transfer import Event, TransferFailed
from kappa.plans.clo import persistent_share, sparse_plan
from kappa.plans.load_plan import LoadPlan, Segment
from kappa.plans.planners import Cached
from kappa.plans.rates import PlanRates

SPARSE = "sparse"
"""The name of the plan that leaves a prefix in host memory."""
# A prefix stays in host memory unasked only if that is predicted to be so much faster.
_LEAST_GAIN = 0.1


@dataclass(slots=True)
class SparseCounts:
    """Requests that moved into a slot, that began in one, and that had to leave one; tokens that
    were computed sparsely; passes that failed."""

    moved: int = 0
    begun: int = 0
    expelled: int = 0
    tokens: int = 0
    failed: int = 0


@dataclass(slots=True)
class SparsePass:
    """What a round of sparse passes gave: logits of each request's last token; those that cannot go
    on in their slot; and of those that began, seconds of link and bytes."""

    logits: dict[Sequence, Tensor] = field(default_factory=dict)
    lost: list[Sequence] = field(default_factory=list)
    begun: dict[Sequence, tuple[float, int]] = field(default_factory=dict)


class SparseServing:
    """The slots of one engine; who has which is `Sequence.slot`. device, host: caches of KV blocks;
    stored: whether a block is in host memory, or on its way there."""

    def __init__(
        self, sparse: SparseForward, device: PrefixPool, host: PrefixPool,
        stored: Callable[[BlockKey], bool],
    ) -> None:  # fmt: skip
        self.counts = SparseCounts()
        self.slots = slots = sparse.slots
        self._sparse, self._device, self._host, self._stored = sparse, device, host, stored
        self._block = slots.arena.block_tokens
        self._free = list(range(slots.settings.slots))
        # Of those that begin in a slot: host blocks of their prefix, until it is opened.
        self._unopened: dict[Sequence, list[int]] = {}
        # Whose codes were made for which host block.
        self._coded: dict[int, bytes] = {}
        persistent = tuple(tuple(heads.tolist()) for heads in slots.persistent)
        self._persistent = persistent_share(slots.config.shape, persistent)

    def __len__(self) -> int:
        """Slots in use."""
        return len(self.slots.states) - len(self._free)

    def to_dict(self) -> dict[str, Any]:
        """Counts so far, ready for JSON."""
        cache = asdict(self._sparse.cache.counts())
        return {**asdict(self.counts), **cache, "slots": len(self)}

    def store(self, keys: Iterable[BlockKey], device: list[int], host: list[int]) -> None:
        """Full blocks are being copied to host memory: make their codes, while they are here."""
        arena = self.slots.arena
        mine, named = (to_device(np.array(blocks), arena.device) for blocks in (device, host))
        for layer in range(self.slots.config.layers):
            self.slots.hash_blocks(layer, named, arena.kv_device[layer][mine, 0])
        self._coded.update(zip(host, (key.digest for key in keys), strict=True))

    # -- a prefix that stays in host memory ---------------------------------------------------

    def plan(
        self, sequence: Sequence, cached: Cached, exact: LoadPlan, rates: PlanRates | None
    ) -> LoadPlan | None:
        """The plan that leaves all of a prefix in host memory; None to load it, as `exact` says.

        Only where a slot is free, the request will fit it, and host memory has each block as KV
        with its code; and only if it was asked for by name, or is predicted to be faster.

        Args:
            cached: the prefix from the sequence's start on, wherever it is found.
            exact: what would be done otherwise.
            rates: to predict with; None: by name only.
        """
        slots, planner = self.slots, sequence.request.planner
        named = planner == SPARSE
        if not sequence.approx or not self._free or not self._fits(sequence, cached.cached):
            return None
        if not named and (rates is None or planner not in (None, "auto")):
            return None
        for key in sequence.keys[: cached.cached // self._block]:
            block = self._host.find(key)
            if block is None or (slots.hasher and self._coded.get(block) != key.digest):
                return None
        if rates is None:
            segments = (Segment("S", 0, cached.cached),)
            return LoadPlan(segments, exact=False, why="as the request asked")
        plan = sparse_plan(
            rates, slots.settings.clo, self._persistent, cached.cached, cached.new,
            slots.settings.chunk_tokens,
        )  # fmt: skip
        slow = plan.ttft_s > (1.0 - _LEAST_GAIN) * exact.ttft_s
        # What is new, and long, would be attended to in part as well.
        short = cached.cached < cached.new
        return None if (slow or short) and not named else plan

    def reserve(self, sequence: Sequence, plan: LoadPlan) -> Load:
        """Take a slot for a request that begins in it; its load, with the host blocks held."""
        keys = sequence.keys[: plan.cached_tokens // self._block]
        sequence.slot = heapq.heappop(self._free)
        self._unopened[sequence] = self._host.hold(keys)
        return Load(0, len(keys), plan, self._host.hold(keys), [-1] * len(keys))

    # -- after its first token ----------------------------------------------------------------

    def promote(self, sequence: Sequence) -> bool:
        """Move a request that has its first token into a slot, if there is one and it is worth it.

        Waits, by saying no, until the blocks that are on their way to host memory have arrived.
        """
        # Of what stays in host memory, the CPU attends to its part.
        if not sequence.approx or sequence.slot is not None or sequence.kept is not None:
            return False
        # Its latest token is not computed yet.
        tokens = len(sequence.tokens) - 1
        host_tokens = self.slots.host_part(tokens)
        short = host_tokens <= self.slots.layout.sinks
        if not self._free or short or not self._fits(sequence, 0):
            return False
        keys = sequence.keys[: host_tokens // self._block]
        found = [index for index, key in enumerate(keys) if self._host.find(key) is not None]
        missing = sorted(set(range(len(keys))) - set(found))
        if any(self._stored(keys[index]) for index in missing):
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
                self.counts.failed += 1
                self.expel(sequence)
                return False
        self.counts.moved += 1
        self._device.release(mine)
        sequence.blocks = np.empty(0, np.int64)
        return True

    # -- an iteration -------------------------------------------------------------------------

    def compute(self, chunks: Mapping[Sequence, tuple[int, int]]) -> SparsePass:
        """Compute positions [start, stop) of each; those that decode, one each, together."""
        done = SparsePass()
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
        """It gives its slot back and is not computed sparsely any more."""
        sequence.approx = False
        self.counts.expelled += 1
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """It is over, or begins again: its slot is free."""
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
        """Whether a slot holds it to its end, and its prefix leaves something to choose from."""
        slots, longest = self.slots, sequence.prompt_tokens + sequence.max_tokens
        leaves = not cached_tokens or slots.host_part(cached_tokens) > slots.layout.sinks
        return leaves and longest <= slots.settings.max_tokens

    def _take_blocks(self, count: int) -> list[int] | None:
        """Host blocks for what is no longer recent, whose codes are nobody's; None: too few."""
        try:
            taken = self._host.take(count)
        except OutOfBlocks:
            return None
        for block in taken:
            self._coded.pop(block, None)
        return taken

    def _attempt(
        self, done: SparsePass, sequences: list[Sequence], run: Callable[[], dict[Sequence, Tensor]]
    ) -> None:
        mover = self.slots.mover
        opening = [one for one in sequences if one in self._unopened]
        link = mover.counters["h2d"]
        mover.settle()
        before_s, before_bytes = link.busy_s, link.copied_bytes
        try:
            done.logits.update(run())
            if opening:
                mover.mark().block()
                mover.settle()
                moved = link.busy_s - before_s, link.copied_bytes - before_bytes
                done.begun.update(dict.fromkeys(opening, moved))
        except TransferFailed:
            self.counts.failed += 1
            done.lost += sequences
            # Gathers begun ahead must end before what they read and write is another's.
            mover.drain()

    def _single(self, at: Mapping[Sequence, int]) -> dict[Sequence, Tensor]:
        """One token of each, together."""
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
            self.counts.begun += 1
        most = self.slots.settings.chunk_tokens
        for first in range(start, stop, most):
            logits = self._run([slot], [sequence.tokens[first : min(first + most, stop)]])
        return {sequence: logits[0]}

    def _run(self, slots: list[int], tokens: list[list[int]]) -> Tensor:
        sent = to_device(np.array(tokens, np.int64), self.slots.arena.device)
        logits = self._sparse.run(slots, sent, self._take_block)
        self.counts.tokens += sent.numel()
        return logits

    def _take_block(self) -> int | None:
        taken = self._take_blocks(1)
        return taken[0] if taken else None


# -- into a slot ---------------------------------------------------------------------------------


def promote_from_device(
    slots: Slots, slot: int, tokens: int, device_blocks: list[int], host_blocks: list[int],
    missing: list[int],
) -> Event | None:  # fmt: skip
    """Move a sequence of so many tokens from its device blocks into a slot: its resident tokens and
    persistent heads are copied, its codes are made, the blocks that host memory lacks are sent.

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
    """A slot for a prefix of whole blocks that are in host memory, and stay there: the resident
    tokens and persistent heads cross the link; codes were made when the blocks were stored.

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
