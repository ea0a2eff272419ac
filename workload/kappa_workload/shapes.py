"""Shapes of sessions: lengths, pauses and shared prefixes, without any text.

Routing and scheduling need only a request's length, its shared prefix and its time. Every reader of
this package gives a `Workload`; the simulator and the load test replay it. Block ids are well-mixed
64-bit numbers that stand for whole prefixes: two prompts have the same k-th id exactly if their
first k blocks are the same. A text that is not shared is a stream with a key of its own; its block
at position p has the id `stream_ids(key, …)[p]`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

BlockIds = NDArray[np.uint64]


Message = dict[str, str]
"""One message of a chat: `role` and `content`."""


@dataclass(frozen=True, slots=True, eq=False)
class TurnShape:
    """One request."""

    after_s: float  # pause after the predecessor's last token; 0 for a first turn
    input_tokens: int  # the whole prompt
    output_tokens: int
    blocks: BlockIds  # the prompt's full blocks
    # Full blocks of prompt and output together, as an engine holds them afterwards; begins with
    # `blocks`.
    kept_blocks: BlockIds
    # The part of the prompt that its source calls new; None if the source has only blocks.
    new_tokens: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.after_s) and self.after_s >= 0):
            raise ValueError(f"after_s is {self.after_s}: give finite seconds, zero or more")
        if self.input_tokens < 1 or self.output_tokens < 1:
            raise ValueError(
                f"a turn of {self.input_tokens} input and {self.output_tokens} output tokens: "
                "both must be at least 1"
            )
        if len(self.kept_blocks) < len(self.blocks):
            raise ValueError("kept_blocks must begin with blocks")


@dataclass(frozen=True, slots=True, eq=False)
class SessionShape:
    """The turns of one conversation, reader or agent; a turn waits for its predecessor."""

    id: str
    turns: tuple[TurnShape, ...]
    tenant: str = ""
    # The common beginning of all prompts, if they share nothing beyond it; 0 where each prompt
    # extends the one before.
    document_tokens: int = 0
    # Seconds from the source's first request; None if the source has no times.
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """The texts of a workload's prompts; `chat` takes the places of session and turn."""

    chat: Callable[[int, int], tuple[Message, ...]]

    def messages(self, session: int, turn: int, copy: int) -> tuple[Message, ...]:
        """The messages of a turn's request; copies begin with their number, so that they share
        nothing."""
        first, *rest = self.chat(session, turn)
        if copy:
            first = first | {"content": f"{copy} {first['content']}"}
        return (first, *rest)


def of_user(text: str) -> tuple[Message, ...]:
    """A text as a chat of one message."""
    return ({"role": "user", "content": text},)


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Sessions that share a block size."""

    name: str
    block_tokens: int
    sessions: tuple[SessionShape, ...]
    source: str  # attribution
    notes: tuple[str, ...] = ()  # cuts and omissions by the reader, in words
    texts: Texts | None = None  # None if the source has only lengths
    # It ships with the package; a user's file may have the same name and layout.
    built_in: bool = False


def turn_of(
    after_s: float,
    input_tokens: int,
    output_tokens: int,
    ids: BlockIds,
    block_tokens: int,
    new_tokens: int | None = None,
) -> TurnShape:
    """A turn from the ids of its prompt and output, which may run on beyond them.

    An output of no tokens counts as one: an engine always makes one.
    """
    output_tokens = max(output_tokens, 1)
    return TurnShape(
        after_s=after_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        blocks=ids[: input_tokens // block_tokens],
        kept_blocks=ids[: (input_tokens + output_tokens) // block_tokens],
        new_tokens=new_tokens,
    )


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def key_of(*parts: str | int) -> np.uint64:
    """A stream's key from what names it; the same in every run."""
    text = "\x1f".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def stream_ids(key: np.uint64, first: int, stop: int) -> BlockIds:
    """Ids of the blocks at positions first, …, stop - 1 of the stream `key`."""
    positions = np.arange(first + 1, max(stop, first) + 1, dtype=np.uint64)
    return mixed(key + positions * _GOLDEN)


def extended(known: BlockIds, key: np.uint64, stop: int) -> BlockIds:
    """Ids of a text up to position `stop`: `known` blocks, then those of the stream `key`."""
    return np.concatenate([known, stream_ids(key, len(known), stop)])


def recorded_ids(numbers: BlockIds) -> BlockIds:
    """Well-mixed ids for the prefix-chained block numbers of a recorded trace, one to one."""
    return mixed(numbers + _GOLDEN)


def mixed(numbers: BlockIds) -> BlockIds:
    """A one-to-one scramble of 64-bit numbers: the finaliser of SplitMix64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX_1
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX_2
    mixture: BlockIds = numbers ^ (numbers >> np.uint64(31))
    return mixture


@lru_cache(maxsize=64)
def salt_of(copy: int) -> np.uint64:
    """The number that is XORed into every id of a copy; 0 for copy 0, which stays as it is."""
    return np.uint64(mixed(np.array([copy], dtype=np.uint64))[0])
