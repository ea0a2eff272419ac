"""Time to first token behind a cached prefix, one arm per load plan; and the link alone.

The prefix is computed and stored once. Each run brings it back by its plan and computes the new
tokens behind it. "load-sequential" loads all layers before it computes; every other arm loads layer
by layer while it computes. "share" arms are a sweep beside the planners' choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.offload.cells import PrefixCell
from benchmarks.offload.rig import LINK, Arm, Rig, Sample
from benchmarks.offload.streaming import Store
from engine.blocks import BlockType, Ids, Place
from engine.step import Pages, prompt_row
from kappa.plans.load_plan import LoadPlan
from kappa.plans.planners import choose
from kappa.plans.split import (
    Costs,
    Split,
    activations_refused,
    best_activations,
    best_mixed,
    best_prefix,
    best_tail,
    plan_of,
)

BASELINE = "load-layers"
_CHUNK_TOKENS = 2_048
_STORED: tuple[tuple[BlockType, Place], ...] = (
    ("kv", "device"), ("kv", "host"), ("act", "host"),
)  # fmt: skip


@dataclass(slots=True)
class Stored:
    """A prompt whose first `cached` tokens are in host memory. pages: all its blocks."""

    tokens: Ids
    pages: Pages
    cached: int


@contextmanager
def stored(rig: Rig, cell: PrefixCell) -> Iterator[Stored]:
    """The cell's prompt, its prefix stored as KV and, if the arena has them, as activations."""
    tokens = rig.prompts(1, cell.cached + cell.new)[0]
    blocks = -(-len(tokens) // rig.block_tokens)
    pages, taken = Pages(), []
    try:
        for type, place in _STORED:
            pool = rig.arena.pools[type, place]
            if pool.unused >= blocks:
                ids = pool.allocate(blocks)
                taken.append((pool, ids))
                pages.put(0, type, place, ids)
        done = 0
        while done < cell.cached:
            end = min(done + _CHUNK_TOKENS, cell.cached)
            chunk = prompt_row(tokens[:end], pages, start=done)
            rig.forward.store([Store(chunk, from_token=done)])
            done = end
        rig.mover.drain()
        yield Stored(tokens, pages, cell.cached)
    finally:
        for pool, ids in taken:
            pool.free(ids)


def prefix_arms(rig: Rig, cell: PrefixCell, prompt: Stored) -> tuple[list[Arm], dict[str, str]]:
    """The cell's arms, and those left out by name, with the reason."""
    costs = Costs(rig.rates, cell.cached, cell.new)
    plans, left_out = _plans(rig, cell, costs)
    auto = choose(costs, block_tokens=rig.block_tokens)
    plans["auto"] = auto
    arms = [_sequential(rig, prompt, costs)]
    for name, plan in plans.items():
        note = "" if name == BASELINE else _said(plan)
        if name == "auto":
            note = f"{note}: {plan.why}"
        arms.append(
            Arm(name, _run(rig, prompt, plan), plan.ttft_s, note, name == "auto", plan.segments)
        )
    arms.append(_link_arm(rig, prompt))
    return arms, left_out


def _plans(rig: Rig, cell: PrefixCell, costs: Costs) -> tuple[dict[str, LoadPlan], dict[str, str]]:
    bt, cached = rig.block_tokens, cell.cached
    splits = {
        BASELINE: Split(),
        "recompute-front": best_prefix(costs, bt).split,
        "recompute-back": best_tail(costs, bt).split,
        "recompute-all": Split(cached),
    }
    for share in cell.sweep:
        splits[f"share-R{share:.1%}"] = Split(_blocks(share * cached, bt))
    left_out = {}
    if rig.arena.size.act_host:
        splits["activations"] = Split(activations=cached)
        for share in cell.sweep:
            splits[f"share-A{share:.1%}"] = Split(activations=_blocks(share * cached, bt))
        refused = activations_refused(rig.rates)
        best = {"activations-best": best_activations, "activations+recompute": best_mixed}
        for name, solve in best.items():
            # The bench measures what serving would refuse as well.
            splits[name] = solve(costs, bt).split
            if refused:
                left_out[f"{name} in serving"] = refused
    else:
        left_out["activations, activations+recompute"] = activations_refused(rig.rates)
    return {name: plan_of(costs, split) for name, split in splits.items()}, left_out


def _blocks(tokens: float, block_tokens: int) -> int:
    return round(tokens / block_tokens) * block_tokens


def _said(plan: LoadPlan) -> str:
    parts = [f"{kind} {plan.tokens(kind)}" for kind in ("R", "A", "K") if plan.tokens(kind)]
    return ", ".join(parts)


def _run(rig: Rig, prompt: Stored, plan: LoadPlan) -> Callable[[], Sample]:
    row = prompt_row(prompt.tokens, prompt.pages, plan.segments)
    return _first_token(rig, lambda: rig.forward.compute([row]))


def _first_token(rig: Rig, compute: Callable[[], Tensor]) -> Callable[[], Sample]:
    def run() -> Sample:
        found: list[int] = []
        sample = rig.timed(lambda: found.append(int(compute()[-1].argmax())))
        return replace(sample, tokens=tuple(found))

    return run


def _sequential(rig: Rig, prompt: Stored, costs: Costs) -> Arm:
    """All KV to the device's blocks, then the new tokens (Eq. 3 of paper 001)."""
    copies = _copies(rig, prompt)
    there = prompt_row(prompt.tokens, prompt.pages, start=prompt.cached)

    def compute() -> Tensor:
        event = rig.mover.h2d(copies)
        rig.mover.wait(event)
        return rig.forward.compute([there])

    predicted_s = rig.rates_alone.load.seconds(prompt.cached) + costs.compute_s(Split())
    return Arm("load-sequential", _first_token(rig, compute), predicted_s)


def _link_arm(rig: Rig, prompt: Stored) -> Arm:
    copies = _copies(rig, prompt)

    def copy() -> None:
        rig.mover.h2d(copies)

    return Arm(LINK, lambda: rig.timed(copy), rig.rates_alone.load.seconds(prompt.cached))


def _copies(rig: Rig, prompt: Stored) -> list[tuple[Any, Any]]:
    """Of every layer, the prefix's blocks in runs of neighbours in both places."""
    blocks = prompt.cached // rig.block_tokens
    host = prompt.pages.column("kv", "host")[:blocks]
    device = prompt.pages.column("kv", "device")[:blocks]
    cut = np.flatnonzero((np.diff(host) != 1) | (np.diff(device) != 1)) + 1
    runs = zip([0, *cut.tolist()], [*cut.tolist(), blocks], strict=True)
    pairs = [(int(device[a]), int(host[a]), b - a) for a, b in runs]
    return [
        (rig.arena.kv_device[i, t : t + n], rig.arena.kv_host[i, s : s + n])
        for i in range(rig.config.layers)
        for t, s, n in pairs
    ]
