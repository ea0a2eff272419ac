"""A grid of simulated runs on every core: cells x policies x seeds, resumable.

A cell is a cluster, a trace, a load, and the state of caches and faults. Each finished run is one
line of `rows.jsonl`, flushed to disk before the next is counted; a run whose key is there already
is not run again. The key holds a fingerprint of everything that can change its outcome: the
settings, a trace file's content and the source of the packages that a simulated run executes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.baselines.routing.catalogue import BASELINES, parameters
from benchmarks.harness import append_line, read_lines
from benchmarks.routing.source_closure import source_closure
from kappa.shapes import model_shape
from router.admission import Admission
from router.policies import policy_named
from simulator.capacity import capacity_rps
from simulator.clusters import cluster_named
from simulator.faults import RESOURCES, Faults, drawn_failures, misprofiled_third
from simulator.outcome import Outcome
from simulator.run import SimulationConfig, simulate, traffic_of
from simulator.traffic import Traffic
from workload.catalogue import workload_named
from workload.shapes import Workload

OURS = ("priced", "ttft", "threshold", "least_backlog")
"""Policies that are not a peer's."""
TUNED = "dynamo_tuned"
"""Dynamo's cost with the host credit that does best in the cell, found on other seeds."""
CREDITS = (0.0, 0.25, 0.5, 0.75, 1.0)
TUNING_SEED = 1000
_TUNING_SHARE = 4  # a tuning run has a fourth of the requests
_LEFT_OUT = ("sticky",)  # a reference point, no router's default
FAULTS = ("none", "misprofile", "failure")

_MISPROFILE_FACTOR = 3.0
_FAILED_SHARE = 8  # one node in so many fails
_DOWN_SHARE = 0.1  # of the run


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """What all policies are compared on. faults: one of `FAULTS`; admission: late ones refused."""

    cluster: str
    trace: str
    load: float
    warm: bool = True
    faults: str = "none"
    admission: bool = False

    @property
    def name(self) -> str:
        """In words, fit for a file name."""
        parts = [Path(self.cluster).stem, Path(self.trace).name, f"{self.load:g}"]
        parts.append("warm" if self.warm else "cold")
        if self.faults != "none":
            parts.append(self.faults)
        if self.admission:
            parts.append("admission")
        return "_".join(parts)


@dataclass(frozen=True, slots=True)
class Settings:
    """What all runs of a grid have in common."""

    requests: int = 25_000
    model: str = "llama-3.1-8b"
    scheduler: str = "fcfs"


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation. tuning: it only chooses a parameter, and is not reported."""

    cell: Cell
    policy: str
    seed: int
    tuning: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a grid stands; eta_s is None until something is finished."""

    done: int
    total: int
    eta_s: float | None
    last: str


class Store:
    """Finished runs of a grid in a directory, one JSON line each."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "rows.jsonl"
        self._settings = settings
        rows = read_rows(self._path) if self._path.exists() else []
        self._rows = {row["key"]: row for row in rows}

    def key(self, run: Run) -> str:
        """The run, and a fingerprint of all that its outcome depends on."""
        kind = "tuning" if run.tuning else "run"
        return "|".join(
            (kind, run.cell.name, run.policy, str(run.seed), fingerprint(run, self._settings))
        )

    def find(self, run: Run) -> dict[str, Any] | None:
        """The row of a finished run."""
        return self._rows.get(self.key(run))

    def add(self, run: Run, row: dict[str, Any]) -> None:
        """Keep a finished run, on disk before this returns."""
        row = {"key": self.key(run), **row}
        append_line(self._path, row)
        self._rows[row["key"]] = row


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a grid's file, one cut short left out.

    Raises:
        ValueError: there is no file, or a line is not a row: file, line and remedy are named.
    """
    if not path.exists():
        raise ValueError(f"{path}: no such file; run the grid into this directory first")
    rows = read_lines(path)
    for number, row in enumerate(rows, start=1):
        if "key" not in row:
            raise ValueError(
                f"{path}:{number}: not a finished run; remove the line to run it again"
            )
    return rows


def cells_of(
    clusters: Sequence[str],
    traces: Sequence[str],
    loads: Sequence[float],
    warmth: Sequence[bool],
    *,
    misprofile: bool = False,
    failures: bool = False,
    admission: bool = False,
) -> list[Cell]:
    """The cells of a grid. Faults and admission add cells with warm caches to the plain ones."""
    extra = [("misprofile", False)] * misprofile + [("failure", False)] * failures
    extra += [("none", True)] * admission
    cells = []
    for cluster in clusters:
        for trace in traces:
            for load in loads:
                cells += [Cell(cluster, trace, load, warm) for warm in warmth]
                cells += [Cell(cluster, trace, load, True, *kind) for kind in extra]
    return cells


