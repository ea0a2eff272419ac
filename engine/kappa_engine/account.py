"""The account of a request: how its prompt came to the device, and in how many seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Account:
    """Seconds of a request by the engine's clock, and its tokens by source."""

    # From the start of its load to its end.
    load_s: float = 0.0
    # Iterations that computed its prompt.
    compute_s: float = 0.0
    # Prompt tokens: found on the device; loaded as KV; projected from activations; recomputed
    # though they were cached; left in host memory, and attended to in part, or whole.
    device_tokens: int = 0
    loaded_tokens: int = 0
    activation_tokens: int = 0
    recomputed_tokens: int = 0
    sparse_tokens: int = 0
    kept_tokens: int = 0
    # Of the answer, computed sparsely.
    approximate_tokens: int = 0
    # Prompt tokens that were not cached.
    new_tokens: int = 0
    preemptions: int = 0
    # The kinds of its load plan, and the planner's reason.
    plan: str = ""
    why: str = ""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        brought = self.device_tokens + self.loaded_tokens + self.activation_tokens
        return brought + self.sparse_tokens + self.kept_tokens
