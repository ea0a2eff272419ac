"""The KV cache's memory: tensors behind the block pools, on the device and in host memory.

An `Arena` holds blocks of KV and of activations, allocated once, when the engine starts. Tensors
are layer-major, so that one layer of a run of consecutive blocks is one contiguous copy. Host
tensors are pinned where the device is a GPU, by registering their pages: torch's own pinned
allocator rounds up to a power of two. A size that does not fit the free memory is refused before
anything is allocated, with both numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import get_args

import torch
from torch import Tensor

from kappa.checks import check_at_least
from kappa.host import cgroup_free, machine_free
from kappa.model import ModelShape
from kappa_engine.block_pool import BlockPool, BlockType, Place, runs

# Left to the rest of the process and the machine.
_SPARE_BYTES = 256 << 20


class ArenaTooLarge(ValueError):
    """The tensors asked for do not fit the memory that is free."""


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """Blocks of KV and of activations on the device and in host memory; 0: no such pool."""

    kv_device: int
    kv_host: int = 0
    act_device: int = 0
    act_host: int = 0
    block_tokens: int = 16

    def __post_init__(self) -> None:
        check_at_least(self, kv_device=1, kv_host=0, act_device=0, act_host=0, block_tokens=1)


class Arena:
    """Block tensors and their pools.

    kv_device, kv_host: (layers, blocks, 2, block_tokens, kv_heads, head_dim), K at index 0 of the
    third axis and V at 1. act_device, act_host: (layers, blocks, block_tokens, hidden), the input
    of each layer's QKV projection (behind its input norm). Each has a pool of its name, as
    `pools["kv", "device"]`.

    Args:
        device: of the device blocks; "cpu" works as well as a GPU.

    Raises:
        ArenaTooLarge: names the place, the bytes wanted and free, and the remedy.
    """

    def __init__(
        self, shape: ModelShape, size: ArenaSize, *, dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.shape, self.size, self.dtype = shape, size, dtype
        self.device, self.block_tokens = torch.device(device), size.block_tokens
        self.kv_block_shape = (2, size.block_tokens, shape.kv_heads, shape.head_dim)
        self.act_block_shape = (size.block_tokens, shape.hidden)
        self._registered: list[Tensor] = []
        self._refuse_too_large()
        self.pools: dict[tuple[BlockType, Place], BlockPool] = {}
        for type, place in product(get_args(BlockType), get_args(Place)):
            blocks = getattr(size, f"{type}_{place}")
            self.pools[type, place] = BlockPool(type, place, blocks, size.block_tokens)
        self.kv_device = self._device_zeros((shape.layers, size.kv_device, *self.kv_block_shape))
        self.act_device = self._device_zeros((shape.layers, size.act_device, *self.act_block_shape))
        self.kv_host = self._host_zeros((shape.layers, size.kv_host, *self.kv_block_shape))
        self.act_host = self._host_zeros((shape.layers, size.act_host, *self.act_block_shape))

    def tensor(self, type: BlockType, place: Place) -> Tensor:
        """The tensor of that type and place, shape (layers, blocks, ...)."""
        tensor: Tensor = getattr(self, f"{type}_{place}")
        return tensor

    def block_bytes(self, type: BlockType) -> int:
        """Bytes of one block over all layers."""
        elements = math.prod(self.kv_block_shape if type == "kv" else self.act_block_shape)
        return elements * self.shape.layers * self.dtype.itemsize

    def copies(
        self, type: BlockType, to: Place, targets: Sequence[int], sources: Sequence[int]
    ) -> list[tuple[Tensor, Tensor]]:
        """Pairs of views that copy whole blocks, layer by layer, runs of neighbours at once."""
        target, source = self.tensor(type, to), self.tensor(type, "host")
        if to == "host":
            source = self.tensor(type, "device")
        merged = runs(targets, sources)
        return [
            (target[layer, t : t + n], source[layer, s : s + n])
            for layer in range(self.shape.layers)
            for t, s, n in merged
        ]

    def close(self) -> None:
        """Unpin the host tensors, when no copy is under way; the arena must not be used again."""
        while self._registered:
            unpin_pages(self._registered.pop())

    def _device_zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _host_zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Allocate host memory, pinned until `close` where the device is a GPU.

        Zeros are written, so that no page is missing in the middle of a run, and no block holds NaN
        before it is written.
        """
        tensor = torch.empty(shape, dtype=self.dtype).fill_(0)
        if self.device.type == "cuda" and tensor.numel():
            try:
                pin_pages(tensor, "give fewer host blocks")
            except ArenaTooLarge:
                self.close()
                raise
            self._registered.append(tensor)
        return tensor

    def _refuse_too_large(self) -> None:
        size = self.size
        kv_bytes, act_bytes = self.block_bytes("kv"), self.block_bytes("act")
        host_bytes = size.kv_host * kv_bytes + size.act_host * act_bytes
        device_bytes = size.kv_device * kv_bytes + size.act_device * act_bytes
        host_free = free_host_bytes()
        if self.device.type == "cuda":
            device_free = torch.cuda.mem_get_info(self.device)[0]
            wanted = {"device": (device_bytes, device_free), "host": (host_bytes, host_free)}
        else:
            wanted = {"host": (host_bytes + device_bytes, host_free)}
        for place, (wanted_bytes, free_bytes) in wanted.items():
            if wanted_bytes > free_bytes:
                raise ArenaTooLarge(
                    f"{place} blocks need {gib(wanted_bytes)} ({wanted_bytes} bytes), but only "
                    f"{gib(free_bytes)} ({free_bytes} bytes) are free: give fewer {place} blocks"
                )


def pin_pages(tensor: Tensor, remedy: str) -> None:
    """Register the pages of host memory with CUDA, until `unpin_pages`; `ArenaTooLarge` if refused,
    with a remedy besides the limit."""
    code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    if code:
        raise ArenaTooLarge(
            f"cannot pin {gib(tensor.nbytes)} of host memory (CUDA error {code}): {remedy}, or "
            "raise the limit of locked memory (ulimit -l)"
        )


def unpin_pages(tensor: Tensor) -> None:
    """Before it is freed: CUDA would take other memory at that address for pinned."""
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


def free_host_bytes() -> int:
    """Host memory that can be allocated now: the kernel's estimate, within the control groups'
    limits, less a little for the rest of the process.

    Raises:
        OSError: the kernel gives no estimate.
    """
    machine, group = machine_free(), cgroup_free()
    if machine is None:
        raise OSError("/proc/meminfo has no MemAvailable")
    return max(min(machine, machine if group is None else group) - _SPARE_BYTES, 0)


def gib(size_bytes: float) -> str:
    """Bytes in words."""
    return f"{size_bytes / (1 << 30):.3f} GiB"
