"""KVPR's split of a sequence's KV while decoding: how many tokens are projected from activations.

The paper (I/O-aware partial KV recomputation, Eq. 6-12) loads the activations of [0, l), then
projects them while the KV of [l, s) loads. `split_paper` is that program; `split_ahead` is for an
engine that loads the next layer's activations early, where the link never waits for them alone,
and which counts the rest of the step. Both are closed forms, rounded to blocks both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kappa.plans.rates import PlanRates, decode_s
from kappa.plans.split import best_1d, rounded


@dataclass(frozen=True, slots=True)
class KvprSplit:
    """l of s tokens from activations; seconds of a step over all layers, and of one that loads all.

    The seconds are those of the planner's own model: `split_paper` leaves out all but the KV.
    """

    tokens: int
    context_tokens: int
    step_s: float
    load_all_s: float

    @property
    def share(self) -> float:
        return self.tokens / self.context_tokens

    @property
    def gain(self) -> float:
        """Share of the step's time that the split saves over loading all KV."""
        return 1.0 - self.step_s / self.load_all_s


def paper_share(rates: PlanRates) -> float:
    """l*/s of Eq. 12 in closed form: 1 / (1 + ψ/μ), which for MHA is 1 / (1 + h·B/G).

    The two terms of the maximum are equal there; 0 where activations are no smaller than KV.
    """
    if rates.activation_ratio >= 1.0:
        return 0.0
    return rates.load_token_s / (rates.load_token_s + rates.project_token_s)


def paper_s(rates: PlanRates, batch: int, context_tokens: float, tokens: float) -> float:
    """Eq. 11 over all layers: activations, then the longer of projecting l and loading s - l."""
    mu, psi = rates.load_token_s, rates.project_token_s
    activations_s = rates.activation_ratio * mu * tokens
    return batch * (activations_s + max(psi * tokens, mu * (context_tokens - tokens)))


def split_paper(
    rates: PlanRates,
    batch: int,
    context_tokens: int,
    block_tokens: int = 1,
    held: int | None = None,
) -> KvprSplit:
    """Eq. 12, solved: `paper_share` of s, within what activations are held for.

    Args:
        rates: the model on the node.
        batch: sequences of the same length; the split does not depend on it, the seconds do.
        context_tokens: s.
        block_tokens: l is a multiple of this, or an end.
        held: activations are held for this many leading tokens; None for all.
    """

    def price(tokens: float) -> float:
        return paper_s(rates, batch, context_tokens, tokens)

    return _best(price, paper_share(rates) * context_tokens, context_tokens, block_tokens, held)


def split_ahead(
    rates: PlanRates,
    batch: int,
    context_tokens: int,
    block_tokens: int = 1,
    held: int | None = None,
    *,
    streamed: bool = False,
) -> KvprSplit:
    """The split where activations load ahead: link and gpu seconds of the whole step are equal.

    l = (b·s·μ + w - t_rest - fixed) / (b·(ψ + (1 - ρ)·μ)), clipped to [0, s], with t_rest the rest
    of the decoding step and w the weights' load if they are streamed. Arguments as `split_paper`.
    """

    def price(tokens: float) -> float:
        return max(decode_s(rates, batch, context_tokens, tokens, streamed=streamed))

    rho = rates.activation_ratio
    link_s, rest_s = decode_s(rates, batch, context_tokens, streamed=streamed)
    per_token_s = rates.project_token_s + (1.0 - rho) * rates.load_token_s
    balance = (link_s - rest_s - rates.project.fixed_s) / (batch * per_token_s) if rho < 1 else 0.0
    return _best(price, balance, context_tokens, block_tokens, held)


def _best(
    price: Callable[[float], float], at: float, context_tokens: int, block_tokens: int,
    held: int | None,
) -> KvprSplit:  # fmt: skip
    if context_tokens < 1 or block_tokens < 1:
        raise ValueError(
            f"context_tokens {context_tokens}, block_tokens {block_tokens}: give 1 or more"
        )
    most = context_tokens if held is None else max(0, min(context_tokens, held))
    step_s, tokens = best_1d(price, rounded([at], most, block_tokens))
    return KvprSplit(int(tokens), context_tokens, step_s, price(0))
