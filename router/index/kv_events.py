"""KV events: what a worker reports to the prefix index, and vLLM's stream decoded into it.

The simulator makes the typed events directly; `PrefixIndex.handle` is their only consumer. Engine
hashes are opaque: whatever the engine calls a block, unique per worker until it resets.

A batch of vLLM's is a msgpack array `[ts, events, data_parallel_rank]`; each event is a map whose
"type" names it (vLLM 0.29). One `StreamCursor` per worker detects lost events; the caller then
replays from `expected`, or resets the worker in the index and calls `resume`. Pure.
"""

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from router.index.prefix_hash import salt_of

Tier = Literal["device", "host", "disk"]
EngineHash = int | bytes

_TIERS: dict[str, Tier] = {"GPU": "device", "CPU": "host", "STORAGE": "disk"}


# eq=False: token arrays have no single truth value, so generated equality would raise.
@dataclass(frozen=True, slots=True, eq=False)
class BlocksStored:
    """A run of consecutive blocks became available in a tier.

    engine_hashes: the engine's names, in order.
    parent_engine_hash: the block before the first one; None at the start of a sequence.
    token_ids: all blocks' tokens, block_tokens each; empty when the engine only names them.
    block_tokens: tokens in a block (ignored without tokens).
    salt: what sets this sequence apart (`prefix_hash.salt_of`, 0 for nothing); None when the event
    does not say, and the parent or the engine hash must.
    """

    worker: str
    tier: Tier
    engine_hashes: tuple[EngineHash, ...]
    parent_engine_hash: EngineHash | None
    token_ids: NDArray[np.integer] | tuple[int, ...]
    block_tokens: int
    salt: int | None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks left a tier, in any order, with or without those before and after them."""

    worker: str
    tier: Tier
    engine_hashes: tuple[EngineHash, ...]


@dataclass(frozen=True, slots=True)
class TierCleared:
    """A tier lost everything at once; tier None means all of them."""

    worker: str
    tier: Tier | None


@dataclass(frozen=True, slots=True)
class WorkerReset:
    """What is known of the worker is invalid (restart, or events were lost); it lives on."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The worker left."""

    worker: str


KVEvent = BlocksStored | BlocksRemoved | TierCleared | WorkerReset | WorkerGone


class StreamCursor:
    """Follows one worker's sequence numbers, which start at 0 and rise by 1 per batch."""

    def __init__(self) -> None:
        self.expected = 0

    def advance(self, seq: int) -> Literal["ok", "duplicate", "gap"]:
        """What to do with a batch: apply ("ok") or skip it ("duplicate"), or resync ("gap").

        Moves on "ok" only, so after a gap the missing numbers are [expected, seq).

        Raises:
            ValueError: seq is negative.
        """
        if seq < 0:
            raise ValueError(f"sequence numbers start at 0, got {seq}")
        if seq != self.expected:
            return "duplicate" if seq < self.expected else "gap"
        self.expected += 1
        return "ok"

    def resume(self, expected: int) -> None:
        """Go on from `expected`, after a reset of the worker or a snapshot taken before it."""
        self.expected = expected


# ---- vLLM's wire format


# Far above what an engine sends of one step. Who lies about it costs no memory: msgspec looks at a
# list's length before it makes its items.
_MOST_EVENTS, _MOST_BLOCKS, _MOST_TOKENS, _MOST_KEYS = 1 << 16, 1 << 17, 1 << 21, 64
_Hashes = Annotated[list[int | bytes], msgspec.Meta(max_length=_MOST_BLOCKS)]


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MOST_EVENTS)]
    data_parallel_rank: int | None = None


class _Kind(msgspec.Struct, gc=False):
    type: str


class _Stored(msgspec.Struct, gc=False):
    block_hashes: _Hashes
    parent_block_hash: int | bytes | None
    token_ids: Annotated[list[int], msgspec.Meta(max_length=_MOST_TOKENS)]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MOST_BLOCKS)] | None = None
    group_idx: int | None = None
    locality: str | None = None


class _Removed(msgspec.Struct, gc=False):
    block_hashes: _Hashes
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


