"""Settings of the engines: kind, loading of cached prefixes, scheduling, transfer and limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from kappa.host import SCHEDULING_RULES, installed
from kappa.settings.base import Finite, LogFile, Section

ApproxName = Literal["never", "ask", "always"]


class SparseSection(Section):
    """Sparse decoding: each head attends to sinks, recent tokens and a choice of the rest, which it
    keeps until its query has moved too far. Changes answers."""

    share: Finite = Field(0.1, gt=0, le=1, description="chosen share of the context's tokens")
    sink_tokens: int = Field(4, ge=0, le=1024, description="first tokens, always attended to")
    recent_tokens: int = Field(64, ge=1, le=65536, description="latest tokens, always attended to")
    eta: Finite = Field(
        0.8, ge=-1, le=1, description="cosine below which the most important head chooses again"
    )
    power: Finite = Field(
        3.0, gt=0, le=100, description="the higher, the fewer heads are held to eta"
    )
    epsilon: Finite = Field(
        0.1, ge=0, le=2, description="margin on a head's measured cosine before it counts as hard"
    )
    retriever: Literal["hash", "oracle"] = Field(
        "hash", description="hash: by codes on the device; oracle: by all keys, which it loads"
    )
    code_bits: int = Field(256, ge=64, le=4096, description="of a key's code, in multiples of 64")
    prefetch: bool = Field(
        True, description="choose one layer ahead by a predicted query; else wait for the choice"
    )
    max_age: int = Field(0, ge=0, description="steps after which a choice is replaced; 0: never")
    lanes: int = Field(4, ge=1, le=4096, description="maximum concurrent sparse decodes")
    chunk_tokens: int = Field(
        64, ge=1, le=4096, description="new tokens at a time behind a prefix that is not loaded"
    )
    loss: Finite | None = Field(
        None,
        gt=0,
        le=10,
        description="measured increase of perplexity with these settings, as a share "
        "(kappa bench offload); clients may set a limit; none: unknown",
    )
    heads: str | None = Field(
        None, description="file that `kappa heads` wrote; none: all heads count alike"
    )
    persistent_heads: int | None = Field(
        None, ge=0, description="KV heads of all layers kept on the device; none: the hard ones"
    )

    @model_validator(mode="after")
    def _whole_words(self) -> SparseSection:
        if self.code_bits % 64:
            raise ValueError(f"code_bits is {self.code_bits}: give a multiple of 64")
        return self


class WeightsSection(Section):
    """Where the matrices of a model's layers lie. In host memory, they cross the link at every
    step: of kind torch two layers of them at a time are on the device; vLLM reads them where they
    are (its cpu_offload_gb)."""

    place: Literal["device", "host"] = "device"
    share: Finite = Field(1.0, ge=0, le=1, description="of the layers, in host memory; evenly")
    part: Literal["layers", "attention", "mlp"] = Field(
        "layers", description="of each of these layers; attention: queries, keys, values, output"
    )


BUILT_IN = ("fair", "fcfs", "stock")
"""Rules that are always there; entry points of `kappa.scheduling_rules` add others."""


class SchedulerSettings(Section):
    """The scheduling rule of each worker's engine (`kappa_scheduler.config.FairConfig`)."""

    name: str = Field("fair", description="the rule; stock: vLLM's own scheduler")
    max_skips: int = Field(64, ge=0, description="bypasses after which a request is starving")
    due_after_s: Finite = Field(30.0, ge=0, description="seconds of waiting until it is starving")
    window: int = Field(256, ge=1, le=65_536, description="waiting requests looked at each time")
    slack_s: Finite = Field(0.25, ge=0, description="service a tenant may be ahead of others")
    credit: Finite = Field(0.1, ge=0, description="service that a second of waiting is worth")
    class_s: Finite = Field(10.0, ge=0, description="head start of a priority class on the next")
    step_factor: Finite = Field(
        3.0,
        ge=0,
        le=100,
        description="longest step, as a multiple of one request's decoding step; 0: no bound",
    )
    reserve: bool = Field(True, description="set blocks aside for a starving request")
    log: LogFile = Field(None, description="file for JSON lines, one per iteration; none: off")
    store_backlog_s: Finite = Field(
        10.0, ge=0, description="longest wait of a store to the host tier before it is dropped"
    )
    duplex: Literal["full", "half"] = Field("full", description="half: loads and stores share")
    link_order: Literal["loads_first", "fifo"] = "loads_first"

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        known = (*BUILT_IN, *installed(SCHEDULING_RULES))
        if value not in known:
            raise ValueError(f"{value!r} is not installed: choose one of {', '.join(known)}")
        return value


