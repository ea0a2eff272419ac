"""Scheduled tokens per iteration, as in paper 001's Table 4: what a scheduler makes of scarce VRAM.

The paper's engine (vLLM 0.10 with LMCache) loads a batch's prefixes inside the iteration, so the
requests of an iteration hold their blocks until all are done, and how many tokens an iteration has
is up to how many requests fit. That engine is played here with our batcher and any rule: an
iteration lasts as long as its loads and its computation. Our own engine loads while it computes
(`simulated`); there a request computes as soon as its load has landed, and its iterations are many
and small whatever the rule. Both figures are printed.

    python -m benchmarks.scheduling.scheduled_tokens --policy fcfs --policy fair
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.scheduling import mix, paper_traffic
from benchmarks.scheduling.simulated import node_of, play
from scheduler.batching import Batcher
from scheduler.catalogue import rule_named
from scheduler.work import Quote, Work
from simulator.node import NodeModel


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One run. tokens: mean of the iterations before which requests waited; the rest in seconds."""

    tokens: float
    iterations: int
    ttft_mean_s: float
    ttft_p99_s: float
    makespan_s: float


class PrivateBlocks:
    """Blocks for requests that share nothing; each one's prefix costs no computation."""

    def __init__(self, model: NodeModel, cached_tokens: dict[Work, int]) -> None:
        self.version = 0
        self.block_tokens = model.block_tokens
        self._capacity = self._free = model.device_blocks
        self._cached_tokens = cached_tokens
        self._taken: dict[Work, int] = {}

    @property
    def capacity_blocks(self) -> int:
        """All of them."""
        return self._capacity

    def quote(self, work: Work) -> Quote | None:
        """Blocks for all of it, budget for what is new."""
        blocks = -(-work.total_tokens // self.block_tokens)
        return Quote(blocks, self._cached_tokens[work], 0)

    def available(self) -> int:
        """Unused ones."""
        return self._free

    def take(self, work: Work, quote: Quote) -> Quote | None:
        """Reserve them."""
        self._free -= quote.blocks
        self._taken[work] = quote.blocks
        return quote

    def release(self, work: Work) -> None:
        """Give them back."""
        self._free += self._taken.pop(work)
        self.version += 1


def loads_inside(policy: str, model: NodeModel, asks: Sequence[mix.Ask]) -> Scheduled:
    """Play requests on an engine that loads inside its iterations."""
    works = [Work(a.prompt_tokens, a.at_s, 1, a.tenant, a.priority) for a in asks]
    cached = {work: ask.prefix_tokens for work, ask in zip(works, asks, strict=True)}
    memory = PrivateBlocks(model, cached)
    rule = rule_named(policy, model.fair, model.link_rates)
    batcher = Batcher(memory, rule, model.budget_tokens, model.max_running)
    block_s = model.load_block_s / model.block_tokens
    arrivals, now_s = deque(works), 0.0
    tokens: list[int] = []
    ttfts: list[float] = []
    while len(ttfts) < len(works):
        while arrivals and arrivals[0].arrival_s <= now_s:
            work = arrivals.popleft()
            batcher.add(work, work.arrival_s)
        step = batcher.step(now_s, 0)
        if not step.chunks:
            if not arrivals:
                raise RuntimeError(f"{policy}: {len(works) - len(ttfts)} requests never ended")
            now_s = max(now_s, arrivals[0].arrival_s)
            continue
        new = sum(count for _, count, _ in step.chunks)
        if batcher.was_queued:
            tokens.append(new)
        seconds = model.step.step_s((count, context) for _, count, context in step.chunks)
        loads = [cached[work] * block_s for work, _ in step.admitted]
        now_s += seconds + (sum(loads) + model.load_fixed_s if loads else 0.0)
        batcher.ran(seconds, 1, now_s)
        for work in step.prefilled:
            ttfts.append(now_s - work.arrival_s)
            batcher.finish(work, 1, now_s)
            memory.release(work)
    return Scheduled(
        float(np.mean(tokens)), len(tokens), float(np.mean(ttfts)),
        float(np.quantile(ttfts, 0.99)), now_s,
    )  # fmt: skip


def loads_beside(policy: str, workload: mix.Workload, seed: int) -> Scheduled:
    """Play them on our engine."""
    setting = mix.Setting(workload.name, "x1", "free")
    played, node = play(node_of(policy, setting, workload.blocks), workload, seed)
    ttfts = [s.first_s - s.arrived_s for s in played.served if s.first_s is not None]
    totals = node.totals
    return Scheduled(
        totals.queued_tokens / max(totals.queued_steps, 1), totals.queued_steps,
        float(np.mean(ttfts)), float(np.quantile(ttfts, 0.99)),
        max(s.finished_s or 0.0 for s in played.served),
    )  # fmt: skip


def table(
    policies: Sequence[str], workloads: Sequence[str], runs: int, requests: int
) -> list[dict[str, Any]]:
    """Medians over runs, one row per workload, policy and kind of engine."""
    found: list[dict[str, Any]] = []
    for name in workloads:
        drawn = [paper_traffic.workload_of(name, mix.SEED + run, requests) for run in range(runs)]
        for policy in policies:
            inside = [loads_inside(policy, paper_traffic.node(), w.asks) for w in drawn]
            beside = [loads_beside(policy, w, run) for run, w in enumerate(drawn)]
            for engine, results in (("loads inside iterations", inside),
                                    ("loads beside iterations", beside)):  # fmt: skip
                found.append(_row(name, policy, engine, results))
    return found


def _row(name: str, policy: str, engine: str, runs: Sequence[Scheduled]) -> dict[str, Any]:
    tokens = [run.tokens for run in runs]
    return {
        "workload": name, "policy": policy, "engine": engine, "tokens": median(tokens),
        "tokens_spread": [min(tokens), max(tokens)],
        "iterations": median(run.iterations for run in runs),
        "ttft_mean_s": median(run.ttft_mean_s for run in runs),
        "ttft_p99_s": median(run.ttft_p99_s for run in runs),
        "makespan_s": median(run.makespan_s for run in runs), "runs": len(runs),
    }  # fmt: skip


def main(
    policy: Annotated[list[str] | None, typer.Option(help="As often as wanted.")] = None,
    workload: Annotated[list[str] | None, typer.Option(help="As often as wanted.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Seeds; the median is printed.")] = 3,
    requests: Annotated[int, typer.Option(min=1, help="Requests a run.")] = paper_traffic.REQUESTS,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Print scheduled tokens per iteration, by workload and policy."""
    rows = table(policy or ["fcfs", "fair"], workload or [*paper_traffic.WORKLOADS], runs, requests)
    if json_output:
        typer.echo(json.dumps({"rows": rows}, allow_nan=False))
        return
    for row in rows:
        low, high = row["tokens_spread"]
        typer.echo(
            f"{row['workload']:15s}{row['policy']:9s}{row['engine']:25s}"
            f"{row['tokens']:8.0f} tokens an iteration ({low:.0f} to {high:.0f}), "
            f"{row['iterations']:6.0f} iterations, TTFT mean {row['ttft_mean_s']:7.2f} s, "
            f"p99 {row['ttft_p99_s']:7.2f} s, makespan {row['makespan_s']:7.2f} s"
        )


if __name__ == "__main__":
    typer.run(main)
