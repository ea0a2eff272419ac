"""A host tier that outlives its engine: its blocks in files, and a record of what each slot holds.
The records' file is mapped, so what is written there survives a kill. A slot's record is
invalidated before its block is overwritten and written again after the copy has ended; a checksum
invalidates one that was cut short. `workers.vllm.warm_restart` chooses the folder."""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch

from workers.mirror import Hash, KvMirror
from workers.vllm.warm_restart import RECORDS, engine_lock

log = structlog.get_logger(__name__)

# A record: checksum of what follows, bytes of the block (0: none), order of writing; the block.
_HEAD = struct.Struct("<IIQ")
# Room for key, parent and salt, and for a token in MessagePack.
_NAMES_BYTES, _TOKEN_BYTES = 320, 5
_FILE_HEAD_BYTES = 8


def persistent_tensor(path: Path, blocks: int, width: int) -> torch.Tensor:
    """Host memory of `blocks` rows of `width` bytes in a file, int8. A file of another size is made
    anew, and the records go with it: they would name its rows."""
    size = blocks * width
    if not path.exists() or path.stat().st_size != size:
        path.with_name(RECORDS).unlink(missing_ok=True)
        _make_file(path, size)
    flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.int8)
    return flat.view(blocks, width)


def _make_file(path: Path, size: int) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


class StoredBlock(msgspec.Struct, frozen=True, array_like=True):
    """One block: its key, its parent's block hash (None: it is a first block), its tokens, and the
    salt of its chain (known of first blocks only, empty without one)."""

    key: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    salt: str = ""


class BlockRecords:
    """The records of one host tier of `slots` blocks of `block_tokens` tokens."""

    def __init__(self, path: Path, slots: int, block_tokens: int, seed: str) -> None:
        """Open the file, or make it; one of another size or `seed`, by which keys are made, is made
        anew. ValueError: the sizes are not above zero."""
        if slots < 1 or block_tokens < 1:
            raise ValueError(f"{slots} slots of {block_tokens} tokens: give at least one of each")
        self._slots, self._block_tokens = slots, block_tokens
        self._slot_bytes = _HEAD.size + _NAMES_BYTES + _TOKEN_BYTES * block_tokens
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(StoredBlock).decode
        head = zlib.crc32(f"2 {slots} {block_tokens} {seed}".encode())
        size = _FILE_HEAD_BYTES + slots * self._slot_bytes
        if not path.exists() or path.stat().st_size != size:
            _make_file(path, size)
        with path.open("r+b") as file:
            self._file = mmap.mmap(file.fileno(), size)
        if self._file[:_FILE_HEAD_BYTES] != head.to_bytes(_FILE_HEAD_BYTES, "little"):
            self.clear()
            self._file[:_FILE_HEAD_BYTES] = head.to_bytes(_FILE_HEAD_BYTES, "little")
        self._order = max((order for order, _, _ in self._read()), default=0)

    def valid(self) -> list[tuple[int, StoredBlock]]:
        """Every slot with a whole record, the oldest first; of two with one key the newer."""
        by_key: dict[bytes, tuple[int, StoredBlock]] = {}
        for _, slot, block in sorted(self._read(), key=lambda found: found[:2]):
            by_key.pop(block.key, None)
            by_key[block.key] = slot, block
        return list(by_key.values())

    def invalidate(self, slot: int) -> None:
        """A slot is about to be overwritten."""
        at = self._at(slot)
        self._file[at : at + _HEAD.size] = bytes(_HEAD.size)

    def write(self, slot: int, block: StoredBlock) -> bool:
        """A slot holds this block from now on; False if the record has no room for it."""
        self.invalidate(slot)
        text = self._encode(block)
        fits = len(text) <= self._slot_bytes - _HEAD.size
        if not (fits and block.key and len(block.token_ids) == self._block_tokens):
            return False
        self._order += 1
        at, crc = self._at(slot), _crc(len(text), self._order, text)
        self._file[at + _HEAD.size : at + _HEAD.size + len(text)] = text
        # Whole with the head, which comes last.
        self._file[at : at + _HEAD.size] = _HEAD.pack(crc, len(text), self._order)
        return True

    def clear(self) -> None:
        for slot in range(self._slots):
            self.invalidate(slot)

    def _at(self, slot: int) -> int:
        return _FILE_HEAD_BYTES + slot * self._slot_bytes

    def _read(self) -> list[tuple[int, int, StoredBlock]]:
        """(order of writing, slot, block) of every whole record."""
        found = []
        for slot in range(self._slots):
            at = self._at(slot)
            crc, size, order = _HEAD.unpack_from(self._file, at)
            if not 0 < size <= self._slot_bytes - _HEAD.size:
                continue
            text = self._file[at + _HEAD.size : at + _HEAD.size + size]
            if crc == _crc(size, order, text):
                found.append((order, slot, self._decode(text)))
        return found


