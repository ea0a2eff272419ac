"""Which engine runs on every worker, how cached prefixes come back, and its limits."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from kappa.settings.base import Section

EngineKind = Literal["vllm", "torch", "emulated"]
PlannerName = Literal["auto", "kv", "kvpr", "hybrid", "recompute"]


class EngineSettings(Section):
    """Which engine runs, and its limits; the device cache is small so that sessions spill to the
    host tier. `engine: torch` is short for `engine: {kind: torch}`."""

    kind: EngineKind = Field(
        "vllm",
        description="torch: our own, which executes load plans; emulated: computes nothing, for "
        "tests of a cluster",
    )
    planner: PlannerName = Field(
        "auto", description="how cached prefixes come back; of kind torch only"
    )
    act_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of stored blocks kept as activations, too; 1 unless hybrid; torch only",
    )
    max_context_tokens: int = Field(8192, ge=64)
    block_tokens: int = Field(32, ge=16)
    device_blocks: int = Field(264, ge=8, description="KV blocks in the device cache")
    host_bytes: int = Field(64 << 20, ge=0, description="host tier; zero switches it off")
    max_batch_tokens: int = Field(1024, ge=64, description="token budget of one step")
    max_sequences: int = Field(64, ge=1)
    dtype: str = "float32"
    metrics: bool = Field(False, description="export vLLM's own metrics through Ray, too")
    extra: dict[str, Any] = Field(default_factory=dict, description="more vLLM engine arguments")

    @model_validator(mode="after")
    def _context_fits(self) -> EngineSettings:
        capacity = (self.device_blocks - 1) * self.block_tokens
        if capacity < self.max_context_tokens:
            raise ValueError(
                f"device_blocks * block_tokens holds {capacity} tokens, less than "
                f"max_context_tokens = {self.max_context_tokens}: raise the one or lower the other"
            )
        return self
