"""The simulated half of `kappa bench validate`: the same scripts, on nodes that mirror the cluster.

A node's constants are those that it is paced by, in real (dilated) seconds, and its caches those of
its engine. What a request costs besides the engine comes from an idle cluster: the client's own
share before and after the engine is added to arrivals and answers. Nothing is fitted to the runs
that are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.serving.validate_play import Answered
from benchmarks.serving.validate_traffic import Script
from deploy.app.plan import worker_nodes
from kappa.cost import StepModel, step_model
from kappa.hardware import NodeProfile
from kappa.model import kv_bytes_per_token
from kappa.protocol import Announcement
from kappa.settings.cluster import ClusterSettings
from router.decision import Decision, RouteRequest
from router.policies import policy_named
from router.router import Router, RouterConfig
from simulator.clusters import NodeModel
from simulator.dispatch import RouterDispatch
from simulator.faults import Faults
from simulator.play import Play
from simulator.traffic import Traffic
from workload.shapes import Workload

# A paced step or load lasts what it should; what varies lies outside the engine.
_STEADY = Faults(noise_sigma=0.0)
# A worker reports admissions and totals this often, in real seconds.
_REPORT_PERIOD_S = 0.25
# The sessions of a window that take this many windows saturate the cluster.
_SATURATED = 1.5


@dataclass(frozen=True, slots=True)
class Overhead:
    """Real seconds that a request spends outside the engine, measured on an idle cluster.

    before_s: from sending until the engine has it; after_s: from the engine's first token until
    the client has it. jitter_s: spread (standard deviation) of their sum. samples: requests.
    """

    before_s: float
    after_s: float
    jitter_s: float
    samples: int

    @property
    def total_s(self) -> float:
        return self.before_s + self.after_s


def prefill_s(step: StepModel, new_tokens: int, budget_tokens: int) -> float:
    """Real seconds to prefill a fresh prompt alone, in steps of at most the budget."""
    total_s, context = 0.0, 0
    while context < new_tokens:
        chunk = min(new_tokens - context, budget_tokens)
        total_s += step.real_s([(chunk, context)])
        context += chunk
    return total_s


def overhead_of(
    idle: Iterable[Answered], steps: dict[str, StepModel], budget_tokens: int
) -> Overhead:
    """What idle requests took besides the steps that their node is paced by.

    The way to the router's decision is measured; of what the router saw besides the steps, half is
    taken to lie before the engine.

    Raises:
        ValueError: no request of the idle phase was answered.
    """
    before, whole = [], []
    for a in idle:
        if a.error or a.engine_ttft_s is None or a.decided_after_s is None:
            continue
        engine_s = prefill_s(steps[a.node], a.prompt_tokens, budget_tokens)
        before.append(a.decided_after_s + 0.5 * (a.engine_ttft_s - engine_s))
        whole.append(a.ttft_s - engine_s)
    if not whole:
        raise ValueError("no request of the idle phase was answered: is the cluster up?")
    total_s, before_s = statistics.median(whole), statistics.median(before)
    centre = [value - total_s for value in whole]
    jitter_s = 1.4826 * statistics.median(abs(value) for value in centre)
    return Overhead(before_s, total_s - before_s, jitter_s, len(whole))


@dataclass(frozen=True, slots=True)
class Mirror:
    """The paced cluster as the simulator sees it."""

    profiles: tuple[NodeProfile, ...]
    steps: tuple[StepModel, ...]
    block_tokens: int
    device_blocks: int
    host_blocks: int
    budget_tokens: int
    max_running: int
    max_context_tokens: int
    kv_bytes_per_token: float

    @property
    def by_name(self) -> dict[str, StepModel]:
        return {p.name: s for p, s in zip(self.profiles, self.steps, strict=True)}


def mirror_of(settings: ClusterSettings, served_kv_bytes_per_token: float) -> Mirror:
    """The nodes of `settings`, all paced.

    Raises:
        ValueError: a node is not paced, so that nothing is announced of its speed.
    """
    for pool in settings.all_pools:
        if not pool.paced:
            raise ValueError(f"node {pool.name!r} is not paced: only paced nodes can be mirrored")
        if pool.engine:
            raise ValueError(f"pool {pool.name!r} has engine arguments of its own: leave them out")
    engine, shape = settings.engine, settings.model.emulated_shape
    profiles = worker_nodes(settings)
    return Mirror(
        profiles=profiles,
        steps=tuple(step_model(shape, profile) for profile in profiles),
        block_tokens=engine.block_tokens,
        # vLLM keeps one block for padding.
        device_blocks=engine.device_blocks - 1,
        host_blocks=int(engine.host_bytes / (served_kv_bytes_per_token * engine.block_tokens)),
        budget_tokens=engine.max_batch_tokens,
        max_running=engine.max_sequences,
        max_context_tokens=engine.max_context_tokens,
        kv_bytes_per_token=kv_bytes_per_token(shape),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Simulated:
    """One simulated run, request by request in the order of sending; seconds as a client sees."""

    end_s: float
    ttft_s: np.ndarray
    new_tokens: np.ndarray
    turn: np.ndarray


class _KnownLengths(Router):
    """A router whose requests name the bound of their answers, as live ones do."""

    def __init__(self, config: RouterConfig, output_tokens: Sequence[int]) -> None:
        super().__init__(config)
        self._output_tokens = output_tokens

    def route(self, request: RouteRequest, now_s: float) -> Decision:
        """As the router's; requests are numbered."""
        most = self._output_tokens[int(request.request_id)]
        return super().route(replace(request, max_tokens=most), now_s)


