"""What a worker is: the announcement made from its plan, its node and its measurements. A paced
node keeps the profile it is paced by; a node that could not be measured keeps the catalogue's.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from msgspec import structs

from kappa.cost import USUAL_BLOCK_TOKENS, loading_node, step_model
from kappa.hardware import NODE_RATES, REACHED, NodeProfile
from kappa.model import ModelShape, kv_bytes_per_token
from kappa.plans.clo import HeadProfile
from kappa.plans.measured import rates_from_measured
from kappa.plans.rates import LEAST_R2
from kappa.protocol import Announcement
from kappa.settings.engine import EngineSettings, TransferSettings, share_bytes
from kappa.settings.routing import ObservingSettings
from kappa_scheduler.catalogue import packs
from kappa_workers.paced.disk_file import row_bytes
from kappa_workers.vllm.arguments import (
    BY_SHARE,
    Endpoints,
    EngineLimits,
    EngineTier,
    Pace,
    add_nixl,
    engine_kwargs,
    fingerprint,
    meet_peers,
)
from kappa_workers.vllm.options import (
    MOST_P90,
    STOCK,
    LinkRules,
    SchedulerOptions,
    fitted_step,
    worst_kind,
)
from kappa_workers.vllm.tail_recompute import LOAD_ALL, TAIL, tail_rates

# Of a catalogue's node: what is measured has them in its rates.
_PRIOR_ONLY = "peer_bytes_per_s", "peer_fixed_s", "link_bytes_per_s"
# An engine measures itself for so long at most, once per machine, model and versions.
_MEASURE_S = 18.0
# A line that is off by more of a transfer's seconds is said to be.
_LINE_ERROR = 0.1


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What a replica must know before its engine starts; fields without a note are as in the
    settings."""

    # A profile per rank: of source "paced" the node is paced as, any other a prior until measured.
    nodes: tuple[NodeProfile, ...]
    # The shape of the model that runs.
    served: ModelShape
    # The shape of the model that paced nodes act as.
    emulated: ModelShape
    limits: EngineLimits
    model_source: str
    chat_template: str
    cache_dir: str
    # The address for the report stream; empty: this machine's address in Ray's cluster.
    stream_host: str
    scheduler: SchedulerOptions = field(default_factory=lambda: SchedulerOptions(STOCK))
    link: LinkRules = field(default_factory=LinkRules)
    # With the pool's changes; the share of activations is what the planner needs.
    engine: EngineSettings = field(default_factory=EngineSettings)
    # Of `engine.sparse.heads`, since that file may be on another machine. None: all count alike.
    heads: HeadProfile | None = None
    pool: str = ""
    role: str = "both"
    # GPUs of each worker.
    gpus: int = 0
    transfer: TransferSettings = field(default_factory=TransferSettings)
    # Whether engines hand prompts over by vLLM's connector.
    nixl: bool = False
    # Whether engines take blocks from each other's host tiers.
    peers: bool = False
    observing: ObservingSettings = field(default_factory=ObservingSettings)
    log_level: str = "WARNING"
    # vLLM's mode of CUDA graphs, read back from the engine; empty: not known.
    graphs: str = ""
    # What fronts show at the worker's own HTTP port; empty: it has no such port.
    front_secret: str = ""
    # Seconds that open requests get when the worker is taken away.
    drain_s: float = 60.0
    # Seconds without a running thread after which the replica is ended.
    silent_s: float = 10.0

    @property
    def tier(self) -> str:
        """The kind of its host tier."""
        return self.engine.tier_on(self.gpus)

    def node(self, rank: int) -> NodeProfile:
        """The node of a rank, with the link rates that copies of its model's KV reach."""
        node = self.nodes[rank % len(self.nodes)]
        shape = self.emulated if node.source == "paced" else self.served
        return loading_node(shape, node, self.limits.block_tokens or USUAL_BLOCK_TOKENS)

    def sized(self, memory_bytes: float, gpus: float) -> WorkerPlan:
        """The same with a host tier for a machine with this memory and these GPUs, where the
        settings leave its size open."""
        if self.limits.host_bytes != BY_SHARE:
            return self
        host_bytes = share_bytes(memory_bytes, gpus, self.gpus)
        return replace(self, limits=replace(self.limits, host_bytes=host_bytes))

    def started(self, ranks: Sequence[Mapping[str, Any]]) -> WorkerPlan:
        """The same with what an engine of vLLM was read back to have, by rank
        (`kappa_workers.vllm.read_back.engine_facts`)."""
        names = [each.name for each in fields(EngineLimits) if each.name != "host_bytes"]
        limits = replace(self.limits, **{name: ranks[0][name] for name in names})
        token_bytes = sum(rank["kv_token_bytes"] for rank in ranks)
        weight_bytes = sum(rank["weight_bytes"] for rank in ranks) / self.served.params_total
        served = replace(
            self.served,
            kv_token_bytes=token_bytes,
            weight_dtype_bytes=weight_bytes or self.served.weight_dtype_bytes,
        )
        return replace(self, limits=limits, served=served, graphs=ranks[0]["graphs"])

    @property
    def block_bytes(self) -> float:
        """Bytes of one KV block of the model that runs, of a usual one before its size is known."""
        return kv_bytes_per_token(self.served) * (self.limits.block_tokens or USUAL_BLOCK_TOKENS)

    @property
    def host_blocks(self) -> int:
        return int(self.limits.host_bytes / self.block_bytes)

    @property
    def layers_loaded(self) -> int:
        """Layers that load one by one for a request that is alone; 0: whole blocks load, ahead of
        its prompt."""
        shape = self.served
        return shape.layers if self.link.by_layer and shape.kv_layers == shape.layers else 0

    @property
    def disk_blocks(self) -> int:
        return self.engine.disk_bytes // row_bytes(int(self.block_bytes))

    def engine_tier(self, rank: int, measured: Mapping[str, Any], server: str = "") -> EngineTier:
        """The host tier of the engine with this rank. measured: of the machine, from an earlier
        start; without, a node that is not paced has no rates to plan by, and loads all. server: of
        LMCache, if the worker started one."""
        node, rates = measured_node(self.node(rank), measured, self.served), None
        if self.engine.planner != LOAD_ALL and node.source != "catalogue":
            shape = self.emulated if node.source == "paced" else self.served
            rates = tail_rates(shape, node, self.layers_loaded)
        return EngineTier(self.tier, self.engine, rates, server, self.host_blocks, self.link)

    def profile_request(self) -> dict[str, Any]:
        return {
            "sizes_bytes": [1 << 20, 1 << 23, 1 << 26],
            "hidden": self.served.hidden,
            "intermediate": 4 * self.served.hidden,
            "dtype": self.limits.dtype,
        }

    def engine_request(self, rank: int) -> dict[str, Any]:
        """The arguments of `kappa_workers.vllm.measured_engine`; empty for a paced engine and for
        ours."""
        node = self.node(rank)
        if self.engine.kind != "vllm" or node.source == "paced":
            return {}
        return {"prior": step_model(self.served, node).to_dict(), "budget_s": _MEASURE_S}


