"""vLLM's `OffloadingConnector`, with five additions.

It loads less than it could where computing the rest anew is faster
(`workers.vllm.tail_recompute`). It keeps what a waiting request will load from being evicted.
It says what each request took from where: when the scheduler has allocated a request, the split of
its prompt into device, host and new tokens is known for good. It says whose each load is, so that
the host tier can tell what a request's load took. And it carries the news of stores that the host
tier gave up from the worker to the scheduler, where vLLM knows success only. Named in the engine's
`kv_transfer_config` as `kv_connector=HostTierConnector,
kv_connector_module_path=workers.vllm.connector`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_events import MEDIUM_CPU
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash

from workers.stats_channel import StatsSender
from workers.vllm.admission_reports import (
    AdmissionReports,
    asked_plan,
    ignore_malformed_params,
)
from workers.vllm.host_tier import BY_LAYER, HostTierManager, HostTierWorker
from workers.vllm.kept_manager import KeptTierManager
from workers.vllm.kept_tier import announcement, note_stores
from workers.vllm.tail_recompute import TailRecompute

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class HostTierWorkerMetadata(OffloadingWorkerMetadata):
    """What vLLM's workers say of their transfers, and which stores among them were given up.

    store_block_s: measured seconds to copy one block to the host.
    """

    dropped_jobs: set[int] = field(default_factory=set)
    store_block_s: float = 0.0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> HostTierWorkerMetadata:
        """Several workers' news as one: the slowest copy, every drop."""
        merged = super().aggregate(other)
        assert isinstance(merged, OffloadingWorkerMetadata)
        dropped, block_s = self.dropped_jobs, self.store_block_s
        if isinstance(other, HostTierWorkerMetadata):
            dropped, block_s = dropped | other.dropped_jobs, max(block_s, other.store_block_s)
        return HostTierWorkerMetadata(
            merged.completed_jobs, merged.transfer_stats, dropped, block_s
        )


