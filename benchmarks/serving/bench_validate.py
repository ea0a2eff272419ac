"""`kappa bench validate`: does the simulator tell the truth? Real paced vLLM against it.

Each cell (trace, load, policy) is played several times on the real cluster over HTTP, with the same
requests and times but other tokens, so that runs share no cache; then in the simulator, with
constants from the idle profile only. Finished runs are kept in a file, from which it goes on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness import note
from benchmarks.serving.cluster_client import ClusterClient
from benchmarks.serving.validate import Played, play
from benchmarks.serving.validate_traffic import (
    SCALINGS,
    Script,
    digest,
    idle_script,
    salt_of,
    scripts,
)
from benchmarks.serving.validation import (
    Cell,
    Mirror,
    Overhead,
    compared,
    mirror_of,
    overhead_of,
    ranking,
    saturation_sessions_per_s,
    simulate,
)
from deploy.commands.provenance import Json, command, machine
from deploy.commands.serve import running, settings_or_exit
from kappa.model import kv_bytes_per_token
from kappa.settings.cluster import ClusterSettings
from workload.catalogue import workload_named

_LIVE_POLICIES = ("priced", "ttft", "threshold", "least_backlog")
_SIMULATED_RUNS = 5
_SATURATION_WINDOW_S = 20.0
_MAX_CLIENT_SHARE = 0.2
_MAX_OVERRUN_SHARE = 0.05
_GOAL = 0.15
_TIMEOUT_S = 300.0
_NO_OVERHEAD = Overhead(0.0, 0.0, 0.0, 0)

CellKey = tuple[str, float]


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
    rates: dict[CellKey, float] = field(default_factory=dict)
    idle: list[Played] = field(default_factory=list)
    played: dict[tuple[str, str, float, int], Played] = field(default_factory=dict)
    _digests: dict[tuple[str, float, float], str] = field(default_factory=dict)

    def key(self) -> dict[str, Any]:
        """What two records must agree on to belong together."""
        return {
            "dilation": self.settings.dilation,
            "window_s": self.window_s,
            "seed": self.seed,
        }

    def load_records(self) -> None:
        """Take over what a run before this one finished."""
        if self.records is None or not self.records.exists():
            return
        for number, line in enumerate(self.records.read_text().splitlines(), start=1):
            try:
                record = json.loads(line)
                if record["key"] != self.key():
                    continue
                played = msgspec.convert(record["played"], Played)
                if record["kind"] == "idle":
                    self.idle.append(played)
                    continue
                trace, load = str(record["trace"]), float(record["load"])
                rate = float(record["sessions_per_s"])
                if trace not in self.traces or load not in self.loads:
                    continue
                if self.digest(trace, load, rate) != record["digest"]:
                    # The trace, its reader or its scaling is another by now.
                    continue
                self.rates[trace, load] = rate
                self.played[str(record["policy"]), trace, load, int(record["run"])] = played
            except (ValueError, KeyError, TypeError) as error:
                raise typer.BadParameter(
                    f"{self.records}:{number}: not a record of this benchmark ({error!r}); move "
                    "the file away to start anew",
                    param_hint="--records",
                ) from None

    def keep(self, record: dict[str, Any]) -> None:
        """Append one finished phase to the records."""
        if self.records is not None:
            with self.records.open("a") as file:
                print(json.dumps({**record, "key": self.key()}), file=file)

    def todo(self, policy: str) -> list[tuple[str, float, int]]:
        """Runs still to be done, all cells once before any twice."""
        return [
            (trace, load, run)
            for run in range(self.runs)
            for trace in self.traces
            for load in self.loads
            if (policy, trace, load, run) not in self.played
        ]

    def scripts(
        self, trace: str, sessions_per_s: float, window_s: float, salt: int
    ) -> list[Script]:
        """The sessions of one run."""
        engine = self.settings.engine
        made = scripts(
            workload_named(trace),
            SCALINGS[trace],
            sessions_per_s=sessions_per_s,
            window_s=window_s,
            dilation=self.settings.dilation,
            block_tokens=engine.block_tokens,
            max_context_tokens=engine.max_context_tokens,
            rng=np.random.default_rng(self.seed),
            salt=salt,
        )
        return list(made)

    def digest(self, trace: str, load: float, sessions_per_s: float) -> str:
        """What tells the requests of a cell from those of an earlier version of its trace."""
        known = self._digests.get((trace, load, sessions_per_s))
        if known is None:
            known = digest(self.scripts(trace, sessions_per_s, self.window_s, 0))
            self._digests[trace, load, sessions_per_s] = known
        return known

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
    bench.load_records()
    mirror = mirror_of(base, _served_kv_bytes(base))
    bench.find_rates(mirror)
    for policy in bench.policies:
        if bench.todo(policy):
            _run_policy(bench, policy)
    result = _result(bench, mirror)
    if json_output:
        print(json.dumps(result))
    else:
        _print(result)


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
                    "sessions_per_s": rate, "digest": bench.digest(trace, load, rate),
                    "played": msgspec.to_builtins(played),
                }
            )  # fmt: skip
            failed = sum(bool(a.error) for a in played.answers)
            note(
                f"{policy} {number}/{len(todo)}: {trace} at {load:g}, run {run + 1}: "
                f"{len(played.answers)} requests, {failed} failed, {played.seconds:.0f} s"
            )


def _result(bench: Bench, mirror: Mirror) -> dict[str, Any]:
    engine = bench.settings.engine
    idle = [answer for played in bench.idle for answer in played.answers]
    overhead = overhead_of(idle, mirror.by_name, engine.max_batch_tokens)
    cells = []
    for trace in bench.traces:
        for load in bench.loads:
            made = bench.scripts(trace, bench.rates[trace, load], bench.window_s, 0)
            for policy in bench.policies:
                real = [bench.played[policy, trace, load, run] for run in range(bench.runs)]
                simulated = [
                    simulate(made, mirror, overhead, policy, seed)
                    for seed in range(_SIMULATED_RUNS)
                ]
                cells.append(
                    Cell(
                        trace, load, policy,
                        tuple(p.ttfts_s() for p in real),
                        tuple(s.ttft_s for s in simulated),
                    )
                )  # fmt: skip
    rows = [row for cell in cells for row in compared(cell)]
    every = [
        bench.played[policy, trace, load, run]
        for policy in bench.policies
        for trace in bench.traces
        for load in bench.loads
        for run in range(bench.runs)
    ]
    pairs = ranking(cells)
    return {
        "rows": rows,
        "ranking_agrees": all(pair["agrees"] is not False for pair in pairs),
        "ranking": pairs,
        "rows_within_goal": sum(abs(row["err"]) <= _GOAL for row in rows),
        "goal": _GOAL,
        "sessions_per_s": [
            {"trace": trace, "load": load, "sessions_per_s": bench.rates[trace, load]}
            for trace in bench.traces
            for load in bench.loads
        ],
        "scaling": {trace: asdict(SCALINGS[trace]) for trace in bench.traces},
        "overhead": {
            "before_s": overhead.before_s,
            "after_s": overhead.after_s,
            "jitter_s": overhead.jitter_s,
            "requests": overhead.samples,
        },
        "runs": bench.runs,
        "requests": sum(len(p.answers) for p in every),
        "failed": sum(bool(a.error) for p in every for a in p.answers),
        "client_cpu_share": max(p.client_cpu_share for p in every),
        "client_light": max(p.client_cpu_share for p in every) < _MAX_CLIENT_SHARE,
        "overrun_share": max(p.overrun_share for p in every),
        "void": max(p.overrun_share for p in every) > _MAX_OVERRUN_SHARE,
        "busy_share": _busy(bench),
        "dilation": bench.settings.dilation,
        "paced": True,
        "machine": machine(),
        "command": command(),
    }


def _busy(bench: Bench) -> list[dict[str, Any]]:
    """Mean share of time in which the nodes ran steps, by cell."""
    return [
        {
            "trace": trace, "load": load, "policy": policy,
            "busy": float(
                np.mean(
                    [bench.played[policy, trace, load, r].busy_share for r in range(bench.runs)]
                )
            ),
        }
        for trace in bench.traces
        for load in bench.loads
        for policy in bench.policies
    ]  # fmt: skip


def _served_kv_bytes(settings: ClusterSettings) -> float:
    from deploy.app.model import prepare_model

    return kv_bytes_per_token(prepare_model(settings).shape)


def _print(result: dict[str, Any]) -> None:
    table = Table(title=f"Real paced vLLM (dilation {result['dilation']:g}) and simulator: TTFT")
    for column in ("trace", "load", "policy", "quantile", "real s", "sim s", "err", "spread"):
        table.add_column(column, justify="left" if column in ("trace", "policy") else "right")
    for row in result["rows"]:
        table.add_row(
            row["trace"], f"{row['load']:g}", row["policy"], f"p{100 * row['quantile']:.0f}",
            f"{row['real_s']:.3f}", f"{row['sim_s']:.3f}", f"{100 * row['err']:+.0f} %",
            f"{100 * row['spread']:.0f} %",
        )  # fmt: skip
    console = Console()
    console.print(table)
    console.print(
        f"{result['rows_within_goal']} of {len(result['rows'])} within "
        f"{100 * result['goal']:.0f} %; ranking "
        f"{'agrees' if result['ranking_agrees'] else 'DISAGREES'}; client at most "
        f"{100 * result['client_cpu_share']:.0f} % of a core; overruns at most "
        f"{100 * result['overrun_share']:.1f} %; failed: {result['failed'] or 'none'}",
        highlight=False,
    )
    if result["void"]:
        console.print("[red]void: more than 5 % of a run's steps overran their pace[/red]")
    console.print(f"{result['command']}  on {result['machine']}", highlight=False)


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
