"""`kappa bench route`: `kappa route` before servers that are not ours, against plain balancers.

The servers are EMULATED, or with `--real FILE` the backends of a file of `kappa route`, which run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from kappa.host import free_port
from kappa.settings.front import load_front_settings
from kappa_benchmarks.harness import Json, names, note, publish, quantile, result, spread, table
from kappa_benchmarks.harness import usage_errors as faults
from kappa_benchmarks.serving.client import served_model
from kappa_benchmarks.serving.processes import until_served
from kappa_deploy.commands.route_report import facts_of
from kappa_loadtest.client import Endpoint, EndpointSettings, Prepared
from kappa_loadtest.run_folder import RequestRecord
from kappa_router.rollout_journal import read_journal
from kappa_workload.catalogue import workload_named
from kappa_workload.prompts import prompt_tokens
from kappa_workload.replay import expand
from kappa_workload.scaling import scaled
from kappa_workload.shapes import SessionShape, TurnShape, Workload

ARMS = ("round-robin", "least-connections", "prefix-hash", "on")
# Of the emulated servers: microseconds of the link for a token, and the catalogue's node that it is
# declared as. Every constant of that node is wrong for it.
_SERVERS = ((10.0, "gh200-c2c"), (120.0, "a100-pcie4"))
EMULATED = "kappa_benchmarks.serving.route_backend"
HOST = "127.0.0.1"
_KAPPA = "from kappa_deploy.cli import app; app()"
_START_S, _STOP_S = 60.0, 10.0
_BATCH = 50
_EARLY_SHARE = 5  # of the requests, the first fifth is not measured


Servers = Callable[[], contextlib.AbstractContextManager[Mapping[str, Any]]]
"""Has servers run and gives the settings of `kappa route` before them."""


@dataclass(frozen=True, slots=True)
class RouteLoad:
    """The requests of an arm."""

    requests: int
    # Conversations at a time.
    agents: int
    # Tokens of each answer.
    output: int
    # Multiple of the recorded pauses.
    pause: float
    # Tokens of the trace; a longer prompt ends its conversation.
    most: int
    # By which the workload is scaled, for a real model; 0: emulated servers get texts.
    shrink: int = 0


def prompt_of(turn: TurnShape, block_tokens: int) -> str:
    """A text of four characters a token; turns that share leading blocks share leading text."""
    blocks = "".join(f"{block:016x}" * (block_tokens // 4) for block in turn.blocks.tolist())
    rest = turn.input_tokens - len(turn.blocks) * block_tokens
    return blocks + f"{turn.input_tokens:04x}" * rest


async def play(url: str, load: RouteLoad, workload: Workload, seed: int) -> list[RequestRecord]:
    """Agents go through conversations, each waiting for its answer; the same ones for a seed."""
    left, sessions = itertools.count(), enumerate(expand(workload, seed))
    begun_s = time.monotonic()
    records: list[RequestRecord] = []
    model = served_model(url) if load.shrink else "emulated"
    settings = EndpointSettings(url, model, timeout_s=600.0, ignore_eos=bool(load.shrink))
    salt = secrets.randbits(32)  # No run finds its prompts in caches that earlier runs filled.

    def prepared(session: int, shape: SessionShape, turn: int) -> Prepared:
        size = workload.block_tokens
        if not load.shrink:
            return settings.prepare(prompt_of(shape.turns[turn], size), load.output)
        made = settings.prepare(prompt_tokens(shape, turn, size, salt=salt), load.output)
        # Short prompts that grow do not begin alike as far as a balancer looks: name the talk.
        named = f',"user":"{salt:x}-{session}"}}'.encode()
        return Prepared(made.path, made.body.removesuffix(b"}") + named)

    async def agent(endpoint: Endpoint, number: int) -> None:
        await asyncio.sleep(number * 0.4)
        for session, shape in sessions:
            for place, turn in enumerate(shape.turns):
                if turn.input_tokens * (load.shrink or 1) > load.most:
                    break
                await asyncio.sleep(min(turn.after_s, 10.0) * load.pause)
                if next(left) >= load.requests:
                    return
                record = RequestRecord(f"{session}", 0)
                records.append(record)
                await endpoint.send(prepared(session, shape, place), record)

    async with Endpoint(settings, lambda: time.monotonic() - begun_s) as endpoint:
        await asyncio.gather(*(agent(endpoint, number) for number in range(load.agents)))
    return records


@contextlib.contextmanager
def process(*command: str, log: Path, kill: bool = False) -> Iterator[int]:
    """A Python process that is ended after, at once if `kill`; its id."""
    with log.open("ab") as out:
        child = subprocess.Popen([sys.executable, *command], stdout=out, stderr=out)
        try:
            yield child.pid
        finally:
            if not kill:
                child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0 if kill else _STOP_S)
            child.kill()
            child.wait()


def ready(url: str, workers: int = 0) -> None:
    """Wait until a server answers, and knows `workers` workers; TimeoutError if it does not."""
    if workers:
        until_served(f"{url}/ready", _START_S, good=lambda a: a.json()["workers"] >= workers)
    else:
        until_served(f"{url}/health", _START_S)


@contextlib.contextmanager
def emulated(log: Path, speed: float, *, metrics: bool) -> Iterator[dict[str, Any]]:
    """Two emulated servers: settings of `kappa route` before them."""
    with contextlib.ExitStack() as stack:
        found = []
        for load_us, profile in _SERVERS:
            port = free_port(HOST)
            more = ("--metrics",) if metrics else ()
            stack.enter_context(
                process(
                    "-m", EMULATED, str(port), "--load-token-us",
                    str(load_us), "--speed", str(speed), *more, log=log,
                )
            )  # fmt: skip
            url = f"http://{HOST}:{port}"
            found.append({"url": url, "profile": profile, "host_tokens": 1_000_000})
        for one in found:
            ready(str(one["url"]))
        yield {"backends": found}


@contextlib.contextmanager
def front(
    given: Mapping[str, Any], arm: str, journal: Path, *, kill: bool = False
) -> Iterator[tuple[str, int]]:
    """`kappa route` with settings `given`, its own rule or a present balancer's steering: its url,
    and the id of its process, which is killed after if `kill`."""
    port = free_port(HOST)
    mode = "on" if arm == "on" else "shadow"
    settings = {
        **given, "router": {**given.get("router", {}), "mode": mode},
        "http": {**given.get("http", {}), "port": port}, "journal": str(journal),
        "present": "round-robin" if arm == "on" else arm,
    }  # fmt: skip
    config = journal.with_suffix(".yaml")
    config.write_text(json.dumps(settings))
    url = f"http://{HOST}:{port}"
    command, log = ("-c", _KAPPA, "route", "-c", str(config)), journal.with_suffix(".log")
    with process(*command, log=log, kill=kill) as pid:
        ready(url, len(given["backends"]))
        yield url, pid


def run_arm(
    arm: str, load: RouteLoad, workload: Workload, seed: int, folder: Path, servers: Servers
) -> dict[str, Any]:
    """One arm: figures of the TTFTs that clients saw, in seconds, and how far predictions were off
    in the middle of every 50 answers."""
    journal = folder / f"{arm}-{seed}.jsonl"
    with servers() as given, front(given, arm, journal) as (url, _):
        records = asyncio.run(play(url, load, workload, seed))
    answered = [r for r in records if not r.error and r.first_token_s is not None]
    late = sorted(answered, key=lambda r: r.sent_s)[len(records) // _EARLY_SHARE :]
    ttft_s = [r.first_token_s - r.sent_s for r in late if r.first_token_s is not None]
    found: dict[str, Any] = {
        "arm": arm, "seed": seed, "requests": len(records), "failed": len(records) - len(answered),
        "p50": quantile(ttft_s, 0.5), "mean": statistics.fmean(ttft_s),
        "p99": quantile(ttft_s, 0.99), "lasted_s": max(r.ended_s for r in records),
    }  # fmt: skip
    with journal.open(encoding="utf-8") as lines:
        segments = read_journal(lines, str(journal))
    off = [abs(r.predicted_s / r.ttft_s - 1) for s in segments for r in s.requests]
    found["errors"] = [statistics.median(off[k : k + _BATCH]) for k in range(0, len(off), _BATCH)]
    if arm != "on":
        found["estimated"] = facts_of(segments)["estimated"]
    return found


def route(
    arms: Annotated[str, typer.Option(help="Of round-robin,least-connections,...")] = ",".join(
        ARMS
    ),
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    requests: Annotated[int, typer.Option(min=20, help="Of an arm.")] = 400,
    agents: Annotated[int, typer.Option(min=1, help="Conversations at a time.")] = 10,
    trace: Annotated[str, typer.Option(help="Workload by name or file.")] = "miniswe",
    output: Annotated[int, typer.Option(min=1, help="Tokens an answer.")] = 16,
    pause: Annotated[float, typer.Option(min=0, help="Multiple of recorded pauses.")] = 1.0,
    most: Annotated[int, typer.Option(min=64, help="Tokens of a prompt.")] = 20_000,
    speed: Annotated[float, typer.Option(min=0.01, help="Of the emulated engines.")] = 1.0,
    metrics: Annotated[
        bool, typer.Option(help="The servers tell the size of their cache, not only usage.")
    ] = False,
    real: Annotated[
        Path | None, typer.Option(help="Your servers: a file of kappa route; none is emulated.")
    ] = None,
    shrink: Annotated[int, typer.Option(min=1, help="Divides the trace's tokens, --real.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the result here, too.")] = None,
    json_output: Json = False,
) -> None:
    """TTFT behind kappa route and behind plain balancers, on EMULATED servers or your own, in real
    time; and how near the shadow's estimate came to what turning it on then showed."""
    with faults():
        chosen, workload = names(arms, ARMS, "--arms"), workload_named(trace)
        given = _checked(real) if real else {}
        workload = scaled(workload, Fraction(1, shrink)) if real else workload
    load = RouteLoad(requests, agents, output, pause, most, shrink if real else 0)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        servers = partial(emulated, folder / "servers.log", speed, metrics=metrics)
        for seed in range(seeds):
            # In turns, so that drift hits all arms.
            for arm in chosen if seed % 2 == 0 else reversed(chosen):
                at = (lambda: contextlib.nullcontext(given)) if real else servers
                rows.append(run_arm(arm, load, workload, seed, folder, at))
                note(_line(rows[-1]))
    facts = result(rows=rows, emulated=not real, load=asdict(load), **_summary(rows))
    publish(facts, lambda console: show(facts, console), json_output=json_output, out=out,
            remark="real servers" if real else "EMULATED servers")  # fmt: skip


