"""The host tier: KV blocks kept in host memory behind vLLM's `OffloadingConnector`.

Our manager bounds the stores (`workers.vllm.host_tier_manager`); on GPUs vLLM copies
(`workers.vllm.native_tier`). Here is the copy engine for machines without one, over links of
`workers.vllm.link`: a real copy that on a *paced* node lasts as long as on the named node's link,
in dilated time. Configured by `workers.vllm.arguments.transfer_config`."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
    OffloadingWorker,
    TransferResult,
)

from scheduler.link_order import HALF, LOADS_FIRST
from workers.disk_file import DiskFile, row_bytes
from workers.stats_channel import StatsSender
from workers.vllm.disk_tier import DiskRoute, DiskTierManager
from workers.vllm.host_tier_manager import HostTierManager
from workers.vllm.link import LOAD, STORE, Link, LoadSource, Route, exposed_s
from workers.vllm.options import (
    DISK_KEY,
    LINK_KEY,
    PACE_KEY,
    PEERS_KEY,
    STATS_KEY,
    LinkPace,
    LinkRules,
    read_options,
)
from workers.vllm.peer_server import share_layout, shared_tensor
from workers.vllm.versions.installed import SpecNames

# An engine with nothing to do but stores under way must not poll as fast as it can, nor be late.
_STORE_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class TierSize:
    """blocks: in host memory; block_tokens: of each; disk_folder, disk_blocks: of the disk tier, if
    there is one; layout: the file by which an engine's other process finds the rows that peers read
    and fill, if they do."""

    blocks: int
    block_tokens: int
    disk_folder: str = ""
    disk_blocks: int = 0
    layout: Path | None = None


class TierWorker(OffloadingWorker, LoadSource):
    """What a host tier's worker reports of its transfers, whoever copies."""

    def __init__(self, kv_caches: CanonicalKVCaches, stats: StatsSender) -> None:
        LoadSource.__init__(self)
        self.device = [t.tensor for t in kv_caches.tensors]
        """The device cache's blocks, as int8 tensors of (blocks, bytes of one)."""
        self.disk: DiskRoute | None = None
        """Of a tier that has one."""
        self._stats = stats
        self._report_lock = threading.Lock()
        self._loading: dict[int, str] = {}
        self._by_layer: Mapping[int, str] = {}
        self.layer_numbers: dict[str, int] = {}
        """In which of the device's tensors each layer lies."""

    @property
    def store_block_s(self) -> float:
        """Measured seconds to copy one block to the host; 0 before the first."""
        raise NotImplementedError

    def loading(self, job_id: int, request: str) -> None:
        """A load that is about to be submitted is this request's (vLLM's id)."""
        with self._report_lock:
            self._loading[job_id] = request

    def begin_step(self, by_layer: Mapping[int, str]) -> None:
        """Of the loads submitted from now on, these of requests are brought layer by layer."""
        self._by_layer = by_layer

    def wait_for_layer(self, number: int) -> None:
        """Block until tensors up to this of all loads by layers are there, or will not come."""

    def take_lost(self) -> set[int]:
        """The device's blocks whose load failed since the last call: vLLM computes them."""
        return set()

    def take_dropped(self) -> set[int]:
        """Stores given up since the last call; at the latest when `get_finished` names them."""
        return set()

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


