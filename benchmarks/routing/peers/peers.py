"""`kappa bench peers`: the real routers of other systems and ours before the same emulated nodes.

Nodes are emulated: the simulator's engines on the wall clock, publishing real KV events. Routers
are real: Dynamo's SelectionService, Ray's router classes and ours, each in a process of its own,
asked over the same JSON lines. Every run starts with fresh processes and empty caches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.harness import Json, names, note, publish, result, table, usage_errors
from benchmarks.routing.peers.nodes import EmulatedNode, PacedLoop, report_all, scaled_memory
from benchmarks.routing.peers.play import (
    Arrival,
    Cut,
    Player,
    Row,
    against,
    arrivals,
    repeat_row,
    router_row,
)
from benchmarks.routing.peers.routers import OURS, ROUTERS, PeerError, command_of, started
from kappa.shapes import model_shape
from simulator.capacity import capacity_rps
from simulator.clusters import check, cluster_named
from workload.catalogue import workload_named
from workload.shapes import Workload

EMULATED = (
    "Nodes are EMULATED (simulator engines on the wall clock): this ranks routers, it measures no"
    " GPU."
)
_SETTLE_S = 1.0
_WARM_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Setting:
    """What all routers of a bench have in common; seconds are emulated ones."""

    cluster: str
    model: str
    dilation: float
    noise: float
    seconds: float
    cut: Cut
    policy: str

    def prepared(self, workload: str, seed: int) -> tuple[Workload, float]:
        """The workload, cut, and the cluster's capacity for it in requests per second."""
        found = self.cut.apply(workload_named(workload))
        nodes, shape = cluster_named(self.cluster), model_shape(self.model)
        check(nodes, shape, found.block_tokens)
        specs = [scaled_memory(spec, shape, self.cut.scale) for spec in nodes.nodes]
        return found, capacity_rps(found, specs, shape, requests=5_000, seed=seed)


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
    cut = Cut(turns, pause, scale)
    setting = Setting(cluster, model, dilation, noise, seconds, cut, policy)
    with usage_errors():
        chosen = names(only or ",".join(ROUTERS), ROUTERS, "--only")
        cut_workload, capacity = setting.prepared(workload, seed)
    note(EMULATED)
    traffic = {
        s: arrivals(cut_workload, load * capacity, seconds, s) for s in range(seed, seed + repeats)
    }
    block_tokens = cut_workload.block_tokens
    rows, not_run = asyncio.run(_compared(chosen, traffic, setting, block_tokens))
    facts = result(
        emulated=True, header=EMULATED, rows=rows, not_run=not_run,
        against_ours=against(rows, OURS), workload=workload, source=cut_workload.source,
        cut=str(cut), cluster=cluster, model=model, load=load, capacity_rps=capacity,
        seeds=list(traffic), seconds=seconds, dropped_s=_WARM_SHARE * seconds, dilation=dilation,
        noise=noise, policy=policy,
        late_ms=max((r["late_ms"] for row in rows for r in row["repeats"]), default=0.0),
    )  # fmt: skip
    publish(facts, lambda console: show(facts, console), json_output=json_output)


async def _compared(
    chosen: Sequence[str], traffic: Mapping[int, list[Arrival]], setting: Setting, block_tokens: int
) -> tuple[list[Row], list[dict[str, str]]]:
    """A row per router, and those that could not be run."""
    repeats: dict[str, list[Row]] = {name: [] for name in chosen}
    failed: dict[str, str] = {}
    order = list(chosen)
    for number, (seed, found) in enumerate(traffic.items(), start=1):
        for name in [name for name in order if name not in failed]:
            try:
                row = {"seed": seed, **await run(name, found, setting, block_tokens, seed)}
            except PeerError as error:
                failed[name] = str(error)
                note(f"{name}: not run: {error}")
                continue
            repeats[name].append(row)
            note(
                f"repeat {number}/{len(traffic)} {name}: {row['completed']}/{row['requests']} "
                f"requests, TTFT {row.get('ttft_s')}; nodes late {row['late_ms']:.0f} ms"
            )
        # In another order each time, so that none always has the machine at its coolest.
        order.append(order.pop(0))
    rows = [
        {"router": name, "version": ROUTERS[name].version, "what": ROUTERS[name].what,
         **router_row(repeats[name])}
        for name in chosen
        if name not in failed
    ]  # fmt: skip
    return rows, [{"router": name, "why": why} for name, why in failed.items()]


async def run(
    name: str, found: Sequence[Arrival], setting: Setting, block_tokens: int, seed: int
) -> Row:
    """One router, one seed: fresh nodes, a fresh router, all requests; both gone afterwards."""
    shape, loop = model_shape(setting.model), PacedLoop(setting.dilation)
    nodes = []
    for number, spec in enumerate(cluster_named(setting.cluster).nodes):
        scaled = scaled_memory(spec, shape, setting.cut.scale)
        noise = (seed, number), setting.noise
        nodes.append(EmulatedNode(scaled, shape, block_tokens, noise, loop))
    beside = [asyncio.create_task(loop.drive()), asyncio.create_task(report_all(nodes))]
    router = ROUTERS[name]
    hello = {
        "nodes": [node.row() for node in nodes], "block_tokens": block_tokens, "seed": seed,
        "policy": setting.policy, **router.hello,
    }  # fmt: skip
    try:
        async with started(name, command_of(router.script), hello) as process:
            await asyncio.sleep(_SETTLE_S)
            player = Player(process, nodes, loop)
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
    # What came first only warmed the caches.
    from_s = _WARM_SHARE * setting.seconds
    outcomes = [outcome for outcome in player.outcomes if outcome.start_s >= from_s]
    late_s = sorted(loop.late_s) or [0.0]
    return {
        "late_ms": 1e3 * late_s[int(0.99 * (len(late_s) - 1))],
        **repeat_row(outcomes, {node.name: node.totals for node in nodes}),
    }


def show(facts: dict[str, Any], console: Console) -> None:
    """A row per router, those that did not run, and what the bench was cut to."""
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
    lines = []
    for row in facts["rows"]:
        name = f"{row['router']} {row['version']}"
        if "ttft_s" not in row:
            lines.append((name, *["-"] * 7))
            continue
        spreads = (row["ttft_s"]["p50"], row["ttft_s"]["p99"], row["e2e_s"]["p50"])
        lines.append((
            name, *(f"{s['median']:.3f} ({s['least']:.3f} to {s['most']:.3f})" for s in spreads),
            f"{row['in_flight']['median']:.1f}", str(row["requests"]),
            str(sum(row["failed"].values())),
            " ".join(f"{100 * row['node_share'][node]:.0f}%" for node in nodes),
        ))  # fmt: skip
    console.print(table(title, columns, lines))
    for lost in facts["not_run"]:
        console.print(f"not run: {lost['router']}: {lost['why']}", highlight=False)
    console.print(
        f"{facts['cut']}. {facts['seconds']:g} s a run, the first {facts['dropped_s']:g} s "
        f"dropped; noise {facts['noise']:g}; capacity {facts['capacity_rps']:.2f} requests/s; "
        f"nodes late by {facts['late_ms']:.0f} ms of wall time at most (p99 of a run)",
        highlight=False,
    )
