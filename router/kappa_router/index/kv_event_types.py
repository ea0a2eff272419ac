"""KV events: what a worker reports to the prefix index, and engines' streams decoded into it.

The simulator makes the typed events directly; `PrefixIndex.handle` is their only consumer. Engine
hashes are opaque: whatever the engine calls a block, unique per worker and data-parallel rank until
it resets; the cache groups of a hybrid model share them.

A batch is a msgpack array `[ts, events, data_parallel_rank]`; each event is a map with a "type"
(vLLM 0.29, SGLang's main branch of autumn 2026, Dynamo), or an array whose first item is that
(released SGLang, older vLLM). One `StreamCursor` per worker and rank detects lost events; the
caller then replays from `expected`, or resets them in the index and calls `resume`. Pure.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kappa_router.index.prefix_hash import salt_of

Tier = Literal["device", "host", "disk"]
EngineHash = int | bytes

# By an event's medium in capitals: vLLM's names; SGLang's of HiCache's levels, where EXTERNAL is a
# pool that servers share, such as Mooncake's; those that Dynamo merges several sources under.
_TIERS: dict[str, Tier] = {
    "GPU": "device", "CPU": "host", "CPU_PINNED": "host", "CPU_TIER1": "host",
    "STORAGE": "disk", "DISK": "disk", "CPU_TIER2": "disk", "EXTERNAL": "disk",
}  # fmt: skip


# eq=False: token arrays have no single truth value, so generated equality would raise.
@dataclass(frozen=True, slots=True, eq=False)
class BlocksStored:
    """A run of consecutive blocks became available in a tier."""

    worker: str
    tier: Tier
    # The engine's names, in order.
    engine_hashes: tuple[EngineHash, ...]
    # The block before the first one; None at the start of a sequence.
    parent_engine_hash: EngineHash | None
    # All blocks' tokens, `block_tokens` each; empty when the engine only names the blocks.
    token_ids: NDArray[np.integer] | tuple[int, ...]
    # Ignored without tokens.
    block_tokens: int
    # Sets this sequence apart (`prefix_hash.salt_of`, 0 for nothing); None when the event does not
    # say, and the parent or the engine hash must.
    salt: int | None
    # The data-parallel rank of the worker that holds them, which has a cache of its own.
    rank: int = 0
    # The cache group of a hybrid model; 0 is the one that a hit needs from its beginning.
    group: int = 0
    # Tokens before its end that a hit needs of a further group; None: all.
    last_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks left a tier, in any order, with or without those before and after them."""

    worker: str
    tier: Tier
    engine_hashes: tuple[EngineHash, ...]
    rank: int = 0
    group: int = 0


@dataclass(frozen=True, slots=True)
class TierCleared:
    """A tier of a rank lost everything at once; tier None means all of them."""

    worker: str
    tier: Tier | None
    rank: int = 0


@dataclass(frozen=True, slots=True)
class WorkerReset:
    """The worker's known state is invalid (restart, or events were lost); it lives on."""

    worker: str
    # The only one that this is about; None: all of them.
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The worker left."""

    worker: str


KVEvent = BlocksStored | BlocksRemoved | TierCleared | WorkerReset | WorkerGone


class StreamCursor:
    """Follows the sequence numbers of a stream, which start at 0 and rise by 1 per batch."""

    def __init__(self) -> None:
        self.expected = 0

    def advance(self, seq: int) -> Literal["ok", "duplicate", "gap"]:
        """Take a batch's number: apply it ("ok"), skip it ("duplicate"), or resync ("gap").

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


# ---- the wire format


