"""The history of routed prefixes, which routers without KV events take for the caches' content.

The originals hold text, as characters or chunks; this one holds token blocks, so a match ends at a
block boundary. Otherwise it is exact: no sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

from kappa_benchmarks.baselines.routing.base import Baseline
from kappa_benchmarks.baselines.routing.run_tree import Path, Roster, Run, RunTree
from kappa_router.decision import Estimates


class RouteHistory:
    """Prefixes sent to each worker, the marks of the tree being when (least recent goes first); a
    worker's size in the tree is of what it was sent and not evicted, shared prefixes once."""

    def __init__(self) -> None:
        self.tree = RunTree()
        self.roster = Roster()
        self._tick = 0

    def match(self, estimates: Estimates) -> Path:
        """Known runs along the request, sent to any worker."""
        self.roster.read(estimates)
        return self.tree.walk(estimates.prefix_hashes)

    def routed(self, estimates: Estimates, index: int) -> list[Run]:
        tree, hashes = self.tree, estimates.prefix_hashes
        self.roster.read(estimates)
        self._tick += 1
        bit, depth = self.roster.bits[index], 0
        runs: list[Run] = []
        for run, matched in tree.walk(hashes):
            runs.append(run if matched == run.end else tree.split(run, matched))
            tree.mark(runs[-1], bit, self._tick)
            depth = matched
        if depth == len(hashes):
            return runs
        last = runs[-1] if runs else None
        if last is not None and not last.children and last.mask == 1 << bit:
            # The next turn of a conversation with one worker: a longer run, not one more.
            tree.extend(last, hashes)
            return runs
        runs.append(tree.append(last, hashes, depth, first=bit))
        tree.mark(runs[-1], bit, self._tick)
        return runs

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

    def left(self, worker: str) -> None:
        bit = self.roster.left(worker)
        if bit is not None:
            self.tree.forget(bit)


@dataclass(eq=False)
class ByHistory(Baseline):
    """A policy that knows the caches by its own history alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._history = RouteHistory()

    def routed(self, estimates: Estimates, index: int, request_id: str = "") -> None:
        self._history.routed(estimates, index)

    def left(self, worker: str) -> None:
        self._history.left(worker)
