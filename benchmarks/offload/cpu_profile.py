"""Measures what a plan of `cpu_offload` is made of, on the very batch that is to decode.

Each part of a layer on the CPU is timed while the link copies, and the link while the CPU computes:
each takes memory bandwidth of the other. What grows with the context is measured at two lengths, a
line between them. Of repeats the least counts, since other work on the machine only adds to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.offload.cpu_offload import CpuOffload, Share
from benchmarks.offload.cpu_weights import matrix_bytes
from engine import layers
from engine.cpu_worker import result
from engine.profiling_decode import repeating
from kappa.plans.cpu_offload import LayerTimes


class LayerProfile:
    """Times of a layer by length.

    Args:
        made: its prompts computed; afterwards it goes on as if nothing had been measured, but for
            the slots behind its KV, which hold anything.
        repeats: of each figure.
    """

    def __init__(self, made: CpuOffload, repeats: int = 5) -> None:
        self._made, self._repeats = made, repeats
        self._low = int(made.kv.lengths.max())
        self._high = max(self._low + 1, made.kv.most_tokens - 1)
        lengths = made.kv.lengths.clone()
        try:
            self._first = self._measured()
            grown = torch.full_like(lengths, self._high)
            made.kv.lengths.copy_(grown)
            self._last = replace(self._first, **self._attention())
        finally:
            made.kv.lengths.copy_(lengths)
            # The next step finds what it was sent, not what was measured.
            made.begin()

    def at(self, length: int) -> LayerTimes:
        """With so many tokens of every sequence."""
        share = (length - self._low) / (self._high - self._low)
        moved = {
            name: max(0.0, (1.0 - share) * getattr(self._first, name) + share * getattr(
                self._last, name))
            for name in ("scores_s", "values_s", "values_bytes")
        }  # fmt: skip
        return replace(self._first, **moved)

    # -- measuring ------------------------------------------------------------------------------

    def _measured(self) -> LayerTimes:
        made, sizes = self._made, matrix_bytes(self._made.forward.weights)
        x = torch.randn(len(made.kv.lengths), made.config.hidden).to(made.dtype)
        mine = made.cpu.layer(0)
        turned = made.turned(made.kv.lengths)
        columns = made.cpu.columns(0, made.config.inner)
        attended = torch.randn(len(x), made.config.query_width).to(made.dtype)

        def fc1() -> None:
            for w, b in columns:
                F.linear(x, w, b)

        with repeating(self._copy):
            project_s = self._on_cpu(partial(self._project, x, turned))
            out_s = self._on_cpu(partial(layers.add_attention, x, attended, mine, made.config))
            fc1_s = self._on_cpu(fc1)
        gpu_s, gpu_fc1_s = self._device_s()
        with repeating(lambda: result(made.worker.submit(partial(self._job, x, turned)))):
            link = self._link_bytes_per_s()
        return LayerTimes(
            project_s=project_s, out_s=out_s, fc1_s=fc1_s,
            qkv_bytes=sizes["kv"] + sizes["q"], out_bytes=sizes["out"], fc1_bytes=sizes["up"],
            fc2_bytes=sizes["down"], link_bytes_per_s=link, gpu_s=gpu_s, gpu_fc1_s=gpu_fc1_s,
            **self._attention(),
        )  # fmt: skip

    def _attention(self) -> dict[str, float]:
        """What grows with the context, at the length that the batch has."""
        made = self._made
        config, kv = made.config, made.kv
        q = torch.randn(len(kv.lengths), config.heads, config.head_dim).to(made.dtype)
        with repeating(self._copy):
            weights_s = self._on_cpu(partial(kv.weights, 0, q))
            attend_s = self._on_cpu(partial(kv.attend, 0, q))
        # Fused, both may take less than the first alone does.
        scores_s = min(weights_s, attend_s)
        tokens = int(kv.lengths.sum())
        return {
            "scores_s": scores_s, "values_s": attend_s - scores_s,
            "values_bytes": float(tokens * config.kv_width * made.dtype.itemsize),
        }  # fmt: skip

    def _project(self, x: torch.Tensor, turned: layers.Angles) -> None:
        made = self._made
        mine, config = made.cpu.layer(0), made.config
        a = layers.attention_input(x, mine, config)
        layers.project_q(a, mine, config, turned)
        kv = torch.empty((len(x), 2 * config.kv_width), dtype=made.dtype)
        layers.project_kv(a, mine, config, turned, kv)
        made.kv.append(0, kv)

    def _job(self, x: torch.Tensor, turned: layers.Angles) -> None:
        self._made.on_cpu(0, x, turned, Share())

    def _copy(self) -> None:
        self._made.stream.begin(0, "mha", 0)
        self._made.stream.wait(0)
        self._made.stream.used()
        if self._made.device.type == "cuda":
            # Copies are asked for without end otherwise.
            torch.cuda.current_stream(self._made.device).synchronize()

    def _device_s(self) -> tuple[float, float]:
        """What the device computes of a layer with all of FC1, and of that FC1."""
        made = self._made
        x = torch.randn(len(made.kv.lengths), made.config.hidden).to(made.dtype)
        hidden = x.to(made.device, made.forward.weights.dtype)
        self._copy()
        there = made.stream.wait(0)

        def finish() -> None:
            made.to_cpu(made.finish(0, hidden, [x], Share()))

        def fc1() -> None:
            taken = layers.mlp_input(hidden, there, made.config)
            made.to_cpu(torch.cat([F.linear(taken, w, b) for w, b in made.stream.columns()]))

        with torch.no_grad():
            whole_s, fc1_s = self._least_s(finish), self._least_s(fc1)
        return max(0.0, whole_s - fc1_s), fc1_s

    def _link_bytes_per_s(self) -> float:
        sizes = matrix_bytes(self._made.forward.weights)
        return (sizes["up"] + sizes["down"]) / self._least_s(self._copy)

    def _on_cpu(self, action: Callable[[], Any]) -> float:
        return self._least_s(lambda: result(self._made.worker.submit(action)))

    def _least_s(self, action: Callable[[], Any]) -> float:
        action()
        times = []
        for _ in range(self._repeats):
            start_s = time.perf_counter()
            action()
            times.append(time.perf_counter() - start_s)
        return min(times)
