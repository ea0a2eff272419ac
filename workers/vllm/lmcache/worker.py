"""The worker's half of the LMCache tier: loads into the device cache, stores, their reports.

Every transfer is asked for alone, so that one that fails costs only itself: a load that fails is
reported to vLLM as lost blocks, which it computes anew; a store that fails is forgotten. On a paced
node a load is reported as done when the named node's link would have brought it. Owned by
`workers.vllm.lmcache.connector`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from workers.stats_channel import StatsSender
from workers.vllm.link_queue import LinkPace
from workers.vllm.lmcache.link import LOAD, STORE, LmcacheLink
from workers.vllm.load_sources import LOAD_SOURCES, LoadSeconds

# A stored run of a request: its id, and the tokens from and to.
Stored = tuple[str, int, int]
_STORE_POLL_S = 0.002


@dataclass
class LmcacheWorkerMeta(KVConnectorWorkerMetadata):
    """What workers stored since the last step: run to how many of them did; lost: given up."""

    stored: dict[Stored, int] = field(default_factory=dict)
    lost: set[Stored] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> LmcacheWorkerMeta:
        """Two workers' reports as one."""
        assert isinstance(other, LmcacheWorkerMeta)
        stored = dict(self.stored)
        for run, count in other.stored.items():
            stored[run] = stored.get(run, 0) + count
        return LmcacheWorkerMeta(stored, self.lost | other.lost)


@dataclass(slots=True)
class _Load:
    start_s: float
    tokens: int
    block_ids: list[int]
    lands_s: float
    took_s: float = 0.0
    lost: bool = False


