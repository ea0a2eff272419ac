"""`kappa bench peers`: the real routers of other systems and ours before the same emulated nodes.

Nodes are emulated: the simulator's engines on the wall clock, publishing real KV events. Routers
are real: Dynamo's SelectionService, Ray's router classes and ours, each in a process of its own,
asked over the same JSON lines. Every run starts with fresh processes and empty caches.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.harness import Json, note, publish, result, table
from benchmarks.routing.peers.helper import SCRIPTS, HelperError, started
from benchmarks.routing.peers.nodes import (
    EmulatedNode,
    PacedLoop,
    noise_of,
    report_all,
    scaled_memory,
)
from benchmarks.routing.peers.play import Arrival, Cut, Outcome, Player, arrivals
from benchmarks.routing.peers.rows import against, measured, repeat_row, router_row
from benchmarks.routing.peers.venv import DYNAMO_VERSION, dynamo_python
from kappa.shapes import model_shape
from simulator.capacity import capacity_rps
from simulator.clusters import check, cluster_named
from workload.catalogue import workload_named
from workload.reading import WorkloadError
from workload.shapes import Workload

OURS = "kappa"
EMULATED = (
    "Nodes are EMULATED (simulator engines on the wall clock): this ranks routers, it measures no"
    " GPU."
)
_SETTLE_S = 1.0
_WARM_SHARE = 0.2
_IN_PROCESS = "Ray's own class and defaults, no cluster: exact queue lengths, no actor calls"
# Name: version, what it is, script, what its first line holds besides the nodes.
ROUTERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    OURS: (version("kappa-serve"), "router.core, fed by KV events and reports", "", {}),
    "dynamo": (DYNAMO_VERSION, "SelectionService and its defaults", "dynamo_router.py",
               {"settings": {}}),
    "dynamo-prefill": (
        DYNAMO_VERSION, "SelectionService, prefill_load_scale 8 instead of 1", "dynamo_router.py",
        {"settings": {"DYN_ROUTER_PREFILL_LOAD_SCALE": "8"}},
    ),
    "ray-prefix": (version("ray"), _IN_PROCESS, "ray_router.py", {"router": "prefix_affinity"}),
    "ray-pow2": (version("ray"), _IN_PROCESS, "ray_router.py", {"router": "pow_2"}),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """What all routers of a bench have in common; seconds are emulated ones."""

    cluster: str
    model: str
    dilation: float
    noise: float
    seconds: float
    scale: int
    block_tokens: int
    policy: str


def peers(
    workload: Annotated[str, typer.Option(help="Workload: a built-in name or a file.")] = (
        "narrativeqa"
    ),
    cluster: Annotated[str, typer.Option(help="Cluster: a built-in name or a file.")] = "small",
    model: Annotated[str, typer.Option(help="Model to emulate.")] = "llama-3.1-8b",
    load: Annotated[float, typer.Option(min=0.05, help="Load, as a share of capacity.")] = 0.35,
    seconds: Annotated[float, typer.Option(min=5, help="Emulated seconds a run.")] = 45.0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per router, a seed each.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the first repeat.")] = 1,
    dilation: Annotated[float, typer.Option(min=1, help="Wall seconds per emulated one.")] = 2.0,
    noise: Annotated[float, typer.Option(min=0, help="Sigma of step and transfer times.")] = 0.1,
    turns: Annotated[int, typer.Option(min=1, help="Most turns a session.")] = 12,
    pause: Annotated[float, typer.Option(min=0, help="Share of every pause that is kept.")] = 0.1,
    scale: Annotated[int, typer.Option(min=1, help="Divides prompts and memory for KV.")] = 4,
    policy: Annotated[str, typer.Option(help="Our policy.")] = "priced",
    only: Annotated[str, typer.Option(help=f"Routers: {', '.join(ROUTERS)}.")] = "",
    json_output: Json = False,
) -> None:
    """Real routers before emulated nodes, in real time: TTFT by router, on the same requests."""
    chosen = [name.strip() for name in only.split(",") if name.strip()] or list(ROUTERS)
    if unknown := [name for name in chosen if name not in ROUTERS]:
        raise typer.BadParameter(
            f"no router {unknown[0]!r}; known: {', '.join(ROUTERS)}", param_hint="--only"
        )
    cut = Cut(turns, pause, scale)
    try:
        cut_workload, capacity = _prepared(workload, cluster, model, cut, seed)
    except (ValueError, WorkloadError) as error:
        raise typer.BadParameter(str(error)) from None
    setting = Setting(
        cluster, model, dilation, noise, seconds, scale, cut_workload.block_tokens, policy
    )
    note(EMULATED)
    traffic = {
        s: arrivals(cut_workload, load * capacity, seconds, s) for s in range(seed, seed + repeats)
    }
    rows, not_run = asyncio.run(_compared(chosen, traffic, setting))
    facts = result(
        emulated=True, header=EMULATED, rows=rows, not_run=not_run,
        against_ours=against(rows, OURS), workload=workload, source=cut_workload.source,
        cut=str(cut), cluster=cluster, model=model, load=load, capacity_rps=capacity,
        seeds=list(traffic), seconds=seconds, dropped_s=_WARM_SHARE * seconds, dilation=dilation,
        noise=noise, policy=policy,
        late_ms=max((r["late_ms"] for row in rows for r in row["repeats"]), default=0.0),
    )  # fmt: skip
    publish(facts, lambda console: _show(facts, console), json_output=json_output)


def _prepared(
    workload: str, cluster: str, model: str, cut: Cut, seed: int
) -> tuple[Workload, float]:
    """The workload, cut, and the cluster's capacity for it in requests per second."""
    found = cut.apply(workload_named(workload))
    nodes, shape = cluster_named(cluster), model_shape(model)
    check(nodes, shape, found.block_tokens)
    specs = [scaled_memory(spec, shape, cut.scale) for spec in nodes.nodes]
    return found, capacity_rps(found, specs, shape, requests=5_000, seed=seed)


