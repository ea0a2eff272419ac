"""vLLM's KV event stream, decoded: payload bytes in, the index's typed events out.

A batch is a msgpack array `[ts, events, data_parallel_rank]`; each event is a map whose "type"
names it (vLLM 0.29). Pure: sockets, replay and logging belong to the ingress. One `StreamCursor`
per worker tells when events were lost; the caller then replays from `expected`, or resets the
worker in the index and calls `resume`.
"""

from collections import Counter
from typing import Any, Literal

import msgspec
import numpy as np

from router.index.kv_events import (
    BlocksRemoved,
    BlocksStored,
    EngineHash,
    KVEvent,
    Tier,
    TierCleared,
)
from router.index.prefix_hash import salt_of

_TIERS: dict[str, Tier] = {"GPU": "device", "CPU": "host"}


class StreamCursor:
    """Follows one worker's sequence numbers, which start at 0 and rise by 1 per batch."""

    __slots__ = ("_sent_s", "expected")

    def __init__(self, expected: int = 0) -> None:
        self.expected = expected
        self._sent_s = float("-inf")

    def advance(self, seq: int, sent_s: float | None = None) -> Literal["ok", "duplicate", "gap"]:
        """Judge a batch: apply it ("ok"), skip it ("duplicate"), or something is lost ("gap").

        The cursor moves on "ok" only, so after a gap the missing numbers are
        [expected, seq). Numbers start over when a worker restarts, which alone would look like
        duplicates for a long time; given `sent_s` (the batch's own time, seconds), an old number
        with a newer time is a gap too.

        Raises:
            ValueError: seq is negative.
        """
        if seq < 0:
            raise ValueError(f"sequence numbers start at 0, got {seq}")
        if seq < self.expected:
            restarted = sent_s is not None and sent_s > self._sent_s
            return "gap" if restarted else "duplicate"
        if seq > self.expected:
            return "gap"
        self.expected += 1
        if sent_s is not None:
            self._sent_s = max(self._sent_s, sent_s)
        return "ok"

    def resume(self, expected: int) -> None:
        """Go on from `expected`, after a reset of the worker or a snapshot taken before it."""
        self.expected = expected
        self._sent_s = float("-inf")


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _Kind(msgspec.Struct, gc=False):
    type: str


class _Stored(msgspec.Struct, gc=False):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class _Removed(msgspec.Struct, gc=False):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


_decode_outer = msgspec.msgpack.Decoder(_Batch).decode
_decode_kind = msgspec.msgpack.Decoder(_Kind).decode
_decode_stored = msgspec.msgpack.Decoder(_Stored).decode
_decode_removed = msgspec.msgpack.Decoder(_Removed).decode


def sent_at(payload: bytes, worker: str) -> float:
    """The batch's publication time in seconds since the epoch, by the worker's clock.

    Raises:
        ValueError: the payload is malformed; names the worker.
    """
    return _outer(payload, worker).ts


def decode_batch(
    payload: bytes,
    worker: str,
    skipped: Counter[str] | None = None,
    cleared_tier: Tier | None = None,
) -> list[KVEvent]:
    """Events of one published batch, in order.

    Args:
        payload: the message's last frame.
        worker: name to give the events.
        skipped: if given, counts events left out, by reason: an unknown type ("type:..."),
            another medium ("medium:..."), "remote", "other_group" (a hybrid model's further
            cache groups), "sparse" (tokens do not line up with blocks), "multimodal" (blocks
            whose content is more than tokens, with those after them in the event).
        cleared_tier: what AllBlocksCleared clears. The engine sends it for the device cache and
            nothing for the host's, which may have been cleared with it: the default (both) may
            forget what is still held, "device" may go on claiming what is not.

    Raises:
        ValueError: the payload is malformed; names the worker and the reason.
    """
    counts = Counter[str]() if skipped is None else skipped
    events: list[KVEvent] = []
    for raw in _outer(payload, worker).events:
        try:
            event = _decode_event(raw, worker, counts, cleared_tier)
        except (msgspec.DecodeError, OverflowError) as error:
            raise ValueError(f"malformed KV event from worker {worker}: {error}") from error
        if event is not None:
            events.append(event)
    return events


def _outer(payload: bytes, worker: str) -> _Batch:
    try:
        return _decode_outer(payload)
    except msgspec.DecodeError as error:
        raise ValueError(f"malformed KV event batch from worker {worker}: {error}") from error


def _decode_event(
    raw: msgspec.Raw, worker: str, counts: Counter[str], cleared_tier: Tier | None
) -> KVEvent | None:
    kind = _decode_kind(raw).type
    if kind == "AllBlocksCleared":
        return TierCleared(worker, cleared_tier)
    if kind == "BlockStored":
        return _stored(_decode_stored(raw), worker, counts)
    if kind == "BlockRemoved":
        removed = _decode_removed(raw)
        tier = _tier(removed, counts)
        if tier is None:
            return None
        return BlocksRemoved(worker, tier, tuple(removed.block_hashes))
    counts[f"type:{kind}"] += 1
    return None


def _tier(event: _Stored | _Removed, counts: Counter[str]) -> Tier | None:
    """The tier an event is about, or None, counted, if it is not about one of ours."""
    tier = _TIERS.get(event.medium or "")
    if tier is None:
        counts[f"medium:{event.medium}"] += 1
    elif event.locality == "REMOTE":
        counts["remote"] += 1
    elif event.group_idx:
        counts["other_group"] += 1
    else:
        return tier
    return None


def _stored(event: _Stored, worker: str, counts: Counter[str]) -> BlocksStored | None:
    tier = _tier(event, counts)
    if tier is None:
        return None
    hashes: tuple[EngineHash, ...] = tuple(event.block_hashes)
    # Without tokens the blocks are only named (host events that do not describe themselves).
    if event.token_ids and len(event.token_ids) != len(hashes) * event.block_size:
        counts["sparse"] += 1
        return None
    plain = _plain_blocks(event)
    if plain < len(hashes):
        counts["multimodal"] += 1
        hashes = hashes[:plain]
        if not plain:
            return None
    tokens = np.array(event.token_ids[: plain * event.block_size], dtype=np.int64)
    salt = _salt(event) if tier == "device" else None
    return BlocksStored(
        worker, tier, hashes, event.parent_block_hash, tokens, event.block_size, salt
    )


def _plain_blocks(event: _Stored) -> int:
    """How many leading blocks are told apart by tokens, adapter and salt alone."""
    for i, keys in enumerate(event.extra_keys or ()):
        # Names and salts are strings; images are (identifier, offset) pairs, embeddings bytes.
        if keys and not all(isinstance(key, str) for key in keys):
            return i
    return len(event.block_hashes)


def _salt(event: _Stored) -> int | None:
    """A sequence's salt, told by its first block only; None for later runs, which inherit."""
    if event.parent_block_hash is not None:
        return None
    first = (event.extra_keys or [None])[0] or []
    keys = [key for key in first if isinstance(key, str)]
    if event.lora_name is not None and keys[:1] == [event.lora_name]:
        keys = keys[1:]
    return salt_of(keys[0] if keys else None, event.lora_name)
