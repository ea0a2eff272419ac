"""What a split of a request's cached tokens costs: link seconds, gpu seconds, time to first token.

A request of S cached and T new tokens behind D tokens on the device is cut into l recomputed, a
from activations, and the rest loaded. Costs are polynomials of l and a, so that `kappa.plan.split`
can find the best split in closed form; the same costs price any other one. The two resources may
have a backlog, and layers form a pipeline: see `Costs.ttft_s`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kappa.cost import chunk_work
from kappa.plan.rates import PlanRates

Poly = tuple[float, float, float]
"""c0 + c1·x + c2·x²."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Seconds of queued work that a request finds on each resource."""

    link_s: float = 0.0
    gpu_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a backlog below zero.

        Raises:
            ValueError: names both figures.
        """
        if not (self.link_s >= 0 and self.gpu_s >= 0):
            raise ValueError(
                f"Backlog of {self.link_s} and {self.gpu_s} s: give seconds, 0 or more"
            )


IDLE = Backlog()


@dataclass(frozen=True, slots=True)
class Split:
    """How many cached tokens are recomputed and how many come from activations.

    `tail` puts the recomputed ones at the back. Fractional in closed forms, whole in plans.
    """

    recompute: float = 0.0
    activations: float = 0.0
    tail: bool = False


class Costs:
    """The costs of one request's splits on one node.

    Args:
        rates: the model on the node.
        cached_tokens: S, to bring back.
        new_tokens: T, to compute; at least one is.
        device_tokens: D, already in VRAM, before the cached ones.
        backlog: what link and gpu have to do first.

    Raises:
        ValueError: a negative count.
    """

    def __init__(
        self,
        rates: PlanRates,
        cached_tokens: float,
        new_tokens: float,
        device_tokens: float = 0.0,
        backlog: Backlog = IDLE,
    ) -> None:
        if min(cached_tokens, new_tokens, device_tokens) < 0:
            raise ValueError(
                f"cached {cached_tokens}, new {new_tokens}, device {device_tokens} tokens: "
                "give counts of 0 or more"
            )
        self.rates, self.backlog = rates, backlog
        self.cached, self.new, self.device = cached_tokens, max(1.0, new_tokens), device_tokens
        context = cached_tokens + device_tokens
        self.plain_s = rates.prefill_s(self.new, context)
        """t_gpu(T, S): gpu seconds with everything loaded."""
        # The grid's excess over the law at (T, S), and the fixed cost, go with every split.
        self._start_s = self.plain_s - rates.law_s(self.new, context) + rates.step.fixed_s
        self.floor_s = rates.step.parts(chunk_work(self.new, context)).read_s
        """Seconds of reading all weights and KV: below this no long step goes."""
        serial = rates.serial_share
        self.terms = (
            (backlog.gpu_s, 0.0, 1.0),
            (backlog.link_s, serial, 1.0),
            (backlog.link_s, 1.0, serial),
        )
        """The three terms of `ttft_s` as (backlog, factor of load, factor of compute)."""

    def flop_s(self, *, tail: bool = False) -> Poly:
        """FLOP seconds over the recomputed tokens x, without floor and projection.

        At the front x tokens attend to D device tokens and to themselves; at the back x + T
        tokens attend to all before them.
        """
        phi, alpha = self.rates.token_s, self.rates.pair_s
        context = self.cached + self.device
        start = self.rates.step.parts(chunk_work(self.new, context)).compute_s
        if tail:
            return (start, phi + alpha * context, -0.5 * alpha)
        return (start, phi + alpha * self.device, 0.5 * alpha)

    def load_s(self, split: Split) -> float:
        """Link seconds: KV of the tokens that are loaded, and activations."""
        loaded = self.cached - split.recompute - split.activations
        return self.rates.load.seconds(loaded + self.rates.activation_ratio * split.activations)

    def compute_s(self, split: Split) -> float:
        """Gpu seconds: the new tokens, the recomputed ones, and the projection.

        Experts that no token of the step touches are next to nothing from 100 tokens on: they are
        left out here, but not in the closed form, whose floor is that of all experts.
        """
        c0, c1, c2 = self.flop_s(tail=split.tail)
        flop_s = c0 + split.recompute * (c1 + split.recompute * c2)
        return (
            max(flop_s, self.floor_s - self.rates.idle_experts_s(self.new + split.recompute))
            + self._start_s
            + self.rates.project.seconds(split.activations)
        )

    def ttft_s(self, load_s: float, compute_s: float) -> float:
        """Seconds to the first token, of a pipeline over layers on two resources.

        A layer computes when its own load and the layer before are done, so the last to finish is
        one of three: the gpu with no wait; the gpu after the first layer's load; the last layer
        after the whole load. Without backlog this is max + (1 - overlap)·min, which for L layers
        is load/L + (L-1)/L·max + compute/L. A plan that loads nothing waits for no link.
        """
        if load_s <= 0:
            return self.backlog.gpu_s + compute_s
        return max(queue + u * load_s + v * compute_s for queue, u, v in self.terms)

    def of(self, split: Split) -> float:
        """Seconds to the first token under a split."""
        return self.ttft_s(self.load_s(split), self.compute_s(split))

    def pieces(self, *, tail: bool = False, activations: Poly = (0.0, 0.0, 0.0)) -> list[Poly]:
        """Gpu seconds along a line, as the polynomials whose larger one holds.

        Args:
            tail: recompute at the back.
            activations: tokens from activations along the same line.
        """
        project = [self.rates.project_token_s * c for c in activations]
        if activations != (0.0, 0.0, 0.0):
            project[0] += self.rates.project.fixed_s
        c0, c1, c2 = self.flop_s(tail=tail)
        start = self._start_s + project[0]
        return [
            (c0 + start, c1 + project[1], c2 + project[2]),
            (self.floor_s + start, project[1], project[2]),
        ]
