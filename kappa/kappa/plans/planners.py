"""Load plans of requests: the best of all kinds, and planners by name.

Engine and router ask `Planning`: cached and new tokens in, a load plan out. "auto" takes the
earliest predicted first token; "kv" loads all as KV; "kvpr" splits as paper 000; "hybrid" takes
activations wherever they are held (paper 003); "recompute" loads nothing; "tail" loads the front
and recomputes the back where that is earlier, all that vLLM can be made to do; "cpu" leaves all
in host memory (C), as "auto" does with what exceeds a request's room on the device. Without rates,
"auto" and "tail" load all, "kvpr" is refused, and no seconds are predicted. `alternatives` is what
`kappa explain` prints.

Planners called "host-*" leave all of a request's context in host memory while it runs, its answer
too: "host-kv" loads KV at every step, "host-kvpr" by KVPR's split (paper 000) of KV and activations
that are both there, "host-hybrid" blocks that are there as one or the other (paper 003);
"host-auto" does so with what exceeds a request's room on the device; "host-weights" is "host-kv"
where weights are in host memory, too (FlexGen's schedule), with which the others are compared;
"host-cpu" leaves attention, its projections and a share of FC1 to the CPU then (paper 002). A pool
has those that its own planner has stored for (`host_planners`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from kappa.cost import TokenCounts, least_ratio
from kappa.plans.cpu_offload import Division, busy_s, divide, layer_times
from kappa.plans.decoding import attention_refused, split_ahead, split_context, split_paper, split_s
from kappa.plans.load_plan import Kind, LoadPlan, Segment, from_runs, layout
from kappa.plans.rates import LEAST_GAIN, PlanRates
from kappa.plans.split import (
    Best,
    Costs,
    Split,
    activations_refused,
    best_activations,
    best_mixed,
    best_prefix,
    best_tail,
    plan_of,
    predict,
)

Policy = Literal["load", "recompute", "tail", "activations", "mixed", "auto"]
"""What a node may do with cached tokens: load; recompute the front, or the back, too; use
activations, too; both; or the best of these."""

_SOLVERS: dict[str, Callable[[Costs, int], Best]] = {
    "load": lambda costs, _: costs.best([Split()]),
    "recompute": best_prefix,
    "tail": best_tail,
    "activations": best_activations,
    "mixed": best_mixed,
}

# The same for vLLM: its loads are noticed, and its steps begin, when they do.
_LEAST_TAIL_GAIN = 0.05

PLAIN: frozenset[Kind] = frozenset({"K", "R"})
EXACT: frozenset[Kind] = PLAIN | {"A"}


def choose(
    costs: Costs, *, kinds: Set[Kind] = EXACT, block_tokens: int = 16,
    held_tokens: int | None = None, tail_only: bool = False, least_gain: float = LEAST_GAIN,
) -> LoadPlan:  # fmt: skip
    """The plan with the earliest predicted first token.

    Args:
        costs: the request on the node.
        kinds: what architecture and engine allow (`kappa.plans.architecture`); K is always meant.
        block_tokens: plans cut at multiples of this.
        held_tokens: activations are held for this many leading cached tokens; None for all.
        tail_only: the engine can recompute the back of the cached run alone (stock vLLM).
        least_gain: see `LEAST_GAIN`.
    """
    plain = costs.best([Split()])
    found, notes = [plain], []
    if costs.cached:
        activations = "A" in kinds and held_tokens != 0
        if activations and (refused := activations_refused(costs.rates)):
            notes.append(refused)
            activations = False
        if activations and "R" in kinds and not tail_only:
            found.append(best_mixed(costs, block_tokens, held_tokens))
        else:
            if activations:
                found.append(best_activations(costs, block_tokens, held_tokens))
            if "R" in kinds:
                found.append((best_tail if tail_only else best_prefix)(costs, block_tokens))
    best = min(found, key=lambda one: one.ttft_s)
    gain = 1.0 - best.ttft_s / plain.ttft_s if plain.ttft_s > 0 else 0.0
    if best.split != plain.split and gain < least_gain:
        notes.insert(0, f"the best other plan gains {gain:.1%}, less than {least_gain:.1%}")
        best = plain
    load_s, compute_s = costs.load_s(best.split), costs.compute_s(best.split)
    waits = "link" if load_s > compute_s else "gpu"
    reasons = [f"the {waits} is the longer ({load_s:.4g} s link, {compute_s:.4g} s gpu)"]
    if best.ttft_s < plain.ttft_s:
        reasons.append(f"plain loading would take {plain.ttft_s:.4g} s, this {best.ttft_s:.4g} s")
    return plan_of(costs, best.split, "; ".join(reasons + notes))


def policy_ttft_s(costs: Costs, policy: Policy, block_tokens: int = 0) -> float:
    """Predicted seconds to the first token where the node always plans by `policy`; `ValueError` if
    it is not known. Activations are held wherever it uses them; "auto" does without if they cannot
    pay."""
    if policy == "auto":
        policy = "recompute" if activations_refused(costs.rates) else "mixed"
    if policy not in _SOLVERS:
        raise ValueError(f"policy is {policy!r}: use auto, or one of {', '.join(_SOLVERS)}")
    return _SOLVERS[policy](costs, block_tokens).ttft_s


def kappa_eff(rates: PlanRates, policy: Policy, new_tokens: float) -> float:
    """The least κ at which predicted TTFT reaches twice the gpu time of computing the new tokens,
    as `kappa.cost.least_ratio` has it.

    κ0 where loading comes first, 2κ0 where it overlaps, 2κ0 + 1 where the front is recomputed. The
    gpu time is that of the same request with everything loaded, t_gpu(T, S).
    """
    new_tokens = max(1.0, new_tokens)

    def bound(ratio: float) -> bool:
        costs = Costs(rates, ratio * new_tokens, new_tokens)
        return policy_ttft_s(costs, policy) >= 2.0 * max(costs.plain_s, rates.weights_s)

    return least_ratio(bound)


class Cached(NamedTuple):
    """The tokens of a request with a prefix in host memory."""

    # To bring back, behind `device` tokens that are on the device.
    cached: int
    # To compute behind them.
    new: int
    device: int = 0
    # Leading cached tokens with activations in host memory.
    held: int = 0
    # Cached tokens that may take device memory; None: all.
    room: int | None = None


Planner = Callable[[Cached], LoadPlan]
"""Makes a plan that covers the cached tokens."""

_NEEDS = {
    "kvpr": " (it needs rates: measure this node)",
    "cpu": " (it needs threads for attention: give the engine cpu_threads)",
    "host-kvpr": " (it needs KV and activations of every block: set the pool's planner to it)",
    "host-hybrid": " (it needs activations instead of KV: set the pool's planner to it)",
    "host-kv": " (it needs a pool whose planner is host-kv, host-kvpr or host-auto)",
    "host-auto": " (it needs a pool whose planner is one of host-*)",
    "host-weights": " (it needs weights in host memory: set the pool's planner to it)",
    "host-cpu": " (it needs weights in host memory: set the pool's planner to it)",
}
HOST_AUTO = "host-auto"


def host_planners(planner: str, act_share: float) -> tuple[str, ...]:
    """Planners of a pool that leave contexts in host memory, the best one last.

    planner: the pool's; act_share: share of the stored blocks with activations.
    """
    if not planner.startswith("host-"):
        return ()
    if planner == "host-hybrid":
        return HOST_AUTO, planner
    if planner in ("host-weights", "host-cpu"):
        return HOST_AUTO, "host-kv", planner
    both = planner == "host-kvpr" or (planner == HOST_AUTO and act_share > 0)
    return (HOST_AUTO, "host-kv", "host-kvpr") if both else (HOST_AUTO, "host-kv")


def room_left(room_tokens: int, device: int, new: int) -> int:
    """Cached tokens that may take device memory: a request has room for `room_tokens`, `device`
    tokens are there already, and `new` ones are to be computed."""
    return max(0, room_tokens - device - new)


class Planning:
    """The planners of one engine.

    Args:
        block_tokens: plans are cut at multiples of this.
        rates: the model on this node; None: not known.
        activations: the model's activations can be used.
        cpu: the CPU can attend to KV in host memory.
        host: planners that leave contexts in host memory (`host_planners`).
    """

    def __init__(
        self, block_tokens: int, rates: PlanRates | None = None, *, activations: bool = True,
        cpu: bool = False, host: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.rates, self.cpu = rates, cpu
        self._block_tokens = block_tokens
        self._kinds = EXACT if activations else PLAIN
        self._planners: dict[str, Planner] = {
            "auto": self._auto, "kv": self._kv, "hybrid": self._hybrid,
            "recompute": self._recompute, "tail": self._tail,
        }  # fmt: skip
        if cpu:
            self._planners["cpu"] = self._all_on_cpu
        if rates is not None:
            self._planners["kvpr"] = self._kvpr
        self._host = tuple(host)
        self._planners |= dict.fromkeys(self._host, self._stays)
        if host:
            self._planners[HOST_AUTO] = self._chosen

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._planners)

    def named(self, name: str) -> Planner:
        """The planner of that name; ValueError if there is none, with those that there are."""
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

    def priced(self, request: Cached, segments: tuple[Segment, ...], why: str) -> LoadPlan:
        """The plan of segments that cover the cached tokens, with its predicted seconds."""
        if self.rates is None:
            return LoadPlan(segments, why=why)
        plan = predict(_costs(self.rates, request), segments, why)
        kept = plan.tokens("C")
        if not kept or self.rates.attend is None:
            return plan
        return replace(plan, step_s=split_s(self.rates, 1, kept, self.on_cpu(kept)))

    def resides(self, planner: str | Planner, tokens: int, room_tokens: int) -> str:
        """The planner by which a request of `tokens` tokens leaves its context in host memory;
        empty: it does not. room_tokens: bound on its device tokens under "host-auto"."""
        if not isinstance(planner, str) or planner not in self._host:
            return ""
        if planner == HOST_AUTO:
            return self._host[-1] if tokens > room_tokens else ""
        return planner

    def split_share(self, batch: int, context_tokens: int) -> float:
        """The share of a context that comes from activations, at a step of `batch` contexts that
        are in host memory as KV and as activations."""
        if self.rates is None or "A" not in self._kinds or context_tokens < 1:
            return 0.0
        return split_ahead(self.rates, batch, context_tokens).share

    def division(self, batch: int, context_tokens: int) -> Division:
        """What the CPU computes of a step of `batch` contexts in host memory besides attention;
        where its products are not measured, those of attention."""
        if self.rates is None or self.rates.multiply is None or self.rates.attend is None:
            return Division(("qkv", "out"))
        return divide(layer_times(self.rates, batch, context_tokens))

    def on_cpu(self, kept_tokens: int) -> int:
        """Tokens that the CPU attends to as a request decodes, of `kept_tokens` in host memory; the
        rest crosses the link at every step. All of them where no rates are known."""
        if self.rates is None or self.rates.attend is None or not kept_tokens:
            return kept_tokens
        return split_context(self.rates, 1, kept_tokens, self._block_tokens).tokens

    def _auto(self, request: Cached) -> LoadPlan:
        room, cached = request.room, request.cached
        attends = self.cpu and self.rates is not None and not attention_refused(self.rates)
        if not attends or room is None or cached <= room:
            return self._chosen(request)
        beyond = -(-(cached - room) // self._block_tokens) * self._block_tokens
        why = f"{room} of {cached} cached tokens have room on the device"
        return self._kept(request, min(beyond, cached), why)

    def _all_on_cpu(self, request: Cached) -> LoadPlan:
        return self._kept(request, request.cached, "all stays in host memory, as set")

    def _kept(self, request: Cached, tokens: int, why: str) -> LoadPlan:
        segments = from_runs([("C", tokens), ("K", request.cached - tokens)])
        return self.priced(request, segments, why)

    def _stays(self, request: Cached) -> LoadPlan:
        segments = from_runs([("C", request.cached)])
        plan = self.priced(request, segments, "its context stays in host memory, as set")
        if self.rates is None or not request.cached:
            return plan
        if "host-cpu" in self._host and self.rates.multiply is not None:
            times = layer_times(self.rates, 1, request.cached)
            return replace(plan, step_s=self.rates.layers * max(busy_s(times, divide(times))))
        both = "host-kvpr" in self._host
        act = self.split_share(1, request.cached) * request.cached if both else request.held
        return replace(plan, step_s=max(self.rates.decode_s(1, request.cached, act)))

    def _tail(self, request: Cached) -> LoadPlan:
        return self._chosen(request, tail_only=True)

    def _chosen(self, request: Cached, *, tail_only: bool = False) -> LoadPlan:
        if self.rates is None:
            return self.priced(request, layout(request.cached), "no rates are known: all is loaded")
        return choose(
            _costs(self.rates, request),
            kinds=PLAIN if tail_only else self._kinds,
            block_tokens=self._block_tokens,
            held_tokens=request.held,
            tail_only=tail_only,
            least_gain=_LEAST_TAIL_GAIN if tail_only else LEAST_GAIN,
        )

    def _kv(self, request: Cached) -> LoadPlan:
        return self.priced(request, layout(request.cached), "all is loaded, as set")

    def _recompute(self, request: Cached) -> LoadPlan:
        segments = layout(request.cached, recompute=request.cached)
        return self.priced(request, segments, "nothing is loaded, as set")

    def _hybrid(self, request: Cached) -> LoadPlan:
        segments = layout(request.cached, activations=request.cached if "A" in self._kinds else 0)
        return self.priced(request, segments, "activations wherever they are held, as set")

    def _kvpr(self, request: Cached) -> LoadPlan:
        assert self.rates is not None
        held = request.held if "A" in self._kinds else 0
        split = split_paper(self.rates, 1, request.cached, self._block_tokens, held)
        segments = layout(request.cached, activations=split.tokens)
        return self.priced(request, segments, "the split of KVPR (Eq. 12), as set")


def _costs(rates: PlanRates, request: Cached) -> Costs:
    return Costs(rates, request.cached, request.new, request.device)


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to bring tokens back; `plan` is None where `refused` gives a reason."""

    name: str
    plan: LoadPlan | None
    refused: str = ""
    chosen: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; seconds undilated."""
        row: dict[str, Any] = {"plan": self.name, "chosen": self.chosen, "refused": self.refused}
        if self.plan is not None:
            figures = "ttft_s", "load_s", "compute_s", "load_bytes", "step_s"
            row |= {name: getattr(self.plan, name) for name in figures}
            segments = [(s.kind, s.start_tokens, s.end_tokens) for s in self.plan.segments]
            row |= {"segments": segments, "why": self.plan.why}
        return row


def alternatives(
    rates: PlanRates, counts: TokenCounts, *, block_tokens: int = 16,
    room_tokens: int | None = None, activations: bool = True,
) -> list[Alternative]:  # fmt: skip
    """Every way to bring the cached tokens back, each at its best split, and what "auto" chooses.

    room_tokens: that a request may take on the device; None: all it needs. activations: they are
    stored beside the KV, of every block.
    """
    cached, new, device = counts.cached_tokens, counts.new_tokens, counts.device_tokens
    costs = Costs(rates, cached, new, device)
    splits = {
        "load": Split(),
        "recompute front + load": best_prefix(costs, block_tokens).split,
        "load + recompute back": best_tail(costs, block_tokens).split,
        "recompute": Split(cached),
    }
    found = [Alternative(name, plan_of(costs, split)) for name, split in splits.items()]
    refused = activations_refused(rates) if activations else "activations refused: none are stored"
    best = {"activations + load": best_activations, "activations + recompute": best_mixed}
    for name, solve in best.items():
        plan = None if refused else plan_of(costs, solve(costs, block_tokens).split)
        found.append(Alternative(name, plan, refused))
    planning = Planning(block_tokens, rates, activations=activations, cpu=True)
    room = None if room_tokens is None else room_left(room_tokens, device, new)
    request = Cached(cached, new, device, cached if activations else 0, room)
    refused = attention_refused(rates)
    on_cpu = None if refused or not cached else planning.named("cpu")(request)
    found.append(Alternative("cpu (stays in host memory)", on_cpu, refused))
    found.append(Alternative("auto", planning.named("auto")(request), chosen=True))
    return found


def decoding(rates: PlanRates, context_tokens: int, block_tokens: int = 16) -> dict[str, Any]:
    """Seconds of a decoding step with the context on the device, and with it in host memory.

    `cpu_share` is the share c of the context's tokens that the CPU attends to; None where `refused`
    gives a reason why it does not.
    """
    refused = attention_refused(rates)
    device_s = max(rates.decode_gpu_s(1, context_tokens), rates.weights_s)
    row: dict[str, Any] = {"device_s": device_s, "refused": refused}
    of_host = "load_all_s", "cpu_all_s", "split_s", "cpu_share"
    row |= dict.fromkeys(of_host)
    if context_tokens:
        row["load_all_s"] = max(rates.decode_s(1, context_tokens)[0], device_s)
    if context_tokens and not refused:
        split = split_context(rates, 1, context_tokens, block_tokens)
        figures = split.load_all_s, split.load_none_s, split.step_s, split.share
        row |= zip(of_host, figures, strict=True)
    return row
