"""What an engine that reports nothing holds: what was sent to it, as long as its caches keep it.

A prompt is its text, four bytes to a token, in blocks of 32: nothing has to be tokenized, and a
conversation that grows extends its own blocks. Every engine's caches are followed as two lists of
blocks, least recently used first, of the device and of the host tier behind it. Where an engine
says how much of a prompt it found (`usage`), and that is less than expected, its cache is smaller
than was thought: what was used before the missing block is gone, too. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kappa.cost import step_model
from kappa.hardware import NodeProfile
from kappa.model import ModelShape, kv_bytes_per_token
from kappa.protocol import Announcement
from router.index.kv_events import Tier
from router.index.prefix_hash import UInt64s
from router.index.prefix_index import PrefixIndex

BYTES_PER_TOKEN = 4
BLOCK_TOKENS = 32
UNKNOWN_BLOCKS = 1 << 20
"""Of a device whose size is not known."""
_GROWTH = 1.02
_SLACK_BLOCKS = 8
"""So many fewer found than expected say nothing: blocks of engines have up to 256 tokens."""
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
    """What an engine that announces nothing is taken to be: `node` of the catalogue, serving
    `shape`, whole prompts of up to 8,192 tokens at a step."""
    return Announcement(
        worker=worker, model=model, node=node, step=step_model(shape, node),
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
    """A prompt that went to an engine. number: of the request there; before: of each block, the
    request that it was last used by, 0 for none; beside: requests that were open then."""

    hashes: list[int]
    number: int
    before: list[int]
    beside: frozenset[int] = frozenset()


class SentBlocks:
    """The caches of one engine, by what was sent to it; changes go to the index.

    device, host: blocks that each may hold, as far as is known; they shrink when the engine finds
    less than it should hold, and grow again, slowly, while it finds what it should.
    """

    def __init__(self, worker: str, size: CacheSize) -> None:
        self._worker = worker
        self._limits: dict[Tier, float] = {"device": size.device_blocks, "host": size.host_blocks}
        self.size = dict(self._limits)
        self._tiers: dict[Tier, OrderedDict[int, int]] = {"device": OrderedDict()}
        if size.host_blocks:
            self._tiers["host"] = OrderedDict()
        self._open: set[int] = set()
        self._number = 0

    def send(self, index: PrefixIndex, hashes: UInt64s) -> Sent:
        """A prompt goes to the engine, which will hold all of its blocks; `ended` follows."""
        self._number += 1
        names = hashes.tolist()
        used = [max(kept.get(name, 0) for kept in self._tiers.values()) for name in names]
        for tier, kept in self._tiers.items():
            # Engines give the end of a prompt up before its beginning.
            for name in reversed(names):
                kept[name] = self._number
                kept.move_to_end(name)
            index.hold(self._worker, tier, hashes)
            self._trim(index, tier)
        beside = frozenset(self._open)
        self._open.add(self._number)
        return Sent(names, self._number, used, beside)

    def found(self, index: PrefixIndex, sent: Sent, blocks: int) -> bool:
        """The engine found so many leading blocks of a prompt that it was sent; whether that is
        less than it should have held.

        A block that a request open at that time had brought may not have been computed yet: that
        it was not found says nothing, even if that request is over by now.
        """
        expected = next((i for i, n in enumerate(sent.before) if not n), len(sent.before))
        if blocks >= expected - _SLACK_BLOCKS:
            for tier, limit in self._limits.items():
                self.size[tier] = min(self.size[tier] * _GROWTH, limit)
            return False
        missing = sent.before[blocks]
        if missing in sent.beside:
            return False
        for tier, kept in self._tiers.items():
            held = len(kept)
            while kept and next(iter(kept.values())) <= missing:
                self._drop(index, tier, kept.popitem(last=False)[0])
            # By half at most: one answer may be wrong, and what is too small grows slowly.
            self.size[tier] = min(self.size[tier], max(len(kept), held / 2, 1))
        return True

    def ended(self, sent: Sent) -> None:
        """The request is over."""
        self._open.discard(sent.number)

    def clear(self) -> None:
        """The engine lost everything; the index knows already."""
        for kept in self._tiers.values():
            kept.clear()

    def _trim(self, index: PrefixIndex, tier: Tier) -> None:
        kept = self._tiers[tier]
        while len(kept) > self.size[tier]:
            self._drop(index, tier, kept.popitem(last=False)[0])

    def _drop(self, index: PrefixIndex, tier: Tier, name: int) -> None:
        index.drop(self._worker, tier, np.array([name], dtype=np.uint64))
