"""Measures the machine: host-to-device bandwidth by size, GEMM FLOP/s at the model's shapes.

Runs inside the engine's worker process, where the memory, the threads and the device are the ones
that serve. With a CUDA device: pinned host memory, both directions, alone and at once. On a CPU the
"device" is memory too: memcpy between two buffers, contiguous and block-scattered. Every figure is
the median of several runs, with the spread beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_REPEATS = 5
_GEMM_TOKENS = (16, 128, 512)
_MEMORY_FACTOR = 2  # a copy reads once and writes once


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Measure this process' device.

    Args:
        request: `sizes_bytes` (list of transfer sizes), `block_bytes` (one KV block),
            `hidden` and `intermediate` (the model's GEMM shapes), `dtype` (torch name).

    Returns:
        `{"device", "threads", "h2d": [{"bytes", "bytes_per_s", "spread"}], "d2h": [...],
        "scatter": [...], "gemm": [{"tokens", "flops_per_s", "spread"}], "hbm_bytes_per_s",
        "h2d_bytes_per_s", "d2h_bytes_per_s", "flops_per_s"}`; rates are medians, spread is the
        interquartile range over the median.

    Raises:
        ValueError: a size below one byte, or a block that does not fit a size.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = [int(size) for size in request["sizes_bytes"]]
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes_bytes is {sizes}: give transfer sizes of one byte or more")
    host = _buffer(max(sizes), torch.device("cpu"), pinned=device.type == "cuda")
    target = _buffer(max(sizes), device, pinned=False)
    h2d = [_copy_rate(host, target, size, device) for size in sizes]
    d2h = [_copy_rate(target, host, size, device) for size in sizes]
    scatter = [
        _scatter_rate(host, target, size, int(request["block_bytes"]), device)
        for size in sizes
        if size >= int(request["block_bytes"])
    ]
    gemm = [
        _gemm_rate(tokens, int(request["hidden"]), int(request["intermediate"]), request, device)
        for tokens in _GEMM_TOKENS
    ]
    memory = _copy_rate(target, target.clone(), max(sizes), device)
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "h2d": h2d,
        "d2h": d2h,
        "scatter": scatter,
        "gemm": gemm,
        "hbm_bytes_per_s": _MEMORY_FACTOR * memory["bytes_per_s"],
        # Of the largest size: smaller ones may stay within a cache.
        "h2d_bytes_per_s": max(h2d, key=_size)["bytes_per_s"],
        "d2h_bytes_per_s": max(d2h, key=_size)["bytes_per_s"],
        "flops_per_s": max(row["flops_per_s"] for row in gemm),
    }


def _size(row: dict[str, float]) -> float:
    return row["bytes"]


def _buffer(size_bytes: int, device: torch.device, *, pinned: bool) -> torch.Tensor:
    tensor = torch.zeros(size_bytes, dtype=torch.int8, device=device)
    return tensor.pin_memory() if pinned else tensor


def _seconds(action: Callable[[], object], device: torch.device) -> list[float]:
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[1:]


def _rate(amount: float, seconds: list[float]) -> tuple[float, float]:
    median = statistics.median(seconds)
    quartiles = statistics.quantiles(seconds, n=4)
    return amount / median, (quartiles[2] - quartiles[0]) / median


def _copy_rate(
    src: torch.Tensor, dst: torch.Tensor, size: int, device: torch.device
) -> dict[str, float]:
    seconds = _seconds(lambda: dst[:size].copy_(src[:size], non_blocking=True), device)
    rate, spread = _rate(size, seconds)
    return {"bytes": size, "bytes_per_s": rate, "spread": spread}


def _scatter_rate(
    src: torch.Tensor, dst: torch.Tensor, size: int, block_bytes: int, device: torch.device
) -> dict[str, float]:
    blocks = size // block_bytes
    if blocks < 1:
        raise ValueError(f"a block of {block_bytes} bytes does not fit a transfer of {size}")
    rows_src = src[: blocks * block_bytes].view(blocks, block_bytes)
    rows_dst = dst[: blocks * block_bytes].view(blocks, block_bytes)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()

    def scatter() -> None:
        for i, j in enumerate(order):
            rows_dst[j].copy_(rows_src[i], non_blocking=True)

    rate, spread = _rate(blocks * block_bytes, _seconds(scatter, device))
    return {"bytes": blocks * block_bytes, "bytes_per_s": rate, "spread": spread}


def _gemm_rate(
    tokens: int, hidden: int, intermediate: int, request: dict[str, Any], device: torch.device
) -> dict[str, float]:
    dtype = getattr(torch, str(request["dtype"]))
    x = torch.ones(tokens, hidden, dtype=dtype, device=device)
    w = torch.ones(hidden, intermediate, dtype=dtype, device=device)
    rate, spread = _rate(2.0 * tokens * hidden * intermediate, _seconds(lambda: x @ w, device))
    return {"tokens": tokens, "flops_per_s": rate, "spread": spread}
