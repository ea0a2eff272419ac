"""One simulated run: a cluster, a workload, a policy; in seconds of simulated time.

`simulate` is the entry. It builds the nodes with their true constants, announces them to the router
as it is to believe them, plays the traffic, and returns an `Outcome`. It is pure and seeded: the
same configuration gives the same outcome to the last bit, decision times apart.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kappa.cost import loading_node
from kappa.model import ModelShape, kv_bytes_per_token
from kappa.plans.measured import as_measured
from kappa.plans.rates import rates_from_law
from kappa.protocol import Announcement
from kappa.slo import idle_speed, limits, median_idle
from kappa_router.config import RouterConfig
from kappa_router.load_plans import planner_of
from kappa_router.policy import Policy, policy_named
from kappa_router.router import Router
from kappa_scheduler.catalogue import SCHEDULERS, packs, step_factor
from kappa_simulator.clusters import NodeModel, NodeSpec, SimulatedCluster, check, node_model
from kappa_simulator.dispatch import Dispatcher, PlanDispatch, RouterDispatch
from kappa_simulator.faults import Faults, announced
from kappa_simulator.node import Node
from kappa_simulator.outcome import NodeRecord, Outcome, RequestRecords
from kappa_simulator.play import Play
from kappa_simulator.traffic import Clients, Traffic, build_traffic
from kappa_workload.shapes import Workload

_UNKNOWN = np.nan, ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """One run: cluster, workload, policy, and the conditions of the run."""

    cluster: SimulatedCluster
    workload: Workload
    shape: ModelShape
    # As `kappa_router.policy.policy_named` takes it, or a fresh policy.
    policy: str | Policy = "ttft"
    # The rule of every node.
    scheduler: str = "fcfs"
    # Fraction of the capacity bound, or requests a second: one of the two.
    load: float | None = None
    rate_rps: float | None = None
    # The bound, if it is known.
    capacity_rps: float | None = None
    requests: int = 25_000
    seed: int = 0
    # Host tiers hold documents and histories at the start.
    warm: bool = True
    faults: Faults = field(default_factory=Faults)
    # The router rejects requests that would be late: off here, where policies are compared, and on
    # by default live.
    admission: bool = False
    # Behaviour of clients that are refused, or wait.
    clients: Clients = field(default_factory=Clients)
    # Routers, to which requests come by lot, and the seconds between what they tell each other of
    # their requests; 0: nothing.
    routers: int = 1
    share_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a run that is impossible, before any work.

        Raises:
            ValueError: says what to give instead.
            ClusterError: names the node.
        """
        if (self.load is None) == (self.rate_rps is None):
            raise ValueError("give either load, a fraction of capacity, or rate_rps")
        for name in ("load", "rate_rps"):
            value = getattr(self, name)
            if value is not None and not (np.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}: give a finite number above zero")
        if self.requests < 1:
            raise ValueError(f"requests is {self.requests}: give 1 or more")
        if self.routers < 1 or not (np.isfinite(self.share_s) and self.share_s >= 0):
            raise ValueError("give 1 router or more, and share_s as a finite number from 0 up")
        if self.routers > 1 and not isinstance(self.policy, str):
            raise ValueError("several routers do not share a policy's state: give its name")
        if self.scheduler not in SCHEDULERS:
            raise ValueError(
                f"unknown scheduler {self.scheduler!r}: choose one of {', '.join(SCHEDULERS)}"
            )
        check(self.cluster, self.shape, self.workload.block_tokens)

    def replaced(self, **changes: Any) -> SimulationConfig:
        """A copy with some fields changed."""
        return replace(self, **changes)


