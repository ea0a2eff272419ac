"""A prefix tree over block hashes, its nodes runs of blocks, marked with the workers sent them.

A hash stands for its whole prefix, so two requests that agree on block k agree on all before it.
A run and a request are therefore compared by binary search, exactly, and a run is found by the
hash of its first block alone: no path has to be spelled out. Workers are small numbers (bits), so
that a set of them is one integer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from kappa_router.decision import Estimates
from kappa_router.index.prefix_hash import UInt64s


class Run:
    """Blocks [start, end) that all requests through here share.

    marks: a number for each worker that was sent the whole run, and so every run above it; mask:
    the same workers as a set. first: the worker that was sent it first.
    """

    __slots__ = ("children", "first", "hashes", "marks", "mask", "parent", "start")

    def __init__(self, start: int, hashes: UInt64s, parent: Run | None, first: int) -> None:
        self.start = start
        self.hashes = hashes
        self.parent = parent
        self.children = 0
        self.marks: dict[int, float] = {}
        self.mask = 0
        self.first = first

    @property
    def end(self) -> int:
        return self.start + len(self.hashes)


Path = list[tuple[Run, int]]
"""Runs from the root on, each with the block until which the request agrees with it."""


class RunTree:
    """The runs, and for each worker (bit) how many blocks it has marks on. blocks: in all runs."""

    def __init__(self) -> None:
        self.runs: dict[int, Run] = {}
        self.blocks = 0
        self._sizes: list[int] = []

    def walk(self, hashes: UInt64s) -> Path:
        """The known runs along a request; only the last may be matched in part."""
        path: Path = []
        depth, total, item = 0, len(hashes), hashes.item
        while depth < total:
            run = self.runs.get(item(depth))
            if run is None or run.start != depth:
                break
            depth += _agreement(run.hashes, hashes, depth)
            path.append((run, depth))
            if depth < run.end:
                break
        return path

    def size(self, bit: int) -> int:
        """Blocks marked for a worker."""
        return self._sizes[bit] if bit < len(self._sizes) else 0

    def forget(self, bit: int) -> None:
        for run in [run for run in self.runs.values() if bit in run.marks]:
            self.unmark(run, bit)

    def mark(self, run: Run, bit: int, value: float) -> None:
        if bit not in run.marks:
            run.mask |= 1 << bit
            self._grow(bit, len(run.hashes))
        run.marks[bit] = value

    def unmark(self, run: Run, bit: int) -> None:
        """Take a worker's mark off a run; a run without marks goes."""
        del run.marks[bit]
        run.mask &= ~(1 << bit)
        self._sizes[bit] -= len(run.hashes)
        if not run.marks:
            self.blocks -= len(run.hashes)
            del self.runs[run.hashes.item(0)]
            if run.parent is not None:
                run.parent.children -= 1

    def split(self, run: Run, depth: int) -> Run:
        """Cut a run before block `depth`; returns the new upper part, with the same marks."""
        cut = depth - run.start
        upper = Run(run.start, run.hashes[:cut].copy(), run.parent, run.first)
        upper.marks, upper.mask, upper.children = dict(run.marks), run.mask, 1
        run.start, run.hashes, run.parent = depth, run.hashes[cut:].copy(), upper
        self.runs[upper.hashes.item(0)] = upper
        self.runs[run.hashes.item(0)] = run
        return upper

    def append(self, parent: Run | None, hashes: UInt64s, depth: int, first: int) -> Run:
        """A new run of the blocks from `depth` on, without marks yet."""
        run = Run(depth, hashes[depth:].copy(), parent, first)
        self.runs[run.hashes.item(0)] = run
        self.blocks += len(run.hashes)
        if parent is not None:
            parent.children += 1
        return run

    def extend(self, run: Run, hashes: UInt64s) -> None:
        """A run without children grows to the end of a request that begins with it."""
        more = len(hashes) - run.end
        run.hashes = hashes[run.start :].copy()
        self.blocks += more
        for bit in run.marks:
            self._sizes[bit] += more

    def _grow(self, bit: int, blocks: int) -> None:
        while len(self._sizes) <= bit:
            self._sizes.append(0)
        self._sizes[bit] += blocks


def _agreement(run: UInt64s, hashes: UInt64s, depth: int) -> int:
    """Blocks of `run` that the request has from `depth` on; it has the first."""
    known, asked = run.item, hashes.item
    count = min(len(run), len(hashes) - depth)
    if known(count - 1) == asked(depth + count - 1):
        return count
    return bisect_left(range(count), True, 1, key=lambda at: known(at) != asked(depth + at))


def longest_of_each(path: Path, among: int) -> Iterator[tuple[int, int]]:
    """(workers, blocks), shallowest first: workers that have exactly `blocks` blocks of `path`.

    Args:
        path: as from `RunTree.walk`.
        among: the workers of interest.
    """
    depth = 0
    for run, matched in path:
        staying = among & run.mask
        if depth and staying != among:
            yield among & ~staying, depth
        among, depth = staying, matched
        if not among:
            return
    if depth:
        yield among, depth


class Roster:
    """Numbers for workers, kept for life, and where each is among the estimates read last."""

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}
        self._free: list[int] = []
        self._names: list[str] = []
        self._rows: dict[int, int] = {}
        self.bits: list[int] = []
        self.mask = 0

    def read(self, estimates: Estimates) -> None:
        """Take over the estimates' workers; `bits` and `mask` are theirs."""
        if estimates.workers == self._names:
            return
        self._names = list(estimates.workers)
        self.bits = [self._bit(worker) for worker in self._names]
        self._rows = {bit: row for row, bit in enumerate(self.bits)}
        self.mask = sum(1 << bit for bit in self.bits)

    def rows(self, workers: int) -> list[int]:
        """Rows of a set of workers, all of them in the estimates read last."""
        rows = []
        while workers:
            low = workers & -workers
            rows.append(self._rows[low.bit_length() - 1])
            workers ^= low
        return rows

    def row(self, bit: int) -> int | None:
        """Row of one worker, None if it is not on offer."""
        return self._rows.get(bit)

    def left(self, worker: str) -> int | None:
        self._names = []
        bit = self._bits.pop(worker, None)
        if bit is not None:
            self._free.append(bit)
        return bit

    def _bit(self, worker: str) -> int:
        bit = self._bits.get(worker)
        if bit is None:
            bit = self._bits[worker] = self._free.pop() if self._free else len(self._bits)
        return bit