# Far above what an engine sends of one step. Who lies about it costs no memory: msgspec looks at a
# list's length before it makes its items.
_MOST_EVENTS, _MOST_BLOCKS, _MOST_TOKENS, _MOST_KEYS = 1 << 16, 1 << 17, 1 << 21, 64
_MOST_RANKS, _MOST_GROUPS = 1024, 256
# Removals that become one, which the index takes in some 0.1 ms.
_MOST_JOINED = 64
_Hashes = Annotated[list[int | bytes], msgspec.Meta(max_length=_MOST_BLOCKS)]
_Group = Annotated[int, msgspec.Meta(ge=0, lt=_MOST_GROUPS)] | None
# Names in what an engine sends that are counted: their length, and how many of them.
_LONGEST_NAME, _MOST_NAMES = 64, 64


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MOST_EVENTS)]
    data_parallel_rank: Annotated[int, msgspec.Meta(ge=0, lt=_MOST_RANKS)] | None = None


class _Kind(msgspec.Struct, gc=False):
    type: str


class _Metadata(msgspec.Struct, gc=False):
    cache_salt: str | None = None


class _Stored(msgspec.Struct, gc=False):
    block_hashes: _Hashes
    parent_block_hash: int | bytes | None
    # With speculative decoding by EAGLE, SGLang sends each token with the one after it.
    token_ids: Annotated[list[int | tuple[int, int]], msgspec.Meta(max_length=_MOST_TOKENS)]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    # In SGLang's arrays the salt is in this place, where there is one.
    lora_name: str | _Metadata | None = None
    extra_keys: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MOST_BLOCKS)] | None = None
    group_idx: _Group = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    # SGLang's; vLLM's are in `extra_keys`.
    cache_salt: str | msgspec.UnsetType | None = msgspec.UNSET


class _Removed(msgspec.Struct, gc=False):
    block_hashes: _Hashes
    medium: str | None = None
    group_idx: _Group = None
    locality: str | None = None


# The same as arrays.
class _KindRow(_Kind, array_like=True, gc=False): ...


class _StoredRow(_Stored, array_like=True, tag="BlockStored", gc=False): ...


class _RemovedRow(_Removed, array_like=True, tag="BlockRemoved", gc=False): ...


_decode_outer = msgspec.msgpack.Decoder(_Batch).decode
_decode_kind = msgspec.msgpack.Decoder(_Kind).decode
_decode_stored = msgspec.msgpack.Decoder(_Stored).decode
_decode_removed = msgspec.msgpack.Decoder(_Removed).decode
_decode_row_kind = msgspec.msgpack.Decoder(_KindRow).decode
_decode_row = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow).decode
_decode_texts = msgspec.msgpack.Decoder(
    Annotated[list[str], msgspec.Meta(max_length=_MOST_KEYS)] | None
).decode


# Kinds of cache groups (vLLM's `KVCacheSpecKind`): a hit needs the whole prefix of the first, of
# the next the tokens of a window before its end, and of Mamba's the state there.
_WHOLE = frozenset(("full_attention", "mla_attention", "sink_full_attention"))
_WINDOWS = frozenset(("sliding_window", "sliding_window_mla"))
_STATES = frozenset(("mamba",))


class CacheGroup(NamedTuple):
    """A cache group of a rank."""

    # As the engine calls it; None: not told.
    kind: str | None
    # `group` of its events; None: its blocks are left out, and hits do not need them.
    number: int | None
    # As of its events.
    last_tokens: int | None = None


_ONLY = CacheGroup(None, 0)


