"""The host tier on GPUs: vLLM copies, in pinned memory, streams and events; we manage and report,
by the bytes and seconds that vLLM hands its connector. A submitted transfer cannot be taken back,
so none is ever given up: the manager bounds the stores before they begin."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kappa_workers.stats_channel import StatsSender
from kappa_workers.vllm.host_tier import ManagedTierSpec, TierWorker
from kappa_workers.vllm.load_sources import LOAD, STORE, averaged_s
from kappa_workers.vllm.peer_server import share_layout
from kappa_workers.vllm.versions.installed import SpecNames

# An engine with nothing to do but transfers under way looks for their end so often.
_POLL_S = 0.0005


class _Submitted(NamedTuple):
    direction: str
    blocks: int
    tokens: int


class NativeTierWorker(TierWorker):
    """Reports the transfers of vLLM's worker (`copies`). tokens_per_block: by group of layers.
    ranks: copy alike, each over a link of its own; the bytes of all are reported."""

    def __init__(
        self,
        copies: OffloadingWorker,
        tokens_per_block: tuple[int, ...],
        ranks: int,
        stats: StatsSender,
    ) -> None:
        super().__init__(stats)
        self._ranks = ranks
        self._copies, self._tokens_per_block = copies, tokens_per_block
        self._submitted: dict[int, _Submitted] = {}

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        self._begin(job_id, STORE, src_spec)
        return self._copies.submit_store(job_id, src_spec, dst_spec)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """As vLLM's, which knows of `expedited` loads from 0.33 on."""
        self._begin(job_id, LOAD, dst_spec)
        hurry: dict[str, Any] = {"expedited": True} if expedited else {}
        return self._copies.submit_load(job_id, src_spec, dst_spec, **hurry)

    def get_finished(self) -> list[TransferResult]:
        results = self._copies.get_finished()
        for result in results:
            self._ended(result)
        return results

    def wait_for_load(self, timeout_s: float) -> bool:
        if self._submitted:
            time.sleep(min(timeout_s, _POLL_S))
        return any(job.direction == LOAD for job in self._submitted.values())

    def shutdown(self) -> None:
        self.leave()
        self._copies.shutdown()

    def _wait(self, job_ids: set[int]) -> None:
        self._copies.wait(job_ids)

    def _begin(self, job_id: int, direction: str, device: GPULoadStoreSpec) -> None:
        # Groups of layers hold the same tokens; those of a window only the last of them.
        sizes = zip(device.group_sizes, self._tokens_per_block, strict=True)
        tokens = max(size * each for size, each in sizes)
        self._submitted[job_id] = _Submitted(direction, len(device.block_ids), tokens)

    def _ended(self, result: TransferResult) -> None:
        job = self._submitted.pop(result.job_id)
        took_s, moved = result.transfer_time, result.transfer_size
        if took_s is None or moved is None:
            return
        if job.direction == STORE and job.blocks:
            self.store_block_s = averaged_s(self.store_block_s, took_s / job.blocks)
        self._report({
            "kind": job.direction, "job": result.job_id, "blocks": job.blocks,
            "bytes": moved * self._ranks, "tokens": job.tokens, "took_s": took_s,
        })  # fmt: skip


class NativeTierSpec(ManagedTierSpec):
    """Copied by vLLM (`native`)."""

    def create_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        """As vLLM's, with a place of each rank's own in the memory that ranks share: vLLM takes the
        number of the rank's GPU modulo ranks, and on GPUs 0 and 2 two ranks would write over each
        other's blocks."""
        accelerator: Any = torch.accelerator
        numbered, rank = accelerator.current_device_index, self.config.parallel.rank
        accelerator.current_device_index = lambda: rank
        try:
            return super().create_worker(kv_caches)
        finally:
            accelerator.current_device_index = numbered

    def _make_worker(self, kv_caches: CanonicalKVCaches, stats: StatsSender) -> TierWorker:
        copies = SpecNames.get_worker(self, kv_caches)
        if self._layout is not None and self.config.parallel.rank == 0:
            # One file holds the blocks of all ranks, side by side in a row.
            region = copies._mmap_region
            share_layout(self._layout, self.host_blocks, [(region.fd, self.kv_bytes_per_chunk)])
        ranks = self.config.parallel.world_size
        return NativeTierWorker(copies, self.tokens_per_block, ranks, stats)
