"""A host tier that outlives its engine: its blocks in files, and a record of what each slot holds.

The records' file is mapped, so what is written there is there for a successor even if the engine is
killed. A slot's record is invalidated before its block is overwritten and written again after the
copy has ended; a checksum invalidates one that was cut short. The folder is chosen by
`workers.vllm.warm_restart`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from workers.mirror import Hash, KvMirror
from workers.vllm.warm_restart import RECORDS, engine_lock

log = structlog.get_logger(__name__)

_KEY_BYTES, _PARENT_BYTES, _SALT_BYTES = 64, 64, 192


def persistent_tensor(path: Path, blocks: int, width: int) -> torch.Tensor:
    """Host memory of `blocks` rows of `width` bytes in a file, int8.

    A file of another size is made anew, and the records go with it: they would name its rows.
    """
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


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block: its key, its parent's block hash (None: it is a first block), its tokens, and the
    salt of its chain (known of first blocks only, empty without one)."""

    key: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    salt: str = ""


class BlockRecords:
    """The records of one host tier of `slots` blocks of `block_tokens` tokens."""

    def __init__(self, path: Path, slots: int, block_tokens: int, seed: str) -> None:
        """Open the file, or make it; one of another size or `seed` is made anew.

        seed: what the keys were made with; keys of another seed name other prefixes.

        Raises:
            ValueError: the sizes are not above zero.
        """
        if slots < 1 or block_tokens < 1:
            raise ValueError(f"{slots} slots of {block_tokens} tokens: give at least one of each")
        record = np.dtype(
            [
                ("crc", "<u4"), ("key_bytes", "<u2"), ("parent_bytes", "<i2"),
                ("salt_bytes", "<u2"), ("tokens", "<u2"), ("order", "<u8"),
                ("key", "u1", (_KEY_BYTES,)), ("parent", "u1", (_PARENT_BYTES,)),
                ("salt", "u1", (_SALT_BYTES,)), ("token_ids", "<i4", (block_tokens,)),
            ]
        )  # fmt: skip
        self._record, self._block_tokens = record, block_tokens
        head = zlib.crc32(f"1 {slots} {block_tokens} {seed}".encode())
        size = 8 + slots * record.itemsize
        if not path.exists() or path.stat().st_size != size:
            _make_file(path, size)
        mapped = np.memmap(path, dtype=np.uint8, mode="r+", shape=(size,))
        self._slots = mapped[8:].view(record)
        stored_head = mapped[:8].view("<u8")
        if int(stored_head[0]) != head:
            self.clear()
            stored_head[0] = head
        found = self.valid()
        self._order = max((int(self._slots[slot]["order"]) for slot, _ in found), default=0)

    def valid(self) -> list[tuple[int, StoredBlock]]:
        """Every slot with a whole record, the oldest first; of two with one key the newer."""
        by_key: dict[bytes, tuple[int, int, StoredBlock]] = {}
        for slot in np.flatnonzero(self._slots["key_bytes"]):
            block = self._read(int(slot))
            if block is None:
                continue
            order = int(self._slots[slot]["order"])
            if block.key not in by_key or by_key[block.key][0] < order:
                by_key[block.key] = (order, int(slot), block)
        return [(slot, block) for _, slot, block in sorted(by_key.values(), key=lambda x: x[:2])]

    def invalidate(self, slot: int) -> None:
        """A slot is about to be overwritten."""
        self._slots[slot]["key_bytes"] = 0

    def write(self, slot: int, block: StoredBlock) -> bool:
        """A slot holds this block from now on; False if the record has no room for it."""
        salt, parent = block.salt.encode(), block.parent or b""
        if (
            not block.key or len(block.key) > _KEY_BYTES or len(parent) > _PARENT_BYTES
            or len(salt) > _SALT_BYTES or len(block.token_ids) != self._block_tokens
        ):  # fmt: skip
            self.invalidate(slot)
            return False
        self._order += 1
        made = np.zeros((), dtype=self._record)
        for name, text in (("key", block.key), ("parent", parent), ("salt", salt)):
            made[name][: len(text)] = np.frombuffer(text, dtype=np.uint8)
        made["parent_bytes"] = -1 if block.parent is None else len(parent)
        made["salt_bytes"], made["tokens"] = len(salt), len(block.token_ids)
        made["token_ids"], made["order"] = block.token_ids, self._order
        made["key_bytes"] = len(block.key)
        made["crc"] = _crc(made)
        # Invalid while it is written, and whole with the last field.
        made["key_bytes"] = 0
        self._slots[slot] = made
        self._slots[slot]["key_bytes"] = len(block.key)
        return True

    def clear(self) -> None:
        """Invalidate all."""
        self._slots["key_bytes"] = 0

    def _read(self, slot: int) -> StoredBlock | None:
        record = self._slots[slot]
        if _crc(record) != int(record["crc"]):
            return None
        parent_bytes = int(record["parent_bytes"])
        parent = record["parent"].tobytes()[:parent_bytes] if parent_bytes >= 0 else None
        return StoredBlock(
            record["key"].tobytes()[: int(record["key_bytes"])],
            parent,
            tuple(int(t) for t in record["token_ids"]),
            record["salt"].tobytes()[: int(record["salt_bytes"])].decode(errors="replace"),
        )


