"""A host tier on a shelf: its blocks in files, and who may find them again after the engine's end.

`kept_tensor` gives the worker's copy engine memory that outlives it; `KeptTier` is what the tier's
manager writes down, slot by slot, and reads when it starts; `announcement` tells the router of the
blocks that were found. Used by `workers.vllm.host_tier` and `workers.vllm.connector` where the
settings name a handover folder; the shelf is `workers.vllm.warm_restart`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import structlog
import torch

from workers.mirror import Hash, KvMirror
from workers.vllm.kept_records import Kept, KeptRecords
from workers.vllm.warm_restart import RECORDS, engine_lock

log = structlog.get_logger(__name__)

KEEP_KEY = "kappa_keep"
"""Under it the shelf's folder travels in the connector's extra configuration."""


def kept_tensor(folder: Path, rank: int, number: int, blocks: int, width: int) -> torch.Tensor:
    """Host memory of `blocks` rows of `width` bytes in a file of the shelf, int8.

    A file of another size is made anew, and the records go with it: they would name its rows.
    """
    path = folder / f"kv-{rank}-{number}"
    size = blocks * width
    if not path.exists() or path.stat().st_size != size:
        (folder / RECORDS).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        with path.open("wb") as file:
            file.truncate(size)
    flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.int8)
    return flat.view(blocks, width)


class KeptTier:
    """What the manager of a kept tier tells and asks; holds the engine's lock on the shelf."""

    def __init__(self, folder: Path, slots: int, block_tokens: int, seed: str) -> None:
        """seed: what the engine's block hashes are made with.

        Raises:
            HandoverError: an older engine still writes there.
        """
        self._lock = engine_lock(folder)
        self._records = KeptRecords(folder / RECORDS, slots, block_tokens, seed)
        self._noted: dict[bytes, Kept] = {}
        self.found = self._records.valid()
        """Slots with what lay in them at the start, the oldest first."""
        if self.found:
            log.info("host_tier_found", folder=str(folder), blocks=len(self.found))

    def note(self, key: bytes, parent: bytes | None, token_ids: Sequence[int], salt: str) -> None:
        """A block that is about to be stored: what it will be found by."""
        self._noted[key] = Kept(key, parent, tuple(token_ids), salt)

    def overwriting(self, slot: int) -> None:
        """A slot's block is about to be replaced."""
        self._records.void(slot)

    def stored(self, key: bytes, slot: int) -> None:
        """A block's copy has ended: its slot holds it. One that was not noted is not kept."""
        kept = self._noted.pop(key, None)
        if kept is not None:
            self._records.write(slot, kept)

    def failed(self, keys: Iterable[bytes]) -> None:
        """These were not stored after all."""
        for key in keys:
            self._noted.pop(key, None)

    def clear(self) -> None:
        """Nothing is held any more."""
        self._noted.clear()
        self._records.clear()

    def close(self) -> None:
        """Leave the shelf to a successor."""
        self._lock.release()


def announcement(
    found: Iterable[tuple[int, Kept]],
    block_tokens: int,
    medium: str,
    block_hash: Callable[[bytes], Hash],
    external: Callable[[bytes], Hash],
) -> list[bytes]:
    """Event batches by which a router learns of the blocks that were found.

    block_hash: of a key, as events have it; external: a parent's hash, likewise.
    """
    mirror = KvMirror()
    for _, kept in found:
        parent = None if kept.parent is None else external(kept.parent)
        salt = (kept.salt,) if kept.salt else None
        mirror.hold(block_hash(kept.key), parent, list(kept.token_ids), salt, medium, block_tokens)
    return mirror.snapshot()


def note_stores(tracker: Any, kept: KeptTier) -> None:
    """Have vLLM's event tracker, which sees each block with its request, note it for `kept`.

    Blocks of adapters and of images are not noted: their prefix is more than tokens and salt.
    """
    record_store = tracker.record_store

    def noting(request: Any, group: Any, chunk: int, key: bytes) -> None:
        record_store(request, group, chunk, key)
        plain = not (request.lora_request or getattr(request, "mm_features", None))
        if plain and group.sliding_window_size_in_chunks is None:
            start = chunk * group.tokens_per_chunk
            tokens = request.all_token_ids[start : start + group.tokens_per_chunk]
            first = chunk == 0
            parent = None if first else bytes(request.block_hashes[chunk - 1])
            kept.note(bytes(key), parent, tokens, (request.cache_salt or "") if first else "")

    tracker.record_store = noting
