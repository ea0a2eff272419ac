"""The caches of an engine that reports nothing: prompts sent to it, as long as they are kept.

A prompt is its text, four bytes to a token, in blocks of 32: nothing has to be tokenized, and a
conversation that grows extends its own blocks. Every engine's caches are followed as two lists of
blocks, least recently used first, of the device and of the host tier behind it. Where an engine
says how much of a prompt it found (`usage`), and that is less than expected, its cache is smaller
than was thought: what was used before the missing block is gone, too. Pure.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kappa.cost import loading_node, step_model
from kappa.hardware import NodeProfile
from kappa.model import ModelShape, kv_bytes_per_token
from kappa.protocol import Announcement
from kappa_router.index.hash_table import HashTable, Int32s, UInt64s
from kappa_router.index.kv_event_types import Tier
from kappa_router.index.prefix_index import PrefixIndex

BYTES_PER_TOKEN = 4
BLOCK_TOKENS = 32
UNKNOWN_BLOCKS = 1 << 20
"""Of a device of unknown size."""
_GROWTH = 1.02
_SLACK_BLOCKS = 8
"""A find that is short by at most this says nothing: engines' blocks have up to 256 tokens."""
_MAX_LOAD = 0.68
_LAST_NUMBER = (1 << 31) - 1
"""Requests are numbered in 32 bits; after the last number the caches are forgotten once."""
_NO_BLOCKS: UInt64s = np.empty(0, dtype=np.uint64)
# What stands before the messages: in chats, responses and messages.
_BEFORE = ("tools", "system", "instructions")
PROMPT_FIELDS = ("messages", "input", "prompt", *_BEFORE)
"""What `prompt_tokens` reads."""
_IDS_AT_ONCE = 1 << 15  # numpy reads a list under the interpreter's lock.

_encode = msgspec.json.Encoder(order="sorted").encode


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Blocks of an engine's device and of the host tier behind it, and the longest context."""

    block_tokens: int = BLOCK_TOKENS
    device_blocks: int = UNKNOWN_BLOCKS
    host_blocks: int = 0
    max_context_tokens: int = 1 << 30


def announcement_of(
    worker: str, model: str, node: NodeProfile, shape: ModelShape, size: CacheSize
) -> Announcement:
    """The announcement of an engine that makes none: `node` of the catalogue, serving
    `shape`, whole prompts of up to 8,192 tokens at a step."""
    return Announcement(
        worker=worker, model=model, node=loading_node(shape, node), step=step_model(shape, node),
        kv_bytes_per_token=kv_bytes_per_token(shape), emulated_model="", fingerprint="history",
        block_tokens=size.block_tokens, device_blocks=size.device_blocks,
        host_blocks=size.host_blocks, max_batch_tokens=8192,
        max_context_tokens=size.max_context_tokens, events_endpoint="", snapshot_endpoint="",
    )  # fmt: skip


def prompt_tokens(body: Mapping[str, Any]) -> np.ndarray | None:
    """The prompt of a chat, a completion, a response or a message in tokens of four bytes, int64;
    None if it has none.

    Tools come first, as in chat templates. Token ids are taken as they are.
    """
    messages, prompt = body.get("messages", body.get("input")), body.get("prompt")
    try:
        if messages is not None:
            before = b"".join(_encode(body[name]) for name in _BEFORE if body.get(name))
            text = before + _encode(messages)[:-1]  # an open bracket: more extend it
        elif isinstance(prompt, str):
            text = prompt.encode(errors="replace")
        elif isinstance(prompt, list) and all(type(one) is int for one in prompt):
            parts = range(0, len(prompt), _IDS_AT_ONCE) or (0,)
            return np.concatenate([np.array(prompt[i : i + _IDS_AT_ONCE], np.int64) for i in parts])
        else:
            return None
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None  # half of a surrogate pair, or nothing that JSON can hold
    whole = len(text) // BYTES_PER_TOKEN * BYTES_PER_TOKEN
    return np.frombuffer(text[:whole], dtype="<u4").astype(np.int64)


class Sent(NamedTuple):
    """A prompt that went to an engine."""

    # Of the request there.
    number: int
    # For each block, the request that used it last; 0: none.
    before: Int32s
    # Requests that were open then.
    beside: frozenset[int] = frozenset()


@dataclass(slots=True)
class _SentPrompt:
    """The blocks of a prompt, in order."""

    blocks: UInt64s
    # The number of them that a later prompt used, too.
    stale: int = 0


