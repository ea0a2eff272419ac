"""What is reserved on a worker: changes of its record (`ttft.WORKER`), by compiled arithmetic."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kappa import step_seconds
from kappa.compiled import compiled

Workers = NDArray[np.void]
Rows = NDArray[np.void]
Prompt = tuple[float, float, int]
"""What a prompt put on its worker: seconds of link and gpu, tokens to compute."""


@compiled
def fade(at_s: float, now_s: float, window_s: float) -> float:
    """The remaining share of what was counted up to `at_s`; a clock that was set back does not make
    it grow."""
    return math.exp(min(at_s - now_s, 0.0) / window_s)


@compiled
def spent(worker: Any, now_s: float, window_s: float) -> tuple[float, float]:
    """Seconds that requests decoded there lately, of all together, and how many of them ended."""
    left = fade(worker.spent_at_s, now_s, window_s)
    since_s = max(now_s - worker.spent_at_s, 0.0)
    return worker.spent_s * left + worker.decoding * since_s, worker.ends * left


@compiled
def reserve(
    workers: Workers, slot: int, rows: Rows, index: int, now_s: float, window_s: float
) -> tuple[float, float]:
    """Put the request that row `index` of the estimates prices on its worker; returns how many
    decode there, and their context."""
    worker, row = workers[slot], rows[index]
    if worker.waiting == 0:
        worker.gpu_since_s, worker.gpu_head_s = now_s, row.work_s
    worker.link_reserved_s += row.load_s
    worker.link_free_s = max(worker.link_free_s, now_s) + row.load_s
    worker.gpu_reserved_s += row.work_s
    worker.in_flight += 1
    worker.waiting += 1
    worker.queued_tokens += row.new_tokens
    worker.resident_tokens += row.device_tokens + row.cached_tokens + row.new_tokens
    left = fade(worker.used_s, now_s, window_s)
    worker.used_s = now_s
    worker.use_known = worker.use_known * left + 1 - left
    worker.gpu_use = worker.gpu_use * left + row.work_s / window_s
    worker.loads_per_s = worker.loads_per_s * left + (row.load_s > 0) / window_s
    worker.prefills_per_s = worker.prefills_per_s * left + 1 / window_s
    return worker.decoding, worker.decode_context_tokens


@compiled
def correct(
    workers: Workers, slot: int, found: tuple[int, int, int, int], before: Prompt, first: bool
) -> tuple[float, float]:
    """Link and gpu seconds of a prompt by what its engine found, put in place of those reserved.

    found: tokens in host, tokens to compute, those of the context before them, and of those in
    host the ones on disk; first: it is at the head of the queue.
    """
    worker = workers[slot]
    host_tokens, new_tokens, context_tokens, disk_tokens = found
    pairs = step_seconds.chunk_pairs(new_tokens, context_tokens)
    token_s = worker.token_s + worker.comm_token_s
    gpu_s = step_seconds.computing_s(new_tokens, pairs, token_s, worker.pair_s)
    link_s = host_tokens * worker.load_token_s + disk_tokens * worker.disk_token_s
    link_before_s, gpu_before_s, new_before = before
    worker.gpu_reserved_s += gpu_s - gpu_before_s
    worker.link_reserved_s += link_s - link_before_s
    worker.link_free_s += link_s - link_before_s
    worker.queued_tokens += new_tokens - new_before
    if first:
        worker.gpu_head_s = gpu_s
    return link_s, gpu_s


@compiled
def finish_prompt(workers: Workers, slot: int, done: Prompt, now_s: float) -> None:
    """A prompt is no longer ahead of others; sums of many small numbers drift, but once no request
    waits any more the queue is exactly empty."""
    worker = workers[slot]
    link_s, gpu_s, new_tokens = done
    worker.link_reserved_s -= link_s
    worker.gpu_reserved_s -= gpu_s
    worker.waiting -= 1
    worker.queued_tokens -= new_tokens
    if worker.waiting == 0:
        worker.link_reserved_s = worker.gpu_reserved_s = 0.0
        worker.link_free_s = now_s


@compiled
def decode(
    workers: Workers, slot: int, requests: int, context_tokens: float, now_s: float, window_s: float
) -> None:
    """`requests` more (or fewer) decode over `context_tokens` more."""
    worker = workers[slot]
    worker.spent_s, worker.ends = spent(worker, now_s, window_s)
    worker.ends += max(-requests, 0)
    worker.spent_at_s = now_s
    worker.decoding += requests
    worker.decode_context_tokens += context_tokens
    keep_factors(workers, slot)


@compiled
def keep_factors(workers: Workers, slot: int) -> None:
    """Compute what is kept of the worker's factors, which are new or for other requests."""
    worker = workers[slot]
    worker.decoding_factor = step_seconds.factor(worker.factors, worker.decoding)
    worker.one_more_factor = step_seconds.factor(worker.factors, worker.decoding + 1)
    worker.one_more_weights_s = step_seconds.weights_read_s(worker, 1.0, worker.decoding + 1)


@compiled
def depart(workers: Workers, slot: int, context_tokens: float) -> None:
    """A request ended."""
    worker = workers[slot]
    worker.in_flight -= 1
    worker.resident_tokens -= context_tokens