class TransferSettings(Section):
    """KV between workers, out of host tiers over TCP: of whole prompts where a pool's role is
    `prefill`, and with `router.policy: priced_fetch` of any prefix."""

    connector: Literal["peers", "nixl"] = Field(
        "peers", description="of whole prompts; peers: out of host tiers; nixl: vLLM's, on GPUs"
    )
    wait_s: Finite = Field(
        5.0, gt=0, description="blocks that have not come by then are computed again"
    )
    net_bytes_per_s: Finite = Field(
        12.5e9, gt=0, description="of the network, for the router's prices and for paced workers"
    )
    fixed_s: Finite = Field(0.001, ge=0, description="seconds of a transfer besides its bytes")
    min_new_tokens: int = Field(
        256, ge=1, description="prompts with fewer tokens to compute are not worth handing over"
    )


# vLLM's; a contract test holds them.
DtypeName = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]

ToolCallParserName = Literal[
    "auto", "none", "dots", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4",
    "cohere_command3", "cohere_command4", "ernie45", "glm45", "glm47", "ling3", "granite-20b-fc",
    "granite", "granite4", "hermes", "poolside_v1", "hunyuan_a13b", "hy_v3", "hy_v4", "internlm",
    "jamba", "lfm2", "kimi_k2", "kimi_k3", "llama3_json", "llama4_json", "llama4_pythonic",
    "longcat", "mimo", "minimax_m2", "minimax_m3", "minicpm5", "mistral", "olmo3", "muse_glimmer",
    "openai", "phi4_mini_json", "pythonic", "qwen3_coder", "qwen3_xml", "seed_oss", "step3",
    "step3p5", "inkling", "xlam", "gigachat3", "functiongemma", "gemma4", "apertus",
]  # fmt: skip
ReasoningParserName = Literal[
    "auto", "none", "deepseek_r1", "deepseek_v3", "deepseek_v4", "poolside_v1", "cohere_command3",
    "cohere_command4", "ernie45", "gemma4", "glm45", "glm47", "ling3", "openai_gptoss", "granite",
    "holo2", "hunyuan_a13b", "hy_v3", "hy_v4", "kimi_k2", "kimi_k3", "mimo", "minimax_m2",
    "minimax_m2_append_think", "minimax_m3", "mistral", "nemotron_v3", "olmo3", "muse_glimmer",
    "qwen3", "seed_oss", "step3", "step3p5", "inkling",
]  # fmt: skip

EngineKind = Literal["vllm", "torch", "emulated"]

PlannerName = Literal[
    "auto", "kv", "kvpr", "hybrid", "recompute", "cpu", "tail", "host-auto", "host-kv",
    "host-kvpr", "host-hybrid", "host-weights",
    "host-cpu",
]  # fmt: skip

HostTierName = Literal["auto", "own", "native", "lmcache", "stock"]

# Planners by kind of engine; both have "auto" and "kv".
_PLANNERS: dict[str, tuple[str, ...]] = {
    "vllm": ("auto", "kv", "tail"),
    "torch": tuple(name for name in get_args(PlannerName) if name != "tail"),
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
        5.0, gt=0, le=600, description="pause after a failure; doubles each time, up to a minute"
    )


# Each limit's argument in vLLM, and its default where no GPU gives its size.
VLLM_LIMITS: dict[str, tuple[str, int | str]] = {
    "max_context_tokens": ("max_model_len", 8192),
    "block_tokens": ("block_size", 32),
    "device_blocks": ("num_gpu_blocks_override", 264),
    "max_batch_tokens": ("max_num_batched_tokens", 1024),
    "max_sequences": ("max_num_seqs", 64),
    "dtype": ("dtype", "float32"),
}