class HostTierWorker(TierWorker):
    """Moves blocks between the device cache and host memory (shaped alike; one chunk is one block),
    over one link or one each way."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        size: TierSize,
        pace: LinkPace,
        stats: StatsSender,
        rules: LinkRules = LinkRules(),
    ) -> None:
        super().__init__(kv_caches, stats)
        self.pace, self._block_tokens = pace, size.block_tokens
        device = self.device
        widths = [int(t.shape[1]) for t in device]
        if size.layout is None:
            host = [torch.empty((size.blocks, width), dtype=torch.int8) for width in widths]
        else:
            shared = [shared_tensor(size.blocks, width) for width in widths]
            host = [tensor for _, tensor in shared]
            places = [place for place, _ in shared]
            share_layout(size.layout, size.blocks, list(zip(places, widths, strict=True)))
        routes = {LOAD: Route(host, device), STORE: Route(device, host)}
        if size.disk_blocks:
            file = DiskFile(Path(size.disk_folder), size.disk_blocks, widths)
            loading = partial(self.wait_for_load, 0.0)
            self.disk = routes[LOAD] = DiskRoute(host, device, file, loading, self._report)
        shares = [routes] if rules.duplex == HALF else [{key: routes[key]} for key in routes]
        self.links = [Link(share, rules, self._pace_s, self._ended) for share in shares]
        self._loads, self._stores = self.links[0], self.links[-1]
        self._held_s = 0.0

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, BlockIDsLoadStoreSpec)
        return self._stores.submit(STORE, job_id, src_spec.block_ids, dst_spec.block_ids)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """As vLLM's; loads come in the link's order, which `expedited` (0.33) does not change."""
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        ids = src_spec.block_ids, dst_spec.block_ids
        return self._loads.submit(LOAD, job_id, *ids, by_layer=job_id in self._by_layer)

    def get_finished(self) -> list[TransferResult]:
        """Transfers of both directions that ended since the last call, dropped stores too."""
        return [result for link in self.links for result in link.take_finished()]

    def begin_step(self, by_layer: Mapping[int, str]) -> None:
        self._loads.take_layered()  # those of a step that nobody measured
        super().begin_step(by_layer)

    def wait_for_layer(self, number: int) -> None:
        start_s = time.monotonic()
        self._loads.wait_layer(number)
        self._held_s += time.monotonic() - start_s

    def take_waits(self, start_s: float, compute_s: float) -> tuple[float, float]:
        """As `LoadSource`'s; what a load adds to its step is what its request waited for it."""
        held_s, self._held_s = self._held_s, 0.0
        landed_s = [max(layer) for layer in zip(*self._loads.take_layered(), strict=False)]
        beyond_s = exposed_s(landed_s, start_s, compute_s) if compute_s else held_s
        for request in self._by_layer.values():
            self.add_load_s(request, beyond_s)
        self._by_layer = {}
        return held_s, beyond_s

    def take_lost(self) -> set[int]:
        return self._loads.take_lost() | (set() if self.disk is None else self.disk.take_lost())

    def take_dropped(self) -> set[int]:
        return set().union(*(link.take_dropped() for link in self.links))

    @property
    def store_block_s(self) -> float:
        return self._stores.block_s[STORE]

    def wait_for_load(self, timeout_s: float) -> bool:
        """As `LoadSource`'s; sleeps a moment if only stores are in flight."""
        if self._loads.has_unfinished(LOAD):
            self._loads.wait_change(timeout_s)
            return True
        if self._stores.has_unfinished(STORE):
            self._stores.wait_change(min(timeout_s, _STORE_POLL_S))
        elif self.disk is not None and self.disk.writes:
            time.sleep(min(timeout_s, _STORE_POLL_S))
        return False

    def shutdown(self) -> None:
        self.leave()
        for link in self.links:
            link.close()
        if self.disk is not None:
            self.disk.close()

    def _wait(self, job_ids: set[int]) -> None:
        for link in self.links:
            link.wait(job_ids)

    def _pace_s(self, direction: str, blocks: int) -> float:
        tokens = blocks * self._block_tokens
        return self.pace.load_s(tokens) if direction == LOAD else self.pace.store_s(tokens)

    def _ended(self, message: dict[str, Any]) -> None:
        disk = message.pop("disk_blocks", 0) * self._block_tokens
        counts = {"disk_tokens": disk} if disk else {}
        self._report({**message, "tokens": message["blocks"] * self._block_tokens, **counts})


class ManagedTierSpec(SpecNames):
    """vLLM's CPU offloading spec with our manager, and worker, in place of its own."""

    _manager: OffloadingManager | None
    _kappa_worker: TierWorker | None = None

    def __init__(self, config: Any) -> None:
        """ValueError: a wrong option."""
        super().__init__(config)
        extra = self.extra_config
        self._pace = read_options(extra, PACE_KEY, LinkPace)
        self._rules = read_options(extra, LINK_KEY, LinkRules).dilated(self._pace.dilation)
        disk_folder, disk_bytes = extra.get(DISK_KEY, ("", 0))
        rows = disk_bytes // row_bytes(self.config.worker_kv_bytes_per_block)
        if disk_bytes and not rows:
            raise ValueError(f"engine.disk_bytes is {disk_bytes:,}, less than one block: give more")
        peers = extra.get(PEERS_KEY)
        layout = Path(peers["layout"]) if peers else None
        tokens = self.tokens_per_block[0]
        self._size = TierSize(self.host_blocks, tokens, disk_folder, rows, layout)

    def get_manager(self) -> OffloadingManager:
        """vLLM's own manager for its own order, or else one that bounds the stores."""
        if self._rules.order != LOADS_FIRST or self._manager is not None:
            return super().get_manager()
        size = self._size
        options: dict[str, Any] = {
            "num_blocks": self.host_blocks,
            "cache_policy": self.eviction_policy,
            "cache_policy_module_path": self.cache_policy_module_path,
            "enable_events": self.kv_events_config.enable_kv_cache_events,
            "pace": self._pace,
            "block_tokens": size.block_tokens,
            "backlog_s": self._rules.store_backlog_s,
            "report": StatsSender(self.extra_config.get(STATS_KEY, "")).send,
        }
        if size.disk_blocks:
            self._manager = DiskTierManager(size.disk_blocks, **options)
        else:
            self._manager = HostTierManager(**options)
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

    def _make_worker(self, kv_caches: CanonicalKVCaches, stats: StatsSender) -> TierWorker:
        raise NotImplementedError


class HostTierSpec(ManagedTierSpec):
    """Copied by us (`own`)."""

    def _make_worker(self, kv_caches: CanonicalKVCaches, stats: StatsSender) -> TierWorker:
        return HostTierWorker(kv_caches, self._size, self._pace, stats, self._rules)
