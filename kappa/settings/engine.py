"""Which engine runs on every worker, how cached prefixes come back, and its limits."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from kappa.settings.base import Finite, Section
from kappa.settings.sparse import ApproxName, SparseSection

EngineKind = Literal["vllm", "torch", "emulated"]
PlannerName = Literal["auto", "kv", "kvpr", "hybrid", "recompute", "cpu", "tail"]
HostTierName = Literal["own", "lmcache", "native"]
# Of which kind of engine each planner is; both have "auto" and "kv".
_PLANNERS: dict[str, tuple[str, ...]] = {
    "vllm": ("auto", "kv", "tail"),
    "torch": ("auto", "kv", "kvpr", "hybrid", "recompute", "cpu"),
}


class LmcacheSettings(Section):
    """An LMCache server as host tier. Without `server` every worker starts one of its own, of
    `engine.host_bytes`; with one, all workers share it, and what one has stored all can load."""

    server: str | None = Field(
        None,
        pattern=r"^tcp://[A-Za-z0-9_.:\[\]-]+:[0-9]{1,5}$",
        description="tcp://HOST:PORT of a server that runs already; its --chunk-size must be a "
        "multiple of engine.block_tokens",
    )
    timeout_s: Finite = Field(
        1.0, gt=0, le=300, description="an answer that takes longer is a failure: recomputed"
    )
    heartbeat_s: Finite = Field(1.0, gt=0, le=60, description="how often its health is asked")
    retry_s: Finite = Field(
        5.0, gt=0, le=600, description="after a failure it is left alone so long, then twice as "
        "long, up to a minute",
    )  # fmt: skip


class EngineSettings(Section):
    """Which engine runs, and its limits; the device cache is small so that sessions spill to the
    host tier. `engine: torch` is short for `engine: {kind: torch}`."""

    kind: EngineKind = Field(
        "vllm",
        description="torch: our own, which executes load plans; emulated: computes nothing, for "
        "tests of a cluster",
    )
    planner: PlannerName = Field(
        "auto",
        description="how cached prefixes come back. Of kind vllm: tail (which auto means there) "
        "loads the front and computes the rest where that is faster; kv loads all",
    )
    host_tier: HostTierName = Field(
        "own",
        description="own: ours; lmcache: an LMCache server; native: vLLM's own copies, GPU only",
    )
    load: Literal["ahead", "layers"] = Field(
        "ahead",
        description="ahead: before the prompt, beside others' steps; layers: in the prompt's own "
        "step, each layer while the one before is computed (host_tier own)",
    )
    lmcache: LmcacheSettings = LmcacheSettings()
    act_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of stored blocks kept as activations, too; 1 unless hybrid; torch only",
    )
    cpu_threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="that may attend to KV in host memory, so that prefixes can stay there; torch "
        "only",
    )
    cpu_room_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="of the device's blocks, what a request may take before the front of its "
        "cached prefix stays in host memory; with cpu_threads, where the CPU is fast enough",
    )
    approx: ApproxName = Field(
        "never",
        description="whether answers may be approximate (sparse): ask (or true): those whose "
        "request says so; always: all but those that say no; torch only",
    )
    sparse: SparseSection = SparseSection()
    max_context_tokens: int = Field(8192, ge=64)
    block_tokens: int = Field(32, ge=16)
    device_blocks: int = Field(264, ge=8, description="KV blocks in the device cache")
    host_bytes: int = Field(64 << 20, ge=0, description="host tier; zero switches it off")
    handover_dir: str | None = Field(
        None,
        description="folder in shared memory where the host tier outlives its engine, for the "
        "worker that comes after it; none: it goes with the engine",
    )
    handover_wait_s: Finite = Field(
        10.0, ge=0, le=600, description="how long that worker waits for one that still drains"
    )
    max_batch_tokens: int = Field(1024, ge=64, description="token budget of one step")
    max_sequences: int = Field(64, ge=1)
    dtype: str = "float32"
    metrics: bool = Field(False, description="export vLLM's own metrics through Ray, too")
    extra: dict[str, Any] = Field(default_factory=dict, description="more vLLM engine arguments")

    @field_validator("approx", mode="before")
    @classmethod
    def _yes_or_no(cls, value: Any) -> Any:
        return {True: "ask", False: "never"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _approx_can_be(self) -> EngineSettings:
        if self.approx != "never" and self.kind != "torch":
            raise ValueError(f"approx {self.approx} needs kind torch, and this is {self.kind}")
        if self.approx != "never" and not self.host_bytes:
            raise ValueError(f"approx {self.approx} needs host_bytes above zero: KV is kept there")
        return self

    @model_validator(mode="after")
    def _of_this_kind(self) -> EngineSettings:
        known = _PLANNERS.get(self.kind)
        if known is not None and self.planner not in known:
            raise ValueError(
                f"planner {self.planner} is not one of kind {self.kind}: choose {', '.join(known)}"
            )
        if self.cpu_threads and (self.kind != "torch" or not self.host_bytes):
            raise ValueError("cpu_threads needs kind torch and host_bytes above zero")
        if self.planner == "cpu" and not self.cpu_threads:
            raise ValueError("planner cpu needs cpu_threads above zero: who else would attend")
        if self.host_tier != "own" and self.kind != "vllm":
            raise ValueError(f"host_tier {self.host_tier} needs kind vllm, and this is {self.kind}")
        if self.handover_dir and (self.kind != "vllm" or self.host_tier != "own"):
            raise ValueError("handover_dir needs kind vllm and host_tier own")
        if self.load == "layers":
            raise ValueError("load layers is not proven inside vLLM and is not served: use ahead")
        if self.host_tier != "own" and not self.host_bytes:
            raise ValueError(f"host_tier {self.host_tier} needs host_bytes above zero")
        return self

    @model_validator(mode="after")
    def _context_fits(self) -> EngineSettings:
        capacity = (self.device_blocks - 1) * self.block_tokens
        if capacity < self.max_context_tokens:
            raise ValueError(
                f"device_blocks * block_tokens holds {capacity} tokens, less than "
                f"max_context_tokens = {self.max_context_tokens}: raise the one or lower the other"
            )
        return self
