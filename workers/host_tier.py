"""The host tier: KV blocks kept in host memory behind vLLM's `OffloadingConnector`.

vLLM's own manager decides what is stored, evicted and looked up; this spec supplies the copy
engine for machines without a GPU: a real copy between the device cache and host memory, made by
one thread per direction. On a *paced* node a transfer also lasts as long as its bytes would take
on the named node's link, in dilated time. Configured through `kv_connector_extra_config`:

    spec_name=HostTierSpec  spec_module_path=workers.host_tier  cpu_bytes_to_use=<bytes>
    kappa_stats=<ipc endpoint>  kappa_pace={"token_s": …, "store_token_s": …, "fixed_s": …}
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from workers.stats_channel import StatsSender

log = structlog.get_logger(__name__)

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class LinkPace:
    """How long a paced link takes, in real (dilated) seconds per token; zero means unpaced."""

    token_s: float = 0.0
    store_token_s: float = 0.0
    fixed_s: float = 0.0

    def load_s(self, tokens: int) -> float:
        """Real seconds that a load of `tokens` lasts on this link."""
        return self.fixed_s + tokens * self.token_s if self.token_s else 0.0

    def store_s(self, tokens: int) -> float:
        """Real seconds that a store of `tokens` lasts on this link."""
        return self.fixed_s + tokens * self.store_token_s if self.store_token_s else 0.0


@dataclass(slots=True)
class _Job:
    job_id: int
    src_ids: np.ndarray
    dst_ids: np.ndarray
    submitted_s: float


class Link:
    """One direction of the path between host and device: a serial server in a thread.

    Jobs run in the order they were submitted. `pace_s` gives the least time a job of so many
    tokens may last; a copy that takes longer than its pace is an overrun.
    """

    def __init__(
        self,
        name: str,
        src: list[torch.Tensor],
        dst: list[torch.Tensor],
        tokens_per_block: int,
        pace_s: Callable[[int], float],
        report: Callable[[dict[str, object]], None],
    ) -> None:
        """`src[i]` and `dst[i]` are int8 tensors of shape (blocks, bytes of one block)."""
        self._name, self._src, self._dst = name, src, dst
        self._tokens_per_block = tokens_per_block
        self._block_bytes = sum(int(t.shape[1]) for t in src)
        self._pace_s, self._report = pace_s, report
        self._jobs: deque[_Job] = deque()
        self._done: list[TransferResult] = []
        self._unfinished: set[int] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._free_at_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"kappa-link-{name}", daemon=True)
        self._thread.start()

    def submit(self, job_id: int, src_ids: np.ndarray, dst_ids: np.ndarray) -> bool:
        """Queue one transfer of blocks `src_ids` to `dst_ids` (equal lengths)."""
        if len(src_ids) != len(dst_ids):
            raise ValueError(
                f"{self._name} job {job_id}: {len(src_ids)} source blocks, {len(dst_ids)} targets"
            )
        with self._changed:
            self._unfinished.add(job_id)
            self._jobs.append(_Job(job_id, src_ids, dst_ids, time.monotonic()))
            self._changed.notify_all()
        return True

    def take_finished(self) -> list[TransferResult]:
        """Return and forget the transfers that ended since the last call."""
        with self._changed:
            finished, self._done = self._done, []
        return finished

    def has_unfinished(self) -> bool:
        """Whether a transfer is queued or running."""
        return bool(self._unfinished)

    def wait_change(self, timeout_s: float) -> None:
        """Wait until a transfer ends, at most `timeout_s`; returns at once if one has ended."""
        with self._changed:
            if not self._done and self._unfinished:
                self._changed.wait(timeout_s)

    def wait(self, job_ids: set[int]) -> None:
        """Block until none of `job_ids` is unfinished here (vLLM asks before it reuses blocks)."""
        with self._changed:
            while self._unfinished & job_ids and not self._closed:
                self._changed.wait(_POLL_S)

    def close(self) -> None:
        """Stop the thread; queued transfers are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closed:
                    self._changed.wait(_POLL_S)
                if self._closed:
                    return
                job = self._jobs.popleft()
            self._transfer(job)

    def _transfer(self, job: _Job) -> None:
        # A paced link is busy from the moment the job could start, not from when this thread
        # woke up, so that scheduling noise does not add up over a queue of jobs.
        start_s = max(job.submitted_s, self._free_at_s)
        src_ids, dst_ids = torch.from_numpy(job.src_ids), torch.from_numpy(job.dst_ids)
        copy_start_s = time.monotonic()
        try:
            for src, dst in zip(self._src, self._dst, strict=True):
                dst.index_copy_(0, dst_ids, src.index_select(0, src_ids))
        except (IndexError, RuntimeError):
            # A dead thread would leave the engine waiting for ever; vLLM fails loudly on this.
            log.exception("transfer_failed", direction=self._name, job_id=job.job_id)
            self._finish(TransferResult(job.job_id, False))
            return
        copy_s = time.monotonic() - copy_start_s
        tokens = len(job.src_ids) * self._tokens_per_block
        pace_s = self._pace_s(tokens)
        remaining_s = start_s + pace_s - time.monotonic()
        if remaining_s > 0:
            time.sleep(remaining_s)
        end_s = time.monotonic()
        self._free_at_s = start_s + pace_s if pace_s and remaining_s > 0 else end_s
        moved_bytes = len(job.src_ids) * self._block_bytes
        self._finish(TransferResult(job.job_id, True, moved_bytes, end_s - start_s))
        self._report(
            {
                "kind": self._name,
                "tokens": tokens,
                "bytes": moved_bytes,
                "queued_s": start_s - job.submitted_s,
                "took_s": end_s - start_s,
                "copy_s": copy_s,
                "pace_s": pace_s,
            }
        )

    def _finish(self, result: TransferResult) -> None:
        with self._changed:
            self._unfinished.discard(result.job_id)
            self._done.append(result)
            self._changed.notify_all()


