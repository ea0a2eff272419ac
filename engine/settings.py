"""How an engine is run: plain, validated data. Nothing here is of the model or of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv_cache import ArenaSize
from kappa.plans.planners import host_planners
from scheduler.catalogue import FAIR
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
    host memory, where the CPU attends to it; only where the engine has threads for that; and before
    "host-auto" leaves its context there. pass_blocks: of host memory, what crosses for one pass at
    most, as the two buffers on the device hold a layer of it; more goes in mini-batches.
    """

    budget_tokens: int = 2048
    max_running: int = 64
    scheduler: str = FAIR
    fair: FairConfig | None = None
    planner: str = "auto"
    act_share: float = 0.0
    keep_kv: bool = True
    cpu_room_share: float = 0.5
    pass_blocks: int = 4096

    def check_arena(self, size: ArenaSize) -> None:
        """Raise `ValueError` if activations are to be stored and there are no blocks for them."""
        if self.act_share and not (size.act_host and size.act_device):
            raise ValueError(
                f"EngineOptions.act_share is {self.act_share}, but the arena has "
                f"{size.act_device} device and {size.act_host} host blocks of "
                "activations: give both, or act_share=0"
            )

    def check_window(self, size: ArenaSize) -> None:
        """Raise `ValueError` if contexts are to lie in host memory, and the device has no room for
        a full iteration's chunk of one."""
        window = self.window_blocks(size.block_tokens)
        if host_planners(self.planner, self.act_share) and size.kv_device < window:
            raise ValueError(
                f"EngineOptions.planner is {self.planner}, and the device has {size.kv_device} "
                f"blocks: a chunk of {self.budget_tokens} tokens needs {window}; "
                "give more device blocks, or a smaller budget of an iteration"
            )

    def window_blocks(self, block_tokens: int) -> int:
        """Device blocks of one iteration's chunk, which may begin and end within a block."""
        return self.budget_tokens // block_tokens + 2

    def capture_blocks(self, block_tokens: int) -> int:
        """Device blocks of activations that suffice: what iterations fill while stores empty it."""
        if not self.act_share:
            return 0
        return self.max_running + _AHEAD_ITERATIONS * -(-self.budget_tokens // block_tokens)

    def stores(self, type: str, index: int) -> bool:
        """Whether block `index` of a sequence is stored as "kv" or as "act".

        Spread evenly, so that every prefix has its share of both (paper 003, Eq. 11).
        """
        return self.stored(type, index, index + 1) > 0

    def stored(self, type: str, start: int, stop: int) -> int:
        """How many of the blocks [start, stop) of a sequence are stored as "kv" or as "act"."""
        act = int(stop * self.act_share + 1e-9) - int(start * self.act_share + 1e-9)
        return act if type == "act" else stop - start - (0 if self.keep_kv else act)

    def most_blocks(self, size: ArenaSize) -> int:
        """Of a sequence that lies in host memory whole."""
        kv_share = 1.0 if self.keep_kv else 1.0 - self.act_share
        shares = (size.kv_host, kv_share), (size.act_host, self.act_share)
        return int(min(blocks / share for blocks, share in shares if share))
