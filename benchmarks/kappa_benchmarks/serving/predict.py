"""`kappa bench predict`: how good predictions of the TTFT are, under load, predictor frozen."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.console import Console

from kappa.settings.cluster import ClusterSettings
from kappa_benchmarks.harness import Column, Json, append_line, note, publish, result, rows_table
from kappa_benchmarks.serving.client import MAX_OVERRUN_SHARE, ClusterClient, served_model, usage
from kappa_benchmarks.serving.predict_traffic import (
    Governor,
    Phase,
    Player,
    Size,
    Traffic,
    shapes_of,
)
from kappa_benchmarks.serving.prediction_errors import (
    CLASS_DEFINITION,
    PACED_GOAL,
    REAL_GOAL,
    class_rows,
)
from kappa_benchmarks.serving.settings import Config, ModelName, Unpaced, bench_settings
from kappa_deploy.commands.serve import running
from kappa_workload.sessions import demo_sessions_path, read_sessions

_WARM_UP_SEED = 1_000_003
_MIN_LOAD = 0.6
# Seconds of a token of Llama-3.1-8B at 400 TFLOP/s: a first guess, until the warm-up has shown it.
_TOKEN_S = 40e-6
_CALIBRATE = 80
_REAL_SCALE = 4.0

_Calibrate = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Outcomes the predictor learns from before it is frozen; default: 80 on paced "
        "nodes, and on real ones it goes on learning.",
    ),
]
_Scale = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        help="Divides the prompts' lengths, which reach 5,000 tokens; default: 4 on real "
        "CPU nodes, else 1.",
    ),
]


def predict(
    config: Config = None,
    model: ModelName = None,
    unpaced: Unpaced = False,
    requests: Annotated[int, typer.Option(min=4, help="Requests to measure, at least.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the sessions.")] = 1,
    dilation: Annotated[
        float | None, typer.Option(min=1, help="Real seconds per emulated one.")
    ] = None,
    per_class: Annotated[int, typer.Option(min=1, help="Requests per class, at least.")] = 50,
    calibrate: _Calibrate = None,
    limit: Annotated[float, typer.Option(help="Seconds to measure at most.")] = 900.0,
    load: Annotated[
        float,
        typer.Option(
            min=0.0, max=0.95, help="GPU load to hold the nodes at; 0: one act after the other."
        ),
    ] = 0.72,
    scale: _Scale = None,
    url: Annotated[
        str | None,
        typer.Option(help="A running cluster instead, which is not frozen; real: --unpaced, too."),
    ] = None,
    records: Annotated[
        Path | None, typer.Option(help="Write every decision and outcome here, as JSON lines.")
    ] = None,
    router_log: Annotated[
        Path | None, typer.Option(help="Write the router's log here (to replay predictions).")
    ] = None,
    json_output: Json = False,
) -> None:
    """Predicted against actual TTFT by class, on unseen sessions, beside a running median.

    Classes: a request is queue if its predicted queue seconds exceed both its load and its compute
    seconds; else load if part of its prompt is to be loaded from the host tier; else device if part
    is in the device cache; else compute.
    """
    settings = bench_settings(config, model, unpaced)
    is_real = not any(pool.paced for pool in settings.all_pools)
    on_cpus = not any(pool.placement.gpus for pool in settings.all_pools)
    learn = _CALIBRATE if calibrate is None and not is_real else calibrate
    log = str(router_log.resolve()) if router_log else None
    router = settings.router.model_copy(update={"calibrate_requests": learn, "record": log})
    changes = {"router": router, "dilation": dilation or settings.dilation}
    settings = settings.model_copy(update=changes)
    cut = scale or (_REAL_SCALE if is_real and on_cpus else 1.0)
    size = Size(requests, per_class, limit, _CALIBRATE if learn is None else learn, load, cut)
    with _endpoint(url, settings) as (base, model_id):
        token_s = settings.dilation * _TOKEN_S
        warm_up, phase = asyncio.run(_measured(base, model_id, token_s, seed, size))
    if records is not None:
        _write(records, phase)
    facts = _facts(warm_up, phase, size) | {"model": settings.model.source or model_id}
    publish(facts, lambda console: show(facts, console), json_output=json_output)


@contextmanager
def _endpoint(url: str | None, settings: ClusterSettings) -> Iterator[tuple[str, str]]:
    """The cluster that runs at `url`, or without one a new one; and what it calls its model."""
    if url is not None:
        yield url.rstrip("/"), served_model(url.rstrip("/"))
        return
    with running(settings) as cluster:
        yield cluster.url, settings.model.id


def _write(records: Path, phase: Phase) -> None:
    records.unlink(missing_ok=True)
    for o in phase.outcomes:
        client_s = phase.client_ttft_s.get(o.request_id)
        row = {"kind": o.kind, "error": o.error, "client_ttft_s": client_s, **asdict(o)}
        append_line(records, row)


async def _measured(
    url: str, model: str, token_s: float, seed: int, size: Size
) -> tuple[Phase, Phase]:
    shapes = shapes_of(read_sessions(demo_sessions_path()))
    async with ClusterClient(url, model, timeout_s=120.0) as client:
        nodes = len(await client.nodes())
        player = Player(client, Governor(size.load, nodes, token_s))
        note(f"warm-up: {size.calibrate} outcomes to learn from")
        learnt_on = Traffic(shapes, seed + _WARM_UP_SEED, size.scale)
        warm_up = await player.warm_up(learnt_on, size.calibrate + 10)
        traffic = Traffic(shapes, seed, size.scale)
        note("reading the documents that are to be revisited")
        warm_up.outcomes += (await player.prepare(traffic)).outcomes
        note("measuring")
        return warm_up, await player.measure(traffic, Random(seed), size)


def _facts(warm_up: Phase, phase: Phase, size: Size) -> dict[str, Any]:
    used = usage(phase.nodes_before, phase.nodes_after)
    learnt = [
        {row["node"]: row["calibration"] for row in nodes}
        for nodes in (phase.nodes_before, phase.nodes_after)
    ]
    extra_s = [phase.client_ttft_s[o.request_id] - o.actual_s for o in phase.outcomes]
    is_paced = all(row["paced"] for row in phase.nodes_after)
    goal = PACED_GOAL if is_paced else REAL_GOAL
    return result(
        **asdict(used), void=used.overrun_share > MAX_OVERRUN_SHARE,
        load_reached=used.load >= _MIN_LOAD, requests=len(phase.outcomes),
        failed=dict(phase.failures), seconds=phase.seconds,
        classes=class_rows(warm_up.outcomes, phase.outcomes, goal),
        class_definition=CLASS_DEFINITION, frozen=learnt[0] == learnt[1],
        calibrated_on=size.calibrate, calibration=learnt[1], scale=size.scale,
        client_adds_s=statistics.median(extra_s) if extra_s else None, paced=is_paced,
    )  # fmt: skip


_SHOWN: dict[str, Column] = {
    "class": "class", "n": "n", "median": "median_abs_err:.1%", "p90": "p90_abs_err:.1%",
    "median by ratio": "baseline_median_abs_err:.1%",
    "median by length": "length_baseline_median_abs_err:.1%", "bias": "median_bias:.1%",
    "TTFT s": "median_ttft_s:.2f",
    "goal": lambda row: {True: "met", False: "missed", None: "-"}[row["goal_met"]],
    "predicted less actual s": lambda row: " ".join(
        f"{part} {s:+.3f}" for part, s in row.get("excess_s", {}).items() if s
    ),
}  # fmt: skip


def show(facts: dict[str, Any], console: Console) -> None:
    """The table by class, and reasons to distrust the run."""
    title = "TTFT prediction, paced nodes" if facts["paced"] else "TTFT prediction"
    left = ("goal", "predicted less actual s")
    console.print(rows_table(title, _SHOWN, facts["classes"], left))
    console.print(
        f"{facts['requests']} requests in {facts['seconds']:.0f} s; gpu load {facts['load']:.2f}, "
        f"link load {facts['link_load']:.2f}; overruns {100 * facts['overrun_share']:.1f} %; "
        f"stores dropped: {facts.get('stores_dropped', 'not counted')}; "
        f"{'frozen' if facts['frozen'] else 'still learning'}; failed: {facts['failed'] or 'none'}",
        highlight=False,
    )
    if facts["void"]:
        console.print("[red]invalid: more than 5 % of the steps overran their pace[/red]")
    if not facts["load_reached"]:
        console.print("[red]load below 0.6: the goal asks for at least that[/red]")
