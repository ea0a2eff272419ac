"""`kappa bench soak`: mixed load with random faults, and what every process kept of it.

Starts a cluster of emulated engines behind the real Serve, ingress and router. The baseline is the
cluster as it started, its workers fresh; after the load every worker is killed and comes back
empty, so that index and descriptors have one state to return to. The ingress and Serve's controller
are left alone in between: a process that starts anew has no slope. Memory and descriptors of every
process, blocks in the index and reservations are sampled over HTTP and from the kernel, so that
sampling changes nothing of what is sampled. Writes `soak.json` (every sample); the exit code is 1
if a request was lost, a process grew, or something was left behind.

A slope is evaluated by the upper end of its 95% confidence interval, so that noise speaks against
us. Samples of one process depend on those before them; their number is discounted for that by their
lag-1 correlation.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from benchmarks.faults.actions import action_for
from benchmarks.faults.catalogue import FAULTS
from benchmarks.faults.evaluation import Observed
from benchmarks.faults.processes import kill
from benchmarks.faults.started import EMULATED, started
from benchmarks.faults.target import FaultsError, Target, aside
from benchmarks.faults.traffic import Mix, Traffic
from benchmarks.harness import Json, note, publish, result, save_json

SPARED = ("ingress_killed", "controller_killed", "ingress_clock_forward", "ingress_clock_back")
MOST_MB_PER_HOUR = 20.0
JUDGED_SHARE = 2.0 / 3.0
_LEAST_SAMPLES = 8
_HOUR_S = 3600.0
_LASTS_S = 10.0
_BACK_S = 240.0
_SETTLE_S = 10.0
_STEEPEST = 8


def soak(
    minutes: Annotated[float, typer.Option(min=1.0, help="Of load.")] = 60.0,
    pause: Annotated[float, typer.Option(min=1.0, help="Mean seconds between faults.")] = 45.0,
    clients: Annotated[int, typer.Option(min=1, help="That ask at the same time.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of load and faults.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for soak.json.")] = Path("soak"),
    json_output: Json = False,
) -> None:
    """Keep a cluster busy, inject faults at random, and see whether anything grows or is left."""
    survivors: list[str] = []
    plan = Plan(minutes, pause, max(1.0, min(10.0, minutes)), seed)
    mix = Mix(clients=clients, words=200, pause_s=0.05)
    try:
        with tempfile.TemporaryDirectory(prefix="kappa-soak-") as folder:
            note("starting a cluster of emulated engines")
            with started(Path(folder), EMULATED, survivors) as target:
                done = asyncio.run(run(target, plan, mix))
    except FaultsError as error:
        note(str(error))
        raise typer.Exit(1) from None
    kept = done.kept and not survivors
    facts = result(
        seconds=done.seconds, requests=done.requests, lost=done.lost,
        streams_cut=done.streams_cut, streams_cut_untold=done.streams_cut_untold,
        faults=done.faults, slopes=[{**asdict(slope), "kept": slope.kept} for slope in done.slopes],
        left_behind=done.left_behind, survivors=survivors, kept=kept,
    )  # fmt: skip
    samples = [asdict(sample) for sample in done.samples]
    save_json({**facts, "samples": samples}, out / "soak.json")
    publish(facts, lambda console: _show(facts, console), json_output=json_output)
    if not kept:
        raise typer.Exit(1)


def _show(facts: dict[str, Any], console: Console) -> None:
    console.print(
        f"{facts['requests']} requests in {facts['seconds']:.0f} s, {len(facts['faults'])} "
        f"faults: {facts['lost']} lost, {facts['streams_cut']} streams cut, "
        f"{facts['streams_cut_untold']} of them without an error event"
    )
    for slope in facts["slopes"][:_STEEPEST]:
        console.print(
            f"  {slope['role']:<10} {slope['pid']:>7}  {slope['mb_per_hour']:+9.1f} MB/h, "
            f"at most {slope['upper_mb_per_hour']:+9.1f} (limit {MOST_MB_PER_HOUR:g})"
        )
    for line in (*facts["left_behind"], *facts["survivors"]):
        console.print(f"[red]  {line}[/red]")
    console.print("kept" if facts["kept"] else "[red]not kept[/red]")


@dataclass(frozen=True, slots=True)
class Held:
    """Of one process at one moment."""

    role: str
    rss_bytes: int
    fds: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One look. t_s: since the start; index_blocks and reservations: -1 while nobody answers."""

    t_s: float
    index_blocks: int
    reservations: int
    processes: dict[int, Held]


