"""`kappa bench predict`: how good predictions of the TTFT are, under load, with a frozen predictor.

Plays traffic at an endpoint, watches its nodes, and keeps their load near a target.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.serving import predict as scoring
from benchmarks.serving.cluster_client import ClusterClient
from benchmarks.serving.predict import CLASSES, Outcome, outcome_from, usage
from benchmarks.serving.serve import Progress, progress
from benchmarks.serving.traffic import Act, Ask, Governor, Traffic, shapes_of
from deploy.commands.provenance import Json, command, machine
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
_WINDOW_S = 20.0
_WATCH_EVERY_S = 2.0
_TELL_EVERY_S = 15.0
_MAX_IN_FLIGHT = 14
# Decisions fetched while a phase runs: few, since the ingress that makes them is being measured.
_RECENT = 64
_READING = 4
_DOCUMENTS = 24
_WARM_UP_DOCUMENTS = 6
_WARM_UP_TOKENS = (40, 700, 60, 900, 100, 800)


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
    say = progress()
    async with ClusterClient(url, settings.model.id, timeout_s=120.0) as client:
        player = Player(client, say)
        say(f"warm-up: {calibrate} outcomes to learn from")
        governor = Governor(load, settings.workers, settings.dilation * _TOKEN_S)
        warm_up = await player.warm_up(
            Traffic(shapes, seed + _WARM_UP_SEED), calibrate + 10, governor
        )
        traffic = Traffic(shapes, seed)
        say("reading the documents that are to be revisited")
        warm_up.outcomes += (await player.prepare(traffic)).outcomes
        say("measuring")
        phase = await player.measure(
            traffic, governor, Random(seed),
            requests=requests, per_class=per_class, limit_s=limit_s,
        )  # fmt: skip
    return warm_up, phase


def _predict_result(warm_up: Phase, phase: Phase, calibrate: int) -> dict[str, Any]:
    used = scoring.usage(phase.nodes_before, phase.nodes_after)
    baseline = scoring.baseline_errors(warm_up.outcomes, phase.outcomes)
    rows = scoring.class_rows(phase.outcomes, baseline)
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
        "void": used.overrun_share > scoring.MAX_OVERRUN_SHARE,
        "load_reached": used.load >= scoring.MIN_LOAD,
        "requests": len(phase.outcomes),
        "failed": dict(phase.failures),
        "seconds": phase.seconds,
        "classes": rows,
        "class_definition": scoring.CLASS_DEFINITION,
        "frozen": learnt[0] == learnt[1],
        "calibrated_on": calibrate,
        "calibration": learnt[1],
        "client_adds_s": statistics.median(extra_s) if extra_s else None,
        "paced": all(row["paced"] for row in phase.nodes_after),
        "machine": machine(),
        "command": command(),
    }


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


@dataclass(slots=True)
class Phase:
    """What was sent in one phase: outcomes by the end, client's TTFT by request id, failures."""

    outcomes: list[Outcome] = field(default_factory=list)
    client_ttft_s: dict[str, float] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    nodes_before: list[dict[str, Any]] = field(default_factory=list)
    nodes_after: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


