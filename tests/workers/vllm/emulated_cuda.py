"""CUDA as vLLM's offloading worker sees it, in host memory.

Emulated are its lowest calls: the driver's copy of a batch of pointers, streams, events, and the
platform's name. What lies above (pointers, queues, the mapped region in /dev/shm) is vLLM's own.
A stream's clock runs ahead of the device's by what was submitted to it; `Cuda.now_s` is the
device's.
"""

import contextlib
import ctypes
import time
from types import SimpleNamespace

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu import gpu_worker, spec

from kappa_workers.vllm.gpu_host_tier import NativeTierSpec


class OnDevice(torch.Tensor):
    """Host memory that says it is a GPU's."""

    is_cuda = True


class Torch(SimpleNamespace):
    """The module `torch` with these attributes in place of its own."""

    def __getattr__(self, name):
        return getattr(torch, name)


class Stream:
    def __init__(self, cuda):
        self.cuda, self.free_s = cuda, 0.0

    def wait_stream(self, other):
        self.free_s = max(self.free_s, other.free_s, self.cuda.now_s())

    def wait_event(self, event):
        self.free_s = max(self.free_s, event.at_s)


class Event:
    """`torch.Event(enable_timing=True)`; milliseconds apart, as CUDA counts them."""

    def __init__(self, cuda):
        self.cuda, self.at_s = cuda, 0.0

    def record(self, stream):
        self.at_s = stream.free_s

    def query(self):
        return self.cuda.now_s() >= self.at_s

    def synchronize(self):
        self.cuda.sleep(max(self.at_s - self.cuda.now_s(), 0.0))

    def elapsed_time(self, end):
        return 1000.0 * (end.at_s - self.at_s)


class Cuda:
    """A device behind a link of `bytes_per_s`.

    now_s, sleep: its clock. number: of the GPU. copied: (bytes, whether the source may be read in
    any order) by call.
    """

    def __init__(self, bytes_per_s=1e9, now_s=time.monotonic, sleep=time.sleep):
        self.bytes_per_s, self.now_s, self.sleep = bytes_per_s, now_s, sleep
        self.copied, self.number = [], 0
        self._compute = self._current = Stream(self)

    def swap_blocks_batch(self, src, dst, sizes, is_src_access_order_any=False):
        for source, target, size in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)
        moved = int(sizes.sum())
        self._current.free_s += moved / self.bytes_per_s
        self.copied.append((moved, is_src_access_order_any))

    @contextlib.contextmanager
    def stream(self, stream):
        before, self._current = self._current, stream
        yield
        self._current = before

    def install(self, patch):
        """Put it in CUDA's place; `patch(module, name, value)`."""
        platform = SimpleNamespace(
            is_cuda_alike=lambda: True, is_cuda=lambda: True, is_xpu=lambda: False,
            is_rocm=lambda: False, device_name="emulated", Stream=lambda: Stream(self),
            stream=self.stream, current_stream=lambda: self._compute,
        )  # fmt: skip
        patch(gpu_worker, "current_platform", platform)
        patch(gpu_worker, "HAS_TRITON", False)
        patch(gpu_worker.ops, "swap_blocks_batch", self.swap_blocks_batch)
        patch(gpu_worker, "torch", Torch(Event=lambda enable_timing: Event(self)))
        patch(spec, "current_platform", platform)
        patch(spec, "_all_workers_barrier", lambda: None)
        patch(torch.accelerator, "current_device_index", lambda: self.number)


def on_device(kv_caches):
    """The same caches, their tensors on the emulated device."""
    tensors = [
        CanonicalKVCacheTensor(t.tensor.as_subclass(OnDevice), t.page_size_bytes)
        for t in kv_caches.tensors
    ]
    return CanonicalKVCaches(tensors, kv_caches.group_data_refs)


def on_gpu(ids, sizes=None):
    """Blocks of the device, in cache groups of these sizes."""
    sizes = sizes or (len(ids),)
    return GPULoadStoreSpec(list(ids), group_sizes=sizes, block_indices=(0,) * len(sizes))


def on_host(ids):
    return BlockIDsLoadStoreSpec(list(ids))


class EmulatedCudaSpec(NativeTierSpec):
    """For an engine in a process of its own, which names its spec."""

    def _make_worker(self, kv_caches, stats):
        Cuda().install(setattr)
        return super()._make_worker(on_device(kv_caches), stats)
