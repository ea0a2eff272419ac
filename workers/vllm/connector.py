"""vLLM's `OffloadingConnector`, which loads less where computing the rest is faster
(`workers.vllm.tail_recompute`), takes blocks from other workers' host tiers
(`workers.vllm.peer_fetch`), keeps what a waiting request will load from being evicted, reports
what each request took from where, names the request of each load to the host tier, and names the
stores that were given up to the scheduler, where vLLM knows success only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
import torch
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
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.base import OffloadKey

from kappa.protocol import PEER_PARAM
from workers.stats_channel import StatsSender
from workers.vllm.disk_tier import DiskNews, DiskTierManager, DiskWrite
from workers.vllm.host_tier import TierWorker
from workers.vllm.host_tier_manager import HostTierManager
from workers.vllm.options import (
    LINK_KEY,
    PEERS_KEY,
    STATS_KEY,
    LinkRules,
    PeerOptions,
    read_options,
)
from workers.vllm.peer_fetch import HostTierFetches, PeerParams
from workers.vllm.peer_server import HostRows, PeerServer, mapped_rows
from workers.vllm.tail_recompute import AdmissionReports, TailRecompute, ignore_malformed_params
from workers.vllm.versions.installed import note_use

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
    store_block_s: measured per block. disk: on CPUs alone, where there is one worker."""

    dropped_jobs: set[int] = field(default_factory=set)
    store_block_s: float = 0.0
    disk: DiskNews = field(default_factory=DiskNews)

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
    """What the scheduler sends the workers of one step. by_layer: requests that load in it, layer
    by layer, by job."""

    disk_write: DiskWrite | None = None
    by_layer: dict[int, str] = field(default_factory=dict)