class CacheGroups:
    """The cache groups of one worker, as far as its events have told: only stores say of which
    kind a group is.

    hybrid: whether there are further ones.
    """

    def __init__(self) -> None:
        self.hybrid = False
        self._known: dict[tuple[int, int], CacheGroup] = {}
        # By rank, which of the groups with the whole prefix counts as the first.
        self._first: dict[int, int] = {}
        self._met = set[tuple[int, str]]()

    def of(self, rank: int, event: _Stored | _Removed, counts: Counter[str]) -> CacheGroup | None:
        """The group that an event is about; None: not known. Counts priced groups, once each.

        One that no event describes is taken for the only group of its model if it is the first.
        """
        index = event.group_idx
        if index is None:
            return _ONLY
        known = self._known.get((rank, index))
        if isinstance(event, _Stored):
            kind = event.kv_cache_spec_kind
            if kind is not None and (known is None or known.kind != kind):
                return self._learn(rank, index, kind, event.kv_cache_spec_sliding_window, counts)
        return known or (None if index else _ONLY)

    def _learn(
        self, rank: int, index: int, kind: str, window: int | None, counts: Counter[str]
    ) -> CacheGroup | None:
        if (rank, index) in self._known:
            # Another model.
            self._first.pop(rank, None)
            self._known = {place: group for place, group in self._known.items() if place[0] != rank}
        if len(self._known) >= _MOST_GROUPS:
            return None
        number: int | None = index + 1
        last_tokens = None
        if kind in _WHOLE:
            if self._first.setdefault(rank, index) == index:
                number = 0
        elif kind in _STATES:
            last_tokens = 1
        elif kind in _WINDOWS and window is not None:
            last_tokens = max(window - 1, 1)
        else:
            number = None
        self.hybrid = self.hybrid or bool(number)
        if number is not None and (index, kind) not in self._met:
            self._met.add((index, kind))
            counts[f"priced_{kind}"] += 1
        made = self._known[rank, index] = CacheGroup(kind, number, last_tokens)
        return made


class Batch(NamedTuple):
    """The events of one message, and the data-parallel rank that it is from."""

    rank: int
    events: list[KVEvent]


def decode(payload: bytes, worker: str, counts: Counter[str], groups: CacheGroups) -> Batch:
    """Events of one published batch, in order, in the name of `worker`; of stores in a row those of
    group 0 come first, since further groups mostly name blocks that it describes.

    AllBlocksCleared clears all tiers: the engine sends it for the device cache and nothing for
    the others, which may have been cleared with it.

    Args:
        payload: the message's last frame.
        worker: name to give the events.
        counts: counts events left out, by reason: an unknown type ("type:..."),
            another medium ("medium:..."), "remote", "other_group" (a cache group of a kind not
            told so far), "unpriced_..." (one of another kind than are priced), "sparse" (tokens do
            not line up with blocks), "multimodal" (blocks with more content than tokens, with
            those after them in the event). Also counts the groups met that are priced, each
            once, by kind ("priced_...").
        groups: what earlier batches of the stream told of its cache groups; learns from this one.

    Raises:
        ValueError: the payload is malformed; names the worker and the reason.
    """
    try:
        outer = _decode_outer(payload)
    except msgspec.DecodeError as error:
        raise ValueError(f"malformed KV event batch from worker {worker}: {error}") from error
    rank = outer.data_parallel_rank or 0
    try:
        decoded = [_decoded(raw, worker, rank, counts, groups) for raw in outer.events]
    except (msgspec.DecodeError, OverflowError) as error:
        raise ValueError(f"malformed KV event from worker {worker}: {error}") from error
    events = [event for event in decoded if event is not None]
    if groups.hybrid:
        runs = (list(run) for _, run in groupby(events, type))
        events = [event for run in runs for event in sorted(run, key=_is_further)]
    return Batch(rank, events)


def joined(events: Iterable[KVEvent]) -> list[KVEvent]:
    """The same, with removals that follow one another, of one tier and group, as one: an engine
    names each block by itself, and an event takes the index as long as twenty blocks of one."""
    made: list[KVEvent] = []
    for place, run in groupby(events, _removed_from):
        if place is None:
            made += run
            continue
        worker, tier, rank, group = place
        gone = [name for event in run for name in getattr(event, "engine_hashes", ())]
        for start in range(0, len(gone), _MOST_JOINED):
            names = tuple(gone[start : start + _MOST_JOINED])
            made.append(BlocksRemoved(worker, tier, names, rank, group))
    return made


def _removed_from(event: KVEvent) -> tuple[str, Tier, int, int] | None:
    if not isinstance(event, BlocksRemoved):
        return None
    return event.worker, event.tier, event.rank, event.group


