"""Which load plan a request gets on a node, and what a node's policy makes of its effective ratio.

`choose` prices the best plan of every kind that model, engine and stored data allow and takes the
one with the earliest first token. It leaves plain loading only for a gain that prediction error
does not eat. `kappa_eff` is the ratio at which the predicted time to first token is twice the gpu
time: κ0 where loading comes first, 2κ0 where it overlaps, 2κ0 + 1 where the front is recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from typing import Literal

from kappa.plan.costs import IDLE, Backlog, Costs, Split
from kappa.plan.predict import plan_of
from kappa.plan.rates import PlanRates
from kappa.plan.segments import Kind, LoadPlan
from kappa.plan.split import (
    Best,
    activations_refused,
    best_activations,
    best_mixed,
    best_prefix,
    best_tail,
)
from kappa.types import TokenCounts

Policy = Literal["load", "recompute", "tail", "activations", "mixed", "auto"]
"""What a node may do: load alone; and recompute the front, or the back; and use activations; and
both of them; or the best of all that pays."""

LEAST_GAIN = 0.02
"""A plan other than plain loading must promise an earlier first token by this share."""

EXACT: frozenset[Kind] = frozenset({"K", "A", "R"})

_MOST_RATIO = 2.0**40
_RATIO_ERROR = 1e-12


def choose(
    rates: PlanRates,
    counts: TokenCounts,
    *,
    kinds: Set[Kind] = EXACT,
    block_tokens: int = 16,
    held_tokens: int | None = None,
    tail_only: bool = False,
    backlog: Backlog = IDLE,
    least_gain: float = LEAST_GAIN,
) -> LoadPlan:
    """The plan with the earliest predicted first token.

    Args:
        rates: the model on the node.
        counts: the request there.
        kinds: what architecture and engine allow (`kappa.plan.support`); K is always meant.
        block_tokens: plans cut at multiples of this.
        held_tokens: activations are held for this many leading cached tokens; None for all.
        tail_only: the engine can recompute the back of the cached run alone (stock vLLM).
        backlog: seconds of work that wait on the node; the plan's `ttft_s` counts them.
        least_gain: see `LEAST_GAIN`.

    Raises:
        ValueError: no block size, or a kind that is not priced here.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}: give 1 or more")
    if not kinds <= EXACT:
        raise ValueError(
            f"kinds {sorted(kinds - EXACT)} are not chosen here: give some of {sorted(EXACT)}"
        )
    costs = Costs(rates, counts.cached_tokens, counts.new_tokens, counts.device_tokens, backlog)
    plain = Split()
    plain_s = costs.of(plain)
    best = Best(plain, plain_s)
    notes: list[str] = []
    if counts.cached_tokens:
        found, notes = _options(costs, kinds, block_tokens, held_tokens, tail_only)
        best = min([best, *found], key=lambda one: one.ttft_s)
    gain = 1.0 - best.ttft_s / plain_s if plain_s > 0 else 0.0
    if best.split != plain and gain < least_gain:
        notes.insert(0, f"the best other plan gains {gain:.1%}, less than {least_gain:.1%}")
        best = Best(plain, plain_s)
    return plan_of(costs, best.split, _why(costs, best, plain_s, notes))


def _options(
    costs: Costs, kinds: Set[Kind], block_tokens: int, held_tokens: int | None, tail_only: bool
) -> tuple[list[Best], list[str]]:
    found: list[Best] = []
    notes: list[str] = []
    refused = activations_refused(costs.rates) if "A" in kinds and held_tokens != 0 else "not held"
    if refused and refused != "not held":
        notes.append(refused)
    if not refused and "R" in kinds and not tail_only:
        return [best_mixed(costs, block_tokens, held_tokens)], notes
    if not refused:
        found.append(best_activations(costs, block_tokens, held_tokens))
    if "R" in kinds:
        recompute = best_tail if tail_only else best_prefix
        found.append(recompute(costs, block_tokens))
    return found, notes


def _why(costs: Costs, best: Best, plain_s: float, notes: list[str]) -> str:
    split = best.split
    load_s, compute_s = costs.load_s(split), costs.compute_s(split)
    waits = "link" if load_s + costs.backlog.link_s > compute_s + costs.backlog.gpu_s else "gpu"
    said = [f"the {waits} is the longer ({load_s:.4g} s link, {compute_s:.4g} s gpu)"]
    if best.ttft_s < plain_s:
        said.append(f"plain loading would take {plain_s:.4g} s, this {best.ttft_s:.4g} s")
    return "; ".join(said + notes)


def policy_ttft_s(
    rates: PlanRates,
    policy: Policy,
    cached_tokens: float,
    new_tokens: float,
    *,
    device_tokens: float = 0.0,
    backlog: Backlog = IDLE,
    block_tokens: int = 0,
) -> float:
    """Predicted seconds to the first token where the node always plans by `policy`.

    Activations are taken to be held wherever the policy uses them; where they cannot pay, "mixed"
    and "auto" do without them.

    Raises:
        ValueError: a policy that is not known.
    """
    costs = Costs(rates, cached_tokens, new_tokens, device_tokens, backlog)
    if policy == "auto":
        policy = "recompute" if activations_refused(rates) else "mixed"
    solvers: dict[str, Callable[[Costs, int], Best]] = {
        "recompute": best_prefix,
        "tail": best_tail,
        "activations": best_activations,
        "mixed": best_mixed,
    }
    if policy == "load":
        return costs.of(Split())
    if policy not in solvers:
        raise ValueError(f"policy is {policy!r}: use load, auto, or one of {', '.join(solvers)}")
    return solvers[policy](costs, block_tokens).ttft_s


def kappa_eff(
    rates: PlanRates, policy: Policy, new_tokens: float, device_tokens: float = 0.0
) -> float:
    """The least κ at which predicted TTFT reaches twice the gpu time of computing the new tokens.

    Found by doubling and halving, to nine digits. The gpu time is that of the same request with
    everything loaded, t_gpu(T, S), so attention over a longer context counts.

    Returns:
        κ, fractional; infinity where computing grows with the context as fast as bringing it back
        does, so that no request is memory-bound.
    """
    new_tokens = max(1.0, new_tokens)

    def bound(ratio: float) -> bool:
        cached = ratio * new_tokens
        gpu_s = rates.prefill_s(new_tokens, cached + device_tokens)
        return (
            policy_ttft_s(rates, policy, cached, new_tokens, device_tokens=device_tokens)
            >= 2.0 * gpu_s
        )

    high = 1.0
    while not bound(high):
        high *= 2.0
        if high > _MOST_RATIO:
            return math.inf
    low = high / 2.0 if high > 1.0 else 0.0
    while high - low > _RATIO_ERROR * high and high > _RATIO_ERROR:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if bound(middle) else (middle, high)
    return high
