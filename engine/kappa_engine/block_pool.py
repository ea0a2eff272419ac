"""Pools of blocks by id: reference counts, and which neighbours are copied at once.

Every misuse (a block given back twice, or shared while unused) raises `BlockError` and is counted.
The tensors behind the pools are in `kappa_engine.kv_cache`.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

BlockType = Literal["kv", "act"]
Place = Literal["device", "host"]
Ids = NDArray[np.int64]
CopyRun = tuple[int, int, int]  # first target, first source, how many


class OutOfBlocks(Exception):
    """A pool has fewer unused blocks than were asked for."""


class BlockError(ValueError):
    """Misuse of blocks: the caller has a bug."""


class BlockPool:
    """The blocks of one type in one place, with a reference count for each.

    Blocks are handed out in runs of consecutive ids where there are any, since consecutive blocks
    are copied at once.
    """

    def __init__(self, type: BlockType, place: Place, count: int, block_tokens: int) -> None:
        self.type, self.place, self.count, self.block_tokens = type, place, count, block_tokens
        # Blocks without users, and `BlockError`s so far.
        self.unused, self.misused = count, 0
        self._refs = [0] * count
        # Unused ids as runs: sorted starts, and where each run ends.
        self._starts: list[int] = [0] if count else []
        self._ends: dict[int, int] = {0: count} if count else {}

    @property
    def used(self) -> int:
        """Blocks with a user."""
        return self.count - self.unused

    def refs(self, block: int) -> int:
        """Users of a block; `BlockError` if there is no such block."""
        if not 0 <= block < self.count:
            raise self._misuse(f"there is no block {block} among {self.count}")
        return self._refs[block]

    def allocate(self, n: int = 1) -> list[int]:
        """Take `n` unused blocks, each with one user; consecutive ids where there are such.

        Raises:
            OutOfBlocks: there are fewer; none is taken.
            BlockError: `n` is negative.
        """
        if n < 0:
            raise self._misuse(f"cannot allocate {n} blocks")
        if n > self.unused:
            raise OutOfBlocks(
                f"{self.place} pool of {self.type}: {n} blocks wanted, {self.unused} unused"
            )
        taken: list[int] = []
        while len(taken) < n:
            taken.extend(self._take(n - len(taken)))
        for block in taken:
            self._refs[block] = 1
        self.unused -= n
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each block; `BlockError`, and no change, if one is unused."""
        shared = list(blocks)
        for block in shared:
            if not self.refs(block):
                raise self._misuse(f"block {block} is shared, but has no user")
        for block in shared:
            self._refs[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Take a user from each block; `BlockError`, and no change, if one has fewer users."""
        freed = list(blocks)
        for block, times in Counter(freed).items():
            if times > (users := self.refs(block)):
                raise self._misuse(
                    f"block {block} is given back {times} times, but has {users} users"
                )
        for block in freed:
            self._refs[block] -= 1
            if not self._refs[block]:
                self._give_back(block)

    def _misuse(self, what: str) -> BlockError:
        self.misused += 1
        return BlockError(f"{self.place} pool of {self.type}: {what}")

    def _take(self, n: int) -> range:
        """Up to `n` ids from the first run long enough, or else from the longest."""
        starts, ends = self._starts, self._ends
        best = next((start for start in starts if ends[start] - start >= n), -1)
        if best < 0:
            best = max(starts, key=lambda start: ends[start] - start)
        end = ends.pop(best)
        stop = min(best + n, end)
        at = bisect_right(starts, best) - 1
        if stop < end:
            starts[at] = stop
            ends[stop] = end
        else:
            del starts[at]
        return range(best, stop)

    def _give_back(self, block: int) -> None:
        starts, ends = self._starts, self._ends
        self.unused += 1
        after = bisect_right(starts, block)
        end = block + 1
        if after < len(starts) and starts[after] == end:
            end = ends.pop(starts.pop(after))
        if after and ends[starts[after - 1]] == block:
            ends[starts[after - 1]] = end
        else:
            insort(starts, block)
            ends[block] = end


def runs(to: Sequence[int], of: Sequence[int]) -> list[CopyRun]:
    """Merge pairs of blocks into as few copies as possible; `BlockError` for unequal numbers."""
    if len(to) != len(of):
        raise BlockError(f"cannot copy {len(of)} blocks to {len(to)}")
    merged: list[CopyRun] = []
    first = source = count = 0
    # For a few hundred pairs, numpy's calls alone would last longer.
    for target, other in zip(to, of, strict=True):
        if count and target == first + count and other == source + count:
            count += 1
            continue
        if count:
            merged.append((first, source, count))
        first, source, count = target, other, 1
    if count:
        merged.append((first, source, count))
    return merged
