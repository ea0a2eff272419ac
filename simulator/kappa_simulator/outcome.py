"""What came out of a run: a record of every request, and the figures of the whole.

Measures leave out the first fifth of the requests. Rates and costs refer to the window from the
first measured request's arrival to the last one's. A cluster is paid for, and draws power, whether
busy or not: at idle 30% of a node's full power, the rest in proportion to its gpu's busy share
(assumed). Tokens in costs are those generated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kappa.slo import Limits
from kappa_simulator.node import NodeTotals

IDLE_POWER_SHARE = 0.3
_OF_THE_RUN = (
    "policy", "scheduler", "trace", "cluster", "load", "capacity_rps", "rate_rps", "seed",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class RequestRecords:
    """One entry per request of the traffic; seconds, NaN where there is nothing.

    node: -1 where rejected. device, cached and new tokens: where its prompt came from on its node.
    kappa: cached over new. session: number of its session. met: within the SLO.
    predicted_s, kind: the router's prediction of its TTFT, and what that is mostly made of.
    """

    arrival_s: NDArray[np.float64]
    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    e2e_s: NDArray[np.float64]
    node: NDArray[np.int64]
    kappa: NDArray[np.float64]
    device_tokens: NDArray[np.int64]
    cached_tokens: NDArray[np.int64]
    new_tokens: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    session: NDArray[np.int64]
    measured: NDArray[np.bool_]
    met: NDArray[np.bool_]
    idle_ttft_s: NDArray[np.float64]
    predicted_s: NDArray[np.float64]
    kind: NDArray[np.str_]


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What one node did over the whole run, with its price and power.

    held_share: of its device blocks, the mean share that requests held.
    """

    name: str
    cost_per_hour: float
    watts: float
    totals: NodeTotals
    link_busy_s: float
    network_busy_s: float
    held_share: float
    stores_dropped_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A finished run. refusals: of requests, each as often as it was refused."""

    policy: str
    scheduler: str
    trace: str
    cluster: str
    load: float | None
    capacity_rps: float | None
    rate_rps: float
    seed: int
    end_s: float
    retried: int
    refusals: int
    records: RequestRecords
    limits: Limits
    nodes: tuple[NodeRecord, ...]
    tenants: tuple[str, ...]
    decision_s: NDArray[np.float64]

    def summary(self) -> dict[str, Any]:
        """The figures of the run, ready for JSON; None where there is nothing to measure."""
        r = self.records
        picked = r.measured
        done = picked & ~np.isnan(r.e2e_s)
        arrivals_s = r.arrival_s[picked]
        window_s = float(np.ptp(arrivals_s)) if len(arrivals_s) else 0.0
        window_s = window_s or max(self.end_s, 1e-9)
        cost = sum(node.cost_per_hour for node in self.nodes) * window_s / 3600.0
        output = float(r.output_tokens[done].sum())
        totals = [node.totals for node in self.nodes]
        fill_steps = sum(node.fill_steps for node in totals)
        queued_steps = sum(node.queued_steps for node in totals)
        queued_tokens = sum(node.queued_tokens for node in totals)
        return {
            **{name: getattr(self, name) for name in _OF_THE_RUN},
            "requests": int(picked.sum()),
            "completed": int(done.sum()),
            "rejected": int((picked & np.isnan(r.e2e_s)).sum()),
            "ttft_s": spread(r.ttft_s[done]),
            "tpot_s": spread(r.tpot_s[done]),
            "e2e_s": spread(r.e2e_s[done]),
            "goodput_rps": float(r.met[picked].sum()) / window_s,
            "slo": self._slo(picked, done),
            "cost_per_mtok": cost / output * 1e6 if output else None,
            "energy_j_per_tok": self._energy_j(window_s) / output if output else None,
            "decision_us": {f"p{q}": _quantile(self.decision_s * 1e6, q / 100) for q in (50, 99)},
            "budget_fill": sum(node.fill for node in totals) / fill_steps if fill_steps else None,
            "scheduled_tokens": queued_tokens / queued_steps if queued_steps else None,
            "vram_fill": sum(node.held_share for node in self.nodes) / len(self.nodes),
            "max_wait_s": max(node.max_wait_s for node in totals),
            "max_skips": max(node.max_skips for node in totals),
            "jain": self._jain(done),
            "retried": self.retried,
            "preemptions": sum(node.preemptions for node in totals),
            "nodes": [self._node(i) for i in range(len(self.nodes))],
        }

    def _slo(self, picked: NDArray[np.bool_], done: NDArray[np.bool_]) -> dict[str, Any]:
        r, limits = self.records, self.limits
        total = max(int(picked.sum()), 1)
        ttft = int((r.ttft_s[done] <= limits.ttft_s[done]).sum())
        tpot = int((~(r.tpot_s[done] > limits.tpot_s[done])).sum())
        return {
            "met": float(r.met[picked].sum()) / total,
            "ttft_met": ttft / total,
            "tpot_met": tpot / total,
            "ttft_limit_s_p50": _quantile(limits.ttft_s[picked], 0.5),
            "tpot_limit_s_p50": _quantile(limits.tpot_s[picked], 0.5),
        }

    def _energy_j(self, window_s: float) -> float:
        """Over the window, at each node's mean busy share of the run."""
        run_s = max(self.end_s, 1e-9)
        return sum(
            node.watts
            * (IDLE_POWER_SHARE + (1 - IDLE_POWER_SHARE) * min(node.totals.busy_s / run_s, 1.0))
            * window_s
            for node in self.nodes
        )

    def _jain(self, done: NDArray[np.bool_]) -> float | None:
        """Jain's index over tenants (sessions where there are none) of how near to idle they ran.

        1: everybody was slowed down alike; 1/n: one of n got everything.
        """
        r = self.records
        if not done.any():
            return None
        speed = r.idle_ttft_s[done] / np.maximum(r.ttft_s[done], 1e-9)
        sessions = r.session[done]
        owners = sessions
        if any(self.tenants):
            numbers = {name: i for i, name in enumerate(dict.fromkeys(self.tenants))}
            owners = np.array([numbers[name] for name in self.tenants])[sessions]
        _, place = np.unique(owners, return_inverse=True)
        mean = np.bincount(place, weights=speed) / np.bincount(place)
        return float(mean.sum() ** 2 / (len(mean) * (mean**2).sum()))

    def _node(self, index: int) -> dict[str, Any]:
        r, node = self.records, self.nodes[index]
        mine = r.node == index
        run_s = max(self.end_s, 1e-9)
        return {
            "name": node.name,
            "requests": int(mine.sum()),
            "gpu_busy": node.totals.busy_s / run_s,
            "link_busy": node.link_busy_s / run_s,
            "network_busy": node.network_busy_s / run_s,
            "vram_fill": node.held_share,
            "device_tokens": int(r.device_tokens[mine].sum()),
            "cached_tokens": int(r.cached_tokens[mine].sum()),
            "new_tokens": int(r.new_tokens[mine].sum()),
            "kappa_p50": _quantile(r.kappa[mine & ~np.isnan(r.kappa)], 0.5),
            "preemptions": node.totals.preemptions,
            "stores_dropped_tokens": node.stores_dropped_tokens,
        }


def spread(values: NDArray[np.float64]) -> dict[str, float | None]:
    """Mean and quantiles; None where there are no values."""
    values = values[~np.isnan(values)]
    if not len(values):
        return {"mean": None, "p50": None, "p90": None, "p99": None}
    p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99)).tolist()
    return {"mean": float(values.mean()), "p50": p50, "p90": p90, "p99": p99}


def _quantile(values: NDArray[np.float64], q: float) -> float | None:
    if not len(values):
        return None
    found = float(np.quantile(values, q))
    return found if math.isfinite(found) else None
