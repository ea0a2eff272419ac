"""What a request took, and what an engine has done so far: counts, seconds and bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kappa.plans.load_plan import LoadPlan

_SOURCES = (
    "device", "loaded", "activation", "recomputed", "sparse", "kept", "new", "output",
    "approximate",
)  # fmt: skip
_SECONDS = ("queue", "load", "compute", "predicted_load", "predicted_compute")


@dataclass(slots=True)
class Account:
    """What a request was predicted to take and what it took: seconds, and prompt tokens by source.

    Seconds are of the engine's clock. queue_s: until its first admission; load_s: from the start of
    its load to its end; compute_s: iterations that computed its prompt; ttft_s: all until its first
    token. predicted_*: of its load plan. Tokens: device (found there), loaded (as KV), activations
    (KV projected from them), recomputed (were cached, computed all the same), sparse (stayed in
    host memory, attended to in part), kept (stayed there, attended to whole), new; approximate: of
    the answer, computed sparsely. plan, why: the kinds of its load plan, and what the planner saw.
    """

    queue_s: float = 0.0
    load_s: float = 0.0
    compute_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    predicted_load_s: float = 0.0
    predicted_compute_s: float = 0.0
    predicted_ttft_s: float = 0.0
    load_bytes: int = 0
    device_tokens: int = 0
    loaded_tokens: int = 0
    activation_tokens: int = 0
    recomputed_tokens: int = 0
    sparse_tokens: int = 0
    kept_tokens: int = 0
    approximate_tokens: int = 0
    new_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    plan: str = ""
    why: str = ""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return (
            self.device_tokens + self.loaded_tokens + self.activation_tokens
            + self.sparse_tokens + self.kept_tokens
        )  # fmt: skip

    def predicted(self, plan: LoadPlan) -> None:
        """It was admitted, and this is how it is to get its prefix."""
        self.plan, self.why = (plan.kind if plan.segments else ""), plan.why
        self.predicted_load_s += plan.load_s
        self.predicted_compute_s += plan.compute_s
        self.predicted_ttft_s += plan.ttft_s

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine began.

    gpu_s: seconds in iterations. failed_loads: that did not arrive, each followed by computing
    what it should have brought. tokens, seconds: by source and kind as in `Account`, over all
    requests that ended. link: bytes, seconds and failures of each direction. blocks: stored in
    host memory, and not, by reason; evicted; misused, which is a bug. sparse: slots, look-ups and
    hits (`engine.sparse.serving`), where there are slots.
    """

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    iterations: int = 0
    gpu_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    loads: int = 0
    failed_loads: int = 0
    failed_load_tokens: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    link: dict[str, float] = field(default_factory=dict)
    blocks: dict[str, int] = field(default_factory=dict)
    sparse: dict[str, Any] = field(default_factory=dict)

    def ended(self, account: Account) -> None:
        """Add what a request took."""
        for name in _SOURCES:
            self.tokens[name] = self.tokens.get(name, 0) + getattr(account, f"{name}_tokens")
        for name in _SECONDS:
            self.seconds[name] = self.seconds.get(name, 0.0) + getattr(account, f"{name}_s")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
