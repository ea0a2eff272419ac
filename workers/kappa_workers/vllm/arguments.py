"""The arguments that make a vLLM engine one of our workers: our worker class, the host tier, the
event publisher, and on a paced node the pace of both resources. Every vLLM option that we set is
named here. Pure translation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from kappa.cost import StepModel, step_model
from kappa.hardware import NodeProfile
from kappa.model import ModelShape, kv_bytes_per_token
from kappa.settings.engine import VLLM_LIMITS, EngineSettings, TransferSettings
from kappa_workers.vllm.options import (
    DISK_KEY,
    LINK_KEY,
    LMCACHE_KEY,
    PACE_KEY,
    PEERS_KEY,
    SCHEDULER_KEY,
    STATS_KEY,
    STOCK,
    TAIL_KEY,
    LinkPace,
    LinkRules,
    PeerOptions,
    SchedulerOptions,
)

# vLLM on a CPU: no thread binding and one thread per engine, so that engines share the cores;
# short queue spins (kappa_workers.vllm_plugin); float32, since bf16 fails on short prompts there.
# Nothing is compiled: the model runs as it is written, and vLLM's sampler alone would have inductor
# build a kernel of C++ inside the first request that draws its tokens, for 23 s.
CPU_ENV = {
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "KAPPA_QUEUE_SPIN_S": "0.0005",
    "KAPPA_DIE_WITH_PARENT": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

OWN, LMCACHE, NATIVE, STOCK_TIER = "own", "lmcache", "native", "stock"
_CPU_WORKER = "kappa_workers.paced.metered_worker.MeteredCPUWorker"
_GPU_WORKER = "kappa_workers.vllm.metered_worker.MeteredGPUWorker"
# What vLLM loads by name, of each host tier: the connector; how the tier describes itself.
_CONNECTORS = {
    OWN: ("CpuHostTierConnector", "kappa_workers.paced.connector"),
    NATIVE: ("HostTierConnector", "kappa_workers.vllm.connector"),
    LMCACHE: ("LmcacheConnector", "kappa_workers.vllm.lmcache.connector"),
}
_SPECS = {
    OWN: ("HostTierSpec", "kappa_workers.paced.host_tier"),
    NATIVE: ("NativeTierSpec", "kappa_workers.vllm.gpu_host_tier"),
}
# The blocks announced of a server are bounded by its size, or, of a shared one, by this.
_SHARED_BLOCKS = 1 << 20


BY_SHARE = -1


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Sizes of one engine. Zero, or an empty dtype: the engine's own choice, read back later
    (`kappa_workers.vllm.read_back`)."""

    max_context_tokens: int
    block_tokens: int
    device_blocks: int
    # Bytes of the host tier; 0: there is none; `BY_SHARE` until the machine is known.
    host_bytes: int
    max_batch_tokens: int
    max_sequences: int
    dtype: str
    # Empty: the model's dtype.
    kv_dtype: str = ""

    @classmethod
    def of(cls, engine: EngineSettings) -> EngineLimits:
        """As the settings have them, or their `extra` by vLLM's names."""

        def given(name: str, none: Any) -> Any:
            value = getattr(engine, name) or engine.extra.get(VLLM_LIMITS[name][0])
            return value if type(value) is type(none) and value not in (-1, "auto") else none

        kv_dtype = str(engine.extra.get("kv_cache_dtype", "auto"))
        return cls(
            **{name: given(name, type(figure)()) for name, (_, figure) in VLLM_LIMITS.items()},
            host_bytes=BY_SHARE if engine.host_bytes is None else engine.host_bytes,
            kv_dtype="" if kv_dtype == "auto" else kv_dtype,
        )

    @property
    def missing(self) -> list[str]:
        """Limits that the engine chooses."""
        return [name for name in VLLM_LIMITS if not getattr(self, name)]

    def arguments(self) -> dict[str, Any]:
        """The limits that are given, by vLLM's names."""
        given = {vllm: getattr(self, ours) for ours, (vllm, _) in VLLM_LIMITS.items()}
        return {name: value for name, value in given.items() if value}


