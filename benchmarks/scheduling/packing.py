"""Instances for the packing of iterations, and their exact optimum."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kappa.protocol import Charge
from scheduler.config import FairConfig, LinkRates
from scheduler.fair import Fair
from scheduler.packing import pack
from scheduler.work import Quote, Room, Work

Floats = NDArray[np.float64]
_BLOCK_TOKENS = 32


def instance(
    rng: np.random.Generator, resources: int = 1, requests: int = 24
) -> tuple[Floats, Floats, float, Floats]:
    """Tokens, sizes, budget and room of an iteration that cannot take all.

    Requests (2 to `requests`) have 1 to 300 new tokens and, every other, up to 1,100 cached ones,
    log-uniform. Resources: blocks; then seconds of link; then blocks of those of high ratio only.
    """
    n = int(rng.integers(2, requests))
    tokens = rng.integers(1, 300, n).astype(np.float64)
    cached = np.exp(rng.uniform(0, 7, n)) * rng.integers(0, 2, n)
    blocks = np.ceil((tokens + cached) / _BLOCK_TOKENS)
    high = np.where(cached > 2 * tokens, blocks, 0.0)
    columns = [blocks, cached * 0.001 + 0.02, high, np.ones(n)][:resources]
    room = [max(column.max(), np.floor(rng.uniform(0.2, 1.0) * column.sum())) for column in columns]
    budget = float(np.floor(rng.uniform(0.2, 1.0) * tokens.sum())) + 1.0
    return tokens, np.stack(columns, axis=1), budget, np.array(room)


def optimum(tokens: Floats, sizes: Floats, budget: float, room: Floats) -> float:
    """Most tokens within the budget that any choice computes, by integer programming."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    n = len(tokens)
    # Variables: take it or not; and what is filled, at most the budget and the tokens taken.
    rows = np.vstack([np.append(-tokens, 1.0), np.c_[sizes.T, np.zeros(len(room))]])
    found = milp(
        np.append(np.zeros(n), -1.0),
        constraints=LinearConstraint(rows, -np.inf, np.append(0.0, room)),
        integrality=np.append(np.ones(n), 0.0),
        bounds=Bounds(0, np.append(np.ones(n), budget)),
    )
    if found.x is None:
        raise RuntimeError(f"no optimum found: {found.message}")
    return float(-found.fun)


@contextmanager
def _no_chatter() -> Iterator[None]:
    """The solver's library prints to the process' own standard output, whatever it is told."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the exact optimum, over all instances; and what a choice took of processor time."""

    mean: float
    p1: float
    least: float
    at_least_95: float
    choice_us: float


def shares(instances: int, resources: int, seed: int) -> Shares:
    """`pack` against the optimum."""
    rng = np.random.default_rng(seed)
    found = np.empty(instances)
    seconds = 0.0
    with _no_chatter():
        for number in range(instances):
            tokens, sizes, budget, room = instance(rng, resources)
            start_s = time.thread_time()
            chosen = pack(tokens, sizes, budget, room)
            seconds += time.thread_time() - start_s
            filled = min(budget, float(tokens[chosen].sum()))
            found[number] = filled / optimum(tokens, sizes, budget, room)
    return Shares(
        float(found.mean()), float(np.quantile(found, 0.01)), float(found.min()),
        float((found >= 0.95).mean()), 1e6 * seconds / instances,
    )  # fmt: skip


class _Request(Work):
    __slots__ = ("cached_tokens", "host")

    def __init__(self, cached_tokens: int, new_tokens: int, host: bool, tenant: str) -> None:
        super().__init__(cached_tokens + new_tokens, 0.0, 200, tenant)
        self.cached_tokens = cached_tokens
        self.host = host


class _Blocks:
    """Blocks that are only counted; `used` of them are others'."""

    block_tokens = _BLOCK_TOKENS

    def __init__(self, capacity_blocks: int, used: int) -> None:
        self.version = 0
        self.capacity_blocks = capacity_blocks
        self.used = used

    def quote(self, work: Work) -> Quote:
        assert isinstance(work, _Request)
        blocks, cached = -(-work.total_tokens // _BLOCK_TOKENS), work.cached_tokens
        return Quote(blocks, 0, cached) if work.host else Quote(blocks, cached, 0)

    def available(self) -> int:
        return self.capacity_blocks - self.used

    def take(self, work: Work, quote: Quote) -> Quote:
        self.used += quote.blocks
        return quote


@dataclass(frozen=True, slots=True)
class Decision:
    """Milliseconds of processor time of one plan; requests it admitted, on average."""

    median_ms: float
    p99_ms: float
    admitted: float


def decision(waiting: int, tenants: int, vram_binds: bool, repeats: int, seed: int) -> Decision:
    """Fair's plan with so many waiting: where VRAM binds, everybody in the window is looked at."""
    taken, admitted = [], 0
    for repeat in range(repeats):
        rng = np.random.default_rng([seed, repeat])
        memory = _Blocks(40_000, 40_000 - 150 if vram_binds else 10_000)
        rule = Fair(FairConfig(), LinkRates(1e-5, 1e-3))
        for _ in range(waiting):
            work = _Request(
                int(rng.integers(0, 6000)) // 32 * 32, int(rng.integers(10, 500)),
                bool(rng.random() < 0.5), f"t{rng.integers(tenants)}",
            )  # fmt: skip
            rule.add(work, 0.0)
        rule.heard({f"t{t}": Charge(float(t)) for t in range(tenants)}, {}, 0.1)
        start_s = time.thread_time()
        plan = rule.plan(Room(memory, 8192 if vram_binds else 2048, 128, 20), 0.5)
        taken.append(1e3 * (time.thread_time() - start_s))
        admitted += len(plan.admitted)
    return Decision(float(np.median(taken)), float(np.quantile(taken, 0.99)), admitted / repeats)
