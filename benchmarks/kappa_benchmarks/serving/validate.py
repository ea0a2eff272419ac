"""`kappa bench validate`: is the simulator right? Real vLLM against it, paced or not.

Each cell (trace, load, policy) is played several times on the real cluster over HTTP, with the same
requests and times but other tokens, so that runs share no cache; then in the simulator, with
constants from the idle profile only. Finished runs are kept in a file, from which it goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from kappa.hardware import NodeProfile
from kappa.host import ROUTING_POLICIES, installed
from kappa.settings.cluster import ClusterSettings
from kappa_benchmarks.harness import (
    Column,
    Json,
    append_line,
    names,
    note,
    numbers,
    publish,
    read_lines,
    result,
    rows_table,
    usage_errors,
)
from kappa_benchmarks.serving.client import MAX_OVERRUN_SHARE, ClusterClient
from kappa_benchmarks.serving.mirror import (
    Mirror,
    mirror_of,
    overhead_of,
    saturation_sessions_per_s,
    simulate,
)
from kappa_benchmarks.serving.settings import (
    Config,
    ModelName,
    Unpaced,
    bench_model,
    bench_settings,
)
from kappa_benchmarks.serving.validate_play import Played, play
from kappa_benchmarks.serving.validate_scripts import (
    SCALINGS,
    ScriptMaker,
    digest,
    idle_script,
    salt_of,
)
from kappa_deploy.commands.serve import running
from kappa_router.policy import OURS
from kappa_workers.vllm.arguments import EngineLimits
from kappa_workload.catalogue import workload_named

QUANTILES = (0.5, 0.9)
_LIVE_POLICIES = (*OURS, *installed(ROUTING_POLICIES))
_SIMULATED_RUNS = 5
_SATURATION_WINDOW_S = 20.0
_MAX_CLIENT_SHARE = 0.2
_GOAL = 0.15
_TIMEOUT_S = 300.0

Row = dict[str, Any]


class Kept(msgspec.Struct):
    """A finished phase in the file of records; of an idle phase no more than policy and played.

    key: dilation, window and seed of the bench. digest: of the requests.
    """

    key: tuple[float, float, int]
    policy: str
    played: Played
    trace: str = ""
    load: float = 0.0
    run: int = -1
    sessions_per_s: float = 0.0
    digest: str = ""


@dataclass(slots=True)
class Bench:
    """The runs to do, and those done: idle phases, and runs by (policy, trace, load, run)."""

    settings: ClusterSettings
    traces: Sequence[str]
    loads: Sequence[float]
    policies: Sequence[str]
    runs: int
    window_s: float
    seed: int
    records: Path | None
    rates: dict[tuple[str, float], float] = field(default_factory=dict)
    idle: list[Played] = field(default_factory=list)
    played: dict[tuple[str, str, float, int], Played] = field(default_factory=dict)

    @property
    def key(self) -> tuple[float, float, int]:
        return self.settings.dilation, self.window_s, self.seed

    def load_records(self) -> None:
        """Take over the phases that an earlier run finished.

        Raises:
            ValueError: the file is not one of this bench.
        """
        try:
            rows = read_lines(self.records) if self.records is not None else []
            kept = msgspec.convert(rows, list[Kept])
        except ValueError as error:
            raise ValueError(
                f"{self.records}: not records of this benchmark ({error}); move the file away "
                "to start again"
            ) from None
        for one in kept:
            if one.key != self.key:
                continue
            if not one.trace:
                self.idle.append(one.played)
            # The trace, its reader or its scaling may be another by now.
            elif one.trace in self.traces and one.load in self.loads:
                scripts = self.maker(one.trace).scripts(one.sessions_per_s)
                if digest(scripts) == one.digest:
                    self.rates[one.trace, one.load] = one.sessions_per_s
                    self.played[one.policy, one.trace, one.load, one.run] = one.played

    def keep(self, one: Kept) -> None:
        """Append a finished phase to the records."""
        if self.records is not None:
            append_line(self.records, msgspec.to_builtins(one))

    def missing(self, policy: str) -> list[tuple[str, float, int]]:
        """Runs still to be done, all cells once before any twice."""
        every = itertools.product(range(self.runs), self.traces, self.loads)
        return [
            (trace, load, run)
            for run, trace, load in every
            if (policy, trace, load, run) not in self.played
        ]

    def cells(self) -> list[tuple[str, float, str]]:
        """(trace, load, policy) of every cell."""
        return list(itertools.product(self.traces, self.loads, self.policies))

    def runs_of(self, trace: str, load: float, policy: str) -> list[Played]:
        return [self.played[policy, trace, load, run] for run in range(self.runs)]

    def maker(self, trace: str, window_s: float | None = None) -> ScriptMaker:
        engine = EngineLimits.of(self.settings.engine.on(gpus=0))
        return ScriptMaker(
            workload_named(trace), SCALINGS[trace], window_s or self.window_s,
            self.settings.dilation, engine.block_tokens, engine.max_context_tokens, self.seed,
        )  # fmt: skip

    def find_rates(self, mirror: Mirror) -> None:
        """Sessions per second of each cell, from the simulated saturation of its trace."""
        for trace in self.traces:
            missing = [load for load in self.loads if (trace, load) not in self.rates]
            if missing:
                make = self.maker(trace, _SATURATION_WINDOW_S).scripts
                full = saturation_sessions_per_s(make, mirror, _SATURATION_WINDOW_S)
                self.rates.update({(trace, load): load * full for load in missing})


def validate(
    traces: Annotated[
        str, typer.Option(help=f"Of {', '.join(SCALINGS)}; several by comma.")
    ] = ",".join(SCALINGS),
    loads: Annotated[
        str, typer.Option(help="Fractions of the simulated saturation; several by comma.")
    ] = "0.5,0.8,1.5",
    policies: Annotated[
        str, typer.Option(help=f"Of {', '.join(_LIVE_POLICIES)}; several by comma.")
    ] = "ttft,least_backlog",
    runs: Annotated[int, typer.Option(min=1, help="Real runs of each cell.")] = 5,
    window: Annotated[
        float, typer.Option(min=1, help="Real seconds over which the sessions of a run arrive.")
    ] = 12.0,
    config: Config = None,
    model: ModelName = None,
    unpaced: Unpaced = False,
    dilation: Annotated[
        float, typer.Option(min=1, help="Real seconds per emulated one, paced nodes.")
    ] = 10.0,
    seed: Annotated[int, typer.Option(help="Seed of sessions and arrivals.")] = 1,
    records: Annotated[
        Path | None, typer.Option(help="Keep finished runs here, and go on from them.")
    ] = None,
    json_output: Json = False,
) -> None:
    """The simulator against real vLLM: TTFT quantiles, and the ranking of policies.

    Nodes that are not paced are mirrored as they measured themselves at a first start.
    """
    base = bench_settings(config, model, unpaced)
    is_paced = all(pool.paced for pool in base.all_pools)
    base = base.model_copy(update={"dilation": dilation if is_paced else 1.0})
    with usage_errors():
        bench = Bench(
            base, names(traces, SCALINGS, "--traces"), numbers(loads, "--loads"),
            names(policies, _LIVE_POLICIES, "--policies"), runs, window, seed, records,
        )  # fmt: skip
        bench.load_records()
    mirror = mirror_of(base, bench_model(base).shape, {} if is_paced else _measured(base))
    bench.find_rates(mirror)
    for policy in bench.policies:
        if bench.missing(policy):
            # One cluster for all runs of a policy.
            router = base.router.model_copy(update={"policy": policy})
            with running(base.model_copy(update={"router": router})) as cluster:
                asyncio.run(_play(bench, policy, cluster.url))
    facts = _facts(bench, mirror)
    publish(facts, lambda console: show(facts, console), json_output=json_output)


def _measured(settings: ClusterSettings) -> dict[str, NodeProfile]:
    """Each node's measured profile, by its name."""
    with running(settings) as cluster:
        rows = httpx.get(f"{cluster.url}/v1/nodes", timeout=30.0).raise_for_status().json()["nodes"]
    return {row["node"]: NodeProfile.from_dict(row["profile"]) for row in rows}