class Endpoints(NamedTuple):
    """Where the engine's processes report to, and where its host tier is served."""

    # The stats channel; empty: nothing is sent.
    stats: str
    # vLLM's event publisher.
    kv_events: str
    # None: the host tier is not served.
    peers: PeerOptions | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """The model that a paced node emulates and the node it is paced as."""

    shape: ModelShape
    node: NodeProfile

    @property
    def step(self) -> StepModel:
        return step_model(self.shape, self.node)

    @property
    def steps(self) -> dict[str, Any]:
        """What steps last by, as `kappa_workers.paced.steps.PacedSteps` reads it."""
        return {"node": self.node.to_dict()} if self.node.silicon else self.step.to_dict()

    @property
    def link(self) -> LinkPace:
        kv_bytes, node = kv_bytes_per_token(self.shape), self.node
        store_bytes_per_s = node.d2h_bytes_per_s or node.h2d_bytes_per_s
        return LinkPace(
            token_s=node.dilation * kv_bytes / node.h2d_bytes_per_s,
            store_token_s=node.dilation * kv_bytes / store_bytes_per_s,
            fixed_s=node.dilation * node.load_fixed_s,
            dilation=node.dilation,
        )


@dataclass(frozen=True, slots=True)
class EngineTier:
    """An engine's host tier."""

    # Copied by us, by vLLM (on a GPU), an LMCache server, or vLLM's connector in a stock engine.
    kind: str = OWN
    engine: EngineSettings = field(default_factory=EngineSettings)
    # The rates that its loads are planned by; None: it loads all.
    rates: Mapping[str, Any] | None = None
    # The LMCache server that its worker started for it; empty: none.
    server: str = ""
    host_blocks: int = 0
    # How loads and stores share its link.
    link: LinkRules = field(default_factory=LinkRules)


