"""A KV cache of one tier as a prefix tree of runs, evicted least recently used first.

Block ids are chained over the prefix, so two prompts that agree on one id agree on all before it.
Blocks that are always used together are kept as one run (a slice of an id array), which makes every
operation cost a few steps per run instead of one per block. A run in use is pinned, with all before
it; unpinned runs wait for eviction in the order of their last use, tails before heads, as in vLLM:
its blocks return to the free list in reverse order when a request ends.

Copies of what another node holds too are evicted before anything else, so that they never push out
the only copy of something.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class PrefixRun:
    """Blocks `ids[start:stop]`; `start` is also the number of blocks before it in the prefix.

    copy: another node holds them too, or did when they came; so is then all that follows them.
    """

    ids: Ids
    start: int
    stop: int
    parent: PrefixRun | None
    pins: int
    copy: bool = False
    children: int = 0


def common_blocks(a: Ids, b: Ids, low: int, high: int) -> int:
    """How many leading blocks `a` and `b` share, known to be between `low` and `high`."""
    if a is b:
        return high
    return bisect_left(range(high), True, low, high, key=lambda at: a.item(at) != b.item(at))


class TierCache:
    """Blocks held in one tier. `blocks` counts them, `pinned` those that may not be evicted.

    `spare` counts the copies that may: evicting them loses nothing.
    """

    __slots__ = ("_copies", "_idle", "_runs", "blocks", "pinned", "spare")

    def __init__(self) -> None:
        self._runs: dict[int, PrefixRun] = {}
        self._idle: OrderedDict[PrefixRun, None] = OrderedDict()
        self._copies: OrderedDict[PrefixRun, None] = OrderedDict()
        self.blocks = 0
        self.pinned = 0
        self.spare = 0

    def held(self) -> list[Ids]:
        """All blocks, run by run."""
        return [run.ids[run.start : run.stop] for run in self._runs.values()]

    def match(
        self, ids: Ids, limit: int, run: PrefixRun | None = None, start: int = 0
    ) -> tuple[PrefixRun | None, int]:
        """Longest held prefix of `ids[:limit]`: the run it ends in, perhaps inside, and its length.

        `run` and `start`, if given, are a match already known to go on from.
        """
        runs, at, last = self._runs, start, run
        while at < limit:
            found = runs.get(ids.item(at))
            if found is None:
                break
            end = found.stop
            if end > limit:
                end = limit
            other = found.ids
            if other is not ids and other.item(end - 1) != ids.item(end - 1):
                end = common_blocks(other, ids, at + 1, end - 1)
            last, at = found, end
            if end < found.stop:
                break
        return last, at

    def unpinned(self, run: PrefixRun | None, length: int) -> int:
        """Blocks of the prefix of `length` ending in `run` that no one has pinned."""
        while run is not None and not run.pins:
            run = run.parent
        if run is None:
            return length
        return max(length - run.stop, 0)

    def pin(
        self, run: PrefixRun | None, length: int, upto: PrefixRun | None = None
    ) -> PrefixRun | None:
        """Pin the first `length` blocks of a match that ends in `run`, down to (without) `upto`.

        Returns the run that ends at `length`: the handle for `unpin`.
        """
        if run is None:
            return None
        if length < run.stop:
            run = self._split(run, length)
        at: PrefixRun | None = run
        idle = self._idle
        while at is not None and at is not upto:
            if not at.pins:
                if at.copy:
                    del self._copies[at]
                    self.spare -= at.stop - at.start
                else:
                    del idle[at]
                self.pinned += at.stop - at.start
            at.pins += 1
            at = at.parent
        return run

    def unpin(self, run: PrefixRun | None) -> None:
        """Give back what `pin` or `extend` returned; it counts as used just now."""
        idle = self._idle
        while run is not None:
            run.pins -= 1
            if not run.pins:
                if run.copy:
                    self._copies[run] = None
                    self.spare += run.stop - run.start
                else:
                    idle[run] = None
                self.pinned -= run.stop - run.start
            run = run.parent

    def touch(self, run: PrefixRun | None, length: int) -> None:
        """Count a match as used just now."""
        if run is None:
            return
        if length < run.stop and not run.pins:
            run = self._split(run, length)
        idle = self._idle
        at: PrefixRun | None = run
        while at is not None:
            if not at.pins:
                (self._copies if at.copy else idle).move_to_end(at)
            at = at.parent

    def extend(self, run: PrefixRun | None, ids: Ids, stop: int, copy: bool = False) -> PrefixRun:
        """Add blocks after a pinned prefix that ends in `run`, up to `stop`, pinned as it is.

        None of them may be held yet. Returns the new handle of the whole prefix. `copy`: another
        node holds them too. What follows a copy is treated as one: no block may outlast those
        before it.
        """
        start = run.stop if run is not None else 0
        added = stop - start
        self.blocks += added
        self.pinned += added
        if run is not None:
            copy = copy or run.copy
            same = run.copy == copy
            if run.pins == 1 and not run.children and run.start < start and same:
                # No other sequence has it: it grows. The new ids begin with the old ones.
                run.ids = ids
                run.stop = stop
                return run
            run.children += 1
        new = PrefixRun(ids, start, stop, run, 1, copy)
        self._runs[ids.item(start)] = new
        return new

    def evict(self, blocks: int) -> list[Ids]:
        """Drop at least `blocks` blocks, if as many are evictable; returns the ids dropped."""
        dropped: list[Ids] = []
        runs = self._runs
        while blocks > 0 and (self._copies or self._idle):
            queue = self._copies or self._idle
            run = next(iter(queue))
            length = run.stop - run.start
            gone = min(length, blocks)
            dropped.append(run.ids[run.stop - gone : run.stop])
            self.blocks -= gone
            if run.copy:
                self.spare -= gone
            if length > blocks:
                run.stop -= blocks
                break
            del queue[run]
            del runs[run.ids.item(run.start)]
            if run.parent is not None:
                run.parent.children -= 1
            blocks -= length
        return dropped

    def _split(self, run: PrefixRun, length: int) -> PrefixRun:
        """Cut a run in two at `length`; `run` stays the tail, the new head is returned."""
        head = PrefixRun(run.ids, run.start, length, run.parent, run.pins, run.copy)
        head.children = 1
        self._runs[run.ids.item(run.start)] = head
        run.start = length
        run.parent = head
        self._runs[run.ids.item(length)] = run
        if not run.pins:
            # Used as its tail was, and to be evicted after it: the caller puts both to the end.
            (self._copies if run.copy else self._idle)[head] = None
        return head
