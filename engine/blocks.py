"""Typed blocks and the tables that say where a sequence's tokens lie: ids only, no tensors.

A `BlockPool` hands out the blocks of one type in one place and counts who uses each; a
`SequenceTable` lists, for one sequence, the device block that holds each run of `block_tokens`
tokens. Every misuse (a block given back twice, one that nobody has) raises `BlockError`
and is counted. The tensors behind the pools are in `engine.arena`.
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


class OutOfBlocks(Exception):
    """A pool has fewer unused blocks than were asked for."""


class BlockError(ValueError):
    """Blocks were used against the rules: the caller has a bug."""


class BlockPool:
    """The blocks of one type in one place, with a count of users for each.

    Blocks are handed out in runs of consecutive ids where there are any, since consecutive blocks
    are copied at once. `misused` counts `BlockError`s, which are bugs of callers.

    Args:
        type: what the blocks hold.
        place: where they lie.
        count: how many there are.
        block_tokens: tokens in a block.

    Raises:
        ValueError: a negative count, or blocks of no token.
    """

    def __init__(self, type: BlockType, place: Place, count: int, block_tokens: int) -> None:
        if count < 0 or block_tokens < 1:
            raise ValueError(
                f"{place} pool of {type}: {count} blocks of {block_tokens} tokens: give zero or "
                "more blocks of at least one token"
            )
        self.type = type
        self.place = place
        self.count = count
        self.block_tokens = block_tokens
        self.misused = 0
        self._refs = [0] * count
        # Unused ids as runs: sorted starts, and where each run ends.
        self._starts: list[int] = [0] if count else []
        self._ends: dict[int, int] = {0: count} if count else {}
        self._unused = count

    @property
    def unused(self) -> int:
        """Blocks that nobody uses."""
        return self._unused

    @property
    def used(self) -> int:
        """Blocks that somebody uses."""
        return self.count - self._unused

    def refs(self, block: int) -> int:
        """How many use a block; 0 if nobody does.

        Raises:
            BlockError: there is no such block.
        """
        self._check(block)
        return self._refs[block]

    def allocate(self, n: int = 1) -> list[int]:
        """Take `n` unused blocks, each with one user; consecutive ids where there are such.

        Raises:
            OutOfBlocks: there are fewer; none is taken.
            BlockError: `n` is negative.
        """
        if n < 0:
            raise self._misuse(f"cannot allocate {n} blocks")
        if n > self._unused:
            raise OutOfBlocks(f"{self._name}: {n} blocks wanted, {self._unused} unused")
        taken: list[int] = []
        while len(taken) < n:
            taken.extend(self._take(n - len(taken)))
        for block in taken:
            self._refs[block] = 1
        self._unused -= n
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more user of each.

        Raises:
            BlockError: a block that nobody uses; none is changed.
        """
        shared = list(blocks)
        for block in shared:
            self._check(block)
            if not self._refs[block]:
                raise self._misuse(f"block {block} is shared, but nobody uses it")
        for block in shared:
            self._refs[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One user less of each; a block without users is unused.

        Raises:
            BlockError: a block that is not in use, or given back more often than it is used; none
                is changed.
        """
        freed = list(blocks)
        for block, times in Counter(freed).items():
            self._check(block)
            if times > self._refs[block]:
                users = self._refs[block]
                raise self._misuse(
                    f"block {block} is given back {times} times, but has {users} users"
                )
        for block in freed:
            self._refs[block] -= 1
            if not self._refs[block]:
                self._give_back(block)

    def check(self) -> None:
        """Raise `BlockError` unless every block is either used or in exactly one unused run."""
        unused: set[int] = set()
        previous = -1
        for start in self._starts:
            end = self._ends[start]
            if start <= previous or end <= start or end > self.count:
                raise BlockError(f"{self._name}: unused run {start}..{end} overlaps another")
            unused.update(range(start, end))
            previous = end
        free = {block for block, refs in enumerate(self._refs) if not refs}
        if unused != free or len(unused) != self._unused or min(self._refs, default=0) < 0:
            raise BlockError(f"{self._name}: unused runs do not match the counts of users")

    # -- unused runs --------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return f"{self.place} pool of {self.type}"

    def _misuse(self, what: str) -> BlockError:
        self.misused += 1
        return BlockError(f"{self._name}: {what}")

    def _check(self, block: int) -> None:
        if not 0 <= block < self.count:
            raise self._misuse(f"there is no block {block} among {self.count}")

    def _take(self, n: int) -> range:
        """Up to `n` ids from the first run long enough, or else from the longest."""
        ends = self._ends
        best = self._starts[0]
        for start in self._starts:
            if ends[start] - start >= n:
                best = start
                break
            if ends[start] - start > ends[best] - best:
                best = start
        end = ends.pop(best)
        stop = min(best + n, end)
        at = bisect_right(self._starts, best) - 1
        if stop < end:
            self._starts[at] = stop
            ends[stop] = end
        else:
            del self._starts[at]
        return range(best, stop)

    def _give_back(self, block: int) -> None:
        starts, ends = self._starts, self._ends
        self._unused += 1
        after = bisect_right(starts, block)
        end = block + 1
        if after < len(starts) and starts[after] == end:
            end = ends.pop(starts.pop(after))
        if after and ends[starts[after - 1]] == block:
            ends[starts[after - 1]] = end
        else:
            insort(starts, block)
            ends[block] = end


class SequenceTable:
    """Where one sequence's KV lies: block i holds tokens [i·block_tokens, (i+1)·block_tokens).

    device (blocks,): its device blocks, -1 where a block stays in host memory; blocks may stand
    ready behind its tokens. A table names blocks, it does not own them: their users are counted by
    the pools.
    """

    __slots__ = ("block_tokens", "device")

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.clear()

    def __len__(self) -> int:
        """Blocks."""
        return len(self.device)

    @property
    def room_tokens(self) -> int:
        """Tokens that its blocks can hold."""
        return len(self.device) * self.block_tokens

    def clear(self) -> None:
        self.device: Ids = np.empty(0, np.int64)

    def append(self, blocks: Sequence[int]) -> None:
        """Device blocks for the tokens behind; -1 for one in host memory."""
        self.device = np.concatenate((self.device, np.array(blocks, np.int64)))

    def on_device(self) -> list[int]:
        """Ids of all its device blocks."""
        blocks: list[int] = self.device[self.device >= 0].tolist()
        return blocks

    def blocks(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Ids of the device blocks [start, stop), all of which must be on the device.

        Raises:
            BlockError: one is not; names it.
        """
        ids: list[int] = self.device[start:stop].tolist()
        if -1 in ids:
            raise BlockError(
                f"block {start + ids.index(-1)} of the table is in host memory, "
                "wanted on the device"
            )
        return ids


def runs(
    to: Sequence[int], of: Sequence[int], longest: int | None = None
) -> list[tuple[int, int, int]]:
    """Pairs of blocks as few copies: (first block to, first block of, how many) for each.

    longest: copies of more blocks than that are cut.

    Raises:
        BlockError: unequally many blocks.
    """
    if len(to) != len(of):
        raise BlockError(f"cannot copy {len(of)} blocks to {len(to)}")
    copies: list[tuple[int, int, int]] = []
    for target, source in zip(to, of, strict=True):
        if copies:
            first, begin, n = copies[-1]
            if target == first + n and source == begin + n and (longest is None or n < longest):
                copies[-1] = (first, begin, n + 1)
                continue
        copies.append((target, source, 1))
    return copies