def _crc(record: np.ndarray | np.void) -> int:
    """Of everything behind the checksum itself, which is a record's first field."""
    return zlib.crc32(record.tobytes()[4:])


class PersistentTier:
    """What the manager records, slot by slot, and reads at its start; locks the folder."""

    def __init__(self, folder: Path, slots: int, block_tokens: int, seed: str) -> None:
        """seed: what the engine's block hashes are made with.

        Raises:
            WarmRestartError: an older engine still writes there.
        """
        self._lock = engine_lock(folder)
        self._records = BlockRecords(folder / RECORDS, slots, block_tokens, seed)
        self._storing: dict[bytes, StoredBlock] = {}
        self.found = self._records.valid()
        """Slots with what lay in them at the start, the oldest first."""
        if self.found:
            log.info("host_tier_found", folder=str(folder), blocks=len(self.found))

    def storing(self, block: StoredBlock) -> None:
        """A block is about to be stored."""
        self._storing[block.key] = block

    def invalidate(self, slot: int) -> None:
        """A slot's block is about to be replaced."""
        self._records.invalidate(slot)

    def stored(self, key: bytes, slot: int) -> None:
        """A block's copy has ended; one that was not announced by `storing` is not recorded."""
        block = self._storing.pop(key, None)
        if block is not None:
            self._records.write(slot, block)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Nothing of these is being stored any more."""
        for key in keys:
            self._storing.pop(key, None)

    def clear(self) -> None:
        self._storing.clear()
        self._records.clear()

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
    """Event batches by which a router learns of the blocks that were found.

    key_hash, parent_hash: a block's hash as events have it, of its key and of its parent's hash.
    """
    mirror = KvMirror()
    for _, block in found:
        parent = None if block.parent is None else parent_hash(block.parent)
        salt = (block.salt,) if block.salt else None
        mirror.hold(key_hash(block.key), parent, list(block.token_ids), salt, medium, block_tokens)
    return mirror.snapshot()


def record_stores(tracker: Any, tier: PersistentTier) -> None:
    """Have vLLM's event tracker, which sees each block with its request, pass it on to `tier`.

    Blocks of adapters and of images are left out: their prefix is more than tokens and salt.
    """
    record_store = tracker.record_store

    def recording(request: Any, group: Any, chunk: int, key: bytes) -> None:
        record_store(request, group, chunk, key)
        plain = not (request.lora_request or getattr(request, "mm_features", None))
        if not plain or group.sliding_window_size_in_chunks is not None:
            return
        start = chunk * group.tokens_per_chunk
        token_ids: Sequence[int] = request.all_token_ids[start : start + group.tokens_per_chunk]
        first = chunk == 0
        parent = None if first else bytes(request.block_hashes[chunk - 1])
        salt = (request.cache_salt or "") if first else ""
        tier.storing(StoredBlock(bytes(key), parent, tuple(token_ids), salt))

    tracker.record_store = recording