class LmcacheWorker:
    """Transfers of one worker process.

    Args:
        link: to LMCache's connector.
        stats: gets a message for every transfer.
        pace: of the link, on a paced node.
        token_bytes: of the KV of one token, in this worker.
        block_tokens: of the device cache.
    """

    def __init__(
        self,
        link: LmcacheLink,
        stats: StatsSender,
        pace: LinkPace,
        token_bytes: int,
        block_tokens: int,
    ) -> None:
        self._link, self._stats, self._pace = link, stats, pace
        self._token_bytes, self._block_tokens = token_bytes, block_tokens
        self._loads: dict[str, _Load] = {}
        self._landed: list[str] = []
        self._failed_blocks: set[int] = set()
        self._storing: list[tuple[Stored, Any, float]] = []
        self._meta = LmcacheWorkerMeta()
        self._waiting: set[str] = set()
        self._stored: set[str] = set()
        self._load_seconds = LoadSeconds()
        self._free_s = 0.0
        LOAD_SOURCES.append(self)

    # -- transfers ----------------------------------------------------------------------------

    def load(self, requests: Iterable[Any]) -> None:
        """Submit loads; those that cannot be are lost at once."""
        for transfer in requests:
            now_s = time.monotonic()
            op = transfer.op
            tokens = op.end - op.start
            start_s = max(now_s, self._free_s)
            pace_s = self._pace.load_s(tokens)
            load = _Load(now_s, tokens, list(op.flat_block_ids), start_s + pace_s)
            self._loads[transfer.request_id] = load
            inner = self._link.open()
            went_well = False
            if inner is not None:
                adapter = inner.worker_adapter
                went_well, _ = self._link.call(LOAD, self._submit, adapter, LOAD, transfer)
            if not went_well:
                self._lose(load)
                self._landed.append(transfer.request_id)
                continue
            self._free_s = load.lands_s
            load.took_s = time.monotonic() - now_s

    def lose(self, requests: Iterable[tuple[str, list[int]]]) -> None:
        """Loads that never got here: (request, its blocks); vLLM waits for them all the same."""
        for request_id, block_ids in requests:
            load = self._loads[request_id] = _Load(time.monotonic(), 0, block_ids, 0.0)
            self._lose(load)
            self._landed.append(request_id)

    def store(self, requests: Iterable[Any]) -> None:
        """Submit stores; those that cannot be are given up."""
        for transfer in requests:
            run = (transfer.request_id, transfer.op.start, transfer.op.end)
            inner = self._link.open()
            went_well, start_s = False, time.monotonic()
            if inner is not None:
                adapter = inner.worker_adapter
                went_well, _ = self._link.call(STORE, self._submit, adapter, STORE, transfer)
            if inner is None or not went_well:
                self._meta.lost.add(run)
                continue
            future = inner.worker_adapter.store_futures.get(transfer.request_id)
            self._storing.append((run, future, start_s))

    @staticmethod
    def _submit(adapter: Any, direction: str, transfer: Any) -> None:
        submit = adapter.submit_retrieve_request if direction == LOAD else None
        submit = submit or adapter.submit_store_request
        submit(
            transfer.request_id,
            transfer.op,
            adapter.create_recorded_event(),
            cache_salt=transfer.cache_salt,
            request_configs=transfer.request_configs,
        )

    # -- what ended ---------------------------------------------------------------------------

    def finished(self, delayed: Iterable[str]) -> tuple[set[str], set[str]]:
        """(requests whose blocks may go, requests whose load has ended, well or not).

        `delayed`: requests that ended since the last call and whose blocks the scheduler keeps
        until they are named here.
        """
        self._waiting.update(delayed)
        inner = self._link.inner
        if inner is None:
            self._stored.update(self._waiting)
        else:
            ask = inner.worker_adapter.get_finished
            went_well, answer = self._link.call(STORE, ask, set(self._waiting))
            stored, received = answer if went_well else (self._waiting, ())
            self._stored.update(stored or ())
            self._landed += [name for name in received or () if name in self._loads]
        self._settle_stores()
        ended = self._take_landed(inner)
        # vLLM lets go of a request once, and not while it is being loaded.
        sent = (self._stored & self._waiting) - self._loads.keys() - ended
        self._waiting -= sent | ended
        self._stored &= self._waiting
        return sent, ended

    def lost_blocks(self) -> set[int]:
        """Blocks that loads did not fill, since the last call."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def take_meta(self) -> LmcacheWorkerMeta | None:
        """What was stored since the last call, for the scheduler."""
        meta, self._meta = self._meta, LmcacheWorkerMeta()
        return meta if meta.stored or meta.lost else None

    def _take_landed(self, inner: Any) -> set[str]:
        now_s, ended, later = time.monotonic(), set[str](), []
        errors = set[int]()
        if inner is not None:
            errors = inner.worker_adapter.get_block_ids_with_load_errors()
        for request_id in self._landed:
            load = self._loads[request_id]
            if errors.intersection(load.block_ids):
                self._link.failed(LOAD, "blocks were not filled")
                self._lose(load)
            if not load.lost and load.lands_s > now_s:
                later.append(request_id)
                continue
            if not load.lost:
                self._report(request_id, load, now_s)
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
                if not future.query():
                    if now_s - start_s > self._link.guard.slow_s:
                        self._meta.lost.add(run)
                        self._link.failed(STORE, "took too long")
                    else:
                        still.append((run, future, start_s))
                    continue
                stored = bool(future.result(timeout=0))
            except Exception as error:
                self._link.failed(STORE, error)
                stored = False
            if not stored:
                self._meta.lost.add(run)
                continue
            self._link.guard.answered()
            self._meta.stored[run] = 1
            self._send_stats("store", run[2] - run[1], now_s - start_s)
        self._storing = still

    def _report(self, request_id: str, load: _Load, now_s: float) -> None:
        self._link.guard.answered()
        paced = self._pace.load_s(load.tokens)
        took_s = max(load.took_s, paced) if paced else max(load.took_s, now_s - load.start_s)
        self._load_seconds.add(request_id, took_s)
        self._send_stats("load", load.tokens, took_s)

    def _send_stats(self, kind: str, tokens: int, took_s: float) -> None:
        self._stats.send({
            "kind": kind, "tokens": tokens, "blocks": tokens // self._block_tokens,
            "bytes": tokens * self._token_bytes, "took_s": took_s,
        })  # fmt: skip

    # -- what the metered worker asks of a host tier ------------------------------------------

    def take_load_s(self, request: str) -> float:
        return self._load_seconds.take(request)

    def wait_for_load(self, timeout_s: float) -> bool:
        """As `LoadSource`: sleeps until the next load lands."""
        if self._loads:
            lands_s = min(load.lands_s for load in self._loads.values())
            time.sleep(min(max(lands_s - time.monotonic(), _STORE_POLL_S), timeout_s))
            return True
        if self._storing:
            time.sleep(min(timeout_s, _STORE_POLL_S))
        return False

    def close(self) -> None:
        """Forget everything."""
        if self in LOAD_SOURCES:
            LOAD_SOURCES.remove(self)
