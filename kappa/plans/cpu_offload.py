"""Where the CPU computes while the link carries: whose attention, how many FC1 columns, which keys.

Paper 002 streams weights: the CPU computes a layer's attention from KV in host memory while the
feed-forward weights cross, and, time permitting, some columns of the first of them. `plan_layer`
is its choice, `alpha_star` its split. With the weights on the device and KV in host memory the same
overlap is a split of the context (`split_context`): the CPU attends to part of it while the rest
is loaded, and both are merged by log-sum-exp. All splits are closed forms, rounded both ways.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from kappa.checks import check_not_negative, check_positive
from kappa.plans.rates import LineFit, PlanRates, decode_s
from kappa.plans.split import best_1d, rounded

Mode = Literal["mha", "mha-o", "mha-av-o"]
"""What the CPU computes of a layer's attention: all, all but the output projection, or neither that
nor the product with the values."""

MODES: tuple[Mode, ...] = ("mha", "mha-o", "mha-av-o")

LEAST_SHARE = 0.3
"""The CPU must attend to KV at this share of the link's bandwidth, or it does not attend."""


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """One layer's decoding step of a batch: seconds of the CPU's parts, bytes of the link's.

    project_s: norm, Q, K and V; scores_s: softmax of queries by keys; values_s: times the values;
    out_s: output projection; fc1_s: the first feed-forward product, all columns. `*_bytes`: the
    weights of each, and the batch's values in host memory. link_bytes_per_s: while the CPU
    computes. gpu_s: what the device computes when both have arrived, gpu_fc1_s: of FC1, all of it.
    """

    project_s: float
    scores_s: float
    values_s: float
    out_s: float
    fc1_s: float
    qkv_bytes: float
    out_bytes: float
    fc1_bytes: float
    fc2_bytes: float
    values_bytes: float
    link_bytes_per_s: float
    gpu_s: float = 0.0
    gpu_fc1_s: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(self, *(field.name for field in fields(self)))
        check_positive(self, "link_bytes_per_s")

    def cpu_s(self, mode: Mode, alpha: float = 0.0) -> float:
        """Seconds of the CPU; `alpha` of the FC1 columns only where it computes all attention."""
        seconds = self.project_s + self.scores_s
        if mode != "mha-av-o":
            seconds += self.values_s
        if mode == "mha":
            seconds += self.out_s + alpha * self.fc1_s
        return seconds

    def link_bytes(self, mode: Mode, alpha: float = 0.0) -> float:
        """Bytes that cross for the layer."""
        moved = (1.0 - (alpha if mode == "mha" else 0.0)) * self.fc1_bytes + self.fc2_bytes
        if mode != "mha":
            moved += self.out_bytes
        if mode == "mha-av-o":
            moved += self.values_bytes
        return moved

    def link_s(self, mode: Mode, alpha: float = 0.0) -> float:
        return self.link_bytes(mode, alpha) / self.link_bytes_per_s

    def layer_s(self, mode: Mode, alpha: float = 0.0) -> float:
        """Seconds of the layer: the link runs ahead, CPU and device follow each other."""
        left = 1.0 - (alpha if mode == "mha" else 0.0)
        computed_s = self.cpu_s(mode, alpha) + self.gpu_s + left * self.gpu_fc1_s
        return max(computed_s, self.link_s(mode, alpha))


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """columns: of FC1, computed on the CPU. Seconds are of one layer."""

    mode: Mode
    columns: int
    alpha: float
    cpu_s: float
    link_s: float
    layer_s: float


def alpha_star(times: LayerTimes) -> float:
    """The share of FC1's columns at which CPU (and device) and link take equally long, in [0, 1].

    (W_ffn/B - t_mha) / (W_1/B + t_fc1), what the device computes counted beside; the paper draws it
    (Fig. 4) and gives no formula.
    """
    spare_s = times.link_s("mha") - times.cpu_s("mha") - times.gpu_s - times.gpu_fc1_s
    each_s = times.fc1_bytes / times.link_bytes_per_s + times.fc1_s - times.gpu_fc1_s
    if each_s <= 0:
        return 1.0 if times.fc1_bytes or times.fc1_s else 0.0
    return min(1.0, max(0.0, spare_s / each_s))


