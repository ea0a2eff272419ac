"""A forward pass over layers on two resources, event by event: the oracle of the closed forms.

It knows no formula: a link and a gpu each do one job at a time, in order, and a gpu job waits for
the link jobs of its layer that it needs. Buffers may bound how many layers are loaded ahead.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """Link jobs in seconds; gpu jobs as (seconds, how many of this layer's link jobs it needs)."""

    link: tuple[float, ...]
    gpu: tuple[tuple[float, int], ...]


def even(load_s: float, compute_s: float, layers: int) -> list[Layer]:
    """All layers alike: one load, and one computation that needs it."""
    return [Layer((load_s / layers,), ((compute_s / layers, 1),))] * layers


class _Run:
    def __init__(self, layers: Sequence[Layer], buffers: int) -> None:
        self.layers, self.buffers = layers, buffers
        self.link_jobs = deque((i, s) for i, layer in enumerate(layers) for s in layer.link)
        self.gpu_jobs = deque((i, *job) for i, layer in enumerate(layers) for job in layer.gpu)
        self.loaded = [0] * len(layers)
        self.computed = [0] * len(layers)
        self.busy = {"link": False, "gpu": False}
        self.events: list[tuple[float, str, int]] = []

    def start(self, now_s: float) -> None:
        if not self.busy["link"] and self.link_jobs:
            layer, seconds = self.link_jobs[0]
            behind = layer - self.buffers
            if not self.buffers or behind < 0 or self._done(behind):
                self.link_jobs.popleft()
                self.busy["link"] = True
                heapq.heappush(self.events, (now_s + seconds, "link", layer))
        if not self.busy["gpu"] and self.gpu_jobs:
            layer, seconds, needs = self.gpu_jobs[0]
            if self.loaded[layer] >= needs:
                self.gpu_jobs.popleft()
                self.busy["gpu"] = True
                heapq.heappush(self.events, (now_s + seconds, "gpu", layer))

    def _done(self, layer: int) -> bool:
        return self.computed[layer] == len(self.layers[layer].gpu)


def simulate(layers: Sequence[Layer], *, buffers: int = 0) -> float:
    """Seconds at which the last layer is computed."""
    run = _Run(layers, buffers)
    run.busy = {"link": True, "gpu": True}
    run.events = [(0.0, "gpu", -1), (0.0, "link", -1)]
    end_s = 0.0
    while run.events:
        now_s, resource, layer = heapq.heappop(run.events)
        run.busy[resource] = False
        if layer >= 0:
            done = run.loaded if resource == "link" else run.computed
            done[layer] += 1
            end_s = now_s if resource == "gpu" else end_s
        run.start(now_s)
    assert not run.link_jobs and not run.gpu_jobs, "a job waits for one that never comes"
    return end_s