def configure_vllm(
    config: Any, plan: WorkerPlan, rank: int, endpoints: Endpoints, tier: EngineTier
) -> None:
    """Put the arguments of this replica's engine into `config`, Ray Serve LLM's."""
    node = plan.node(rank)
    pace = Pace(plan.emulated, node) if node.source == "paced" else None
    scheduler = structs.replace(plan.scheduler.for_rank(rank), tenant_required=True)
    arguments = engine_kwargs(plan.limits, endpoints, pace, scheduler, tier, plan.gpus)
    if plan.nixl:
        add_nixl(arguments)
    if endpoints.peers is not None:
        meet_peers(plan.transfer, arguments, pace, endpoints.peers)
    # `engine.extra` is there already and goes before; what must be ours it cannot name.
    given = config.engine_kwargs
    config.update_engine_kwargs(**{k: v for k, v in arguments.items() if k not in given})


def of_all_ranks(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The measurements of one engine's ranks, each of its own device and link, as those of one
    device."""
    sums = {name: sum(rank[name] for rank in ranks) for name in NODE_RATES if name in ranks[0]}
    return {**ranks[0], **sums}


def measured_node(
    node: NodeProfile, measured: Mapping[str, Any], shape: ModelShape | None = None
) -> NodeProfile:
    """`node` with the measured figures; paced and unmeasured nodes stay as they are. shape: of the
    model that runs; its steps, if they were measured, say what FLOP/s are reached."""
    if node.source == "paced" or not measured:
        return node
    disk = measured.get("disk", {}).get("bytes_per_s", node.disk_bytes_per_s)
    # What steps reach of a GPU's peaks is in the measured rates.
    bare: dict[str, Any] = dict.fromkeys((*REACHED, *_PRIOR_ONLY), 0.0)
    node = replace(
        node,
        source="measured",
        disk_bytes_per_s=disk,
        gpu=measured["device"],
        link_name="memcpy" if measured["device"] == "cpu" else node.link_name,
        h2d_bytes_per_s=measured["h2d_bytes_per_s"],
        d2h_bytes_per_s=measured["d2h_bytes_per_s"],
        hbm_bytes_per_s=measured["hbm_bytes_per_s"],
        flops_per_s=measured["flops_per_s"],
        load_fixed_s=measured.get("load_fixed_s", 0.0),
        **bare,
    )
    step = fitted_step(measured)
    if step is None or shape is None:
        return node
    peak = step_model(shape, node)
    attention = node.flops_per_s * peak.pair_s / step.pair_s if step.pair_s else 0.0
    return replace(
        node,
        flops_per_s=node.flops_per_s * peak.token_s / step.token_s,
        attention_flops_per_s=attention,
        step_fixed_s=step.fixed_s,
        exposed=step.exposed,
    )


def check_measured(measured: Mapping[str, Any]) -> None:
    """Raise ValueError, KeyError or TypeError if nothing could be announced by it."""
    prior = NodeProfile("prior", "", "", 1.0, 1.0, 1.0)
    measured_node(prior, dict(measured))
    fitted_step(measured)
    shortcomings(measured)


def shortcomings(measured: Mapping[str, Any]) -> str:
    """Sentences on what of an engine was not measured or fits badly; empty if nothing."""
    found = [f"not measured: {each}" for each in measured.get("unmeasured", ())]
    step = measured.get("step")
    kind, p90 = worst_kind(step) if step else ("", 0.0)
    if step and p90 > MOST_P90:
        found.append(
            f"the step fit is off by more than {p90:.0%} in one of ten {kind} steps, above "
            f"{MOST_P90:.0%}: it is not used, and the prior is"
        )
    elif step and not step["r2"] >= LEAST_R2:
        used = "" if fitted_step(measured) else ", and the prior is nearer and is used"
        found.append(
            f"the step fit has R² {step['r2']:.3f} over {step['steps']} steps, below {LEAST_R2}; "
            f"half of them are off by more than {step['error']:.0%}{used}"
        )
    for kind in ("load", "store"):
        if (error := measured.get(f"{kind}_line_error", 0.0)) > _LINE_ERROR:
            found.append(f"the line of {kind}s is off by up to {error:.0%} of a transfer's seconds")
    return "; ".join(found)


@dataclass(frozen=True, slots=True)
class ReplicaId:
    """Which replica it is, and where it can be reached."""

    # Its worker's id.
    worker: str
    rank: int
    # The model it serves.
    model: str
    # Its report stream; empty: it has none.
    events_endpoint: str
    snapshot_endpoint: str
    # Where peers can read its host tier; empty: nowhere.
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Profile:
    """What a replica measured; empty with an error where that failed."""

    measured: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def announce(
    plan: WorkerPlan,
    replica: ReplicaId,
    profile: Profile,
    rates: Mapping[str, Any] | None = None,
    tail: Mapping[str, Any] | None = None,
) -> Announcement:
    """The announcement of one replica. rates: what an engine that executes load plans measured
    (`kappa_engine.profile`): its steps and plans are announced by them. tail: the rates by which an
    engine of vLLM leaves part of a hit unloaded."""
    node, limits = plan.node(replica.rank), plan.limits
    paced, fitted = node.source == "paced", fitted_step(profile.measured)
    shape = plan.emulated if paced else plan.served
    node = measured_node(node, profile.measured, shape)
    if rates:
        measured = rates_from_measured(rates)
        step = measured.served_step
        node = replace(
            node,
            h2d_bytes_per_s=measured.h2d_bytes_per_s,
            load_fixed_s=measured.load.fixed_s,
            step_fixed_s=step.fixed_s,
        )
        load_plan = _executed_plan(plan, rates)
    else:
        step = step_model(shape, node) if paced or fitted is None else fitted
        load_plan = _loaded_plan(plan, shape, node, tail)
    known = plan.engine.kind != "emulated" and (rates or paced or fitted)
    return Announcement(
        worker=replica.worker,
        model=replica.model,
        node=node,
        step=step,
        kv_bytes_per_token=kv_bytes_per_token(shape),
        emulated_model=shape.name if paced else "",
        fingerprint=fingerprint(plan.model_source, plan.chat_template, limits, plan.served.name),
        block_tokens=limits.block_tokens,
        device_blocks=limits.device_blocks,
        host_blocks=plan.host_blocks,
        disk_blocks=plan.disk_blocks,
        max_batch_tokens=limits.max_batch_tokens,
        max_sequences=limits.max_sequences,
        max_context_tokens=limits.max_context_tokens,
        events_endpoint=replica.events_endpoint,
        snapshot_endpoint=replica.snapshot_endpoint,
        net_bytes_per_s=plan.transfer.net_bytes_per_s if replica.peer else 0.0,
        peer=replica.peer,
        profile_error=profile.error or shortcomings(profile.measured),
        packs=packs(plan.scheduler.rule),
        step_factor=plan.scheduler.step_factor if known else 0.0,
        engine=plan.engine.kind,
        load_plan=load_plan,
        tier=plan.tier,
        shared_tier=plan.engine.shared_server,
        measured=profile.measured,
        pool=plan.pool,
        role=plan.role,
        graphs=plan.graphs,
    )


def _executed_plan(plan: WorkerPlan, rates: Mapping[str, Any]) -> dict[str, Any]:
    """How an engine of ours brings a prefix back, by the rates that it measured."""
    engine, found = plan.engine, dict[str, Any](rates=dict(rates))
    found |= {"planner": engine.planner, "act_share": engine.act_share}
    if engine.cpu_threads:
        found["cpu_room_share"] = engine.cpu_room_share
    if engine.approx != "never":
        found["approx"] = engine.approx
        if engine.sparse.loss:
            found["loss"] = engine.sparse.loss
    return found


def _loaded_plan(
    plan: WorkerPlan, shape: ModelShape, node: NodeProfile, tail: Mapping[str, Any] | None
) -> dict[str, Any]:
    """How much of a hit an engine of vLLM loads; empty: all of it, ahead of the prompt."""
    rates = tail
    if not tail and plan.layers_loaded:
        rates = tail_rates(shape, node, plan.layers_loaded)
    planner = TAIL if tail else LOAD_ALL
    return {"planner": planner, "act_share": 0.0, "rates": dict(rates)} if rates else {}