_CPU_HOST_BYTES = 64 << 20
# Below the half of memory that /dev/shm, where vLLM maps the tier, has unless told otherwise.
HOST_SHARE = 0.4

# Refused in `engine.extra`, since its arguments go before those that we would give.
NOT_IN_EXTRA = {
    "worker_cls": "a class of ours reports what its steps and loads take",
    "scheduler_cls": "choose the rule by scheduler.name (stock: vLLM's own)",
    "scheduling_policy": "choose the rule by scheduler.name (priority is one)",
    "kv_transfer_config": "give engine.host_tier, engine.host_bytes and the section transfer",
    "kv_offloading_size": "give engine.host_bytes",
    "kv_offloading_backend": "give engine.host_tier",
    "kv_events_config": "the router's index follows these events",
    "additional_config": "it carries our own options to the engine",
    "enable_prefix_caching": "it is always on: routing is by cached prefixes",
    "model": "give model.source",
    "served_model_name": "give model.id",
    "lora_modules": "give model.adapters: the decider keeps their prefixes apart",
    "tokenizer": "the decider hashes the tokens of model.source's own",
    "data_parallel_size": "each replica is one engine: give the pool more replicas",
    "distributed_executor_backend": "Ray Serve LLM chooses it",
}


class EngineSettings(Section):
    """The engine and its limits. On CPUs the device cache is small, so that sessions spill to the
    host tier. `engine: torch` is short for `engine: {kind: torch}`."""

    kind: EngineKind = Field(
        "vllm",
        description="torch: our own, which executes load plans; emulated: computes nothing, for "
        "tests of a cluster",
    )
    planner: PlannerName = Field(
        "auto",
        description="how cached prefixes come back. Of kind vllm: tail (which auto means there) "
        "loads the front and computes the rest where that is faster; kv loads all. Of kind torch, "
        "host-*: contexts lie in host memory while requests run and cross at every step, as KV "
        "(kv), split between KV and activations (kvpr), or kept as one or the other (hybrid); "
        "auto: those alone that exceed cpu_room_share",
    )
    host_tier: HostTierName = Field(
        "auto",
        description="auto: native on GPUs, else own; native: copied by vLLM, which needs a GPU; "
        "own: copied by us, on CPUs; lmcache: an LMCache server; stock: vLLM's connector as it "
        "comes, and nothing of ours in the engine",
    )
    load: Literal["ahead", "layers"] = Field(
        "ahead",
        description="ahead: before the prompt, beside others' steps; layers: where a request has "
        "the engine to itself, in its prompt's own step, each layer while the one before is "
        "computed (host_tier own)",
    )
    lmcache: LmcacheSettings = LmcacheSettings()
    act_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of stored blocks kept as activations, too; 1 unless hybrid; of planner "
        "host-hybrid: instead, and 0: as planned; torch only",
    )
    act_device_blocks: int = Field(
        0,
        ge=0,
        description="blocks of activations that stay on the device instead of crossing at every "
        "step; of planner host-hybrid",
    )
    weights: WeightsSection = WeightsSection()
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
        description="whether answers may be approximate (sparse): ask (or true): if the request "
        "says so; always: unless the request says no; torch only",
    )
    sparse: SparseSection = SparseSection()
    max_context_tokens: int | None = Field(
        None, ge=64, description="none, here and below: vLLM's own choice on GPUs, 8192 on CPUs"
    )
    block_tokens: int | None = Field(None, ge=16, description="on CPUs 32")
    device_blocks: int | None = Field(
        None, ge=8, description="KV blocks in the device cache; on CPUs 264"
    )
    host_bytes: int | None = Field(
        None,
        ge=0,
        description="a worker's host tier; zero switches it off; none: on CPUs 64 MiB, on GPUs its "
        "share of 40 % of the machine's memory",
    )
    disk_bytes: int = Field(0, ge=0, description="disk tier behind host memory, larger; zero: none")
    disk_dir: str | None = Field(None, description="folder of the disk tier's file, a whole path")
    max_batch_tokens: int | None = Field(
        None, ge=64, description="token budget of one step; on CPUs 1024"
    )
    max_sequences: int | None = Field(None, ge=1, description="on CPUs 64")
    dtype: DtypeName | None = Field(None, description="of weights and KV; on CPUs float32")
    tool_call_parser: ToolCallParserName = Field(
        "auto", description="vLLM's, which reads tool calls in answers; auto: by the model's family"
    )
    reasoning_parser: ReasoningParserName = Field(
        "auto", description="vLLM's, which sets reasoning apart; auto: by the model's family"
    )
    metrics: bool = Field(False, description="export vLLM's own metrics through Ray, too")
    extra: dict[str, Any] = Field(
        default_factory=dict,
        description="more vLLM engine arguments, which go before our own; some are refused",
    )

    @field_validator("approx", mode="before")
    @classmethod
    def _yes_or_no(cls, value: Any) -> Any:
        return {True: "ask", False: "never"}[value] if isinstance(value, bool) else value

    @field_validator("extra")
    @classmethod
    def _none_of_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        ours = NOT_IN_EXTRA.items()
        wrong = [f"{name} cannot be given: {why}" for name, why in ours if name in value]
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            ranks = value.get(name, 1)
            if type(ranks) is not int or ranks < 1:
                wrong.append(f"{name} is {ranks!r}: give a whole number, 1 or more")
        if wrong:
            raise ValueError("; ".join(wrong))
        return value

    @model_validator(mode="after")
    def _agrees(self) -> EngineSettings:
        if fault := next(self._faults(), None):
            raise ValueError(fault)
        return self

    def _faults(self) -> Iterator[str]:
        """Settings that contradict each other, as sentences."""
        kind, planner, tier, host = self.kind, self.planner, self.host_tier, self.host_bytes
        vllm, torch, known = kind == "vllm", kind == "torch", _PLANNERS.get(kind)
        our_tier = vllm and tier in ("auto", "own")
        if self.approx != "never" and not torch:
            yield f"approx {self.approx} needs kind torch, and this is {kind}"
        if self.approx != "never" and host == 0:
            yield f"approx {self.approx} needs host_bytes above zero: KV is kept there"
        if known is not None and planner not in known:
            yield f"planner {planner} is not one of kind {kind}: choose {', '.join(known)}"
        if torch and self.dtype in ("auto", "half", "float"):
            yield (f"dtype is {self.dtype}, and kind torch wants it by its whole name: use "
                   "float32, bfloat16 or float16")  # fmt: skip
        yield from self._weight_faults()
        if self.cpu_threads and (not torch or host == 0):
            yield "cpu_threads needs kind torch and host_bytes above zero"
        if planner in ("host-weights", "host-cpu") and self.weights.place != "host":
            yield f"planner {planner} needs weights.place host, or use host-kv"
        if planner == "host-cpu" and not self.cpu_threads:
            yield "planner host-cpu needs cpu_threads above zero: who else would attend"
        if planner.startswith("host-") and host == 0:
            yield f"planner {planner} needs host_bytes above zero: it keeps KV there"
        share = self.act_share
        kv_alone = dict.fromkeys(("host-kv", "host-weights", "host-cpu"), share > 0)
        if {**kv_alone, "host-kvpr": 0 < share < 1}.get(planner):
            yield (f"act_share is {share} with planner {planner}: leave it out, since host-kv "
                   "stores no activations and host-kvpr those of every block")  # fmt: skip
        if self.act_device_blocks and planner != "host-hybrid":
            yield f"act_device_blocks needs planner host-hybrid, and this is {planner}"
        if planner == "cpu" and not self.cpu_threads:
            yield "planner cpu needs cpu_threads above zero: who else would attend"
        if tier in ("native", "lmcache", "stock") and not vllm:
            yield f"host_tier {tier} needs kind vllm, and this is {kind}"
        if self.load == "layers" and not (our_tier and host != 0):
            yield "load layers needs kind vllm, host_tier auto or own, and host_bytes"
        if self.load == "layers" and self.disk_bytes:
            yield "load layers needs disk_bytes 0: a row on disk holds all layers"
        if tier in ("native", "lmcache") and host == 0:
            yield f"host_tier {tier} needs host_bytes above zero"
        twice = [
            f"{name} and extra.{argument} are the same: drop one"
            for name, (argument, _) in VLLM_LIMITS.items()
            if argument in self.extra and getattr(self, name) is not None
        ]
        if twice:
            yield "; ".join(twice)
        folder, size = self.disk_dir or "", self.disk_bytes
        if bool(size) != bool(folder) or (folder and not folder.startswith("/")):
            yield (f"disk_bytes is {size:,} and disk_dir {folder or 'none'}: give both, the folder "
                   "as a whole path, or neither")  # fmt: skip
        if size and not our_tier:
            yield "disk_bytes needs kind vllm and host_tier auto or own"
        if size and host is not None and not 0 < host < size:
            yield (f"disk_bytes is {size:,} and host_bytes {host:,}: the disk holds what host "
                   "memory holds, and is reached through it: give that less, but some")  # fmt: skip
        blocks, tokens, longest = self.device_blocks, self.block_tokens, self.max_context_tokens
        # These planners keep a context in host memory and bring it in by parts.
        beyond_device = torch and planner.startswith("host-")
        device_tokens = (blocks - 1) * tokens if blocks and tokens else 0
        if device_tokens and longest and device_tokens < longest and not beyond_device:
            yield (f"device_blocks * block_tokens holds {device_tokens} tokens, less than "
                   f"max_context_tokens = {longest}: raise the one or lower the other")  # fmt: skip

    def _weight_faults(self) -> Iterator[str]:
        weights, offload = self.weights, self.extra.get("cpu_offload_gb", 0)
        if isinstance(offload, bool) or not isinstance(offload, int | float) or offload < 0:
            yield f"extra.cpu_offload_gb is {offload!r}: give a number of GiB, 0 or more"
        if weights.place == "device":
            return
        if self.kind == "emulated":
            yield "weights.place host needs kind torch or vllm, and this is emulated"
        if self.kind == "vllm" and weights.part != "layers":
            yield (f"weights.part is {weights.part}, and kind vllm moves whole layers' weights: "
                   "leave it out, or use kind torch")  # fmt: skip
        if offload:
            yield "weights.place host and extra.cpu_offload_gb are the same: drop one"
        if self.approx != "never":
            yield (f"weights.place host and approx {self.approx}: sparse decoding has all weights "
                   "on the device; give approx never")  # fmt: skip

    def host_weight_bytes(self, whole_bytes: float, gpus: int) -> float:
        """Bytes of a worker's weights, `whole_bytes` in all, that lie in host memory and cross the
        link at every step."""
        share = self.weights.share if self.weights.place == "host" else 0.0
        # vLLM's is of each GPU, in GiB.
        offloaded = float(self.extra.get("cpu_offload_gb", 0)) * (1 << 30) * max(gpus, 1)
        return min(share * whole_bytes + offloaded, whole_bytes)

    def tier_on(self, gpus: int) -> str:
        """The host tier of a worker with `gpus` GPUs, where `host_tier` may be auto."""
        if self.host_tier != "auto":
            return self.host_tier
        return "native" if gpus and self.kind == "vllm" else "own"

    @property
    def shared_server(self) -> str:
        """The LMCache server that several workers load from; empty: none."""
        return (self.lmcache.server or "") if self.host_tier == "lmcache" else ""

    def on(self, gpus: int) -> EngineSettings:
        """The same settings with all limits of a worker with `gpus` GPUs.

        vLLM on GPUs chooses limits that are not given; on a CPU, and for our own engines, they are
        figures for a small machine.

        Raises:
            ValidationError: a context that does not fit these.
        """
        if gpus and self.kind == "vllm":
            return self
        missing: dict[str, int | str] = {
            name: figure
            for name, (argument, figure) in VLLM_LIMITS.items()
            if getattr(self, name) is None and argument not in self.extra
        }
        if self.host_bytes is None:
            missing["host_bytes"] = _CPU_HOST_BYTES
        return EngineSettings.model_validate({**self.model_dump(), **missing})


def share_bytes(memory_bytes: float, gpus: float, gpus_each: int) -> int:
    """The default size of a GPU worker's host tier: `HOST_SHARE` of the machine's memory, divided
    among the workers that its `gpus` are enough for."""
    return int(HOST_SHARE * memory_bytes / max(gpus // max(gpus_each, 1), 1))
