"""`kappa bench validate`: is the simulator right? Real paced vLLM against it.

Each cell (trace, load, policy) is played several times on the real cluster over HTTP, with the same
requests and times but other tokens, so that runs share no cache; then in the simulator, with
constants from the idle profile only. Finished runs are kept in a file, from which it goes on.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import Console

from benchmarks.harness import Json, append_line, note, publish, read_lines, result, table
from benchmarks.serving.cluster_client import ClusterClient
from benchmarks.serving.mirror import (
    Mirror,
    Overhead,
    mirror_of,
    overhead_of,
    saturation_sessions_per_s,
    simulate,
)
from benchmarks.serving.validate_play import Played, play
from benchmarks.serving.validate_traffic import (
    SCALINGS,
    Script,
    digest,
    idle_script,
    salt_of,
    scripts,
)
from deploy.commands.serve import running, settings_or_exit
from kappa.model import kv_bytes_per_token
from kappa.settings.cluster import ClusterSettings
from workload.catalogue import workload_named

QUANTILES = (0.5, 0.9)
_LIVE_POLICIES = ("priced", "ttft", "threshold", "least_backlog")
_SIMULATED_RUNS = 5
_SATURATION_WINDOW_S = 20.0
_MAX_CLIENT_SHARE = 0.2
_MAX_OVERRUN_SHARE = 0.05
_GOAL = 0.15
_TIMEOUT_S = 300.0
_NO_OVERHEAD = Overhead(0.0, 0.0, 0.0, 0)

Row = dict[str, Any]


@dataclass(slots=True)
class Bench:
    """What to run, and what has been run: idle phases, and runs by (policy, trace, load, run)."""

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

    def key(self) -> Row:
        """What two records must agree on to belong together."""
        return {
            "dilation": self.settings.dilation, "window_s": self.window_s, "seed": self.seed,
        }  # fmt: skip

    def load_records(self) -> None:
        """Take over what a run before this one finished.

        Raises:
            ValueError: the file is not one of this bench.
        """
        rows = read_lines(self.records) if self.records is not None else []
        try:
            for row in rows:
                if row["key"] == self.key():
                    self._load(row, msgspec.convert(row["played"], Played))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.records}: not records of this benchmark ({error!r}); move the file away "
                "to start anew"
            ) from None

    def _load(self, row: Row, played: Played) -> None:
        if row["kind"] == "idle":
            self.idle.append(played)
            return
        trace, load, rate = str(row["trace"]), float(row["load"]), float(row["sessions_per_s"])
        # The trace, its reader or its scaling may be another by now.
        known = trace in self.traces and load in self.loads
        if known and self.digest(trace, rate) == row["digest"]:
            self.rates[trace, load] = rate
            self.played[str(row["policy"]), trace, load, int(row["run"])] = played

    def keep(self, row: Row) -> None:
        """Append one finished phase to the records."""
        if self.records is not None:
            append_line(self.records, {**row, "key": self.key()})

    def todo(self, policy: str) -> list[tuple[str, float, int]]:
        """Runs still to be done, all cells once before any twice."""
        return [
            (trace, load, run)
            for run in range(self.runs)
            for trace in self.traces
            for load in self.loads
            if (policy, trace, load, run) not in self.played
        ]

    def cells(self) -> list[tuple[str, float, str]]:
        """(trace, load, policy) of every cell."""
        return [
            (trace, load, policy)
            for trace in self.traces
            for load in self.loads
            for policy in self.policies
        ]

    def runs_of(self, trace: str, load: float, policy: str) -> list[Played]:
        return [self.played[policy, trace, load, run] for run in range(self.runs)]

    def scripts(
        self, trace: str, sessions_per_s: float, window_s: float, salt: int
    ) -> list[Script]:
        engine = self.settings.engine
        made = scripts(
            workload_named(trace), SCALINGS[trace], sessions_per_s=sessions_per_s,
            window_s=window_s, dilation=self.settings.dilation, block_tokens=engine.block_tokens,
            max_context_tokens=engine.max_context_tokens, rng=np.random.default_rng(self.seed),
            salt=salt,
        )  # fmt: skip
        return list(made)

    def digest(self, trace: str, sessions_per_s: float) -> str:
        """What tells the requests of a cell from those of an earlier version of its trace."""
        return digest(self.scripts(trace, sessions_per_s, self.window_s, 0))

    def find_rates(self, mirror: Mirror) -> None:
        """Sessions per second of each cell, from the simulated saturation of its trace."""
        for trace in self.traces:
            missing = [load for load in self.loads if (trace, load) not in self.rates]
            if not missing:
                continue

            def make(rate: float, trace: str = trace) -> list[Script]:
                return self.scripts(trace, rate, _SATURATION_WINDOW_S, 0)

            full = saturation_sessions_per_s(make, mirror, _NO_OVERHEAD, _SATURATION_WINDOW_S)
            for load in missing:
                self.rates[trace, load] = load * full


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
    dilation: Annotated[float, typer.Option(min=1, help="Real seconds per emulated one.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Seed of sessions and arrivals.")] = 1,
    records: Annotated[
        Path | None, typer.Option(help="Keep finished runs here, and go on from them.")
    ] = None,
    json_output: Json = False,
) -> None:
    """The simulator against real paced vLLM: TTFT quantiles, and the ranking of policies."""
    base = settings_or_exit(port=0).model_copy(update={"dilation": dilation})
    bench = Bench(
        base, _names(traces, SCALINGS, "--traces"), _numbers(loads),
        _names(policies, _LIVE_POLICIES, "--policies"), runs, window, seed, records,
    )  # fmt: skip
    try:
        bench.load_records()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--records") from None
    mirror = mirror_of(base, _served_kv_bytes(base))
    bench.find_rates(mirror)
    for policy in bench.policies:
        if bench.todo(policy):
            _run_policy(bench, policy)
    facts = _facts(bench, mirror)
    publish(facts, lambda console: _show(facts, console), json_output=json_output)


def _run_policy(bench: Bench, policy: str) -> None:
    """One cluster for all runs of a policy; its idle phase comes first."""
    router = bench.settings.router.model_copy(update={"policy": policy})
    with running(bench.settings.model_copy(update={"router": router})) as cluster:
        asyncio.run(_play(bench, policy, cluster.url))


async def _play(bench: Bench, policy: str, url: str) -> None:
    todo = bench.todo(policy)
    async with ClusterClient(url, bench.settings.model.id, timeout_s=_TIMEOUT_S) as client:
        idle = await play(client, [idle_script(np.random.default_rng(bench.seed))])
        bench.idle.append(idle)
        bench.keep({"kind": "idle", "policy": policy, "played": msgspec.to_builtins(idle)})
        for number, (trace, load, run) in enumerate(todo, start=1):
            rate = bench.rates[trace, load]
            salt = salt_of(policy, trace, load, run)
            played = await play(client, bench.scripts(trace, rate, bench.window_s, salt))
            bench.played[policy, trace, load, run] = played
            bench.keep(
                {
                    "kind": "run", "policy": policy, "trace": trace, "load": load, "run": run,
                    "sessions_per_s": rate, "digest": bench.digest(trace, rate),
                    "played": msgspec.to_builtins(played),
                }
            )  # fmt: skip
            failed = sum(bool(a.error) for a in played.answers)
            note(
                f"{policy} {number}/{len(todo)}: {trace} at {load:g}, run {run + 1}: "
                f"{len(played.answers)} requests, {failed} failed, {played.seconds:.0f} s"
            )


def _facts(bench: Bench, mirror: Mirror) -> Row:
    idle = [answer for played in bench.idle for answer in played.answers]
    overhead = overhead_of(idle, mirror.by_name, bench.settings.engine.max_batch_tokens)
    cells = []
    for trace, load, policy in bench.cells():
        made = bench.scripts(trace, bench.rates[trace, load], bench.window_s, 0)
        seeds = range(_SIMULATED_RUNS)
        simulated = [simulate(made, mirror, overhead, policy, seed).ttft_s for seed in seeds]
        real = [played.ttfts_s() for played in bench.runs_of(trace, load, policy)]
        cells.append(Cell(trace, load, policy, tuple(real), tuple(simulated)))
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
            for trace in bench.traces
            for load in bench.loads
        ],
        scaling={trace: asdict(SCALINGS[trace]) for trace in bench.traces},
        overhead={
            "before_s": overhead.before_s, "after_s": overhead.after_s,
            "jitter_s": overhead.jitter_s, "requests": overhead.samples,
        },
        runs=bench.runs, requests=sum(len(played.answers) for played in every),
        failed=sum(bool(answer.error) for played in every for answer in played.answers),
        client_cpu_share=client_share, client_light=client_share < _MAX_CLIENT_SHARE,
        overrun_share=overrun_share, void=overrun_share > _MAX_OVERRUN_SHARE,
        busy_share=[
            {"trace": trace, "load": load, "policy": policy,
             "busy": float(np.mean([p.busy_share for p in bench.runs_of(trace, load, policy)]))}
            for trace, load, policy in bench.cells()
        ],
        dilation=bench.settings.dilation, paced=True,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """One trace at one load under one policy: TTFTs of each real and each simulated run."""

    trace: str
    load: float
    policy: str
    real_s: tuple[np.ndarray, ...]
    sim_s: tuple[np.ndarray, ...]

    def real(self, quantile: float) -> list[float]:
        return [float(np.quantile(run, quantile)) for run in self.real_s]

    def sim(self, quantile: float) -> list[float]:
        return [float(np.quantile(run, quantile)) for run in self.sim_s]


def compared(cell: Cell) -> list[Row]:
    """Rows of a cell: medians over runs; the error relative to the real one; spread over runs.

    spread: largest less smallest of the real runs, over their median; sim_spread: the same of the
    simulated ones.
    """
    rows = []
    for quantile in QUANTILES:
        real, sim = cell.real(quantile), cell.sim(quantile)
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
    for a, b in combinations(cells, 2):
        for quantile in QUANTILES if (a.trace, a.load) == (b.trace, b.load) else ():
            real_a, real_b = a.real(quantile), b.real(quantile)
            decided = max(real_a) < min(real_b) or max(real_b) < min(real_a)
            real = statistics.median(real_a) < statistics.median(real_b)
            sim = statistics.median(a.sim(quantile)) < statistics.median(b.sim(quantile))
            pairs.append({
                "trace": a.trace, "load": a.load, "quantile": quantile,
                "policies": [a.policy, b.policy], "real_better": a.policy if real else b.policy,
                "sim_better": a.policy if sim else b.policy,
                "agrees": real == sim if decided else None,
            })  # fmt: skip
    return pairs


def _served_kv_bytes(settings: ClusterSettings) -> float:
    from deploy.app.model import prepare_model

    return kv_bytes_per_token(prepare_model(settings).shape)


def _show(facts: Row, console: Console) -> None:
    rows = [
        (
            row["trace"], f"{row['load']:g}", row["policy"], f"p{100 * row['quantile']:.0f}",
            f"{row['real_s']:.3f}", f"{row['sim_s']:.3f}", f"{100 * row['err']:+.0f} %",
            f"{100 * row['spread']:.0f} %",
        )
        for row in facts["rows"]
    ]  # fmt: skip
    columns = ("trace", "load", "policy", "quantile", "real s", "sim s", "err", "spread")
    title = f"Real paced vLLM (dilation {facts['dilation']:g}) and simulator: TTFT"
    console.print(table(title, columns, rows, left=("policy",)))
    console.print(
        f"{facts['rows_within_goal']} of {len(facts['rows'])} within "
        f"{100 * facts['goal']:.0f} %; ranking "
        f"{'agrees' if facts['ranking_agrees'] else 'DISAGREES'}; client at most "
        f"{100 * facts['client_cpu_share']:.0f} % of a core; overruns at most "
        f"{100 * facts['overrun_share']:.1f} %; failed: {facts['failed'] or 'none'}",
        highlight=False,
    )
    if facts["void"]:
        console.print("[red]invalid: more than 5 % of a run's steps overran their pace[/red]")


def _names(text: str, known: Iterable[str], option: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        raise typer.BadParameter(
            f"{', '.join(wrong) or 'nothing'}: choose of {', '.join(known)}", param_hint=option
        )
    return names


def _numbers(text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(np.isfinite(n) and n > 0 for n in numbers):
        raise typer.BadParameter("give numbers above 0 with commas", param_hint="--loads")
    return numbers
