"""What a simulated node is made of, and what it has done: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from kappa.cost import StepModel, StepParts
from scheduler.batching import Batcher
from scheduler.config import FairConfig, LinkRates


@dataclass(frozen=True, slots=True)
class NodeModel:
    """The true constants of a node, and the step constants that its announcement claims.

    load_block_s, store_block_s: link seconds a block; load_fixed_s: of each transfer besides.
    rule: by name, as `scheduler.catalogue` has it; fair: its settings and the tenants' weights.
    link_order, duplex: as `scheduler.link_order` has them.
    """

    step: StepModel
    announced_step: StepModel
    block_tokens: int
    device_blocks: int
    host_blocks: int
    load_block_s: float
    store_block_s: float
    load_fixed_s: float
    budget_tokens: int = 8192
    max_running: int = 256
    rule: str = "fcfs"
    fair: FairConfig = field(default_factory=FairConfig)
    link_order: str = "loads_first"
    duplex: str = "half"

    @property
    def link_rates(self) -> LinkRates:
        """What the node's rule knows of its link."""
        return LinkRates(self.load_block_s / self.block_tokens, self.load_fixed_s)


@dataclass(slots=True)
class NodeTotals:
    """What a node did since the start; survives its failures.

    queued_steps: iterations before which somebody waited, with the tokens that they computed and
    the blocks that were held. fill, fill_steps: of the budget, over those with work at hand.
    """

    steps: int = 0
    step_s: float = 0.0
    computed_s: float = 0.0
    computed_announced_s: float = 0.0
    step_tokens: int = 0
    held_block_s: float = 0.0
    busy_s: float = 0.0
    queued_steps: int = 0
    queued_tokens: int = 0
    queued_blocks: int = 0
    fill: float = 0.0
    fill_steps: int = 0
    max_wait_s: float = 0.0
    max_skips: int = 0
    preemptions: int = 0
    failed_loads: int = 0

    def add_steps(self, steps: int, tokens: int, seconds: float) -> None:
        """So many iterations took so long."""
        self.steps += steps
        self.step_tokens += tokens
        self.step_s += seconds

    def add_computing(self, seconds: float, announced: StepParts[float]) -> None:
        """An iteration of `COMPUTE_STEP_TOKENS` or more took so long."""
        computed_s = announced.computed_s(seconds)
        if computed_s:
            self.computed_s += computed_s
            self.computed_announced_s += announced.compute_s

    def add_scheduler(self, scheduler: Batcher) -> None:
        """What a scheduler and its rule counted in their life."""
        fill, steps = scheduler.budget_fill
        self.fill += fill
        self.fill_steps += steps
        self.max_wait_s = max(self.max_wait_s, scheduler.rule.max_wait_s)
        self.max_skips = max(self.max_skips, scheduler.rule.max_skips)
        self.preemptions += scheduler.preemptions
