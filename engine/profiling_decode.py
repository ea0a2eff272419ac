"""Decoding steps and CPU attention, as `engine.profiling` measures them.

Decoding steps are a grid over sequences and the context tokens of all of them, in the device's
blocks: what a law fitted to prefill steps says of them is short by what they gather, group and
launch. CPU attention is measured through the path that serves, queries and results included.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Run
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from engine.forward import Forward
from engine.prefill import Prompt, prefill
from engine.step import HostContext, OnCpu, Pages

# An action that takes longer than this is stuck.
_WAIT_S = 60.0


@contextmanager
def repeating(action: Callable[[], object], threads: int = 1) -> Iterator[None]:
    """Repeat `action` on that many threads until the block is left; each has done it once before.

    Raises:
        RuntimeError: the action failed or got stuck, so what was measured is not what it says.
    """
    stop = threading.Event()
    ready = threading.Semaphore(0)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            action()
            ready.release()
            while not stop.is_set():
                action()
        except BaseException as error:
            errors.append(error)
            ready.release()

    running = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        if not all(ready.acquire(timeout=_WAIT_S) for _ in running):
            raise RuntimeError(f"what runs beside the measurement took over {_WAIT_S:g} s")
        if not errors:
            yield
    finally:
        stop.set()
        for thread in running:
            thread.join(_WAIT_S)
    if errors:
        raise RuntimeError(f"what ran beside the measurement failed: {errors[0]}") from errors[0]


Action = Callable[[], Any]
Measure = Callable[[Action], float]


def decoding(
    forward: Forward, sequences: Run[int], resident: Run[int], least_s: Measure
) -> dict[str, Any]:
    """{"decode": {"sequences", "resident_tokens", "seconds"}}; nothing, if there is no grid of it.

    sequences, resident: the axes, as counts of sequences and of the context tokens of all.

    More context than the arena holds is read from the same blocks again. Where the model has no
    positions for so long a context, the row is continued by its last step; `measured` has how many
    cells of each row are no continuation.
    """
    sequences = [b for b in sequences if 1 <= b <= forward.arena.size.kv_device]
    resident = list(resident)
    most = forward.config.max_tokens - 1
    if len(sequences) < 2 or len([r for r in resident if r <= sequences[0] * most]) < 2:
        return {}
    rows, measured = [], []
    for count in sequences:
        row = [
            least_s(_step(forward, count, total // count))
            for total in resident
            if total // count <= most
        ]
        measured.append(len(row))
        while len(row) < len(resident):
            done = len(row)
            slope = (row[-1] - row[-2]) / (resident[done - 1] - resident[done - 2])
            row.append(row[-1] + max(0.0, slope) * (resident[done] - resident[done - 1]))
        rows.append(row)
    return {
        "decode": {
            "sequences": sequences, "resident_tokens": resident, "seconds": rows,
            "measured": measured,
        }
    }  # fmt: skip


def _step(forward: Forward, sequences: int, context: int) -> Callable[[], None]:
    """One new token of each sequence behind so many; blocks in turn, all of the arena."""
    held = -(-(context + 1) // forward.arena.block_tokens)
    total = forward.arena.size.kv_device
    tokens = np.arange(context + 1) % forward.config.vocab
    prompts = []
    for index in range(sequences):
        pages = Pages()
        pages.put(0, "kv", "device", (index * held + np.arange(held)) % total)
        prompts.append(Prompt(tokens, pages, start_tokens=context))

    def step() -> None:
        prefill(forward, prompts)

    return step


def attention(
    forward: Forward,
    sizes: list[int],
    line: Callable[[Callable[[int], Action]], dict[str, list[float]]],
    least_s: Measure,
    link_bytes_per_s: Callable[[], float],
) -> dict[str, Any]:
    """{"attend": ...}: seconds of one layer by tokens, and what it and the link leave each other.

    Nothing, where there are no threads for it. The other arguments are the profiler's: its sizes
    in tokens, how it measures a line, one action, and the link.
    """
    if forward.cpu is None:
        return {}
    probe = AttentionProbe(forward)
    samples = line(probe.layers)
    most, arena = probe.layers(sizes[-1]), forward.arena
    alone_s = least_s(most)
    blocks = sizes[-1] // arena.block_tokens
    pairs = [
        (arena.kv_device[i, :blocks], arena.kv_host[i, :blocks])
        for i in range(forward.config.layers)
    ]
    with repeating(lambda: forward.mover.h2d(pairs).block()):
        beside_s = least_s(most)
    with repeating(most):
        link = link_bytes_per_s()
    return {
        "attend": {
            **samples, "threads": forward.cpu.worker.threads, "h2d_bytes_per_s": link,
            "share_while_loading": alone_s / beside_s,
        }
    }  # fmt: skip


class AttentionProbe:
    """One query's attention to host blocks, layer by layer, through `engine.cpu_attention`."""

    def __init__(self, forward: Forward) -> None:
        config, device = forward.config, forward.weights.device
        self._forward = forward
        self._q = torch.randn(1, config.heads, config.head_dim).to(device, forward.weights.dtype)
        self._rows = torch.zeros(1, dtype=torch.int64, device=device)

    def layers(self, tokens: int) -> Callable[[], None]:
        """Attend to n tokens in every layer; each time to other blocks, as loads do."""
        forward, cpu = self._forward, self._forward.cpu
        assert cpu is not None
        blocks = -(-tokens // forward.arena.block_tokens)
        places = max(1, forward.arena.size.kv_host // blocks)
        turns = itertools.cycle(range(places))

        def attend() -> None:
            at = next(turns) * blocks
            context = HostContext(0, 1, np.arange(at, at + blocks))
            on_cpu = OnCpu(self._rows, 1, [context])
            for layer in range(forward.config.layers):
                cpu.begin(layer, on_cpu, self._q, forward.mover).result()

        return attend
