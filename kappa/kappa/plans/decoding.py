"""Splits of a decoding step over KV in host memory between link, device and CPU.

KVPR (I/O-aware partial KV recomputation, Eq. 6-12) loads the activations of [0, l), then projects
them while the KV of [l, s) loads: `split_paper`; `split_ahead` is for an engine that loads the next
layer's activations early, and counts the rest of the step. Paper 002 lets the CPU attend to part of
the context while the rest is loaded, both merged by log-sum-exp: `split_context`. All splits are
closed forms, rounded to blocks both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kappa.plans.rates import LineFit, PlanRates
from kappa.plans.split import best_1d, rounded


@dataclass(frozen=True, slots=True)
class StepSplit:
    """`tokens` of a sequence's context come from activations, or stay with the CPU; others load.

    Seconds of a step over all layers: with the split, where all is loaded, and where none is. They
    are those of the planner's own model: `split_paper` leaves out all but the KV.
    """

    tokens: int
    context_tokens: int
    step_s: float
    load_all_s: float
    load_none_s: float

    @property
    def share(self) -> float:
        return self.tokens / self.context_tokens


def _best(price: Callable[[float], float], xs: list[float], context_tokens: int) -> StepSplit:
    step_s, tokens = best_1d(price, xs)
    return StepSplit(int(tokens), context_tokens, step_s, price(0), price(context_tokens))


# --- Activations ---------------------------------------------------------------------------------


def activation_share(rates: PlanRates) -> float:
    """l*/s of KVPR's Eq. 12 in closed form: 1 / (1 + ψ/μ), which for MHA is 1 / (1 + h·B/G).

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
    rates: PlanRates, batch: int, context_tokens: int, block_tokens: int = 1,
    held: int | None = None,
) -> StepSplit:  # fmt: skip
    """Eq. 12, solved: `activation_share` of s, within what activations are held for.

    Args:
        rates: the model on the node.
        batch: sequences of the same length; they change the seconds only.
        context_tokens: s.
        block_tokens: l is a multiple of this, or an end.
        held: activations are held for this many leading tokens; None for all.
    """

    def price(tokens: float) -> float:
        return paper_s(rates, batch, context_tokens, tokens)

    at = activation_share(rates) * context_tokens
    most = context_tokens if held is None else max(0, min(context_tokens, held))
    return _best(price, rounded([at], float(most), block_tokens), context_tokens)


def split_ahead(
    rates: PlanRates, batch: int, context_tokens: int, block_tokens: int = 1
) -> StepSplit:
    """The split where activations load ahead: link and gpu seconds of the whole step are equal.

    l = (b·s·μ - t_rest - fixed) / (b·(ψ + (1 - ρ)·μ)), clipped to [0, s], with t_rest the rest of
    the decoding step; slopes and fixed cost are those of the step as measured. Arguments as
    `split_paper`.
    """

    def price(tokens: float) -> float:
        return max(rates.decode_s(batch, context_tokens, tokens))

    balance = 0.0
    if rates.activation_ratio < 1.0 and context_tokens:
        # By how much the link takes longer with half from activations, and with all: a line.
        both = (rates.decode_s(batch, context_tokens, u * context_tokens) for u in (0.5, 1.0))
        half_s, all_s = (link_s - gpu_s for link_s, gpu_s in both)
        falls_s = 2.0 * (half_s - all_s)
        balance = context_tokens * (falls_s + all_s) / falls_s if falls_s > 0 else 0.0
    return _best(price, rounded([balance], float(context_tokens), block_tokens), context_tokens)


# --- Attention on the CPU ------------------------------------------------------------------------

LEAST_SHARE = 0.3
"""The CPU must attend to KV at this share of the link's bandwidth, or it does not attend."""


def attention_refused(rates: PlanRates) -> str:
    """The reason why the CPU does not attend on this node; empty if it does: B_c reaches 0.3 B."""
    if rates.attend is None:
        return (
            "CPU attention refused: it is not measured here; give the engine threads for it "
            "(cpu_threads), load (K) works in any case"
        )
    share = rates.attend_bytes_per_s / rates.h2d_bytes_per_s
    if share < LEAST_SHARE:
        return (
            f"CPU attention refused: it reads {rates.attend_bytes_per_s:.3g} B/s of KV, "
            f"{share:.2f} of what the link carries, and pays from {LEAST_SHARE:g} on; "
            "more threads, or load (K), would work"
        )
    return ""


def _attend(rates: PlanRates) -> LineFit:
    if rates.attend is None:
        raise ValueError(
            f"{rates.name}: CPU attention is not measured: profile with threads for it"
        )
    return rates.attend


def cpu_share(rates: PlanRates) -> float:
    """c* = B_c / (B_c + B'): both take equally long, nothing else counted; `ValueError`, here and
    below, if CPU attention is not measured."""
    busy = rates.attending()
    return busy.load_token_s / (busy.load_token_s + _attend(busy).per_token_s)


def split_s(rates: PlanRates, batch: int, context_tokens: int, cpu_tokens: float) -> float:
    """Seconds of a decoding step of sequences that each leave `cpu_tokens` of context to the CPU.

    Loads run ahead of the layers; in each layer the CPU's share waits for the queries, and the
    output for the CPU: so the link alone, or device and CPU one after the other, whichever takes
    longer. What the device attends to shrinks with its share.
    """
    busy = rates.attending() if 0 < cpu_tokens < context_tokens else rates
    none_s, all_s = (rates.decode_s(batch, s)[1] for s in (0, context_tokens))
    share = cpu_tokens / context_tokens if context_tokens else 0.0
    gpu_s = all_s - share * (all_s - none_s)
    cpu_s = batch * _attend(busy).seconds(cpu_tokens)
    link_s = busy.weights_s + busy.load.seconds(batch * (context_tokens - cpu_tokens))
    return max(link_s, gpu_s + cpu_s)


def split_context(
    rates: PlanRates, batch: int, context_tokens: int, block_tokens: int = 1
) -> StepSplit:
    """The split of `batch` equal contexts with the shortest step: link, and device and CPU, take
    equally long; the CPU attends to whole blocks.

    With a_c, μ' the seconds per token of CPU and link while both are busy, and g the device's
    seconds: b·(c·s·a_c + F_c) + g(c) = b·(1 - c)·s·μ' + F_l, linear in c. An end is taken where
    that is better: there one of the two is left alone, and pays no fixed cost.
    """

    def price(tokens: float) -> float:
        return split_s(rates, batch, context_tokens, tokens)

    busy = rates.attending()
    attend = _attend(busy)
    none_s, all_s = (rates.decode_s(batch, s)[1] for s in (0, context_tokens))
    lead_s = busy.weights_s + busy.load.seconds(batch * context_tokens) - all_s
    lead_s -= batch * attend.fixed_s
    each_s = batch * (attend.per_token_s + busy.load_token_s)
    each_s -= (all_s - none_s) / max(context_tokens, 1)
    balance = lead_s / each_s if each_s > 0 else float(context_tokens)
    return _best(price, rounded([balance], float(context_tokens), block_tokens), context_tokens)