async def _play(bench: Bench, policy: str, url: str) -> None:
    """Play the idle phase, then the missing runs."""
    missing = bench.missing(policy)
    async with ClusterClient(url, bench.settings.model.id, timeout_s=_TIMEOUT_S) as client:
        bench.idle.append(await play(client, [idle_script(np.random.default_rng(bench.seed))]))
        bench.keep(Kept(bench.key, policy, bench.idle[-1]))
        for number, (trace, load, run) in enumerate(missing, start=1):
            rate = bench.rates[trace, load]
            scripts = bench.maker(trace).scripts(rate, salt_of(policy, trace, load, run))
            played = bench.played[policy, trace, load, run] = await play(client, scripts)
            bench.keep(Kept(bench.key, policy, played, trace, load, run, rate, digest(scripts)))
            failed = sum(bool(a.error) for a in played.answers)
            note(
                f"{policy} {number}/{len(missing)}: {trace} at {load:g}, run {run + 1}: "
                f"{len(played.answers)} requests, {failed} failed, {played.seconds:.0f} s"
            )


def _facts(bench: Bench, mirror: Mirror) -> Row:
    overhead = overhead_of([a for played in bench.idle for a in played.answers], mirror)
    cells = []
    for trace, load, policy in bench.cells():
        made = bench.maker(trace).scripts(bench.rates[trace, load])
        simulated = [
            simulate(made, mirror, overhead, policy, seed).ttft_s for seed in range(_SIMULATED_RUNS)
        ]
        real = [played.ttfts_s() for played in bench.runs_of(trace, load, policy)]
        cells.append(Cell(trace, load, policy, real, simulated))
    rows = [row for cell in cells for row in compared(cell)]
    pairs = ranking(cells)
    every = [played for cell in bench.cells() for played in bench.runs_of(*cell)]
    client_share = max(played.client_cpu_share for played in every)
    overrun_share = max(played.overrun_share for played in every)
    return result(
        rows=rows, ranking_agrees=all(pair["agrees"] is not False for pair in pairs),
        ranking=pairs, rows_within_goal=sum(abs(row["err"]) <= _GOAL for row in rows), goal=_GOAL,
        sessions_per_s=[
            {"trace": trace, "load": load, "sessions_per_s": bench.rates[trace, load]}
            for trace, load in itertools.product(bench.traces, bench.loads)
        ],
        scaling={trace: asdict(SCALINGS[trace]) for trace in bench.traces},
        overhead={
            "before_s": overhead.before_s, "after_s": overhead.after_s,
            "jitter_s": overhead.jitter_s, "requests": overhead.samples,
        },
        runs=bench.runs, requests=sum(len(played.answers) for played in every),
        failed=sum(bool(answer.error) for played in every for answer in played.answers),
        client_cpu_share=client_share, client_light=client_share < _MAX_CLIENT_SHARE,
        overrun_share=overrun_share, void=overrun_share > MAX_OVERRUN_SHARE,
        busy_share=[
            {"trace": trace, "load": load, "policy": policy,
             "busy": float(np.mean([p.busy_share for p in bench.runs_of(trace, load, policy)]))}
            for trace, load, policy in bench.cells()
        ],
        dilation=bench.settings.dilation,
        paced=all(pool.paced for pool in bench.settings.all_pools),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """One trace at one load under one policy: TTFTs of each real and each simulated run."""

    trace: str
    load: float
    policy: str
    real_s: Sequence[NDArray[np.float64]]
    sim_s: Sequence[NDArray[np.float64]]

    def quantiles_s(self, quantile: float) -> tuple[list[float], list[float]]:
        """A quantile of each real and of each simulated run."""
        real_s = [float(np.quantile(run, quantile)) for run in self.real_s]
        return real_s, [float(np.quantile(run, quantile)) for run in self.sim_s]


def compared(cell: Cell) -> list[Row]:
    """Rows of a cell: medians over runs; the error relative to the real one; spread over runs.

    spread: largest less smallest of the real runs, over their median; sim_spread: the same of the
    simulated ones.
    """
    rows = []
    for quantile in QUANTILES:
        real, sim = cell.quantiles_s(quantile)
        real_s, sim_s = statistics.median(real), statistics.median(sim)
        rows.append({
            "trace": cell.trace, "load": cell.load, "policy": cell.policy, "quantile": quantile,
            "real_s": real_s, "sim_s": sim_s, "err": (sim_s - real_s) / real_s,
            "spread": (max(real) - min(real)) / real_s,
            "sim_spread": (max(sim) - min(sim)) / sim_s, "requests": len(cell.real_s[0]),
        })  # fmt: skip
    return rows


def ranking(cells: Sequence[Cell]) -> list[Row]:
    """Each pair of policies at one trace, load and quantile: does the simulator order them alike?

    agrees is None where the runs of one real policy overlap with those of the other: then the real
    stack itself does not tell which is better.
    """
    pairs = []
    for (a, b), quantile in itertools.product(itertools.combinations(cells, 2), QUANTILES):
        if (a.trace, a.load) != (b.trace, b.load):
            continue
        (real_a, sim_a), (real_b, sim_b) = a.quantiles_s(quantile), b.quantiles_s(quantile)
        decided = max(real_a) < min(real_b) or max(real_b) < min(real_a)
        real = a if statistics.median(real_a) < statistics.median(real_b) else b
        sim = a if statistics.median(sim_a) < statistics.median(sim_b) else b
        pairs.append({
            "trace": a.trace, "load": a.load, "quantile": quantile,
            "policies": [a.policy, b.policy], "real_better": real.policy,
            "sim_better": sim.policy, "agrees": real is sim if decided else None,
        })  # fmt: skip
    return pairs


def show(facts: Row, console: Console) -> None:
    """The table of quantiles, and reasons to distrust the run."""
    columns: dict[str, Column] = {
        "trace": "trace", "load": "load:g", "policy": "policy",
        "quantile": lambda row: f"p{100 * row['quantile']:.0f}",
        "real s": "real_s:.3f", "sim s": "sim_s:.3f", "err": "err:+.0%", "spread": "spread:.0%",
    }  # fmt: skip
    pace = f"paced (dilation {facts['dilation']:g})" if facts["paced"] else "unpaced"
    title = f"Real vLLM, {pace}, and simulator: TTFT"
    console.print(rows_table(title, columns, facts["rows"], left=("policy",)))
    console.print(
        f"{facts['rows_within_goal']} of {len(facts['rows'])} within {100 * facts['goal']:.0f} %; "
        f"ranking {'agrees' if facts['ranking_agrees'] else 'DISAGREES'}; client at most "
        f"{100 * facts['client_cpu_share']:.0f} % of a core; overruns at most "
        f"{100 * facts['overrun_share']:.1f} %; failed: {facts['failed'] or 'none'}",
        highlight=False,
    )
    if facts["void"]:
        console.print("[red]invalid: more than 5 % of a run's steps overran their pace[/red]")