def engine_kwargs(
    limits: EngineLimits,
    endpoints: Endpoints,
    pace: Pace | None,
    scheduler: SchedulerOptions = SchedulerOptions(STOCK),
    tier: EngineTier = EngineTier(),
    gpus: int = 0,
) -> dict[str, Any]:
    """vLLM's engine arguments for a replica; `gpus`: of each worker, 0 on a CPU. What
    `engine.extra` gives goes before them (`EngineSettings.extra` refuses what may not)."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoints.kv_events,
        "topic": "kv",
    }
    arguments: dict[str, Any] = {
        **limits.arguments(),
        # A CPU has no graphs, and compiling takes longer there than it saves.
        **({} if gpus else {"enforce_eager": True}),
        "enable_prefix_caching": True,
        "kv_events_config": events,
    }
    if tier.kind == STOCK_TIER:
        if limits.host_bytes:
            # By what its documentation names alone.
            extra = {"cpu_bytes_to_use": limits.host_bytes}
            arguments["kv_transfer_config"] = _transfer("OffloadingConnector", extra)
        return arguments
    additional: dict[str, Any] = {STATS_KEY: endpoints.stats}
    if pace is not None:
        additional[PACE_KEY] = pace.steps
    arguments["worker_cls"] = _GPU_WORKER if gpus else _CPU_WORKER
    arguments["additional_config"] = additional
    if scheduler.rule != STOCK:
        arguments["scheduler_cls"] = "kappa_workers.vllm.scheduler.FairScheduler"
        options = msgspec.structs.replace(scheduler, stats=endpoints.stats)
        if pace is not None:
            link = {"token_s": pace.link.token_s, "fixed_s": pace.link.fixed_s}
            step = pace.step.to_dict()
            options = msgspec.structs.replace(options, link=link, step=step, profile="")
        additional[SCHEDULER_KEY] = msgspec.to_builtins(options)
    if limits.host_bytes:
        config = transfer_config(tier, limits.host_bytes, endpoints.stats)
        if tier.kind != NATIVE and pace is not None:
            config["kv_connector_extra_config"][PACE_KEY] = msgspec.to_builtins(pace.link)
        arguments["kv_transfer_config"] = config
    return arguments


def _transfer(connector: str, extra: dict[str, Any], **place: str) -> dict[str, Any]:
    """A `kv_transfer_config` by which the tokens of a load that fails are computed: vLLM's default
    would fail the request. place: the connector's module, where it is not vLLM's."""
    return {
        "kv_connector": connector,
        **place,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def transfer_config(tier: EngineTier, host_bytes: int, stats_endpoint: str) -> dict[str, Any]:
    """The `kv_transfer_config` of an engine with this host tier: a connector of ours, so that
    admissions are reported and a tail may be computed."""
    engine = tier.engine
    connector, module = _CONNECTORS[tier.kind]
    extra: dict[str, Any] = {STATS_KEY: stats_endpoint}
    if tier.rates is not None:
        extra[TAIL_KEY] = dict(tier.rates)
    if tier.kind == LMCACHE:
        lmcache = engine.lmcache
        host, port = (lmcache.server or tier.server).rsplit(":", 1)
        extra |= {
            "lmcache.mp.host": host,
            "lmcache.mp.port": int(port),
            "lmcache.mp.mq_timeout": lmcache.timeout_s,
            "lmcache.mp.heartbeat_interval": lmcache.heartbeat_s,
            LMCACHE_KEY: {
                "timeout_s": lmcache.timeout_s,
                "retry_s": lmcache.retry_s,
                "most_blocks": _SHARED_BLOCKS if lmcache.server else tier.host_blocks,
            },
        }
    else:
        extra |= {
            "cpu_bytes_to_use": host_bytes,
            "self_describing_kv_events": True,
            "offload_prompt_only": False,
        }
        spec, place = _SPECS[tier.kind]
        extra |= {"spec_name": spec, "spec_module_path": place}
        extra[LINK_KEY] = msgspec.to_builtins(tier.link)
        if engine.disk_bytes:
            extra[DISK_KEY] = (engine.disk_dir, engine.disk_bytes)
    return _transfer(connector, extra, kv_connector_module_path=module)


def add_nixl(arguments: dict[str, Any]) -> None:
    """Have the engine hand whole prompts over by vLLM's own connector, beside that of its host
    tier; `arguments` are vLLM's, changed in place."""
    # The first that holds something loads, and both store.
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    extra = {"connectors": [nixl, arguments["kv_transfer_config"]]}
    arguments["kv_transfer_config"] = _transfer("MultiConnector", extra)


def meet_peers(
    transfer: TransferSettings, arguments: dict[str, Any], pace: Pace | None, peers: PeerOptions
) -> None:
    """Have the engine give its peers what its host tier holds, and take what theirs hold;
    `arguments` are vLLM's, changed in place."""
    changes = {"wait_s": transfer.wait_s}
    if pace is not None:
        dilation, kv_bytes = pace.node.dilation, kv_bytes_per_token(pace.shape)
        changes["token_s"] = dilation * kv_bytes / transfer.net_bytes_per_s
        changes["fixed_s"] = dilation * transfer.fixed_s
    options = msgspec.to_builtins(msgspec.structs.replace(peers, **changes))
    arguments["kv_transfer_config"]["kv_connector_extra_config"][PEERS_KEY] = options


def fingerprint(
    model_source: str, chat_template: str, limits: EngineLimits, shape_name: str
) -> str:
    """Hash of what two workers must share for their KV blocks to mean the same."""
    parts = {
        "model": model_source,
        "template": chat_template,
        "dtype": limits.dtype,
        "block_tokens": limits.block_tokens,
        "shape": shape_name,
        "hash": "vllm-0.29",
        **({"kv_dtype": limits.kv_dtype} if limits.kv_dtype else {}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