class HostTierConnector(OffloadingConnector):
    """Named in the engine's `kv_transfer_config` (`workers.vllm.arguments`)."""

    _kappa_peers: HostTierFetches | None = None
    _kappa_server: PeerServer | None = None
    _kappa_endpoint = ""
    """Where peers read this engine's host tier, if they do."""
    _kappa_in_step = ""
    """The request that was last looked up, if it loads in its prompt's own step."""
    _kappa_waiting: Mapping[int, str] = MappingProxyType({})
    """Requests whose loads the step under way waits for, by job."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._kappa_block_tokens = int(vllm_config.cache_config.block_size)
        # Of a sliding window only the blocks before the end of the hit are known to be there.
        groups = kv_cache_config.kv_cache_groups
        self._kappa_may_shorten = all(
            isinstance(g.kv_cache_spec, FullAttentionSpec) for g in groups
        )
        # Of several groups of layers vLLM cannot compute anew what did not come.
        self._kappa_by_layer = self._kappa_may_shorten and len(groups) == 1
        self._kappa_by_layer &= read_options(extra, LINK_KEY, LinkRules).by_layer
        if role == KVConnectorRole.SCHEDULER:
            stats = StatsSender(extra.get(STATS_KEY, ""))
            tail = TailRecompute.from_config(extra, self._kappa_block_tokens)
            self._kappa_admissions = AdmissionReports(stats, tail)
            if extra.get(PEERS_KEY):
                self._kappa_meet_peers(read_options(extra, PEERS_KEY, PeerOptions), stats)

    def _kappa_meet_peers(self, options: PeerOptions, stats: StatsSender) -> None:
        """Serve peers, and fetch from them. An engine whose port is taken does neither."""
        scheduler = self.connector_scheduler
        assert scheduler is not None and isinstance(scheduler.manager, HostTierManager)
        groups, manager = scheduler.config.kv_group_configs, scheduler.manager
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

        def coming(key: bytes) -> bool:
            return manager.knows(OffloadKey(key))

        self._kappa_endpoint = options.endpoint
        try:
            self._kappa_server = PeerServer(options, shared_rows, manager.place, coming)
        except OSError as error:
            log.error("peers_not_served", host=options.host, port=options.port, reason=str(error))
            stats.send({"kind": "tier_failed", "why": "serve"})
        self._kappa_peers = HostTierFetches(
            options, manager, shared_rows, stats.send, record, self._kappa_block_tokens
        )
        self._kappa_peers.settle()  # tells how much room there is
        manager.copying = lambda: self._kappa_peers is not None and self._kappa_peers.has_work

    # -- the scheduler's side -----------------------------------------------------------------

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
        found, by_layer = hit or 0, self._kappa_by_layer and self._kappa_alone(request)
        if by_layer:  # a step computes the last token at least, hence its block
            last = (request.num_tokens - 1) // self._kappa_block_tokens * self._kappa_block_tokens
            found = max(min(found, last - num_computed_tokens), 0)
        loaded = self._kappa_admissions.loaded_tokens(
            request, num_computed_tokens, found, by_layer=by_layer
        )
        self._kappa_in_step = request.request_id if by_layer and loaded else ""
        if not hit or not self._kappa_may_shorten:
            return hit, loads_async
        if loaded < hit:
            status = self._kappa_status(request)
            status.partial_tail_boundary = None
            status.update_num_hit_chunks(num_computed_tokens + loaded)
        return loaded, loads_async and bool(loaded) and not by_layer

    def _kappa_alone(self, request: Request) -> bool:
        """Whether a step that waits for this request's load holds nobody else up."""
        assert self.connector_scheduler is not None
        others = self.connector_scheduler._req_status.values()
        return all(each.req is request or each.req.is_finished() for each in others)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens and request.request_id == self._kappa_in_step:
            blocks = self._kappa_unloaded(request, blocks)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        manager = self._kappa_disk_manager()
        from_disk = 0 if manager is None else manager.take_loaded() * self._kappa_block_tokens
        self._kappa_admissions.admitted(request, num_external_tokens, from_disk)

    def _kappa_unloaded(self, request: Request, blocks: KVCacheBlocks) -> KVCacheBlocks:
        """Blocks of a request that loads in this step, as they are before that. vLLM lists them in
        its prefix cache at once, which its connector takes for being there: it would load none."""
        here = self._kappa_status(request).num_locally_computed_tokens // self._kappa_block_tokens
        (ours,) = blocks.blocks
        rest = [KVCacheBlock(block.block_id) for block in ours[here:]]
        return type(blocks)(([*ours[:here], *rest],))

    def _kappa_disk_manager(self) -> DiskTierManager | None:
        manager = getattr(self.connector_scheduler, "manager", None)
        return manager if isinstance(manager, DiskTierManager) else None

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._kappa_peers is not None:
            if not scheduler_output.total_num_scheduled_tokens:
                self._kappa_peers.wait(_FETCH_POLL_S)
            self._kappa_peers.settle()
        assert self.connector_scheduler is not None
        jobs = self.connector_scheduler._current_batch_load_jobs
        by_layer = {n: job.req_id for n, job in jobs.items() if job.req_id == self._kappa_in_step}
        statuses = [self.connector_scheduler._req_status[name] for name in by_layer.values()]
        limits = [status.max_offload_tokens for status in statuses]
        for status in statuses:
            # vLLM wants one load of a request or its stores; what is computed may yet be wrong.
            status.max_offload_tokens = 0
        meta, manager = super().build_connector_meta(scheduler_output), self._kappa_disk_manager()
        for status, limit in zip(statuses, limits, strict=True):
            status.max_offload_tokens = limit
        write = None if manager is None else manager.take_write()
        if write is None and not by_layer:
            return meta
        return HostTierMetadata(**vars(meta), disk_write=write, by_layer=by_layer)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """As vLLM's; the manager first learns which of the stores that ended have failed."""
        meta, scheduler = connector_output.kv_connector_worker_meta, self.connector_scheduler
        manager = getattr(scheduler, "manager", None)
        if isinstance(meta, HostTierWorkerMetadata) and isinstance(manager, HostTierManager):
            assert scheduler is not None
            jobs = [scheduler._jobs[job] for job in meta.dropped_jobs if job in scheduler._jobs]
            lost = {key for job in jobs for key in job.keys}
            manager.stores_lost(lost, meta.store_block_s)
            # vLLM keeps what it would announce of a key until that is evicted; these never are.
            for key in lost:
                scheduler._events_tracker._pending_event_metadata.pop(key, None)
            if isinstance(manager, DiskTierManager):
                manager.take_news(meta.disk)
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
        self._kappa_waiting = getattr(connector_metadata, "by_layer", {})
        if tier is not None:
            if self._kappa_waiting:
                tier.begin_step(self._kappa_waiting)
            for job_id, job in getattr(connector_metadata, "load_jobs", {}).items():
                if job_id not in self._kappa_waiting:
                    tier.loading(job_id, job.req_id)
            write = getattr(connector_metadata, "disk_write", None)
            if write is not None and tier.disk is not None:
                tier.disk.submit(write)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """As vLLM's; finds out which of the tier's tensors is which layer's."""
        super().register_kv_caches(kv_caches)
        if (tier := self._kappa_tier()) is not None:
            places = {tensor.data_ptr(): number for number, tensor in enumerate(tier.device)}
            last = len(places) - 1
            # What lies elsewhere, as where layers share blocks, is there once all is.
            tier.layer_numbers = {n: places.get(t.data_ptr(), last) for n, t in kv_caches.items()}

    def wait_for_layer_load(self, layer_name: str) -> None:
        """vLLM is about to attend to a layer."""
        if self._kappa_waiting and (tier := self._kappa_tier()) is not None:
            tier.wait_for_layer(tier.layer_numbers[layer_name])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """As vLLM's; who loaded in this step waits for nothing."""
        tier, waiting = self._kappa_tier(), self._kappa_waiting
        if waiting and tier is not None:
            tier.wait_for_layer(len(tier.device))  # none may go on behind the step
        sent, received = super().get_finished(finished_req_ids)
        return sent, received.difference(waiting.values())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """As vLLM's, with the blocks that did not come: vLLM computes them."""
        tier, lost = self._kappa_tier(), super().get_block_ids_with_load_errors()
        return lost if tier is None else lost | tier.take_lost()

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        meta, tier = super().build_connector_worker_meta(), self._kappa_tier()
        disk = DiskNews() if tier is None or tier.disk is None else tier.disk.take_news()
        if tier is None or (meta is None and disk == DiskNews()):
            return meta
        meta = OffloadingWorkerMetadata() if meta is None else meta
        ended = meta.completed_jobs, meta.transfer_stats
        return HostTierWorkerMetadata(*ended, tier.take_dropped(), tier.store_block_s, disk)
