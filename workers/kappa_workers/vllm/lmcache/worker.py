"""The worker's half of the LMCache tier. Every transfer is asked for alone, so that one that fails
costs only itself: the blocks of a lost load are computed, a lost store is forgotten. On a
paced node a load is done when the named node's link would have brought it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kappa_workers.vllm.lmcache.base import (
    LOAD,
    STORE,
    LmcacheBase,
    LmcacheMetadata,
    LmcacheWorkerMeta,
    Stored,
)
from kappa_workers.vllm.load_sources import LoadSource
from kappa_workers.vllm.options import PACE_KEY, LinkPace, read_options

_STORE_POLL_S = 0.002


@dataclass(slots=True)
class _Load:
    start_s: float
    tokens: int
    block_ids: list[int]
    lands_s: float
    took_s: float = 0.0
    lost: bool = False


class LmcacheWorker(LmcacheBase, LoadSource):
    """Transfers of one worker process."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        LoadSource.__init__(self)
        self._pace = read_options(self._extra, PACE_KEY, LinkPace)
        pages = sum(
            group.kv_cache_spec.page_size_bytes * len(group.layer_names)
            for group in kv_cache_config.kv_cache_groups
        )
        self._token_bytes = int(pages // self._block_tokens)
        self._caches: dict[str, torch.Tensor] = {}
        self._loads: dict[str, _Load] = {}
        self._landed: list[str] = []
        self._failed_blocks: set[int] = set()
        self._storing: list[tuple[Stored, Any, float]] = []
        self._meta = LmcacheWorkerMeta()
        self._waiting: set[str] = set()
        self._stored: set[str] = set()
        self._free_s = 0.0

    def _ready(self, inner: Any) -> None:
        inner.register_kv_caches(self._caches)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The device cache is there: now LMCache's connector can be made."""
        self._caches = kv_caches
        self._link.connect()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, LmcacheMetadata)
        inner = self._link.open()
        if inner is not None and kv_connector_metadata.inner is not None:
            self._link.call(STORE, inner.handle_preemptions, kv_connector_metadata.inner)

    def shutdown(self) -> None:
        super().shutdown()
        self.leave()

    # -- transfers ----------------------------------------------------------------------------

    def _of_step(self, direction: str) -> tuple[LmcacheMetadata, list[Any]]:
        """This step's metadata, and LMCache's transfers in one direction."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, LmcacheMetadata)
        every = metadata.inner.requests if metadata.inner is not None else ()
        return metadata, [one for one in every if one.direction == direction]

    def _submit(self, why: str, transfer: Any) -> bool:
        inner = self._link.open()
        if inner is None:
            return False
        adapter = inner.worker_adapter

        def submit() -> bool:
            load = why == LOAD
            ask = adapter.submit_retrieve_request if load else adapter.submit_store_request
            ask(
                transfer.request_id, transfer.op, adapter.create_recorded_event(),
                cache_salt=transfer.cache_salt, request_configs=transfer.request_configs,
            )  # fmt: skip
            return True

        return bool(self._link.call(why, submit))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Submit this step's loads; those that cannot be are lost at once, as are those that never
        got here: vLLM waits for them all the same."""
        metadata, transfers = self._of_step("RETRIEVE")
        for request_id, block_ids in metadata.lost.items():
            load = self._loads[request_id] = _Load(time.monotonic(), 0, block_ids, 0.0)
            self._lose(load)
            self._landed.append(request_id)
        for transfer in transfers:
            now_s, op = time.monotonic(), transfer.op
            tokens = op.end - op.start
            lands_s = max(now_s, self._free_s) + self._pace.load_s(tokens)
            load = _Load(now_s, tokens, list(op.flat_block_ids), lands_s)
            self._loads[transfer.request_id] = load
            if self._submit(LOAD, transfer):
                self._free_s = lands_s
                load.took_s = time.monotonic() - now_s
            else:
                self._lose(load)
                self._landed.append(transfer.request_id)

    def wait_for_save(self) -> None:
        """Submit this step's stores; those that cannot be are given up."""
        for transfer in self._of_step("STORE")[1]:
            run = (transfer.request_id, transfer.op.start, transfer.op.end)
            start_s = time.monotonic()
            if self._submit(STORE, transfer):
                futures = self._link.inner.worker_adapter.store_futures
                self._storing.append((run, futures.get(transfer.request_id), start_s))
            else:
                self._meta.lost.add(run)

    # -- what ended ---------------------------------------------------------------------------

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """(requests that may give up their blocks, requests with a load that ended, well or
        not)."""
        self._waiting.update(self._of_step("")[0].delayed)
        inner, answer = self._link.inner, None
        if inner is not None:
            ask = inner.worker_adapter.get_finished
            answer = self._link.call(STORE, ask, set(self._waiting))
        stored, received = answer or (self._waiting, ())
        self._stored.update(stored or ())
        self._landed += [name for name in received or () if name in self._loads]
        self._settle_stores()
        ended = self._take_landed(inner)
        # vLLM lets go of a request once, and not while it is being loaded.
        sent = (self._stored & self._waiting) - self._loads.keys() - ended
        self._waiting -= sent | ended
        self._stored &= self._waiting
        return sent, ended

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def build_connector_worker_meta(self) -> LmcacheWorkerMeta | None:
        meta, self._meta = self._meta, LmcacheWorkerMeta()
        return meta if meta.stored or meta.lost else None

    def wait_for_load(self, timeout_s: float) -> bool:
        if self._loads:
            lands_s = min(load.lands_s for load in self._loads.values())
            time.sleep(min(max(lands_s - time.monotonic(), _STORE_POLL_S), timeout_s))
            return True
        if self._storing:
            time.sleep(min(timeout_s, _STORE_POLL_S))
        return False

    def _take_landed(self, inner: Any) -> set[str]:
        now_s, ended, later = time.monotonic(), set[str](), []
        errors: Iterable[int] = ()
        if inner is not None:
            errors = inner.worker_adapter.get_block_ids_with_load_errors()
        for request_id in self._landed:
            load = self._loads[request_id]
            if not set(load.block_ids).isdisjoint(errors):
                self._link.failed(LOAD, "blocks were not filled")
                self._lose(load)
            if not load.lost and load.lands_s > now_s:
                later.append(request_id)
                continue
            if not load.lost:
                self._link.guard.answered()
                paced_s = self._pace.load_s(load.tokens)
                took_s = max(load.took_s, paced_s or now_s - load.start_s)
                self.add_load_s(request_id, took_s)
                self._report("load", load.tokens, took_s)
            del self._loads[request_id]
            ended.add(request_id)
        self._landed = later
        return ended

    def _lose(self, load: _Load) -> None:
        load.lost = True
        self._failed_blocks.update(load.block_ids)

    def _settle_stores(self) -> None:
        now_s, still = time.monotonic(), []
        for run, future, start_s in self._storing:
            try:
                if not future.query() and now_s - start_s <= self._link.guard.slow_s:
                    still.append((run, future, start_s))
                    continue
                if not future.query():
                    raise TimeoutError("took too long")
                stored = bool(future.result(timeout=0))
            except Exception as error:
                self._link.failed(STORE, error)
                stored = False
            if not stored:
                self._meta.lost.add(run)
                continue
            self._link.guard.answered()
            self._meta.stored[run] = 1
            self._report("store", run[2] - run[1], now_s - start_s)
        self._storing = still

    def _report(self, kind: str, tokens: int, took_s: float) -> None:
        self._stats.send({
            "kind": kind, "tokens": tokens, "blocks": tokens // self._block_tokens,
            "bytes": tokens * self._token_bytes, "took_s": took_s,
        })  # fmt: skip
