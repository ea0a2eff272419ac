"""What lies in each slot of a host tier that outlives its engine: a record per slot, in a file.

The file is mapped, so what is written there is there for a successor even if the engine is killed.
A slot's record is void before its blocks are overwritten and written again after the copy has
ended; a checksum voids one that was cut short. Used by the host tier's manager
(`workers.vllm.host_tier`); `workers.vllm.warm_restart` chooses the folder. Knows nothing of vLLM.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_KEY_BYTES, _PARENT_BYTES, _SALT_BYTES = 64, 64, 192


@dataclass(frozen=True, slots=True)
class Kept:
    """One block: its key, its parent's block hash (None: it is a first block), its tokens, and the
    salt of its chain (known of first blocks only, empty without one)."""

    key: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    salt: str = ""


class KeptRecords:
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
        fresh = not path.exists() or path.stat().st_size != size
        if fresh:
            path.unlink(missing_ok=True)
            with path.open("wb") as file:
                file.truncate(size)
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r+", shape=(size,))
        self._head = self._bytes[:8].view("<u8")
        self._slots = self._bytes[8:].view(record)
        if int(self._head[0]) != head:
            self.clear()
            self._head[0] = head
        found = self.valid()
        self._order = max((int(self._slots[slot]["order"]) for slot, _ in found), default=0)

    def valid(self) -> list[tuple[int, Kept]]:
        """Every slot with a whole record, the oldest first; of two with one key the newer."""
        by_key: dict[bytes, tuple[int, int, Kept]] = {}
        for slot in np.flatnonzero(self._slots["key_bytes"]):
            kept = self._read(int(slot))
            if kept is None:
                continue
            order = int(self._slots[slot]["order"])
            if kept.key not in by_key or by_key[kept.key][0] < order:
                by_key[kept.key] = (order, int(slot), kept)
        return [(slot, kept) for _, slot, kept in sorted(by_key.values(), key=lambda x: x[:2])]

    def void(self, slot: int) -> None:
        """A slot is about to be overwritten."""
        self._slots[slot]["key_bytes"] = 0

    def write(self, slot: int, kept: Kept) -> bool:
        """A slot holds this block from now on; False if the record has no room for it."""
        salt = kept.salt.encode()
        parent = b"" if kept.parent is None else kept.parent
        if (
            not kept.key or len(kept.key) > _KEY_BYTES or len(parent) > _PARENT_BYTES
            or len(salt) > _SALT_BYTES or len(kept.token_ids) != self._block_tokens
        ):  # fmt: skip
            self.void(slot)
            return False
        self._order += 1
        made = np.zeros((), dtype=self._record)
        for name, text in (("key", kept.key), ("parent", parent), ("salt", salt)):
            made[name][: len(text)] = np.frombuffer(text, dtype=np.uint8)
        made["parent_bytes"] = -1 if kept.parent is None else len(parent)
        made["salt_bytes"], made["tokens"] = len(salt), len(kept.token_ids)
        made["token_ids"], made["order"] = kept.token_ids, self._order
        made["key_bytes"] = len(kept.key)
        made["crc"] = _crc(made)
        # Void while it is written, and whole with the last field.
        made["key_bytes"] = 0
        self._slots[slot] = made
        self._slots[slot]["key_bytes"] = len(kept.key)
        return True

    def clear(self) -> None:
        """Void all."""
        self._slots["key_bytes"] = 0

    def _read(self, slot: int) -> Kept | None:
        record = self._slots[slot]
        if _crc(record) != int(record["crc"]):
            return None
        parent_bytes = int(record["parent_bytes"])
        parent = record["parent"].tobytes()[:parent_bytes] if parent_bytes >= 0 else None
        return Kept(
            record["key"].tobytes()[: int(record["key_bytes"])],
            parent,
            tuple(int(t) for t in record["token_ids"]),
            record["salt"].tobytes()[: int(record["salt_bytes"])].decode(errors="replace"),
        )


def _crc(record: np.ndarray | np.void) -> int:
    """Of everything behind the checksum itself, which is a record's first field."""
    return zlib.crc32(record.tobytes()[4:])
