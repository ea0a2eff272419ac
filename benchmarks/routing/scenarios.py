"""`kappa bench scenario`: what users of other routers reported, before and after, one each.

A scenario plays the mechanism of a public report, not its hardware: the rule that was in force
there, the rule that was asked for where there is one, and ours, on the same requests. All of it is
simulated, or computed from the cost model where nothing is played (`llm-d-router-1047`).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.baselines.routing.llm_d import LlmD
from benchmarks.baselines.routing.sglang import SglangCacheAware
from benchmarks.harness import Json, names, note, publish, quantile, result, table, usage_errors
from benchmarks.scheduling import mix
from benchmarks.scheduling.simulated import node_of, play
from kappa.model import kv_bytes_per_token
from kappa.settings.engine import TransferSettings
from kappa.shapes import model_shape
from router.config import RouterConfig
from router.decision import Choice, Estimates, Fetch, RouteRequest
from router.policy import Policy, policy_named
from router.router import Router
from scheduler.config import FairConfig
from simulator.clusters import KINDS, NodeSpec, SimulatedCluster, node_model, numbered
from simulator.loop import Loop, Noise
from simulator.memory import SimulatedJob
from simulator.node import JobEvents, Node
from simulator.run import SimulationConfig, announcements_of, node_models, simulate, traffic_of
from workload.catalogue import workload_named

MODEL = "llama-3.1-8b"
Figures = dict[str, float | None]
Arms = dict[str, Figures]
_BLOCK_TOKENS = 16
# Of the report: so many tokens left to compute go to a prefill node.
_DECIDER_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Scenario:
    """A report and what plays it. run: of a seed, each arm's figures, the first arm the rule that
    was reported, the last one ours."""

    report: str
    story: str
    run: Callable[[int], Arms]


def scenario(
    name: Annotated[str, typer.Argument(help="One of them, several with commas, or all.")] = "all",
    seeds: Annotated[int, typer.Option(min=1, help="Runs; medians are shown.")] = 3,
    json_output: Json = False,
) -> None:
    """Reports of other routers' users, played before and after. SIMULATED."""
    with usage_errors():
        chosen = tuple(SCENARIOS) if name == "all" else names(name, SCENARIOS, "NAME")
    rows = []
    for each in chosen:
        runs = []
        for seed in range(seeds):
            note(f"{each}: run {seed + 1} of {seeds}")
            runs.append(SCENARIOS[each].run(seed))
        rows += [
            {"scenario": each, "arm": arm, **_medians([run[arm] for run in runs])}
            for arm in runs[0]
        ]
    reports = {each: SCENARIOS[each].report for each in chosen}
    facts = result(rows=rows, seeds=seeds, reports=reports)
    publish(
        facts, lambda console: show(facts, console), json_output=json_output, remark="simulated"
    )


def show(facts: dict[str, Any], console: Console) -> None:
    """A table of arms for each scenario."""
    for each, report in facts["reports"].items():
        console.print(f"{each}: {SCENARIOS[each].story}\n{report}")
        console.print(_shown([row for row in facts["rows"] if row["scenario"] == each]))


def _medians(runs: Sequence[Figures]) -> Figures:
    found = {name: [run[name] for run in runs] for name in runs[0]}
    return {
        name: None if None in values else median(v for v in values if v is not None)
        for name, values in found.items()
    }


def _shown(rows: Sequence[dict[str, Any]]) -> Table:
    columns = [name for name in rows[0] if name not in ("scenario", "arm")]
    cells = [
        (row["arm"], *("-" if row[name] is None else f"{row[name]:.3g}" for name in columns))
        for row in rows
    ]
    return table("", ("", *columns), cells)


# -- routers on simulated nodes -------------------------------------------------------------------


def _cluster(name: str, *nodes: NodeSpec) -> SimulatedCluster:
    """Nodes under names of their own."""
    counts = Counter[str]()
    found = []
    for node in nodes:
        found += numbered(node, 1, counts[node.name])
        counts[node.name] += 1
    return SimulatedCluster(name, tuple(found))


