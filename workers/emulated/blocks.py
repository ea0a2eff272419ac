"""The blocks of an emulated engine: which prefixes it would hold on its device and in its host.

Names only, no memory. Full blocks are known by a digest over their tokens and those before them, so
two engines give one prefix one name. Least recently used blocks leave first; what a running request
holds takes room from what is kept. Pure.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Place = Literal["device", "host"]


@dataclass(frozen=True, slots=True)
class Stored:
    """A run of blocks can be found in a place now; `parent` is the block before the first."""

    place: Place
    digests: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    salt: str


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks left a place."""

    place: Place
    digests: tuple[bytes, ...]


Change = Stored | Removed


def digests_of(tokens: Sequence[int], block_tokens: int, salt: str) -> list[bytes]:
    """A name for each full block of `tokens`, chained from the first one's salt."""
    ids = np.asarray(tokens, dtype="<i8")
    parent, names = salt.encode(), []
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        block = ids[start : start + block_tokens].tobytes()
        parent = hashlib.blake2b(parent + b"\0" + block, digest_size=16).digest()
        names.append(parent)
    return names


class EmulatedBlocks:
    """Two tiers of block names with room for so many blocks each."""

    def __init__(self, block_tokens: int, device_blocks: int, host_blocks: int) -> None:
        self.block_tokens = block_tokens
        self._room: dict[Place, int] = {"device": device_blocks - 1, "host": host_blocks}
        self._kept: dict[Place, OrderedDict[bytes, None]] = {
            "device": OrderedDict(), "host": OrderedDict()
        }  # fmt: skip
        self._held = 0

    @property
    def capacity_blocks(self) -> int:
        """Blocks that requests can hold on the device."""
        return self._room["device"]

    @property
    def held_blocks(self) -> int:
        """Blocks that running requests hold."""
        return self._held

    def found(self, digests: Sequence[bytes]) -> tuple[int, int]:
        """Leading blocks that the device holds, and those after them that the host tier holds."""
        device = self._leading(digests, "device")
        return device, self._leading(digests[device:], "host")

    def hold(self, blocks: int) -> list[Change] | None:
        """Take room on the device for a request; what had to leave, or None if it does not fit."""
        if self._held + blocks > self._room["device"]:
            return None
        self._held += blocks
        return self._evict("device")

    def free(self, blocks: int) -> None:
        """Give room back."""
        self._held -= blocks

    def keep(self, digests: Sequence[bytes], tokens: Sequence[int], salt: str) -> list[Change]:
        """Let a prefix be found in both tiers from now on; every change, in order."""
        changes: list[Change] = []
        places: tuple[Place, ...] = ("device", "host") if self._room["host"] else ("device",)
        for place in places:
            kept = self._kept[place]
            new = [digest not in kept for digest in digests]
            changes += self._stored(place, digests, tokens, salt, new)
            # The first block of a prefix leaves last: without it the rest cannot be found.
            for digest in reversed(digests):
                kept[digest] = None
                kept.move_to_end(digest)
            changes += self._evict(place)
        return changes

    def _stored(
        self, place: Place, digests: Sequence[bytes], tokens: Sequence[int], salt: str,
        new: Sequence[bool],
    ) -> list[Change]:  # fmt: skip
        """One event for each run of blocks that were not there."""
        size, changes, start = self.block_tokens, [], 0
        while start < len(new):
            if not new[start]:
                start += 1
                continue
            stop = start
            while stop < len(new) and new[stop]:
                stop += 1
            changes.append(
                Stored(
                    place, tuple(digests[start:stop]), digests[start - 1] if start else None,
                    tuple(int(t) for t in tokens[start * size : stop * size]), salt,
                )
            )  # fmt: skip
            start = stop
        return list(changes)

    def _leading(self, digests: Sequence[bytes], place: Place) -> int:
        kept = self._kept[place]
        return next((i for i, digest in enumerate(digests) if digest not in kept), len(digests))

    def _evict(self, place: Place) -> list[Change]:
        kept = self._kept[place]
        room = self._room[place] - (self._held if place == "device" else 0)
        gone = [kept.popitem(last=False)[0] for _ in range(len(kept) - room)]
        return [Removed(place, tuple(gone))] if gone else []
