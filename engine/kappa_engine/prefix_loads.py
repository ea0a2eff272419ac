"""Cached prefixes on their way to the device, and what happens when one does not arrive.

Plain KV is loaded beside the iterations of other requests. A plan that computes while it loads, and
any plan while no other request computes, is executed layer by layer in the iteration of the
request's first chunk. A prefix that fails to arrive is computed, and counts as not cached.
"""

from __future__ import annotations

from collections import deque

from kappa.plans.load_plan import LoadPlan
from kappa_engine.block_manager import BlockManager
from kappa_engine.kv_cache import Arena
from kappa_engine.sequence import Sequence
from kappa_engine.transfer import WAIT_S, Event, LinkMover, TransferFailed


class PrefixLoads:
    """Loads of one engine."""

    def __init__(self, arena: Arena, mover: LinkMover, memory: BlockManager) -> None:
        self._arena, self._mover, self._memory = arena, mover, memory
        # Loads so far, and passes over contexts in host memory, that did not arrive; their tokens
        # were computed.
        self.failed_loads = 0
        # Loads beside the iterations, in the order in which they end.
        self._events: dict[Sequence, Event] = {}
        # When the last one ended, or the first of these began.
        self._progress_s = 0.0
        # Requests with a load that waits for an iteration.
        self._within: deque[Sequence] = deque()

    def __len__(self) -> int:
        """Loads beside the iterations."""
        return len(self._events)

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether a request's blocks are being written to beside the iterations."""
        return sequence in self._events

    def start(self, sequence: Sequence, now_s: float, others: bool) -> None:
        """Start to load an admitted request's prefix, or let it come with its first chunk.

        others: other requests compute, and would have to wait for a load in their iteration.
        """
        load = sequence.load
        assert load is not None
        load.started_s = now_s
        if not others or any(segment.kind != "K" for segment in load.plan.segments):
            self._within.append(sequence)
            return
        targets = sequence.device_blocks(load.start, load.stop)
        if not self._events:
            self._progress_s = now_s
        # Behind the computation under way, which may still use the targets for another request.
        copies = self._arena.copies("kv", "device", targets, load.kv)
        self._events[sequence] = self._mover.h2d(copies, self._mover.mark())

    def due(self, budget_tokens: int) -> list[Sequence]:
        """Requests that load their prefix within the next iteration, with their first chunk.

        As many as recompute no more than an iteration's budget; the first one in any case.
        """
        turn: list[Sequence] = []
        while self._within:
            load = self._within[0].load
            # A request that has left has no load any more.
            if load is not None:
                budget_tokens -= load.plan.tokens("R")
                if turn and budget_tokens < 0:
                    break
                turn.append(self._within[0])
            self._within.popleft()
        return turn

    def landed(self, now_s: float) -> list[Sequence]:
        """Requests with a load beside the iterations that ended since the last call, well or not.

        After a failed load the request has no load any more, and its tokens to compute.

        Raises:
            TransferFailed: the link is stuck: none has ended for too long.
        """
        ended = []
        for sequence, event in list(self._events.items()):
            if not event.done():
                if now_s - self._progress_s > WAIT_S:
                    raise TransferFailed(f"no load has ended for {WAIT_S:g} s: the link is stuck")
                break
            self._progress_s = now_s
            del self._events[sequence]
            load = sequence.load
            assert load is not None
            if event.error() is None:
                self.arrived(sequence, now_s - load.started_s)
                self._memory.computed(sequence, load.stop * self._arena.block_tokens)
            else:
                self.failed(sequence)
                sequence.computed_tokens = load.start * self._arena.block_tokens
            ended.append(sequence)
        return ended

    def arrived_together(self, sequences: list[Sequence], seconds: float) -> None:
        """Account for prefixes that came in one iteration, in `seconds` of the link for all."""
        sizes = [self._size_bytes(s.load.plan) for s in sequences if s.load is not None]
        for sequence, size_bytes in zip(sequences, sizes, strict=True):
            self.arrived(sequence, seconds * size_bytes / max(sum(sizes), 1))

    def arrived(self, sequence: Sequence, seconds: float) -> None:
        """Account for a prefix that came, in `seconds` of the link."""
        account, plan = sequence.account, self._memory.end_load(sequence).plan
        account.load_s += seconds
        if account.preemptions:
            return  # its tokens have been counted, by where they came from first
        account.loaded_tokens += plan.tokens("K")
        account.activation_tokens += plan.tokens("A")
        account.recomputed_tokens += plan.tokens("R")
        account.sparse_tokens += plan.tokens("S")
        account.new_tokens -= plan.cached_tokens

    def failed(self, sequence: Sequence) -> None:
        """Account for a prefix that did not come, and will be computed."""
        tokens = self._memory.end_load(sequence).plan.cached_tokens
        self.failed_loads += 1
        if not sequence.account.preemptions:
            sequence.account.recomputed_tokens += tokens
            sequence.account.new_tokens -= tokens

    def rest(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the first load to end; False if there is none."""
        for event in self._events.values():
            event.ended(timeout_s)
            return True
        return False

    def _size_bytes(self, plan: LoadPlan) -> int:
        kv_bytes, act_bytes = self._arena.block_bytes("kv"), self._arena.block_bytes("act")
        size_bytes = plan.tokens("K") * kv_bytes + plan.tokens("A") * act_bytes
        return size_bytes // self._arena.block_tokens
