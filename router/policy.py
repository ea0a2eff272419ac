"""Which worker should serve a request. Each policy looks at `Offers` and says whom, and why.

* `priced`: least predicted TTFT, plus what the choice takes from others: `router.prices`;
  `priced_fetch` may also bring KV from a peer first (simulated only).
* `ttft`: least predicted time to first token, plus the delay it puts on those that decode there.
* `threshold`: paper 001 §7.3 as printed. It looks at the request's ratio and at links, not at where
  the cache is, nor at the queue (except to break ties): kept as explanation and baseline.
* `least_backlog`: least queued work; what is left when nothing is known of the request.

What others do is in `benchmarks.baselines.routing`; `router.policies` finds any of them by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from router.offers import Floats, Offers


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring `tokens` leading tokens from a peer before loading."""

    source_worker: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy's answer: index into the offers, and one word of reason."""

    index: int
    reason: str
    fetch: Fetch | None = None


class Policy(Protocol):
    """Picks a worker; may remember what it was told.

    fetches: it may bring KV from a peer first.
    """

    name: str
    fetches: bool

    def choose(self, offers: Offers) -> Choice:
        """Pick one of `offers` (at least one)."""
        ...

    def routed(self, offers: Offers, index: int) -> None:
        """The request went to row `index`."""
        ...

    def left(self, worker: str) -> None:
        """A worker is gone."""
        ...


class Stateless:
    """What policies without a memory share."""

    fetches = False

    def routed(self, offers: Offers, index: int) -> None:
        """Nothing to remember."""

    def left(self, worker: str) -> None:
        """Nothing to forget."""


class Threshold(Stateless):
    """Paper 001 §7.3: memory-bound requests to the fastest link, others to the cheapest compute.

    The request's ratio is the one at the worker that holds most of its prompt in the host tier,
    and it is memory-bound if it is so there.
    """

    name = "threshold"

    def choose(self, offers: Offers) -> Choice:
        """Pick by link or by price; ties by backlog."""
        backlog_s, speed = offers.backlog_s, offers.h2d_bytes_per_s
        holder = least(-offers.cached_tokens, backlog_s)
        ratio = offers.cached_tokens[holder] / max(offers.new_tokens[holder], 1.0)
        if ratio >= offers.kappa_crit[holder]:
            return Choice(least(-speed, backlog_s, offers.in_flight), "memory_bound_fast_link")
        # A price is no price unless all have one.
        priced = bool((offers.cost_per_hour > 0).all())
        price = offers.cost_per_hour / offers.flops_per_s if priced else np.zeros(len(offers))
        # With equal prices the slower link computes as well: keep the fast one free.
        index = least(price, backlog_s, offers.in_flight, speed)
        return Choice(index, "compute_bound_cheap_compute")


class LeastTtft(Stateless):
    """Least predicted TTFT plus harm; the reason is what set the winner apart."""

    name = "ttft"

    def choose(self, offers: Offers) -> Choice:
        """Pick the least sum; ties by requests in flight."""
        score = offers.ttft_s + offers.harm_s
        index = least(score, offers.in_flight, -offers.h2d_bytes_per_s)
        return Choice(index, reason(offers, score, index))


class LeastBacklog(Stateless):
    """Least queued work, then fewest in flight."""

    name = "least_backlog"

    def choose(self, offers: Offers) -> Choice:
        """Pick the least loaded."""
        index = least(offers.backlog_s, offers.in_flight, -offers.h2d_bytes_per_s)
        return Choice(index, "least_backlog")


def reason(offers: Offers, score: Floats, index: int) -> str:
    """What set row `index` apart from the second best by `score`."""
    if len(offers) == 1:
        return "only_worker"
    others = score.copy()
    others[index] = np.inf
    rival = int(others.argmin())
    if others[rival] - score[index] <= 1e-9:
        return "tie"
    best, second = _parts(offers, index), _parts(offers, rival)
    gains = [theirs - ours for ours, theirs in zip(best, second, strict=True)]
    return _REASONS[gains.index(max(gains))]


_REASONS = ("shorter_queue", "faster_load", "less_compute", "less_harm")


def _parts(offers: Offers, row: int) -> tuple[float, float, float, float]:
    load_s, compute_s = offers.load_s.item(row), offers.compute_s.item(row)
    queue_s = offers.ttft_s.item(row) - load_s - compute_s - offers.fixed_s.item(row)
    return queue_s, load_s, compute_s, offers.harm_s.item(row)


def least(score: Floats, *ties: Floats) -> int:
    """Index of the least score; equal ones by the least of each of `ties` in turn, then first."""
    index = int(score.argmin())
    equal = score == score[index]
    if np.count_nonzero(equal) == 1:
        return index
    rows = np.flatnonzero(equal)
    for tie in ties:
        among = tie[rows]
        rows = rows[among == among.min()]
    return int(rows[0])