class _Recency:
    """Blocks of one tier by the request that used each last; of one request the deepest go first.

    A request costs a few calls over arrays, however many blocks it has: a prompt of 500 kB has
    4,000, and a dictionary takes a microsecond for each.
    """

    def __init__(self, blocks: int) -> None:
        self._last = HashTable(min(blocks, UNKNOWN_BLOCKS), _MAX_LOAD)
        self._prompts: OrderedDict[int, _SentPrompt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def use(self, blocks: UInt64s, number: int) -> Int32s:
        """A request, later than all before, uses blocks; returns which one used each last."""
        before = self._last.replace(blocks, number)
        ends = [*(np.flatnonzero(before[1:] != before[:-1]) + 1).tolist(), len(before)]
        for start, end in itertools.pairwise([0, *ends]):
            earlier = int(before[start]) if end else 0
            prompt = self._prompts.get(earlier)
            if prompt is not None:
                prompt.stale += end - start
                # At least half of the remembered blocks are needed.
                if 2 * prompt.stale > len(prompt.blocks):
                    self._tidy(earlier, prompt)
        if len(blocks):
            self._prompts[number] = _SentPrompt(blocks)
        return before

    def shrink_to(self, most: int) -> UInt64s:
        """Give up all blocks but `most`, least recently used first; returns them."""
        gone: list[UInt64s] = []
        while self._prompts and len(self._last) > most:
            number, prompt = next(iter(self._prompts.items()))
            if prompt.stale:
                self._tidy(number, prompt)
            kept = max(0, len(prompt.blocks) - (len(self._last) - most))
            gone.append(prompt.blocks[kept:])
            prompt.blocks = prompt.blocks[:kept]
            self._last.remove(gone[-1])
            if not kept:
                self._prompts.pop(number, None)
        return np.concatenate(gone) if gone else _NO_BLOCKS

    def older(self, number: int) -> int:
        """The number of blocks that were last used by a request up to that one."""
        prompts = itertools.takewhile(lambda item: item[0] <= number, self._prompts.items())
        return sum(len(prompt.blocks) - prompt.stale for _, prompt in prompts)

    def _tidy(self, number: int, prompt: _SentPrompt) -> None:
        """Forget which of its blocks a later prompt used."""
        prompt.blocks = prompt.blocks[self._last.find(prompt.blocks)[0] == number]
        prompt.stale = 0
        if not len(prompt.blocks):
            del self._prompts[number]


class SentBlocks:
    """The caches of one engine, by what was sent to it; changes go to the index.

    size: blocks that each tier may hold, as far as is known; it shrinks when the engine finds less
    than it should hold, and grows again, slowly, while it finds what it should.
    """

    def __init__(self, worker: str, size: CacheSize) -> None:
        self._worker = worker
        self._limits: dict[Tier, int] = {"device": size.device_blocks, "host": size.host_blocks}
        self.size: dict[Tier, float] = dict(self._limits)
        self.clear()
        self._open: set[int] = set()
        self._number = 0

    def send(self, index: PrefixIndex, hashes: UInt64s) -> Sent:
        """A prompt goes to the engine, which will hold all of its blocks; `ended` follows."""
        if self._number == _LAST_NUMBER:
            self._number = 0
            for tier in self._tiers:
                self._shrink(index, tier, 0)
        self._number += 1
        used = np.zeros(len(hashes), dtype=np.int32)
        for tier, kept in self._tiers.items():
            np.maximum(used, kept.use(hashes, self._number), out=used)
            index.hold(self._worker, tier, hashes)
            self._shrink(index, tier, int(self.size[tier]))
        beside = frozenset(self._open)
        self._open.add(self._number)
        return Sent(self._number, used, beside)

    def found(self, index: PrefixIndex, sent: Sent, blocks: int) -> bool:
        """The engine found `blocks` leading blocks of a prompt that it was sent; whether that is
        less than it should have held.

        A block that a request open at that time had brought may not have been computed yet: that
        it was not found says nothing, even if that request is over by now.
        """
        fresh = np.flatnonzero(sent.before == 0)
        expected = int(fresh[0]) if fresh.size else len(sent.before)
        if blocks >= expected - _SLACK_BLOCKS:
            for tier, limit in self._limits.items():
                self.size[tier] = min(self.size[tier] * _GROWTH, limit)
            return False
        missing = int(sent.before[blocks])
        if missing in sent.beside:
            return False
        for tier, kept in self._tiers.items():
            held = len(kept)
            self._shrink(index, tier, held - kept.older(missing))
            # By half at most: one answer may be wrong, and a size that is too small grows slowly.
            self.size[tier] = min(self.size[tier], max(len(kept), held / 2, 1))
        return True

    def ended(self, sent: Sent) -> None:
        """The request is over."""
        self._open.discard(sent.number)

    def clear(self) -> None:
        """The engine lost everything; the index knows already."""
        self._tiers = {tier: _Recency(blocks) for tier, blocks in self._limits.items() if blocks}

    def _shrink(self, index: PrefixIndex, tier: Tier, most: int) -> None:
        gone = self._tiers[tier].shrink_to(most)
        if gone.size:
            index.drop(self._worker, tier, gone)
