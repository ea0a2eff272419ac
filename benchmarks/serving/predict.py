"""`kappa bench predict`: how good predictions of the TTFT are, under load, with a frozen predictor.

Plays traffic at an endpoint, watches its nodes, and keeps their load near a target.
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.harness import Json, append_line, note, publish, result, table
from benchmarks.serving import scoring
from benchmarks.serving.cluster_client import ClusterClient
from benchmarks.serving.player import Phase, Player
from benchmarks.serving.traffic import Governor, Traffic, shapes_of
from deploy.commands.serve import running, settings_or_exit
from kappa.settings.cluster import ClusterSettings
from workload.sessions import demo_sessions_path, read_sessions

PREDICT_HELP = (
    "How good TTFT predictions are, with the predictor frozen, on unseen sessions, under load."
    f" Classes: {scoring.CLASS_DEFINITION}."
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
        scoring.MIN_PER_CLASS
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
        size = Size(requests, per_class, limit, calibrate, load)
        return asyncio.run(_run_predict(where, settings, seed, size))

    if url is not None:
        warm_up, phase = measured(url.rstrip("/"))
    else:
        with running(settings) as cluster:
            warm_up, phase = measured(cluster.url)
    if records is not None:
        _write_records(records, phase)
    facts = _facts(warm_up, phase, calibrate)
    publish(facts, lambda console: _show(facts, console), json_output=json_output)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured. calibrate: outcomes to learn from before; load: of the nodes."""

    requests: int
    per_class: int
    limit_s: float
    calibrate: int
    load: float


async def _run_predict(
    url: str,
    settings: ClusterSettings,
    seed: int,
    size: Size,
) -> tuple[Phase, Phase]:
    shapes = shapes_of(read_sessions(demo_sessions_path()))
    async with ClusterClient(url, settings.model.id, timeout_s=120.0) as client:
        player = Player(client)
        note(f"warm-up: {size.calibrate} outcomes to learn from")
        governor = Governor(size.load, settings.workers, settings.dilation * _TOKEN_S)
        warm_up = await player.warm_up(
            Traffic(shapes, seed + _WARM_UP_SEED), size.calibrate + 10, governor
        )
        traffic = Traffic(shapes, seed)
        note("reading the documents that are to be revisited")
        warm_up.outcomes += (await player.prepare(traffic)).outcomes
        note("measuring")
        phase = await player.measure(
            traffic, governor, Random(seed),
            requests=size.requests, per_class=size.per_class, limit_s=size.limit_s,
        )  # fmt: skip
    return warm_up, phase


def _facts(warm_up: Phase, phase: Phase, calibrate: int) -> dict[str, Any]:
    used = scoring.usage(phase.nodes_before, phase.nodes_after)
    baseline = scoring.baseline_errors(warm_up.outcomes, phase.outcomes)
    learnt = [
        {row["node"]: row["calibration"] for row in nodes}
        for nodes in (phase.nodes_before, phase.nodes_after)
    ]
    extra_s = [
        phase.client_ttft_s[o.request_id] - o.actual_s
        for o in phase.outcomes
        if o.request_id in phase.client_ttft_s
    ]
    return result(
        load=used.load, load_by_node=dict(used.load_by_node), link_load=used.link_load,
        store_load=used.store_load, overrun_share=used.overrun_share,
        void=used.overrun_share > scoring.MAX_OVERRUN_SHARE,
        load_reached=used.load >= scoring.MIN_LOAD, requests=len(phase.outcomes),
        failed=dict(phase.failures), seconds=phase.seconds,
        classes=scoring.class_rows(phase.outcomes, baseline),
        class_definition=scoring.CLASS_DEFINITION, frozen=learnt[0] == learnt[1],
        calibrated_on=calibrate, calibration=learnt[1],
        client_adds_s=statistics.median(extra_s) if extra_s else None,
        paced=all(row["paced"] for row in phase.nodes_after),
    )  # fmt: skip


def _show(facts: dict[str, Any], console: Console) -> None:
    errors = ("median_abs_err", "p90_abs_err", "baseline_median_abs_err", "median_bias")
    rows = [
        (
            row["class"], str(row["n"]), *(_percent(row[key]) for key in errors),
            f"{row['median_ttft_s']:.2f}" if row["median_ttft_s"] is not None else "-",
            {True: "met", False: "missed", None: "-"}[row["goal_met"]],
        )
        for row in facts["classes"]
    ]  # fmt: skip
    columns = ("class", "n", "median", "p90", "running median's", "bias", "TTFT s", "goal")
    title = "TTFT prediction, paced nodes" if facts["paced"] else "TTFT prediction"
    console.print(table(title, columns, rows, left=("goal",)))
    console.print(
        f"{facts['requests']} requests in {facts['seconds']:.0f} s; gpu load "
        f"{facts['load']:.2f}, link load {facts['link_load']:.2f}; overruns "
        f"{100 * facts['overrun_share']:.1f} %; "
        f"{'frozen' if facts['frozen'] else 'NOT frozen'}; failed: {facts['failed'] or 'none'}",
        highlight=False,
    )
    if facts["void"]:
        console.print("[red]invalid: more than 5 % of the steps overran their pace[/red]")
    if not facts["load_reached"]:
        console.print("[red]load below 0.6: the goal asks for at least that[/red]")


def _write_records(path: Path, phase: Phase) -> None:
    path.unlink(missing_ok=True)
    for o in phase.outcomes:
        seen = {
            "kind": o.kind, "error": o.error, "client_ttft_s": phase.client_ttft_s.get(o.request_id)
        }  # fmt: skip
        append_line(path, {**seen, **{name: getattr(o, name) for name in o.__slots__}})


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