class HostTierWorker(OffloadingWorker):
    """Moves blocks between the device cache and host memory, one `Link` per direction."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks: int,
        tokens_per_block: int,
        pace: LinkPace,
        stats: StatsSender,
    ) -> None:
        """Allocate `blocks` host blocks shaped like the device's; one chunk is one block."""
        device = [t.tensor for t in kv_caches.tensors]
        host = [torch.empty((blocks, t.shape[1]), dtype=torch.int8) for t in device]
        self._report_lock = threading.Lock()
        self._stats = stats
        self._load = Link("load", host, device, tokens_per_block, pace.load_s, self._report)
        self._store = Link("store", device, host, tokens_per_block, pace.store_s, self._report)
        CURRENT.append(self)

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Queue device -> host."""
        assert isinstance(dst_spec, BlockIDsLoadStoreSpec)
        return self._store.submit(job_id, src_spec.block_ids, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Queue host -> device."""
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        return self._load.submit(job_id, src_spec.block_ids, dst_spec.block_ids)

    def get_finished(self) -> list[TransferResult]:
        """Transfers of both directions that ended since the last call."""
        return self._load.take_finished() + self._store.take_finished()

    def wait(self, job_ids: set[int]) -> None:
        """Block until `job_ids` have ended, and report how long that held the engine up."""
        start_s = time.monotonic()
        self._store.wait(job_ids)
        self._load.wait(job_ids)
        self._report({"kind": "wait", "took_s": time.monotonic() - start_s})

    def wait_for_load(self, timeout_s: float) -> bool:
        """Sleep until a load ends, at most `timeout_s`; False when no load is in flight."""
        if not self._load.has_unfinished():
            return False
        self._load.wait_change(timeout_s)
        return True

    def shutdown(self) -> None:
        """Stop both link threads."""
        self._load.close()
        self._store.close()

    def _report(self, message: dict[str, object]) -> None:
        with self._report_lock:
            self._stats.send(message)


# The worker process holds one host tier; the metered worker asks it whether a load is in flight.
CURRENT: list[HostTierWorker] = []


class HostTierSpec(CPUOffloadingSpec):
    """vLLM's CPU offloading spec with our copy engine in place of the CUDA one."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Make the copy engine once, in the worker process."""
        worker = self.__dict__.get("_kappa_worker")
        if worker is None:
            if self.blocks_per_chunk != 1:
                raise ValueError(
                    f"host tier: blocks_per_chunk is {self.blocks_per_chunk}; only 1 is supported"
                )
            pace = LinkPace(**self.extra_config.get("kappa_pace", {}))
            worker = HostTierWorker(
                kv_caches,
                self.num_blocks,
                self.tokens_per_block[0],
                pace,
                StatsSender(self.extra_config.get("kappa_stats", "")),
            )
            self.__dict__["_kappa_worker"] = worker
        return worker
