"""How an engine is run: plain, validated data. Nothing here is of the model or of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from engine.arena import ArenaSize
from kappa.checks import check_at_least
from scheduler.catalogue import FAIR, SCHEDULERS
from scheduler.config import FairConfig

# Iterations whose activations may still be on their way to host memory.
_AHEAD_ITERATIONS = 4


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of one engine.

    budget_tokens: of an iteration, decoding requests included; longer prompts are computed in
    chunks. max_running: requests that compute. scheduler, fair: the rule by name, and its numbers.
    planner: how cached prefixes come back, by name. act_share: of the blocks stored in host memory,
    those whose activations are stored, spread evenly; keep_kv: their KV too. cpu_room_share: of the
    device's blocks, what a request may take before "auto" leaves the front of its cached prefix in
    host memory, where the CPU attends to it; only where the engine has threads for that.
    """

    budget_tokens: int = 2048
    max_running: int = 64
    scheduler: str = FAIR
    fair: FairConfig | None = None
    planner: str = "auto"
    act_share: float = 0.0
    keep_kv: bool = True
    cpu_room_share: float = 0.5

    def __post_init__(self) -> None:
        check_at_least(self, budget_tokens=1, max_running=1)
        for name in ("act_share", "cpu_room_share"):
            if not 0 <= getattr(self, name) <= 1:
                given = getattr(self, name)
                raise ValueError(f"EngineOptions.{name} is {given}: give a share in 0..1")
        if self.scheduler not in SCHEDULERS:
            raise ValueError(
                f"EngineOptions.scheduler is {self.scheduler!r}: "
                f"choose one of {', '.join(SCHEDULERS)}"
            )

    def check_arena(self, size: ArenaSize) -> None:
        """Raise `ValueError` if activations are to be stored and there are no blocks for them."""
        if self.act_share and not (size.act_host and size.act_device):
            raise ValueError(
                f"EngineOptions.act_share is {self.act_share}, but the arena has "
                f"{size.act_device} device and {size.act_host} host blocks of "
                "activations: give both, or act_share=0"
            )

    def capture_blocks(self, block_tokens: int) -> int:
        """Device blocks of activations that suffice: what iterations fill while stores empty it."""
        if not self.act_share:
            return 0
        return self.max_running + _AHEAD_ITERATIONS * -(-self.budget_tokens // block_tokens)

    def stores(self, type: str, index: int) -> bool:
        """Whether block `index` of a sequence is stored as "kv" or as "act".

        Spread evenly, so that every prefix has its share of both (paper 003, Eq. 11).
        """
        act = int((index + 1) * self.act_share + 1e-9) > int(index * self.act_share + 1e-9)
        return act if type == "act" else self.keep_kv or not act
