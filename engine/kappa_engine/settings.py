"""Settings of an engine: plain, validated data, of neither the model nor the machine."""

from __future__ import annotations

from dataclasses import dataclass

from kappa.plans.planners import host_planners
from kappa_engine.kv_cache import ArenaSize
from kappa_scheduler.catalogue import FAIR
from kappa_scheduler.config import FairConfig

# Iterations that may still have activations on their way to host memory.
_AHEAD_ITERATIONS = 4


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of one engine."""

    # Tokens of an iteration, decoding requests included; longer prompts are computed in chunks.
    budget_tokens: int = 2048
    # Requests that compute at a time.
    max_running: int = 64
    # The scheduling rule by name, and its settings.
    scheduler: str = FAIR
    fair: FairConfig | None = None
    # How cached prefixes come back, by name.
    planner: str = "auto"
    # The share of the blocks stored in host memory that are stored as activations, spread evenly;
    # and whether their KV is stored too.
    act_share: float = 0.0
    keep_kv: bool = True
    # Blocks of activations that contexts in host memory may have on the device instead, for as long
    # as their requests run: of planner "host-hybrid" alone, without their KV beside them.
    act_device_blocks: int = 0
    # The share of the device's blocks that a request may take. Beyond it "auto" leaves the front of
    # a cached prefix in host memory, if the engine has threads that attend to it there, and
    # "host-auto" the whole context.
    cpu_room_share: float = 0.5
    # Host blocks that cross for one pass at most, as two buffers on the device hold a layer of
    # them; more go in mini-batches.
    pass_blocks: int = 4096

    def check(self, size: ArenaSize) -> None:
        """Raise `ValueError` if activations are to be stored and there are no blocks for them, or
        contexts are to lie in host memory and an iteration's chunk of one does not fit the device.
        """
        stay = self.act_device_blocks
        if self.act_share and not (size.act_host + stay and size.act_device > stay):
            raise ValueError(
                f"EngineOptions.act_share is {self.act_share}, but the arena has "
                f"{size.act_device} device blocks of activations, {stay} of them to stay there, "
                f"and {size.act_host} host blocks: give both, or act_share=0"
            )
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
        """Device blocks of activations that iterations fill while stores empty them."""
        if not self.act_share:
            return 0
        return self.max_running + _AHEAD_ITERATIONS * -(-self.budget_tokens // block_tokens)

    def stores(self, type: str, index: int) -> bool:
        """Whether block `index` of a sequence is stored as "kv" or as "act".

        Spread evenly, so that every prefix has its share of both (paper 003, Eq. 11).
        """
        return self.stored(type, index, index + 1) > 0

    def stored(self, type: str, start: int, stop: int) -> int:
        """The number of blocks [start, stop) of a sequence that are stored as "kv" or "act"."""
        act = int(stop * self.act_share + 0.5) - int(start * self.act_share + 0.5)
        return act if type == "act" else stop - start - (0 if self.keep_kv else act)

    def most_blocks(self, size: ArenaSize) -> int:
        """Blocks of the longest sequence that fits host memory, and what may stay beside it."""
        kv_share = 1.0 if self.keep_kv else 1.0 - self.act_share
        act_blocks = size.act_host + self.act_device_blocks
        shares = (size.kv_host, kv_share), (act_blocks, self.act_share)
        return int(min(blocks / share for blocks, share in shares if share))
