"""Accounting of VRAM: blocks in use, and blocks declared for growth or reserved.

Blocks are taken as a request grows, but admission must look ahead: each request declares at its
admission the blocks that it will need for decoding (its *reserve*), and the part of all reserves
that is not taken yet is not free for others. A starving request that does not fit gets a
reservation (EASY backfilling, Lifka 1995): until it is admitted, later requests may together hold
only the blocks that it leaves, so it fits once those that ran before are done.

Blocks of a shared prefix are charged to their holders in equal parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from kappa_scheduler.work import Memory, Quote, Work

# Changes of charges: request -> (tenant, blocks).
Changes = dict[Work, tuple[str, float]]


@dataclass(slots=True)
class Hold:
    """The blocks of an admitted request."""

    blocks: int  # of its prompt, shared ones included
    depth: int  # of `blocks`, found and held by others
    reserve: int  # declared for its growth
    key: int  # of the shared prefix (`Quote.shared_key`)
    high: bool  # of high ratio
    reach: int  # of `blocks`, known to lie on the chain that its group shares
    share: float = 0.0  # blocks that it is charged for
    backfilled: bool = False  # admitted behind a reservation


class Ledger:
    """The blocks of one engine: held, reserved for growth, and set aside."""

    def __init__(self) -> None:
        self._holds: dict[Work, Hold] = {}
        self._groups: dict[int, dict[Work, Hold]] = {}
        self.high_blocks = 0
        self.reserved_for: Work | None = None
        self._reserved_blocks = 0
        self._backfilled_blocks = 0

    def __len__(self) -> int:
        return len(self._holds)

    def __contains__(self, work: Work) -> bool:
        return work in self._holds

    def outstanding(self) -> int:
        """Blocks declared and not yet taken."""
        holds = self._holds.items()
        return sum(h.reserve - w.grown_blocks for w, h in holds if h.reserve > w.grown_blocks)

    def free(self, memory: Memory) -> int:
        """Blocks that are neither held nor declared for growth."""
        return memory.available() - self.outstanding()

    def spare(self, memory: Memory) -> int:
        """Blocks that requests behind a reservation may still take; all if there is none."""
        return memory.capacity_blocks - self._reserved_blocks - self._backfilled_blocks

    # -- reservations -------------------------------------------------------------------------

    def reserve(self, work: Work, blocks: int, memory: Memory) -> None:
        """Set blocks aside for a starving request; there is one reservation at a time."""
        self.reserved_for = work
        self._reserved_blocks = min(blocks, memory.capacity_blocks)
        self._backfilled_blocks = 0
        for hold in self._holds.values():
            hold.backfilled = False

    def promised(self, prompt_blocks: int, reserve: int) -> int:
        """The reserve that the request with the reservation may declare, within its blocks."""
        return min(reserve, max(self._reserved_blocks - prompt_blocks, 0))

    def unreserve(self) -> None:
        """End the reservation: its request was admitted, or is gone."""
        self.reserved_for = None
        self._reserved_blocks = self._backfilled_blocks = 0

    # -- events -------------------------------------------------------------------------------

    def admit(self, work: Work, quote: Quote, blocks: int, reserve: int, high: bool) -> Changes:
        """Record an admission; returns the changed charges: its own, and those of other holders of
        its prefix.

        blocks: of its whole prompt; high: it is of high ratio.
        """
        work.grown_blocks = 0
        depth = min(quote.shared_blocks, blocks)
        # At least the last token of a prompt is computed: its last block is not shared.
        hold = Hold(blocks, depth, reserve, quote.shared_key, high, reach=depth or blocks - 1)
        if work is self.reserved_for:
            self.unreserve()
        hold.backfilled = self.reserved_for is not None
        self._holds[work] = hold
        self._count_held(hold, blocks + reserve)
        if hold.key:
            group = self._groups.setdefault(hold.key, {})
            _extend_chain(group, depth)
            group[work] = hold
        changes = self._split(hold.key)
        if work not in changes:
            hold.share = float(blocks + reserve)
            changes[work] = (work.tenant, hold.share)
        return changes

    def release(self, work: Work) -> Changes:
        """Record that a request's blocks are free; returns the changed charges."""
        hold = self._holds.pop(work)
        self._count_held(hold, -hold.blocks - hold.reserve)
        group = self._groups.get(hold.key, {})
        group.pop(work, None)
        if not group:
            self._groups.pop(hold.key, None)
        return {**self._split(hold.key), work: (work.tenant, -hold.share)}

    def grow(self) -> Changes:
        """Count blocks that requests took beyond their reserve, as if they had declared them."""
        changes: Changes = {}
        for work, hold in self._holds.items():
            over = work.grown_blocks - hold.reserve
            if over > 0:
                hold.reserve += over
                hold.share += over
                self._count_held(hold, over)
                changes[work] = (work.tenant, float(over))
        return changes

    def _count_held(self, hold: Hold, blocks: int) -> None:
        if hold.high:
            self.high_blocks += blocks
        if hold.backfilled and self.reserved_for is not None:
            self._backfilled_blocks += blocks

    def _split(self, key: int) -> Changes:
        """Divide a prefix among its holders, as one chain of blocks of different lengths.

        It counts as shared up to the longest run that any holder found.
        """
        group = self._groups.get(key, {})
        longest = max((hold.depth for hold in group.values()), default=0)
        chain = {work: min(hold.reach, longest) for work, hold in group.items()}
        changes: Changes = {}
        before, paid, left = 0, 0.0, len(group)
        for work in sorted(group, key=lambda w: (chain[w], w.seq)):
            hold, length = group[work], chain[work]
            paid += (length - before) / left
            before, left = length, left - 1
            share = hold.blocks + hold.reserve - length + paid
            if share != hold.share:
                changes[work] = (work.tenant, share - hold.share)
                hold.share = share
        return changes


def _extend_chain(group: dict[Work, Hold], depth: int) -> None:
    """A new holder found `depth` blocks: mark the holder that brought them as reaching that far.

    A request that found nothing brought its whole chain. Else it is the latest that is long enough.
    """
    if max((hold.reach for hold in group.values()), default=depth) >= depth:
        return
    for hold in reversed(group.values()):
        if hold.blocks > depth:
            hold.reach = hold.blocks - 1
            return