def saturation_sessions_per_s(
    make: Callable[[float], Sequence[Script]],
    mirror: Mirror,
    overhead: Overhead,
    window_s: float,
) -> float:
    """Sessions per second that the mirrored cluster completes when there is always work.

    `make` gives the sessions that arrive over `window_s` at a rate. The rate is doubled until they
    take half as long again as the window; by then the nodes are busy all the time.
    """
    rate = 0.25
    while True:
        scripts = make(rate)
        if scripts:
            end_s = simulate(scripts, mirror, overhead, "ttft", forecast=False).end_s
            if end_s > _SATURATED * window_s:
                return len(scripts) / end_s
        rate *= 2


def simulate(
    scripts: Sequence[Script],
    mirror: Mirror,
    overhead: Overhead,
    policy: str,
    seed: int = 0,
    *,
    forecast: bool = True,
) -> Simulated:
    """Play `scripts` on the mirrored nodes under `policy`; arrivals jitter as idle requests did.

    `forecast`: the router forecasts step by step, as the live one of so few workers does; without,
    queues are arithmetic, which is faster.
    """
    traffic = _traffic(scripts, mirror, overhead, np.random.default_rng((seed, 17)))
    models = [_model(mirror, i) for i in range(len(mirror.profiles))]
    config = RouterConfig(
        policy=policy_named(policy, seed=seed),
        secret=1,
        stale_after_s=float("inf"),
        forecast_workers=len(mirror.profiles) if forecast else 0,
    )
    router = _KnownLengths(config, traffic.output_tokens.tolist())
    announced = [_announcement(mirror, i) for i in range(len(mirror.profiles))]
    play = Play(
        models, traffic, RouterDispatch(router, announced), _STEADY, seed, _REPORT_PERIOD_S,
    )  # fmt: skip
    play.run()
    return _simulated(scripts, play, overhead)


def _traffic(
    scripts: Sequence[Script], mirror: Mirror, overhead: Overhead, rng: np.random.Generator
) -> Traffic:
    """Scripts in the simulator's words; a pause takes the way back and forth with it."""
    size = mirror.block_tokens
    sessions = tuple(script.shape(size) for script in scripts)
    traffic = Traffic(Workload("validate", size, sessions, ""), 0.0)
    prompts: list[int] = []
    outputs: list[int] = []
    for script, session in zip(scripts, sessions, strict=True):
        jitter_s = rng.normal(0.0, overhead.jitter_s, len(session.turns)).clip(
            -overhead.before_s, 3 * overhead.jitter_s
        )
        turns = tuple(
            replace(turn, after_s=max(turn.after_s + overhead.total_s + extra_s, 0.0))
            for turn, extra_s in zip(session.turns, jitter_s.tolist(), strict=True)
        )
        traffic.base.append(len(prompts))
        traffic.first_s.append(script.start_s + overhead.before_s + float(jitter_s[0]))
        traffic.turns.append(turns)
        traffic.ids.append(session.id)
        traffic.tenants.append("")
        prompts += [turn.input_tokens for turn in turns]
        outputs += [turn.output_tokens for turn in turns]
    traffic.planned_s = np.zeros(len(prompts))
    traffic.prompt_tokens = np.array(prompts, dtype=np.int64)
    traffic.output_tokens = np.array(outputs, dtype=np.int64)
    return traffic


def _model(mirror: Mirror, index: int) -> NodeModel:
    """A node's true constants: what it is paced by, in real seconds."""
    profile, step = mirror.profiles[index], mirror.steps[index]
    dilation = profile.dilation
    real = StepModel(
        token_s=step.token_s * dilation,
        pair_s=step.pair_s * dilation,
        weights_s=step.weights_s * dilation,
        context_token_s=step.context_token_s * dilation,
        fixed_s=step.fixed_s * dilation,
    )
    block_bytes = mirror.kv_bytes_per_token * mirror.block_tokens
    return NodeModel(
        step=real, announced_step=real, block_tokens=mirror.block_tokens,
        device_blocks=mirror.device_blocks, host_blocks=mirror.host_blocks,
        load_block_s=dilation * block_bytes / profile.h2d_bytes_per_s,
        store_block_s=dilation * block_bytes / profile.store_bytes_per_s,
        load_fixed_s=dilation * profile.load_fixed_s, budget_tokens=mirror.budget_tokens,
        max_running=mirror.max_running,
    )  # fmt: skip


def _announcement(mirror: Mirror, index: int) -> Announcement:
    profile = mirror.profiles[index]
    return Announcement(
        worker=profile.name, model="", node=profile, step=mirror.steps[index],
        kv_bytes_per_token=mirror.kv_bytes_per_token, emulated_model="", fingerprint="",
        block_tokens=mirror.block_tokens, device_blocks=mirror.device_blocks + 1,
        host_blocks=mirror.host_blocks, max_batch_tokens=mirror.budget_tokens,
        max_context_tokens=mirror.max_context_tokens, events_endpoint="", snapshot_endpoint="",
    )  # fmt: skip


def _simulated(scripts: Sequence[Script], play: Play, overhead: Overhead) -> Simulated:
    turns = [number for script in scripts for number in range(len(script.asks))]
    order = np.argsort(np.array(play.arrival_s), kind="stable")
    return Simulated(
        end_s=play.end_s + overhead.after_s,
        ttft_s=np.array(play.ttft_s)[order] + overhead.total_s,
        new_tokens=np.array(play.new_tokens)[order],
        turn=np.array(turns)[order],
    )
