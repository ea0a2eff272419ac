"""LMCache as host tier: a shell around its own connector (multi-process mode), so that nothing it
does costs an engine more than a bounded wait. It can start without its server and finds it later;
what the server fails to do is computed; what it holds is announced to the router."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from workers.stats_channel import StatsSender
from workers.vllm.lmcache.link import LmcacheLink, LmcacheOptions
from workers.vllm.options import LMCACHE_KEY, STATS_KEY, read_options

# A stored run of a request: its id, and the tokens from and to.
Stored = tuple[str, int, int]


@dataclass
class LmcacheMetadata(KVConnectorMetadata):
    """What a step's workers get: LMCache's own metadata, if it has any; requests that ended and
    keep their blocks until a worker names them; loads that LMCache does not know of, with their
    blocks."""

    inner: Any = None
    delayed: set[str] = field(default_factory=set)
    lost: dict[str, list[int]] = field(default_factory=dict)


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


class LmcacheConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's face of the tier. Made for a role, it is that half of it: `LmcacheScheduler` or
    `LmcacheWorker`, each of which answers what vLLM asks in its process."""

    def __new__(cls, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> Any:
        from workers.vllm.lmcache.scheduler import LmcacheScheduler
        from workers.vllm.lmcache.worker import LmcacheWorker

        half = LmcacheScheduler if role == KVConnectorRole.SCHEDULER else LmcacheWorker
        return super().__new__(half)

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._options = read_options(self._extra, LMCACHE_KEY, LmcacheOptions)
        self._block_tokens = int(vllm_config.cache_config.block_size)
        self._stats = StatsSender(self._extra.get(STATS_KEY, ""))

        def make() -> Any:
            from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

            return LMCacheMPConnector(vllm_config, role, kv_cache_config)

        # A sender of its own: the link's thread uses it.
        stats = StatsSender(self._extra.get(STATS_KEY, ""))
        self._link = LmcacheLink(make, self._ready, self._options, stats)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not stored is a future miss, nothing more."""
        return False

    def _ready(self, inner: Any) -> None:
        """LMCache's connector is there."""

    def shutdown(self) -> None:
        """End the tier's threads and let the server know."""
        self._link.close()

    # -- what the other half answers ----------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Nothing to do: loads and stores are whole."""

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        raise NotImplementedError

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        raise NotImplementedError

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])
