"""What of this engine's prefixes an LMCache server holds, as KV events that the router reads.

The server hashes tokens in its own way and, on a CPU, tells nobody what was stored. So what the
connector stored and its look-ups found, less what the server's log evicts, becomes vLLM's events
under vLLM's hashes, which join them to the device's (and to their salt). What is evicted is
withdrawn under every salt. The log is read by a thread, hence the lock."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent

MEDIUM = "CPU"
# (token ids of whole chunks, hash of the chunk before or None) to one hash a chunk.
ChunkHashes = Callable[[list[int], bytes | None], list[bytes]]


class Run(NamedTuple):
    """Blocks [start, stop) of a prompt: all its token ids and vLLM's block hashes up to `stop`."""

    token_ids: Sequence[int]
    block_hashes: Sequence[bytes]
    start: int
    stop: int


class LmcacheContents:
    """The blocks of the server that are announced, by vLLM's hash and by the server's.
    chunk_blocks: engine blocks in one chunk of the server. chunk_hashes: the server's own hash
    function. name: a vLLM hash as events carry it. most_blocks: beyond it the oldest are
    withdrawn."""

    def __init__(
        self,
        block_tokens: int,
        chunk_blocks: int,
        chunk_hashes: ChunkHashes,
        name: Callable[[bytes], bytes | int],
        most_blocks: int,
    ) -> None:
        self._block_tokens, self._chunk_blocks = block_tokens, chunk_blocks
        self._chunk_hashes, self._name, self._most = chunk_hashes, name, most_blocks
        self._held: OrderedDict[bytes, bytes] = OrderedDict()  # vLLM's hash: its chunk's
        self._chunks: defaultdict[bytes, set[bytes]] = defaultdict(set)
        self._events: list[KVCacheEvent] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, run: Run) -> None:
        """The server has these blocks: it stored them, or a look-up found them."""
        count, hashes = self._chunk_blocks, run.block_hashes
        with self._lock:
            start, stop = run.start // count * count, min(run.stop, len(hashes)) // count * count
            fresh = [i for i in range(start, stop) if hashes[i] not in self._held]
            if not fresh:
                return
            first = fresh[0] // count * count
            chunks = self._server_hashes(run, first, stop)
            for i in fresh:
                chunk = self._held[hashes[i]] = chunks[(i - first) // count]
                self._chunks[chunk].add(hashes[i])
                self._events.append(self._stored(run, i))
            while len(self._held) > self._most:
                self._forget(self._chunks[next(iter(self._held.values()))].copy())

    def miss(self, block_hash: bytes) -> None:
        """A look-up did not find this block, which may have been announced."""
        with self._lock:
            self._forget([block_hash])

    def evicted(self, chunks: Iterable[bytes]) -> None:
        """The server has dropped these chunks, by its own hashes."""
        with self._lock:
            for chunk in chunks:
                self._forget(self._chunks.get(chunk, set()).copy())

    def clear(self) -> None:
        """The server, or its log, is gone: withdraw everything."""
        with self._lock:
            self._forget(list(self._held))

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call, in order."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def _server_hashes(self, run: Run, first: int, stop: int) -> list[bytes]:
        """The server's hashes of the chunks from block `first` on."""
        size = self._block_tokens
        before = self._held.get(run.block_hashes[first - 1]) if first else None
        if before is not None:
            return self._chunk_hashes(list(run.token_ids[first * size : stop * size]), before)
        every = self._chunk_hashes(list(run.token_ids[: stop * size]), None)
        return every[first // self._chunk_blocks :]

    def _stored(self, run: Run, i: int) -> BlockStored:
        size = self._block_tokens
        return BlockStored(
            block_hashes=[self._name(run.block_hashes[i])],
            parent_block_hash=self._name(run.block_hashes[i - 1]) if i else None,
            token_ids=list(run.token_ids[i * size : (i + 1) * size]),
            block_size=size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
        )

    def _forget(self, block_hashes: Iterable[bytes]) -> None:
        gone = [block_hash for block_hash in block_hashes if block_hash in self._held]
        for block_hash in gone:
            chunk = self._held.pop(block_hash)
            self._chunks[chunk].discard(block_hash)
            if not self._chunks[chunk]:
                del self._chunks[chunk]
        if gone:
            names = [self._name(block_hash) for block_hash in gone]
            self._events.append(BlockRemoved(block_hashes=names, medium=MEDIUM))
