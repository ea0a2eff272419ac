"""A worker's copy of the KV blocks that its engine has announced, by tier: a router that joins
late, or lost a message, gets the state with a sequence number instead of history. It speaks vLLM's
own events, so a snapshot is decoded like a live one. A device may hold a hash in several blocks and
announces each; other media hold a hash once. The cache groups of a hybrid model hold blocks of the
same hashes, each for itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

Hash = int | bytes
_DEVICE = "GPU"
_BATCH_EVENTS = 512
_decode = msgspec.msgpack.Decoder(KVEventBatch).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _Block:
    """A block; token_ids: empty if the engine only named it."""

    parent: Hash | None
    token_ids: list[int]
    extra_keys: tuple[Any, ...] | None
    media: set[str]
    device_copies: int = 0
    lora_name: str | None = None


@dataclass(slots=True)
class _Group:
    """A cache group: layers with blocks that are held together."""

    # The engine's number of it; None: it does not say, as the next two.
    index: int | None = None
    kind: str | None = None
    # Tokens of a sliding window.
    window: int | None = None
    block_size: int = 0
    blocks: dict[Hash, _Block] = field(default_factory=dict)

    @property
    def by_name(self) -> bool:
        """Whether a hit needs only blocks at its end, which others may describe."""
        return self.window is not None or self.kind == "mamba"


class KvMirror:
    """Blocks by cache group and engine hash, each with its parent, its tokens and the media that
    hold it."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._first = 0

    def __len__(self) -> int:
        return sum(len(group.blocks) for group in self._groups.values())

    def apply(self, payload: bytes) -> None:
        """Apply one event batch as vLLM published it (msgpack)."""
        for event in _decode(payload).events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                for group in self._groups.values():
                    group.blocks.clear()

    def clear(self) -> None:
        """Forget everything (after a lost message nothing here can be trusted)."""
        self._groups.clear()

    def snapshot(self) -> list[bytes]:
        """Event batches that rebuild this state from nothing, parents before children, and groups
        that describe their blocks before those that name them."""
        events: list[BlockStored | BlockRemoved] = []
        for group in sorted(self._groups.values(), key=lambda group: group.by_name):
            for block_hash, block in _in_order(group.blocks):
                events += _events(group, block_hash, block)
        lots = (events[i : i + _BATCH_EVENTS] for i in range(0, len(events), _BATCH_EVENTS))
        return [_encode(KVEventBatch(ts=0.0, events=lot)) for lot in lots]  # type: ignore[arg-type]

    def _group(self, index: int | None) -> _Group:
        """The group of this index; None: the one that describes blocks."""
        return self._groups.setdefault(self._first if index is None else index, _Group())

    def _store(self, event: BlockStored) -> None:
        group, size = self._group(event.group_idx), event.block_size
        if event.kv_cache_spec_kind is not None and event.group_idx is not None:
            group.index, group.kind = event.group_idx, event.kv_cache_spec_kind
            group.window = event.kv_cache_spec_sliding_window
            described = self._groups.get(self._first)
            if described is None or described.by_name:
                self._first = event.group_idx
        group.block_size = size or group.block_size
        medium, parent = event.medium or _DEVICE, event.parent_block_hash
        whole = len(event.token_ids) == size * len(event.block_hashes)
        for i, block_hash in enumerate(event.block_hashes):
            block = group.blocks.get(block_hash)
            token_ids = event.token_ids[i * size : (i + 1) * size] if whole else []
            if block is None and (token_ids or group.by_name):
                # Without its tokens a block cannot be matched to a prompt: not worth a row, unless
                # another group has them.
                extra = event.extra_keys[i] if event.extra_keys else None
                block = _Block(parent, token_ids, extra, set(), lora_name=event.lora_name)
                group.blocks[block_hash] = block
            if block is not None and medium == _DEVICE:
                block.device_copies += 1
            elif block is not None:
                block.media.add(medium)
            parent = block_hash

    def _remove(self, event: BlockRemoved) -> None:
        blocks = self._group(event.group_idx).blocks
        for block_hash in event.block_hashes:
            block = blocks.get(block_hash)
            if block is None:
                continue
            if (event.medium or _DEVICE) == _DEVICE:
                block.device_copies = max(block.device_copies - 1, 0)
            else:
                block.media.discard(event.medium)
            if not (block.media or block.device_copies):
                del blocks[block_hash]


def _events(group: _Group, block_hash: Hash, block: _Block) -> Iterator[BlockStored | BlockRemoved]:
    """The events of a block. Only a device event has a block's salt, so a block that the device has
    lost is announced as stored there and removed again."""
    described = bool(block.token_ids)
    copies = max(block.device_copies, 1) if described else block.device_copies
    for medium in [_DEVICE] * copies + sorted(block.media):
        yield BlockStored(
            block_hashes=[block_hash],
            parent_block_hash=block.parent,
            token_ids=block.token_ids,
            block_size=len(block.token_ids) or group.block_size,
            lora_id=None,
            medium=medium,
            lora_name=block.lora_name,
            extra_keys=[block.extra_keys],
            group_idx=group.index,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window,
        )
    if copies > block.device_copies:
        yield BlockRemoved(block_hashes=[block_hash], medium=_DEVICE, group_idx=group.index)


def _in_order(blocks: dict[Hash, _Block]) -> Iterator[tuple[Hash, _Block]]:
    done: set[Hash] = set()
    for start in blocks:
        chain: list[Hash] = []
        current: Hash | None = start
        while current is not None and current in blocks and current not in done:
            chain.append(current)
            done.add(current)
            current = blocks[current].parent
        for block_hash in reversed(chain):
            yield block_hash, blocks[block_hash]
