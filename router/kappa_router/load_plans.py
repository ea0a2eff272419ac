"""Load plans of workers for a cached prefix: the router runs the very same planner.

A worker with an engine that executes load plans announces its planner's name and rates. For such
workers the estimates' link and gpu seconds, and the predicted TTFT, are the plan's; for all others
loading comes first and computing after it, as `kappa_router.ttft` has it. An engine of vLLM does
that too, but may leave the back of a hit to be computed ("tail"), and load by layers beside the
prompt of a request that is alone (paper 001, Eq. 4): its row is moved by what that changes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

import numpy as np

from kappa.cost import QUESTION_TOKENS
from kappa.plans.load_plan import LoadPlan, bounded, layout
from kappa.plans.measured import rates_from_measured
from kappa.plans.planners import Cached, Planning, Policy, host_planners, kappa_eff, room_left
from kappa.protocol import Announcement
from kappa_router.decision import PlannedLoad

# What each planner makes of a prefix, in the words of `kappa.plans.planners`.
_POLICIES: dict[str, Policy] = {
    "kv": "load", "recompute": "load", "auto": "auto", "kvpr": "activations",
    "hybrid": "activations", "tail": "tail",
}  # fmt: skip


class LoadPlanner:
    """The planner of one worker.

    Raises:
        ValueError: the announced rates or planner cannot be used, with the reason.
    """

    def __init__(self, announced: Announcement) -> None:
        described = announced.load_plan
        size = self._size = announced.block_tokens
        self._name, self._act_share = described["planner"], float(described["act_share"])
        self._rates = rates_from_measured(described["rates"])
        room_share = described.get("cpu_room_share")
        self._planning = Planning(
            size, self._rates, activations=self._act_share > 0, cpu=room_share is not None,
            host=host_planners(self._name, self._act_share),
        )  # fmt: skip
        self._planning.check(self._name)
        self._of_vllm = announced.engine == "vllm"
        # Of vLLM's, where others are served: a load may not hold up their steps.
        ahead = replace(self._rates, overlap=0.0)
        self._ahead = Planning(size, ahead, activations=False)
        self._room_tokens = (
            None if room_share is None else int(float(room_share) * announced.device_blocks) * size
        )
        self._budget_tokens = announced.max_batch_tokens
        self._dilation = announced.node.dilation

    def __call__(self, row: np.void) -> PlannedLoad | None:
        """Adjust a row of the estimates to the worker's load plan; None: the row stays as it is."""
        cached, new = int(row["cached_tokens"]), int(row["new_tokens"])
        if self._of_vllm:
            return self._move(row, cached, new) if cached else None
        plan = self._plan(self._planning, cached, new, int(row["device_tokens"]))
        load_s, compute_s = self._dilation * plan.load_s, self._dilation * plan.compute_s
        beyond_s = compute_s - row["compute_s"]
        row["ttft_s"] += self._dilation * plan.ttft_s - row["load_s"] - row["compute_s"]
        row["work_s"] = max(row["work_s"] + beyond_s, 0.0)
        row["load_s"], row["compute_s"] = load_s, compute_s
        hidden_s = self._dilation * plan.hidden_s
        return PlannedLoad(plan.kind, plan.tokens("R"), plan.crossing_tokens, hidden_s)

    @cached_property
    def kappa_eff(self) -> float | None:
        """κ_eff of a question of `kappa.cost.QUESTION_TOKENS`.

        None where no ratio makes the first token take twice as long.
        """
        policy = _POLICIES.get(self._name, "load")
        if self._name == "auto" and self._act_share < 1:
            policy = "recompute"
        ratio = kappa_eff(self._rates, policy, QUESTION_TOKENS)
        return ratio if math.isfinite(ratio) else None

    def _move(self, row: np.void, cached: int, new: int) -> PlannedLoad | None:
        """A tail that is computed is not loaded, and a load may hide behind computing; the
        rest of the row's figures stays calibrated."""
        device, load_s = int(row["device_tokens"]), float(row["load_s"])
        planning = self._ahead if row["in_flight"] else self._planning
        plan = self._plan(planning, cached, new, device)
        if spared := cached - plan.crossing_tokens:
            spared_s = spared * float(row["load_token_s"]) if plan.crossing_tokens else load_s
            whole = planning.priced(Cached(cached, new, device), layout(cached), "all is loaded")
            beyond_s = self._dilation * (plan.compute_s - whole.compute_s)
            row["load_s"] = max(load_s - spared_s, 0.0)
            row["compute_s"] += beyond_s
            row["work_s"] = max(row["work_s"] + beyond_s, 0.0)
            row["ttft_s"] += beyond_s - (load_s - float(row["load_s"]))
        # Of several steps the first alone waits for layers.
        first_s = float(row["compute_s"]) * min(1.0, self._budget_tokens / (new + spared))
        overlap = 0.0 if planning is self._ahead else 1.0 - self._rates.serial_share
        hidden_s = overlap * min(float(row["load_s"]), first_s)
        row["ttft_s"] -= hidden_s
        if not spared and not hidden_s:
            return None
        return PlannedLoad(plan.kind, plan.tokens("R"), plan.crossing_tokens, hidden_s)

    def _plan(self, planning: Planning, cached: int, new: int, device: int) -> LoadPlan:
        """As the engine would make it: what it recomputes at once is bounded by its budget."""
        # Activations of a share of the blocks are spread evenly: only `hybrid` takes them so.
        holds = self._act_share >= 1 or self._name == "hybrid"
        room = None if self._room_tokens is None else room_left(self._room_tokens, device, new)
        prefix = Cached(cached, new, device, cached if holds else 0, room)
        plan = planning.named(self._name)(prefix)
        cut = bounded(plan, self._budget_tokens // self._size * self._size)
        return plan if cut is plan else planning.priced(prefix, cut.segments, cut.why)


def planner_of(announced: Announcement) -> LoadPlanner | None:
    """The planner that a worker announced; None if it loads prefixes whole and then computes.

    Raises:
        ValueError: as `LoadPlanner`.
    """
    return LoadPlanner(announced) if announced.load_plan else None
