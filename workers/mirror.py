"""A worker's copy of the KV blocks that its engine has announced, by tier: a router that joins
late, or lost a message, gets the state with a sequence number instead of history. It speaks vLLM's
own events, so a snapshot is decoded like a live one. A device may hold a hash in several blocks and
announces each; other media hold a hash once. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    parent: Hash | None
    token_ids: list[int]
    extra_keys: tuple[Any, ...] | None
    media: set[str]
    device_copies: int = 0
    lora_name: str | None = None


class KvMirror:
    """Blocks by engine hash, each with its parent, its tokens and the media that hold it."""

    def __init__(self) -> None:
        self._blocks: dict[Hash, _Block] = {}
        self._block_size = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, payload: bytes) -> None:
        """Apply one event batch as vLLM published it (msgpack)."""
        for event in _decode(payload).events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                self._blocks.clear()

    def hold(
        self,
        block_hash: Hash,
        parent: Hash | None,
        token_ids: list[int],
        extra_keys: tuple[Any, ...] | None,
        medium: str,
        block_size: int,
    ) -> None:
        """Note a block that `medium` holds, though no event of this engine said so."""
        self._block_size = block_size
        self._blocks[block_hash] = _Block(parent, token_ids, extra_keys, {medium})

    def clear(self) -> None:
        """Forget everything (after a lost message nothing here can be trusted)."""
        self._blocks.clear()

    def snapshot(self) -> list[bytes]:
        """Event batches that rebuild this state from nothing, parents before children."""
        events: list[BlockStored | BlockRemoved] = []
        for block_hash, block in self._in_order():
            # Only a device event has a block's salt, so what the device has lost is announced as
            # stored there and removed again.
            for medium in [_DEVICE] * max(block.device_copies, 1) + sorted(block.media):
                stored = BlockStored(
                    block_hashes=[block_hash],
                    parent_block_hash=block.parent,
                    token_ids=block.token_ids,
                    block_size=self._block_size,
                    lora_id=None,
                    medium=medium,
                    lora_name=block.lora_name,
                    extra_keys=[block.extra_keys],
                )
                events.append(stored)
            if not block.device_copies:
                events.append(BlockRemoved(block_hashes=[block_hash], medium=_DEVICE))
        lots = (events[i : i + _BATCH_EVENTS] for i in range(0, len(events), _BATCH_EVENTS))
        return [_encode(KVEventBatch(ts=0.0, events=lot)) for lot in lots]  # type: ignore[arg-type]

    def _store(self, event: BlockStored) -> None:
        size = self._block_size = event.block_size
        medium, parent = event.medium or _DEVICE, event.parent_block_hash
        for i, block_hash in enumerate(event.block_hashes):
            block = self._blocks.get(block_hash)
            token_ids = event.token_ids[i * size : (i + 1) * size]
            if block is None and len(token_ids) == size:
                # Without its tokens a block cannot be matched to a prompt: not worth a row.
                extra = event.extra_keys[i] if event.extra_keys else None
                block = _Block(parent, token_ids, extra, set(), lora_name=event.lora_name)
                self._blocks[block_hash] = block
            if block is not None and medium == _DEVICE:
                block.device_copies += 1
            elif block is not None:
                block.media.add(medium)
            parent = block_hash

    def _remove(self, event: BlockRemoved) -> None:
        for block_hash in event.block_hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                continue
            if (event.medium or _DEVICE) == _DEVICE:
                block.device_copies = max(block.device_copies - 1, 0)
            else:
                block.media.discard(event.medium)
            if not (block.media or block.device_copies):
                del self._blocks[block_hash]

    def _in_order(self) -> Iterator[tuple[Hash, _Block]]:
        done: set[Hash] = set()
        for start in self._blocks:
            chain: list[Hash] = []
            current: Hash | None = start
            while current is not None and current in self._blocks and current not in done:
                chain.append(current)
                done.add(current)
                current = self._blocks[current].parent
            for block_hash in reversed(chain):
                yield block_hash, self._blocks[block_hash]
