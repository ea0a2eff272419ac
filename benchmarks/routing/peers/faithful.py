"""`kappa bench faithful`: reimplemented policies against the real packages, decision by decision.

In a simulated run the real one, in a process of its own, steers; the reimplementation is asked for
every request on the same state (what caches hold, what is in flight, what is prefilled) and is then
told where the request went. A decision counts as equal where both name one worker, and as level
where they differ but the rule that decided gives both workers the same value, which either may
break as it likes. Then the reimplementation steers the same traffic by itself: whether what is left
of a difference matters.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.baselines.routing.base import Baseline
from benchmarks.baselines.routing.catalogue import baseline_named
from benchmarks.baselines.routing.dynamo import Dynamo, DynamoTwoTier
from benchmarks.baselines.routing.simple import PowerOfTwo
from benchmarks.harness import Json, note, publish, result, table, usage_errors
from benchmarks.routing.peers.routers import (
    DYNAMO_VERSION,
    GATEWAY_VERSIONS,
    ROUTERS,
    Message,
    PeerError,
    PeerRouter,
    RouterProcess,
    command_of,
    started,
)
from kappa.shapes import model_shape
from router.decision import Choice, Estimates
from simulator.clusters import cluster_named
from simulator.outcome import Outcome
from simulator.run import SimulationConfig, simulate, traffic_of
from workload.catalogue import workload_named

GOAL = 0.95
_LEVEL = 1e-6
_ASK_S = 60.0
# By queue alone, among those that the rule leaves: level queues may go either way.
_BY_QUEUE = {"imbalanced", "shortest_queue"}
_TWO_TIER = """worker_selection:
  aggregated: tiers
  instances:
    - name: tiers
      type: dynamo-two-tier-cost-fn
