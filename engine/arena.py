"""The tensors behind the block pools: KV and activations, on the device and in host memory.

Allocated once, when the engine starts. Layer-major, so that one layer of a run of consecutive
blocks is one contiguous copy. Host tensors are pinned where the device is a GPU, by registering
their pages: torch's own pinned allocator rounds up to a power of two. A size that is not there is
refused before anything is allocated, with both numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.blocks import BlockPool, BlockType, Place, runs
from kappa.model import ModelShape

# Left to the rest of the process and the machine.
_SPARE_BYTES = 256 << 20
# No limit set, as control groups (version 1) write it.
_NO_LIMIT = 1 << 60


class ArenaTooLarge(ValueError):
    """The tensors asked for do not fit the memory that is free."""


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """How many blocks of each kind. kv, act: type; device, host: place; 0: no such pool."""

    kv_device: int
    kv_host: int = 0
    act_device: int = 0
    act_host: int = 0
    block_tokens: int = 16

    def __post_init__(self) -> None:
        for name in ("kv_host", "act_device", "act_host"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"ArenaSize.{name} is {getattr(self, name)}: give a number of blocks, 0 or more"
                )
        for name in ("kv_device", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"ArenaSize.{name} is {getattr(self, name)}: give 1 or more")


class Arena:
    """Block tensors and their pools.

    kv_device, kv_host: (layers, blocks, 2, block_tokens, kv_heads, head_dim), K at index 0 of the
    third axis and V at 1. act_device, act_host: (layers, blocks, block_tokens, hidden), the input
    of each layer's QKV projection (behind its input norm). The pool of each has its name, as
    `pools["kv", "device"]`.

    Args:
        shape: of the model.
        size: how many blocks.
        dtype: of all elements.
        device: where the device blocks lie; "cpu" is as good as any.
        host_free_bytes: host memory that may be used; what is available now, if not given.

    Raises:
        ArenaTooLarge: names the place, what is wanted and what is free, and what to give instead.
    """

    def __init__(
        self,
        shape: ModelShape,
        size: ArenaSize,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        host_free_bytes: int | None = None,
    ) -> None:
        self.shape = shape
        self.size = size
        self.dtype = dtype
        self.device = torch.device(device)
        self.block_tokens = size.block_tokens
        self.kv_block_shape = (2, size.block_tokens, shape.kv_heads, shape.head_dim)
        self.act_block_shape = (size.block_tokens, shape.hidden)
        self._registered: list[Tensor] = []
        self._refuse_too_large(host_free_bytes)
        self.pools: dict[tuple[BlockType, Place], BlockPool] = {
            ("kv", "device"): BlockPool("kv", "device", size.kv_device, size.block_tokens),
            ("kv", "host"): BlockPool("kv", "host", size.kv_host, size.block_tokens),
            ("act", "device"): BlockPool("act", "device", size.act_device, size.block_tokens),
            ("act", "host"): BlockPool("act", "host", size.act_host, size.block_tokens),
        }
        self.kv_device = self._on_device(size.kv_device, self.kv_block_shape)
        self.act_device = self._on_device(size.act_device, self.act_block_shape)
        layers = shape.layers
        self.kv_host = self.host_zeros((layers, size.kv_host, *self.kv_block_shape), dtype)
        self.act_host = self.host_zeros((layers, size.act_host, *self.act_block_shape), dtype)

    def tensor(self, type: BlockType, place: Place) -> Tensor:
        """The tensor of that type and place, shape (layers, blocks, ...)."""
        tensor: Tensor = getattr(self, f"{type}_{place}")
        return tensor

    def block_bytes(self, type: BlockType) -> int:
        """Bytes of one block over all layers."""
        elements = math.prod(self.kv_block_shape if type == "kv" else self.act_block_shape)
        return elements * self.shape.layers * self.dtype.itemsize

    def check(self) -> None:
        """Raise `BlockError` unless every pool's books are right."""
        for pool in self.pools.values():
            pool.check()

    def close(self) -> None:
        """Unpin the host tensors. No copy may be under way, nor the arena be used afterwards."""
        while self._registered:
            unpin(self._registered.pop())

    def host_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory, pinned where the device is a GPU, until `close`.

        Zeros written, not promised: pages that are there cannot be missing in the middle of a
        run, and memory that was never written may hold numbers that are none.

        Raises:
            ArenaTooLarge: it cannot be pinned; what was pinned before is unpinned.
        """
        tensor = torch.empty(shape, dtype=dtype).fill_(0)
        if self.device.type == "cuda" and tensor.numel():
            try:
                pin(tensor, "fewer host blocks")
            except ArenaTooLarge:
                self.close()
                raise
            self._registered.append(tensor)
        return tensor

    # -- memory -------------------------------------------------------------------------------

    def _on_device(self, blocks: int, block_shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(
            (self.shape.layers, blocks, *block_shape), dtype=self.dtype, device=self.device
        )

    def _refuse_too_large(self, host_free_bytes: int | None) -> None:
        size = self.size
        kv_bytes, act_bytes = self.block_bytes("kv"), self.block_bytes("act")
        host_bytes = size.kv_host * kv_bytes + size.act_host * act_bytes
        device_bytes = size.kv_device * kv_bytes + size.act_device * act_bytes
        if host_free_bytes is None:
            host_free_bytes = free_host_bytes()
        if self.device.type == "cuda":
            _refuse("device", device_bytes, torch.cuda.mem_get_info(self.device)[0])
        else:
            host_bytes += device_bytes
        _refuse("host", host_bytes, host_free_bytes)


def copies(
    arena: Arena, type: BlockType, to: Place, targets: Sequence[int], sources: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of views that copy whole blocks, layer by layer, runs of consecutive ones at once."""
    target: Tensor = arena.tensor(type, to)
    source: Tensor = arena.tensor(type, "host" if to == "device" else "device")
    merged = runs(targets, sources)
    return [
        (target[layer, t : t + n], source[layer, s : s + n])
        for layer in range(target.shape[0])
        for t, s, n in merged
    ]