def look(target: Target, start_s: float) -> Sample:
    processes = {p.pid: Held(p.role, p.rss_bytes, p.fds) for p in target.family.members()}
    return Sample(
        time.monotonic() - start_s,
        int(target.metric("kappa_index_blocks")),
        target.reservations(),
        processes,
    )


class Sampler:
    """Looks every so many seconds until it is stopped; use as an asynchronous context manager.

    Raises:
        FaultsError: at the end, where a look failed: what came before it would pass for all.
    """

    def __init__(self, target: Target, every_s: float, start_s: float) -> None:
        self.samples: list[Sample] = []
        self._target, self._every_s, self._start_s = target, every_s, start_s

    async def __aenter__(self) -> Sampler:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        (ended,) = await asyncio.gather(self._task, return_exceptions=True)
        if isinstance(ended, Exception):
            raise FaultsError(f"the cluster could not be looked at: {ended!r}") from ended

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sample = await loop.run_in_executor(None, look, self._target, self._start_s)
            self.samples.append(sample)
            await asyncio.sleep(self._every_s)


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth of one process' memory, in MB (1e6 bytes) an hour; upper: of its 95% interval."""

    pid: int
    role: str
    samples: int
    mb_per_hour: float
    upper_mb_per_hour: float
    last_mb: float

    @property
    def kept(self) -> bool:
        """Whether it surely grows by less than the limit."""
        return self.upper_mb_per_hour < MOST_MB_PER_HOUR


