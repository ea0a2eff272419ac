"""Measurements of a machine, without an engine: copies, products of matrices, and how they are
timed.

`machine_peaks` measures contiguous copies and products of matrices, as JSON.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_PEAK_REPEATS = 5
_GEMM_TOKENS = (16, 128, 512)
_MEMORY_FACTOR = 2  # a copy reads once and writes once
# An action that takes longer is stuck.
_WAIT_S = 60.0

Action = Callable[[], Any]


def machine_peaks(request: Mapping[str, Any]) -> dict[str, Any]:
    """Measure this process' device: pinned copies with a GPU, memcpy between buffers on a CPU.

    Args:
        request: `sizes_bytes` (list of transfer sizes), `hidden` and `intermediate` (the model's
            GEMM shapes), `dtype` (torch name).

    Returns:
        `{"device", "threads", "at_s": by the machine's clock, "h2d": [{"bytes", "seconds",
        "bytes_per_s", "spread"}], "d2h": [...], "gemm": [{"tokens", "flops_per_s", "spread"}],
        "hbm_bytes_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s", "flops_per_s", "peaks": {those four
        again}}`; rates are medians, spread is the interquartile range over the median.
    """
    sizes = [int(size) for size in request["sizes_bytes"]]
    cuda, largest = torch.cuda.is_available(), max(sizes)
    place = torch.device("cuda" if cuda else "cpu")
    host = torch.zeros(largest, dtype=torch.int8)
    host = host.pin_memory() if cuda else host
    device = torch.zeros(largest, dtype=torch.int8, device=place)
    dtype = getattr(torch, str(request["dtype"]))
    weights = torch.ones(
        int(request["hidden"]), int(request["intermediate"]), dtype=dtype, device=place
    )

    def row(amount: float, action: Action, name: str) -> dict[str, float]:
        taken = [elapsed_s(action, place) for _ in range(_PEAK_REPEATS + 1)][1:]
        seconds, quartiles = statistics.median(taken), statistics.quantiles(taken, n=4)
        spread = (quartiles[2] - quartiles[0]) / seconds
        return {"seconds": seconds, name: amount / seconds, "spread": spread}

    def copy(source: Tensor, target: Tensor, size: int) -> dict[str, float]:
        def act() -> None:
            target[:size].copy_(source[:size], non_blocking=True)

        return {"bytes": size, **row(size, act, "bytes_per_s")}

    def product(tokens: int) -> dict[str, float]:
        x = torch.ones(tokens, len(weights), dtype=dtype, device=place)
        flops = 2.0 * tokens * weights.numel()
        return {"tokens": tokens, **row(flops, lambda: x @ weights, "flops_per_s")}

    ways = {"h2d": (host, device), "d2h": (device, host)}
    rows = {way: [copy(*ends, n) for n in sizes] for way, ends in ways.items()}
    gemm = [product(tokens) for tokens in _GEMM_TOKENS]
    memory = copy(device, device.clone(), largest)
    at = sizes.index(largest)  # smaller ones may stay within a cache
    peaks = {
        "hbm_bytes_per_s": _MEMORY_FACTOR * memory["bytes_per_s"],
        **{f"{way}_bytes_per_s": found[at]["bytes_per_s"] for way, found in rows.items()},
        "flops_per_s": max(each["flops_per_s"] for each in gemm),
    }
    return {
        "device": device_name(place) if cuda else "cpu", "threads": torch.get_num_threads(),
        "at_s": time.time(), **rows, "gemm": gemm, **peaks, "peaks": peaks,
    }  # fmt: skip


def device_name(device: torch.device) -> str:
    """The accelerator's name, or the processor's and its threads."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"cpu, {torch.get_num_threads()} threads"


def elapsed_s(action: Action, device: torch.device) -> float:
    """Seconds until an idle device has done the work that `action` gives it."""
    finish(device)
    start_s = time.perf_counter()
    action()
    finish(device)
    return time.perf_counter() - start_s


def finish(device: torch.device) -> None:
    """Wait until a GPU has done its work; a CPU has when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def repeating(action: Action) -> Iterator[None]:
    """Repeat `action` on a thread while the block runs; it has been done once before.

    Raises:
        RuntimeError: the action failed or got stuck, so the measurement beside it is void.
    """
    stop, ready = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            action()
            ready.set()
            while not stop.is_set():
                action()
        except BaseException as error:
            errors.append(error)
            ready.set()

    thread = threading.Thread(target=work, name="kappa-beside", daemon=True)
    thread.start()
    try:
        if not ready.wait(_WAIT_S):
            raise RuntimeError(f"what runs beside the measurement took over {_WAIT_S:g} s")
        if not errors:
            yield
    finally:
        stop.set()
        thread.join(_WAIT_S)
    if errors:
        raise RuntimeError(f"what ran beside the measurement failed: {errors[0]}") from errors[0]