"""


def _gateway(package: str, *options: str) -> PeerRouter:
    hello = {"package": package, "options": ["--policy", "cache_aware", *options]}
    return PeerRouter(GATEWAY_VERSIONS[package], package, "gateway_router.py", hello)


def _dynamo(settings: Mapping[str, str]) -> PeerRouter:
    hello = {"settings": dict(settings)}
    return PeerRouter(DYNAMO_VERSION, "SelectionService", "dynamo_router.py", hello)


PEERS: dict[str, PeerRouter] = {
    "dynamo": _dynamo({}),
    "dynamo:host_credit=0.25,overlap_weight=4": _dynamo(
        {"DYN_ROUTER_HOST_CACHE_HIT_WEIGHT": "0.25", "DYN_ROUTER_PREFILL_LOAD_SCALE": "4"}
    ),
    "dynamo_two_tier": _dynamo({"DYN_ROUTER_POLICY_CONFIG": "two-tier.yaml"}),
    "sglang_cache_aware": _gateway("sglang_router"),
    "sglang_cache_aware:balance_abs=2": _gateway("sglang_router", "--balance-abs-threshold", "2"),
    "sglang_cache_aware:cache_threshold=0.5": _gateway("vllm_router", "--cache-threshold", "0.5"),
    "ray_prefix": ROUTERS["ray-prefix"],
    "power_of_two": ROUTERS["ray-pow2"],
}
"""Baseline with its parameters to the real one."""

NOT_COMPARED = {
    "aibrix, llm_d, llm_d_affinity, llm_d_latency": "written in Go, no wheel, run in Kubernetes",
    "production_stack": "its router is in no package index under a name of its own",
    "dynamo_jsew, lmetric": "in Dynamo's repository, not in the wheel of 1.6.1",
    "consistent_hash": "Ray's ring by another hash: owners differ, spread and movement do not",
    "lodestar, sticky": "nothing to install: a paper, and a reference point",
    "round_robin": "a counter; which worker is first is nobody's to say",
}
"""Baselines that no real one was run against, and why."""


@dataclass(eq=False)
class Shadowed:
    """A policy of which the real one decides; `mine` is asked on the same state.

    ask: sends a message to the real one and returns its answer.
    """

    mine: Baseline
    ask: Callable[[Message], Message]
    name: str = "real"
    fetches = False

    def __post_init__(self) -> None:
        """Nothing asked yet."""
        self.counts = Counter[str]()
        self.differences = Counter[str]()
        self._asked = 0
        self._names: dict[str, str] = {}

    def choose(self, estimates: Estimates) -> Choice:
        self._asked += 1
        size = estimates.block_tokens
        held = np.column_stack([estimates.device_tokens, estimates.cached_tokens]) // size
        answer = self.ask({
            "op": "route", "request": f"r{self._asked}", "tokens": estimates.prompt_tokens,
            "blocks": estimates.prefix_hashes.tolist(), "held": held.astype(int).tolist(),
            "output_tokens": estimates.expected_output_tokens, "session": estimates.session,
        })  # fmt: skip
        row = estimates.workers.index(answer["worker"])
        among = [estimates.workers.index(worker) for worker in answer.get("among", ())]
        verdict, reason = compared(self.mine, estimates, row, among)
        self.counts[verdict] += 1
        if verdict == "differs":
            self.differences[reason] += 1
        return Choice(row, verdict)

    def routed(self, estimates: Estimates, index: int, request_id: str = "") -> None:
        self._names[request_id] = f"r{self._asked}"
        self.mine.routed(estimates, index, request_id)

    def progressed(self, request_id: str, now_s: float, *, ended: bool) -> None:
        self.mine.progressed(request_id, now_s, ended=ended)
        name = self._names.get(request_id)
        if name is not None:
            self.ask({"op": "done" if ended else "first", "request": name})
            if ended:
                del self._names[request_id]

    def left(self, worker: str) -> None:
        raise NotImplementedError("no node fails in this bench")


def compared(mine: Baseline, estimates: Estimates, row: int, among: list[int]) -> tuple[str, str]:
    """`equal`, `level` or `differs`, and the reason of the reimplementation's own choice.

    Args:
        mine: the reimplementation, which chooses once.
        estimates: the state.
        row: where the real one goes.
        among: of which rows it chose by queue, where it says so.
    """
    if isinstance(mine, PowerOfTwo):
        mine.rng = _Drawn(among)  # type: ignore[assignment]
    choice, queue = mine.choose(estimates), estimates.in_flight
    if choice.index == row:
        return "equal", choice.reason
    level = False
    if isinstance(mine, Dynamo):
        cost = mine.cost(estimates)
        level = bool(cost[row] <= cost.min() * (1 + _LEVEL))
    elif queue[row] == queue[choice.index]:
        if isinstance(mine, DynamoTwoTier):
            level = row in mine.rows(estimates)[0]
        else:
            level = choice.reason in _BY_QUEUE or choice.index in among
    return "level" if level else "differs", choice.reason


class _Drawn:
    """The draws that lead to a given pair of rows."""

    def __init__(self, pair: list[int]) -> None:
        first, second = pair
        self._draws = [first, second - (second > first)]

    def randrange(self, _: int) -> int:
        return self._draws.pop(0)


def faithful(
    policies: Annotated[
        str | None, typer.Option(help="Some of the baselines, separated by semicolons.")
    ] = None,
    trace: Annotated[str, typer.Option(help="A built-in workload or a trace file.")] = "miniswe",
    cluster: Annotated[str, typer.Option(help="mixed, small, uniform, or a file.")] = "small",
    load: Annotated[float, typer.Option(min=0.01, help="Share of the capacity bound.")] = 0.8,
    requests: Annotated[int, typer.Option(min=10, help="Requests a run.")] = 1_000,
    seed: Annotated[int, typer.Option(min=0, help="Of the traffic.")] = 0,
    out: Annotated[Path | None, typer.Option(help="File for the result.")] = None,
    json_output: Json = False,
) -> None:
    """Reimplemented policies against the real ones, decision by decision, simulated."""
    with usage_errors():
        wanted = [part.strip() for part in policies.split(";")] if policies else list(PEERS)
        unknown = [spec for spec in wanted if spec not in PEERS]
        if unknown:
            raise ValueError(f"--policies: no {unknown[0]!r}; choose some of {'; '.join(PEERS)}")
        config = SimulationConfig(
            cluster=cluster_named(cluster), workload=workload_named(trace),
            shape=model_shape("llama-3.1-8b"), load=load, requests=requests, seed=seed,
        )  # fmt: skip
    rows = []
    for spec in wanted:
        note(f"{spec}: {PEERS[spec].what} {PEERS[spec].version}")
        try:
            rows.append(asyncio.run(row_of(spec, config)))
        except PeerError as error:
            note(f"{spec}: {error}")
            rows.append({"policy": spec, "peer": PEERS[spec].what, "error": str(error)})
    facts = result(
        trace=trace, cluster=cluster, load=load, requests=requests, seed=seed, rows=rows,
        not_compared=NOT_COMPARED,
    )  # fmt: skip
    publish(facts, lambda console: show(facts, console), json_output=json_output, out=out)
    if any(row.get("share", 0.0) < GOAL for row in rows):
        raise typer.Exit(1)


async def row_of(spec: str, config: SimulationConfig) -> Message:
    """A row of the result: how many decisions were equal, and what either makes of the traffic."""
    peer, traffic, loop = PEERS[spec], traffic_of(config), asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        hello = {**peer.hello, "block_tokens": config.workload.block_tokens}
        hello["nodes"] = [
            {"name": node.name, "max_batch_tokens": 8192, "device_blocks": 100_000}
            for node in config.cluster.nodes
        ]
        if "DYN_ROUTER_POLICY_CONFIG" in hello.get("settings", ()):
            path = Path(stack.enter_context(TemporaryDirectory())) / "two-tier.yaml"
            path.write_text(_TWO_TIER, encoding="utf-8")
            hello["settings"] = {"DYN_ROUTER_POLICY_CONFIG": str(path)}
        process = await stack.enter_async_context(started(spec, command_of(peer.script), hello))
        mine = baseline_named(spec, config.seed)
        assert isinstance(mine, Baseline)
        policy = Shadowed(mine, _asking(process, loop))
        steered = replace(config, policy=policy)
        real = await asyncio.to_thread(simulate, steered, traffic=traffic)
    ours = await asyncio.to_thread(simulate, replace(config, policy=spec), traffic=traffic)
    decisions = policy.counts.total()
    share = (policy.counts["equal"] + policy.counts["level"]) / max(decisions, 1)
    return {
        "policy": spec, "peer": peer.what, "version": peer.version, "decisions": decisions,
        "equal": policy.counts["equal"], "level": policy.counts["level"], "share": share,
        "differences": dict(policy.differences), "real": _ttft(real), "reimplemented": _ttft(ours),
    }  # fmt: skip


def _asking(
    process: RouterProcess, loop: asyncio.AbstractEventLoop
) -> Callable[[Message], Message]:
    def ask(message: Message) -> Message:
        return asyncio.run_coroutine_threadsafe(process.ask(message), loop).result(_ASK_S)

    return ask


def _ttft(outcome: Outcome) -> dict[str, float]:
    summary = outcome.summary()
    return {"p50": summary["ttft_s"]["p50"], "p99": summary["ttft_s"]["p99"],
            "met": summary["slo"]["met"]}  # fmt: skip


def show(facts: Mapping[str, Any], console: Any) -> None:
    """Print a result for a reader."""
    rows = []
    for row in facts["rows"]:
        if "error" in row:
            rows.append((row["policy"], row["peer"], row["error"][:60], *[""] * 7))
            continue
        real, ours = row["real"], row["reimplemented"]
        rows.append((
            row["policy"], f"{row['peer']} {row['version']}", str(row["decisions"]),
            str(row["equal"]), str(row["level"]), f"{row['share']:.1%}",
            *(f"{each[part]:.3g}" for part in ("p50", "p99") for each in (real, ours)),
        ))  # fmt: skip
    columns = (
        "policy", "real", "decisions", "equal", "level", "equal or level", "p50 real", "p50 ours",
        "p99 real", "p99 ours",
    )  # fmt: skip
    console.print(table("TTFT in s", columns, rows, left=("real",)))
    for names, why in facts["not_compared"].items():
        console.print(f"not compared: {names}: {why}", highlight=False, soft_wrap=True)
