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
from torch import Tensor

from engine.blocks import OutOfBlocks
from engine.prefix import BlockKey, PrefixPool
from engine.sequence import EngineRequest, Load, Sequence
from engine.sparse.forward import SparseForward
from engine.sparse.promotion import begin_from_host, promote_from_device
from engine.sparse.view import to_device
from engine.transfer import TransferFailed
from kappa.plans.clo import persistent_share, sparse_plan
from kappa.plans.load_plan import LoadPlan, Segment
from kappa.plans.planners import Cached, Planning
from kappa.plans.rates import PlanRates

SPARSE = "sparse"
"""The name of the plan that leaves a prefix in host memory."""


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
class Done:
    """What a round of sparse passes gave: logits of each request's last token; those that cannot go
    on in their slot; and of those that began, seconds of link and bytes."""

    logits: dict[Sequence, Tensor] = field(default_factory=dict)
    lost: list[Sequence] = field(default_factory=list)
    begun: dict[Sequence, tuple[float, int]] = field(default_factory=dict)


def check_planner(request: EngineRequest, places: bool, planning: Planning) -> None:
    """Do nothing for a request whose planner there is, and a place if it may be approximate.

    Raises:
        ValueError: there is none; says which planners there are, or what a place needs.
    """
    if request.approx and not places:
        raise ValueError(
            "approximate answers were asked of an engine without slots for them: set engine.approx"
        )
    if not (request.approx and request.planner == SPARSE):
        planning.check(request.planner)


# A prefix stays in host memory unasked only if that is predicted to be so much faster.
_LEAST_GAIN = 0.1


