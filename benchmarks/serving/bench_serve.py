"""`kappa bench predict` and `kappa bench serve`: how good predictions are, what serving costs."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.serving import predict as predict_law
from benchmarks.serving import serve as serve_law
from benchmarks.serving.bench_observing import LEAST_ROUNDS, observing_cost
from benchmarks.serving.client import Phase, Player
from benchmarks.serving.traffic import Governor, Traffic, shapes_of
from deploy.commands.provenance import Json, command, machine
from deploy.commands.serve import running, settings_or_exit
from kappa.settings.cluster import ClusterSettings
from workload.sessions import demo_sessions_path, read_sessions

PREDICT_HELP = (
    "How good TTFT predictions are, with the predictor frozen, on unseen sessions, under load."
    f" Classes: {predict_law.CLASS_DEFINITION}."
)

_WARM_UP_SEED = 1_000_003
_TARGET_LOAD = 0.72
# A first guess: what a token costs Llama-3.1-8B at 400 TFLOP/s.
_TOKEN_S = 40e-6


def predict(
    requests: Annotated[int, typer.Option(min=4, help="Requests to measure, at least.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the sessions.")] = 1,
    dilation: Annotated[
        float | None, typer.Option(min=1, help="Real seconds per emulated one.")
    ] = None,
    per_class: Annotated[int, typer.Option(min=1, help="Requests per class, at least.")] = (
        predict_law.MIN_PER_CLASS
    ),
    calibrate: Annotated[
        int, typer.Option(min=0, help="Outcomes the predictor learns from before it is frozen.")
    ] = 80,
    limit: Annotated[float, typer.Option(help="Seconds to measure at most.")] = 900.0,
    load: Annotated[
        float, typer.Option(min=0.1, max=0.95, help="GPU load to hold the nodes at.")
    ] = _TARGET_LOAD,
    url: Annotated[
        str | None, typer.Option(help="A running cluster instead; then nobody freezes it.")
    ] = None,
    records: Annotated[
        Path | None, typer.Option(help="Write every decision and outcome here, as JSON lines.")
    ] = None,
    router_log: Annotated[
        Path | None, typer.Option(help="Write the router's log here (to replay predictions).")
    ] = None,
    json_output: Json = False,
) -> None:
    """Predicted against actual TTFT by class, beside a running median."""
    settings = settings_or_exit(port=0)
    if dilation is not None:
        settings = settings.model_copy(update={"dilation": dilation})
    changes = {
        "calibrate_requests": calibrate,
        "record": str(router_log.resolve()) if router_log else None,
    }
    router = settings.router.model_copy(update=changes)
    settings = settings.model_copy(update={"router": router})

    def measured(where: str) -> tuple[Phase, Phase]:
        bench = _run_predict(
            where, settings, seed, requests=requests, per_class=per_class, limit_s=limit,
            calibrate=calibrate, load=load,
        )  # fmt: skip
        return asyncio.run(bench)

    if url is not None:
        warm_up, phase = measured(url.rstrip("/"))
    else:
        with running(settings) as cluster:
            warm_up, phase = measured(cluster.url)
    if records is not None:
        _write_records(records, phase)
    result = _predict_result(warm_up, phase, calibrate)
    if json_output:
        print(json.dumps(result))
    else:
        _print_predict(result)


async def _run_predict(
    url: str,
    settings: ClusterSettings,
    seed: int,
    *,
    requests: int,
    per_class: int,
    limit_s: float,
    calibrate: int,
    load: float,
) -> tuple[Phase, Phase]:
    shapes = shapes_of(read_sessions(demo_sessions_path()))
    limits = httpx.Limits(max_connections=64, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=limits) as client:
        player = Player(client, settings.model.id, _progress())
        _progress()(f"warm-up: {calibrate} outcomes to learn from")
        governor = Governor(load, settings.workers, settings.dilation * _TOKEN_S)
        warm_up = await player.warm_up(
            Traffic(shapes, seed + _WARM_UP_SEED), calibrate + 10, governor
        )
        traffic = Traffic(shapes, seed)
        _progress()("reading the documents that are to be revisited")
        warm_up.outcomes += (await player.prepare(traffic)).outcomes
        _progress()("measuring")
        phase = await player.measure(
            traffic, governor, Random(seed),
            requests=requests, per_class=per_class, limit_s=limit_s,
        )  # fmt: skip
    return warm_up, phase


def _predict_result(warm_up: Phase, phase: Phase, calibrate: int) -> dict[str, Any]:
    used = predict_law.usage(phase.nodes_before, phase.nodes_after)
    baseline = predict_law.baseline_errors(warm_up.outcomes, phase.outcomes)
    rows = predict_law.class_rows(phase.outcomes, baseline)
    learnt = [
        {row["node"]: row["calibration"] for row in nodes}
        for nodes in (phase.nodes_before, phase.nodes_after)
    ]
    extra_s = [
        phase.client_ttft_s[o.request_id] - o.actual_s
        for o in phase.outcomes
        if o.request_id in phase.client_ttft_s
    ]
    return {
        "load": used.load,
        "load_by_node": dict(used.load_by_node),
        "link_load": used.link_load,
        "store_load": used.store_load,
        "overrun_share": used.overrun_share,
        "void": used.overrun_share > predict_law.MAX_OVERRUN_SHARE,
        "load_reached": used.load >= predict_law.MIN_LOAD,
        "requests": len(phase.outcomes),
        "failed": dict(phase.failures),
        "seconds": phase.seconds,
        "classes": rows,
        "class_definition": predict_law.CLASS_DEFINITION,
        "frozen": learnt[0] == learnt[1],
        "calibrated_on": calibrate,
        "calibration": learnt[1],
        "client_adds_s": statistics.median(extra_s) if extra_s else None,
        "paced": all(row["paced"] for row in phase.nodes_after),
        "machine": machine(),
        "command": command(),
    }


def serve(
    requests: Annotated[int, typer.Option(min=1, help="Requests per round, at least.")] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per system and point.")] = 6,
    concurrency: Annotated[str, typer.Option(help="Clients at once, several by comma.")] = "1,8,32",
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 1,
    observing: Annotated[
        bool,
        typer.Option(help="Instead: ours with metrics and logs against ours without."),
    ] = False,
    spans: Annotated[
        bool, typer.Option(help="With --observing: a span of every request to a collector, too.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Streamed chats: our ingress and worker against stock Ray Serve LLM on the same engine."""
    try:
        concurrencies = [int(part) for part in concurrency.split(",")]
    except ValueError:
        raise typer.BadParameter("give numbers with commas", param_hint="--concurrency") from None
    if min(concurrencies) < 1:
        raise typer.BadParameter("give numbers from 1", param_hint="--concurrency")
    if spans and not observing:
        raise typer.BadParameter("spans are counted with --observing only", param_hint="--spans")
    if observing:
        if rounds < LEAST_ROUNDS:
            raise typer.BadParameter(
                f"--observing takes an interval over rounds: give {LEAST_ROUNDS} or more",
                param_hint="--rounds",
            )
        observing_cost(concurrencies, requests, rounds, seed, spans, json_output, _progress())
        return
    # Imports half the system: only when it is wanted.
    from benchmarks.serving.cluster import SYSTEMS, BenchCluster, one_node

    settings = one_node(settings_or_exit(port=0))
    with running(settings, BenchCluster) as cluster:
        urls = {
            name: f"{cluster.url}{prefix}/v1/chat/completions" for name, prefix in SYSTEMS.items()
        }
        played = asyncio.run(
            serve_law.play(
                urls, settings.model.id, concurrencies, requests, rounds, seed, _progress()
            )
        )
    result = {
        **serve_law.summarize(played, "kappa"),
        "paced": False,
        "machine": machine(),
        "command": command(),
    }
    if json_output:
        print(json.dumps(result))
    else:
        _print_serve(result)


