"""The scheduler's half of the LMCache tier: a request that LMCache cannot answer for is computed, a
shorter hit is taken where that is faster (`kappa_workers.vllm.tail_recompute`), stores and look-ups
become KV events (`LmcacheContents`). Private names of LMCache 0.5.6:
tests/live/test_lmcache.py runs them all."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import structlog
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kappa_workers.vllm.lmcache.base import (
    ABSENT,
    LOOKUP,
    LmcacheBase,
    LmcacheMetadata,
    LmcacheWorkerMeta,
    Stored,
)
from kappa_workers.vllm.tail_recompute import AdmissionReports, ignore_malformed_params

log = structlog.get_logger(__name__)

_EVENTS_AT_ONCE = 256
_REMOVED = "removed"
_RESUBSCRIBE_S = 1.0
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
    """What of this engine's prefixes the server holds, by vLLM's hash and by the server's.

    The server hashes tokens in its own way and, on a CPU, does not tell what was stored. So the
    blocks that the connector stored and its look-ups found, less those that the server's log
    evicts, become vLLM's events under vLLM's hashes, which join them to the device's (and to their
    salt). Evicted blocks are withdrawn under every salt. The log is read by a thread, hence the
    lock.

    chunk_blocks: engine blocks in one chunk of the server. chunk_hashes: the server's own hash
    function. name: a vLLM hash as events carry it. most_blocks: beyond it the oldest are withdrawn.
    """

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
        with self._lock:
            self._forget(list(self._held))

    def take(self) -> list[KVCacheEvent]:
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


class LmcacheScheduler(LmcacheBase):
    """Requests of one engine."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._admissions = AdmissionReports(self._stats, self._extra, self._block_tokens)
        self._workers = vllm_config.parallel_config.world_size
        self._requests: dict[str, Any] = {}
        self._hits: dict[str, int] = {}
        self._loading: dict[str, list[int]] = {}
        self._delayed: set[str] = set()
        self._stores: dict[Stored, tuple[Run, int]] = {}
        self._contents: LmcacheContents | None = None
        self._feed: EvictionFeed | None = None
        self._well = True
        self._link.connect()

    def _ready(self, inner: Any) -> None:
        """LMCache's connector is there: requests that run already stay unknown to it."""
        from lmcache.v1.multiprocess.token_hasher import TokenHasher

        chunk_tokens = inner.scheduler_adapter.lmcache_tokens_per_chunk
        hasher = TokenHasher(chunk_tokens)
        self._contents = LmcacheContents(
            self._block_tokens,
            chunk_tokens // self._block_tokens,
            lambda tokens, before: hasher.compute_chunk_hashes(tokens, before),
            lambda block_hash: maybe_convert_block_hash(BlockHash(block_hash)),
            self._options.most_blocks,
        )
        self._follow(inner)

    # -- admission ----------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Drop parameters that LMCache cannot read: they must not count as its failure."""
        ignore_malformed_params(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens behind the device's to load, and whether that takes steps."""
        self._requests[request.request_id] = request
        hit = self._hit(request, num_computed_tokens)
        loaded = self._admissions.loaded_tokens(request, num_computed_tokens, hit or 0)
        if hit is None:
            return None, True
        if loaded < hit:
            loaded = self._shorten(request, num_computed_tokens, loaded)
        return loaded, bool(loaded)

    def _hit(self, request: Any, computed: int) -> int | None:
        """Tokens behind `computed` that LMCache can load; None: it does not know yet."""
        inner = self._link.inner
        if inner is None:
            return 0
        answer = None
        if self._link.open() is not None:
            look_up = inner.get_num_new_matched_tokens
            answer = self._link.call(LOOKUP, look_up, request, computed)
        if answer is None:
            self._mute(inner, request)
            return 0
        hit: int | None = answer[0]
        if hit is not None:
            found = inner.request_trackers[request.request_id].num_lmcache_hit_tokens
            self._hits[request.request_id] = found
            # What it did not find is not there, whatever was announced.
            blocks = found // self._block_tokens
            if self._contents is not None and blocks < len(request.block_hashes):
                self._contents.miss(request.block_hashes[blocks])
        return hit

    def _shorten(self, request: Any, computed: int, loaded: int) -> int:
        """Load less than was found; unlock the rest in the server. Returns the tokens to load."""
        inner = self._link.inner
        adapter, tracker = inner.scheduler_adapter, inner.request_trackers[request.request_id]
        chunk = adapter.lmcache_tokens_per_chunk
        end, found = (computed + loaded) // chunk * chunk, tracker.num_lmcache_hit_tokens
        if end <= computed:
            end = tracker.num_vllm_hit_tokens // chunk * chunk
        tracker.num_lmcache_hit_tokens = end
        self._link.call(
            LOOKUP, adapter.free_lookup_locks, token_ids=tracker.get_token_ids(), start=end,
            end=found, request_id=request.request_id, cache_salt=tracker.cache_salt,
            request_configs=tracker.request_configs,
        )  # fmt: skip
        return max(end - computed, 0)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        device_tokens = self._admissions.admitted(request, num_external_tokens)
        inner = self._link.inner
        if inner is None:
            return
        if request.request_id not in inner.request_trackers:
            self._mute(inner, request)
        if num_external_tokens:
            # Those before are the device's, and may be others' too: they are not lost with a load.
            first = device_tokens // self._block_tokens
            stop = first + -(-num_external_tokens // self._block_tokens)
            self._loading[request.request_id] = list(blocks.get_block_ids()[0][first:stop])
        allocated = inner.update_state_after_alloc
        self._link.call(LOOKUP, allocated, request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> LmcacheMetadata:
        metadata = LmcacheMetadata(delayed=self._delayed, lost=self._loading)
        self._delayed, self._loading = set(), {}
        inner = self._link.inner
        if inner is None:
            return metadata
        # Requests that were admitted before LMCache was there are followed, too, but muted.
        ids = [new.req_id for new in scheduler_output.scheduled_new_reqs]
        for request_id in (*ids, *scheduler_output.scheduled_cached_reqs.req_ids):
            if request_id not in inner.request_trackers and request_id in self._requests:
                self._mute(inner, self._requests[request_id])
        metadata.inner = self._link.call(LOOKUP, inner.build_connector_meta, scheduler_output)
        for transfer in metadata.inner.requests if metadata.inner is not None else ():
            request = self._requests.get(transfer.request_id)
            if transfer.direction == "RETRIEVE":
                metadata.lost.pop(transfer.request_id, None)
            elif request is not None:
                size, op = self._block_tokens, transfer.op
                stop = op.end // size
                run = Run(op.token_ids, list(request.block_hashes[:stop]), op.start // size, stop)
                self._stores[transfer.request_id, op.start, op.end] = run, self._workers
        return metadata

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; True: its blocks stay until the workers have stored them."""
        request_id = request.request_id
        self._admissions.finished(request)
        self._requests.pop(request_id, None)
        # What a look-up found is there; announced late, when the device's events have the salt.
        blocks = self._hits.pop(request_id, 0) // self._block_tokens
        if self._contents is not None and blocks:
            ids = list(request.all_token_ids[: blocks * self._block_tokens])
            self._contents.hold(Run(ids, list(request.block_hashes[:blocks]), 0, blocks))
        inner = self._link.inner
        if inner is None or request_id not in inner.request_trackers:
            return False, None
        answer = self._link.call(LOOKUP, inner.request_finished, request, [])
        if answer is None:
            inner.request_trackers.pop(request_id, None)
            return False, None
        if answer[0]:
            self._delayed.add(request_id)
        return bool(answer[0]), None

    def _mute(self, inner: Any, request: Any) -> None:
        """Have LMCache follow a request without loading or storing anything for it."""
        try:
            inner.scheduler_adapter.cleanup_lookup_result(request.request_id)
            tracker = inner._get_or_create_request_tracker(request)
            state = type(tracker.state)
            if tracker.state in (state.PREFETCHING, state.WAITING_FOR_LOAD):
                tracker.state = state.BYPASS_LMCACHE
                tracker.num_lmcache_hit_tokens = tracker.num_vllm_hit_tokens = 0
            tracker.max_offload_tokens = 0
        except Exception as error:
            self._link.failed(LOOKUP, error)

    # -- announcements ------------------------------------------------------------------------

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, LmcacheWorkerMeta):
            return
        for key in meta.lost:
            self._stores.pop(key, None)
        for key, count in meta.stored.items():
            run, missing = self._stores.pop(key, (None, 0))
            if run is not None and missing > count:
                self._stores[key] = run, missing - count
            elif run is not None and self._contents is not None:
                self._contents.hold(run)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What changed in the server, as far as it is known; nothing is claimed of a sick one."""
        if self._contents is None:
            return ()
        well = self._link.open() is not None
        if well and not self._well:
            # The server may be another one, and the old one's log never ends.
            self._follow(self._link.inner)
        if self._well and not well:
            self._contents.clear()
            # LMCache's own heartbeat may have seen it first, and then nothing else has failed.
            self._link.failed(ABSENT, "its server does not answer", pause=False)
        self._well = well
        return self._contents.take()

    def reset_cache(self) -> bool | None:
        inner = self._link.open()
        return None if inner is None else bool(self._link.call(LOOKUP, inner.reset_cache))

    def _follow(self, inner: Any) -> None:
        """Follow the server's log of evictions, from now on and from nothing."""
        assert self._contents is not None
        if self._feed is not None:
            self._feed.stop()
        self._contents.clear()
        self._feed = EvictionFeed(inner.scheduler_adapter, self._contents)
        self._feed.start()


class EvictionFeed(threading.Thread):
    """Follows one server's log of evictions, until it is stopped."""

    def __init__(self, adapter: Any, contents: LmcacheContents) -> None:
        super().__init__(name="kappa-lmcache-log", daemon=True)
        self._adapter, self._contents = adapter, contents
        self._stream: Any = None
        self._stopped = threading.Event()
        self._incarnation: int | None = None
        self._cursor = 0
        # Of the server's subscribers each needs a number of its own.
        self._me = uuid.uuid4().int & ((1 << 63) - 1)

    def stop(self) -> None:
        self._stopped.set()
        if self._stream is not None:
            with contextlib.suppress(Exception):
                self._stream.close()

    def run(self) -> None:
        """Follow the log. The server ends a subscription now and then: go on where it ended. All is
        withdrawn when the log breaks or records are lost; without a log only look-ups correct the
        announcements."""
        while not self._stopped.is_set():
            try:
                if not self._read():
                    return
            except Exception as error:
                if self._stopped.is_set():
                    return
                log.warning("lmcache_log_broken", error=repr(error)[:300])
                self._contents.clear()
            self._stopped.wait(_RESUBSCRIBE_S)

    def _read(self) -> bool:
        """One subscription; False if there is no log to follow."""
        (client,) = self._adapter.req_clients.values()
        self._stream = client.subscribe_kv_events(
            self._me, self._adapter.model_name, self._cursor, _EVENTS_AT_ONCE
        )
        for batch in self._stream:
            if self._stopped.is_set() or not batch.enabled:
                return False
            known = self._incarnation
            if known is not None and (batch.lost or batch.incarnation != known):
                self._contents.clear()
            self._incarnation, self._cursor = batch.incarnation, batch.next_cursor
            for record in batch.events:
                if record.kind == _REMOVED:
                    self._contents.evicted(record.block_hashes)
        return True
