"""vLLM's `OffloadingConnector`, which loads less where computing the rest is faster
(`kappa_workers.vllm.tail_recompute`), takes blocks from other workers' host tiers
(`kappa_workers.vllm.peer_fetch`), keeps what a waiting request will load from being evicted,
reports what each request took from where, names the request of each load to the host tier, and
names the stores that were given up to the scheduler, where vLLM knows success only. On machines
without a GPU `kappa_workers.paced.connector` adds loads by layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.base import OffloadKey

from kappa.protocol import PEER_PARAM
from kappa_workers.stats_channel import StatsSender
from kappa_workers.vllm.host_tier import TierWorker
from kappa_workers.vllm.host_tier_manager import HostTierManager
from kappa_workers.vllm.options import PEERS_KEY, STATS_KEY, PeerOptions, read_options
from kappa_workers.vllm.peer_fetch import HostTierFetches, PeerParams
from kappa_workers.vllm.peer_server import HostRows, PeerServer, mapped_rows
from kappa_workers.vllm.tail_recompute import AdmissionReports, ignore_malformed_params
from kappa_workers.vllm.versions.installed import note_use

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


log = structlog.get_logger(__name__)

# An engine in which only a fetch is under way must not poll as fast as it can, nor be late.
_FETCH_POLL_S = 0.002


@dataclass
class HostTierWorkerMetadata(OffloadingWorkerMetadata):
    """What vLLM's workers report of their transfers, and which stores among them were given up.
    store_block_s: measured per block. news: for the tier's manager, of engines with one worker."""

    dropped_jobs: set[int] = field(default_factory=set)
    store_block_s: float = 0.0
    news: Any = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> HostTierWorkerMetadata:
        merged = super().aggregate(other)
        assert isinstance(merged, OffloadingWorkerMetadata)
        dropped = self.dropped_jobs | getattr(other, "dropped_jobs", set())
        block_s = max(self.store_block_s, getattr(other, "store_block_s", 0.0))
        return HostTierWorkerMetadata(
            merged.completed_jobs, merged.transfer_stats, dropped, block_s
        )


@dataclass
class HostTierMetadata(OffloadingConnectorMetadata):
    """What the scheduler sends the workers of one step. work: what the tier's manager wants done
    besides transfers (`HostTierManager.take_work`)."""

    work: Any = None


