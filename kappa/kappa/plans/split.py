"""Splits of a request's cached tokens: the cost of each, and the best one in closed form.

A request of S cached and T new tokens behind D tokens on the device is cut into l recomputed, a
from activations, and the rest loaded. Seconds are polynomials of l and a of at most second degree
between break points, so the best split along a line is a break point, a stationary point, or where
two of the terms of the time to first token cross. These candidates are rounded to blocks both ways
and priced; no search, no step size. With perfect overlap and no floor the crossing is the positive
root of (α/2)·l² + (φ + μ)·l - (S·μ - t_gpu) = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from kappa.cost import StepWork, chunk_work
from kappa.plans.load_plan import LoadPlan, Segment, layout
from kappa.plans.rates import PlanRates

Poly = tuple[float, float, float]
"""c0 + c1·x + c2·x²."""


@dataclass(frozen=True, slots=True)
class Split:
    """Numbers of cached tokens that are recomputed, and that come from activations.

    `tail` puts the recomputed ones at the back. Fractional in closed forms, whole in plans.
    """

    recompute: float = 0.0
    activations: float = 0.0
    tail: bool = False


@dataclass(frozen=True, slots=True)
class Best:
    """A split and its predicted seconds to the first token."""

    split: Split
    ttft_s: float


class Costs:
    """The costs of one request's splits on one node: S cached tokens to bring back, T new ones to
    compute (at least one is), D on the device before the cached ones."""

    def __init__(
        self, rates: PlanRates, cached_tokens: float, new_tokens: float, device_tokens: float = 0.0
    ) -> None:
        self.rates = rates
        self.cached, self.new, self.device = cached_tokens, max(1.0, new_tokens), device_tokens
        context = cached_tokens + device_tokens
        self.plain_s = rates.prefill_s(self.new, context)
        """t_gpu(T, S): gpu seconds with everything loaded."""
        self._pairs, self._reads = chunk_work(self.new, context)[1:]
        # The grid's excess over the model at (T, S) goes with every split.
        self._start_s = self.plain_s - rates.modelled_prefill_s(self.new, context)
        self.terms = ((rates.serial_share, 1.0), (1.0, rates.serial_share))
        """(factor of load, factor of compute) of the two terms of `ttft_s`."""

    def _pairs_of(self, *, tail: bool) -> Poly:
        """Pairs of query and key over the recomputed tokens x.

        At the front x tokens attend to D device tokens and to themselves; at the back x + T
        tokens attend to all before them.
        """
        if tail:
            return (self._pairs, self.cached + self.device, -0.5)
        return (self._pairs, self.device, 0.5)

    def load_s(self, split: Split) -> float:
        """Link seconds: KV of the tokens that are loaded, and activations; before them the weights
        that cross at every step."""
        loaded = self.cached - split.recompute - split.activations
        loaded += self.rates.activation_ratio * split.activations
        return self.rates.weights_s + self.rates.load.seconds(loaded)

    @property
    def first_load_s(self) -> float:
        """Link seconds that no split changes, as long as something is loaded."""
        return self.rates.weights_s + self.rates.load.fixed_s

    def compute_s(self, split: Split) -> float:
        """Gpu seconds: the new tokens, the recomputed ones, and the projection.

        Experts that no token of the step touches are next to nothing from 100 tokens on: they are
        left out here, but not in the closed form, which has the floor of all experts.
        """
        c0, c1, c2 = self._pairs_of(tail=split.tail)
        x = split.recompute
        step_s = self.rates.step.work_s(StepWork(self.new + x, c0 + x * (c1 + x * c2), self._reads))
        return step_s + self._start_s + self.rates.project.seconds(split.activations)

    def ttft_s(self, load_s: float, compute_s: float) -> float:
        """Seconds to the first token: max + (1 - overlap)·min, of L layers
        load/L + (L-1)/L·max + compute/L.

        A layer computes when its own load and the layer before are done: last is the gpu after the
        first layer's load, or the last layer after all loads.
        """
        if load_s <= 0:
            return compute_s
        return max(u * load_s + v * compute_s for u, v in self.terms)

    def of(self, split: Split) -> float:
        """Seconds to the first token under a split."""
        return self.ttft_s(self.load_s(split), self.compute_s(split))

    def pieces(self, *, tail: bool = False, activations: Poly = (0.0, 0.0, 0.0)) -> list[Poly]:
        """Gpu seconds along a line: the larger of these polynomials.

        activations: tokens from activations along the same line.
        """
        a0, a1, a2 = (self.rates.project_token_s * c for c in activations)
        if activations != (0.0, 0.0, 0.0):
            a0 += self.rates.project.fixed_s
        step = self.rates.step
        weights_s, exposed = step.weights_s + step.experts_s, step.exposed
        start = self._start_s + a0 + step.fixed_s
        phi, comm = step.token_s, step.comm_token_s
        # The shorter of GEMMs and weight reads counts in part, so it is the larger of two lines.
        beside = (
            (self.new * phi + exposed * weights_s, phi),
            (weights_s + exposed * self.new * phi, exposed * phi),
        )
        p0, p1, p2 = (step.pair_s * each for each in self._pairs_of(tail=tail))
        attention = (p0, p1, p2), (step.context_token_s * self._reads, 0.0, 0.0)
        return [
            (start + self.new * comm + g0 + c0, a1 + comm + g1 + c1, a2 + c2)
            for g0, g1 in beside
            for c0, c1, c2 in attention
        ]

    def crossings(self, load: Poly, pieces: list[Poly]) -> list[float]:
        """Points along a line where the time to first token can have its minimum."""
        xs: list[float] = []
        for one, other in combinations(pieces, 2):
            xs += real_roots(_minus(one, other))
        for piece in pieces:
            terms = [
                (u * load[0] + v * piece[0], u * load[1] + v * piece[1], v * piece[2])
                for u, v in self.terms
            ]
            xs += [-c1 / (2.0 * c2) for _, c1, c2 in terms if c2]
            xs += real_roots(_minus(*terms))
        return xs

    def best(self, splits: Iterable[Split]) -> Best:
        """The split with the earliest first token, the first of equals."""
        return min((Best(split, self.of(split)) for split in splits), key=lambda one: one.ttft_s)


def best_prefix(costs: Costs, block_tokens: int = 0) -> Best:
    """Recompute the front [0, l), load the rest. `block_tokens` 0 leaves l fractional."""
    return _recompute(costs, block_tokens, tail=False)


def best_tail(costs: Costs, block_tokens: int = 0) -> Best:
    """Load the front, recompute the last r with the new tokens: what stock engines can do.

    Blocks count from the front, so S - r is a whole number of them.
    """
    return _recompute(costs, block_tokens, tail=True)


def _recompute(costs: Costs, block_tokens: int, *, tail: bool) -> Best:
    mu, cached = costs.rates.load_token_s, costs.cached
    load: Poly = (mu * cached + costs.first_load_s, -mu, 0.0)
    xs = costs.crossings(load, costs.pieces(tail=tail))
    xs = rounded(xs, cached, block_tokens, anchor=cached if tail else 0.0)
    return costs.best(Split(x, tail=tail and x > 0) for x in xs)


def best_activations(
    costs: Costs, block_tokens: int = 0, held_tokens: float | None = None, recompute: float = 0.0
) -> Best:
    """Take [l, l + a) from activations, load the rest; l is given.

    held_tokens: activations are held for this many leading tokens; None for all. `block_tokens` 0
    leaves a fractional.
    """
    rates, cached = costs.rates, costs.cached
    mu, rho = rates.load_token_s, rates.activation_ratio
    most = max(0.0, (cached if held_tokens is None else min(cached, held_tokens)) - recompute)
    load: Poly = (mu * (cached - recompute) + costs.first_load_s, -(1.0 - rho) * mu, 0.0)
    plain_s = costs.compute_s(Split(recompute))
    compute: Poly = (plain_s + rates.project.fixed_s, rates.project_token_s, 0.0)
    xs = rounded(costs.crossings(load, [compute]), most, block_tokens, anchor=-recompute)
    return costs.best(Split(recompute, a) for a in xs)


def best_mixed(costs: Costs, block_tokens: int = 0, held_tokens: float | None = None) -> Best:
    """Recompute [0, l), from activations [l, l + a), load the rest: the best of all three.

    Two exchange rates that do not depend on a leave no optimum inside: it lies where nothing is
    recomputed, where recomputing leaves the shelter of the reads' floor, where nothing comes from
    activations, or where everything held does that is not recomputed.
    """
    cached = costs.cached
    held = cached if held_tokens is None else min(cached, held_tokens)
    turns = [x for pair in combinations(costs.pieces(), 2) for x in real_roots(_minus(*pair))]
    fronts = rounded(turns, held, block_tokens)
    found = [best_prefix(costs, block_tokens)]
    found += [best_activations(costs, block_tokens, held, front) for front in fronts]
    mu, rho = costs.rates.load_token_s, costs.rates.activation_ratio
    load: Poly = (mu * (cached - held + rho * held) + costs.first_load_s, -mu * rho, 0.0)
    xs = costs.crossings(load, costs.pieces(activations=(held, -1.0, 0.0)))
    fronts = rounded(xs, held, block_tokens)
    found.append(costs.best(Split(front, held - front) for front in fronts))
    return min(found, key=lambda best: best.ttft_s)


def activations_refused(rates: PlanRates) -> str:
    """The reason why activations cannot pay on this node; empty if they can.

    They are on the lower hull of (link, gpu) seconds iff ψ < (1 - ρ)·φ: a gpu second spent on
    projection must save more link than one spent on recomputing.
    """
    rho = rates.activation_ratio
    most_s = (1.0 - rho) * rates.token_s
    if rho >= 1.0:
        why = (
            f"ρ = {rho:.3g}, a token's activations are no smaller than its "
            "KV, so they cost more bytes and more FLOPs"
        )
    elif rates.project_token_s >= most_s:
        why = (
            f"projecting takes ψ = {rates.project_token_s:.3g} s per token, "
            f"and recomputing saves as much link time from (1 - ρ)·φ = {most_s:.3g} s on"
        )
    else:
        return ""
    return f"activations refused: {why}; load (K) and recompute (R) would work"


def best_1d(price: Callable[[float], float], xs: Iterable[float]) -> tuple[float, float]:
    """(least price, the x that has it) of some candidates; the smallest x of equals."""
    return min((price(x), x) for x in xs)


def rounded(
    xs: Iterable[float], high: float, block_tokens: int, anchor: float = 0.0
) -> list[float]:
    """Candidates within [0, high], both neighbours in blocks of each, and the two ends.

    Block boundaries are where x - anchor is a multiple; without blocks candidates stay as they are.
    """
    inside = {0.0, high}
    for x in xs:
        near = [x]
        if block_tokens:
            blocks = math.floor((x - anchor) / block_tokens)
            near = [anchor + n * block_tokens for n in (blocks, blocks + 1)]
        inside.update(min(max(one, 0.0), high) for one in near)
    return sorted(inside)


def _minus(one: Poly, other: Poly) -> Poly:
    return (one[0] - other[0], one[1] - other[1], one[2] - other[2])


def real_roots(poly: Poly) -> list[float]:
    """The real roots of c0 + c1·x + c2·x², without cancellation between c1 and the square root."""
    c0, c1, c2 = poly
    if c2 == 0.0:
        return [-c0 / c1] if c1 else []
    inside = c1 * c1 - 4.0 * c2 * c0
    if inside < 0:
        return []
    q = -0.5 * (c1 + math.copysign(math.sqrt(inside), c1))
    return [root for root in ([q / c2] + ([c0 / q] if q else [])) if math.isfinite(root)]


def plan_of(costs: Costs, split: Split, why: str = "") -> LoadPlan:
    """The plan of a whole-token split, laid out R, A, K (or A, K, R at the tail)."""
    recompute, activations = int(split.recompute), int(split.activations)
    segments = layout(
        int(costs.cached), recompute=recompute, activations=activations, tail=split.tail
    )
    return predict(costs, segments, why)


def predict(costs: Costs, segments: Sequence[Segment], why: str = "as given") -> LoadPlan:
    """Price segments in any order that a `LoadPlan` allows.

    A run that stays in host memory (C) crosses the link once for the first token, as one of K does;
    what it costs later is `step_s`, which `kappa.plans.planners` adds.

    Raises:
        ValueError: segments that do not cover the cached tokens.
    """
    shape = LoadPlan(tuple(segments))
    if shape.cached_tokens != costs.cached:
        raise ValueError(
            f"segments cover {shape.cached_tokens} tokens of {costs.cached:g} cached ones: "
            "cover them all"
        )
    tail = len(segments) > 1 and segments[0].kind != "R" and segments[-1].kind == "R"
    split = Split(shape.tokens("R"), shape.tokens("A"), tail)
    load_s, compute_s = costs.load_s(split), costs.compute_s(split)
    loaded, rates = costs.cached - split.recompute - split.activations, costs.rates
    return replace(
        shape,
        ttft_s=costs.ttft_s(load_s, compute_s),
        # Of a step that waits for its weights, that is what computing takes.
        load_s=load_s - rates.weights_s,
        compute_s=max(compute_s, rates.weights_s),
        load_bytes=loaded * rates.kv_bytes + split.activations * rates.activation_bytes,
        why=why,
    )