def _crc(size: int, order: int, text: bytes) -> int:
    return zlib.crc32(_HEAD.pack(0, size, order) + text)


class PersistentTier(BlockRecords):
    """What the manager records, slot by slot, and reads at its start; locks the folder."""

    def __init__(self, folder: Path, slots: int, block_tokens: int, seed: str) -> None:
        """seed: what block hashes are made with. WarmRestartError: an older engine still writes
        there."""
        self._lock = engine_lock(folder)
        super().__init__(folder / RECORDS, slots, block_tokens, seed)
        self._storing: dict[bytes, StoredBlock] = {}
        self.found = self.valid()
        """Slots with what lay in them at the start, the oldest first."""
        if self.found:
            log.info("host_tier_found", folder=str(folder), blocks=len(self.found))

    def storing(self, block: StoredBlock) -> None:
        """A block is about to be stored."""
        self._storing[block.key] = block

    def stored(self, key: bytes, slot: int) -> None:
        """A block's copy has ended; one that was not announced by `storing` is not recorded."""
        block = self._storing.pop(key, None)
        if block is not None:
            self.write(slot, block)

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._storing.pop(key, None)

    def clear(self) -> None:
        self._storing = {}
        super().clear()

    def close(self) -> None:
        """Leave the folder to a successor."""
        self._lock.release()


def announcement(
    found: Iterable[tuple[int, StoredBlock]],
    block_tokens: int,
    medium: str,
    key_hash: Callable[[bytes], Hash],
    parent_hash: Callable[[bytes], Hash],
) -> list[bytes]:
    """Event batches by which a router learns of the blocks that were found. key_hash, parent_hash:
    a block's hash as events have it, of its key and of its parent's hash."""
    mirror = KvMirror()
    for _, block in found:
        parent = None if block.parent is None else parent_hash(block.parent)
        salt = (block.salt,) if block.salt else None
        mirror.hold(key_hash(block.key), parent, list(block.token_ids), salt, medium, block_tokens)
    return mirror.snapshot()


def record_stores(tracker: Any, tier: PersistentTier) -> None:
    """Have vLLM's event tracker, which sees each block with its request, pass it on to `tier`, but
    for those of adapters and images: their prefix is more than tokens and salt."""
    record_store = tracker.record_store

    def recording(request: Any, group: Any, chunk: int, key: bytes) -> None:
        record_store(request, group, chunk, key)
        special = request.lora_request or getattr(request, "mm_features", None)
        if special or group.sliding_window_size_in_chunks is not None:
            return
        size = group.tokens_per_chunk
        token_ids = tuple(request.all_token_ids[chunk * size : (chunk + 1) * size])
        parent = bytes(request.block_hashes[chunk - 1]) if chunk else None
        salt = "" if chunk else request.cache_salt or ""
        tier.storing(StoredBlock(bytes(key), parent, token_ids, salt))

    tracker.record_store = recording