def default_policies() -> tuple[str, ...]:
    """Ours, every peer's, and the tuned one."""
    return (*OURS, *(name for name in BASELINES if name not in _LEFT_OUT), TUNED)


def check(cells: Iterable[Cell], policies: Sequence[str], settings: Settings) -> None:
    """Refuse what cannot run before anything runs.

    Raises:
        ValueError: an unknown policy, cluster, trace or model, or a figure out of range.
    """
    shape = model_shape(settings.model)
    for policy in policies:
        if policy != TUNED:
            policy_named(policy)
    if len(set(policies)) < len(policies):
        raise ValueError(f"a policy is named twice in {', '.join(policies)}")
    seen: set[tuple[str, str]] = set()
    for cell in cells:
        if (cell.cluster, cell.trace) in seen:
            continue
        seen.add((cell.cluster, cell.trace))
        SimulationConfig(
            cluster=cluster_named(cell.cluster),
            workload=_workload(cell.trace),
            shape=shape,
            scheduler=settings.scheduler,
            load=cell.load,
            requests=settings.requests,
        )


def run_grid(
    cells: Sequence[Cell],
    policies: Sequence[str],
    seeds: int,
    store: Store,
    settings: Settings,
    *,
    jobs: int,
    progress: Callable[[Progress], None],
) -> list[dict[str, Any]]:
    """Run what is missing and return all rows, in order of cell, policy and seed."""
    tuned = TUNED in policies
    tuning = [
        Run(cell, dynamo_with(credit), TUNING_SEED, tuning=True)
        for cell in cells
        if tuned
        for credit in CREDITS
    ]
    plain = [
        Run(cell, policy, seed)
        for cell in cells
        for seed in range(seeds)
        for policy in policies
        if policy != TUNED
    ]
    count = len(tuning) + len(plain) + len(cells) * seeds * tuned
    meter = _Meter(count, progress)
    _run_missing(sorted(tuning + plain, key=_order), store, settings, jobs, meter)
    chosen = {cell: best_credit(cell, store) for cell in cells} if tuned else {}
    _run_missing(
        [Run(cell, chosen[cell], seed) for cell in chosen for seed in range(seeds)],
        store, settings, jobs, meter,
    )  # fmt: skip
    rows = []
    for cell in cells:
        for policy in policies:
            for seed in range(seeds):
                row = store.find(Run(cell, chosen[cell] if policy == TUNED else policy, seed))
                assert row is not None
                rows.append({**row, "policy": policy, "spec": row["policy"]})
    return rows


def best_credit(cell: Cell, store: Store) -> str:
    """The host credit with the least p99 TTFT on the tuning seed; the default where none ended.

    A run in which nothing was served has no p99 and is never best.
    """
    best = ("dynamo", float("inf"))
    for credit in CREDITS:
        policy = dynamo_with(credit)
        row = store.find(Run(cell, policy, TUNING_SEED, tuning=True))
        p99 = row["ttft_s"]["p99"] if row is not None else None
        if p99 is not None and p99 < best[1]:
            best = (policy, p99)
    return best[0]


def dynamo_with(credit: float) -> str:
    """Dynamo's cost with this host credit; by its plain name if that is the default."""
    default = parameters("dynamo")["host_credit"]
    return "dynamo" if credit == default else f"dynamo:host_credit={credit:g}"


def _order(run: Run) -> tuple[str, str, float, bool, str, bool, int]:
    """Runs of the same traffic one after the other: it is built once per process."""
    cell = run.cell
    return (cell.trace, cell.cluster, cell.load, cell.warm, cell.faults, cell.admission, run.seed)


class _Meter:
    """Counts finished runs and guesses the rest by those that were really run."""

    def __init__(self, total: int, tell: Callable[[Progress], None]) -> None:
        self._total, self._tell = total, tell
        self._done = self._ran = 0
        self._start_s = time.monotonic()

    def skip(self, runs: int) -> None:
        self._done += runs

    def step(self, run: Run) -> None:
        self._done += 1
        self._ran += 1
        each_s = (time.monotonic() - self._start_s) / self._ran
        left = self._total - self._done
        last = f"{run.cell.name} {run.policy} seed {run.seed}"
        self._tell(Progress(self._done, self._total, each_s * left, last))


