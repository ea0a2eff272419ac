"""What a policy looks at: one request, priced on every ready worker, as arrays over the workers.

`router.fleet` makes it, policies read it, and the decision keeps the chosen row as a `Candidate`.
Policies see nothing else, so the same ones run live and simulated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kappa.cost import TokenCounts
from kappa.hardware import NodeProfile
from kappa.plans.load_plan import LoadPlan
from router.index.prefix_hash import UInt64s

MEMORY, COMPUTE = "memory", "compute"

Floats = NDArray[np.float64]


@dataclass(slots=True, eq=False)
class Offers:
    """One request on n workers; every array has shape (n,), seconds are real ones.

    slots: the workers' columns, stable for life. load_s, compute_s: its own link and gpu seconds;
    load_token_s: link seconds a token;
    work_s: the gpu seconds that it adds to a busy engine (no weight read, no fixed step cost);
    fixed_s: overhead besides the engine. link_backlog_s, gpu_backlog_s: queued ahead of it.
    harm_s: total delay of those that decode there. decode_s: what its decode will add to the steps
    of each that is in flight beside it, over as many tokens as weigh like one first token;
    own_late_s: by how much as many of its own are late, beside all in flight there and the prompts
    that come in between: a step may take half of what the objective allows a token.
    gpu_use: seconds of prefill received per second lately (over 1: more than it can do);
    loads_per_s, prefills_per_s: requests a second.
    fetch_s: seconds on the network to bring `fetch_tokens`, what it lacks, from a peer (None:
    nothing is brought; for ever where there is no room), net_backlog_s queued ahead of it on the
    cards of both ends. fetching: the same request if every worker first fetched what its peer
    `fetch_from` holds; none where nobody can or nothing is to be had.
    plans: by row, how the worker would bring the prefix back, of those that plan (`load_plans`).
    resident_tokens: context of all in flight; capacity_tokens: what VRAM holds.
    ttft_s: predicted time to first token, a forecast where there is one. tpot_s: time per output
    token once all in flight there decode beside it, stretched by the prefills of late.
    """

    now_s: float
    workers: list[str]
    slots: NDArray[np.intp]
    prompt_tokens: int
    block_tokens: int
    prefix_hashes: UInt64s
    session: str
    expected_output_tokens: int
    device_tokens: Floats
    cached_tokens: Floats
    new_tokens: Floats
    load_s: Floats
    load_token_s: Floats
    work_s: Floats
    compute_s: Floats
    fixed_s: Floats
    link_backlog_s: Floats
    gpu_backlog_s: Floats
    harm_s: Floats
    decode_s: Floats
    own_late_s: Floats
    gpu_use: Floats
    loads_per_s: Floats
    prefills_per_s: Floats
    in_flight: Floats
    waiting: Floats
    queued_tokens: Floats
    resident_tokens: Floats
    capacity_tokens: Floats
    h2d_bytes_per_s: Floats
    flops_per_s: Floats
    cost_per_hour: Floats
    kappa_crit: Floats
    fetch_s: Floats | None
    net_backlog_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    fetching: Offers | None = None
    fetch_from: str = ""
    fetch_tokens: Floats | None = None
    plans: dict[int, LoadPlan] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def backlog_s(self) -> Floats:
        """Queued work on the busier of link and gpu."""
        return np.maximum(self.link_backlog_s, self.gpu_backlog_s)

    def candidate(self, index: int, node: NodeProfile) -> Candidate:
        """Row `index`, as plain numbers."""
        load_s, compute_s = float(self.load_s[index]), float(self.compute_s[index])
        ttft_s, fixed_s = float(self.ttft_s[index]), float(self.fixed_s[index])
        plan = self.plans.get(index)
        return Candidate(
            worker=self.workers[index],
            node=node,
            counts=TokenCounts(
                int(self.device_tokens[index]),
                int(self.cached_tokens[index]),
                int(self.new_tokens[index]),
            ),
            kappa_crit=float(self.kappa_crit[index]),
            queue_s=max(ttft_s - load_s - compute_s - fixed_s, 0.0),
            load_s=load_s,
            compute_s=compute_s,
            ttft_s=ttft_s,
            harm_s=float(self.harm_s[index]),
            backlog_s=float(max(self.link_backlog_s[index], self.gpu_backlog_s[index])),
            in_flight=int(self.in_flight[index]),
            plan=plan.kind if plan is not None else "",
            recomputed_tokens=plan.tokens("R") if plan is not None else 0,
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker, priced for one request; seconds are real ones.

    queue_s: from now until its own load or prompt could start; ttft_s: prediction until the first
    token, all included; harm_s: total delay of those that decode there; backlog_s: queued work on
    the busier of link and gpu; recomputed_tokens: of the cached ones, those that its plan computes
    anew.
    """

    worker: str
    node: NodeProfile
    counts: TokenCounts
    kappa_crit: float
    queue_s: float
    load_s: float
    compute_s: float
    ttft_s: float
    harm_s: float
    backlog_s: float
    in_flight: int
    plan: str = ""
    recomputed_tokens: int = 0

    @property
    def bound(self) -> str:
        """`memory` if the request's ratio here is at or above the node's critical ratio."""
        return MEMORY if self.counts.ratio >= self.kappa_crit else COMPUTE