def _print_serve(result: dict[str, Any]) -> None:
    table = Table(title="Streamed chats, unpaced, one replica each; ms at the client")
    columns = (
        "prompt",
        "clients",
        "system",
        "TTFT p50",
        "p99",
        "spread",
        "first event p50",
        "req/s",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("prompt", "system") else "right")
    for row in result["rows"]:
        table.add_row(
            row["prompt"],
            str(row["concurrency"]),
            row["system"],
            f"{1e3 * row['ttft_s']['p50']:.0f}",
            f"{1e3 * row['ttft_s']['p99']:.0f}",
            f"{100 * row['ttft_s']['spread']:.0f} %",
            f"{1e3 * row['first_event_s']['p50']:.0f}",
            f"{row['rps']['median']:.1f}",
        )
    console = Console()
    console.print(table)
    for r in result["ratio_p50"]:
        console.print(
            f"{r['prompt']}, {r['concurrency']} clients: ours / {r['against']}: "
            f"TTFT {r['ttft']:.2f}, requests/s {r['rps']:.2f}",
            highlight=False,
        )
    console.print(f"{result['command']}  on {result['machine']}", highlight=False)


def _print_predict(result: dict[str, Any]) -> None:
    table = Table(title="TTFT prediction, paced nodes" if result["paced"] else "TTFT prediction")
    columns = ("class", "n", "median", "p90", "running median's", "bias", "TTFT s", "goal")
    for column in columns:
        table.add_column(column, justify="left" if column in ("class", "goal") else "right")
    for row in result["classes"]:
        table.add_row(
            row["class"],
            str(row["n"]),
            *(
                _percent(row[key])
                for key in (
                    "median_abs_err", "p90_abs_err", "baseline_median_abs_err", "median_bias",
                )
            ),
            f"{row['median_ttft_s']:.2f}" if row["median_ttft_s"] is not None else "-",
            {True: "met", False: "missed", None: "-"}[row["goal_met"]],
        )  # fmt: skip
    console = Console()
    console.print(table)
    console.print(
        f"{result['requests']} requests in {result['seconds']:.0f} s; gpu load "
        f"{result['load']:.2f}, link load {result['link_load']:.2f}; overruns "
        f"{100 * result['overrun_share']:.1f} %; "
        f"{'frozen' if result['frozen'] else 'NOT frozen'}; failed: {result['failed'] or 'none'}",
        highlight=False,
    )
    if result["void"]:
        console.print("[red]void: more than 5 % of the steps overran their pace[/red]")
    if not result["load_reached"]:
        console.print("[red]load below 0.6: the goal asks for at least that[/red]")
    console.print(f"{result['command']}  on {result['machine']}", highlight=False)


def _write_records(path: Path, phase: Phase) -> None:
    lines = (
        {
            "kind": o.kind,
            "error": o.error,
            "client_ttft_s": phase.client_ttft_s.get(o.request_id),
            **{name: getattr(o, name) for name in o.__slots__},
        }
        for o in phase.outcomes
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _progress() -> Callable[[str], None]:
    console = Console(stderr=True)
    return lambda what: console.print(f"[dim]{what}[/dim]", highlight=False)
