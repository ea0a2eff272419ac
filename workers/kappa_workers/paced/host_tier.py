"""The host tier of machines without a GPU (`own`): our copy engine over links of
`kappa_workers.paced.link`, with a disk behind it if it has one. A real copy, that on a *paced* node
lasts as long as on the named node's link, in dilated time."""

from __future__ import annotations

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
    TransferResult,
)

from kappa_scheduler.link_order import HALF
from kappa_workers.paced.disk_file import DiskFile, row_bytes
from kappa_workers.paced.disk_tier import DiskNews, DiskRoute, DiskTierManager, DiskWrite
from kappa_workers.paced.link import Link, Route, exposed_s
from kappa_workers.stats_channel import StatsSender
from kappa_workers.vllm.host_tier import ManagedTierSpec, TierWorker
from kappa_workers.vllm.host_tier_manager import HostTierManager
from kappa_workers.vllm.load_sources import LOAD, STORE
from kappa_workers.vllm.options import DISK_KEY, PACE_KEY, LinkPace, LinkRules, read_options
from kappa_workers.vllm.peer_server import share_layout, shared_tensor

# An engine with nothing to do but stores under way must not poll as fast as it can, nor be late.
_STORE_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class TierSize:
    """The size of a host tier, and of the disk behind it."""

    # Blocks in host memory.
    blocks: int
    # Tokens of a block.
    block_tokens: int
    # The folder of the disk tier's file.
    disk_folder: str = ""
    # Blocks on disk; 0: there is no disk tier.
    disk_blocks: int = 0
    # The file by which the engine's other process finds the rows that peers read and fill; None:
    # there are no peers.
    layout: Path | None = None


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
        super().__init__(stats)
        self.pace, self._block_tokens = pace, size.block_tokens
        self.device = device = [t.tensor for t in kv_caches.tensors]
        """The device cache's blocks, as int8 tensors of (blocks, bytes of one)."""
        self.disk: DiskRoute | None = None
        """Of a tier that has one."""
        self._by_layer: Mapping[int, str] = {}
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

    # -- transfers ----------------------------------------------------------------------------

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

    def take_lost(self) -> set[int]:
        """Blocks of the device that failed to load since the last call: vLLM computes them."""
        return self._loads.take_lost() | (set() if self.disk is None else self.disk.take_lost())

    def take_dropped(self) -> set[int]:
        return set().union(*(link.take_dropped() for link in self.links))

    def begin_work(self, work: DiskWrite) -> None:
        if self.disk is not None:
            self.disk.submit(work)

    def take_news(self) -> DiskNews | None:
        news = DiskNews() if self.disk is None else self.disk.take_news()
        return None if news == DiskNews() else news

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
        self.store_block_s = self._stores.block_s[STORE]
        disk = message.pop("disk_blocks", 0) * self._block_tokens
        counts = {"disk_tokens": disk} if disk else {}
        self._report({**message, "tokens": message["blocks"] * self._block_tokens, **counts})

    # -- loads by layers ----------------------------------------------------------------------

    def begin_step(self, by_layer: Mapping[int, str]) -> None:
        """A step begins; its loads of these jobs, with their requests, come layer by layer."""
        self._loads.take_layered()  # those of a step that was not measured
        self._by_layer = by_layer

    def loading(self, job_id: int, request: str) -> None:
        if job_id not in self._by_layer:  # what it adds to its step is its request's
            super().loading(job_id, request)

    def wait_for_layer(self, number: int) -> None:
        """Block until tensors up to this of all loads by layers are there, or will not come."""
        start_s = time.monotonic()
        self._loads.wait_layer(number)
        self._held_s += time.monotonic() - start_s

    def take_waits(self, start_s: float, compute_s: float) -> tuple[float, float]:
        """As `LoadSource`'s; a request waited for its load as long as that prolongs the step."""
        held_s, self._held_s = self._held_s, 0.0
        landed_s = [max(layer) for layer in zip(*self._loads.take_layered(), strict=False)]
        beyond_s = exposed_s(landed_s, start_s, compute_s) if compute_s else held_s
        for request in self._by_layer.values():
            self.add_load_s(request, beyond_s)
        self._by_layer = {}
        return held_s, beyond_s


class PacedTierManager(HostTierManager):
    """Bounds the stores by the pace of the link, on a paced node."""

    def __init__(self, pace: LinkPace, **options: Any) -> None:
        super().__init__(**options)
        self._pace = pace

    def _store_s(self, blocks: int) -> float:
        return self._pace.store_s(blocks * self._block_tokens) or super()._store_s(blocks)


class HostTierSpec(ManagedTierSpec):
    """Copied by us (`own`)."""

    def __init__(self, config: Any) -> None:
        """ValueError: a wrong option."""
        super().__init__(config)
        self._pace = read_options(self.extra_config, PACE_KEY, LinkPace)
        self._rules = self._rules.dilated(self._pace.dilation)
        folder, size_bytes = self.extra_config.get(DISK_KEY, ("", 0))
        rows = size_bytes // row_bytes(self.config.worker_kv_bytes_per_block)
        if size_bytes and not rows:
            raise ValueError(f"engine.disk_bytes is {size_bytes:,}, less than one block: give more")
        tokens = self.tokens_per_block[0]
        self._size = TierSize(self.host_blocks, tokens, folder, rows, self._layout)

    def _make_manager(self, **options: Any) -> HostTierManager:
        disk_blocks = self._size.disk_blocks
        if disk_blocks:
            return DiskTierManager(disk_blocks, **options)
        return PacedTierManager(self._pace, **options)

    def _make_worker(self, kv_caches: CanonicalKVCaches, stats: StatsSender) -> TierWorker:
        return HostTierWorker(kv_caches, self._size, self._pace, stats, self._rules)
