"""`kappa bench peers`: the real peers and our router before the same emulated nodes, in real time.

Nodes are emulated: the simulator's engines behind real sockets, on the wall clock. Routers are
real: sglang-router as a process, Dynamo's SelectionService and Ray's router classes in processes of
their own, ours in one like theirs. Every run starts with fresh processes and empty caches.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from benchmarks.harness import Json, note, publish, result, table
from benchmarks.routing.peers.play import Outcome, Player
from benchmarks.routing.peers.routers import (
    OURS,
    REQUEST_S,
    START_S,
    Nodes,
    Router,
    Setting,
    routers,
)
from benchmarks.routing.peers.sidecar import Sidecar, SidecarError
from benchmarks.routing.peers.table import against, measured, repeat_row, router_row
from benchmarks.routing.peers.traffic import Arrival, Cut, arrivals, longest_tokens
from benchmarks.routing.peers.venvs import PeerError
from benchmarks.routing.peers.wire import CHARACTERS_PER_BLOCK
from workload.errors import WorkloadError
from workload.shapes import Workload

EMULATED = (
    "Nodes are EMULATED (simulator engines behind real sockets, on the wall clock): this ranks"
    " routers, it measures no GPU."
)
_SETTLE_S = 1.0


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
    only: Annotated[str, typer.Option(help=f"Routers: {', '.join(routers())}.")] = "",
    json_output: Json = False,
) -> None:
    """Real routers before emulated nodes, in real time: TTFT by router, on the same requests."""
    known = routers()
    chosen = [name.strip() for name in only.split(",") if name.strip()] or list(known)
    if unknown := [name for name in chosen if name not in known]:
        raise typer.BadParameter(
            f"no router {unknown[0]!r}; known: {', '.join(known)}", param_hint="--only"
        )
    try:
        cut = Cut(turns, pause, scale)
        cut_workload, capacity = _prepared(workload, cluster, model, cut, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    setting = Setting(
        cluster=cluster, model=model, dilation=dilation, noise=noise, seconds=seconds,
        drain_s=seconds, warm_share=0.2, block_tokens=cut_workload.block_tokens,
        scale=scale, policy=policy,
    )  # fmt: skip
    note(EMULATED)
    traffic = {
        s: arrivals(cut_workload, load * capacity, seconds, s) for s in range(seed, seed + repeats)
    }
    rows, not_run = asyncio.run(_compared([known[n] for n in chosen], traffic, setting))
    facts = result(
        emulated=True,
        header=EMULATED,
        rows=rows,
        not_run=not_run,
        against_ours=against(rows, OURS),
        workload=workload,
        source=cut_workload.source,
        cut=f"{cut}; text of {CHARACTERS_PER_BLOCK} characters per block of "
        f"{setting.block_tokens} tokens; ids at full length",
        cluster=cluster,
        model=model,
        load=load,
        capacity_rps=capacity,
        seeds=list(traffic),
        seconds=seconds,
        dropped_s=setting.warm_share * seconds,
        dilation=dilation,
        noise=noise,
        policy=policy,
        longest_tokens=max(longest_tokens(found) for found in traffic.values()),
        late_ms=max((r["late_ms"] for row in rows for r in row["repeats"]), default=0.0),
    )
    publish(facts, lambda console: _show(facts, console), json_output=json_output)


def _prepared(
    workload: str, cluster: str, model: str, cut: Cut, seed: int
) -> tuple[Workload, float]:
    """The workload, cut, and the cluster's capacity for it in requests per second."""
    # scipy, polars and the like: only when they are wanted.
    from benchmarks.routing.peers.emulated_node import scaled_memory
    from kappa.shapes import model_shape
    from simulator.capacity import capacity_rps
    from simulator.clusters import check, cluster_named
    from workload.catalogue import workload_named

    try:
        found = cut.apply(workload_named(workload))
    except WorkloadError as error:
        raise ValueError(str(error)) from None
    nodes, shape = cluster_named(cluster), model_shape(model)
    check(nodes, shape, found.block_tokens)
    specs = [scaled_memory(spec, shape, cut.scale) for spec in nodes.nodes]
    return found, capacity_rps(found, specs, shape, requests=5_000, seed=seed)


async def _compared(
    chosen: Sequence[Router], traffic: dict[int, list[Arrival]], setting: Setting
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """A row per router, and those that could not be run."""
    repeats: dict[str, list[dict[str, Any]]] = {router.name: [] for router in chosen}
    failed: dict[str, str] = {}
    for number, (seed, found) in enumerate(traffic.items()):
        # In another order each time, so that nobody always has the machine at its coolest.
        for router in [*chosen[number % len(chosen) :], *chosen[: number % len(chosen)]]:
            if router.name in failed:
                continue
            try:
                outcomes, totals = await _run(router, found, setting, seed)
            except (PeerError, SidecarError) as error:
                failed[router.name] = str(error)
                note(f"{router.name}: not run: {error}")
                continue
            sent = measured(outcomes, setting.warm_share * setting.seconds)
            row = {"seed": seed, "late_ms": totals["late_ms"], **repeat_row(sent, totals["nodes"])}
            repeats[router.name].append(row)
            ttft = row.get("ttft_s", {})
            note(
                f"repeat {number + 1}/{len(traffic)} {router.name}: {row['completed']}"
                f"/{row['requests']} requests, TTFT p50 {ttft.get('p50', float('nan')):.3f} s, "
                f"p99 {ttft.get('p99', float('nan')):.3f} s; nodes late {row['late_ms']:.0f} ms"
            )
    rows = [
        {"router": r.name, "version": r.version, "what": r.what, **router_row(repeats[r.name])}
        for r in chosen
        if r.name not in failed
    ]
    return rows, [{"router": name, "why": why} for name, why in failed.items()]


async def _run(
    router: Router, found: Sequence[Arrival], setting: Setting, seed: int
) -> tuple[list[Outcome], dict[str, Any]]:
    """One router, one seed: fresh nodes, a fresh router, all requests; both gone afterwards."""
    hello = {
        "cluster": setting.cluster, "model": setting.model, "dilation": setting.dilation,
        "noise": setting.noise, "seed": seed, "block_tokens": setting.block_tokens,
        "scale": setting.scale,
    }  # fmt: skip
    serve = [sys.executable, "-m", "benchmarks.routing.peers.emulated_nodes"]
    sidecar = await Sidecar.started("emulated nodes", serve, hello, START_S)
    try:
        nodes = Nodes(sidecar, sidecar.ready["nodes"])
        before, target = await router.start(nodes, setting, seed)
        try:
            await asyncio.sleep(_SETTLE_S)
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
            async with httpx.AsyncClient(timeout=REQUEST_S, limits=limits) as client:
                player = Player(client, target, setting.dilation)
                await player.play(found, setting.seconds, setting.drain_s)
            return player.outcomes, await sidecar.ask({"op": "totals"})
        finally:
            await before.close()
    finally:
        await sidecar.close()


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
