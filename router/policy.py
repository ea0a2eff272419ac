"""Which worker should serve a request. Each policy ranks candidates and says why.

A candidate is one worker with everything a policy may look at, priced in seconds for this request.
Policies see nothing else, so the same ones run live and simulated. They are stateless.

* `threshold`: paper 001 §7.3 as printed. It looks at the request's ratio and at links, not at where
  the cache is, nor at the queue (except to break ties): kept as explanation and baseline.
* `ttft`: least predicted time to first token, plus the delay it puts on those that decode there.
* `least_backlog`: least queued work; what is left when nothing is known of the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kappa.types import NodeProfile, TokenCounts

MEMORY, COMPUTE = "memory", "compute"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker, priced for one request; seconds are real ones.

    queue_s: from now until its own load or prompt could start; ttft_s: prediction until the first
    token, all included; harm_s: total delay of those that decode there; backlog_s: queued work on
    the busier of link and gpu.
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

    @property
    def bound(self) -> str:
        """`memory` if the request's ratio here is at or above the node's critical ratio."""
        return MEMORY if self.counts.ratio >= self.kappa_crit else COMPUTE


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy's answer: index into the candidates, and one word of reason."""

    index: int
    reason: str


class Policy(Protocol):
    """Ranks candidates."""

    name: str

    def choose(self, candidates: Sequence[Candidate]) -> Choice:
        """Pick one of `candidates` (at least one)."""
        ...


class Threshold:
    """Paper 001 §7.3: memory-bound requests to the fastest link, others to the cheapest compute.

    The request's ratio is the one at the worker that holds most of its prompt in the host tier,
    and it is memory-bound if it is so there.
    """

    name = "threshold"

    def choose(self, candidates: Sequence[Candidate]) -> Choice:
        """Pick by link or by price; ties by backlog."""
        holder = max(candidates, key=lambda c: (c.counts.cached_tokens, -c.backlog_s))
        if holder.bound == MEMORY:
            index = _least(candidates, lambda c: (-_speed(c), c.backlog_s, c.in_flight))
            return Choice(index, "memory_bound_fast_link")
        # A price is no price unless all have one.
        priced = all(c.node.cost_per_hour > 0 for c in candidates)
        price = _price if priced else _no_price
        index = _least(
            candidates,
            # With equal prices the slower link computes as well: keep the fast one free.
            lambda c: (price(c), c.backlog_s, c.in_flight, _speed(c)),
        )
        return Choice(index, "compute_bound_cheap_compute")


class LeastTtft:
    """Least predicted TTFT plus harm; the reason is what set the winner apart."""

    name = "ttft"

    def choose(self, candidates: Sequence[Candidate]) -> Choice:
        """Pick the least sum; ties by requests in flight."""
        index = _least(candidates, lambda c: (c.ttft_s + c.harm_s, c.in_flight, -_speed(c)))
        if len(candidates) == 1:
            return Choice(index, "only_worker")
        best = candidates[index]
        rival = min(
            (c for i, c in enumerate(candidates) if i != index), key=lambda c: c.ttft_s + c.harm_s
        )
        gains = {
            "shorter_queue": rival.queue_s - best.queue_s,
            "faster_load": rival.load_s - best.load_s,
            "less_compute": rival.compute_s - best.compute_s,
            "less_harm": rival.harm_s - best.harm_s,
        }
        reason = max(gains, key=lambda name: gains[name])
        lead_s = rival.ttft_s + rival.harm_s - best.ttft_s - best.harm_s
        return Choice(index, reason if lead_s > 1e-9 else "tie")


class LeastBacklog:
    """Least queued work, then fewest in flight."""

    name = "least_backlog"

    def choose(self, candidates: Sequence[Candidate]) -> Choice:
        """Pick the least loaded."""
        index = _least(candidates, lambda c: (c.backlog_s, c.in_flight, -_speed(c)))
        return Choice(index, "least_backlog")


def policy_named(name: str) -> Policy:
    """The policy called `name`; ValueError lists those that exist."""
    policies: dict[str, Policy] = {p.name: p for p in (Threshold(), LeastTtft(), LeastBacklog())}
    if name not in policies:
        raise ValueError(f"unknown policy {name!r}: choose one of {sorted(policies)}")
    return policies[name]


def _price(candidate: Candidate) -> float:
    """Cost of a FLOP."""
    return candidate.node.cost_per_hour / candidate.node.flops_per_s


def _no_price(candidate: Candidate) -> float:
    return 0.0


def _speed(candidate: Candidate) -> float:
    return candidate.node.h2d_bytes_per_s


def _least(candidates: Sequence[Candidate], key: Callable[[Candidate], tuple[float, ...]]) -> int:
    return min(range(len(candidates)), key=lambda i: key(candidates[i]))