class Player:
    """Plays acts against one endpoint, one phase at a time."""

    def __init__(self, client: ClusterClient, progress: Progress) -> None:
        self._client, self._progress = client, progress
        self._phase = Phase()
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._counted: Counter[str] = Counter()

    async def warm_up(self, traffic: Traffic, requests: int, governor: Governor) -> Phase:
        """Calibrate: pairs on idle nodes first, then every kind of act, `requests` in all."""
        phase = self._begin()
        for tokens in _WARM_UP_TOKENS * 2:
            await self._play(traffic.pair(tokens))
        await self._read_documents(traffic, _WARM_UP_DOCUMENTS)
        names = ("revisit", "ask", "agent", "burst")
        sent = 0
        while len(phase.client_ttft_s) + len(self._tasks) < requests:
            act = traffic.act(names[sent % len(names)])
            self._spawn(act)
            sent += 1
            await self._pause(governor.gap_s(act))
        return await self._finish()

    async def prepare(self, traffic: Traffic) -> Phase:
        """Have the documents read that `measure` will come back to."""
        self._begin()
        await self._read_documents(traffic, _DOCUMENTS)
        return await self._finish()

    async def _read_documents(self, traffic: Traffic, count: int) -> None:
        for act in traffic.first_visits(count):
            while len(self._tasks) >= _READING:
                await asyncio.sleep(0.05)
            self._spawn(act)

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        while self._in_flight >= _MAX_IN_FLIGHT:
            await asyncio.sleep(0.02)

    async def measure(
        self,
        traffic: Traffic,
        governor: Governor,
        random: Random,
        *,
        requests: int,
        per_class: int,
        limit_s: float,
    ) -> Phase:
        """Send until there are `requests` in all and `per_class` of each class, or time is up."""
        phase = self._begin()
        phase.nodes_before = await self._client.nodes()
        start_s = time.monotonic()
        watcher = asyncio.create_task(self._watch(governor))
        try:
            while time.monotonic() - start_s < limit_s and not self._enough(requests, per_class):
                act = traffic.next_act(self._counted, per_class)
                self._spawn(act)
                await self._pause(random.expovariate(1 / governor.gap_s(act)))
        finally:
            watcher.cancel()
        # Before the last requests drain: an emptying cluster is not under load.
        phase.nodes_after = await self._client.nodes()
        phase.seconds = time.monotonic() - start_s
        return await self._finish()

    def _begin(self) -> Phase:
        self._phase = Phase()
        self._counted = Counter()
        return self._phase

    async def _finish(self) -> Phase:
        while self._tasks:
            await asyncio.gather(*self._tasks)
        self._phase.outcomes = await self._outcomes(len(self._phase.client_ttft_s) + _RECENT)
        return self._phase

    def _enough(self, requests: int, per_class: int) -> bool:
        return sum(self._counted.values()) >= requests and all(
            self._counted[kind] >= per_class for kind in CLASSES
        )

    def _spawn(self, act: Act) -> None:
        task = asyncio.create_task(self._play(act))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _play(self, act: Act) -> None:
        if not act.chained:
            await asyncio.gather(*(self._ask(ask) for ask in act.asks))
            return
        for ask in act.asks:
            await asyncio.sleep(ask.wait_s)
            if not await self._ask(ask):
                return

    async def _ask(self, ask: Ask) -> bool:
        self._in_flight += 1
        try:
            record = await self._client.send(self._client.prepare(ask.prompt, ask.max_tokens))
        finally:
            self._in_flight -= 1
        if record.error or record.first_token_s is None:
            self._phase.failures[record.error] += 1
            return False
        self._phase.client_ttft_s[record.request_id] = record.first_token_s - record.sent_s
        return True

    async def _outcomes(self, limit: int) -> list[Outcome]:
        outcomes = map(outcome_from, await self._client.decisions(limit))
        mine = self._phase.client_ttft_s
        return [o for o in outcomes if o is not None and o.request_id in mine]

    async def _watch(self, governor: Governor) -> None:
        """Keep the governor and the counts up to date; say now and then how far it is."""
        seen = [await self._client.nodes()]
        kinds: dict[str, str] = {}
        keep = round(_WINDOW_S / _WATCH_EVERY_S)
        start_s = told_s = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            try:
                seen.append(await self._client.nodes())
                load = usage(seen[0], seen[-1]).load
                recent = await self._outcomes(_RECENT)
            except (httpx.HTTPError, ValueError):
                continue
            del seen[:-keep]
            governor.observe(load)
            kinds.update((o.request_id, o.kind) for o in recent)
            self._counted = Counter(kinds.values())
            now_s = time.monotonic()
            if now_s - told_s >= _TELL_EVERY_S:
                told_s = now_s
                counts = ", ".join(f"{self._counted[kind]} {kind}" for kind in CLASSES)
                self._progress(f"{now_s - start_s:4.0f} s  load {load:.2f}  {counts}")
