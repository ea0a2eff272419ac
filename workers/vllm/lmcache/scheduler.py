"""The scheduler's half of the LMCache tier: what to load, what was stored, what is announced.

Around LMCache's own connector: a request that it cannot answer for is computed; a shorter hit is
taken where that is faster (`workers.vllm.tail_recompute`); stores and look-ups become KV
events (`workers.vllm.lmcache.contents`). Private names of LMCache 0.5.6: tests/live/test_lmcache.py
runs them all.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import structlog
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from workers.request_metadata import plan_of
from workers.vllm.admission_reports import AdmissionReports
from workers.vllm.lmcache.contents import LmcacheContents, Run
from workers.vllm.lmcache.link import ABSENT, LOOKUP, LmcacheLink
from workers.vllm.lmcache.worker import LmcacheWorkerMeta, Stored
from workers.vllm.tail_recompute import TailRecompute

log = structlog.get_logger(__name__)

_EVENTS_AT_ONCE = 256
_REMOVED = "removed"
_RESUBSCRIBE_S = 1.0


@dataclass
class LmcacheMetadata(KVConnectorMetadata):
    """What a step's workers get: LMCache's own metadata, if it has any; requests that ended and
    keep their blocks until a worker names them; loads that LMCache does not know of, with their
    blocks."""

    inner: Any = None
    delayed: set[str] = field(default_factory=set)
    lost: dict[str, list[int]] = field(default_factory=dict)


class LmcacheScheduler:
    """Requests of one engine.

    Args:
        link: to LMCache's connector.
        reports: of every admission.
        tail: how much of a hit to load.
        block_tokens: of the device cache.
        workers: how many workers store each run.
        most_blocks: bound of what is announced.
    """

    def __init__(
        self,
        link: LmcacheLink,
        reports: AdmissionReports,
        tail: TailRecompute,
        block_tokens: int,
        workers: int,
        most_blocks: int,
    ) -> None:
        self._link, self._reports, self._tail = link, reports, tail
        self._block_tokens, self._workers, self._most = block_tokens, workers, most_blocks
        self._requests: dict[str, Any] = {}
        self._hits: dict[str, int] = {}
        self._computed: dict[str, int] = {}
        self._loading: dict[str, list[int]] = {}
        self._delayed: set[str] = set()
        self._stores: dict[Stored, tuple[Run, int]] = {}
        self._contents: LmcacheContents | None = None
        self._feed: EvictionFeed | None = None
        self._well = True

    def ready(self, inner: Any) -> None:
        """LMCache's connector is there: requests that run already stay unknown to it."""
        from lmcache.v1.multiprocess.token_hasher import TokenHasher

        chunk_tokens = inner.scheduler_adapter.lmcache_tokens_per_chunk
        hasher = TokenHasher(chunk_tokens)
        self._contents = LmcacheContents(
            self._block_tokens,
            chunk_tokens // self._block_tokens,
            lambda tokens, before: hasher.compute_chunk_hashes(tokens, before),
            lambda block_hash: maybe_convert_block_hash(BlockHash(block_hash)),
            self._most,
        )
        self._follow(inner)

    # -- admission ----------------------------------------------------------------------------

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond `computed` to load, and whether that takes steps."""
        self._reports.looked_up(request, computed)
        self._requests[request.request_id] = request
        self._computed[request.request_id] = computed
        inner = self._link.inner
        if inner is None:
            return 0, False
        if self._link.open() is None:
            self._mute(inner, request)
            return 0, False
        went_well, answer = self._link.call(
            LOOKUP, inner.get_num_new_matched_tokens, request, computed
        )
        if not went_well:
            self._mute(inner, request)
            return 0, False
        hit, loads_async = answer
        if hit is None:
            return None, loads_async
        found = inner.request_trackers[request.request_id].num_lmcache_hit_tokens
        self._hits[request.request_id] = found
        self._missed(request, found)
        if not hit:
            return 0, False
        new = request.num_tokens - computed - hit
        plan = plan_of(request.sampling_params)
        loaded = self._tail.loaded_tokens(computed, hit, new, plan)
        if loaded < hit:
            loaded = self._shorten(inner, request, computed, loaded)
        return loaded, bool(loaded)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Blocks are allocated, `external` tokens will be loaded."""
        self._reports.admitted(request, external)
        first = self._computed.pop(request.request_id, 0) // self._block_tokens
        inner = self._link.inner
        if inner is None:
            return
        if request.request_id not in inner.request_trackers:
            self._mute(inner, request)
        if external:
            # Those before are the device's, and may be others' too: they are not lost with a load.
            stop = first + -(-external // self._block_tokens)
            self._loading[request.request_id] = list(blocks.get_block_ids()[0][first:stop])
        self._link.call(LOOKUP, inner.update_state_after_alloc, request, blocks, external)

    def metadata(self, output: Any) -> LmcacheMetadata:
        """What this step's workers get."""
        metadata = LmcacheMetadata(delayed=self._delayed)
        self._delayed = set()
        inner, loading = self._link.inner, self._loading
        self._loading = {}
        if inner is not None:
            self._know_all(inner, output)
            _, metadata.inner = self._link.call(LOOKUP, inner.build_connector_meta, output)
        transfers = metadata.inner.requests if metadata.inner is not None else ()
        sent = {one.request_id for one in transfers if one.direction == "RETRIEVE"}
        metadata.lost = {name: ids for name, ids in loading.items() if name not in sent}
        for transfer in transfers:
            if transfer.direction == "STORE":
                self._note_store(transfer)
        return metadata

    def finished(self, request: Any) -> bool:
        """A request ended; True: its blocks stay until the workers have stored them."""
        self._reports.finished(request)
        self._requests.pop(request.request_id, None)
        self._computed.pop(request.request_id, None)
        self._found(request, self._hits.pop(request.request_id, None))
        inner = self._link.inner
        if inner is None or request.request_id not in inner.request_trackers:
            return False
        went_well, answer = self._link.call(LOOKUP, inner.request_finished, request, [])
        if not went_well:
            inner.request_trackers.pop(request.request_id, None)
            return False
        if answer[0]:
            self._delayed.add(request.request_id)
        return bool(answer[0])

    # -- what is announced --------------------------------------------------------------------

    def stored(self, meta: Any) -> None:
        """Workers reported what they have stored."""
        if not isinstance(meta, LmcacheWorkerMeta):
            return
        for key in meta.lost:
            self._stores.pop(key, None)
        for key, count in meta.stored.items():
            if key not in self._stores:
                continue
            run, missing = self._stores.pop(key)
            if missing > count:
                self._stores[key] = run, missing - count
            elif self._contents is not None:
                self._contents.hold(run)

    def events(self) -> Iterable[KVCacheEvent]:
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

    # -- inside -------------------------------------------------------------------------------

    def _follow(self, inner: Any) -> None:
        """Follow the server's log of evictions, from now on and from nothing."""
        assert self._contents is not None
        if self._feed is not None:
            self._feed.stop()
        self._contents.clear()
        self._feed = EvictionFeed(inner.scheduler_adapter, self._contents)
        self._feed.start()

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

    def _know_all(self, inner: Any, output: Any) -> None:
        """Requests that were admitted before LMCache was there are followed, too, but muted."""
        ids = [new.req_id for new in output.scheduled_new_reqs]
        for request_id in (*ids, *output.scheduled_cached_reqs.req_ids):
            if request_id not in inner.request_trackers and request_id in self._requests:
                self._mute(inner, self._requests[request_id])

    def _shorten(self, inner: Any, request: Any, computed: int, loaded: int) -> int:
        """Load less than was found; the rest is unlocked in the server. Returns what is loaded."""
        adapter = inner.scheduler_adapter
        chunk = adapter.lmcache_tokens_per_chunk
        tracker = inner.request_trackers[request.request_id]
        end, found = (computed + loaded) // chunk * chunk, tracker.num_lmcache_hit_tokens
        if end <= computed:
            end = tracker.num_vllm_hit_tokens // chunk * chunk
        tracker.num_lmcache_hit_tokens = end
        went_well, _ = self._link.call(
            LOOKUP,
            lambda: adapter.free_lookup_locks(
                token_ids=tracker.get_token_ids(), start=end, end=found,
                request_id=request.request_id, cache_salt=tracker.cache_salt,
                request_configs=tracker.request_configs,
            ),
        )  # fmt: skip
        if not went_well:
            log.debug("lmcache_locks_kept", request=request.request_id)
        return max(end - computed, 0)

    def _note_store(self, transfer: Any) -> None:
        request = self._requests.get(transfer.request_id)
        if request is None:
            return
        size, op = self._block_tokens, transfer.op
        stop = op.end // size
        run = Run(op.token_ids, list(request.block_hashes[:stop]), op.start // size, stop)
        self._stores[transfer.request_id, op.start, op.end] = run, self._workers

    def _found(self, request: Any, tokens: int | None) -> None:
        """What a look-up found is there; announced late, when the device's events have the salt."""
        if self._contents is None or tokens is None:
            return
        hashes, blocks = request.block_hashes, tokens // self._block_tokens
        if blocks:
            ids = list(request.all_token_ids[: blocks * self._block_tokens])
            self._contents.hold(Run(ids, list(hashes[:blocks]), 0, blocks))

    def _missed(self, request: Any, tokens: int) -> None:
        """What a look-up did not find is not there, whatever was announced."""
        blocks = tokens // self._block_tokens
        if self._contents is not None and blocks < len(request.block_hashes):
            self._contents.miss(request.block_hashes[blocks])


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
        stream = self._stream
        if stream is not None:
            with contextlib.suppress(Exception):
                stream.close()

    def run(self) -> None:
        """Follow the log. The server ends a subscription now and then: go on where it ended.

        What is announced is withdrawn when the log breaks, and whenever records are lost. Without a
        log, look-ups alone correct what is announced.
        """
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