def _run_missing(
    runs: Sequence[Run], store: Store, settings: Settings, jobs: int, meter: _Meter
) -> None:
    missing = [run for run in dict.fromkeys(runs) if store.find(run) is None]
    meter.skip(len(runs) - len(missing))
    if not missing:
        return
    if jobs == 1:
        for run in missing:
            store.add(run, simulated(run, settings))
            meter.step(run)
        return
    # More threads than cores would only hinder each other. Children inherit the environment.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    queue = iter(missing)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        under_way: dict[Future[dict[str, Any]], Run] = {}
        try:
            while True:
                # Little is submitted ahead, so that an interrupt leaves little to wait for.
                for ahead in islice(queue, jobs + 1 - len(under_way)):
                    under_way[pool.submit(simulated, ahead, settings)] = ahead
                if not under_way:
                    return
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    run = under_way.pop(future)
                    store.add(run, future.result())
                    meter.step(run)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def simulated(run: Run, settings: Settings) -> dict[str, Any]:
    """Simulate one run: its summary, with the cell's facts beside it."""
    cell = run.cell
    if run.tuning:
        settings = replace(settings, requests=max(settings.requests // _TUNING_SHARE, 1))
    traffic, base = _traffic(cell.cluster, cell.trace, cell.load, cell.warm, run.seed, settings)
    config = replace(
        base,
        policy=run.policy,
        faults=faults_of(cell, base, run.seed),
        admission=Admission() if cell.admission else None,
    )
    start_s = time.perf_counter()
    outcome = simulate(config, traffic=traffic, timer=time.perf_counter)
    wall_s = time.perf_counter() - start_s
    return {
        **outcome.summary(),
        **{k: v for k, v in asdict(cell).items() if k not in ("cluster", "trace")},
        "cluster": cell.cluster,
        "trace": cell.trace,
        "sent": settings.requests,
        "throughput_rps": throughput_rps(outcome),
        "wall_s": wall_s,
    }


@lru_cache(maxsize=8)
def _workload(trace: str) -> Workload:
    return workload_named(trace)


@lru_cache(maxsize=64)
def _capacity_rps(cluster: str, trace: str, model: str) -> float:
    return capacity_rps(_workload(trace), cluster_named(cluster).nodes, model_shape(model))


@lru_cache(maxsize=1)
def _traffic(
    cluster: str, trace: str, load: float, warm: bool, seed: int, settings: Settings
) -> tuple[Traffic, SimulationConfig]:
    config = SimulationConfig(
        cluster=cluster_named(cluster),
        workload=_workload(trace),
        shape=model_shape(settings.model),
        scheduler=settings.scheduler,
        load=load,
        capacity_rps=_capacity_rps(cluster, trace, settings.model),
        requests=settings.requests,
        seed=seed,
        warm=warm,
    )
    return traffic_of(config), config


def faults_of(cell: Cell, config: SimulationConfig, seed: int) -> Faults:
    """What goes wrong in a cell: noise always, and what its name says."""
    nodes = len(config.cluster.nodes)
    if cell.faults == "misprofile":
        # Small clusters have few wrong nodes: let seeds take turns in what is wrong first.
        resources = RESOURCES[::-1] if seed % 2 == 0 else RESOURCES
        wrong = misprofiled_third(nodes, resources, _MISPROFILE_FACTOR, seed)
        return Faults(misprofiles=wrong)
    if cell.faults == "failure":
        assert config.load is not None and config.capacity_rps is not None
        horizon_s = config.requests / (config.load * config.capacity_rps)
        count = min(max(nodes // _FAILED_SHARE, 1), nodes - 1)
        down_s = _DOWN_SHARE * horizon_s
        return Faults(failures=drawn_failures(nodes, count, horizon_s, down_s, seed))
    return Faults()


def throughput_rps(outcome: Outcome) -> float:
    """Requests finished per second between the first and the last measured arrival."""
    r = outcome.records
    arrivals = r.arrival_s[r.measured]
    start_s, end_s = float(arrivals.min()), float(arrivals.max())
    if end_s <= start_s:
        return 0.0
    ended = r.arrival_s + r.e2e_s
    return float(((ended > start_s) & (ended <= end_s)).sum()) / (end_s - start_s)


def fingerprint(run: Run, settings: Settings) -> str:
    """Of the settings, a trace or cluster file's content, and the code that this run executes."""
    digest = hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode())
    digest.update(_code(run.policy.partition(":")[0]).encode())
    for name in (run.cell.trace, run.cell.cluster):
        digest.update(_content(name).encode())
    return digest.hexdigest()[:12]


@lru_cache(maxsize=64)
def _content(name: str) -> str:
    path = Path(name)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else name


@lru_cache(maxsize=64)
def _code(policy: str) -> str:
    """Hash of the sources; those of other policies than this one left out."""
    digest = hashlib.sha256()
    # A baseline comes in through its entry point, which no import shows.
    baselines = () if policy in OURS else ("benchmarks.baselines.routing.catalogue",)
    for path in source_closure(("simulator.run", "router.policy", *baselines)):
        if path.parts[-2:] == ("router", "prices.py") and policy != "priced":
            continue
        digest.update(path.read_bytes())
    return digest.hexdigest()
