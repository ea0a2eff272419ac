"""What was routed where, as the routers without KV events keep it: their only idea of the caches.

The originals hold text (characters or chunks of it); this one holds token blocks, so a match ends
at a block boundary. Otherwise it is exact: no sampling.
"""

from __future__ import annotations

from router.baselines.run_tree import Path, Roster, Run, RunTree
from router.offers import Offers


class RouteHistory:
    """Prefixes sent to each worker, the marks of the tree being when (least recent goes first)."""

    def __init__(self) -> None:
        self.tree = RunTree()
        self.roster = Roster()
        self._tick = 0

    def match(self, offers: Offers) -> Path:
        """Known runs along the request, whoever was sent them."""
        self.roster.read(offers)
        return self.tree.walk(offers.prefix_hashes)

    def routed(self, offers: Offers, index: int) -> int:
        """The request's prefix was sent to row `index`; returns that worker's number."""
        tree, hashes = self.tree, offers.prefix_hashes
        self.roster.read(offers)
        self._tick += 1
        bit, depth = self.roster.bits[index], 0
        run: Run | None = None
        for run, depth in tree.walk(hashes):
            if depth < run.end:
                run = tree.split(run, depth)
            tree.mark(run, bit, self._tick)
        if depth == len(hashes):
            return bit
        if run is not None and not run.children and run.mask == 1 << bit:
            # The next turn of a conversation with one worker: one longer run, not one more.
            tree.unmark(run, bit)
            run, depth = run.parent, run.start
        tree.mark(tree.append(run, hashes, depth, first=bit), bit, self._tick)
        return bit

    def size(self, bit: int) -> int:
        """Blocks sent to a worker and not evicted, shared prefixes once."""
        return self.tree.size(bit)

    def trim(self, bit: int, blocks: float) -> None:
        """Evict a worker's least recent leaves until it has at most `blocks`."""
        tree = self.tree
        runs = sorted(
            (run for run in tree.runs.values() if bit in run.marks),
            key=lambda run: (run.marks[bit], -run.start),
        )
        for run in runs:
            if tree.size(bit) <= blocks:
                break
            tree.unmark(run, bit)

    def trim_all(self, blocks: float) -> int:
        """Evict the least recent leaves, all workers' marks on them, until `blocks` are left.

        Returns:
            Blocks left, one that several workers were sent counting once.
        """
        runs = sorted(
            self.tree.runs.values(), key=lambda run: (max(run.marks.values()), -run.start)
        )
        left = sum(len(run.hashes) for run in runs)
        for run in runs:
            if left <= blocks:
                break
            left -= len(run.hashes)
            for bit in list(run.marks):
                self.tree.unmark(run, bit)
        return left

    def left(self, worker: str) -> None:
        """A worker is gone, and what was sent there with it."""
        bit = self.roster.left(worker)
        if bit is not None:
            self.tree.forget(bit)
