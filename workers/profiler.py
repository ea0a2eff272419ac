"""Measures the machine's peaks: contiguous copies by size, GEMM FLOP/s at the model's shapes.

Runs inside the engine's worker process, where the memory, the threads and the device are the ones
that serve. With a CUDA device: pinned host memory, both directions. On a CPU the "device" is memory
too: memcpy between two buffers. Every figure is the median of several runs, with the spread beside
it. What an engine reaches of them is measured through it (`workers.vllm.measured_engine`).
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
        request: `sizes_bytes` (list of transfer sizes), `hidden` and `intermediate` (the model's
            GEMM shapes), `dtype` (torch name).

    Returns:
        `{"device", "threads", "at_s": by the machine's clock, "h2d": [{"bytes", "seconds",
        "bytes_per_s", "spread"}], "d2h": [...], "gemm": [{"tokens", "flops_per_s", "spread"}],
        "hbm_bytes_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s", "flops_per_s", "peaks": {those four
        again}}`; rates are medians, spread is the interquartile range over the median.

    Raises:
        ValueError: no size, or one below one byte.
    """
    sizes = [int(size) for size in request["sizes_bytes"]]
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes_bytes is {sizes}: give transfer sizes of one byte or more")
    cuda, largest = torch.cuda.is_available(), max(sizes)
    host = torch.zeros(largest, dtype=torch.int8)
    host = host.pin_memory() if cuda else host
    device = torch.zeros(largest, dtype=torch.int8, device="cuda" if cuda else "cpu")
    h2d = [_copy_rate(host, device, size) for size in sizes]
    d2h = [_copy_rate(device, host, size) for size in sizes]
    dtype = getattr(torch, str(request["dtype"]))
    hidden, intermediate = int(request["hidden"]), int(request["intermediate"])
    weights = torch.ones(hidden, intermediate, dtype=dtype, device=device.device)
    gemm = [_gemm_rate(tokens, weights) for tokens in _GEMM_TOKENS]
    memory = _copy_rate(device, device.clone(), largest)
    # Of the largest size: smaller ones may stay within a cache.
    at = sizes.index(largest)
    peaks = {
        "hbm_bytes_per_s": _MEMORY_FACTOR * memory["bytes_per_s"],
        "h2d_bytes_per_s": h2d[at]["bytes_per_s"],
        "d2h_bytes_per_s": d2h[at]["bytes_per_s"],
        "flops_per_s": max(row["flops_per_s"] for row in gemm),
    }
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "at_s": time.time(),
        "h2d": h2d,
        "d2h": d2h,
        "gemm": gemm,
        **peaks,
        "peaks": peaks,
    }


def _rate(amount: float, action: Callable[[], object]) -> tuple[float, float]:
    """Median amount per second of several runs after a first one, and its spread."""
    times = []
    for _ in range(_REPEATS + 1):
        start_s = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start_s)
    median_s, quartiles = statistics.median(times[1:]), statistics.quantiles(times[1:], n=4)
    return amount / median_s, (quartiles[2] - quartiles[0]) / median_s


def _copy_rate(src: torch.Tensor, dst: torch.Tensor, size: int) -> dict[str, float]:
    rate, spread = _rate(size, lambda: dst[:size].copy_(src[:size], non_blocking=True))
    return {"bytes": size, "seconds": size / rate, "bytes_per_s": rate, "spread": spread}


def _gemm_rate(tokens: int, weights: torch.Tensor) -> dict[str, float]:
    x = torch.ones(tokens, len(weights), dtype=weights.dtype, device=weights.device)
    rate, spread = _rate(2.0 * tokens * weights.numel(), lambda: x @ weights)
    return {"tokens": tokens, "flops_per_s": rate, "spread": spread}
