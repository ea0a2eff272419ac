"""The prefix index's store: blocks of all workers as a forest, in rows of flat arrays.

A block's parent is the block before it. Tiers evict in any order, so a worker may hold a block
without the one before it; every block keeps two flags, maintained on each change: whether all
up to it is on the device, and whether all up to it is a device run followed by a host run. Both
hold from the first block onwards or not at all, which is what makes binary search exact.

Rows are array elements and integers, not objects, so millions of them add nothing to garbage
collection pauses. Bound and eviction order live here too; `PrefixIndex` is the only caller.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable

from router.kv_events import EngineHash, Tier
from router.prefix_hash import ROOT, Running

NO_BLOCK = -1
HOST, DEVICE_RUN, UNION_RUN = 1, 2, 4
# Blocks no tier holds stay known for a while: a host store is often announced just after the
# device block went, and only the memory of that block says what the engine's hash stands for.
_UNHELD_SHARE = 8


class WorkerBlocks:
    """Rows of one worker, by our hash and by its engine's."""

    __slots__ = ("by_engine", "by_hash")

    def __init__(self) -> None:
        self.by_hash: dict[int, int] = {}
        self.by_engine: dict[EngineHash, int] = {}


class BlockForest:
    """Presence, run flags and eviction order of at most `max_blocks` rows.

    A row is one block of one worker. Methods take the row's number; `NO_BLOCK` as a parent
    means the start of a sequence.
    """

    def __init__(self, max_blocks: int) -> None:
        self.size = 0
        self.evicted = 0
        self.tick = 0
        self._max_blocks = max_blocks
        self._free: list[int] = []
        self._leaves: OrderedDict[int, None] = OrderedDict()
        self._unheld: OrderedDict[int, None] = OrderedDict()
        self._owner: list[WorkerBlocks | None] = []
        self._engine: list[EngineHash] = []
        self._hash, self._sum, self._salt = array("Q"), array("Q"), array("Q")
        self._used = array("Q")
        self._depth, self._refs = array("I"), array("I")
        self._parent, self._child = array("i"), array("i")
        self._next, self._prev = array("i"), array("i")
        self._flags = array("B")

    # ---- reading

    @property
    def unheld(self) -> int:
        """Leaves that no tier holds."""
        return len(self._unheld)

    def running(self, slot: int) -> Running:
        """Hash state up to and including a block; the start's for NO_BLOCK."""
        return ROOT if slot == NO_BLOCK else Running(self._sum[slot], self._depth[slot])

    def salt(self, slot: int) -> int:
        """Salt of the sequence a block is in."""
        return self._salt[slot]

    def run(
        self, worker: WorkerBlocks, item: Callable[[int], int], low: int, high: int, flag: int
    ) -> int:
        """First position in [low, high] whose block lacks `flag`; all before `low` have it."""
        by_hash, flags = worker.by_hash, self._flags
        probe = low
        while low < high:
            slot = by_hash.get(item(probe))
            if slot is not None and flags[slot] & flag:
                low = probe + 1
            else:
                high = probe
            probe = (low + high) // 2
        return low

    # ---- presence

    def touch(self, slot: int) -> None:
        """Count a block as used now."""
        self._used[slot] = self.tick
        self._enqueue(slot)

    def hold(self, slot: int, tier: Tier) -> None:
        """One more device copy, or present in host."""
        self._used[slot] = self.tick
        if tier == "device":
            self._refs[slot] += 1
        else:
            self._flags[slot] |= HOST
        self._settle(slot)

    def unhold(self, slot: int, tier: Tier, copies: int = 1) -> bool:
        """Up to `copies` fewer device copies, or no longer in host; False if it was not there."""
        if tier == "device":
            if not self._refs[slot]:
                return False
            self._refs[slot] -= min(copies, self._refs[slot])
        else:
            if not self._flags[slot] & HOST:
                return False
            self._flags[slot] &= ~HOST
        self._settle(slot)
        return True

    def clear(self, worker: WorkerBlocks, tier: Tier) -> None:
        """Empty one tier of a worker."""
        for slot in worker.by_hash.values():
            self.unhold(slot, tier, copies=self._refs[slot])

    def _settle(self, slot: int) -> None:
        """Restore run flags and eviction order after a change of presence at `slot`."""
        flags, refs, parent, child = self._flags, self._refs, self._parent, self._child
        self._enqueue(slot)
        stack = [slot]
        while stack:
            at = stack.pop()
            above = flags[parent[at]] if parent[at] != NO_BLOCK else DEVICE_RUN | UNION_RUN
            new = old = flags[at]
            new &= HOST
            if refs[at] and above & DEVICE_RUN:
                new |= DEVICE_RUN | UNION_RUN
            elif new and above & UNION_RUN:
                new |= UNION_RUN
            if new == old:
                continue
            flags[at] = new
            below = child[at]
            while below != NO_BLOCK:
                stack.append(below)
                below = self._next[below]

    # ---- rows

    def insert(
        self,
        worker: WorkerBlocks,
        engine: EngineHash,
        own: int,
        raw_sum: int,
        salt: int,
        parent: int,
    ) -> int | None:
        """A new row below `parent`, held by no tier yet; None if there is no room."""
        if self.size >= self._max_blocks and not self._evict(keep=parent):
            return None
        slot = self._allocate()
        self._owner[slot], self._engine[slot] = worker, engine
        self._hash[slot], self._sum[slot], self._salt[slot] = own, raw_sum, salt
        self._depth[slot] = 1
        self._parent[slot] = parent
        if parent != NO_BLOCK:
            self._depth[slot] = self._depth[parent] + 1
            first = self._child[parent]
            self._next[slot] = first
            if first != NO_BLOCK:
                self._prev[first] = slot
            self._child[parent] = slot
            self._leaves.pop(parent, None)
            self._unheld.pop(parent, None)
        worker.by_hash[own] = worker.by_engine[engine] = slot
        self.size += 1
        return slot

    def trim(self) -> None:
        """Let go of the oldest leaves that no tier holds, beyond their share of the bound."""
        while len(self._unheld) > self._max_blocks // _UNHELD_SHARE:
            self._drop(next(iter(self._unheld)))

    def _allocate(self) -> int:
        """A blank row."""
        if not self._free:
            self._owner.append(None)
            self._engine.append(0)
            for column in (self._hash, self._sum, self._salt, self._used, self._depth):
                column.append(0)
            for column in (self._parent, self._child, self._next, self._prev):
                column.append(NO_BLOCK)
            self._refs.append(0)
            self._flags.append(0)
            return len(self._flags) - 1
        slot = self._free.pop()
        self._refs[slot] = self._flags[slot] = 0
        self._child[slot] = self._next[slot] = self._prev[slot] = NO_BLOCK
        return slot

    def _enqueue(self, slot: int, first: bool = False) -> None:
        """Put a leaf where its turn to be evicted is; rows with children have none."""
        if self._child[slot] != NO_BLOCK:
            return
        held = self._refs[slot] > 0 or self._flags[slot] & HOST
        queue, other = (self._leaves, self._unheld) if held else (self._unheld, self._leaves)
        other.pop(slot, None)
        queue[slot] = None
        queue.move_to_end(slot, last=not first)

    def _evict(self, keep: int) -> bool:
        """Drop the leaf whose turn it is, sparing `keep`; False if there is no other."""
        for queue in (self._unheld, self._leaves):
            for slot in queue:
                if slot != keep:
                    self._drop(slot)
                    self.evicted += 1
                    return True
        return False

    def _drop(self, slot: int) -> None:
        """Remove a leaf; its parent may become one, at the front unless used since."""
        owner, parent = self._owner[slot], self._parent[slot]
        assert owner is not None
        del owner.by_hash[self._hash[slot]], owner.by_engine[self._engine[slot]]
        self._leaves.pop(slot, None)
        self._unheld.pop(slot, None)
        if parent != NO_BLOCK:
            before, after = self._prev[slot], self._next[slot]
            if before == NO_BLOCK:
                self._child[parent] = after
            else:
                self._next[before] = after
            if after != NO_BLOCK:
                self._prev[after] = before
            self._enqueue(parent, first=self._used[parent] <= self._used[slot])
        self._release(slot)

    def _release(self, slot: int) -> None:
        self._owner[slot], self._engine[slot] = None, 0
        self._free.append(slot)
        self.size -= 1

    def forget(self, worker: WorkerBlocks) -> None:
        """Drop all rows of a worker."""
        for slot in worker.by_hash.values():
            self._leaves.pop(slot, None)
            self._unheld.pop(slot, None)
            self._release(slot)
        worker.by_hash.clear()
        worker.by_engine.clear()