def plan_layer(times: LayerTimes, columns: int, multiple: int = 1) -> LayerPlan:
    """The mode, and of the full one the split, with the shortest layer; of equals the fuller mode.

    Args:
        times: of the batch at its length.
        columns: of FC1.
        multiple: columns are moved in multiples of this.

    Raises:
        ValueError: no column, or multiples of none.
    """
    if columns < 1 or multiple < 1:
        raise ValueError(f"columns {columns}, multiple {multiple}: give 1 or more")

    def planned(mode: Mode, moved: int = 0) -> LayerPlan:
        alpha = moved / columns
        cpu_s, link_s = times.cpu_s(mode, alpha), times.link_s(mode, alpha)
        return LayerPlan(mode, moved, alpha, cpu_s, link_s, times.layer_s(mode, alpha))

    at = rounded([alpha_star(times) * columns], float(columns), multiple)
    _, moved = best_1d(lambda moved: times.layer_s("mha", moved / columns), at)
    plans = [planned("mha", int(moved)), *(planned(mode) for mode in MODES[1:])]
    return min(plans, key=lambda plan: plan.layer_s)


@dataclass(frozen=True, slots=True)
class ContextSplit:
    """Of s tokens of a sequence, those that the CPU attends to; the rest is loaded every step.

    Seconds are of a decoding step over all layers: with the split, loading all, and attending to
    all on the CPU.
    """

    cpu_tokens: int
    context_tokens: int
    step_s: float
    load_all_s: float
    cpu_all_s: float

    @property
    def share(self) -> float:
        return self.cpu_tokens / self.context_tokens


def attention_refused(rates: PlanRates) -> str:
    """Why the CPU is not to attend on this node, or "" where it is: B_c must reach 0.3 B."""
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


def paper_share(rates: PlanRates) -> float:
    """c* = B_c / (B_c + B'): both take equally long, nothing else counted.

    Raises:
        ValueError: CPU attention is not measured.
    """
    busy = rates.attending()
    cpu_s = _attend(busy).per_token_s
    return busy.load_token_s / (busy.load_token_s + cpu_s)


def split_s(rates: PlanRates, batch: int, context_tokens: int, cpu_tokens: float) -> float:
    """Seconds of a decoding step whose sequences each leave `cpu_tokens` of context to the CPU.

    Loads run ahead of the layers; in each layer the CPU's share waits for the queries, and the
    output for the CPU: so the link alone, or device and CPU one after the other, whichever takes
    longer. What the device attends to shrinks with its share.

    Raises:
        ValueError: no sequence, more on the CPU than there is, or CPU attention not measured.
    """
    if not 0 <= cpu_tokens <= context_tokens:
        raise ValueError(f"{cpu_tokens} tokens on the CPU of {context_tokens}: give no more")
    busy = rates.attending() if 0 < cpu_tokens < context_tokens else rates
    none_s, all_s = (decode_s(rates, batch, s)[1] for s in (0, context_tokens))
    share = cpu_tokens / context_tokens if context_tokens else 0.0
    gpu_s = all_s - share * (all_s - none_s)
    cpu_s = _attend(busy).seconds(batch * cpu_tokens) if cpu_tokens else 0.0
    return max(busy.load.seconds(batch * (context_tokens - cpu_tokens)), gpu_s + cpu_s)


def split_context(
    rates: PlanRates, batch: int, context_tokens: int, block_tokens: int = 1
) -> ContextSplit:
    """The split with the shortest step: link, and device and CPU, take equally long.

    With a_c, μ' the seconds per token of CPU and link while both are busy, and g the device's
    seconds: b·c·s·a_c + F_c + g(c) = b·(1 - c)·s·μ' + F_l, linear in c. An end is taken where that
    is better: there one of the two is left alone, and pays no fixed cost.

    Args:
        rates: with `attend`.
        batch: sequences of the same length.
        context_tokens: s.
        block_tokens: the CPU attends to whole blocks.

    Raises:
        ValueError: nothing to split, or CPU attention is not measured.
    """
    if context_tokens < 1 or block_tokens < 1:
        raise ValueError(
            f"context_tokens {context_tokens}, block_tokens {block_tokens}: give 1 or more"
        )
    busy = rates.attending()
    attend = _attend(busy)
    none_s, all_s = (decode_s(rates, batch, s)[1] for s in (0, context_tokens))
    lead_s = busy.load.seconds(batch * context_tokens) - all_s - attend.fixed_s
    each_s = batch * (attend.per_token_s + busy.load_token_s)
    each_s -= (all_s - none_s) / context_tokens
    balance = lead_s / each_s if each_s > 0 else float(context_tokens)

    def price(tokens: float) -> float:
        return split_s(rates, batch, context_tokens, tokens)

    step_s, tokens = best_1d(price, rounded([balance], float(context_tokens), block_tokens))
    return ContextSplit(int(tokens), context_tokens, step_s, price(0), price(context_tokens))


def _attend(rates: PlanRates) -> LineFit:
    if rates.attend is None:
        raise ValueError(
            f"{rates.name}: CPU attention is not measured: profile with threads for it"
        )
    return rates.attend