def _is_further(event: KVEvent) -> bool:
    return isinstance(event, BlocksStored) and event.group > 0


def _decoded(
    raw: msgspec.Raw, worker: str, rank: int, counts: Counter[str], groups: CacheGroups
) -> KVEvent | None:
    """One event; None, counted, if it is not about a tier or a cache group of ours."""
    first = memoryview(raw)[0]
    # msgpack's arrays: of up to 15 items, of up to 65,535, of more.
    is_row = 0x90 <= first < 0xA0 or first in (0xDC, 0xDD)
    kind = (_decode_row_kind(raw) if is_row else _decode_kind(raw)).type
    if kind == "AllBlocksCleared":
        return TierCleared(worker, None, rank)
    if kind not in ("BlockStored", "BlockRemoved"):
        _left_out(f"type:{kind}", counts)
        return None
    event: _Stored | _Removed
    if is_row:
        event = _decode_row(raw)
    else:
        event = _decode_stored(raw) if kind == "BlockStored" else _decode_removed(raw)
    # SGLang named no medium before it had another one than this.
    medium = "GPU" if is_row and event.medium is None else event.medium
    tier = _TIERS.get((medium or "").upper())
    group = groups.of(rank, event, counts)
    if tier is None:
        _left_out(f"medium:{medium}", counts)
    elif event.locality == "REMOTE":
        counts["remote"] += 1
    elif group is None:
        counts["other_group"] += 1
    elif group.number is None:
        counts[f"unpriced_{group.kind}"] += 1
    elif isinstance(event, _Removed):
        return BlocksRemoved(worker, tier, tuple(event.block_hashes), rank, group.number)
    else:
        return _stored(event, worker, rank, tier, group, counts)
    return None


def _left_out(what: str, counts: Counter[str]) -> None:
    """Count an event by a name that came with it."""
    name = what[:_LONGEST_NAME]
    counts[name if name in counts or len(counts) < _MOST_NAMES else "other:names"] += 1


def _stored(
    event: _Stored, worker: str, rank: int, tier: Tier, group: CacheGroup, counts: Counter[str]
) -> BlocksStored | None:
    assert group.number is not None
    hashes: tuple[EngineHash, ...] = tuple(event.block_hashes)
    token_ids: list[Any] = event.token_ids
    # Without tokens the blocks are only named (host events that do not describe themselves).
    if token_ids and len(token_ids) != len(hashes) * event.block_size:
        if group.last_tokens is None:
            counts["sparse"] += 1
            return None
        # Of a window, or of states, an engine may leave out blocks; their tokens it sends.
        token_ids = []
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
    adapter, told = event.lora_name, event.cache_salt
    if isinstance(adapter, _Metadata):
        told, adapter = adapter.cache_salt, None
    if parent is None and not isinstance(told, msgspec.UnsetType):
        salt = salt_of(told, adapter)
    elif tier == "device" and parent is None:
        # Only the first block of a sequence reports its salt, behind its adapter's name.
        if adapter is not None and first[:1] == [adapter]:
            del first[0]
        salt = salt_of(first[0] if first else None, adapter)
    token_ids = token_ids[: usable * event.block_size]
    if token_ids and isinstance(token_ids[0], tuple):
        token_ids = [one[0] if isinstance(one, tuple) else one for one in token_ids]
    try:
        tokens = np.frombuffer(array("q", token_ids), dtype=np.int64)
    except TypeError:
        raise OverflowError("some token ids are pairs") from None
    return BlocksStored(
        worker, tier, hashes[:usable], parent, tokens, event.block_size, salt, rank,
        group.number, group.last_tokens,
    )  # fmt: skip


def _texts(keys: msgspec.Raw) -> list[str] | None:
    """A block's further keys; None if one of them is no string."""
    try:
        return _decode_texts(keys) or []
    except msgspec.ValidationError:
        return None
