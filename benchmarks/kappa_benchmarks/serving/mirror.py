"""The simulated half of `kappa bench validate`: the same scripts, on nodes that mirror the cluster.

A node's constants are those that it is paced by, in real (dilated) seconds, or that it measured of
itself, and its caches those of its engine. A request's seconds outside the engine are measured on
an idle cluster, and added to arrivals and answers.
Nothing is fitted to the runs that are compared.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kappa.cost import step_model
from kappa.hardware import NodeProfile
from kappa.model import ModelShape, kv_bytes_per_token
from kappa.protocol import Announcement
from kappa.settings.cluster import ClusterSettings
from kappa.silicon import silicon_table
from kappa_benchmarks.serving.validate_play import Answered
from kappa_benchmarks.serving.validate_scripts import Script
from kappa_deploy.app.plan import engine_scheduler, pool_nodes
from kappa_router.config import RouterConfig
from kappa_router.decision import Decision, RouteRequest
from kappa_router.policy import policy_named
from kappa_router.router import Router
from kappa_scheduler.catalogue import SCHEDULERS, packs, step_factor
from kappa_scheduler.config import FairConfig
from kappa_scheduler.fcfs import Fcfs
from kappa_simulator.clusters import NodeModel
from kappa_simulator.dispatch import RouterDispatch
from kappa_simulator.faults import Faults
from kappa_simulator.play import Play
from kappa_simulator.traffic import Traffic
from kappa_workers.paced.disk_file import row_bytes
from kappa_workers.vllm.arguments import EngineLimits
from kappa_workload.shapes import Workload

# A paced step or load lasts what it should; what varies lies outside the engine.
_STEADY = Faults(noise_sigma=0.0)
# A worker reports admissions and totals this often, in real seconds.
_REPORT_PERIOD_S = 0.25
# The sessions of a window that take this many windows saturate the cluster.
_SATURATED = 1.5


@dataclass(frozen=True, slots=True)
class Overhead:
    """Real seconds that a request spends outside the engine, measured on an idle cluster."""

    # From sending until the engine has it.
    before_s: float
    # From the engine's first token until the client has it.
    after_s: float
    # Standard deviation of their sum.
    jitter_s: float
    # Requests measured.
    samples: int

    @property
    def total_s(self) -> float:
        return self.before_s + self.after_s


@dataclass(frozen=True, slots=True)
class Mirror:
    """The cluster: what its workers announce, and their constants in real seconds."""

    announcements: tuple[Announcement, ...]
    models: tuple[NodeModel, ...]

    def prefill_s(self, node: str, new_tokens: int) -> float:
        """Real seconds to prefill a fresh prompt alone, in steps of at most the budget."""
        model = self.models[[each.worker for each in self.announcements].index(node)]
        total_s, budget = 0.0, model.budget_tokens
        for context in range(0, new_tokens, budget):
            total_s += model.step_s([(min(new_tokens - context, budget), context)], 0, 0)
        return total_s


def mirror_of(
    settings: ClusterSettings, served: ModelShape, measured: Mapping[str, NodeProfile] | None = None
) -> Mirror:
    """The nodes of `settings`: a paced one as it is paced, another one as it was `measured`, by its
    name, for the model that is `served`.

    Raises:
        ValueError: a node is not paced and was not measured, so that nothing is known of its speed;
            or the limits of its engine are not given.
    """
    announcements, models = [], []
    rule = settings.scheduler.name if settings.scheduler.name in SCHEDULERS else Fcfs.name
    fair = FairConfig(**engine_scheduler(settings).config)
    for pool in settings.all_pools:
        given = pool.engine_settings(settings.engine)
        engine = EngineLimits.of(given)
        missing = engine.missing + ["host_bytes"] * (engine.host_bytes < 0)
        if missing:
            raise ValueError(
                f"pool {pool.name!r}: a mirror needs the engine's {', '.join(missing)}, which vLLM "
                "or the machine would decide: give them"
            )
        stored_bytes = kv_bytes_per_token(served) * engine.block_tokens
        host_blocks = int(engine.host_bytes / stored_bytes)
        disk_blocks = given.disk_bytes // row_bytes(int(stored_bytes))
        for node in pool_nodes(settings, pool)[: pool.least]:
            profile, shape = node, settings.model.emulated_shape
            if not pool.paced:
                if node.name not in (measured or {}):
                    raise ValueError(f"node {node.name!r} is not paced, and was not measured")
                profile, shape = (measured or {})[node.name], served
            said = Announcement(
                worker=profile.name, model="", node=profile, step=step_model(shape, profile),
                kv_bytes_per_token=kv_bytes_per_token(shape), emulated_model="", fingerprint="",
                block_tokens=engine.block_tokens, device_blocks=engine.device_blocks,
                host_blocks=host_blocks, disk_blocks=disk_blocks,
                max_batch_tokens=engine.max_batch_tokens,
                max_context_tokens=engine.max_context_tokens, events_endpoint="",
                snapshot_endpoint="", packs=packs(rule), step_factor=step_factor(rule, fair),
            )  # fmt: skip
            announcements.append(said)
            models.append(replace(_model(said, rule, fair), max_running=engine.max_sequences))
    return Mirror(tuple(announcements), tuple(models))


def _model(said: Announcement, rule: str, fair: FairConfig) -> NodeModel:
    """A node as it announces itself, in real seconds."""
    node, dilation = said.node, said.node.dilation
    block_bytes = said.kv_bytes_per_token * said.block_tokens
    return NodeModel(
        step=said.step.real(), block_tokens=said.block_tokens,
        # vLLM keeps one block for padding.
        device_blocks=said.device_blocks - 1, host_blocks=said.host_blocks,
        load_block_s=dilation * block_bytes / node.h2d_bytes_per_s,
        store_block_s=dilation * block_bytes / node.store_bytes_per_s,
        load_fixed_s=dilation * node.load_fixed_s, budget_tokens=said.max_batch_tokens,
        rule=rule, fair=fair, disk_blocks=said.disk_blocks,
        disk_block_s=block_bytes / node.disk_bytes_per_s if said.disk_blocks else 0.0,
        table=silicon_table(node.silicon).on(node) if node.silicon else None,
    )  # fmt: skip


def overhead_of(idle: Iterable[Answered], mirror: Mirror) -> Overhead:
    """Seconds of idle requests besides the steps that their node is paced by.

    The way to the router's decision is measured; of the seconds that the router saw besides the
    steps, half are taken to lie before the engine.

    Raises:
        ValueError: no request of the idle phase was answered.
    """
    before, whole, errors = [], [], Counter[str]()
    for a in idle:
        errors[a.error or "no outcome in /v1/decisions"] += 1
        if a.error or a.engine_ttft_s is None or a.decided_after_s is None:
            continue
        engine_s = mirror.prefill_s(a.node, a.prompt_tokens)
        before.append(a.decided_after_s + 0.5 * (a.engine_ttft_s - engine_s))
        whole.append(a.ttft_s - engine_s)
    if not whole:
        raise ValueError(f"no request of the idle phase was answered: {dict(errors)}")
    total_s, before_s = statistics.median(whole), statistics.median(before)
    # The median absolute deviation, as a standard deviation of a normal distribution.
    jitter_s = 1.4826 * statistics.median(abs(value - total_s) for value in whole)
    return Overhead(before_s, total_s - before_s, jitter_s, len(whole))


class Simulated(NamedTuple):
    """One simulated run: when it ended, and TTFTs in the order of sending, as a client sees."""

    end_s: float
    ttft_s: NDArray[np.float64]


class _KnownLengths(Router):
    """A router that is told the bound of each answer, as the live one is."""

    output_tokens: Sequence[int]

    def route(
        self, request: RouteRequest, now_s: float, explained: Decision | None = None, to: str = ""
    ) -> Decision:
        """As `Router.route`; requests are numbered."""
        most = self.output_tokens[int(request.request_id)]
        return super().route(replace(request, max_tokens=most), now_s, explained, to)


def simulate(
    scripts: Sequence[Script], mirror: Mirror, overhead: Overhead, policy: str, seed: int = 0, *,
    forecast: bool = True,
) -> Simulated:  # fmt: skip
    """Play `scripts` on the mirrored nodes under `policy`; arrivals jitter as idle requests did.

    forecast: the router forecasts step by step, as the live one of so few workers does; without,
    queues are arithmetic, which is faster.
    """
    traffic = _traffic(scripts, mirror, overhead, np.random.default_rng((seed, 17)))
    config = RouterConfig(
        policy=policy_named(policy, seed=seed), secret=1, stale_after_s=math.inf,
        forecast_workers=len(mirror.models) if forecast else 0,
    )  # fmt: skip
    router = _KnownLengths(config)
    router.output_tokens = traffic.output_tokens.tolist()
    dispatch = RouterDispatch([router], mirror.announcements)
    play = Play(mirror.models, traffic, dispatch, _STEADY, seed, _REPORT_PERIOD_S)
    play.run()
    order = np.argsort(np.array(play.arrival_s), kind="stable")
    ttft_s = np.array(play.ttft_s)[order] + overhead.total_s
    return Simulated(play.end_s + overhead.after_s, ttft_s)


def saturation_sessions_per_s(
    make: Callable[[float], Sequence[Script]], mirror: Mirror, window_s: float
) -> float:
    """Sessions per second that the mirrored cluster completes when there is always work.

    `make` gives the sessions that arrive over `window_s` at a rate. The rate is doubled until they
    take half as long again as the window; by then the nodes are busy all the time.
    """
    rate, nothing = 0.25, Overhead(0.0, 0.0, 0.0, 0)
    while True:
        scripts = make(rate)
        if scripts:
            end_s = simulate(scripts, mirror, nothing, "ttft", forecast=False).end_s
            if end_s > _SATURATED * window_s:
                return len(scripts) / end_s
        rate *= 2


def _traffic(
    scripts: Sequence[Script], mirror: Mirror, overhead: Overhead, rng: np.random.Generator
) -> Traffic:
    """Scripts in the simulator's words; a pause takes the way back and forth with it."""
    size = mirror.models[0].block_tokens
    sessions = tuple(script.shape(size) for script in scripts)
    traffic = Traffic(Workload("validate", size, sessions, ""), 0.0)
    for script, session in zip(scripts, sessions, strict=True):
        drawn_s = rng.normal(0.0, overhead.jitter_s, len(session.turns))
        jitter_s = drawn_s.clip(-overhead.before_s, 3 * overhead.jitter_s).tolist()
        turns = [
            replace(turn, after_s=max(turn.after_s + overhead.total_s + extra_s, 0.0))
            for turn, extra_s in zip(session.turns, jitter_s, strict=True)
        ]
        traffic.add(script.start_s + overhead.before_s + jitter_s[0], turns, session.id)
    return traffic
