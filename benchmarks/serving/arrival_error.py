"""How late the load-test client sends, and what it takes, against a stub that costs nothing to ask.

The client is pinned to one core and plays single requests of a built-in workload at Poisson
arrivals; `stub_endpoint` answers from a process of its own, on the other cores. The
arrival error is the time between when a request was due and when its bytes went out; as a check
from outside, the stub's own times of receipt are compared with the times due, in order.

    python -m benchmarks.serving.arrival_error --rate 1000 --seconds 60 --json
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count, takewhile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import aiohttp
import numpy as np
import typer

from benchmarks.serving.stub_endpoint import MODEL
from loadtest.client import EndpointSettings
from loadtest.feeder import bounded
from loadtest.journal import RECORDS, Journal, read_records
from loadtest.run import play, streams_allowed
from loadtest.runner import DEFAULT_IN_FLIGHT, Counts, RunSettings
from workload.arrivals import poisson
from workload.catalogue import workload_named
from workload.replay import ReplayOptions, ReplaySession, replay_sessions

_STUB_END_S = 10.0
_SAMPLE_S = 0.05
_RSS_AT = (1_000, 10_000, 100_000, 1_000_000)
GOAL_S = 0.010


@contextmanager
def stub(tokens: int, ttft_s: float, gap_s: float, cores: set[int]) -> Iterator[str]:
    """A stub endpoint in a process of its own on these cores; its URL."""
    command = [sys.executable, "-m", "benchmarks.serving.stub_endpoint", "--tokens", str(tokens)]
    command += ["--ttft-s", str(ttft_s), "--gap-s", str(gap_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        if cores:
            os.sched_setaffinity(process.pid, cores)
        assert process.stdout is not None and process.stdin is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the stub endpoint ended with {process.wait()}")
        yield json.loads(line)["url"]
    finally:
        with suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(_STUB_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def single_requests(workload: str, rate: float, seconds: float, seed: int) -> Any:
    """The first turns of a built-in workload, at Poisson arrivals for so long."""
    arrivals = poisson(rate, np.random.default_rng(seed))
    return replay_sessions(
        workload_named(workload),
        arrivals=takewhile(lambda time_s: time_s < seconds, arrivals),
        seed=seed,
        options=ReplayOptions(max_turns=1, salt=seed),
    )


async def measure(url: str, sessions: Iterator[ReplaySession], folder: Path) -> dict[str, Any]:
    """Play `sessions` at a stub and tell errors in seconds, core shares and memory in bytes."""
    counts = Counts()
    rss: dict[str, int] = {}
    began_s: list[float] = []
    sampler: list[asyncio.Task[None]] = []

    def ready(now_s: Callable[[], float]) -> None:
        began_s.append(time.monotonic() - now_s())
        sampler.append(asyncio.create_task(_sample(counts, rss)))

    journal = Journal.create(folder, {"asked": {}})
    try:
        played = await play(
            EndpointSettings(url, MODEL),
            RunSettings(in_flight=streams_allowed(DEFAULT_IN_FLIGHT)),
            sessions,
            journal,
            counts=counts,
            on_ready=ready,
        )
    finally:
        for task in sampler:
            task.cancel()
        journal.close()
    rss["end"] = rss_bytes()
    rss |= {str(at): rss["end"] for at in _RSS_AT if at <= counts.ended and str(at) not in rss}
    records = list(read_records(folder / RECORDS))
    due_s = np.sort([record.scheduled_s for record in records])
    late_s = np.array([record.sent_s - record.scheduled_s for record in records])
    received_s = np.sort(_received(url)) - began_s[0]
    seen = received_s - due_s if len(received_s) == len(due_s) else np.array([])
    ttft_s = np.array([r.first_token_s - r.sent_s for r in records if r.first_token_s is not None])
    return {
        "requests": len(records),
        "seconds": round(played.elapsed_s, 3),
        "errors": dict(counts.errors),
        "most_in_flight": counts.most_in_flight,
        "held_back": counts.held_back,
        "arrival_error_s": _spread(late_s),
        "received_after_due_s": _spread(seen),
        "ttft_s": _spread(ttft_s),
        "client_cpu_share": round(played.client_cpu_share, 4),
        "rss_bytes": rss,
    }


def rss_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _sample(counts: Counts, rss: dict[str, int]) -> None:
    for after in _RSS_AT:
        while counts.ended < after:
            await asyncio.sleep(_SAMPLE_S)
        rss[str(after)] = rss_bytes()


def _received(url: str) -> list[float]:
    with urllib.request.urlopen(f"{url}/stub/received", timeout=60) as answer:
        times: list[float] = json.loads(answer.read())
        return times


def _spread(values: Any) -> dict[str, float] | None:
    if not len(values):
        return None
    p50, p99, p999 = np.quantile(values, (0.5, 0.99, 0.999))
    told = {"p50": p50, "p99": p99, "p99.9": p999, "max": np.max(values)}
    return {name: round(float(value), 6) for name, value in told.items()}


def report(runs: list[dict[str, Any]], asked: dict[str, Any]) -> dict[str, Any]:
    """All runs, their medians and spreads, and what they were measured on."""
    p99 = [run["arrival_error_s"]["p99"] for run in runs]
    return {
        "what": "client of kappa replay against a stub endpoint (no model): how late it sends",
        "command": "python -m benchmarks.serving.arrival_error "
        + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in asked.items()),
        "machine": {
            "cores": os.cpu_count(),
            "client_cores": sorted(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "aiohttp": aiohttp.__version__,
            "priority": _priority(),
        },
        "goal": {"arrival_error_p99_s": GOAL_S, "met_by": sum(value < GOAL_S for value in p99)},
        "median": {
            "arrival_error_s": {
                name: median(run["arrival_error_s"][name] for run in runs)
                for name in ("p50", "p99", "max")
            },
            "client_cpu_share": median(run["client_cpu_share"] for run in runs),
        },
        "spread": {"arrival_error_p99_s": [min(p99), max(p99)]},
        "runs": runs,
    }


def _priority() -> str:
    """What the kernel gives this session where others work on the same cores."""
    group = Path("/proc/self/autogroup")
    told = group.read_text().strip() if group.exists() else "no autogroup"
    return f"{told}, process nice {os.getpriority(os.PRIO_PROCESS, 0)}"


def main(
    rate: Annotated[float, typer.Option(help="Requests a second, Poisson.")] = 1000.0,
    seconds: Annotated[float, typer.Option(help="How long arrivals go on.")] = 60.0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs, one after the other.")] = 3,
    workload: Annotated[str, typer.Option(help="Whose first turns are sent.")] = "sharegpt",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of every answer of the stub.")] = 4,
    ttft_s: Annotated[float, typer.Option(help="The stub's time to the first token.")] = 0.02,
    gap_s: Annotated[float, typer.Option(help="The stub's time between tokens.")] = 0.01,
    requests: Annotated[int, typer.Option(min=0, help="Stop after so many; 0: never.")] = 0,
    seed: Annotated[int, typer.Option(help="Of arrivals and tokens.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the client of the load test."""
    cores = os.sched_getaffinity(0)
    others = cores - {max(cores)}
    runs = []
    for number in count(seed):
        if number == seed + repeats:
            break
        load_before = os.getloadavg()[0]
        with (
            stub(tokens, ttft_s, gap_s, others) as url,
            tempfile.TemporaryDirectory(prefix="kappa-arrivals-") as folder,
        ):
            os.sched_setaffinity(0, {max(cores)})
            sessions = single_requests(workload, rate, seconds, number)
            run = asyncio.run(
                measure(url, bounded(sessions, None, requests or None), Path(folder) / "run")
            )
        if not run["requests"]:
            raise typer.BadParameter(f"nothing came in {seconds:g} s at {rate:g} requests/s")
        run["load_average_1m"] = {"before": load_before, "after": os.getloadavg()[0]}
        runs.append(run)
    asked = {"rate": rate, "seconds": seconds, "repeats": repeats, "workload": workload}
    asked |= {"tokens": tokens, "ttft_s": ttft_s, "gap_s": gap_s}
    told = report(runs, asked | {"requests": requests, "seed": seed})
    if json_output:
        typer.echo(json.dumps(told))
        return
    error = told["median"]["arrival_error_s"]
    typer.echo(
        f"arrival error at {rate:g} requests/s, median of {repeats}: p50 {error['p50'] * 1e3:.2f}, "
        f"p99 {error['p99'] * 1e3:.2f}, max {error['max'] * 1e3:.2f} ms; client "
        f"{told['median']['client_cpu_share']:.0%} of a core; memory {runs[-1]['rss_bytes']}"
    )


if __name__ == "__main__":
    typer.run(main)