class HostTierConnector(OffloadingConnector):
    """Named in the engine's `kv_transfer_config` (`kappa_workers.vllm.arguments`)."""

    _kappa_peers: HostTierFetches | None = None
    _kappa_server: PeerServer | None = None
    # Where peers read this engine's host tier, if they do.
    _kappa_endpoint = ""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._kappa_block_tokens = int(vllm_config.cache_config.block_size)
        # Of a sliding window only the blocks before the end of the hit are known to be there.
        self._kappa_may_shorten = all(
            isinstance(group.kv_cache_spec, FullAttentionSpec)
            for group in kv_cache_config.kv_cache_groups
        )
        if role == KVConnectorRole.SCHEDULER:
            stats = StatsSender(extra.get(STATS_KEY, ""))
            self._kappa_admissions = AdmissionReports(stats, extra, self._kappa_block_tokens)
            if extra.get(PEERS_KEY):
                self._kappa_init_peers(read_options(extra, PEERS_KEY, PeerOptions), stats)

    def _kappa_init_peers(self, options: PeerOptions, stats: StatsSender) -> None:
        """Serve peers, and fetch from them. Without its port an engine only fetches."""
        scheduler, manager = self.connector_scheduler, self._kappa_manager()
        assert scheduler is not None and manager is not None
        groups = scheduler.config.kv_group_configs
        if len(groups) > 1 or not self._kappa_may_shorten:
            raise ValueError(
                "router.policy priced_fetch, and a pool's role: this model keeps KV of several "
                "kinds of layers, and peers give blocks of one kind: name another policy, or make "
                "every pool's role both"
            )
        rows: HostRows | None = None

        def shared_rows() -> HostRows | None:
            nonlocal rows
            rows = rows or mapped_rows(Path(options.layout))
            return rows

        def record(request: Request, block: int, key: OffloadKey) -> None:
            scheduler._events_tracker.record_store(request, groups[0], block, key)

        self._kappa_endpoint = options.endpoint
        try:
            self._kappa_server = PeerServer(options, shared_rows, manager.place, manager.knows)
        except OSError as error:
            log.error("peers_not_served", host=options.host, port=options.port, reason=str(error))
            stats.send({"kind": "tier_failed", "why": "serve"})
        self._kappa_peers = HostTierFetches(
            options, manager, shared_rows, stats.send, record, self._kappa_block_tokens
        )
        self._kappa_peers.settle()  # tells how much room there is

    # -- the scheduler's side -----------------------------------------------------------------

    def _kappa_manager(self) -> HostTierManager | None:
        """The host tier's manager; None where it is vLLM's own (`scheduler.link_order: fifo`)."""
        manager = getattr(self.connector_scheduler, "manager", None)
        return manager if isinstance(manager, HostTierManager) else None

    def _kappa_status(self, request: Request) -> Any:
        assert self.connector_scheduler is not None
        return self.connector_scheduler._req_status[request.request_id]

    def on_new_request(self, request: Request) -> None:
        """As vLLM's; while it waits, others' blocks are evicted from the host tier before its own.
        vLLM notes a use when a request is first looked at, which in a long queue is too late."""
        ignore_malformed_params(request)
        super().on_new_request(request)
        status = self._kappa_status(request)
        status.update_offload_keys()
        note_use(self.connector_scheduler, status)
        if self._kappa_peers is not None:
            self._kappa_peers.begin(
                request, status.req_context, status.group_states[0].offload_keys
            )

    def kappa_arrived(self) -> bool:
        """Whether blocks came from a peer, or will not, since the last call: what waited for them
        may be looked up again."""
        return self._kappa_peers is not None and self._kappa_peers.take_ended()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As vLLM's, less the tail that is computed faster than loaded; put off while blocks are
        to come from a peer."""
        if self._kappa_peers is not None:
            self._kappa_peers.settle()
            if self._kappa_peers.under_way(request.request_id):
                return None, False
        hit, loads_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        loaded = self._kappa_planned(request, num_computed_tokens, hit or 0)
        if not hit or not self._kappa_may_shorten:
            return hit, loads_async
        if loaded < hit:
            status = self._kappa_status(request)
            status.partial_tail_boundary = None
            status.update_num_hit_chunks(num_computed_tokens + loaded)
        return loaded, loads_async and bool(loaded)

    def _kappa_planned(self, request: Request, device_tokens: int, hit: int) -> int:
        """How many to load of the `hit` tokens that the host tier has behind the device's."""
        return self._kappa_admissions.loaded_tokens(request, device_tokens, hit)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        manager = self._kappa_manager()
        from_disk = 0 if manager is None else manager.take_loaded() * self._kappa_block_tokens
        self._kappa_admissions.admitted(request, num_external_tokens, from_disk)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._kappa_peers is not None:
            if not scheduler_output.total_num_scheduled_tokens:
                self._kappa_peers.wait(_FETCH_POLL_S)
            self._kappa_peers.settle()
        meta, manager = super().build_connector_meta(scheduler_output), self._kappa_manager()
        work = None if manager is None else manager.take_work()
        return meta if work is None else HostTierMetadata(**vars(meta), work=work)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """As vLLM's; the manager first learns which of the stores that ended have failed."""
        meta, scheduler = connector_output.kv_connector_worker_meta, self.connector_scheduler
        manager = self._kappa_manager()
        if isinstance(meta, HostTierWorkerMetadata) and manager is not None:
            assert scheduler is not None
            jobs = [scheduler._jobs[job] for job in meta.dropped_jobs if job in scheduler._jobs]
            lost = {key for job in jobs for key in job.keys}
            manager.stores_lost(lost, meta.store_block_s)
            # vLLM keeps what it would announce of a key until that is evicted; these never are.
            for key in lost:
                scheduler._events_tracker._pending_event_metadata.pop(key, None)
            if meta.news is not None:
                manager.take_news(meta.news)
        super().update_connector_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's; a prompt that was computed to be handed over is answered with where its blocks
        are: they are stored here like any other's."""
        self._kappa_admissions.finished(request)
        if self._kappa_peers is not None:
            self._kappa_peers.finished(request.request_id)
        later, params = super().request_finished(request, block_ids)
        tokens = request.num_prompt_tokens // self._kappa_block_tokens * self._kappa_block_tokens
        asked = (request.kv_transfer_params or {}).get("do_remote_decode")
        computed = request.num_computed_tokens >= request.num_prompt_tokens
        if self._kappa_endpoint and asked and computed and tokens:
            place = PeerParams(self._kappa_endpoint, 0, tokens, handed=True)
            params = {PEER_PARAM: msgspec.to_builtins(place)}
        return later, params

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def shutdown(self) -> None:
        if self._kappa_server is not None:
            self._kappa_server.close()
        if self._kappa_peers is not None:
            self._kappa_peers.close()
        super().shutdown()

    # -- the worker's side --------------------------------------------------------------------

    def _kappa_tier(self) -> TierWorker | None:
        """The host tier of this process, once its device cache is known."""
        tier = self.connector_worker.worker if self.connector_worker is not None else None
        assert tier is None or isinstance(tier, TierWorker)
        return tier

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        tier = self._kappa_tier()
        if tier is not None:
            for job_id, job in getattr(connector_metadata, "load_jobs", {}).items():
                tier.loading(job_id, job.req_id)
            work = getattr(connector_metadata, "work", None)
            if work is not None:
                tier.begin_work(work)

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        meta, tier = super().build_connector_worker_meta(), self._kappa_tier()
        news = None if tier is None else tier.take_news()
        if tier is None or (meta is None and news is None):
            return meta
        meta = OffloadingWorkerMetadata() if meta is None else meta
        ended = meta.completed_jobs, meta.transfer_stats
        return HostTierWorkerMetadata(*ended, tier.take_dropped(), tier.store_block_s, news)
