"""LMCache as host tier, so that nothing it does costs an engine more than a bounded wait.

A shell around LMCache's own connector (multi-process mode): it can start without its server and
finds it later; whatever the server fails to do is computed; what it holds is announced to the
router. Named in the engine's `kv_transfer_config` (`workers.vllm.arguments`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from workers.stats_channel import StatsSender
from workers.vllm.admission_reports import AdmissionReports, ignore_malformed_params
from workers.vllm.link_queue import LinkPace
from workers.vllm.lmcache.link import LOOKUP, STORE, LmcacheLink, LmcacheOptions, TierGuard
from workers.vllm.lmcache.scheduler import LmcacheMetadata, LmcacheScheduler
from workers.vllm.lmcache.worker import LmcacheWorker, LmcacheWorkerMeta
from workers.vllm.options import LMCACHE_KEY, PACE_KEY, STATS_KEY, read_options
from workers.vllm.tail_recompute import TailRecompute

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class LmcacheConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's face of the tier; each process has one half of it, `_scheduler` or `_worker`."""

    _scheduler: LmcacheScheduler
    _worker: LmcacheWorker

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not stored is a future miss, nothing more."""
        return False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        options = read_options(extra, LMCACHE_KEY, LmcacheOptions)
        endpoint = extra.get(STATS_KEY, "")
        block_tokens = vllm_config.cache_config.block_size
        self._caches: dict[str, torch.Tensor] = {}
        self._schedules = role == KVConnectorRole.SCHEDULER
        self._link = LmcacheLink(
            lambda: _make(vllm_config, role, kv_cache_config),
            self._ready,
            TierGuard(options.retry_s, options.timeout_s),
            StatsSender(endpoint),
            options.retry_s,
        )
        if self._schedules:
            self._scheduler = LmcacheScheduler(
                self._link,
                AdmissionReports(StatsSender(endpoint)),
                TailRecompute.from_config(extra, block_tokens),
                block_tokens,
                vllm_config.parallel_config.world_size,
                options.most_blocks,
            )
            self._link.connect()
        else:
            self._worker = LmcacheWorker(
                self._link,
                StatsSender(endpoint),
                read_options(extra, PACE_KEY, LinkPace),
                _token_bytes(kv_cache_config, block_tokens),
                block_tokens,
            )

    def _ready(self, inner: Any) -> None:
        if self._schedules:
            self._scheduler.ready(inner)
        else:
            inner.register_kv_caches(self._caches)

    # -- in the worker's process --------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The device cache is there: now LMCache's connector can be made."""
        self._caches = kv_caches
        self._link.connect()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, LmcacheMetadata)
        inner = self._link.open()
        if inner is not None and kv_connector_metadata.inner is not None:
            self._link.call(STORE, inner.handle_preemptions, kv_connector_metadata.inner)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Submit this step's loads."""
        metadata = self._metadata()
        self._worker.lose(metadata.lost.items())
        if metadata.inner is not None:
            self._worker.load(m for m in metadata.inner.requests if m.direction == "RETRIEVE")

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are whole."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Nothing to do: stores are whole."""

    def wait_for_save(self) -> None:
        """Submit this step's stores."""
        inner = self._metadata().inner
        if inner is not None:
            self._worker.store(m for m in inner.requests if m.direction == "STORE")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks may go, and those whose load has ended."""
        return self._worker.finished(self._metadata().delayed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.lost_blocks()

    def build_connector_worker_meta(self) -> LmcacheWorkerMeta | None:
        """What was stored, for the scheduler."""
        return None if self._schedules else self._worker.take_meta()

    def _metadata(self) -> LmcacheMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, LmcacheMetadata)
        return metadata

    # -- in the scheduler's process -----------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """What LMCache cannot read must not count as its failure."""
        ignore_malformed_params(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.stored(connector_output.kv_connector_worker_meta)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; True: its blocks are still being stored."""
        return self._scheduler.finished(request), None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What the server holds, as far as it changed."""
        return self._scheduler.events()

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Not needed: nothing is stored lazily."""

    def reset_cache(self) -> bool | None:
        """Clear the server, if it answers."""
        inner = self._link.open()
        if inner is None or not self._schedules:
            return None
        went_well, cleared = self._link.call(LOOKUP, inner.reset_cache)
        return bool(went_well and cleared)

    def shutdown(self) -> None:
        """End the tier's threads and let the server know."""
        self._link.close()
        if not self._schedules:
            self._worker.close()


def _make(vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> Any:
    """LMCache's connector; raises while its server does not answer."""
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

    return LMCacheMPConnector(vllm_config, role, kv_cache_config)


def _token_bytes(kv_cache_config: Any, block_tokens: int) -> int:
    """KV bytes of a token over all layers of this worker."""
    pages = 0
    for group in kv_cache_config.kv_cache_groups:
        pages += group.kv_cache_spec.page_size_bytes * len(group.layer_names)
    return int(pages // block_tokens)
