"""A grid of simulated runs on every core: cells x policies x seeds, resumable.

A cell is a cluster, a trace, a load, and the state of caches and faults. Each finished run is one
line of `rows.jsonl`, on disk before the next is counted; a run with its key there is not run
again. The key holds a fingerprint of what can change its outcome: the settings, a trace file's
content and the source of the packages that a simulated run executes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import islice, product
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from kappa.model import ModelShape
from kappa.shapes import model_shape
from kappa_benchmarks.baselines.routing.catalogue import BASELINES
from kappa_benchmarks.harness import append_line, note, read_lines
from kappa_router.policy import policy_named
from kappa_scheduler.catalogue import rule_named
from kappa_simulator.capacity import capacity_rps
from kappa_simulator.clusters import cluster_named, model_served
from kappa_simulator.faults import RESOURCES, Faults, drawn_failures, misprofiled_third
from kappa_simulator.run import SimulationConfig, simulate, traffic_of
from kappa_simulator.traffic import Traffic
from kappa_workload.catalogue import workload_named
from kappa_workload.shapes import Workload

Row = dict[str, Any]
Task = TypeVar("Task", bound=tuple[Any, ...])
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes; one per core if not given.")]
Requests = Annotated[
    int, typer.Option(min=10, help="Requests a run; the first fifth is not measured.")
]

OURS = ("priced", "ttft", "threshold", "threshold_literal", "least_backlog")
"""Policies that are not another system's."""
_LEFT_OUT = ("sticky",)  # a reference point, no router's default

_MISPROFILE_FACTOR = 3.0
_FAILED_SHARE = 8  # one node in eight fails
_DOWN_SHARE = 0.1  # of the run
_ROOT = Path(__file__).parents[3]
_SOURCES = (
    "kappa",
    "router",
    "scheduler",
    "simulator",
    "workload",
    "benchmarks/kappa_benchmarks/baselines",
)


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """A setting on which all policies are compared."""

    cluster: str
    trace: str
    # Share of the capacity bound.
    load: float
    # Whether host tiers hold documents and histories at the start.
    warm: bool = True
    # "none", "misprofile" or "failure".
    faults: str = "none"
    # Whether late requests are rejected.
    admission: bool = False

    @property
    def name(self) -> str:
        return self.words.replace(" ", "_")

    @property
    def words(self) -> str:
        """A cell in words."""
        parts = [Path(self.cluster).stem, Path(self.trace).name, f"{self.load:g}"]
        parts.append("warm" if self.warm else "cold")
        if self.faults != "none":
            parts.append(self.faults)
        if self.admission:
            parts.append("admission")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that all runs of a grid share."""

    requests: int = 25_000
    # Empty: that of the cluster's tables (`model_served`).
    model: str = ""
    scheduler: str = "fcfs"


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation."""

    cell: Cell
    # By name; behind an @ the nodes' rule, as in priced@fair, where it is not the settings'.
    policy: str
    seed: int

    def key(self, settings: Settings) -> str:
        """The run's name, and a fingerprint of all that its outcome depends on."""
        digest = hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode())
        for text in (_sources(), _content(self.cell.trace), _content(self.cell.cluster)):
            digest.update(text.encode())
        name = f"run|{self.cell.name}|{self.policy}|{self.seed}"
        return f"{name}|{digest.hexdigest()[:12]}"


def reported_rows(directory: Path) -> list[Row]:
    """The latest row of every run in a directory that is to be reported.

    Raises:
        ValueError: there is no file, or a line is not a row: file, line and remedy are named.
    """
    path = directory / "rows.jsonl"
    if not path.exists():
        raise ValueError(f"{path}: no such file; run the grid into this directory first")
    latest: dict[str, Row] = {}
    for number, row in enumerate(read_lines(path), start=1):
        if "key" not in row:
            raise ValueError(
                f"{path}:{number}: not a finished run; remove the line to run it again"
            )
        latest[row["key"].rpartition("|")[0]] = row
    return list(latest.values())


def policies_of(text: str | None) -> tuple[str, ...]:
    """Policies from a text with commas, or with semicolons where parameters have commas."""
    if text is None:
        return default_policies()
    parts = text.split(";" if ";" in text else ",")
    return tuple(part.strip() for part in parts if part.strip())


def parted(policy: str) -> tuple[str, str]:
    """A policy and, after an @, the rule of the nodes; empty: that of the settings."""
    name, _, rule = policy.partition("@")
    return name, rule


def show_progress(done: int, total: int, left_s: float, last: str) -> None:
    """One line to standard error."""
    note(f"{done}/{total}, {left_s / 60:.1f} min left: {last}")


def default_policies() -> tuple[str, ...]:
    """Ours, and every other system's."""
    return (*OURS, *(name for name in BASELINES if name not in _LEFT_OUT))


def check(cells: Iterable[Cell], policies: Sequence[str], settings: Settings) -> None:
    """Refuse what cannot run before anything runs.

    Raises:
        ValueError: no policy; an unknown policy, cluster, trace or model, or a figure out of range.
    """
    if not policies:
        raise ValueError(f"--policies names none: give some of {', '.join(default_policies())}")
    for policy in policies:
        name, rule = parted(policy)
        policy_named(name)
        rule_named(rule or settings.scheduler)
    if len(set(policies)) < len(policies):
        raise ValueError(f"a policy is named twice in {', '.join(policies)}")
    for cell in {(cell.cluster, cell.trace): cell for cell in cells}.values():
        SimulationConfig(
            cluster=cluster_named(cell.cluster), workload=_workload(cell.trace),
            shape=_shape(cell.cluster, settings.model), scheduler=settings.scheduler,
            load=cell.load, requests=settings.requests,
        )  # fmt: skip