def simulate(
    config: SimulationConfig,
    *,
    traffic: Traffic | None = None,
    assignment: Sequence[int] | None = None,
    timer: Callable[[], float] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Run `config` to its end.

    Args:
        config: what to simulate.
        traffic: from `traffic_of`, where several runs share it.
        assignment: node of each request of the traffic, instead of the router's choice.
        timer: real seconds, to measure the router's decisions by.
        progress: receives now and then how many requests ended, and how many there are.

    Raises:
        SimulationError: requests were left that nothing would ever serve.
    """
    traffic = traffic or traffic_of(config)
    models = node_models(config)
    dispatcher: Dispatcher
    if assignment is None:
        count, announcements = config.routers, announcements_of(config, models)
        routers = [_router(config, models, i / count) for i in range(count)]
        dispatcher = RouterDispatch(
            routers, announcements, timer, share_s=config.share_s, seed=config.seed
        )
    elif len(assignment) == traffic.requests:
        dispatcher = PlanDispatch(assignment)
    else:
        raise ValueError(f"the plan has {len(assignment)} entries for {traffic.requests} requests")
    play = Play(models, traffic, dispatcher, config.faults, config.seed)
    with _uncollected():
        play.run(progress)
    name = config.policy if isinstance(config.policy, str) else config.policy.name
    return _outcome(config, "plan" if assignment is not None else name, traffic, play)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Switch the cyclic garbage collector off: a run has no cycles, and the search for them takes
    up to a fifth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def traffic_of(config: SimulationConfig) -> Traffic:
    """The requests of a run; the same for all policies, schedulers and faults."""
    rate_rps = config.rate_rps
    if rate_rps is None:
        assert config.load is not None
        rate_rps = config.load * capacity_of(config)
    speeds = [idle_speed(config.shape, node.profile) for node in config.cluster.nodes]
    typical = sorted(speeds, key=lambda s: s.step.token_s)[(len(speeds) - 1) // 2]
    traffic = build_traffic(
        config.workload,
        typical,
        rate_rps=rate_rps,
        requests=config.requests,
        seed=config.seed,
        warm=config.warm,
    )
    traffic.clients = config.clients
    return traffic


def capacity_of(config: SimulationConfig) -> float:
    """The bound on the rate of requests that the cluster can sustain, requests/s."""
    if config.capacity_rps is not None:
        return config.capacity_rps
    from kappa_simulator.capacity import capacity_rps

    return capacity_rps(config.workload, config.cluster.nodes, config.shape, warm=config.warm)


def node_models(config: SimulationConfig) -> list[NodeModel]:
    """The constants of each node."""
    size = config.workload.block_tokens
    return [
        replace(node_model(node, config.shape, size), rule=config.scheduler)
        for node in config.cluster.nodes
    ]


def _router(config: SimulationConfig, models: Sequence[NodeModel], first: float) -> Router:
    blocks = sum(model.device_blocks + model.host_blocks + model.disk_blocks for model in models)
    policy = config.policy
    return Router(
        RouterConfig(
            policy=policy_named(policy, config.seed) if isinstance(policy, str) else policy,
            secret=1,
            index_blocks=blocks,
            stale_after_s=float("inf"),
            forecast_workers=0,
            admission=config.admission,
            first=first,
            planner_of=planner_of,
        )
    )


def announcements_of(config: SimulationConfig, models: Sequence[NodeModel]) -> list[Announcement]:
    """What each node announces to the router."""
    found: list[Announcement] = []
    for index, (node, model) in enumerate(zip(config.cluster.nodes, models, strict=True)):
        true = loading_node(config.shape, node.profile, model.block_tokens)
        profile, step = announced(index, true, model.step, config.faults.misprofiles)
        plan: dict[str, Any] = {}
        if model.overlap:
            rates = rates_from_law(config.shape, profile, overlap=model.overlap)
            measured = as_measured(rates, config.shape.name, profile.name)
            plan = {"planner": "kv", "act_share": 0.0, "rates": measured}
        found.append(Announcement(
            worker=node.name, model=config.shape.name, node=profile, step=step,
            kv_bytes_per_token=kv_bytes_per_token(config.shape), emulated_model="",
            fingerprint=config.shape.name, block_tokens=model.block_tokens,
            device_blocks=model.device_blocks, host_blocks=model.host_blocks,
            disk_blocks=model.disk_blocks, max_batch_tokens=model.budget_tokens,
            max_context_tokens=model.device_blocks * model.block_tokens,
            max_sequences=model.max_running, events_endpoint="", snapshot_endpoint="",
            net_bytes_per_s=node.network_bytes_per_s, packs=packs(model.rule), load_plan=plan,
            step_factor=step_factor(model.rule, model.fair),
        ))  # fmt: skip
    return found


def _outcome(config: SimulationConfig, policy: str, traffic: Traffic, play: Play) -> Outcome:
    prompts, outputs = traffic.prompt_tokens, traffic.output_tokens
    speeds = (idle_speed(config.shape, node.profile) for node in config.cluster.nodes)
    reused = traffic.reuse_tokens
    idle, tpot = median_idle(speeds, reused, prompts - reused, outputs)
    allowed = limits(idle, tpot)
    ttft_s, tpot_s = np.array(play.ttft_s), np.array(play.tpot_s)
    cached, new_tokens = np.array(play.cached_tokens), np.array(play.new_tokens)
    nodes = np.array(play.node, dtype=np.int64)
    e2e_s = np.array(play.e2e_s)
    n = traffic.requests
    records = RequestRecords(
        arrival_s=np.array(play.arrival_s),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=e2e_s,
        node=nodes,
        kappa=np.where(nodes >= 0, cached / np.maximum(new_tokens, 1), np.nan),
        device_tokens=np.array(play.device_tokens, dtype=np.int64),
        cached_tokens=cached.astype(np.int64),
        new_tokens=new_tokens.astype(np.int64),
        prompt_tokens=prompts,
        output_tokens=outputs,
        session=traffic.session,
        measured=traffic.measured,
        met=allowed.met(np.where(np.isnan(e2e_s), np.nan, ttft_s), tpot_s),
        idle_ttft_s=idle,
        predicted_s=np.array([play.dispatcher.predicted.get(k, _UNKNOWN)[0] for k in range(n)]),
        kind=np.array([play.dispatcher.predicted.get(k, _UNKNOWN)[1] for k in range(n)]),
    )
    return Outcome(
        policy=policy,
        scheduler=config.scheduler,
        trace=config.workload.name,
        cluster=config.cluster.name,
        load=config.load,
        capacity_rps=config.capacity_rps or (config.load and traffic.rate_rps / config.load),
        rate_rps=traffic.rate_rps,
        seed=config.seed,
        end_s=play.end_s,
        retried=play.retried,
        refusals=play.refusals,
        records=records,
        limits=allowed,
        nodes=tuple(
            _node_record(spec, node, play.fetches.busy_s[node.index], play.end_s)
            for spec, node in zip(config.cluster.nodes, play.nodes, strict=True)
        ),
        tenants=tuple(traffic.tenants),
        decision_s=np.array(play.dispatcher.decision_s),
    )


def _node_record(spec: NodeSpec, node: Node, network_s: float, end_s: float) -> NodeRecord:
    held_s = node.model.device_blocks * end_s
    return NodeRecord(
        name=spec.name,
        cost_per_hour=spec.profile.cost_per_hour,
        watts=spec.watts,
        totals=node.totals,
        link_busy_s=node.link.busy_s,
        network_busy_s=network_s,
        held_share=node.totals.held_block_s / held_s if end_s else 0.0,
        stores_dropped_tokens=node.link.down.stores_dropped * node.model.block_tokens,
    )
