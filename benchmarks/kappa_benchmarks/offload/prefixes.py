"""Time to first token behind a cached prefix, one arm per load plan; and the link alone.

The prefix is computed and stored once. Each run brings it back by its plan and computes the new
tokens behind it. "load-sequential" loads all layers before it computes; every other arm loads layer
by layer while it computes. "share" arms are a sweep beside the planners' choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

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
from kappa_benchmarks.offload.cells import PrefixCell
from kappa_benchmarks.offload.rig import LINK, Arm, Rig, Sample
from kappa_engine.block_pool import BlockType, Ids, Place
from kappa_engine.step import Pages, prompt_row

BASELINE = "load-layers"
_CHUNK_TOKENS = 2_048
_STORED: tuple[tuple[BlockType, Place], ...] = (
    ("kv", "device"), ("kv", "host"), ("act", "device"), ("act", "host"),
)  # fmt: skip


@dataclass(slots=True)
class Stored:
    """A prompt with a prefix in host memory."""

    tokens: Ids
    # All its blocks.
    pages: Pages
    # Tokens of the prefix.
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
        for start in range(0, cell.cached, _CHUNK_TOKENS):
            end = min(start + _CHUNK_TOKENS, cell.cached)
            rig.forward.compute([prompt_row(tokens[:end], pages, start=start)])
        for type in ("kv", "act"):
            host, device = (pages.column(type, place).tolist() for place in ("host", "device"))
            rig.mover.d2h(rig.arena.copies(type, "host", host, device), rig.mover.mark())
        rig.mover.drain()
        yield Stored(tokens, pages, cell.cached)
    finally:
        for pool, ids in taken:
            pool.free(ids)


def prefix_arms(rig: Rig, cell: PrefixCell, prompt: Stored) -> tuple[list[Arm], dict[str, str]]:
    """The cell's arms, and those left out by name, with the reason."""
    costs = Costs(rig.rates, cell.cached, cell.new)
    splits, left_out = _splits(rig, cell, costs)
    plans = {name: plan_of(costs, split) for name, split in splits.items()}
    plans["auto"] = choose(costs, block_tokens=rig.block_tokens)
    blocks = prompt.cached // rig.block_tokens
    host, device = (prompt.pages.column("kv", place)[:blocks] for place in ("host", "device"))
    copies = rig.arena.copies("kv", "device", device.tolist(), host.tolist())
    alone_s = rig.rates.load.seconds(prompt.cached)
    behind = prompt_row(prompt.tokens, prompt.pages, start=prompt.cached)

    def sequential() -> Tensor:
        """All KV to the device's blocks, then the new tokens (Eq. 3 of paper 001)."""
        rig.mover.wait(rig.mover.h2d(copies))
        return rig.forward.compute([behind])

    predicted_s = alone_s + costs.compute_s(Split())
    arms = [Arm("load-sequential", _first_token(rig, sequential), predicted_s)]
    for name, plan in plans.items():
        kinds = [f"{kind} {plan.tokens(kind)}" for kind in ("R", "A", "K") if plan.tokens(kind)]
        note = ", ".join(kinds) if name != BASELINE else ""
        note = f"{note}: {plan.why}" if name == "auto" else note
        run = _first_token(rig, _planned(rig, prompt, plan))
        arms.append(Arm(name, run, plan.ttft_s, note, name == "auto", plan.segments))
    arms.append(Arm(LINK, lambda: rig.timed(lambda: rig.mover.h2d(copies)), alone_s))
    return arms, left_out


def _splits(rig: Rig, cell: PrefixCell, costs: Costs) -> tuple[dict[str, Split], dict[str, str]]:
    """The split of each arm, and the arms that are left out, with why."""
    bt, cached = rig.block_tokens, cell.cached
    shares = {f"{share:.1%}": round(share * cached / bt) * bt for share in cell.sweep}
    splits = {
        BASELINE: Split(), "recompute-front": best_prefix(costs, bt).split,
        "recompute-back": best_tail(costs, bt).split, "recompute-all": Split(cached),
        **{f"share-R{share}": Split(tokens) for share, tokens in shares.items()},
    }  # fmt: skip
    refused = activations_refused(rig.rates)
    if not rig.arena.size.act_host:
        return splits, {"activations, activations+recompute": refused}
    splits |= {
        "activations": Split(activations=cached),
        **{f"share-A{share}": Split(activations=tokens) for share, tokens in shares.items()},
        # The bench measures what serving would refuse as well.
        "activations-best": best_activations(costs, bt).split,
        "activations+recompute": best_mixed(costs, bt).split,
    }
    best = ("activations-best", "activations+recompute") if refused else ()
    return splits, {f"{name} in serving": refused for name in best}


def _planned(rig: Rig, prompt: Stored, plan: LoadPlan) -> Callable[[], Tensor]:
    row = prompt_row(prompt.tokens, prompt.pages, plan.segments)
    return lambda: rig.forward.compute([row])


def _first_token(rig: Rig, compute: Callable[[], Tensor]) -> Callable[[], Sample]:
    def run() -> Sample:
        found: list[int] = []
        sample = rig.timed(lambda: found.append(int(compute()[-1].argmax())))
        return replace(sample, tokens=tuple(found))

    return run
