"""The account of a request, and an engine's totals: counts, seconds and bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kappa.plans.load_plan import LoadPlan

_SECONDS = ("queue", "load", "compute", "predicted_load", "predicted_compute")


@dataclass(slots=True)
class Account:
    """Predicted and actual seconds of a request by the engine's clock, and tokens by source."""

    # Until its first admission.
    queue_s: float = 0.0
    # From the start of its load to its end.
    load_s: float = 0.0
    # Iterations that computed its prompt.
    compute_s: float = 0.0
    # From its submission to its first token, and to its end.
    ttft_s: float = 0.0
    total_s: float = 0.0
    # Of its load plan.
    predicted_load_s: float = 0.0
    predicted_compute_s: float = 0.0
    predicted_ttft_s: float = 0.0
    load_bytes: int = 0
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
    output_tokens: int = 0
    preemptions: int = 0
    # The kinds of its load plan, and the planner's reason.
    plan: str = ""
    why: str = ""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        brought = self.device_tokens + self.loaded_tokens + self.activation_tokens
        return brought + self.sparse_tokens + self.kept_tokens

    def predicted(self, plan: LoadPlan) -> None:
        """Add the load plan of an admission."""
        self.plan, self.why = (plan.kind if plan.segments else ""), plan.why
        self.predicted_load_s += plan.load_s
        self.predicted_compute_s += plan.compute_s
        self.predicted_ttft_s += plan.ttft_s


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine began."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    iterations: int = 0
    # In iterations.
    gpu_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    loads: int = 0
    # Loads that did not arrive; their tokens were computed.
    failed_loads: int = 0
    failed_load_tokens: int = 0
    # Of all requests that ended, by source and kind as in `Account`.
    tokens: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    # Bytes, seconds and failures of each direction.
    link: dict[str, float] = field(default_factory=dict)
    # Stored in host memory, and not stored by reason; evicted; misused, which is a bug.
    blocks: dict[str, int] = field(default_factory=dict)
    # Slots, look-ups and hits, where there is an approximate decoder.
    sparse: dict[str, Any] = field(default_factory=dict)

    def ended(self, account: Account) -> None:
        """Add the account of a request that is over."""
        for name, count in asdict(account).items():
            source = name.removesuffix("_tokens")
            if source != name:
                self.tokens[source] = self.tokens.get(source, 0) + count
        for name in _SECONDS:
            self.seconds[name] = self.seconds.get(name, 0.0) + getattr(account, f"{name}_s")
