"""TTFTs that nobody could undercut: what a policy's regret is measured against.

All costs and the future are known here. Two bounds, each on the measured requests of one instance
without noise:

*Idle* (`idle_bound_s`): each request alone on the node that is best for it, its reusable prefix on
the device already. It holds request by request, so for every quantile and the mean, whatever the
policy does, and whenever the requests come.

*Pooled* (`pooled_mean_s`, `pooled_quantile_s`): all gpus as one that shares its whole speed among
requests as it likes, interrupts at no cost, and does nothing but prefill what was never computed
before; decoding, reads, loads and steps' fixed costs are free. Least mean then is shortest
remaining work first; for a quantile, requests that arrive in any interval and must be ready soon
after it need gpu time that the interval has to have, but for the few that may be late. It is
conditional on *when requests arrive*, and a session's later turns arrive when its earlier ones
are done: it bounds the TTFTs of any policy that had the same arrival times as the run they are
taken from, so it is compared with that run alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kappa.cost import StepModel
from kappa.slo import IdleSpeed, idle_ttft_s
from simulator.traffic import Traffic

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds that mean, median and 99th percentile of TTFT cannot fall below."""

    mean_s: float
    p50_s: float
    p99_s: float


def lower_bound(
    traffic: Traffic, speeds: Sequence[IdleSpeed], arrival_s: Floats | None = None
) -> Bound:
    """The idle bound; with the arrival times of a run, the larger of it and the pooled one.

    Args:
        traffic: the instance.
        speeds: every node's true speed.
        arrival_s: when each request arrived in the run to be bounded, NaN for one that never did.
    """
    cached = reusable_tokens(traffic)
    idle_s = idle_bound_s(traffic, speeds, cached)[traffic.measured]
    mean_s = float(idle_s.mean())
    p50_s, p99_s = (float(np.quantile(idle_s, q)) for q in (0.5, 0.99))
    if arrival_s is not None:
        came = traffic.measured & ~np.isnan(arrival_s)
        steps = [speed.step for speed in speeds]
        work, speed = pooled_work_s(cached, traffic.prompt_tokens, steps)
        jobs = (arrival_s[came], work[came], speed)
        if came.sum() == traffic.measured.sum():
            mean_s = max(mean_s, pooled_mean_s(*jobs))
            p50_s = max(p50_s, pooled_quantile_s(*jobs, 0.5))
            p99_s = max(p99_s, pooled_quantile_s(*jobs, 0.99))
    return Bound(mean_s, p50_s, p99_s)


def reusable_tokens(traffic: Traffic) -> NDArray[np.int64]:
    """Most leading tokens of each request that could be computed already when it comes.

    A block can be if the caches are warm with it, an earlier turn of the session left it, or
    another session uses it at all.
    """
    turns = [turn for session in traffic.turns for turn in session]
    session = np.repeat(np.arange(len(traffic.turns)), [len(t) for t in traffic.turns])
    number = np.concatenate([np.arange(len(t)) for t in traffic.turns])
    sizes = [len(turn.kept_blocks) for turn in turns]
    ids, place = np.unique(
        np.concatenate([turn.kept_blocks for turn in turns]), return_inverse=True
    )
    owner = np.repeat(np.arange(len(turns)), sizes)
    # First and last session that uses each block, and the first turn if it is one session only.
    low = np.full(len(ids), len(traffic.turns))
    high = np.full(len(ids), -1)
    first = np.full(len(ids), np.iinfo(np.int64).max)
    np.minimum.at(low, place, session[owner])
    np.maximum.at(high, place, session[owner])
    np.minimum.at(first, place, number[owner])
    known = low < high
    if traffic.warm:
        known |= np.isin(ids, np.concatenate(traffic.warm))
    there = known[place] | (first[place] < number[owner])
    starts = np.cumsum([0, *sizes])
    size = traffic.workload.block_tokens
    reusable = np.zeros(len(turns), np.int64)
    for i, turn in enumerate(turns):
        mine = there[starts[i] : starts[i] + len(turn.blocks)]
        blocks = len(mine) if mine.all() else int(mine.argmin())
        reusable[i] = min(blocks, (turn.input_tokens - 1) // size) * size
    return reusable


def idle_bound_s(
    traffic: Traffic, speeds: Sequence[IdleSpeed], cached: NDArray[np.int64]
) -> Floats:
    """Seconds that each request needs alone on its best node, its prefix on the device."""
    free = [IdleSpeed(s.step, 0.0, 0.0, s.budget_tokens) for s in dict.fromkeys(speeds)]
    new = traffic.prompt_tokens - cached
    least: Floats = np.min([idle_ttft_s(speed, cached, new) for speed in free], axis=0)
    return least


def pooled_work_s(
    cached: NDArray[np.int64], prompt: NDArray[np.int64], steps: Sequence[StepModel]
) -> tuple[Floats, float]:
    """Each request's prefill in seconds of the fastest node, and how many of that all nodes are.

    A node's speed is its best over requests, so that none is done sooner than it could be.
    """
    new = (prompt - cached).astype(np.float64)
    pairs = new * (cached + 0.5 * new)
    each = np.stack([(new * s.token_s + pairs * s.pair_s) * s.dilation for s in steps])
    work: Floats = each.min(axis=0)
    speed = float((work / np.maximum(each, 1e-300)).max(axis=1).sum())
    return work, speed


def pooled_mean_s(arrival_s: Floats, work_s: Floats, speed: float) -> float:
    """Least mean time to completion on one preemptive server: shortest remaining work first."""
    order = np.argsort(arrival_s, kind="stable")
    waiting: list[float] = []
    now_s = total_s = 0.0
    for at, work in zip(arrival_s[order].tolist(), work_s[order].tolist(), strict=True):
        # Completions are counted as they happen, arrivals subtracted at the end.
        while waiting and now_s < at:
            least = heapq.heappop(waiting)
            done_s = now_s + least / speed
            if done_s > at:
                heapq.heappush(waiting, least - (at - now_s) * speed)
                now_s = at
            else:
                now_s = done_s
                total_s += now_s
        now_s = max(now_s, at)
        heapq.heappush(waiting, work)
    while waiting:
        now_s += heapq.heappop(waiting) / speed
        total_s += now_s
    return float(max(total_s - arrival_s.sum(), 0.0) / len(arrival_s))


def pooled_quantile_s(arrival_s: Floats, work_s: Floats, speed: float, quantile: float) -> float:
    """Least that the quantile can be: all but K = (1 - q) n requests done this soon.

    For all i and k: the work that arrives from i to k, less its K largest pieces, takes until at
    least k's deadline, so TTFT >= work / speed - (time between i and k). With many late ones
    allowed and many requests, starts are taken sparsely, which only loosens the bound.
    """
    order = np.argsort(arrival_s, kind="stable")
    at, work = arrival_s[order].tolist(), work_s[order].tolist()
    count = len(at)
    late = count - 1 - math.floor(quantile * (count - 1))
    best = 0.0
    for i in range(0, count, max(1, count // 1000)):
        largest: list[float] = []
        kept = 0.0
        for k in range(i, count):
            if late == 0:
                kept += work[k]
            elif len(largest) < late:
                heapq.heappush(largest, work[k])
            else:
                kept += heapq.heappushpop(largest, work[k])
            best = max(best, kept / speed - (at[k] - at[i]))
    return best