_decode_outer = msgspec.msgpack.Decoder(_Batch).decode
_decode_kind = msgspec.msgpack.Decoder(_Kind).decode
_decode_stored = msgspec.msgpack.Decoder(_Stored).decode
_decode_removed = msgspec.msgpack.Decoder(_Removed).decode
_decode_texts = msgspec.msgpack.Decoder(
    Annotated[list[str], msgspec.Meta(max_length=_MOST_KEYS)] | None
).decode


def decode_batch(payload: bytes, worker: str, skipped: Counter[str] | None = None) -> list[KVEvent]:
    """Events of one published batch, in order, in the name of `worker`.

    AllBlocksCleared clears all tiers: the engine sends it for the device cache and nothing for
    the others, which may have been cleared with it.

    Args:
        payload: the message's last frame.
        worker: name to give the events.
        skipped: if given, counts events left out, by reason: an unknown type ("type:..."),
            another medium ("medium:..."), "remote", "other_group" (a hybrid model's further
            cache groups), "sparse" (tokens do not line up with blocks), "multimodal" (blocks
            whose content is more than tokens, with those after them in the event).

    Raises:
        ValueError: the payload is malformed; names the worker and the reason.
    """
    counts = Counter[str]() if skipped is None else skipped
    try:
        outer = _decode_outer(payload)
    except msgspec.DecodeError as error:
        raise ValueError(f"malformed KV event batch from worker {worker}: {error}") from error
    try:
        decoded = [_decoded(raw, worker, counts) for raw in outer.events]
    except (msgspec.DecodeError, OverflowError) as error:
        raise ValueError(f"malformed KV event from worker {worker}: {error}") from error
    return [event for event in decoded if event is not None]


def _decoded(raw: msgspec.Raw, worker: str, counts: Counter[str]) -> KVEvent | None:
    """One event; None, counted, if it is not about a tier of ours."""
    kind = _decode_kind(raw).type
    if kind == "AllBlocksCleared":
        return TierCleared(worker, None)
    if kind not in ("BlockStored", "BlockRemoved"):
        counts[f"type:{kind}"] += 1
        return None
    event = _decode_stored(raw) if kind == "BlockStored" else _decode_removed(raw)
    tier = _TIERS.get(event.medium or "")
    if tier is None:
        counts[f"medium:{event.medium}"] += 1
    elif event.locality == "REMOTE":
        counts["remote"] += 1
    elif event.group_idx:
        counts["other_group"] += 1
    elif isinstance(event, _Removed):
        return BlocksRemoved(worker, tier, tuple(event.block_hashes))
    else:
        return _stored(event, worker, tier, counts)
    return None


def _stored(event: _Stored, worker: str, tier: Tier, counts: Counter[str]) -> BlocksStored | None:
    hashes: tuple[EngineHash, ...] = tuple(event.block_hashes)
    # Without tokens the blocks are only named (host events that do not describe themselves).
    if event.token_ids and len(event.token_ids) != len(hashes) * event.block_size:
        counts["sparse"] += 1
        return None
    # Names and salts are strings; images are (identifier, offset) pairs, embeddings bytes.
    first, usable = list[str](), len(hashes)
    for block, keys in enumerate(event.extra_keys or ()):
        texts = _texts(keys)
        if texts is None:
            usable = block
            counts["multimodal"] += 1
            break
        first = first if block else texts
    if not usable:
        return None
    parent, salt = event.parent_block_hash, None
    if tier == "device" and parent is None:
        # Only the first block of a sequence reports its salt, behind its adapter's name.
        if event.lora_name is not None and first[:1] == [event.lora_name]:
            del first[0]
        salt = salt_of(first[0] if first else None, event.lora_name)
    tokens = np.frombuffer(array("q", event.token_ids[: usable * event.block_size]), dtype=np.int64)
    return BlocksStored(worker, tier, hashes[:usable], parent, tokens, event.block_size, salt)


def _texts(keys: msgspec.Raw) -> list[str] | None:
    """A block's further keys; None if one of them is no string."""
    try:
        return _decode_texts(keys) or []
    except msgspec.ValidationError:
        return None