def _checked(file: Path) -> dict[str, Any]:
    """The content of a file of `kappa route`; ValueError for a fault in it."""
    load_front_settings(file)
    given: dict[str, Any] = yaml.safe_load(file.read_text())
    return given


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['arm']} seed {row['seed']}: {row['requests']} requests in {row['lasted_s']:.0f} s, "
        f"{row['failed']} failed, TTFT p50 {row['p50']:.3f} mean {row['mean']:.3f} "
        f"p99 {row['p99']:.3f} s"
    )


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By arm: figures over seeds, ours as a share of them, estimates as a share of the truth."""
    by_arm: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        by_arm.setdefault(row["arm"], {})[row["seed"]] = row
    ours, found = by_arm.get("on", {}), dict[str, Any]()
    for arm, runs in by_arm.items():
        facts: dict[str, Any] = {
            name: spread([r[name] for r in runs.values()]) for name in _FIGURES
        }
        found[arm] = facts
        pairs = [(r, ours[seed]) for seed, r in runs.items() if seed in ours and arm != "on"]
        if not pairs:
            continue
        facts["on_over_it"] = {n: spread([o[n] / r[n] for r, o in pairs]) for n in _FIGURES}
        facts["estimate_over_truth"] = {
            n: spread([
                r["estimated"]["ttft_s"]["median" if n == "p50" else n]["saved_s"] / (r[n] - o[n])
                for r, o in pairs
            ])
            for n in _FIGURES
        }  # fmt: skip
    return {"arms": found}


_FIGURES = ("p50", "mean", "p99")


def show(facts: Mapping[str, Any], console: Console) -> None:
    """A row per arm."""

    def cell(found: Mapping[str, float] | None) -> str:
        if found is None:
            return ""
        return f"{found['median']:.3g} ({found['least']:.3g} to {found['most']:.3g})"

    rows = [
        [
            arm,
            *(cell(found[name]) for name in _FIGURES),
            cell(found.get("on_over_it", {}).get("p99")),
            cell(found.get("estimate_over_truth", {}).get("mean")),
        ]
        for arm, found in facts["arms"].items()
    ]
    columns = ("arm", "p50, s", "mean, s", "p99, s", "on / it, p99", "estimate / truth, mean")
    console.print(table("TTFT; median over seeds (least to most)", columns, rows))