def _played(config: SimulationConfig, arms: dict[str, str | Policy]) -> Arms:
    """Every arm on the same requests."""
    traffic = traffic_of(config)
    found = {}
    for arm, policy in arms.items():
        outcome = simulate(config.replaced(policy=policy), traffic=traffic)
        summary, records = outcome.summary(), outcome.records
        prompts = float(records.prompt_tokens[records.measured].sum())
        busy = [node["gpu_busy"] for node in summary["nodes"]]
        found[arm] = {
            "TTFT p50 s": summary["ttft_s"]["p50"], "TTFT p99 s": summary["ttft_s"]["p99"],
            "device hits": float(records.device_tokens[records.measured].sum()) / prompts,
            "host hits": float(records.cached_tokens[records.measured].sum()) / prompts,
            "objective met": summary["slo"]["met"],
            "busiest GPU": max(busy), "idlest GPU": min(busy),
        }  # fmt: skip
    return found


class _EventTree(SglangCacheAware):
    """SGLang's rule on what cache events tell: of the device only, as before sglang#39108, or of
    both tiers."""

    def __init__(self, seed: int, *, tiers: bool) -> None:
        super().__init__(seed)
        self.name, self._tiers = f"event_tree_{tiers}", tiers

    def choose(self, estimates: Estimates) -> Choice:
        load = estimates.in_flight
        least, most = float(load.min()), float(load.max())
        held = estimates.device_tokens + (estimates.cached_tokens if self._tiers else 0.0)
        lopsided = most - least > self.balance_abs and most > self.balance_rel * least
        if lopsided or held.max() <= self.cache_threshold * estimates.prompt_tokens:
            return Choice(int(load.argmin()), "shortest_queue")
        return Choice(int(held.argmax()), "prefix_match")

    def routed(self, estimates: Estimates, index: int, request_id: str = "") -> None:
        """Events tell it all."""


def _host_held_prefixes(seed: int) -> Arms:
    """Devices turn over in seconds, host tiers hold everything."""
    small = replace(KINDS["h100"], profile=replace(KINDS["h100"].profile, hbm_bytes=28e9))
    config = SimulationConfig(
        cluster=_cluster("four-small-devices", *[small] * 4),
        workload=workload_named("miniswe"), shape=model_shape(MODEL), load=0.2,
        requests=3000, seed=seed,
    )  # fmt: skip
    return _played(config, {
        "device events only": _EventTree(seed, tiers=False),
        "events of both tiers": _EventTree(seed, tiers=True),
        "priced": "priced",
    })  # fmt: skip


def _hash_thrash(seed: int) -> Arms:
    """Four engines without host tiers; sessions stay where their hash puts them."""
    config = SimulationConfig(
        cluster=_cluster("four-equal", *[replace(KINDS["h100"], host_bytes=0.0)] * 4),
        workload=workload_named("miniswe"), shape=model_shape(MODEL), load=0.6,
        requests=3000, seed=seed,
    )  # fmt: skip
    return _played(config, {
        "consistent_hash": "consistent_hash", "cache_aware": "sglang_cache_aware",
        "priced": "priced",
    })  # fmt: skip


class _PullAbove(LlmD):
    """llm-d's choice of a pod; then what a peer holds of the prompt is pulled, if that is at least
    so many tokens more (`minCachedTokenDelta`)."""

    fetches = True

    def __init__(self, seed: int, delta_tokens: float) -> None:
        super().__init__(seed)
        self.name, self._delta_tokens = f"pull_above_{delta_tokens:g}", delta_tokens

    def choose(self, estimates: Estimates) -> Choice:
        choice, fetching = super().choose(estimates), estimates.fetching
        if fetching is None or not np.isfinite(fetching.fetch_s[choice.index]):
            return choice
        more = float((fetching.cached_tokens - estimates.cached_tokens)[choice.index])
        if more < max(self._delta_tokens, 1.0):
            return choice
        return Choice(choice.index, "peer_fetch", Fetch(fetching.fetch_from, int(more)))


def _mixed_links(seed: int) -> Arms:
    """Half of the nodes have RDMA cards, half 1 Gb/s Ethernet; agents, then Mooncake's chats."""
    fast, slow = KINDS["h100"], replace(KINDS["a100"], network_bytes_per_s=0.125e9)
    found: Arms = {}
    for trace, load in (("miniswe", 0.7), ("mooncake", 0.4)):
        config = SimulationConfig(
            cluster=_cluster("mixed-links", fast, fast, slow, slow),
            workload=workload_named(trace), shape=model_shape(MODEL), load=load,
            requests=3000, seed=seed,
        )  # fmt: skip
        played = _played(config, {
            "pull above 1,024": _PullAbove(seed, 1024), "above 13,600": _PullAbove(seed, 13_600),
            "never": _PullAbove(seed, math.inf), "priced, no pulls": "priced",
            "priced_fetch": "priced_fetch",
        })  # fmt: skip
        found |= {f"{trace}: {arm}": figures for arm, figures in played.items()}
    return found


