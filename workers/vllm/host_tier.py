"""The host tier: KV blocks kept in host memory behind vLLM's `OffloadingConnector`.

vLLM's own manager decides what is stored, evicted and looked up; this spec supplies the copy engine
for machines without a GPU, and the order of the link (`workers.vllm.link`): a real copy between the
device cache and host memory. On a *paced* node a transfer also lasts as long as its bytes would
take on the named node's link, in dilated time. Stores are bounded: they are dropped, and counted,
when too many seconds of them are queued already (`workers.vllm.host_tier_manager`), or when the
engine wants their blocks back before their turn came. Configured through
`kv_connector_extra_config`, which `workers.vllm.arguments.transfer_config` makes.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import get_none_hash_seed
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from scheduler.link_order import HALF, LOADS_FIRST
from workers.stats_channel import StatsSender
from workers.vllm.host_tier_manager import HostTierManager, PersistentTierManager
from workers.vllm.link import Link, Route
from workers.vllm.link_queue import LOAD, STORE, LinkPace, LinkRules
from workers.vllm.load_sources import LOAD_SOURCES, LoadSeconds
from workers.vllm.options import LINK_KEY, PACE_KEY, PERSIST_KEY, STATS_KEY, read_options
from workers.vllm.persistent_tier import PersistentTier, persistent_tensor

# An engine with nothing to do but stores under way must not poll as fast as it can, nor be late.
_STORE_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class TierSize:
    """blocks: in host memory; block_tokens: of each; folder: of a persistent tier, else None."""

    blocks: int
    block_tokens: int
    folder: Path | None = None


class HostTierWorker(OffloadingWorker):
    """Moves blocks between the device cache and host memory, over one link or one each way.

    Host blocks are shaped like the device's; one chunk is one block.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        size: TierSize,
        pace: LinkPace,
        stats: StatsSender,
        rules: LinkRules = LinkRules(),
    ) -> None:
        device = [t.tensor for t in kv_caches.tensors]
        host = [_host_blocks(size, i, int(t.shape[1])) for i, t in enumerate(device)]
        self.device = device
        """The device cache's blocks, as int8 tensors of (blocks, bytes of one)."""
        self._report_lock = threading.Lock()
        self._loading: dict[int, str] = {}
        self._load_seconds = LoadSeconds()
        self._stats, self._block_tokens, self._pace = stats, size.block_tokens, pace
        routes = {LOAD: Route(host, device), STORE: Route(device, host)}
        if rules.duplex == HALF:
            shared = Link(routes, rules, self._pace_s, self._report)
            self._links = {LOAD: shared, STORE: shared}
        else:
            self._links = {
                direction: Link({direction: route}, rules, self._pace_s, self._report)
                for direction, route in routes.items()
            }
        self._each = list(dict.fromkeys(self._links.values()))
        LOAD_SOURCES.append(self)

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, BlockIDsLoadStoreSpec)
        return self._links[STORE].submit(STORE, job_id, src_spec.block_ids, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        return self._links[LOAD].submit(LOAD, job_id, src_spec.block_ids, dst_spec.block_ids)

    def get_finished(self) -> list[TransferResult]:
        """Transfers of both directions that ended since the last call, dropped stores too."""
        return [result for link in self._each for result in link.take_finished()]

    def loading(self, job_id: int, request: str) -> None:
        """A load that is about to be submitted is this request's (vLLM's id)."""
        with self._report_lock:
            self._loading[job_id] = request

    def take_load_s(self, request: str) -> float:
        return self._load_seconds.take(request)

    def take_dropped(self) -> set[int]:
        """Stores given up since the last call; at the latest when `get_finished` names them."""
        return set().union(*(link.take_dropped() for link in self._each))

    @property
    def store_block_s(self) -> float:
        """Measured seconds to copy one block to the host; 0 before the first."""
        return self._links[STORE].block_s[STORE]

    def wait(self, job_ids: set[int]) -> None:
        """Block until `job_ids` have ended, and report how long that held the engine up."""
        start_s = time.monotonic()
        for link in self._each:
            link.wait(job_ids)
        with self._report_lock:
            self._stats.send({"kind": "wait", "took_s": time.monotonic() - start_s})

    def wait_for_load(self, timeout_s: float) -> bool:
        """As `LoadSource`; sleeps a moment if only stores are in flight."""
        if self._links[LOAD].has_unfinished(LOAD):
            self._links[LOAD].wait_change(timeout_s)
            return True
        if self._links[STORE].has_unfinished(STORE):
            self._links[STORE].wait_change(min(timeout_s, _STORE_POLL_S))
        return False

    def shutdown(self) -> None:
        for link in self._each:
            link.close()

    def _pace_s(self, direction: str, blocks: int) -> float:
        tokens = blocks * self._block_tokens
        return self._pace.load_s(tokens) if direction == LOAD else self._pace.store_s(tokens)

    def _report(self, message: dict[str, Any]) -> None:
        message["tokens"] = message["blocks"] * self._block_tokens
        with self._report_lock:
            request = self._loading.pop(message.pop("job", -1), None)
            if request is not None:
                self._load_seconds.add(request, message["took_s"])
            self._stats.send(message)


def _host_blocks(size: TierSize, number: int, width: int) -> torch.Tensor:
    if size.folder is None:
        return torch.empty((size.blocks, width), dtype=torch.int8)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return persistent_tensor(size.folder / f"kv-{rank}-{number}", size.blocks, width)


class HostTierSpec(CPUOffloadingSpec):
    """vLLM's CPU offloading spec with our copy engine in place of the CUDA one."""

    _manager: OffloadingManager | None

    @property
    def pace(self) -> LinkPace:
        """How long transfers last on a paced node."""
        return read_options(self.extra_config, PACE_KEY, LinkPace)

    @property
    def rules(self) -> LinkRules:
        """How the link is shared, in real seconds."""
        rules = read_options(self.extra_config, LINK_KEY, LinkRules)
        return rules.dilated(self.pace.dilation)

    @property
    def size(self) -> TierSize:
        """How much it holds, and in which folder if it outlives the engine.

        Raises:
            ValueError: vLLM's own order of transfers, which has no manager of ours, cannot persist.
        """
        folder = self.extra_config.get(PERSIST_KEY)
        if folder and self.rules.order != LOADS_FIRST:
            raise ValueError(
                f"engine.handover_dir needs scheduler.link_order {LOADS_FIRST}, and this is "
                f"{self.rules.order}"
            )
        path = Path(folder) if folder else None
        return TierSize(self.num_blocks, self.tokens_per_block[0], path)

    def get_manager(self) -> OffloadingManager:
        """vLLM's own manager for its own order, or else one that bounds the stores."""
        if self.rules.order == LOADS_FIRST and self._manager is None:
            self._manager = self._bounding_manager()
        return super().get_manager()

    def _bounding_manager(self) -> HostTierManager:
        size = self.size
        options: dict[str, Any] = {
            "num_blocks": self.num_blocks,
            "cache_policy": self.eviction_policy,
            "cache_policy_module_path": self.cache_policy_module_path,
            "enable_events": self.kv_events_config.enable_kv_cache_events,
            "pace": self.pace,
            "block_tokens": size.block_tokens,
            "backlog_s": self.rules.store_backlog_s,
            "report": StatsSender(self.extra_config.get(STATS_KEY, "")).send,
        }
        if size.folder is None:
            return HostTierManager(**options)
        seed = get_none_hash_seed()
        tier = PersistentTier(size.folder, size.blocks, size.block_tokens, seed)
        return PersistentTierManager(tier, **options)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Make the copy engine once, in the worker process."""
        worker = self.__dict__.get("_kappa_worker")
        if worker is None:
            if self.blocks_per_chunk != 1:
                raise ValueError(
                    f"host tier: blocks_per_chunk is {self.blocks_per_chunk}; only 1 is supported"
                )
            stats = StatsSender(self.extra_config.get(STATS_KEY, ""))
            worker = HostTierWorker(kv_caches, self.size, self.pace, stats, self.rules)
            self.__dict__["_kappa_worker"] = worker
        return worker
