"""Every load plan that a request could get on a node, priced side by side, with the chosen one.

What `kappa explain` prints. The plans are the planners' own: each kind at its best split, and what
"auto" makes of them (`kappa.plan.planners`), which is the one place where that is decided. A kind
that is refused here comes with the reason instead of seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kappa.plan.costs import Costs, Split
from kappa.plan.cpu_offload import attention_refused, split_context
from kappa.plan.planners import Cached, Planning, room_left
from kappa.plan.predict import decode_gpu_s, plan_of
from kappa.plan.rates import PlanRates
from kappa.plan.segments import LoadPlan
from kappa.plan.split import (
    activations_refused,
    best_activations,
    best_mixed,
    best_prefix,
    best_tail,
)
from kappa.types import TokenCounts


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way; `plan` None where it is refused, and `refused` says why."""

    name: str
    plan: LoadPlan | None
    refused: str = ""
    chosen: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; seconds undilated."""
        row: dict[str, Any] = {"plan": self.name, "chosen": self.chosen, "refused": self.refused}
        if self.plan is not None:
            segments = [(s.kind, s.start_tokens, s.end_tokens) for s in self.plan.segments]
            row |= {
                "ttft_s": self.plan.ttft_s, "load_s": self.plan.load_s,
                "compute_s": self.plan.compute_s, "load_bytes": self.plan.load_bytes,
                "step_s": self.plan.step_s, "segments": segments, "why": self.plan.why,
            }  # fmt: skip
        return row


def alternatives(
    rates: PlanRates,
    counts: TokenCounts,
    *,
    block_tokens: int = 16,
    room_tokens: int | None = None,
    activations: bool = True,
) -> list[Alternative]:
    """All ways to bring the cached tokens back, and "auto", which is one of them.

    Args:
        rates: the model on the node.
        counts: the request there.
        block_tokens: plans are cut at multiples of this.
        room_tokens: that a request may take on the device; None: all it needs.
        activations: they are stored beside the KV, of every block.
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
    held = cached if activations else 0
    room = None if room_tokens is None else room_left(room_tokens, device, new)
    asked = Cached(cached, new, device, held, room)
    refused = attention_refused(rates)
    on_cpu = None if refused or not cached else planning.named("cpu")(asked)
    found.append(Alternative("cpu (stays in host memory)", on_cpu, refused))
    found.append(Alternative("auto", planning.named("auto")(asked), chosen=True))
    return found


def decoding(rates: PlanRates, context_tokens: int, block_tokens: int = 16) -> dict[str, Any]:
    """A decoding step behind so many tokens: on the device, and with all of them in host memory.

    `cpu_share` is c, of those tokens; None with `refused` where the CPU is not to attend.
    """
    refused = attention_refused(rates)
    row: dict[str, Any] = {
        "device_s": decode_gpu_s(rates, 1, context_tokens), "refused": refused,
        "load_all_s": None, "cpu_all_s": None, "split_s": None, "cpu_share": None,
    }  # fmt: skip
    if context_tokens:
        row["load_all_s"] = max(rates.load.seconds(context_tokens), row["device_s"])
    if context_tokens and not refused:
        split = split_context(rates, 1, context_tokens, block_tokens)
        row |= {
            "load_all_s": split.load_all_s, "cpu_all_s": split.cpu_all_s,
            "split_s": split.step_s, "cpu_share": split.share,
        }  # fmt: skip
    return row