# -- one engine -----------------------------------------------------------------------------------


def _convoy(seed: int) -> Arms:
    """Sixty requests whose prefixes are in host memory, then 120 fresh ones, on one engine."""
    setting = mix.Setting("mixed10", "x1", "shared")
    found = {}
    for arm, policy in (("stock vLLM", "fcfs"), ("fair", "fair")):
        workload = mix.workload_of(setting.workload, mix.SEED + seed)
        served = play(node_of(policy, setting, workload.blocks), workload, seed).served
        ttft_s = {
            kind: [one.ttft_s for one in served if one.request.kind == kind]
            for kind in (mix.FRESH, mix.OFFLOADED)
        }
        found[arm] = {
            "fresh TTFT p50 s": quantile(ttft_s[mix.FRESH], 0.5),
            "fresh TTFT p99 s": quantile(ttft_s[mix.FRESH], 0.99),
            "offloaded TTFT p99 s": quantile(ttft_s[mix.OFFLOADED], 0.99),
            "makespan s": max(one.finished_s for one in served),
        }
    return found


_WEIGHTS = {"premium": 4.0, "regular": 1.0}
_EACH = 2000  # requests a tenant
_PROMPT_TOKENS, _OUTPUT_TOKENS = 512, 8


@dataclass(slots=True)
class _DeficitRouter:
    """A router with deficit round robin between the tenants that it sees, `window` requests at the
    engine at a time."""

    window: int
    waiting: dict[str, deque[SimulatedJob]]
    open: int = 0
    deficit: Counter[str] = field(default_factory=Counter)

    def next(self) -> SimulatedJob | None:
        """The next to send, if one may go."""
        backlogged = [tenant for tenant, jobs in self.waiting.items() if jobs]
        if self.open >= self.window or not backlogged:
            return None
        if all(self.deficit[tenant] < 1 for tenant in backlogged):
            self.deficit.update({tenant: int(_WEIGHTS[tenant]) for tenant in backlogged})
        tenant = max(backlogged, key=lambda name: self.deficit[name])
        self.deficit[tenant] -= 1
        self.open += 1
        return self.waiting[tenant].popleft()


def _two_routers(seed: int) -> Arms:
    """Two tenants of weights 4 and 1 keep one engine busy; each router sees one of them."""
    return {
        "a router's queues, decider even": _shares(seed, skewed=False, rule="fcfs"),
        "a router's queues, decider skewed": _shares(seed, skewed=True, rule="fcfs"),
        "fair in the engine, decider even": _shares(seed, skewed=False, rule="fair"),
        "fair in the engine, decider skewed": _shares(seed, skewed=True, rule="fair"),
    }