class SparseServing:
    """The slots of one engine and who has them.

    Args:
        sparse: the model over the slots.
        device, host: the caches of KV blocks.
        stored: whether a block is in host memory, or on its way there.
    """

    def __init__(
        self,
        sparse: SparseForward,
        device: PrefixPool,
        host: PrefixPool,
        stored: Callable[[BlockKey], bool],
    ) -> None:
        self.counts = SparseCounts()
        self.slots = sparse.slots
        self._sparse = sparse
        self._device, self._host = device, host
        self._stored = stored
        self._free = list(range(self.slots.settings.slots))
        self._slot: dict[Sequence, int] = {}
        # Of those that begin in a slot: host blocks of their prefix, until it is opened.
        self._unopened: dict[Sequence, list[int]] = {}
        # Whose codes were made for which host block.
        self._coded: dict[int, bytes] = {}
        persistent = tuple(tuple(heads.tolist()) for heads in self.slots.persistent)
        self._persistent = persistent_share(self.slots.config.shape, persistent)

    def __contains__(self, sequence: object) -> bool:
        """Whether a request has a slot."""
        return sequence in self._slot

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._slot)

    def to_dict(self) -> dict[str, Any]:
        """Counts so far, ready for JSON."""
        cache = asdict(self._sparse.cache.counts())
        return {**asdict(self.counts), **cache, "slots": len(self)}

    # -- codes --------------------------------------------------------------------------------

    def store(self, keys: Iterable[BlockKey], device: list[int], host: list[int]) -> None:
        """Full blocks are being copied to host memory: make their codes, while they are here."""
        place = self.slots.arena.device
        mine, named = (to_device(np.array(blocks), place) for blocks in (device, host))
        for layer in range(self.slots.config.layers):
            self.slots.hash_blocks(layer, named, self.slots.arena.kv_device[layer][mine, 0])
        self._coded.update(zip(host, (key.digest for key in keys), strict=True))

    # -- a prefix that stays in host memory ---------------------------------------------------

    def plan(
        self, sequence: Sequence, asked: Cached, exact: LoadPlan | None, rates: PlanRates | None
    ) -> LoadPlan | None:
        """The plan that leaves all of a prefix in host memory; None to load it, as `exact` says.

        Only where a slot is free, the request will fit it, and host memory has each block as KV
        with its code; and only if it was asked for by name, or is predicted to be faster.

        Args:
            asked: the prefix from the sequence's start on, wherever it is found.
            exact: what would be done otherwise.
            rates: to predict with; None: by name only.
        """
        named = sequence.request.planner == SPARSE
        blocks = asked.cached // self._block
        if not sequence.approx or not self._free or not self._fits(sequence, asked.cached):
            return None
        if sequence.request.planner not in (None, "auto", SPARSE) or not (named or rates):
            return None
        if not all(self._usable(key) for key in sequence.keys[:blocks]):
            return None
        if rates is None:
            segments = (Segment("S", 0, asked.cached),)
            return LoadPlan(segments, exact=False, why="as the request asked")
        plan = sparse_plan(
            rates, self.slots.settings.clo, self._persistent, asked.cached, asked.new,
            self.slots.settings.chunk_tokens,
        )  # fmt: skip
        slow = exact is not None and plan.ttft_s > (1.0 - _LEAST_GAIN) * exact.ttft_s
        # What is new, and long, would be attended to in part as well.
        short = asked.cached < asked.new
        return None if (slow or short) and not named else plan

    def reserve(self, sequence: Sequence, plan: LoadPlan) -> Load:
        """Take a slot for a request that begins in it; its load, with the host blocks held."""
        keys = sequence.keys[: plan.cached_tokens // self._block]
        self._slot[sequence] = heapq.heappop(self._free)
        self._unopened[sequence] = self._host.hold(keys)
        held = self._host.hold(keys)
        return Load(0, len(keys), plan, held, [-1] * len(keys), self._block)

    # -- after its first token ----------------------------------------------------------------

    def promote(self, sequence: Sequence) -> bool:
        """Move a request that has its first token into a slot, if there is one and it is worth it.

        Waits, by saying no, until the blocks that are on their way to host memory have arrived.
        """
        # Its latest token is not computed yet.
        tokens = len(sequence.tokens) - 1
        host_tokens = self.slots.host_part(tokens)
        if not sequence.approx or sequence in self._slot or not self._free:
            return False
        if sequence.kept is not None:
            # The CPU attends to what it left in host memory.
            return False
        if host_tokens <= self.slots.layout.sinks or not self._fits(sequence, 0):
            return False
        keys = sequence.keys[: host_tokens // self._block]
        if any(self._host.find(key) is None and self._stored(key) for key in keys):
            return False
        blocks, missing = self._host_blocks(keys)
        if blocks is None:
            return False
        mine = sequence.table.blocks()
        slot = self._slot[sequence] = heapq.heappop(self._free)
        copied = promote_from_device(self.slots, slot, tokens, mine, blocks, missing)
        if copied is not None:
            try:
                self.slots.mover.wait(copied)
            except TransferFailed:
                self.counts.failed += 1
                self.expel(sequence)
                return False
        self.counts.moved += 1
        self._device.release(mine)
        sequence.table.clear()
        return True

    # -- an iteration -------------------------------------------------------------------------

    def compute(self, rows: Mapping[Sequence, tuple[int, int]]) -> Done:
        """Compute (first, how many) tokens of each; those that decode, one each, together."""
        done = Done()
        single: dict[Sequence, int] = {}
        for sequence, (start, new) in rows.items():
            if new == 1 and sequence not in self._unopened:
                single[sequence] = start
                continue
            self._attempt(done, [sequence], partial(self._chunk, sequence, new, start))
        if single:
            self._attempt(done, list(single), partial(self._single, single))
        stuck = [s for s in rows if self.slots.states[self._slot[s]].stuck and s not in done.lost]
        done.lost += stuck
        return done

    def expel(self, sequence: Sequence) -> None:
        """It gives its slot back and is not computed sparsely any more."""
        sequence.approx = False
        self.counts.expelled += 1
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """It is over, or begins again: its slot is free."""
        slot = self._slot.pop(sequence, None)
        if slot is None:
            return
        held = self._unopened.pop(sequence, None)
        opened = self.slots.close(slot)
        self._host.release(held if held is not None else opened)
        heapq.heappush(self._free, slot)

    # -- inside -------------------------------------------------------------------------------

    @property
    def _block(self) -> int:
        return self.slots.arena.block_tokens

    def _fits(self, sequence: Sequence, cached_tokens: int) -> bool:
        """Whether a slot holds it to its end, and its prefix leaves something to choose from."""
        longest = sequence.prompt_tokens + sequence.max_tokens
        within = longest <= self.slots.settings.max_tokens
        return within and (
            not cached_tokens or self.slots.host_part(cached_tokens) > self.slots.layout.sinks
        )

    def _usable(self, key: BlockKey) -> bool:
        block = self._host.find(key)
        if block is None:
            return False
        return self.slots.hasher is None or self._coded.get(block) == key.digest

    def _host_blocks(self, keys: list[BlockKey]) -> tuple[list[int] | None, list[int]]:
        """A host block for each key, held or taken, and the indices of those without its KV."""
        found = [index for index, key in enumerate(keys) if self._host.find(key) is not None]
        held = dict(zip(found, self._host.hold([keys[i] for i in found]), strict=True))
        missing = [index for index in range(len(keys)) if index not in held]
        try:
            taken = self._host.take(len(missing))
        except OutOfBlocks:
            self._host.release(list(held.values()))
            return None, []
        for block in taken:
            self._coded.pop(block, None)
        blocks = {**held, **dict(zip(missing, taken, strict=True))}
        return [blocks[index] for index in range(len(keys))], missing

    def _take_block(self, slot: int) -> int | None:
        try:
            (block,) = self._host.take(1)
        except OutOfBlocks:
            return None
        self._coded.pop(block, None)
        return block

    def _attempt(
        self, done: Done, sequences: list[Sequence], run: Callable[[], dict[Sequence, Tensor]]
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
        order = sorted(at, key=lambda one: self._slot[one])
        tokens = [[one.tokens[at[one]]] for one in order]
        logits = self._run([self._slot[one] for one in order], tokens)
        return {one: logits[index] for index, one in enumerate(order)}

    def _chunk(self, sequence: Sequence, new: int, context: int) -> dict[Sequence, Tensor]:
        slot = self._slot[sequence]
        blocks = self._unopened.get(sequence)
        if blocks is not None:
            begin_from_host(self.slots, slot, blocks)
            named = self.slots.states[slot].blocks
            # The others are in the slot's own places.
            self._host.release(blocks[len(named) :])
            del self._unopened[sequence]
            self.counts.begun += 1
        most = self.slots.settings.chunk_tokens
        for start in range(context, context + new, most):
            part = sequence.tokens[start : min(start + most, context + new)]
            logits = self._run([slot], [part])
        return {sequence: logits[0]}

    def _run(self, slots: list[int], tokens: list[list[int]]) -> Tensor:
        if any(self.slots.states[slot].stuck for slot in slots):
            raise TransferFailed("there was no host block for tokens that are no longer recent")
        self.counts.tokens += sum(map(len, tokens))
        sent = to_device(np.array(tokens, np.int64), self.slots.arena.device)
        return self._sparse.run(slots, sent, self._take_block)