async def _compared(
    chosen: Sequence[str], traffic: dict[int, list[Arrival]], setting: Setting
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """A row per router, and those that could not be run."""
    repeats: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    failed: dict[str, str] = {}
    for number, (seed, found) in enumerate(traffic.items()):
        # In another order each time, so that none always has the machine at its coolest.
        for name in [*chosen[number % len(chosen) :], *chosen[: number % len(chosen)]]:
            if name in failed:
                continue
            try:
                row = {"seed": seed, **await _run(name, found, setting, seed)}
            except HelperError as error:
                failed[name] = str(error)
                note(f"{name}: not run: {error}")
                continue
            repeats[name].append(row)
            note(
                f"repeat {number + 1}/{len(traffic)} {name}: {row['completed']}/{row['requests']} "
                f"requests, TTFT {row.get('ttft_s')}; nodes late {row['late_ms']:.0f} ms"
            )
    rows = [
        {"router": name, "version": ROUTERS[name][0], "what": ROUTERS[name][1],
         **router_row(repeats[name])}
        for name in chosen
        if name not in failed
    ]  # fmt: skip
    return rows, [{"router": name, "why": why} for name, why in failed.items()]


async def _run(name: str, found: Sequence[Arrival], setting: Setting, seed: int) -> dict[str, Any]:
    """One router, one seed: fresh nodes, a fresh router, all requests; both gone afterwards."""
    shape, loop = model_shape(setting.model), PacedLoop(setting.dilation)
    nodes = [
        EmulatedNode(
            number, scaled_memory(spec, shape, setting.scale), shape, setting.block_tokens,
            noise_of(setting.noise, seed, number), loop,
        )
        for number, spec in enumerate(cluster_named(setting.cluster).nodes)
    ]  # fmt: skip
    beside = [asyncio.create_task(loop.drive()), asyncio.create_task(report_all(nodes))]
    _, _, script, more = ROUTERS[name]
    hello = {
        "nodes": [node.row() for node in nodes], "block_tokens": setting.block_tokens,
        "seed": seed, "policy": setting.policy, **more,
    }  # fmt: skip
    try:
        async with started(name, router_command(script), hello) as router:
            await asyncio.sleep(_SETTLE_S)
            player = Player(router, nodes, loop)
            await player.play(found, setting.seconds)
        for task in beside:
            if task.done():
                # A node that breaks must break the run: its requests would only look slow.
                task.result()
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        for node in nodes:
            node.close()
    outcomes: list[Outcome] = measured(player.outcomes, _WARM_SHARE * setting.seconds)
    late_s = sorted(loop.late_s) or [0.0]
    return {
        "late_ms": 1e3 * late_s[int(0.99 * (len(late_s) - 1))],
        **repeat_row(outcomes, {node.name: node.totals for node in nodes}),
    }


def router_command(script: str) -> list[str]:
    """How a router's process is started; without a script, ours.

    Raises:
        HelperError: its environment cannot be made.
    """
    if not script:
        return [sys.executable, "-m", "benchmarks.routing.peers.our_router"]
    python = dynamo_python() if script.startswith("dynamo") else sys.executable
    return [python, "-I", str(SCRIPTS / script)]


def _show(facts: dict[str, Any], console: Console) -> None:
    console.print(facts["header"], highlight=False)
    nodes = list(facts["rows"][0].get("node_share", {})) if facts["rows"] else []
    columns = (
        "router", "TTFT p50", "TTFT p99", "e2e p50", "in flight", "requests", "failed",
        f"share of {', '.join(nodes)}",
    )  # fmt: skip
    title = (
        f"{facts['workload']} on {facts['cluster']} (emulated), load {facts['load']:g}; "
        "s, median of repeats (least to most)"
    )
    console.print(table(title, columns, [_cells(row, nodes) for row in facts["rows"]]))
    for lost in facts["not_run"]:
        console.print(f"not run: {lost['router']}: {lost['why']}", highlight=False)
    console.print(
        f"{facts['cut']}. {facts['seconds']:g} s a run, the first {facts['dropped_s']:g} s "
        f"dropped; noise {facts['noise']:g}; capacity {facts['capacity_rps']:.2f} requests/s; "
        f"nodes late by {facts['late_ms']:.0f} ms of wall time at most (p99 of a run)",
        highlight=False,
    )


def _cells(row: dict[str, Any], nodes: Sequence[str]) -> tuple[str, ...]:
    name = f"{row['router']} {row['version']}"
    if "ttft_s" not in row:
        return (name, *["-"] * 7)
    return (
        name, _spread(row["ttft_s"]["p50"]), _spread(row["ttft_s"]["p99"]),
        _spread(row["e2e_s"]["p50"]), f"{row['in_flight']['median']:.1f}", str(row["requests"]),
        str(sum(row["failed"].values())),
        " ".join(f"{100 * row['node_share'][node]:.0f}%" for node in nodes),
    )  # fmt: skip


def _spread(value: dict[str, float]) -> str:
    return f"{value['median']:.3f} ({value['least']:.3f} to {value['most']:.3f})"
