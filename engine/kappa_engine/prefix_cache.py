"""The prefix cache: a pool's blocks by the hash of their prefix, least recently used out first.

A full block's key is a chained hash of all tokens up to its end (and of a salt), 128 bits of a
cryptographic hash, so that equal keys mean equal tokens. A block in use is pinned; an unused one
can be found until its room is needed. Blocks are published only when their content is there.
Changes are noted as plain events with token ids.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from kappa_engine.block_pool import BlockPool, Place

_KEY_BYTES = 16
# Changes kept until they are taken; more are lost.
_MOST_EVENTS = 100_000


class BlockKey(NamedTuple):
    """The name of a full block, by all tokens up to its end."""

    digest: bytes
    # Of the block before it; None at the start.
    parent: bytes | None
    # Of this block.
    tokens: tuple[int, ...]


def extend_keys(
    keys: list[BlockKey], tokens: Sequence[int], block_tokens: int, salt: str = ""
) -> None:
    """Append to `keys` the keys that it lacks of the full blocks of `tokens`."""
    for index in range(len(keys), len(tokens) // block_tokens):
        parent = keys[-1].digest if keys else None
        block = tuple(tokens[index * block_tokens : (index + 1) * block_tokens])
        before = parent or blake2b(salt.encode(), digest_size=_KEY_BYTES, person=b"kappa").digest()
        data = before + array("q", block).tobytes()
        keys.append(BlockKey(blake2b(data, digest_size=_KEY_BYTES).digest(), parent, block))


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A run of consecutive blocks can be found in a place from now on."""

    place: Place
    digests: tuple[bytes, ...]
    # Of the first block; None at the start of a sequence.
    parent: bytes | None
    # Of all blocks, in order.
    tokens: tuple[int, ...]
    block_tokens: int


@dataclass(frozen=True, slots=True)
class RemovedBlocks:
    """Blocks left a place."""

    place: Place
    digests: tuple[bytes, ...]


CacheEvent = StoredBlocks | RemovedBlocks


class EventLog:
    """Changes of the prefix caches since they were last taken.

    A block of host memory may be held as KV and as activations: it is there as long as either is.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._copies: dict[tuple[Place, bytes], int] = {}
        self._events: list[CacheEvent] = []

    def take(self) -> list[CacheEvent]:
        """The changes since the last call, in order."""
        events, self._events = self._events, []
        return events

    def stored(self, place: Place, keys: Sequence[BlockKey]) -> None:
        """Note published blocks, with an event for each run in which each follows the last."""
        new: list[list[BlockKey]] = []
        for key in keys:
            copies = self._copies[place, key.digest] = self._copies.get((place, key.digest), 0) + 1
            if copies > 1:
                continue
            if new and key.parent == new[-1][-1].digest:
                new[-1].append(key)
            else:
                new.append([key])
        for run in new:
            tokens = tuple(token for key in run for token in key.tokens)
            digests = tuple(key.digest for key in run)
            self._note(StoredBlocks(place, digests, run[0].parent, tokens, self._block_tokens))

    def removed(self, place: Place, digests: Iterable[bytes]) -> None:
        """Note evicted blocks."""
        gone = []
        for digest in digests:
            self._copies[place, digest] -= 1
            if not self._copies[place, digest]:
                del self._copies[place, digest]
                gone.append(digest)
        if gone:
            self._note(RemovedBlocks(place, tuple(gone)))

    def _note(self, event: CacheEvent) -> None:
        if len(self._events) < _MOST_EVENTS:
            self._events.append(event)


class PrefixPool:
    """The blocks of one pool: private to the request that took them until published under a key.

    `len()`: blocks that can be found.

    Args:
        pool: used by no other object.
        changed: called whenever something may fit, or be found, that was not before.
    """

    def __init__(self, pool: BlockPool, log: EventLog, changed: Callable[[], None]) -> None:
        self.pool = pool
        self._log, self._changed = log, changed
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        # Blocks that can be found and have no user, least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, digest: object) -> bool:
        return digest in self._blocks

    def available(self) -> int:
        """Blocks unused or idle."""
        return self.pool.unused + len(self._idle)

    def find(self, key: BlockKey) -> int | None:
        """The block published under `key`, if there is one; this does not count as a use."""
        return self._blocks.get(key.digest)

    def prefix(self, keys: Sequence[BlockKey], stop: int) -> tuple[int, int]:
        """Of the first `stop` keys: how many lead without a gap, and how many of those are idle."""
        idle, stop = 0, min(stop, len(keys))
        for index in range(stop):
            block = self._blocks.get(keys[index].digest)
            if block is None:
                return index, idle
            idle += block in self._idle
        return stop, idle

    def hold(self, keys: Iterable[BlockKey]) -> list[int]:
        """Add a user to the block of each key; `KeyError`, and no change, if one is not there."""
        blocks = [self._blocks[key.digest] for key in keys]
        self.pool.share(blocks)
        self._changed()
        for block in blocks:
            self._idle.pop(block, None)
        return blocks

    def hold_found(self, keys: Sequence[BlockKey]) -> list[int]:
        """Hold the blocks of the keys that are there; returns -1 for the others."""
        blocks = [self._blocks.get(key.digest, -1) for key in keys]
        self.hold(key for key, block in zip(keys, blocks, strict=True) if block >= 0)
        return blocks

    def idle_of(self, keys: Sequence[BlockKey]) -> int:
        """The number of these keys' blocks that are idle."""
        return sum(self._blocks.get(key.digest) in self._idle for key in keys)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Move these keys' idle blocks to the end of the line of eviction."""
        for key in reversed(keys):
            block = self._blocks.get(key.digest)
            if block is not None and block in self._idle:
                self._idle.move_to_end(block)

    def take(self, n: int) -> list[int]:
        """Allocate `n` private blocks, evicting idle ones if need be; `OutOfBlocks`, and no change,
        if fewer are available."""
        short = n - self.pool.unused
        if 0 < short <= len(self._idle):
            blocks = [self._idle.popitem(last=False)[0] for _ in range(short)]
            digests = [self._digests.pop(block) for block in blocks]
            for digest in digests:
                del self._blocks[digest]
            self.pool.free(blocks)
            self._changed()
            self._log.removed(self.pool.place, digests)
        return self.pool.allocate(n)

    def release(self, blocks: Sequence[int]) -> None:
        """Take a user from each block, given in the order of a sequence: its end is evicted first;
        `BlockError`, and no change, if one was not in use."""
        self.pool.free(blocks)
        self._changed()
        for block in reversed(blocks):
            if block in self._digests and self.pool.refs(block) == 1:
                self._idle[block] = None

    def publish(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        """Let full blocks, which are in use, be found by their keys.

        A key that is there already keeps its block, and the other stays private.
        """
        new = []
        for key, block in zip(keys, blocks, strict=True):
            if key.digest not in self._blocks and block not in self._digests:
                self.pool.share([block])
                self._blocks[key.digest], self._digests[block] = block, key.digest
                new.append(key)
        if new:
            self._changed()
            self._log.stored(self.pool.place, new)
