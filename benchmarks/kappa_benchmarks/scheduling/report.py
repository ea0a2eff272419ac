"""From runs of `kappa bench scheduler` to rows, and medians with their spread.

A backend hands over `Played` runs. Everything is derived from when each request came, was admitted
(got its blocks), had its first token and ended, and from the engine's iterations, in the same way
for every policy. Seconds are emulated.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from kappa_benchmarks.harness import quantile
from kappa_benchmarks.scheduling import mix

_KEYS = ("policy", "workload", "backend", "link", "stores")

Row = dict[str, Any]


@dataclass(slots=True)
class Served:
    """One request as it was served, in emulated seconds since the run began."""

    request: mix.Request
    arrived_s: float
    # When it got its blocks, the first time.
    admitted_s: float = math.inf
    # When its first token came.
    first_s: float = math.nan
    finished_s: float = math.inf
    cached_tokens: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s


@dataclass(slots=True)
class Played:
    """One run."""

    # Of the device.
    blocks: int
    # In order of arrival.
    served: list[Served]
    # Of the engine: `started_s`, `tokens`, `blocks`, and `queued`: a request waited before it.
    iterations: list[Row]
    # Sums of the host tier's reports.
    engine: dict[str, float] = field(default_factory=dict)


def row_of(policy: str, setting: mix.Setting, backend: str, played: Played) -> Row:
    """One run as a row."""
    served, capacity = played.served, played.blocks
    budget_fill, vram_fill = fills(played.iterations, capacity)
    gap, jain = fairness(served, capacity)
    waits = [s.admitted_s - s.arrived_s for s in served if math.isfinite(s.admitted_s)]
    makespan_s = max((s.finished_s for s in served if math.isfinite(s.finished_s)), default=None)
    steps = [tokens for one in played.iterations if (tokens := one["tokens"])]
    ttft_s: dict[str, list[float]] = {mix.FRESH: [], mix.OFFLOADED: []}
    for one in served:
        ttft_s.setdefault(one.request.kind, []).append(one.ttft_s)
    return {
        "policy": policy, "backend": backend, **asdict(setting),
        "ttft_s": {
            kind: {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99)}
            for kind, values in ttft_s.items()
        },
        "makespan_s": makespan_s, "budget_fill": budget_fill, "vram_fill": vram_fill,
        "iterations": len(steps), "iteration_tokens": np.mean(steps).item() if steps else None,
        "link_use": makespan_s and played.engine.get("load_s", 0.0) / makespan_s,
        "max_wait_s": max(waits, default=None), "max_skips": max_skips(served),
        "service_gap": gap, "jain": jain,
    }  # fmt: skip


def details_of(policy: str, setting: mix.Setting, played: Played) -> Row:
    """Details of a run: means by kind and tenant, and the host tier's sums."""

    def means(name: str) -> dict[str, float]:
        groups = defaultdict(list)
        for one in played.served:
            groups[getattr(one.request, name)].append(one.ttft_s)
        return {key: float(np.mean(values)) for key, values in groups.items()}

    prompts = [s for s in played.served if s.request.prefix_tokens]
    return {
        "policy": policy, "backend": "vllm", **asdict(setting),
        "ttft_mean_s": means("kind"), "ttft_mean_s_by_tenant": means("tenant"),
        "prefixes_found": sum(s.cached_tokens >= s.request.prefix_tokens for s in prompts),
        "prefixes": len(prompts), **played.engine,
    }  # fmt: skip


def fills(iterations: Sequence[Row], capacity: int) -> tuple[float | None, float | None]:
    """Shares of the token budget and of the blocks in use while something waited, over time."""
    seconds = tokens = blocks = 0.0
    for this, following in pairwise(iterations):
        if this["queued"]:
            lasted_s = following["started_s"] - this["started_s"]
            seconds += lasted_s
            tokens += lasted_s * this["tokens"] / mix.BUDGET_TOKENS
            blocks += lasted_s * this["blocks"] / capacity
    return (tokens / seconds, blocks / seconds) if seconds else (None, None)


def max_skips(served: Sequence[Served]) -> int:
    """The most requests that came after one and were admitted before it."""
    admitted = np.array([one.admitted_s for one in served])
    return max((int((admitted[i + 1 :] < at).sum()) for i, at in enumerate(admitted)), default=0)


def fairness(served: Sequence[Served], capacity: int) -> tuple[float | None, float | None]:
    """The gap of service between tenants that all have requests waiting, and Jain's index.

    Service is the share of the device's blocks held, times seconds. gap: the most by which two
    tenants' service differs since both have had requests waiting; index: of the service that each
    got while all had. None where there is one tenant, or they never wait at the same time.
    """
    tenants = sorted({one.request.tenant for one in served})
    if len(tenants) < 2:
        return None, None
    # One row per request: arrived, admitted, finished; and its tenant and blocks.
    times_s = np.array([(s.arrived_s, s.admitted_s, s.finished_s) for s in served])
    mine = np.array([[s.request.tenant == tenant for s in served] for tenant in tenants])
    blocks = np.array([s.request.blocks for s in served])
    gap = 0.0
    together = np.zeros(len(tenants))
    since = np.zeros((len(tenants), len(tenants)))
    for start_s, end_s in pairwise(np.unique(times_s[np.isfinite(times_s)]).tolist()):
        arrived, admitted, finished = (times_s <= start_s).T
        held = mine @ (blocks * (admitted & ~finished))
        waits = (mine & (arrived & ~admitted)).any(axis=1)
        gained = held / capacity * (end_s - start_s)
        both = waits[:, None] & waits[None, :]
        since = np.where(both, since + gained[:, None] - gained[None, :], 0.0)
        gap = max(gap, float(np.abs(since).max()))
        if waits.all():
            together += gained
    if not together.any():
        return None, None
    return gap, float(together.sum() ** 2 / (len(tenants) * (together**2).sum()))


def medians(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Rows of several runs as one row each of medians, and as one of [least, most, runs]."""
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row[key] for key in _KEYS)].append(row)
    middle = [_joined(group, lambda values: float(np.median(values))) for group in groups.values()]
    spread = [
        _joined(group, lambda values: [min(values), max(values), len(values)])
        for group in groups.values()
    ]
    return middle, spread


def _joined(group: Sequence[Any], join: Callable[[list[float]], Any]) -> Any:
    first = group[0]
    if isinstance(first, Mapping):
        return {key: _joined([one[key] for one in group], join) for key in first}
    if isinstance(first, str):
        return first
    known = [value for value in group if value is not None]
    return join(known) if known else None
