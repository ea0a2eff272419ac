"""From runs of `kappa bench scheduler` to rows, and medians with their spread.

A backend hands over `Played` runs. Everything is derived from when each request came, was admitted
(got its blocks), had its first token and ended, and from the engine's iterations, in the same way
for every policy. Seconds are emulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.harness import quantile
from benchmarks.scheduling import mix

_KEYS = ("policy", "workload", "backend", "link", "stores")


@dataclass(slots=True)
class Served:
    """What became of one request, in emulated seconds since the run began."""

    ask: mix.Ask
    arrived_s: float
    admitted_s: float | None = None
    first_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Played:
    """One run: its requests in order of arrival, the engine's iterations (`started_s`, `tokens`,
    `blocks`, `queued`: something waited before it), and sums of what its host tier reported."""

    workload: mix.Workload
    served: list[Served]
    iterations: list[dict[str, Any]]
    engine: dict[str, float]


def row_of(policy: str, setting: mix.Setting, backend: str, played: Played) -> dict[str, Any]:
    """One run as a row."""
    served, capacity = played.served, played.workload.blocks
    budget_fill, vram_fill = fills(played.iterations, capacity)
    gap, jain = fairness(served, capacity)
    waits = [s.admitted_s - s.arrived_s for s in served if s.admitted_s is not None]
    kinds = dict.fromkeys((mix.FRESH, mix.OFFLOADED, *(s.ask.kind for s in served)))
    return {
        "policy": policy, "workload": setting.workload, "backend": backend,
        "link": setting.link, "stores": setting.stores,
        "ttft_s": {
            kind: {
                "p50": quantile(_ttfts(served, kind), 0.5),
                "p99": quantile(_ttfts(served, kind), 0.99),
            }
            for kind in kinds
        },
        "makespan_s": max((s.finished_s for s in served if s.finished_s), default=None),
        "budget_fill": budget_fill, "vram_fill": vram_fill,
        "max_wait_s": max(waits, default=None), "max_skips": max_skips(served),
        "service_gap": gap, "jain": jain,
    }  # fmt: skip


def details_of(policy: str, setting: mix.Setting, played: Played) -> dict[str, Any]:
    """What else is worth knowing of a run: means, by tenant, and the host tier's sums."""
    served = played.served
    kinds = dict.fromkeys(s.ask.kind for s in served)
    prompts = [s for s in served if s.ask.prefix_tokens]
    return {
        "policy": policy, "workload": setting.workload, "backend": "vllm",
        "link": setting.link, "stores": setting.stores,
        "ttft_mean_s": {kind: _mean(_ttfts(served, kind)) for kind in kinds},
        "ttft_mean_s_by_tenant": {
            tenant: _mean([_ttft(s) for s in served if s.ask.tenant == tenant])
            for tenant in played.workload.tenants
        },
        "prefixes_found": sum(s.cached_tokens >= s.ask.prefix_tokens for s in prompts),
        "prefixes": len(prompts),
        **played.engine,
    }  # fmt: skip


def fills(
    iterations: Sequence[Mapping[str, Any]], capacity: int
) -> tuple[float | None, float | None]:
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
    admitted = np.array([_or_never(s.admitted_s) for s in served])
    return max((int((admitted[i + 1 :] < at).sum()) for i, at in enumerate(admitted)), default=0)


def fairness(served: Sequence[Served], capacity: int) -> tuple[float | None, float | None]:
    """How far apart tenants that all have requests waiting get, and Jain's index of their service.

    Service is the share of the device's blocks held, times seconds. gap: the most by which two
    tenants' service differs since both have had requests waiting; index: of the service that each
    got while all had. None where there is one tenant, or they never wait at the same time.
    """
    tenants = sorted({s.ask.tenant for s in served})
    if len(tenants) < 2:
        return None, None
    times = sorted(
        {t for s in served for t in (s.arrived_s, s.admitted_s, s.finished_s) if t is not None}
    )
    gap = 0.0
    together = np.zeros(len(tenants))
    since = np.zeros((len(tenants), len(tenants)))
    for start_s, end_s in pairwise(times):
        rates = np.array([_blocks_at(served, tenant, start_s) for tenant in tenants]) / capacity
        waits = np.array([_waits_at(served, tenant, start_s) for tenant in tenants])
        gained = rates * (end_s - start_s)
        both = waits[:, None] & waits[None, :]
        since = np.where(both, since + gained[:, None] - gained[None, :], 0.0)
        gap = max(gap, float(np.abs(since).max()))
        if waits.all():
            together += gained
    if not together.any():
        return None, None
    return gap, float(together.sum() ** 2 / (len(tenants) * (together**2).sum()))


def medians(rows: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of several runs as one row each of medians, and as one of [least, most, runs]."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in _KEYS), []).append(row)
    middle = [_joined(group, lambda values: float(np.median(values))) for group in groups.values()]
    spread = [
        _joined(group, lambda values: [min(values), max(values), len(values)])
        for group in groups.values()
    ]
    return middle, spread


def _ttft(served: Served) -> float:
    return math.nan if served.first_s is None else served.first_s - served.arrived_s


def _ttfts(served: Sequence[Served], kind: str) -> list[float]:
    return [_ttft(s) for s in served if s.ask.kind == kind]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _or_never(time_s: float | None) -> float:
    return math.inf if time_s is None else time_s


def _blocks_at(served: Sequence[Served], tenant: str, time_s: float) -> int:
    return sum(
        s.ask.blocks
        for s in served
        if s.ask.tenant == tenant and _or_never(s.admitted_s) <= time_s < _or_never(s.finished_s)
    )


def _waits_at(served: Sequence[Served], tenant: str, time_s: float) -> bool:
    return any(
        s.ask.tenant == tenant and s.arrived_s <= time_s < _or_never(s.admitted_s) for s in served
    )


def _joined(group: Sequence[Any], join: Any) -> Any:
    first = group[0]
    if isinstance(first, Mapping):
        return {key: _joined([one[key] for one in group], join) for key in first}
    if isinstance(first, str):
        return first
    known = [value for value in group if value is not None]
    return join(known) if known else None
