"""What workers that plan loads do with a cached prefix: the router asks the very same planner.

A worker whose engine executes load plans announces its planner's name and its rates. For such
workers the estimates' link and gpu seconds, and the predicted TTFT, are the plan's; for all others
loading comes first and computing after it, as `router.pricing` has it. An engine of vLLM does that
too, and may leave the back of a hit to be computed ("tail"): its row is moved by what that changes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kappa.plans.load_plan import LoadPlan, bounded, layout
from kappa.plans.measured import rates_from_measured
from kappa.plans.planners import Cached, Planning, Policy, kappa_eff, room_left
from kappa.protocol import Announcement
from router.decision import Estimates

# What each planner makes of a prefix, in the words of `kappa.plans.planners`.
_POLICIES: dict[str, Policy] = {
    "kv": "load", "recompute": "load", "auto": "auto", "kvpr": "activations",
    "hybrid": "activations", "tail": "tail",
}  # fmt: skip
_TAIL = "tail"
# κ_eff depends on how much is new: it is told for a question of this length.
KAPPA_EFF_NEW_TOKENS = 128


class _Plans(NamedTuple):
    planning: Planning
    name: str
    act_share: float
    most_recomputed_tokens: int
    dilation: float
    room_tokens: int | None

    def plan(self, cached: int, new: int, device: int) -> LoadPlan:
        """As the engine would make it: what it recomputes at once is bounded by its budget."""
        # Activations of a share of the blocks are spread evenly: only `hybrid` takes them so.
        holds = self.act_share >= 1 or self.name == "hybrid"
        room = None if self.room_tokens is None else room_left(self.room_tokens, device, new)
        asked = Cached(cached, new, device, cached if holds else 0, room)
        plan = self.planning.named(self.name)(asked)
        cut = bounded(plan, self.most_recomputed_tokens)
        return plan if cut is plan else self.planning.priced(asked, cut.segments, cut.why)

    @property
    def hides(self) -> bool:
        """Whether part of a load hides behind its own prompt, so that seconds do not add up."""
        rates = self.planning.rates
        return rates is not None and rates.serial_share < 1.0

    def real(self, plan: LoadPlan) -> LoadPlan:
        """The plan in real seconds."""
        if self.dilation == 1.0:
            return plan
        d = self.dilation
        return replace(
            plan, ttft_s=d * plan.ttft_s, load_s=d * plan.load_s, compute_s=d * plan.compute_s
        )

    def beyond_s(self, plan: LoadPlan, new: int, device: int) -> float:
        """Real gpu seconds that a plan takes more than loading all would."""
        cached = plan.cached_tokens
        plain = self.planning.priced(Cached(cached, new, device), layout(cached), "all is loaded")
        return self.dilation * (plan.compute_s - plain.compute_s)


class LoadPlans:
    """The planners of those workers that have one."""

    def __init__(self) -> None:
        self._plans: dict[str, _Plans] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def join(self, said: Announcement) -> None:
        """A worker announced itself.

        Raises:
            ValueError: its rates or its planner cannot be used; says why.
        """
        self._plans.pop(said.worker, None)
        if not said.load_plan:
            return
        rates = rates_from_measured(said.load_plan["rates"])
        name, act_share = said.load_plan["planner"], float(said.load_plan["act_share"])
        share = said.load_plan.get("cpu_room_share")
        planning = Planning(
            said.block_tokens, rates, activations=act_share > 0, cpu=share is not None
        )
        planning.check(name)
        size = said.block_tokens
        room = None if share is None else int(float(share) * said.device_blocks) * size
        self._plans[said.worker] = _Plans(
            planning, name, act_share, said.max_batch_tokens // size * size, said.node.dilation,
            room,
        )  # fmt: skip

    def leave(self, worker: str) -> None:
        """A worker is gone."""
        self._plans.pop(worker, None)

    def kappa_eff(self, worker: str) -> float | None:
        """κ_eff of a worker for `KAPPA_EFF_NEW_TOKENS` new tokens.

        None without a planner, or where no ratio makes the first token take twice as long.
        """
        plans = self._plans.get(worker)
        if plans is None:
            return None
        rates = plans.planning.rates
        assert rates is not None
        policy = _POLICIES.get(plans.name, "load")
        if plans.name == "auto" and plans.act_share < 1:
            policy = "recompute"
        ratio = kappa_eff(rates, policy, KAPPA_EFF_NEW_TOKENS)
        return ratio if math.isfinite(ratio) else None

    def apply(self, estimates: Estimates) -> None:
        """Price the planned rows of `estimates` as their plans say."""
        for row, worker in enumerate(estimates.workers):
            plans = self._plans.get(worker)
            if plans is None:
                continue
            if plans.name != _TAIL or plans.hides:
                estimates.plans[row] = self._priced(estimates, row, plans)
            elif estimates.cached_tokens[row]:
                self._shorten(estimates, row, plans)

    def _priced(self, estimates: Estimates, index: int, plans: _Plans) -> LoadPlan:
        row = estimates.rows[index]
        plan = plans.real(plans.plan(*_tokens(row)))
        beyond_s = plan.compute_s - row["compute_s"]
        row["ttft_s"] += plan.ttft_s - row["load_s"] - row["compute_s"]
        row["work_s"] = max(row["work_s"] + beyond_s, 0.0)
        row["load_s"], row["compute_s"] = plan.load_s, plan.compute_s
        return plan

    def _shorten(self, estimates: Estimates, index: int, plans: _Plans) -> None:
        """A tail that is computed is not loaded; the rest of the row's figures stays calibrated."""
        row = estimates.rows[index]
        cached, new, device = _tokens(row)
        plan = plans.plan(cached, new, device)
        spared = plan.cached_tokens - plan.crossing_tokens
        if not spared:
            return
        load_s = float(row["load_s"])
        spared_s = spared * float(row["load_token_s"]) if plan.crossing_tokens else load_s
        beyond_s = plans.beyond_s(plan, new, device)
        row["load_s"] = max(load_s - spared_s, 0.0)
        row["compute_s"] += beyond_s
        row["work_s"] = max(row["work_s"] + beyond_s, 0.0)
        row["ttft_s"] += beyond_s - (load_s - float(row["load_s"]))
        estimates.plans[index] = plans.real(plan)


def _tokens(row: np.void) -> tuple[int, int, int]:
    return int(row["cached_tokens"]), int(row["new_tokens"]), int(row["device_tokens"])