class Grid:
    """Runs a grid into a directory.

    jobs: processes; progress: called after each run with how many are done, of how many (`total`),
    the seconds left, and the run's name.
    """

    def __init__(
        self, directory: Path, settings: Settings, jobs: int,
        progress: Callable[[int, int, float, str], object],
    ) -> None:  # fmt: skip
        self._path, self._settings, self._jobs = directory / "rows.jsonl", settings, jobs
        self._progress = progress
        self._rows = {row["key"]: row for row in read_lines(self._path)}
        self._done = self._ran = self.total = 0
        self._start_s = time.monotonic()

    def run(self, cells: Sequence[Cell], policies: Sequence[str], seeds: int) -> list[Row]:
        """Run the missing runs and return all rows, in order of cell, policy and seed."""
        wanted = [Run(*each) for each in product(cells, policies, range(seeds))]
        self.total = len(wanted)
        return self.rows(wanted)

    def rows(self, runs: Sequence[Run]) -> list[Row]:
        """Run those of `runs` that are missing, and return the row of each."""
        # Runs of the same traffic one after the other: it is built once per process.
        self._run_missing(sorted(runs, key=lambda run: (run.cell.trace, run.cell, run.seed)))
        return [self._rows[run.key(self._settings)] for run in runs]

    def _run_missing(self, runs: Sequence[Run]) -> None:
        missing = [run for run in runs if run.key(self._settings) not in self._rows]
        self._done += len(runs) - len(missing)
        tasks = [(run, self._settings) for run in missing]
        for (run, _), row in in_processes(simulated, tasks, self._jobs):
            self._finished(run, row)

    def _finished(self, run: Run, row: Row) -> None:
        """Keep a run, on disk before it counts."""
        row = {"key": run.key(self._settings), **row}
        append_line(self._path, row)
        self._rows[row["key"]] = row
        self._done += 1
        self._ran += 1
        each_s = (time.monotonic() - self._start_s) / self._ran
        name = f"{run.cell.name} {run.policy} seed {run.seed}"
        self._progress(self._done, self.total, each_s * (self.total - self._done), name)


def in_processes(
    call: Callable[..., Row], tasks: Sequence[Task], jobs: int
) -> Iterator[tuple[Task, Row]]:
    """Each task with `call(*task)`, as they are done, in `jobs` processes; if that is 1, in this
    one."""
    if jobs == 1 or not tasks:
        yield from ((task, call(*task)) for task in tasks)
        return
    # More threads than cores would only hinder each other. Children inherit the environment.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    queue = iter(tasks)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running: dict[Future[Row], Task] = {}
        try:
            while True:
                # Little is submitted ahead, so that an interrupt leaves little to wait for.
                for task in islice(queue, jobs + 1 - len(running)):
                    running[pool.submit(call, *task)] = task
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def simulated(run: Run, settings: Settings) -> Row:
    """Simulate one run: its summary, with the cell's facts beside it."""
    cell = run.cell
    plain = replace(cell, faults="none", admission=False)
    traffic, base = traffic_in(plain, run.seed, settings)
    policy, scheduler = parted(run.policy)
    config = replace(
        base, policy=policy, scheduler=scheduler or settings.scheduler,
        faults=_faults(cell, base, run.seed), admission=cell.admission,
    )  # fmt: skip
    start_s = time.perf_counter()
    outcome = simulate(config, traffic=traffic, timer=time.perf_counter)
    wall_s = time.perf_counter() - start_s
    return {
        **outcome.summary(), **asdict(cell), "sent": settings.requests,
        "policy": run.policy, "wall_s": wall_s,
    }  # fmt: skip


@lru_cache(maxsize=8)
def _workload(trace: str) -> Workload:
    return workload_named(trace)


@lru_cache(maxsize=64)
def _capacity_rps(cluster: str, trace: str, model: str) -> float:
    return capacity_rps(_workload(trace), cluster_named(cluster).nodes, _shape(cluster, model))


@lru_cache(maxsize=64)
def _shape(cluster: str, model: str) -> ModelShape:
    return model_shape(model or model_served(cluster_named(cluster)))


@lru_cache(maxsize=1)
def traffic_in(cell: Cell, seed: int, settings: Settings) -> tuple[Traffic, SimulationConfig]:
    config = SimulationConfig(
        cluster=cluster_named(cell.cluster), workload=_workload(cell.trace),
        shape=_shape(cell.cluster, settings.model), scheduler=settings.scheduler, load=cell.load,
        capacity_rps=_capacity_rps(cell.cluster, cell.trace, settings.model),
        requests=settings.requests, seed=seed, warm=cell.warm,
    )  # fmt: skip
    return traffic_of(config), config


def _faults(cell: Cell, config: SimulationConfig, seed: int) -> Faults:
    """The faults of a cell: noise always, and those that it names."""
    nodes = len(config.cluster.nodes)
    if cell.faults == "misprofile":
        # Small clusters have few wrong nodes: let seeds alternate in the resource that is wrong.
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


@lru_cache(maxsize=64)
def _content(name: str) -> str:
    path = Path(name)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else name


@lru_cache(maxsize=1)
def _sources() -> str:
    digest = hashlib.sha256()
    for package in _SOURCES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
