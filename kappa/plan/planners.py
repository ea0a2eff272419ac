"""Planners by name, as engine and router ask them: what is cached and new in, a load plan out.

"auto" takes the earliest predicted first token; "kv" loads all as KV; "kvpr" splits as paper 000;
"hybrid" takes activations wherever they are held (paper 003); "recompute" loads nothing; "tail"
loads the front and computes the back anew where that is earlier, all that vLLM can be told; "cpu"
leaves all in host memory (C), as "auto" does with what exceeds a request's room on the device.
Without rates, "auto" and "tail" load all, "kvpr" is refused, and no seconds are predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from kappa.plan.choose import LEAST_GAIN, choose
from kappa.plan.costs import Costs
from kappa.plan.cpu_offload import attention_refused, split_context, split_s
from kappa.plan.kvpr import split_paper
from kappa.plan.predict import predict
from kappa.plan.rates import PlanRates
from kappa.plan.segments import Kind, LoadPlan, Segment, from_runs, layout
from kappa.types import TokenCounts

LEAST_TAIL_GAIN = 0.05
"""As `choose.LEAST_GAIN`, for vLLM: its loads are noticed, and its steps begin, when they do."""


class Cached(NamedTuple):
    """A request whose prefix host memory has, in tokens.

    cached: to bring back, behind `device` that are there; new: to compute behind them; held: of
    the cached ones, how many from the front on have their activations in host memory. room: of
    them, how many may take device memory; None: all.
    """

    cached: int
    new: int
    device: int = 0
    held: int = 0
    room: int | None = None


_PLAIN: frozenset[Kind] = frozenset(("K", "R"))
_EXACT: frozenset[Kind] = _PLAIN | {"A"}
_NEEDS = {
    "kvpr": " (it needs rates: measure this node)",
    "cpu": " (it needs threads for attention: give the engine cpu_threads)",
}

# To a plan that covers the cached tokens.
Planner = Callable[[Cached], LoadPlan]


def room_left(room_tokens: int, device: int, new: int) -> int:
    """Of cached tokens, how many may take device memory, where a request may take `room_tokens`
    and has `device` tokens there and `new` ones to compute."""
    return max(0, room_tokens - device - new)


def fixed(recompute: int = 0, activations: int = 0, *, tail: bool = False) -> Planner:
    """A planner that always splits so, as far as there are so many cached tokens.

    For experiments: recompute, activations: tokens; the rest is loaded as KV. Cut at blocks, and
    what host memory does not have as asked comes as it is there.

    Raises:
        ValueError: a count below zero.
    """
    if min(recompute, activations) < 0:
        raise ValueError(
            f"a fixed plan of {recompute} recomputed tokens and {activations} from activations: "
            "give 0 or more of each"
        )

    def plan(asked: Cached) -> LoadPlan:
        first = min(recompute, asked.cached)
        second = min(activations, asked.cached - first)
        segments = layout(asked.cached, recompute=first, activations=second, tail=tail)
        return LoadPlan(segments, why="as the request asked")

    return plan


class Planning:
    """The planners of one engine.

    Args:
        block_tokens: plans are cut at multiples of this.
        rates: the model on this node, or None.
        activations: whether the model's activations can be used at all.
        cpu: whether the engine can attend to host memory on the CPU.
    """

    def __init__(
        self,
        block_tokens: int,
        rates: PlanRates | None = None,
        *,
        activations: bool = True,
        cpu: bool = False,
    ) -> None:
        self.rates = rates
        self._block_tokens = block_tokens
        self._kinds = _EXACT if activations else _PLAIN
        self._planners: dict[str, Planner] = {
            "auto": self._auto, "kv": self._kv, "hybrid": self._hybrid,
            "recompute": self._recompute, "tail": self._tail,
        }  # fmt: skip
        self.cpu = cpu
        if cpu:
            self._planners["cpu"] = self._all_on_cpu
        if rates is not None:
            self._planners["kvpr"] = self._kvpr

    @property
    def names(self) -> tuple[str, ...]:
        """Of the planners that there are."""
        return tuple(self._planners)

    def named(self, name: str) -> Planner:
        """The planner of that name.

        Raises:
            ValueError: there is none; says which there are.
        """
        planner = self._planners.get(name)
        if planner is None:
            needs = _NEEDS.get(name, "")
            raise ValueError(
                f"there is no planner {name!r} here{needs}: choose one of {', '.join(self.names)}"
            )
        return planner

    def check(self, planner: str | Planner | None) -> None:
        """Raise `ValueError` if it is a name that no planner has."""
        if isinstance(planner, str):
            self.named(planner)

    def priced(self, asked: Cached, segments: tuple[Segment, ...], why: str) -> LoadPlan:
        """The plan of these segments, which cover the cached tokens, with what it will take."""
        if self.rates is None:
            return LoadPlan(segments, why=why)
        plan = predict(self._costs(asked), segments, why)
        kept = plan.tokens("C")
        if not kept or self.rates.attend is None:
            return plan
        on_cpu = self.on_cpu(kept)
        return replace(plan, step_s=split_s(self.rates, 1, kept, on_cpu))

    def on_cpu(self, kept_tokens: int) -> int:
        """Of the tokens that stay in host memory, those that the CPU attends to as a request
        decodes; the rest crosses at every step. All of them, where no rates are known."""
        if self.rates is None or self.rates.attend is None or not kept_tokens:
            return kept_tokens
        return split_context(self.rates, 1, kept_tokens, self._block_tokens).cpu_tokens

    def without_load(self, new: int, device: int) -> LoadPlan:
        """What a request takes that has nothing to bring back."""
        return self.priced(Cached(0, new, device), (), "nothing is cached, or nothing is loaded")

    def _costs(self, asked: Cached) -> Costs:
        assert self.rates is not None
        return Costs(self.rates, asked.cached, asked.new, asked.device)

    def _auto(self, asked: Cached) -> LoadPlan:
        if asked.room is not None and asked.cached > asked.room and self.cpu and self.rates:
            refused = attention_refused(self.rates)
            if not refused:
                beyond = -(-(asked.cached - asked.room) // self._block_tokens) * self._block_tokens
                why = f"{asked.room} of {asked.cached} cached tokens have room on the device"
                return self._kept(asked, min(beyond, asked.cached), why)
        return self._chosen(asked, self._kinds)

    def _all_on_cpu(self, asked: Cached) -> LoadPlan:
        return self._kept(asked, asked.cached, "all stays in host memory, as set")

    def _kept(self, asked: Cached, tokens: int, why: str) -> LoadPlan:
        segments = from_runs([("C", tokens), ("K", asked.cached - tokens)])
        return self.priced(asked, segments, why)

    def _tail(self, asked: Cached) -> LoadPlan:
        return self._chosen(asked, _PLAIN, tail_only=True)

    def _chosen(
        self, asked: Cached, kinds: frozenset[Kind], *, tail_only: bool = False
    ) -> LoadPlan:
        if self.rates is None:
            return self.priced(asked, layout(asked.cached), "no rates are known: all is loaded")
        return choose(
            self.rates,
            TokenCounts(asked.device, asked.cached, asked.new),
            kinds=kinds,
            block_tokens=self._block_tokens,
            held_tokens=asked.held,
            tail_only=tail_only,
            least_gain=LEAST_TAIL_GAIN if tail_only else LEAST_GAIN,
        )

    def _kv(self, asked: Cached) -> LoadPlan:
        return self.priced(asked, layout(asked.cached), "all is loaded, as set")

    def _recompute(self, asked: Cached) -> LoadPlan:
        segments = layout(asked.cached, recompute=asked.cached)
        return self.priced(asked, segments, "nothing is loaded, as set")

    def _hybrid(self, asked: Cached) -> LoadPlan:
        segments = layout(asked.cached, activations=asked.cached if "A" in self._kinds else 0)
        return self.priced(asked, segments, "activations wherever they are held, as set")

    def _kvpr(self, asked: Cached) -> LoadPlan:
        assert self.rates is not None
        held = asked.held if "A" in self._kinds else 0
        split = split_paper(self.rates, 1, asked.cached, self._block_tokens, held)
        segments = layout(asked.cached, activations=split.tokens)
        return self.priced(asked, segments, "the split of KVPR (Eq. 12), as set")