class HostTierConnector(OffloadingConnector):
    """Reports each admitted request's tokens by source on the stats channel, and dropped stores
    to the manager of the host tier."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._kappa_by_layer = extra.get("kappa_load") == BY_LAYER
        self._kappa_layers: dict[str, int] = {}
        self._kappa_block = int(vllm_config.cache_config.block_size)
        self._kappa_tail = TailRecompute.from_config(extra, vllm_config.cache_config.block_size)
        stats = extra.get("kappa_stats", "") if role == KVConnectorRole.SCHEDULER else ""
        self._kappa_reports = AdmissionReports(StatsSender(stats))
        if role == KVConnectorRole.SCHEDULER:
            self._kappa_keep(StatsSender(stats), vllm_config.cache_config.block_size)

    def _kappa_keep(self, stats: StatsSender, block_tokens: int) -> None:
        """Tell of the blocks that a predecessor left, and note those that a successor may find."""
        scheduler = self.connector_scheduler
        manager = scheduler.manager if scheduler is not None else None
        if scheduler is None or not isinstance(manager, KeptTierManager):
            return
        note_stores(scheduler._events_tracker, manager.kept)

        def hash_of(key: bytes) -> int | bytes:
            return maybe_convert_block_hash(BlockHash(get_offload_block_hash(OffloadKey(key))))

        def parent_of(block_hash: bytes) -> int | bytes:
            return maybe_convert_block_hash(BlockHash(block_hash))

        found = manager.kept.found
        batches = announcement(found, block_tokens, MEDIUM_CPU, hash_of, parent_of)
        for batch in batches:
            stats.send({"kind": "kv", "batch": batch})

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """As vLLM's; the host tier is told whose each load is, so that it can say what it took."""
        super().bind_connector_metadata(connector_metadata)
        tier = self.connector_worker.worker if self.connector_worker is not None else None
        if isinstance(tier, HostTierWorker):
            for job_id, job in getattr(connector_metadata, "load_jobs", {}).items():
                tier.loading(job_id, job.req_id)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """As vLLM's; remembers which of the tier's tensors is which layer's."""
        super().register_kv_caches(kv_caches)
        worker = self.connector_worker
        assert worker is not None
        if isinstance(worker.worker, HostTierWorker):
            names = [n for g in worker.kv_cache_config.kv_cache_groups for n in g.layer_names]
            last = len(worker.worker.device) - 1
            # Layers that share a tensor, or lie in one, are waited for together.
            one_each = last + 1 == len(names)
            self._kappa_layers = {n: i if one_each else last for i, n in enumerate(names)}

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Where loads come in the prompt's own step: wait for this layer's."""
        tier = self.connector_worker.worker if self.connector_worker is not None else None
        jobs = getattr(self._connector_metadata, "load_jobs", {})
        if self._kappa_by_layer and jobs and isinstance(tier, HostTierWorker):
            tier.wait_layer(jobs, self._kappa_layers[layer_name])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """As vLLM's; no request waits for a load that came in its own step."""
        sending, receiving = super().get_finished(finished_req_ids)
        return sending, set() if self._kappa_by_layer else receiving

    def on_new_request(self, request: Request) -> None:
        """As vLLM's; while it waits, others' blocks are evicted from the host tier before its own.

        vLLM notes a use when a request is first looked at, which in a long queue is too late.
        """
        ignore_malformed_params(request)
        super().on_new_request(request)
        scheduler = self.connector_scheduler
        assert scheduler is not None
        status = scheduler._req_status[request.request_id]
        status.update_offload_keys()
        scheduler._touch(status)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As vLLM's, less the tail that is computed faster than loaded; remembers the device hit,
        which vLLM does not repeat later."""
        self._kappa_reports.looked_up(request, num_computed_tokens)
        hit, loads_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if not hit:
            return hit, loads_async and not self._kappa_by_layer
        found = hit
        if self._kappa_by_layer:
            # The step that loads computes, too: at least the last token, hence its whole block.
            last_block = (request.num_tokens - 1) // self._kappa_block * self._kappa_block
            hit = max(min(hit, last_block - num_computed_tokens), 0)
        new = request.num_tokens - num_computed_tokens - hit
        plan = asked_plan(request.sampling_params)
        loaded = self._kappa_tail.loaded_tokens(num_computed_tokens, hit, new, plan)
        if loaded < found:
            scheduler = self.connector_scheduler
            assert scheduler is not None
            status = scheduler._req_status[request.request_id]
            status.partial_tail_boundary = None
            status.update_num_hit_chunks(num_computed_tokens + loaded)
        return loaded, loads_async and bool(loaded) and not self._kappa_by_layer

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """As vLLM's; the request is admitted: report device, host and new tokens once."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._kappa_reports.admitted(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """As vLLM's; what loads in its own step is stored from the next one on, since vLLM wants
        either one load of a request at a time or its stores."""
        scheduler = self.connector_scheduler
        if not self._kappa_by_layer or scheduler is None:
            return super().build_connector_meta(scheduler_output)
        jobs = scheduler._current_batch_load_jobs.values()
        loading = [scheduler._req_status[job.req_id] for job in jobs]
        limits = [status.max_offload_tokens for status in loading]
        for status in loading:
            status.max_offload_tokens = 0
        try:
            return super().build_connector_meta(scheduler_output)
        finally:
            for status, limit in zip(loading, limits, strict=True):
                status.max_offload_tokens = limit

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """As vLLM's; names the stores among them that were dropped."""
        meta = super().build_connector_worker_meta()
        tier = self.connector_worker.worker if self.connector_worker is not None else None
        if meta is None or not isinstance(tier, HostTierWorker):
            return meta
        return HostTierWorkerMetadata(
            meta.completed_jobs, meta.transfer_stats, tier.take_dropped(), tier.store_block_s
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """As vLLM's; the manager is told first which of the stores that ended have failed."""
        meta, scheduler = connector_output.kv_connector_worker_meta, self.connector_scheduler
        manager = scheduler.manager if scheduler is not None else None
        if isinstance(meta, HostTierWorkerMetadata) and isinstance(manager, HostTierManager):
            assert scheduler is not None
            jobs = [scheduler._jobs[job] for job in meta.dropped_jobs if job in scheduler._jobs]
            lost = {key for job in jobs for key in job.keys}
            manager.hear(lost, meta.store_block_s)
            # vLLM keeps what it would announce of a key until that is evicted; these never are.
            for key in lost:
                scheduler._events_tracker._pending_event_metadata.pop(key, None)
        super().update_connector_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's; forgets a request that ended before it was admitted."""
        self._kappa_reports.finished(request)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's; forgets a request that ended before it was admitted."""
        self._kappa_reports.finished(request)
        return super().request_finished_all_groups(request, block_ids)