def _shares(seed: int, *, skewed: bool, rule: str) -> Figures:
    """Prompts of either tenant served until one of them has no more waiting."""
    model = node_model(KINDS["h100"], model_shape(MODEL), _BLOCK_TOKENS)
    model = replace(model, rule=rule, max_running=32, fair=FairConfig(weights=_WEIGHTS))
    # Under our scheduler a router holds nothing back.
    window = _EACH * 2 if rule == "fair" else 16
    routers = [_DeficitRouter(window, {name: deque() for name in _WEIGHTS}) for _ in range(2)]
    jobs = {}
    for key in range(2 * _EACH):
        tenant = ("premium", "regular")[key % 2]
        blocks = (_PROMPT_TOKENS + _OUTPUT_TOKENS) // _BLOCK_TOKENS
        ids = np.arange(blocks, dtype=np.uint64) + np.uint64((key + 1) << 32)
        job = SimulatedJob(
            key, _PROMPT_TOKENS, _OUTPUT_TOKENS, ids, 0.0, _OUTPUT_TOKENS, tenant
        )  # fmt: skip
        router = routers[key % 2 if skewed else key // 2 % 2]
        router.waiting[tenant].append(job)
        jobs[job] = router
    loop, served, left = Loop(), Counter[str](), Counter(dict.fromkeys(_WEIGHTS, _EACH))
    contested = True

    def send(_: object = None) -> None:
        for router in routers:
            while (job := router.next()) is not None:
                node.submit(job)

    def finished(job: SimulatedJob) -> None:
        nonlocal contested
        left[job.tenant] -= 1
        contested = contested and min(left.values()) > _EACH // 10
        served[job.tenant] += contested
        jobs[job].open -= 1
        loop.at(loop.now_s, send, None)

    noises = Noise(np.random.default_rng(seed), 0.03), Noise(np.random.default_rng(seed), 0.03)
    node = Node(0, model, loop, noises, JobEvents(lambda _: None, finished))
    send()
    loop.run()
    node.close()
    return {
        "premium served": served["premium"], "regular served": served["regular"],
        "ratio (weights: 4)": served["premium"] / max(served["regular"], 1),
    }  # fmt: skip


# -- a decision alone -----------------------------------------------------------------------------


def _tier_weight(seed: int) -> Arms:
    """Prompts of 1,000 to 32,000 tokens, of which the decode node's host memory holds some; the
    prefill node computes twice as fast."""
    # Imports what only deciders need.
    from router.cluster.prefill import hands_over

    config = SimulationConfig(
        cluster=_cluster("decode-and-prefill", KINDS["a100"], KINDS["h100"]),
        workload=workload_named("miniswe"), shape=model_shape(MODEL), load=0.5,
    )  # fmt: skip
    decode, prefill = announcements_of(config, node_models(config))
    network = TransferSettings()
    moved_token_s = kv_bytes_per_token(config.shape) / network.net_bytes_per_s
    router = Router(RouterConfig(policy_named("priced"), secret=1, forecast_workers=0))
    for worker in (decode, prefill):
        router.join(worker, 0.0)
    assert router.index is not None
    rng = np.random.default_rng(seed)
    cases = []
    for prompt_tokens in rng.integers(1000, 32_000, size=200).tolist():
        ids = rng.integers(1, 1 << 62, size=prompt_tokens // decode.block_tokens, dtype=np.uint64)
        in_host = int(rng.uniform(0.5, 1.0) * len(ids))
        router.index.hold(decode.worker, "host", ids[:in_host])
        request = RouteRequest("r", prefix_hashes=ids, prompt_tokens=prompt_tokens, max_tokens=8)
        here, there = (
            router.explain(replace(request, exclude=frozenset((other.worker,))), 0.0).chosen
            for other in (prefill, decode)
        )
        weighted, whole = (
            prompt_tokens - int(weight * in_host) * decode.block_tokens for weight in (0.8, 1.0)
        )
        cases.append((
            here.ttft_s, there.ttft_s + network.fixed_s + prompt_tokens * moved_token_s,
            {
                "tokens in RAM count 0.8": weighted >= _DECIDER_TOKENS,
                "they count whole": whole >= _DECIDER_TOKENS,
                "priced": hands_over(network, here, there, decode, prompt_tokens),
            },
        ))  # fmt: skip
    least_s = float(np.mean([min(here_s, there_s) for here_s, there_s, _ in cases]))
    return {
        arm: {
            "sent to prefill": float(np.mean([moves[arm] for _, _, moves in cases])),
            "mean TTFT s": float(np.mean([case[int(case[2][arm])] for case in cases])),
            "least possible s": least_s,
        }
        for arm in cases[0][2]
    }


SCENARIOS: dict[str, Scenario] = {
    "sglang-39108": Scenario(
        "https://github.com/sgl-project/sglang/pull/39108",
        "prefixes that only host memory holds are not routed to",
        _host_held_prefixes,
    ),
    "vllm-44294": Scenario(
        "https://github.com/vllm-project/vllm/issues/44294",
        "fresh requests stand in a convoy behind loads",
        _convoy,
    ),
    "llm-d-router-2443": Scenario(
        "https://github.com/llm-d/llm-d-router/issues/2443",
        "one threshold for pulling KV from a peer, on fast and slow networks",
        _mixed_links,
    ),
    "prime-rl-3255": Scenario(
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/3255",
        "sessions pinned by a hash keep a saturated engine saturated",
        _hash_thrash,
    ),
    "dynamo-15187": Scenario(
        "https://github.com/ai-dynamo/dynamo/issues/15187",
        "two routers with queues of their own turn weights of 4:1 into 1:1",
        _two_routers,
    ),
    "llm-d-router-1047": Scenario(
        "https://github.com/llm-d/llm-d-router/issues/1047",
        "a tier's weight, taken for tokens, sends prompts held in RAM away to be computed",
        _tier_weight,
    ),
}
"""By name: what was reported, and what plays it."""
