"""The host tier: KV blocks kept in host memory behind vLLM's `OffloadingConnector`.

Our manager bounds the stores (`kappa_workers.vllm.host_tier_manager`). On GPUs vLLM copies
(`kappa_workers.vllm.gpu_host_tier`), on machines without one `kappa_workers.paced.host_tier` does:
each describes itself to vLLM by a subclass of `ManagedTierSpec`, which
`kappa_workers.vllm.arguments` names."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker

from kappa_scheduler.link_order import LOADS_FIRST
from kappa_workers.stats_channel import StatsSender
from kappa_workers.vllm.host_tier_manager import HostTierManager
from kappa_workers.vllm.load_sources import LoadSource
from kappa_workers.vllm.options import LINK_KEY, PEERS_KEY, STATS_KEY, LinkRules, read_options
from kappa_workers.vllm.versions.installed import SpecNames


class TierWorker(OffloadingWorker, LoadSource):
    """A host tier's worker as the connector and the replica know it; subclasses copy."""

    def __init__(self, stats: StatsSender) -> None:
        LoadSource.__init__(self)
        self._stats = stats
        self._report_lock = threading.Lock()
        self._loading: dict[int, str] = {}
        # Measured seconds to copy one block to the host; 0 before the first.
        self.store_block_s = 0.0

    def loading(self, job_id: int, request: str) -> None:
        """A load that is about to be submitted is this request's (vLLM's id)."""
        with self._report_lock:
            self._loading[job_id] = request

    def take_dropped(self) -> set[int]:
        """Stores given up since the last call; at the latest when `get_finished` names them."""
        return set()

    def begin_work(self, work: Any) -> None:
        """Begin what the manager's `take_work` asked for."""

    def take_news(self) -> Any:
        """For the manager's `take_news`, since the last call; None: nothing."""

    def wait(self, job_ids: set[int]) -> None:
        """Block until `job_ids` have ended, and report how long that held the engine up."""
        start_s = time.monotonic()
        self._wait(job_ids)
        with self._report_lock:
            self._stats.send({"kind": "wait", "took_s": time.monotonic() - start_s})

    def _wait(self, job_ids: set[int]) -> None:
        raise NotImplementedError

    def _report(self, message: dict[str, Any]) -> None:
        """Send what became of a transfer; a load's seconds are its request's, too."""
        if message.get("job", 0) < 0:  # not the engine's: it is measuring itself
            return
        with self._report_lock:
            request = self._loading.pop(message.pop("job", -1), None)
            if request is not None and "took_s" in message:
                self.add_load_s(request, message["took_s"])
            self._stats.send(message)


class ManagedTierSpec(SpecNames):
    """vLLM's CPU offloading spec with our manager, and worker, in place of its own."""

    _manager: OffloadingManager | None
    _kappa_worker: TierWorker | None = None

    def __init__(self, config: Any) -> None:
        """ValueError: a wrong option."""
        super().__init__(config)
        extra = self.extra_config
        self._rules = read_options(extra, LINK_KEY, LinkRules)
        peers = extra.get(PEERS_KEY)
        self._layout = Path(peers["layout"]) if peers else None
        """The file by which an engine's other process finds the rows that peers read and fill, if
        they do."""

    def get_manager(self) -> OffloadingManager:
        """vLLM's own manager for its own order, or else one that bounds the stores."""
        if self._rules.order == LOADS_FIRST and self._manager is None:
            self._manager = self._make_manager(
                num_blocks=self.host_blocks,
                cache_policy=self.eviction_policy,
                cache_policy_module_path=self.cache_policy_module_path,
                enable_events=self.kv_events_config.enable_kv_cache_events,
                block_tokens=self.tokens_per_block[0],
                backlog_s=self._rules.store_backlog_s,
                report=StatsSender(self.extra_config.get(STATS_KEY, "")).send,
            )
        return super().get_manager()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Make the worker once, in its process. Of tensor-parallel ranks, which copy the same
        tokens at the same time, the first alone reports."""
        if self._kappa_worker is None:
            if self.blocks_per_chunk != 1:
                raise ValueError(
                    f"host tier: blocks_per_chunk is {self.blocks_per_chunk}; only 1 is supported"
                )
            first = self.config.parallel.rank == 0
            stats = StatsSender(self.extra_config.get(STATS_KEY, "") if first else "")
            self._kappa_worker = self._make_worker(kv_caches, stats)
        return self._kappa_worker

    def _make_manager(self, **options: Any) -> HostTierManager:
        return HostTierManager(**options)

    def _make_worker(self, kv_caches: CanonicalKVCaches, stats: StatsSender) -> TierWorker:
        raise NotImplementedError