def pin(tensor: Tensor, instead: str) -> None:
    """Register a host tensor's pages with CUDA, so that copies of it are asynchronous.

    instead: what to give where that cannot be done.

    Raises:
        ArenaTooLarge: CUDA refuses; names the size and the error.
    """
    code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    if code:
        raise ArenaTooLarge(
            f"cannot pin {_gib(tensor.nbytes)} of host memory (CUDA error {code}): "
            f"give {instead}, or raise the limit of locked memory (ulimit -l)"
        )


def unpin(tensor: Tensor) -> None:
    """Undo `pin`; before the tensor is freed, or CUDA takes whatever comes there for pinned."""
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


def free_host_bytes() -> int:
    """Host memory that can be had now: the kernel's estimate, within the control group's limit.

    Less a little that is left to the rest of the process.
    """
    free_bytes = _meminfo_bytes("MemAvailable")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most = Path("/sys/fs/cgroup", limit).read_text().strip()
            now = Path("/sys/fs/cgroup", used).read_text().strip()
        except OSError:
            continue
        if most.isdigit() and int(most) < _NO_LIMIT:
            free_bytes = min(free_bytes, int(most) - int(now))
    return max(free_bytes - _SPARE_BYTES, 0)


def _meminfo_bytes(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/meminfo has no {key}: give host_free_bytes")


def _refuse(place: str, wanted_bytes: int, free_bytes: int) -> None:
    if wanted_bytes > free_bytes:
        raise ArenaTooLarge(
            f"{place} blocks need {_gib(wanted_bytes)} ({wanted_bytes} bytes), but only "
            f"{_gib(free_bytes)} ({free_bytes} bytes) are free: give fewer {place} blocks"
        )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.3f} GiB"