def slope_of(times_s: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Least-squares slope per second, and the upper end of its 95% interval.

    Raises:
        ValueError: fewer than 8 samples, or all at one time.
    """
    # Half a second to import: only where it is used, or every command would wait for it.
    from scipy import stats

    count = len(times_s)
    if count < _LEAST_SAMPLES:
        raise ValueError(f"{count} samples say nothing of a slope: take {_LEAST_SAMPLES} or more")
    t, y = np.asarray(times_s, dtype=float), np.asarray(values, dtype=float)
    t = t - t.mean()
    spread = float(t @ t)
    if spread == 0:
        raise ValueError("all samples are of one moment")
    slope = float(t @ y) / spread
    rest = y - y.mean() - slope * t
    noise = float(rest @ rest)
    if noise <= 1e-12 * max(float(y @ y), 1.0):
        return slope, slope
    correlation = max(float(rest[1:] @ rest[:-1]) / noise, 0.0)
    independent = max(count * (1 - correlation) / (1 + correlation), 3.0)
    error = math.sqrt(noise / (count - 2) / spread * count / independent)
    return slope, slope + float(stats.t.ppf(0.975, independent - 2)) * error


def slopes(samples: Sequence[Sample]) -> list[Slope]:
    """Of every process that lived through the judged last part; steepest first."""
    if not samples:
        return []
    end_s = samples[-1].t_s
    judged = [s for s in samples if s.t_s >= (1 - JUDGED_SHARE) * end_s]
    through = set.intersection(*(set(s.processes) for s in judged))
    found = []
    for pid in through:
        values = [s.processes[pid].rss_bytes / 1e6 for s in judged]
        try:
            slope, upper = slope_of([s.t_s for s in judged], values)
        except ValueError:
            continue
        role = judged[-1].processes[pid].role
        found.append(Slope(pid, role, len(judged), slope * _HOUR_S, upper * _HOUR_S, values[-1]))
    return sorted(found, key=lambda s: -s.upper_mb_per_hour)


def left_behind(before: Sample, after: Sample) -> list[str]:
    """What is not exactly as it was, in words: reservations, index, descriptors of each process
    that is there both times."""
    found = []
    for name in ("reservations", "index_blocks"):
        was, now = getattr(before, name), getattr(after, name)
        if was < 0 or now < 0:
            found.append(f"{name}: not known, as nobody answered")
        elif was != now:
            found.append(f"{name}: {was} before, {now} after")
    for pid in sorted(set(before.processes) & set(after.processes)):
        was, now = before.processes[pid].fds, after.processes[pid].fds
        if was != now:
            found.append(f"descriptors of {before.processes[pid].role} {pid}: {was}, then {now}")
    return found


@dataclass(frozen=True, slots=True)
class Plan:
    """minutes: of load; pause_s: mean time between two faults; sample_s: between two looks."""

    minutes: float
    pause_s: float = 45.0
    sample_s: float = 5.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SoakResult:
    """What came of it. faults: (seconds since the start, name, node)."""

    seconds: float
    requests: int
    lost: int
    streams_cut: int
    streams_cut_untold: int
    faults: tuple[tuple[float, str, str], ...]
    slopes: tuple[Slope, ...]
    left_behind: tuple[str, ...]
    samples: tuple[Sample, ...]

    @property
    def kept(self) -> bool:
        """Whether nothing was lost, nothing grew and nothing was left; without slopes who knows."""
        steady = bool(self.slopes) and all(slope.kept for slope in self.slopes)
        return steady and not (self.lost or self.left_behind or self.streams_cut_untold)


async def run(target: Target, plan: Plan, mix: Mix) -> SoakResult:
    """Run it.

    Raises:
        FaultsError: the cluster did not come to its idle state.
    """
    await asyncio.sleep(_SETTLE_S)
    before: Sample = await aside(lambda: look(target, time.monotonic()))
    start_s = time.monotonic()
    done: list[tuple[float, str, str]] = []
    async with (
        Sampler(target, plan.sample_s, start_s) as sampler,
        Traffic(target.url, target.model, mix, plan.seed + 1, target.headers) as traffic,
    ):
        await _inject(target, plan, start_s, done)
        await traffic.settle()
    after = await _emptied(target)
    return _result(traffic.seen, sampler.samples, done, before, after, time.monotonic() - start_s)


async def _inject(
    target: Target, plan: Plan, start_s: float, done: list[tuple[float, str, str]]
) -> None:
    """Faults at random until the time is up; each is healed before the next."""
    rng = np.random.default_rng(plan.seed)
    faults = [f for f in FAULTS if f.engine == "emulated" and f.name not in SPARED]
    end_s = start_s + 60.0 * plan.minutes
    turn = 0
    while True:
        pause_s = float(rng.exponential(plan.pause_s))
        if time.monotonic() + pause_s + _LASTS_S > end_s:
            await asyncio.sleep(max(end_s - time.monotonic(), 0.0))
            return
        await asyncio.sleep(pause_s)
        fault = faults[int(rng.integers(len(faults)))]
        turn += 1
        try:
            action = await aside(partial(action_for, fault, target, turn))
        except FaultsError:
            continue  # its victim is on the way back from the last one
        done.append((time.monotonic() - start_s, fault.name, action.node))
        note(f"{done[-1][0]:6.0f} s  {fault.name} {action.node}")
        await aside(action.do)
        try:
            await asyncio.sleep(min(fault.lasts_s or 1.0, _LASTS_S))
        finally:
            await aside(action.heal)


async def _emptied(target: Target) -> Sample:
    """Every worker anew and idle; what is held then."""
    note("every worker starts anew")
    rows = await aside(target.nodes)
    old = {str(row["worker"]) for row in rows}
    await aside(lambda: kill([target.pid(worker) for worker in old]))

    def back() -> bool:
        now = target.nodes()
        return len(now) == len(rows) and not old & {str(row["worker"]) for row in now}

    if not await aside(lambda: target.until(back, _BACK_S)):
        raise FaultsError(f"not all of {len(rows)} workers were back within {_BACK_S:g} s")
    await asyncio.sleep(_SETTLE_S)
    sample: Sample = await aside(lambda: look(target, time.monotonic()))
    return sample


def _result(
    seen: list[Observed], samples: list[Sample], done: list[tuple[float, str, str]], before: Sample,
    after: Sample, seconds: float,
) -> SoakResult:  # fmt: skip
    cut = [r for r in seen if r.streamed and not r.ok]
    # An answer that refuses is no stream that had begun.
    begun = [r for r in cut if r.status == 200 and r.first_s is not None]
    lost = [r for r in seen if not r.ok and r not in begun]
    return SoakResult(
        seconds, len(seen), len(lost), len(begun), sum(not r.announced for r in begun), tuple(done),
        tuple(slopes(samples)), tuple(left_behind(before, after)), tuple(samples),
    )  # fmt: skip
